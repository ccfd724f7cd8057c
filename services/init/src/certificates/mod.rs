//! The certificates that an API server signs for this node (docs/adr/0012-who-makes-and-keeps-certificates.md).
//!
//! node-status makes keys and asks; what it was given it leaves in its state folder. init takes it from there, keeps it where a
//! kubelet would, and hands on what each service needs of it.

mod pair;
mod store;
mod taking;

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use keelson_config::{ApiTls, CertificateKind, Certificates, Config, CredentialRefusal, Kubernetes};
use keelson_init_core::{client_certificates, kubeconfig_for_certificate, set_client_pair};
use serde_json::Value;

use crate::handed_files::{HandoverError, flattened, kubeconfig_document};

use pair::Pair;
use store::Store;
pub(crate) use store::StoreError;
pub(crate) use taking::{TakeError, Taken};

/// What a service names itself to the API server by.
#[derive(Debug)]
pub(crate) enum Client {
    /// The kubeconfig.
    Own(Value),
    /// It has no certificate that holds: node-status asks for one by the bootstrap kubeconfig.
    Bootstrap(Value),
}

/// The kubeconfig of a node, flat, or what it is to be replaced by (node-and-api.md §6.3); `now` in seconds since 1970.
pub(crate) fn client(config: &Config, api: &Kubernetes, now: i64) -> Result<Client, HandoverError> {
    let settings = &api.certificates;
    let own = flattened(&config.paths, "--kubeconfig", &api.kubeconfig);
    let Some(bootstrap) = &settings.bootstrap_kubeconfig else {
        let mut own = own?;
        with_stored(&mut own, settings, now);
        return Ok(Client::Own(own));
    };
    // A program that has not answered is no reason to ask for a certificate: the credential of the kubeconfig is still to come.
    if matches!(own, Err(HandoverError::Login { .. })) {
        return own.map(Client::Own);
    }
    if let Ok(mut own) = own {
        if is_of_a_program(&own) {
            return Ok(Client::Own(own));
        }
        with_stored(&mut own, settings, now);
        let holds = |pem: Vec<u8>| pair::validity(&pem).is_ok_and(|validity| validity.holds(now));
        if client_certificates(&own).is_some_and(holds) {
            return Ok(Client::Own(own));
        }
    }
    flattened(&config.paths, "--bootstrap-kubeconfig", bootstrap).map(Client::Bootstrap)
}

/// With rotation the pair in force goes before the one that the kubeconfig names, and the file says whether it is that.
fn with_stored(flat: &mut Value, settings: &Certificates, now: i64) {
    if is_of_a_program(flat) {
        return;
    }
    let Some(named) = client_certificates(flat) else { return };
    let stored = Store::of(settings, CertificateKind::Client).current().ok().flatten();
    let Some(stored) = stored.filter(|pair| pair.validity.holds(now)) else { return };
    let is_named = Pair::read([named.as_slice(), stored.key.as_bytes()].concat().as_slice())
        .is_ok_and(|named| named.certificates == stored.certificates);
    if settings.rotate && !is_named {
        set_client_pair(flat, stored.certificates.as_bytes(), stored.key.as_bytes());
    }
    if settings.rotate || is_named {
        flat[STORED] = true.into();
    }
}

/// Whether a program has given the credential: it renews it, too.
fn is_of_a_program(flat: &Value) -> bool {
    flat.get(CredentialRefusal::FIELD).is_some()
}

/// The field of a handed kubeconfig that says that its certificate is one that was asked for.
const STORED: &str = "keelsonStored";

