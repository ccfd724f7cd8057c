//! The files of node-status for its certificates: a request that is not answered yet, and an issued pair that init has not picked
//! up yet. Each is replaced by rename, so that a killed process leaves a complete file. Also reads what init has handed over.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use keelson_config::{CertificateKind, Certificates, Config, CredentialRefusal, Kubernetes, ServiceName};
use keelson_files::{Replacement, create_private_folder};
use keelson_kube_model::base64;
use keelson_node_status_core::certificates::{HeldCertificate, Subject};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::x509;

/// Read by this user only, and on disk before the next step.
const PRIVATE: Replacement<'_> = Replacement::new().mode(0o600).synced();

/// A request that is not answered yet, with its key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PendingRequest {
    /// The name of the CertificateSigningRequest.
    pub(super) name: String,
    /// PEM.
    pub(super) key: String,
    /// The requested subject.
    pub(super) subject: Subject,
    /// Seconds since 1970.
    #[serde(rename = "made")]
    pub(super) created: i64,
}

/// A file could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}; the folder must be writable by the user of node-status", path.display())]
pub(super) struct StoreError {
    path: PathBuf,
    source: io::Error,
}

/// The files of a kind of certificate.
#[derive(Debug)]
pub(super) struct Files {
    kind: CertificateKind,
    pending: PathBuf,
    issued: PathBuf,
    kubeconfig: PathBuf,
    pub(super) bootstrap: PathBuf,
    serving: PathBuf,
}

impl Files {
    pub(super) fn of(config: &Config, api: &Kubernetes, kind: CertificateKind) -> Self {
        let credentials = config.paths.credentials(ServiceName::NodeStatus);
        let requests = config.paths.state(ServiceName::NodeStatus).join("certificate-requests");
        Self {
            kind,
            pending: requests.join(format!("{}.json", kind.word())),
            issued: config.paths.issued_certificates().join(kind.issued()),
            kubeconfig: api.handed_over(&credentials),
            bootstrap: Certificates::bootstrap_copy(&credentials),
            serving: credentials.join(Certificates::SERVING_COPY),
        }
    }

    /// The certificate that init has handed over; `None`: there is none, or it cannot be read.
    pub(super) fn current(&self) -> Option<HeldCertificate> {
        match self.kind {
            CertificateKind::Serving => x509::read_chain(&fs::read(&self.serving).ok()?, true),
            CertificateKind::Client => {
                let kubeconfig: Value = serde_json::from_slice(&fs::read(&self.kubeconfig).ok()?).ok()?;
                // A login program renews its certificate itself, so none is requested.
                if kubeconfig.get(CredentialRefusal::FIELD).is_some() {
                    return None;
                }
                let encoded = kubeconfig["users"][0]["user"]["client-certificate-data"].as_str()?;
                x509::read_chain(&base64::decode(encoded)?, kubeconfig["keelsonStored"] == true)
            }
        }
    }

    /// Whether this node has a kubeconfig for the API server.
    pub(super) fn has_kubeconfig(&self) -> bool {
        self.kubeconfig.exists()
    }

    /// The pair that init has not picked up yet, and its age.
    pub(super) fn issued(&self) -> Option<(HeldCertificate, Duration)> {
        let held = x509::read_chain(&fs::read(&self.issued).ok()?, true)?;
        let since = fs::metadata(&self.issued).and_then(|meta| meta.modified()).ok()?;
        Some((held, SystemTime::now().duration_since(since).unwrap_or_default()))
    }

    /// The request that an earlier run may have left.
    pub(super) fn pending(&self) -> Option<PendingRequest> {
        serde_json::from_slice(&fs::read(&self.pending).ok()?).ok()
    }

    pub(super) fn store_pending(&self, pending: &PendingRequest) -> Result<(), StoreError> {
        let content = serde_json::to_vec(pending).unwrap_or_default();
        write(&self.pending, &content)
    }

    pub(super) fn remove_pending(&self) {
        // A file that cannot be removed is ignored once it is too old.
        let _ = fs::remove_file(&self.pending);
    }

    /// Stores a pair for init to pick up.
    pub(super) fn store_issued(&self, certificates: &str, key: &str) -> Result<(), StoreError> {
        let end = if certificates.ends_with('\n') { "" } else { "\n" };
        write(&self.issued, format!("{certificates}{end}{key}").as_bytes())
    }
}

/// Replaces a file that only this user may read.
fn write(path: &Path, content: &[u8]) -> Result<(), StoreError> {
    let folder = path.parent().map_or(Ok(()), create_private_folder);
    let written = folder.and_then(|()| PRIVATE.write(path, content));
    written.map_err(|source| StoreError { path: path.to_owned(), source })
}
