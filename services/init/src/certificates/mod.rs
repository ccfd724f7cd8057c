//! The certificates that an API server signs for this node (docs/adr/0012-who-makes-and-keeps-certificates.md).
//!
//! node-status creates keys and requests certificates, and leaves the issued pairs in its state folder. init collects them
//! from there, stores them in a kubelet's layout, and copies to each service what it needs.

mod collect;
mod pair;
mod store;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use keelson_config::{ApiTls, CertificateKind, Certificates, Config, CredentialRefusal, Kubernetes};
use keelson_files::{Replacement, Written};
use keelson_init_core::{client_certificates, kubeconfig_for_certificate, set_client_pair};
use serde_json::Value;

use crate::kubeconfig::{KubeconfigFileError, flat_kubeconfig, kubeconfig_document};

pub(crate) use collect::{CollectError, CollectedPair};
use pair::Pair;
use store::Store;
pub(crate) use store::StoreError;

/// The kubeconfig for the API server.
#[derive(Debug)]
pub(crate) enum ClientKubeconfig {
    /// The node's kubeconfig.
    Own(Value),
    /// The bootstrap kubeconfig: the node's has no valid certificate, so node-status requests one.
    Bootstrap(Value),
}

/// The self-contained kubeconfig of a node, or the bootstrap one (node-and-api.md §6.3); `now` in seconds since 1970.
pub(crate) fn client_kubeconfig(
    config: &Config,
    api: &Kubernetes,
    now: i64,
) -> Result<ClientKubeconfig, KubeconfigFileError> {
    let settings = &api.certificates;
    let own = flat_kubeconfig(&config.paths, "--kubeconfig", &api.kubeconfig);
    let Some(bootstrap) = &settings.bootstrap_kubeconfig else {
        let mut own = own?;
        apply_stored_pair(&mut own, settings, now);
        return Ok(ClientKubeconfig::Own(own));
    };
    // An exec plugin that has not answered yet is no reason to request a certificate: its credential is still to come.
    if matches!(own, Err(KubeconfigFileError::Login { .. })) {
        return own.map(ClientKubeconfig::Own);
    }
    if let Ok(mut own) = own {
        if is_from_exec_plugin(&own) {
            return Ok(ClientKubeconfig::Own(own));
        }
        apply_stored_pair(&mut own, settings, now);
        let is_valid = |pem: Vec<u8>| pair::validity(&pem).is_ok_and(|validity| validity.is_valid_at(now));
        if client_certificates(&own).is_some_and(is_valid) {
            return Ok(ClientKubeconfig::Own(own));
        }
    }
    flat_kubeconfig(&config.paths, "--bootstrap-kubeconfig", bootstrap).map(ClientKubeconfig::Bootstrap)
}

/// With rotation, the stored pair overrides the one in the kubeconfig. Marks the kubeconfig if it has the stored pair.
fn apply_stored_pair(flat: &mut Value, settings: &Certificates, now: i64) {
    if is_from_exec_plugin(flat) {
        return;
    }
    let Some(configured) = client_certificates(flat) else { return };
    let stored = Store::new(settings, CertificateKind::Client).current().ok().flatten();
    let Some(stored) = stored.filter(|pair| pair.validity.is_valid_at(now)) else { return };
    let is_configured = Pair::read([configured.as_slice(), stored.key.as_bytes()].concat().as_slice())
        .is_ok_and(|configured| configured.certificates == stored.certificates);
    if settings.rotate && !is_configured {
        set_client_pair(flat, stored.certificates.as_bytes(), stored.key.as_bytes());
    }
    if settings.rotate || is_configured {
        flat[STORED] = true.into();
    }
}

/// Whether the credential is from an exec plugin, which also renews it.
fn is_from_exec_plugin(flat: &Value) -> bool {
    flat.get(CredentialRefusal::FIELD).is_some()
}

/// The field of a copied kubeconfig that says that its certificate was issued on request.
const STORED: &str = "keelsonStored";

