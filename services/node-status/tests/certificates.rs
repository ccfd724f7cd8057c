//! The real node-status requests certificates from a fake API server, and is killed meanwhile.

#![allow(clippy::unwrap_used)] // A test may panic.

mod certificate_api;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use certificate_api::Api;
use keelson_config::{ApiTls, Certificates, Config, ConfigExtras, ControlPlane, Kubernetes, ServiceName};
use keelson_proto::keelson::admin::v1::admin_client::AdminClient;
use keelson_proto::keelson::admin::v1::{GetMetricsRequest, GetProgressRequest};
use keelson_service_kit::{connect_unix, store_config};
use rcgen::{KeyPair, PublicKeyData as _, SanType};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(60);

/// A node-status process in a folder of its own.
struct Scene {
    dir: tempfile::TempDir,
    config: Config,
    child: Option<Child>,
}

impl Scene {
    fn new(change: impl FnOnce(&mut Certificates)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config { node_name: "n1".into(), ..Config::default() };
        config.paths.run_dir = dir.path().join("run");
        config.paths.state_dir = dir.path().join("state");
        let mut api = Kubernetes::of(dir.path().join("kubelet.conf"));
        change(&mut api.certificates);
        config.api.tls = Some(ApiTls::with_client_ca("/ca".into()));
        config.control_plane = ControlPlane::Kubernetes(api);
        let service = ServiceName::NodeStatus;
        for folder in
            [config.paths.socket_dir(service), config.paths.credentials(service), config.paths.state(service)]
        {
            fs::create_dir_all(folder).unwrap();
        }
        Self { dir, config, child: None }
    }