/// Writes the kubeconfig that names the pair to be, unless it is so already.
pub(crate) fn write_kubeconfig(api: &Kubernetes) -> Result<(), HandoverError> {
    let Some(bootstrap) = &api.certificates.bootstrap_kubeconfig else { return Ok(()) };
    let document = kubeconfig_document("--bootstrap-kubeconfig", bootstrap)?;
    let current = api.certificates.current(CertificateKind::Client);
    let text = kubeconfig_for_certificate(&document.root, Path::new(&document.folder), &current)
        .map_err(|source| HandoverError::Kubeconfig { path: bootstrap.clone(), source })?;
    let path = &api.kubeconfig;
    if fs::read(path).is_ok_and(|now| now == text.as_bytes()) {
        return Ok(());
    }
    let write = || -> io::Result<()> {
        let mut temporary = path.clone().into_os_string();
        temporary.push(".new");
        crate::remove_if_there(Path::new(&temporary))?;
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().map_err(|source| HandoverError::WriteKubeconfig { path: path.clone(), source })?;
    tracing::info!(kubeconfig = %path.display(), "wrote the kubeconfig for the certificate that is asked for");
    Ok(())
}

/// Takes what node-status has left, and puts right what was interrupted. What is taken is removed there by
/// [`Taken::remove`], once it is handed on.
pub(crate) fn take(config: &Config, api: &Kubernetes, now: i64) -> (Vec<Taken>, Vec<TakeError>) {
    let (mut taken, mut errors) = (Vec::new(), Vec::new());
    let settings = &api.certificates;
    if !settings.any() {
        return (taken, errors);
    }
    for kind in CertificateKind::ALL {
        let store = Store::of(settings, kind);
        let done =
            store.repair().map_err(TakeError::from).and_then(|()| taking::take(config, settings, kind, now));
        match done {
            Ok(found) => taken.extend(found),
            Err(error) => errors.push(error),
        }
    }
    (taken, errors)
}

/// The pair that the kubelet API shows: the one that was asked for, or else the one that the configuration names; with it
/// whether it is the former. `None`: there is none yet. Beside it, why one that is there cannot be used.
pub(crate) fn serving(
    config: &Config,
    settings: &Certificates,
) -> (Option<(Pair, bool)>, Option<StoreError>) {
    let error = match Store::of(settings, CertificateKind::Serving).current() {
        Ok(Some(pair)) => return (Some((pair, true)), None),
        Ok(None) => None,
        Err(error) => Some(error),
    };
    let named = config.api.tls.as_ref().and_then(|tls| {
        let mut pem = fs::read(tls.cert_file.as_ref()?).ok()?;
        pem.push(b'\n');
        pem.extend(fs::read(tls.key_file.as_ref()?).ok()?);
        Pair::read(&pem).ok()
    });
    (named.map(|pair| (pair, false)), error)
}

/// Why a kubelet's own pair is there and not used.
#[derive(Debug)]
pub(crate) enum NotUsed {
    /// One of the two is missing.
    Half(HandoverError),
    /// It is of no use, in words; nobody renews it.
    LeftAlone(String),
}

/// The pair that a kubelet has signed itself, as one file (node-and-api.md §6.1); `None` where there is none.
pub(crate) fn of_a_kubelet(tls: &ApiTls, now: i64) -> Result<Option<String>, NotUsed> {
    let [certificate, key] = ApiTls::OF_A_KUBELET.map(|name| tls.cert_dir.join(name));
    let shown = certificate.display();
    let left_alone = |why: &str| {
        NotUsed::LeftAlone(format!(
            "the certificate in {shown} {why}: it is left alone, and one of our own is used"
        ))
    };
    let read = |path: &Path| match fs::read(path) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(left_alone(&format!("cannot be used ({}: {error})", path.display()))),
    };
    let (mut pem, own_key) = match (read(&certificate)?, read(&key)?) {
        (None, None) => return Ok(None),
        (Some(pem), Some(own_key)) => (pem, own_key),
        _ => return Err(NotUsed::Half(HandoverError::HalfAPair { certificate, key })),
    };
    pem.push(b'\n');
    pem.extend(own_key);
    let pair = Pair::read(&pem).map_err(|problem| left_alone(&format!("cannot be used ({problem})")))?;
    if pair.validity.not_after <= now {
        return Err(left_alone("has ended"));
    }
    Ok(Some(pair.pem()))
}

/// A certificate of its own and its key, for tests.
#[cfg(test)]
pub(crate) fn tests_pair(from: i64, until: i64) -> (String, String) {
    pair::tests::made("n1", from, until)
}

#[cfg(test)]
mod tests {
    use keelson_config::ControlPlane;
    use serde_json::json;