/// Writes the kubeconfig for the requested pair, unless it is up to date.
pub(crate) fn write_kubeconfig(api: &Kubernetes) -> Result<(), KubeconfigFileError> {
    let Some(bootstrap) = &api.certificates.bootstrap_kubeconfig else { return Ok(()) };
    let document = kubeconfig_document("--bootstrap-kubeconfig", bootstrap)?;
    let current = api.certificates.current(CertificateKind::Client);
    let text = kubeconfig_for_certificate(&document.root, Path::new(&document.folder), &current)
        .map_err(|source| KubeconfigFileError::Invalid { path: bootstrap.clone(), source })?;
    let path = &api.kubeconfig;
    let write = || -> io::Result<Written> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        Replacement::new().mode(0o600).synced().write_if_changed(path, text.as_bytes())
    };
    match write().map_err(|source| KubeconfigFileError::Write { path: path.clone(), source })? {
        Written::Created | Written::Replaced => {
            tracing::info!(kubeconfig = %path.display(), "wrote the kubeconfig for the requested certificate");
        }
        Written::Unchanged => {}
    }
    Ok(())
}

/// Collects the pairs that node-status left, and repairs interrupted changes. [`CollectedPair::remove`] removes a pair from
/// node-status's folder after it was copied to the services.
pub(crate) fn collect(
    config: &Config,
    api: &Kubernetes,
    now: i64,
) -> (Vec<CollectedPair>, Vec<CollectError>) {
    let (mut collected, mut errors) = (Vec::new(), Vec::new());
    let settings = &api.certificates;
    if !settings.any() {
        return (collected, errors);
    }
    for kind in CertificateKind::ALL {
        let store = Store::new(settings, kind);
        let done = store
            .repair()
            .map_err(CollectError::from)
            .and_then(|()| collect::collect(config, settings, kind, now));
        match done {
            Ok(found) => collected.extend(found),
            Err(error) => errors.push(error),
        }
    }
    (collected, errors)
}

/// The serving pair of the kubelet API: the issued one, or else the configured one, and whether it is the former; `None` if
/// there is none yet. Also returns why an issued pair cannot be used.
pub(crate) fn serving(
    config: &Config,
    settings: &Certificates,
) -> (Option<(Pair, bool)>, Option<StoreError>) {
    let error = match Store::new(settings, CertificateKind::Serving).current() {
        Ok(Some(pair)) => return (Some((pair, true)), None),
        Ok(None) => None,
        Err(error) => Some(error),
    };
    let configured = config.api.tls.as_ref().and_then(|tls| {
        let mut pem = fs::read(tls.cert_file.as_ref()?).ok()?;
        pem.push(b'\n');
        pem.extend(fs::read(tls.key_file.as_ref()?).ok()?);
        Pair::read(&pem).ok()
    });
    (configured.map(|pair| (pair, false)), error)
}

/// Why the pair that a kubelet signed itself is not used.
#[derive(Debug)]
pub(crate) enum UnusedPair {
    /// One of its two files is missing.
    Incomplete { certificate: PathBuf, key: PathBuf },
    /// It is unusable; the message says why. It is not renewed.
    Unusable(String),
}

/// The pair that a kubelet signed itself, as one PEM file (node-and-api.md §6.1); `None` if there is none.
pub(crate) fn self_signed_pair(tls: &ApiTls, now: i64) -> Result<Option<String>, UnusedPair> {
    let [certificate, key] = ApiTls::OF_A_KUBELET.map(|name| tls.cert_dir.join(name));
    let shown = certificate.display();
    let unused_pair = |why: &str| {
        UnusedPair::Unusable(format!(
            "the certificate in {shown} {why}: the agent ignores it and uses its own"
        ))
    };
    let read = |path: &Path| match fs::read(path) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unused_pair(&format!("cannot be used ({}: {error})", path.display()))),
    };
    let (mut pem, own_key) = match (read(&certificate)?, read(&key)?) {
        (None, None) => return Ok(None),
        (Some(pem), Some(own_key)) => (pem, own_key),
        _ => return Err(UnusedPair::Incomplete { certificate, key }),
    };
    pem.push(b'\n');
    pem.extend(own_key);
    let pair = Pair::read(&pem).map_err(|error| unused_pair(&format!("cannot be used ({error})")))?;
    if pair.validity.not_after <= now {
        return Err(unused_pair("has expired"));
    }
    Ok(Some(pair.pem()))
}

