use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use keelson_config::{Kubernetes, ServiceName};
use keelson_service_kit::Progress;
use serde_json::json;

use super::*;

const V1: &str = "client.authentication.k8s.io/v1";

/// A node whose kubeconfig has the script `login` next to it as exec plugin. The script appends a line to `runs` on each run.
struct Scene {
    dir: tempfile::TempDir,
    config: Config,
    heartbeat: LoopHandle,
}

impl Scene {
    fn new(script: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.run_dir = dir.path().join("run");
        config.paths.state_dir = dir.path().join("state");
        config.control_plane = ControlPlane::Kubernetes(Kubernetes::of(dir.path().join("kubeconfig")));
        fs::create_dir_all(config.paths.socket_dir(ServiceName::Init)).unwrap();
        for service in CONTROL_PLANE_CLIENTS {
            fs::create_dir_all(config.paths.credentials(service)).unwrap();
            fs::create_dir_all(config.paths.state(service)).unwrap();
        }
        let scene = Self { dir, config, heartbeat: Progress::default().register("exec-login") };
        scene.write_script(script);
        scene.write_kubeconfig("./login");
        scene
    }

    fn write_script(&self, script: &str) {
        let runs = self.dir.path().join("runs");
        let text = format!("#!/bin/sh\necho run >> {}\n{script}\n", runs.display());
        // A new file each time: a file that is still open for writing cannot be executed.
        let (path, new) = (self.dir.path().join("login"), self.dir.path().join("login.new"));
        fs::write(&new, text).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(new, path).unwrap();
    }

    fn write_kubeconfig(&self, command: &str) {
        let file = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": "https://127.0.0.1:1"}}],
            "users": [{"name": "u", "user": {"exec": {
                "apiVersion": V1, "command": command, "interactiveMode": "Never", "provideClusterInfo": true,
                "args": ["first"], "env": [{"name": "REGION", "value": "north"}],
                "installHint": "install the package login",
            }}}],
        });
        fs::write(self.dir.path().join("kubeconfig"), file.to_string()).unwrap();
    }

    fn runs(&self) -> usize {
        fs::read_to_string(self.dir.path().join("runs")).unwrap_or_default().lines().count()
    }

    /// Runs the loop body once.
    async fn run_once(&self) -> Result<(), String> {
        let in_use = logins(&self.config);
        let done = run_due_plugins(&self.config, &in_use, &self.heartbeat).await;
        done.map(drop).map_err(|error| chain(&error))
    }

    /// The user in the kubeconfig copy of `service`.
    fn copied_user(&self, service: ServiceName) -> Option<Value> {
        credential_copies::update_copies(&self.config);
        let bytes = fs::read(self.config.paths.credentials(service).join(Kubernetes::COPY)).ok()?;
        let flat: Value = serde_json::from_slice(&bytes).unwrap();
        Some(flat["users"][0]["user"].clone())
    }

    fn generation(&self) -> String {
        let stored = CredentialStore::read(&self.config.paths);
        stored.get(&logins(&self.config)[0]).unwrap().1
    }
}

/// A script that prints a token with this expiry.
fn token(token: &str, expires: &str) -> String {
    let status = json!({"token": token, "expirationTimestamp": expires});
    format!("echo '{}'", json!({"kind": "ExecCredential", "apiVersion": V1, "status": status}))
}

const FAR_FUTURE: &str = "2200-01-01T00:00:00Z";

#[tokio::test]
async fn services_get_the_exec_plugins_token_and_it_runs_once() {
    let scene = Scene::new(&token("abc", FAR_FUTURE));
    assert_eq!(scene.copied_user(ServiceName::PodConfig), None, "an empty user would be anonymous");
    let report = credential_copies::update_copies(&scene.config);
    assert!(report.is_pending && report.lines()[0].contains("users[0].user.exec"), "{:?}", report.lines());
    for _ in 0..3 {
        scene.run_once().await.unwrap();
    }
    assert_eq!(scene.runs(), 1);
    for service in CONTROL_PLANE_CLIENTS {
        assert_eq!(scene.copied_user(service), Some(json!({"token": "abc"})));
    }
    let file = scene.config.paths.socket_dir(ServiceName::Init).join("exec-credentials.json");
    assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
}

#[tokio::test]
async fn the_exec_plugin_gets_args_env_and_cluster() {
    let scene = Scene::new("");
    let seen = scene.dir.path().join("seen");
    scene.write_script(&format!(
        "printf '%s\\n' \"$1\" \"$REGION\" \"$KUBERNETES_EXEC_INFO\" > {}\n{}",
        seen.display(),
        token("abc", FAR_FUTURE)
    ));
    scene.run_once().await.unwrap();
    let seen = fs::read_to_string(seen).unwrap();
    let lines: Vec<&str> = seen.lines().collect();
    assert_eq!(lines[..2], ["first", "north"]);
    let info: Value = serde_json::from_str(lines[2]).unwrap();
    assert_eq!(info["spec"], json!({"interactive": false, "cluster": {"server": "https://127.0.0.1:1"}}));
}

