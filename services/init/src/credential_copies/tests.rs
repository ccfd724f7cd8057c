//! The copies in folders of their own.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use keelson_config::{ApiTls, Etcd, Kubernetes};

use super::*;

fn assert_up_to_date(report: CopyReport) {
    assert!(report.errors.is_empty() && !report.is_pending, "{report:?}");
}

fn error_of(mut report: CopyReport) -> CopyError {
    assert_eq!(report.errors.len(), 1, "{report:?}");
    report.errors.remove(0)
}

#[test]
fn each_service_gets_its_own_copy_and_a_new_one_after_a_change() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("node.key");
    let mut config = Config::default();
    config.paths.run_dir = dir.path().join("run");
    let mut settings = Etcd::plain(vec!["http://h:1".into()]);
    settings.key_file = Some(key.clone());
    config.control_plane = ControlPlane::Etcd(settings.clone());
    for service in CONTROL_PLANE_CLIENTS {
        fs::create_dir_all(config.paths.credentials(service)).unwrap();
    }
    let missing = startup_errors(&config);
    assert!(missing[0].contains("node.key that etcd.keyFile names: No such file"), "{missing:?}");

    for content in ["one", "two"] {
        fs::write(&key, content).unwrap();
        assert_up_to_date(update_copies(&config));
        assert!(any_needed(&config));
        for service in CONTROL_PLANE_CLIENTS {
            let folder = config.paths.credentials(service);
            let copy = settings.handed_over(&folder).key_file.unwrap();
            assert_eq!(copy, folder.join("etcd-key.pem"));
            assert_eq!(fs::read_to_string(&copy).unwrap(), content);
            assert_eq!(fs::metadata(&copy).unwrap().mode() & 0o777, 0o400);
        }
    }
    config.control_plane = ControlPlane::None;
    assert_up_to_date(update_copies(&config));
    let folder = config.paths.credentials(ServiceName::PodConfig);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    assert_eq!(settings.handed_over(&folder).key_file.unwrap(), key, "without init, the file itself is used");
}

#[test]
fn a_kubeconfig_is_copied_with_its_files_and_again_after_a_change() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    config.paths.run_dir = dir.path().join("run");
    let folder = config.paths.credentials(ServiceName::PodConfig);
    for service in CONTROL_PLANE_CLIENTS {
        fs::create_dir_all(config.paths.credentials(service)).unwrap();
    }
    let (path, token) = (dir.path().join("kubelet.conf"), dir.path().join("token"));
    let api = Kubernetes::of(path.clone());
    config.control_plane = ControlPlane::Kubernetes(api.clone());
    let error_line = |config: &Config| {
        assert_eq!(startup_errors(config), Vec::<String>::new(), "the agent starts with it");
        let report = update_copies(config);
        assert!(report.is_pending, "it may be fixed at any time");
        keelson_service_kit::status::chain(&error_of(report))
    };
    let line = error_line(&config);
    assert!(line.starts_with("invalid kubeconfig: cannot read") && line.contains("kubelet.conf"), "{line}");
    let file = "current-context: c\nclusters: [{name: k, cluster: {server: 'https://h'}}]\n\
                users: [{name: u, user: {tokenFile: token}}]\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n";
    fs::write(&path, file).unwrap();
    let line = error_line(&config);
    assert!(line.contains("users[0].user.tokenFile: cannot read"), "{line}");
    for content in ["one", "two"] {
        fs::write(&token, content).unwrap();
        assert_up_to_date(update_copies(&config));
        let copy = fs::read_to_string(api.handed_over(&folder)).unwrap();
        assert!(copy.contains(&format!("\"token\":\"{content}\"")), "{copy}");
    }
    fs::write(&path, "current-context: [").unwrap();
    assert!(error_line(&config).starts_with("invalid kubeconfig: "));
    assert!(api.handed_over(&folder).exists(), "the last valid copy stays");
    config.control_plane = ControlPlane::None;
    assert_up_to_date(update_copies(&config));
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
}

#[test]
fn manifest_url_headers_are_copied_for_pod_config_only() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    config.paths.run_dir = dir.path().join("run");
    let folder = config.paths.credentials(ServiceName::PodConfig);
    fs::create_dir_all(&folder).unwrap();
    config.sources.static_pod_url = Some("https://h".into());
    for value in ["one", "two"] {
        config.sources.static_pod_url_headers = UrlHeaders(vec![("X".into(), value.into())]);
        copy_manifest_headers(&config).unwrap();
        assert_eq!(UrlHeaders::handed_over(&folder).unwrap(), config.sources.static_pod_url_headers);
        let mode = fs::metadata(folder.join(UrlHeaders::COPY)).unwrap().mode();
        assert_eq!(mode & 0o777, 0o400);
    }
    config.sources.static_pod_url = None;
    copy_manifest_headers(&config).unwrap();
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
}