    fn hand(&self, name: &str, content: &str) {
        let path = self.config.paths.credentials(ServiceName::NodeStatus).join(name);
        let temporary = path.with_extension("new");
        fs::write(&temporary, content).unwrap();
        fs::rename(temporary, path).unwrap();
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.config.paths.credentials(ServiceName::NodeStatus).join(name)).unwrap();
    }

    fn start(&mut self) {
        let file = self.dir.path().join("run/config.json");
        store_config(&file, &self.config, ConfigExtras::default()).unwrap();
        let log = fs::OpenOptions::new().create(true).append(true).open(self.dir.path().join("log")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_keelson-node-status"))
            .arg("--config")
            .arg(&file)
            .stdin(Stdio::null())
            .stderr(log)
            .spawn();
        self.child = Some(child.unwrap());
    }

    fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn issued(&self, kind: &str) -> PathBuf {
        self.config.paths.issued_certificates().join(kind)
    }

    async fn wait_for<T>(&self, what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
        let asking = async {
            loop {
                if let Some(answer) = ask().await {
                    return answer;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let found = tokio::time::timeout(LIMIT, asking).await;
        found.unwrap_or_else(|_| {
            panic!("not: {what}\n{}", fs::read_to_string(self.dir.path().join("log")).unwrap())
        })
    }

    fn admin(&self) -> AdminClient<keelson_service_kit::PeerChannel> {
        AdminClient::new(connect_unix("node-status", &self.config.paths.socket(ServiceName::NodeStatus)))
    }

    /// Waits until a condition has this message; empty: until it is good.
    async fn until_condition(&self, condition: &str, text: &str) {
        self.wait_for(&format!("{condition}: {text}"), async || {
            let report = self.admin().get_progress(GetProgressRequest {}).await.ok()?.into_inner();
            let found = report.conditions.into_iter().find(|found| found.name == condition)?;
            (found.ok == text.is_empty() && found.message.contains(text)).then_some(())
        })
        .await;
    }

    async fn metric(&self, name: &str) -> Option<f64> {
        let text = self.admin().get_metrics(GetMetricsRequest {}).await.ok()?.into_inner().text;
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    }

    /// Acts as init: hands over the issued pair, and removes it.
    fn pick_up(&self, api: &Api) -> String {
        let pem = fs::read_to_string(self.issued("client.pem")).unwrap();
        let at = pem.find("-----BEGIN PRIVATE KEY").unwrap();
        let user = json!({"client-certificate-data": STANDARD.encode(&pem[..at]), "client-key-data": STANDARD.encode(&pem[at..])});
        self.hand("kubeconfig.json", &api.kubeconfig(&user, true));
        fs::remove_file(self.issued("client.pem")).unwrap();
        pem
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Both fail only if the process has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn bootstrap(certificates: &mut Certificates) {
    certificates.bootstrap_kubeconfig = Some("/bootstrap".into());
    certificates.rotate = true;
}

fn name_of(request: &Value) -> String {
    request["metadata"]["name"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_node_status_requests_one_certificate_and_leaves_it_for_init() {
    let api = Api::start().await;
    let mut scene = Scene::new(bootstrap);
    scene.start();
    scene.until_condition("control-plane", "this node has no client certificate yet").await;
    assert!(api.requests().is_empty(), "there are no credentials for a request");
    scene.hand("bootstrap-kubeconfig.json", &api.kubeconfig(&json!({"token": "abc.def"}), false));
    let first = scene.wait_for("a request is made", async || api.requests().first().cloned()).await;
    scene
        .until_condition("client certificate", "waits for its approval (kubectl certificate approve csr-")
        .await;
    let spec = &first["spec"];
    assert_eq!(spec["signerName"], "kubernetes.io/kube-apiserver-client-kubelet");
    assert_eq!(spec["usages"], json!(["digital signature", "client auth"]));
    let params = Api::read(&first).params;
    assert!(params.subject_alt_names.is_empty());
    assert_eq!(api.makers(), ["Bearer abc.def"]);

    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let kept = scene.config.paths.state(ServiceName::NodeStatus).join("certificate-requests/client.json");
    assert_eq!(mode(kept.clone()), 0o600);
    for _ in 0..3 {
        scene.kill();
        scene.start();
        scene.until_condition("client certificate", "waits for its approval").await;
    }
    scene.kill();
    api.sign(&name_of(&first), -10, 3600);
    scene.start();
    let pair = scene.issued("client.pem");
    let pem = scene.wait_for("the pair is there", async || fs::read_to_string(&pair).ok()).await;
    assert_eq!((mode(pair.clone()), mode(pair.parent().unwrap().to_owned())), (0o600, 0o700));
    let key = KeyPair::from_pem(&pem[pem.find("-----BEGIN PRIVATE KEY").unwrap()..]).unwrap();
    assert_eq!(key.subject_public_key_info(), Api::read(&first).public_key.subject_public_key_info());
    scene.until_condition("client certificate", "").await;
    // Killed before init has picked the pair up: it still exists, and nothing is requested again.
    scene.kill();
    scene.start();
    scene.until_condition("client certificate", "").await;
    scene.pick_up(&api);
    scene.remove("bootstrap-kubeconfig.json");
    scene
        .wait_for("the Node is read", async || {
            let left = scene.metric("kubelet_certificate_manager_client_ttl_seconds").await?;
            (left > 3000.0 && left <= 3600.0).then_some(())
        })
        .await;
    assert_eq!(api.requests().len(), 1);
    assert!(!kept.exists(), "the key is nowhere but in the pair");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_is_rotated_by_itself_and_an_expired_one_by_bootstrap_token() {
    let api = Api::start().await;
    let mut scene = Scene::new(bootstrap);
    // More than 90 % of its lifetime are over.
    scene.hand("kubeconfig.json", &api.kubeconfig(&api.pair(-9_500, 500), true));
    scene.start();
    let first =
        scene.wait_for("another certificate is requested", async || api.requests().first().cloned()).await;
    assert_eq!(api.makers(), [""], "by its certificate");
    api.sign(&name_of(&first), -10, 3600);
    scene.wait_for("the pair is there", async || scene.issued("client.pem").exists().then_some(())).await;
    scene.pick_up(&api);
    scene.until_condition("client certificate", "").await;

    // It has expired, as on a node that was off: init removes it and hands over the bootstrap kubeconfig.
    scene.kill();
    scene.hand("kubeconfig.json", &api.kubeconfig(&api.pair(-9_500, -1), true));
    scene.start();
    scene.until_condition("client certificate", "give --bootstrap-kubeconfig a kubeconfig").await;
    assert_eq!(api.requests().len(), 1);
    scene.remove("kubeconfig.json");
    scene.hand("bootstrap-kubeconfig.json", &api.kubeconfig(&json!({"token": "abc.def"}), false));
    scene
        .wait_for("another certificate is requested", async || (api.requests().len() == 2).then_some(()))
        .await;
    assert_eq!(api.makers(), ["", "Bearer abc.def"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pending_request_continues_with_the_bootstrap_token_after_expiry() {
    let api = Api::start().await;
    let mut scene = Scene::new(bootstrap);
    scene.hand("kubeconfig.json", &api.kubeconfig(&api.pair(-9_500, 500), true));
    scene.start();
    let request =
        scene.wait_for("another certificate is requested", async || api.requests().first().cloned()).await;
    scene.until_condition("client certificate", "waits for its approval").await;
    // The certificate has expired: init removes it, and nobody has approved the request yet.
    scene.remove("kubeconfig.json");
    scene.hand("bootstrap-kubeconfig.json", &api.kubeconfig(&json!({"token": "abc.def"}), false));
    let readers = || api.state.lock().unwrap().readers.clone();
    scene
        .wait_for("the request is read", async || {
            readers().iter().any(|by| by == "Bearer abc.def").then_some(())
        })
        .await;
    api.sign(&name_of(&request), -10, 3600);
    scene.wait_for("the pair is there", async || scene.issued("client.pem").exists().then_some(())).await;
    assert_eq!(api.makers(), [""], "it is the same request");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_denied_or_refused_certificate_request_is_reported_and_repeated() {
    let api = Api::start().await;
    api.state.lock().unwrap().refuses = true;
    let mut scene = Scene::new(bootstrap);
    scene.hand("bootstrap-kubeconfig.json", &api.kubeconfig(&json!({"token": "abc.def"}), false));
    scene.start();
    scene.until_condition("client certificate", "Forbidden (403 Forbidden)").await;
    api.state.lock().unwrap().refuses = false;
    let first = scene.wait_for("a request is made", async || api.requests().first().cloned()).await;
    api.deny(&name_of(&first));
    scene.until_condition("client certificate", "is refused: Denied: No: not yours").await;
    let errors = "kubelet_certificate_manager_client_expiration_renew_errors";
    assert!(scene.metric(errors).await.unwrap() >= 2.0);
    let known = name_of(&first);
    let second = scene
        .wait_for("a new request is made", async || {
            api.requests().into_iter().find(|request| name_of(request) != known)
        })
        .await;
    // Signed for another key.
    let (mut forged, real) = (first.clone(), second["spec"]["request"].clone());
    forged["metadata"]["name"] = "forged".into();
    forged["status"] = Value::Null;
    api.state.lock().unwrap().requests.insert("forged".to_owned(), forged);
    api.sign("forged", -10, 3600);
    let status = api.state.lock().unwrap().requests["forged"]["status"].clone();
    api.change(&name_of(&second), |request| request["status"] = status);
    scene.until_condition("client certificate", "the issued certificate is for another key").await;
    assert!(!scene.issued("client.pem").exists());
    let made = |known: [&Value; 2]| {
        let mut all = api.requests().into_iter();
        all.find(|request| known.iter().all(|known| request["spec"] != known["spec"]))
    };
    let third = scene.wait_for("a new request is made", async || made([&first, &second])).await;
    assert_ne!(third["spec"]["request"], real, "with a new key");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubeconfig_handed_over_after_the_start_is_used() {
    let api = Api::start().await;
    let mut scene = Scene::new(|certificates| certificates.serving = true);
    scene.start();
    scene.until_condition("control-plane", "there is no usable kubeconfig").await;
    scene.hand("kubeconfig.json", &api.kubeconfig(&json!({"token": "node"}), false));
    // It has read the Node, so it uses the kubeconfig.
    scene.until_condition("serving certificate", "the Node has no address yet").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_serving_certificate_is_requested_again_when_node_addresses_are_added() {
    let api = Api::start().await;
    let mut scene = Scene::new(|certificates| certificates.serving = true);
    scene.hand("kubeconfig.json", &api.kubeconfig(&json!({"token": "node"}), false));
    scene.start();
    scene.until_condition("serving certificate", "the Node has no address yet").await;
    let set = |addresses: &[(&str, &str)]| {
        let list: Vec<Value> =
            addresses.iter().map(|(kind, address)| json!({"type": kind, "address": address})).collect();
        api.state.lock().unwrap().addresses = list.into();
    };
    set(&[("Hostname", "n1"), ("InternalIP", "10.0.0.7")]);
    scene.kill();
    scene.start();
    let first = scene.wait_for("a request is made", async || api.requests().first().cloned()).await;
    assert_eq!(first["spec"]["signerName"], "kubernetes.io/kubelet-serving");
    assert_eq!(first["spec"]["usages"], json!(["digital signature", "server auth"]));
    let names = |request: &Value| Api::read(request).params.subject_alt_names;
    let host = || SanType::DnsName("n1".try_into().unwrap());
    assert_eq!(names(&first), [host(), SanType::IpAddress("10.0.0.7".parse().unwrap())]);
    api.sign(&name_of(&first), -10, 3600);
    let pair = scene.issued("serving.pem");
    let pem = scene.wait_for("the pair is there", async || fs::read_to_string(&pair).ok()).await;
    scene.hand("serving.crt", &pem[..pem.find("-----BEGIN PRIVATE KEY").unwrap()]);
    fs::remove_file(&pair).unwrap();
    scene.until_condition("serving certificate", "").await;
    assert_eq!(api.requests().len(), 1);
    set(&[("Hostname", "n1"), ("InternalIP", "10.0.0.7"), ("ExternalIP", "192.0.2.9")]);
    scene.kill();
    scene.start();
    let second = scene.wait_for("another certificate is requested", async || {
        api.requests().into_iter().find(|request| name_of(request) != name_of(&first))
    });
    assert_eq!(names(&second.await).len(), 3);
    assert!(scene.metric("kubelet_certificate_manager_server_ttl_seconds").await.unwrap() > 3000.0);
    assert!(
        scene.metric("kubelet_certificate_manager_client_ttl_seconds").await.is_none(),
        "only with rotation"
    );
}