    use super::pair::tests::made;
    use super::*;

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
            fs::write(self.dir.path().join("ca.crt"), made("ca", NOW - 9, NOW + 9).0).unwrap();
            fs::write(self.dir.path().join(name), file.to_string()).unwrap();
        }

        /// A kubeconfig with a pair of its own, in files beside it; the certificates.
        fn own(&self, from: i64, until: i64) -> String {
            let (certificates, key) = made("own", from, until);
            fs::write(self.dir.path().join("own.pem"), format!("{certificates}{key}")).unwrap();
            self.write("kubelet.conf", &json!({"client-certificate": "own.pem", "client-key": "own.pem"}));
            Pair::read(format!("{certificates}{key}").as_bytes()).unwrap().certificates
        }

        fn store(&self, from: i64, until: i64) -> String {
            let (certificates, key) = made("stored", from, until);
            let pair = Pair::read(format!("{certificates}{key}").as_bytes()).unwrap();
            Store::of(&self.api.certificates, CertificateKind::Client).put(&pair, from).unwrap();
            pair.certificates
        }

        /// Whose certificates are used, and whether they are those that were asked for; `None`: bootstrap.
        fn client(&self) -> Option<(String, bool)> {
            match client(&Config::default(), &self.api, NOW).unwrap() {
                Client::Bootstrap(flat) => {
                    assert_eq!(flat["users"][0]["user"]["token"], "abc.def");
                    None
                }
                Client::Own(flat) => {
                    let certificates = client_certificates(&flat).unwrap_or_default();
                    let certificates = Pem(&certificates).to_string();
                    Some((certificates, flat[STORED] == true))
                }
            }
        }
    }

    /// Certificates as [`Pair`] writes them.
    struct Pem<'a>(&'a [u8]);

    impl std::fmt::Display for Pem<'_> {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(&String::from_utf8_lossy(self.0).replace('\r', ""))
        }
    }

    #[test]
    fn the_bootstrap_kubeconfig_counts_while_there_is_no_certificate_that_holds() {
        for rotate in [false, true] {
            let scene = Scene::new(rotate, true);
            assert_eq!(scene.client(), None, "there is no kubeconfig");
            scene.write("kubelet.conf", &json!({"token": "t"}));
            assert_eq!(scene.client(), None, "it has no certificate");
            scene.own(NOW - 9, NOW - 1);
            assert_eq!(scene.client(), None, "it has ended");
            let own = scene.own(NOW + 5, NOW + 9);
            assert_eq!(scene.client(), Some((own.clone(), false)), "when it begins does not count");
            fs::remove_file(scene.dir.path().join("bootstrap.conf")).unwrap();
            assert_eq!(scene.client(), Some((own, false)), "kubeadm removes it after a join");
            fs::write(scene.dir.path().join("kubelet.conf"), "clusters: [").unwrap();
            let error = client(&Config::default(), &scene.api, NOW).unwrap_err();
            let text = keelson_service_kit::status::chain(&error);
            assert!(text.contains("bootstrap.conf that --bootstrap-kubeconfig names"), "{text}");
        }
    }

    #[test]
    fn without_a_bootstrap_kubeconfig_everything_is_taken_as_it_is() {
        let scene = Scene::new(false, false);
        scene.write("kubelet.conf", &json!({"token": "t"}));
        assert!(
            matches!(client(&Config::default(), &scene.api, NOW).unwrap(), Client::Own(flat) if flat["users"][0]["user"]["token"] == "t")
        );
        let own = scene.own(NOW - 9, NOW - 1);
        assert_eq!(scene.client(), Some((own, false)), "the server says what it thinks of it");
    }

    #[test]
    fn with_rotation_the_pair_in_force_goes_before_the_one_that_the_kubeconfig_names() {
        for (rotate, expected_stored) in [(true, true), (false, false)] {
            let scene = Scene::new(rotate, true);
            let own = scene.own(NOW - 9, NOW + 9);
            scene.store(NOW - 9, NOW - 1);
            assert_eq!(scene.client(), Some((own.clone(), false)), "one that has ended does not");
            let stored = scene.store(NOW - 8, NOW + 1);
            let expected = if expected_stored { (stored, true) } else { (own, false) };
            assert_eq!(scene.client(), Some(expected));
        }
    }

    #[test]
    fn the_written_kubeconfig_leads_to_the_pair_to_be_and_is_good_once_that_is_there() {
        use std::os::unix::fs::MetadataExt as _;
        let scene = Scene::new(false, true);
        write_kubeconfig(&scene.api).unwrap();
        let meta = fs::metadata(&scene.api.kubeconfig).unwrap();
        assert_eq!(meta.mode() & 0o777, 0o600);
        assert_eq!(scene.client(), None);
        let stored = scene.store(NOW - 8, NOW + 1);
        assert_eq!(scene.client(), Some((stored, true)));
        write_kubeconfig(&scene.api).unwrap();
        assert_eq!(fs::metadata(&scene.api.kubeconfig).unwrap().ino(), meta.ino(), "it was so already");
    }

    #[test]
    fn a_kubeconfig_that_cannot_be_written_ends_no_start() {
        let mut scene = Scene::new(false, true);
        fs::write(scene.dir.path().join("file"), "").unwrap();
        scene.api.kubeconfig = scene.dir.path().join("file/kubelet.conf");
        let error = write_kubeconfig(&scene.api).unwrap_err();
        assert!(matches!(error, HandoverError::WriteKubeconfig { .. }), "{error:?}");
        assert!(!error.ends_a_start());
    }

    #[test]
    fn the_kubelet_api_shows_what_was_asked_for_and_the_named_pair_until_then() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        let mut tls = keelson_config::ApiTls::with_client_ca("/ca".into());
        (tls.cert_file, tls.key_file) = (Some(dir.path().join("a.crt")), Some(dir.path().join("a.key")));
        config.api.tls = Some(tls);
        config.control_plane = ControlPlane::None;
        let settings = Certificates { dir: dir.path().join("pki"), ..Certificates::default() };
        assert!(matches!(serving(&config, &settings), (None, None)));
        let (certificates, key) = made("named", NOW, NOW + 9);
        fs::write(dir.path().join("a.crt"), certificates).unwrap();
        fs::write(dir.path().join("a.key"), key).unwrap();
        assert!(!serving(&config, &settings).0.unwrap().1);
        let (certificates, key) = made("asked for", NOW, NOW + 9);
        let pair = Pair::read(format!("{certificates}{key}").as_bytes()).unwrap();
        Store::of(&settings, CertificateKind::Serving).put(&pair, NOW).unwrap();
        assert_eq!(serving(&config, &settings).0, Some((pair, true)));
        fs::write(settings.current(CertificateKind::Serving), "broken").unwrap();
        let (named, error) = serving(&config, &settings);
        assert!(!named.unwrap().1 && error.unwrap().to_string().contains("another one is asked for"));
    }
}
