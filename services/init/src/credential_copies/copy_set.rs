//! Which file each service gets, with which content.

use std::fs;
use std::io;
use std::path::Path;

use keelson_config::{
    ApiFile, ApiTls, Certificates, Config, ControlPlane, EtcdFile, Kubernetes, ServiceName,
};
use keelson_files::{Replacement, remove_if_exists};
use serde_json::Value;

use super::error::CopyError;
use crate::certificates::{self, ClientKubeconfig, UnusedPair};

/// The services that connect to the control plane.
pub(crate) const CONTROL_PLANE_CLIENTS: [ServiceName; 2] = [ServiceName::PodConfig, ServiceName::NodeStatus];

/// A copy to write.
pub(super) struct CredentialCopy {
    pub(super) service: ServiceName,
    pub(super) name: &'static str,
    /// `None`: the copy must not exist.
    pub(super) content: Option<Vec<u8>>,
}

/// The copies to write for the current files, and the errors of the others, whose last valid copies are kept.
#[derive(Default)]
pub(super) struct CopySet {
    pub(super) copies: Vec<CredentialCopy>,
    pub(super) errors: Vec<CopyError>,
    /// Whether a requested certificate is missing.
    pub(super) is_pending: bool,
    /// Whether the bootstrap kubeconfig is in use.
    pub(super) uses_bootstrap: bool,
    /// Why a kubelet's own pair is not used.
    pub(super) unused_pair: Option<String>,
}

impl CopySet {
    fn add(&mut self, readers: &[ServiceName], name: &'static str, content: Option<Vec<u8>>) {
        self.copies.extend(readers.iter().map(|&service| CredentialCopy {
            service,
            name,
            content: content.clone(),
        }));
    }

    fn add_file(
        &mut self,
        readers: &[ServiceName],
        (field, name): (&'static str, &'static str),
        path: Option<&Path>,
    ) {
        match path.map(|path| read(field, path)).transpose() {
            Ok(content) => self.add(readers, name, content),
            Err(error) => self.errors.push(error),
        }
    }

    /// The copies for the current files; `now` in seconds since 1970.
    pub(super) fn of(config: &Config, now: i64) -> Self {
        let mut set = Self::default();
        let (etcd, kubernetes) = match &config.control_plane {
            ControlPlane::None => (None, None),
            ControlPlane::Etcd(etcd) => (Some(etcd), None),
            ControlPlane::Kubernetes(api) => (None, Some(api)),
        };
        for file in EtcdFile::ALL {
            let path = etcd.and_then(|etcd| file.of(etcd));
            set.add_file(&CONTROL_PLANE_CLIENTS, (file.field(), file.copy()), path);
        }
        set.add_kubeconfig(config, kubernetes, now);
        let tls = config.api.tls.as_ref();
        let asked_for = kubernetes.filter(|_| tls.is_some_and(|tls| tls.asked_for));
        let self_signed_pair = tls.filter(|tls| tls.takes_a_kubelets_pair());
        for file in ApiFile::ALL {
            if (asked_for.is_none() && self_signed_pair.is_none()) || file == ApiFile::ClientCa {
                let path = tls.and_then(|tls| file.of(tls));
                set.add_file(&[ServiceName::NodeApi], (file.field(), file.copy()), path);
            }
        }
        set.add_serving(config, asked_for);
        if let Some(tls) = self_signed_pair {
            set.add_kubelets_pair(tls, now);
        }
        set
    }

    /// Adds the pair that a kubelet signed itself on this node, as one file. An unusable pair is ignored.
    fn add_kubelets_pair(&mut self, tls: &ApiTls, now: i64) {
        let (pair, unused_pair) = match certificates::self_signed_pair(tls, now) {
            Ok(pair) => (pair, None),
            Err(UnusedPair::Incomplete { certificate, key }) => {
                return self.errors.push(CopyError::IncompletePair { certificate, key });
            }
            Err(UnusedPair::Unusable(why)) => (None, Some(why)),
        };
        self.unused_pair = unused_pair;
        self.add(&[ServiceName::NodeApi], ApiFile::Cert.copy(), pair.map(String::into_bytes));
        self.add(&[ServiceName::NodeApi], ApiFile::Key.copy(), None);
    }

    fn add_kubeconfig(&mut self, config: &Config, api: Option<&Kubernetes>, now: i64) {
        let (own, bootstrap) =
            match api.map(|api| certificates::client_kubeconfig(config, api, now)).transpose() {
                Ok(Some(ClientKubeconfig::Own(flat))) => (Some(flat), None),
                Ok(Some(ClientKubeconfig::Bootstrap(flat))) => (None, Some(flat)),
                Ok(None) => (None, None),
                Err(error) => return self.errors.push(error.into()),
            };
        self.uses_bootstrap = bootstrap.is_some();
        self.is_pending |= self.uses_bootstrap;
        let bytes = |flat: Value| flat.to_string().into_bytes();
        self.add(&CONTROL_PLANE_CLIENTS, Kubernetes::COPY, own.map(bytes));
        // Only node-status needs it.
        self.add(&[ServiceName::NodeStatus], Certificates::BOOTSTRAP_COPY, bootstrap.map(bytes));
    }

    fn add_serving(&mut self, config: &Config, api: Option<&Kubernetes>) {
        let (pair, error) =
            api.map(|api| certificates::serving(config, &api.certificates)).unwrap_or_default();
        self.errors.extend(error.map(CopyError::Serving));
        let issued = pair.as_ref().filter(|(_, asked_for)| *asked_for);
        self.is_pending |= api.is_some() && issued.is_none();
        let certificates_only = issued.map(|(pair, _)| pair.certificates.clone().into_bytes());
        self.add(&[ServiceName::NodeStatus], Certificates::SERVING_COPY, certificates_only);
        if api.is_some() {
            let whole = pair.map(|(pair, _)| pair.pem().into_bytes());
            self.add(&[ServiceName::NodeApi], ApiFile::Cert.copy(), whole);
            self.add(&[ServiceName::NodeApi], ApiFile::Key.copy(), None);
        }
    }

    /// Writes the copies and adds the errors.
    pub(super) fn write(&mut self, config: &Config) {
        for CredentialCopy { service, name, content } in std::mem::take(&mut self.copies) {
            let path = config.paths.credentials(service).join(name);
            let done = match &content {
                Some(content) => replace(&path, content, config.uid_of(service)),
                None => remove_if_exists(&path),
            };
            self.errors.extend(done.err().map(|source| CopyError::Write { path, source }));
        }
    }
}

fn read(field: &'static str, path: &Path) -> Result<Vec<u8>, CopyError> {
    fs::read(path).map_err(|source| CopyError::Read { path: path.to_owned(), field, source })
}

/// Replaces a file, mode 0400, unless it has this content.
pub(super) fn replace(path: &Path, content: &[u8], uid: Option<u32>) -> io::Result<()> {
    Replacement::new().mode(0o400).owner(uid).write_if_changed(path, content).map(drop)
}