/// A self-signed certificate and its key, for tests.
#[cfg(test)]
pub(crate) fn test_pair(from: i64, until: i64) -> (String, String) {
    pair::tests::make_pair("n1", from, until)
}

#[cfg(test)]
mod tests {
    use keelson_config::ControlPlane;
    use serde_json::json;

    use super::pair::tests::make_pair;
    use super::*;
    use crate::credential_copies::CopyError;

    const NOW: i64 = 1_800_000_000;

    struct Scene {
        dir: tempfile::TempDir,
        api: Kubernetes,
    }

    impl Scene {
        fn new(rotate: bool, bootstrap: bool) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let mut api = Kubernetes::of(dir.path().join("kubelet.conf"));
            api.certificates.dir = dir.path().join("pki");
            api.certificates.rotate = rotate;
            api.certificates.bootstrap_kubeconfig = bootstrap.then(|| dir.path().join("bootstrap.conf"));
            let scene = Self { dir, api };
            scene.write("bootstrap.conf", &json!({"token": "abc.def"}));
            scene
        }

        fn write(&self, name: &str, user: &Value) {
            let file = json!({"current-context": "c",
                "clusters": [{"name": "k", "cluster": {"server": "https://h:6443", "certificate-authority": "ca.crt",
                    "insecure-skip-tls-verify": false}}],
                "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                "users": [{"name": "u", "user": user}]});
            fs::write(self.dir.path().join("ca.crt"), make_pair("ca", NOW - 9, NOW + 9).0).unwrap();
            fs::write(self.dir.path().join(name), file.to_string()).unwrap();
        }

        /// Writes a kubeconfig with its own pair, in files next to it; returns the certificates.
        fn own_pair(&self, from: i64, until: i64) -> String {
            let (certificates, key) = make_pair("own", from, until);
            fs::write(self.dir.path().join("own.pem"), format!("{certificates}{key}")).unwrap();
            self.write("kubelet.conf", &json!({"client-certificate": "own.pem", "client-key": "own.pem"}));
            Pair::read(format!("{certificates}{key}").as_bytes()).unwrap().certificates
        }

        fn store(&self, from: i64, until: i64) -> String {
            let (certificates, key) = make_pair("stored", from, until);
            let pair = Pair::read(format!("{certificates}{key}").as_bytes()).unwrap();
            Store::new(&self.api.certificates, CertificateKind::Client).put(&pair, from).unwrap();
            pair.certificates
        }

        /// The certificates in use, and whether they were issued on request; `None`: bootstrap.
        fn client(&self) -> Option<(String, bool)> {
            match client_kubeconfig(&Config::default(), &self.api, NOW).unwrap() {
                ClientKubeconfig::Bootstrap(flat) => {
                    assert_eq!(flat["users"][0]["user"]["token"], "abc.def");
                    None
                }
                ClientKubeconfig::Own(flat) => {
                    let certificates = client_certificates(&flat).unwrap_or_default();
                    let certificates = Pem(&certificates).to_string();
                    Some((certificates, flat[STORED] == true))
                }
            }
        }
    }

    /// Certificates in the format of [`Pair`].
    struct Pem<'a>(&'a [u8]);