#[test]
fn api_certificates_are_copied_for_node_api_only() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    config.paths.run_dir = dir.path().join("run");
    let folder = config.paths.credentials(ServiceName::NodeApi);
    fs::create_dir_all(&folder).unwrap();
    let ca = dir.path().join("ca.crt");
    config.api.tls = Some(ApiTls::with_client_ca(ca.clone()));
    let missing = startup_errors(&config);
    assert!(missing[0].contains("that authentication.x509.clientCAFile names: No such file"), "{missing:?}");
    fs::write(&ca, "ca").unwrap();
    assert_up_to_date(update_copies(&config));
    assert_eq!(fs::read_to_string(folder.join("client-ca.pem")).unwrap(), "ca");
    config.api.tls = None;
    assert_up_to_date(update_copies(&config));
    assert!(!folder.join("client-ca.pem").exists() && !any_needed(&config));
}

/// A configuration with a folder for a kubelet's own pair, and the copy of that pair for node-api.
struct KubeletPair {
    _dir: tempfile::TempDir,
    config: Config,
    tls: ApiTls,
    folder: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
    now: i64,
}

impl KubeletPair {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.run_dir = dir.path().join("run");
        let folder = config.paths.credentials(ServiceName::NodeApi);
        fs::create_dir_all(&folder).unwrap();
        let tls = ApiTls { cert_dir: dir.path().join("pki"), ..ApiTls::default() };
        config.api.tls = Some(tls.clone());
        let [certificate, key] = ApiTls::OF_A_KUBELET.map(|name| tls.cert_dir.join(name));
        Self { _dir: dir, config, tls, folder, certificate, key, now: now_unix_seconds() }
    }

    /// Writes a new pair that is valid until `until`.
    fn write(&self, until: i64) {
        fs::create_dir_all(&self.tls.cert_dir).unwrap();
        let pair = certificates::test_pair(self.now - 100, until);
        fs::write(&self.certificate, &pair.0).unwrap();
        fs::write(&self.key, &pair.1).unwrap();
    }

    fn copy(&self) -> Option<String> {
        fs::read_to_string(self.folder.join("tls-cert.pem")).ok()
    }
}

#[test]
fn a_kubelets_own_pair_is_copied_as_one_file_and_again_after_a_change() {
    let scene = KubeletPair::new();
    assert_up_to_date(update_copies(&scene.config));
    assert_eq!(scene.copy(), None, "the folder does not exist");
    let mut before = None;
    for _ in 0..2 {
        scene.write(scene.now + 1000);
        assert_up_to_date(update_copies(&scene.config));
        let now_there = scene.copy();
        assert!(now_there.as_ref().unwrap().contains("PRIVATE KEY") && now_there != before);
        let handed_over = scene.tls.handed_over(&scene.folder);
        assert_eq!(
            (handed_over.cert_file.clone(), handed_over.key_file),
            (Some(scene.folder.join("tls-cert.pem")), handed_over.cert_file)
        );
        before = now_there;
    }

    fs::remove_file(&scene.key).unwrap();
    let lines = startup_errors(&scene.config).join("\n");
    assert!(lines.starts_with("certificate and key must be supplied as a pair"), "{lines}");
    assert!(error_of(update_copies(&scene.config)).prevents_start());
    assert_eq!(scene.copy(), before, "the last valid copy stays");
}

#[test]
fn a_kubelets_own_pair_that_cannot_be_used_is_kept_and_not_copied() {
    let mut scene = KubeletPair::new();
    let now = scene.now;
    for (until, other_key, why) in [(now - 1, false, "has expired"), (now + 1000, true, "does not match its")]
    {
        scene.write(now + 1000);
        assert_up_to_date(update_copies(&scene.config));
        assert!(scene.copy().is_some());
        scene.write(until);
        if other_key {
            fs::write(&scene.key, certificates::test_pair(now, until).1).unwrap();
        }
        let report = update_copies(&scene.config);
        assert!(report.errors.is_empty() && report.unused_pair.as_ref().unwrap().contains(why), "{report:?}");
        assert_eq!(scene.copy(), None);
        assert!(scene.certificate.exists() && startup_errors(&scene.config).is_empty(), "the file is kept");
    }

    scene.write(now + 1000);
    scene.tls.asked_for = true;
    scene.config.api.tls = Some(scene.tls.clone());
    assert_up_to_date(update_copies(&scene.config));
    assert_eq!(scene.copy(), None, "a certificate is requested instead");
    let (certificate, key) = (scene.certificate.clone(), scene.key.clone());
    let tls =
        ApiTls { asked_for: false, cert_file: Some(certificate), key_file: Some(key), ..scene.tls.clone() };
    fs::write(&scene.key, "key").unwrap();
    scene.config.api.tls = Some(tls);
    assert_up_to_date(update_copies(&scene.config));
    assert_eq!(
        fs::read_to_string(scene.folder.join("tls-key.pem")).unwrap(),
        "key",
        "a configured file is copied unchanged"
    );
}
