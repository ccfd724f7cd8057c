use std::os::unix::fs::PermissionsExt as _;

use keelson_config::Kubernetes;
use keelson_service_kit::Progress;
use serde_json::json;

use super::*;

const V1: &str = "client.authentication.k8s.io/v1";

/// A node whose kubeconfig logs in by the script `login` beside it. The script appends a line to `runs` each time.
struct Scene {
    dir: tempfile::TempDir,
    config: Config,
    turn: LoopHandle,
}

impl Scene {
    fn new(script: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.run_dir = dir.path().join("run");
        config.paths.state_dir = dir.path().join("state");
        config.control_plane = ControlPlane::Kubernetes(Kubernetes::of(dir.path().join("kubeconfig")));
        fs::create_dir_all(config.paths.socket_dir(ServiceName::Init)).unwrap();
        for service in TO_CONTROL_PLANE {
            fs::create_dir_all(config.paths.credentials(service)).unwrap();
            fs::create_dir_all(config.paths.state(service)).unwrap();
        }
        let scene = Self { dir, config, turn: Progress::default().register("exec-login") };
        scene.write_script(script);
        scene.write_kubeconfig("./login");
        scene
    }

    fn write_script(&self, script: &str) {
        let runs = self.dir.path().join("runs");
        let text = format!("#!/bin/sh\necho run >> {}\n{script}\n", runs.display());
        // Another file each time: one that is still open for writing cannot be executed.
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

    /// One turn of the loop, then what is handed over.
    async fn turn(&self) -> Result<(), String> {
        let in_use = logins(&self.config);
        let done = run_what_is_due(&self.config, &in_use, &self.turn).await;
        done.map(drop).map_err(|error| chain(&error))
    }

    /// The user of the kubeconfig that `service` has.
    fn handed(&self, service: ServiceName) -> Option<Value> {
        handed_files::hand_over(&self.config);
        let bytes = fs::read(self.config.paths.credentials(service).join(Kubernetes::COPY)).ok()?;
        let flat: Value = serde_json::from_slice(&bytes).unwrap();
        Some(flat["users"][0]["user"].clone())
    }

    fn generation(&self) -> String {
        let stored = Credentials::read(&self.config.paths);
        stored.of(&logins(&self.config)[0]).unwrap().1
    }
}

/// Prints a token that ends as this says.
fn token(token: &str, expires: &str) -> String {
    let status = json!({"token": token, "expirationTimestamp": expires});
    format!("echo '{}'", json!({"kind": "ExecCredential", "apiVersion": V1, "status": status}))
}

const FAR: &str = "2200-01-01T00:00:00Z";

#[tokio::test]
async fn the_services_get_the_token_of_the_program_and_it_runs_once() {
    let scene = Scene::new(&token("abc", FAR));
    assert_eq!(scene.handed(ServiceName::PodConfig), None, "an empty user would be anonymous");
    let looked = handed_files::hand_over(&scene.config);
    assert!(looked.awaits && looked.lines()[0].contains("users[0].user.exec"), "{:?}", looked.lines());
    for _ in 0..3 {
        scene.turn().await.unwrap();
    }
    assert_eq!(scene.runs(), 1);
    for service in TO_CONTROL_PLANE {
        assert_eq!(scene.handed(service), Some(json!({"token": "abc"})));
    }
    let file = scene.config.paths.socket_dir(ServiceName::Init).join("exec-credentials.json");
    assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
}

#[tokio::test]
async fn the_program_gets_its_arguments_its_variables_and_the_cluster() {
    let scene = Scene::new("");
    let seen = scene.dir.path().join("seen");
    scene.write_script(&format!(
        "printf '%s\\n' \"$1\" \"$REGION\" \"$KUBERNETES_EXEC_INFO\" > {}\n{}",
        seen.display(),
        token("abc", FAR)
    ));
    scene.turn().await.unwrap();
    let seen = fs::read_to_string(seen).unwrap();
    let lines: Vec<&str> = seen.lines().collect();
    assert_eq!(lines[..2], ["first", "north"]);
    let info: Value = serde_json::from_str(lines[2]).unwrap();
    assert_eq!(info["spec"], json!({"interactive": false, "cluster": {"server": "https://127.0.0.1:1"}}));
}

#[tokio::test]
async fn a_client_certificate_is_handed_over_with_its_key_and_is_not_one_that_was_asked_for() {
    let status = json!({"clientCertificateData": "certificate", "clientKeyData": "key"});
    let answer = json!({"kind": "ExecCredential", "apiVersion": V1, "status": status});
    let scene = Scene::new(&format!("echo '{answer}'"));
    scene.turn().await.unwrap();
    let user = scene.handed(ServiceName::NodeStatus).unwrap();
    assert_eq!(user, json!({"client-certificate-data": "Y2VydGlmaWNhdGU=", "client-key-data": "a2V5"}));
}

#[tokio::test]
async fn a_credential_that_ends_is_renewed() {
    let scene = Scene::new(&token("first", "2000-01-01T00:00:00Z"));
    scene.turn().await.unwrap();
    scene.write_script(&token("second", FAR));
    scene.turn().await.unwrap();
    scene.turn().await.unwrap();
    assert_eq!(scene.runs(), 2);
    assert_eq!(scene.handed(ServiceName::PodConfig), Some(json!({"token": "second"})));
}

#[tokio::test]
async fn a_refused_credential_is_renewed_once_and_an_older_refusal_counts_no_more() {
    let scene = Scene::new(&token("first", FAR));
    scene.turn().await.unwrap();
    let report = |generation: &str| {
        let file = CredentialRefusal::file(&scene.config.paths, ServiceName::NodeStatus);
        CredentialRefusal::report(&file, generation).unwrap();
    };
    let now = now_unix_nanos() / 1_000_000_000;
    let is_due = |at: i64| {
        let (stored, refused) = (Credentials::read(&scene.config.paths), refused(&scene.config.paths));
        stored.is_due(&logins(&scene.config)[0], &refused, at)
    };
    report("1");
    assert!(!is_due(now + 60), "it was another credential");
    report(&scene.generation());
    assert!(is_due(now + 60));
    assert!(!is_due(now), "the server may need a moment to know it");
}

#[tokio::test]
async fn a_credential_outlives_init_and_one_of_another_login_does_not_count() {
    let scene = Scene::new(&token("abc", FAR));
    scene.turn().await.unwrap();
    // A new init reads what the one before has left.
    scene.turn().await.unwrap();
    assert_eq!(scene.runs(), 1);
    scene.write_kubeconfig("/nowhere/else");
    assert!(handed_files::hand_over(&scene.config).lines()[0].contains("has given no credential yet"));
}

#[tokio::test]
async fn a_program_that_fails_is_named_with_the_end_of_its_error_output() {
    let scene = Scene::new("");
    for (script, expected) in [
        ("echo no network >&2; exit 3", "login: it has ended with exit status: 3: \"no network\""),
        ("echo garbage", "login: its output is not a JSON object of kind ExecCredential"),
        ("echo '{\"kind\": \"ExecCredential\"}'", "plugin returned version "),
        ("head -c 2000000 /dev/zero", "login: its answer is longer than 1 MiB"),
    ] {
        scene.write_script(script);
        let error = scene.turn().await.unwrap_err();
        assert!(error.starts_with("users[0].user.exec: ") && error.contains(expected), "{error}");
        assert_eq!(scene.handed(ServiceName::PodConfig), None);
    }
    scene.write_kubeconfig("no-such-program-anywhere");
    let error = scene.turn().await.unwrap_err();
    let expected =
        "users[0].user.exec: executable no-such-program-anywhere not found: install the package login";
    assert_eq!(error, expected);
}

#[tokio::test]
async fn a_failure_leaves_the_credential_that_is_still_good() {
    let scene = Scene::new(&token("first", "2000-01-01T00:00:00Z"));
    scene.turn().await.unwrap();
    scene.write_script("exit 1");
    scene.turn().await.unwrap_err();
    assert_eq!(scene.handed(ServiceName::PodConfig), Some(json!({"token": "first"})));
}

#[tokio::test(start_paused = true)]
async fn a_program_that_hangs_is_ended_after_a_minute() {
    let scene = Scene::new("exec sleep 1000");
    let error = scene.turn().await.unwrap_err();
    assert!(error.contains("it has not answered within 60s and was ended"), "{error}");
}