    impl std::fmt::Display for Pem<'_> {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(&String::from_utf8_lossy(self.0).replace('\r', ""))
        }
    }

    #[test]
    fn bootstrap_kubeconfig_is_used_without_a_valid_client_certificate() {
        for rotate in [false, true] {
            let scene = Scene::new(rotate, true);
            assert_eq!(scene.client(), None, "there is no kubeconfig");
            scene.write("kubelet.conf", &json!({"token": "t"}));
            assert_eq!(scene.client(), None, "the kubeconfig has no certificate");
            scene.own_pair(NOW - 9, NOW - 1);
            assert_eq!(scene.client(), None, "its certificate has expired");
            let own = scene.own_pair(NOW + 5, NOW + 9);
            assert_eq!(scene.client(), Some((own.clone(), false)), "not_before is ignored");
            fs::remove_file(scene.dir.path().join("bootstrap.conf")).unwrap();
            assert_eq!(scene.client(), Some((own, false)), "kubeadm removes it after a join");
            fs::write(scene.dir.path().join("kubelet.conf"), "clusters: [").unwrap();
            let error = client_kubeconfig(&Config::default(), &scene.api, NOW).unwrap_err();
            let text = keelson_service_kit::status::chain(&error);
            assert!(text.contains("bootstrap.conf that --bootstrap-kubeconfig names"), "{text}");
        }
    }

    #[test]
    fn without_a_bootstrap_kubeconfig_the_kubeconfig_is_used_as_is() {
        let scene = Scene::new(false, false);
        scene.write("kubelet.conf", &json!({"token": "t"}));
        assert!(
            matches!(client_kubeconfig(&Config::default(), &scene.api, NOW).unwrap(), ClientKubeconfig::Own(flat) if flat["users"][0]["user"]["token"] == "t")
        );
        let own = scene.own_pair(NOW - 9, NOW - 1);
        assert_eq!(scene.client(), Some((own, false)), "the API server decides about it");
    }

    #[test]
    fn with_rotation_the_stored_pair_overrides_the_kubeconfigs() {
        for (rotate, expected_stored) in [(true, true), (false, false)] {
            let scene = Scene::new(rotate, true);
            let own = scene.own_pair(NOW - 9, NOW + 9);
            scene.store(NOW - 9, NOW - 1);
            assert_eq!(scene.client(), Some((own.clone(), false)), "an expired pair is not used");
            let stored = scene.store(NOW - 8, NOW + 1);
            let expected = if expected_stored { (stored, true) } else { (own, false) };
            assert_eq!(scene.client(), Some(expected));
        }
    }

    #[test]
    fn the_written_kubeconfig_names_the_requested_client_certificate() {
        use std::os::unix::fs::MetadataExt as _;
        let scene = Scene::new(false, true);
        write_kubeconfig(&scene.api).unwrap();
        let meta = fs::metadata(&scene.api.kubeconfig).unwrap();
        assert_eq!(meta.mode() & 0o777, 0o600);
        assert_eq!(scene.client(), None);
        let stored = scene.store(NOW - 8, NOW + 1);
        assert_eq!(scene.client(), Some((stored, true)));
        write_kubeconfig(&scene.api).unwrap();
        assert_eq!(
            fs::metadata(&scene.api.kubeconfig).unwrap().ino(),
            meta.ino(),
            "an unchanged file is not rewritten"
        );
    }

    #[test]
    fn an_unwritable_kubeconfig_does_not_prevent_a_start() {
        let mut scene = Scene::new(false, true);
        fs::write(scene.dir.path().join("file"), "").unwrap();
        scene.api.kubeconfig = scene.dir.path().join("file/kubelet.conf");
        let error = write_kubeconfig(&scene.api).unwrap_err();
        assert!(matches!(error, KubeconfigFileError::Write { .. }), "{error:?}");
        assert!(!CopyError::from(error).prevents_start());
    }

    #[test]
    fn the_serving_certificate_is_the_issued_one_or_else_the_configured_one() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        let mut tls = keelson_config::ApiTls::with_client_ca("/ca".into());
        (tls.cert_file, tls.key_file) = (Some(dir.path().join("a.crt")), Some(dir.path().join("a.key")));
        config.api.tls = Some(tls);
        config.control_plane = ControlPlane::None;
        let settings = Certificates { dir: dir.path().join("pki"), ..Certificates::default() };
        assert!(matches!(serving(&config, &settings), (None, None)));
        let (certificates, key) = make_pair("named", NOW, NOW + 9);
        fs::write(dir.path().join("a.crt"), certificates).unwrap();
        fs::write(dir.path().join("a.key"), key).unwrap();
        assert!(!serving(&config, &settings).0.unwrap().1);
        let (certificates, key) = make_pair("asked for", NOW, NOW + 9);
        let pair = Pair::read(format!("{certificates}{key}").as_bytes()).unwrap();
        Store::new(&settings, CertificateKind::Serving).put(&pair, NOW).unwrap();
        assert_eq!(serving(&config, &settings).0, Some((pair, true)));
        fs::write(settings.current(CertificateKind::Serving), "broken").unwrap();
        let (configured, error) = serving(&config, &settings);
        assert!(!configured.unwrap().1 && error.unwrap().to_string().contains("a new one is requested"));
    }
}