#[tokio::test]
async fn an_exec_plugins_client_certificate_is_copied_with_its_key() {
    let status = json!({"clientCertificateData": "certificate", "clientKeyData": "key"});
    let answer = json!({"kind": "ExecCredential", "apiVersion": V1, "status": status});
    let scene = Scene::new(&format!("echo '{answer}'"));
    scene.run_once().await.unwrap();
    let user = scene.copied_user(ServiceName::NodeStatus).unwrap();
    assert_eq!(user, json!({"client-certificate-data": "Y2VydGlmaWNhdGU=", "client-key-data": "a2V5"}));
}

#[tokio::test]
async fn an_expired_exec_credential_is_renewed() {
    let scene = Scene::new(&token("first", "2000-01-01T00:00:00Z"));
    scene.run_once().await.unwrap();
    scene.write_script(&token("second", FAR_FUTURE));
    scene.run_once().await.unwrap();
    scene.run_once().await.unwrap();
    assert_eq!(scene.runs(), 2);
    assert_eq!(scene.copied_user(ServiceName::PodConfig), Some(json!({"token": "second"})));
}

#[tokio::test]
async fn a_rejected_exec_credential_is_renewed_once() {
    let scene = Scene::new(&token("first", FAR_FUTURE));
    scene.run_once().await.unwrap();
    let report = |generation: &str| {
        let file = CredentialRefusal::file(&scene.config.paths, ServiceName::NodeStatus);
        fs::write(file, generation).unwrap();
    };
    let now = now_unix_nanos() / 1_000_000_000;
    let is_due = |at: i64| {
        let (stored, refused) = (CredentialStore::read(&scene.config.paths), refused(&scene.config.paths));
        stored.is_due(&logins(&scene.config)[0], &refused, at)
    };
    report("1");
    assert!(!is_due(now + 60), "the rejected credential is an older one");
    report(&scene.generation());
    assert!(is_due(now + 60));
    assert!(!is_due(now), "the server may need a moment to accept it");
}

#[tokio::test]
async fn an_exec_credential_survives_init_and_belongs_to_one_login() {
    let scene = Scene::new(&token("abc", FAR_FUTURE));
    scene.run_once().await.unwrap();
    // A new init reads the stored credential.
    scene.run_once().await.unwrap();
    assert_eq!(scene.runs(), 1);
    scene.write_kubeconfig("/nowhere/else");
    assert!(
        credential_copies::update_copies(&scene.config).lines()[0].contains("has returned no credential yet")
    );
}

#[tokio::test]
async fn a_failed_exec_plugin_is_reported_with_its_error_output() {
    let scene = Scene::new("");
    for (script, expected) in [
        ("echo no network >&2; exit 3", "login: it has ended with exit status: 3: \"no network\""),
        ("echo garbage", "login: its output is not a JSON object of kind ExecCredential"),
        ("echo '{\"kind\": \"ExecCredential\"}'", "plugin returned version "),
        ("head -c 2000000 /dev/zero", "login: its answer is longer than 1 MiB"),
    ] {
        scene.write_script(script);
        let error = scene.run_once().await.unwrap_err();
        assert!(error.starts_with("users[0].user.exec: ") && error.contains(expected), "{error}");
        assert_eq!(scene.copied_user(ServiceName::PodConfig), None);
    }
    scene.write_kubeconfig("no-such-program-anywhere");
    let error = scene.run_once().await.unwrap_err();
    let expected =
        "users[0].user.exec: executable no-such-program-anywhere not found: install the package login";
    assert_eq!(error, expected);
}

#[tokio::test]
async fn a_failed_exec_plugin_keeps_the_last_credential() {
    let scene = Scene::new(&token("first", "2000-01-01T00:00:00Z"));
    scene.run_once().await.unwrap();
    scene.write_script("exit 1");
    scene.run_once().await.unwrap_err();
    assert_eq!(scene.copied_user(ServiceName::PodConfig), Some(json!({"token": "first"})));
}

#[tokio::test(start_paused = true)]
async fn a_hanging_exec_plugin_is_killed_after_a_minute() {
    let scene = Scene::new("exec sleep 1000");
    let error = scene.run_once().await.unwrap_err();
    assert!(error.contains("it has not answered within 60s and was ended"), "{error}");
}
