mod limits;
mod loading;

use std::fs;
use std::io;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::PathBuf;

use keelson_proto::keelson::common::v1::PodRef;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::credentials::Credentials;
use crate::credentials::testing::secret;

const REPO: &str = "r.example/team/a";
/// Longer than any step takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A folder with plugins, which are scripts that have the folder in `$DIR`.
struct Scene {
    dir: TempDir,
    metrics: Metrics,
    progress: Progress,
    clock: Clock,
}

/// The configuration of a provider.
fn provider(name: &str, cache: &str) -> Value {
    json!({
        "name": name,
        "matchImages": ["r.example", "s.example"],
        "defaultCacheDuration": cache,
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "args": ["get", "a b"],
        "env": [{"name": "REGION", "value": "north"}],
    })
}

/// A script that responds with one credential.
fn answering(key_type: &str, key: &str, user: &str) -> String {
    let answer = json!({
        "kind": "CredentialProviderResponse",
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "cacheKeyType": key_type,
        "auth": {key: {"username": user, "password": "hunter2"}},
    });
    format!("echo \"$0\" >> $DIR/calls\ncat > $DIR/request\necho '{answer}'")
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { dir, metrics: Metrics::new(), progress: Progress::default(), clock: Clock::stopped() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn script(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Writes the file that init would hand over.
    fn hand_over(&self, providers: &Value) -> Paths {
        let paths = Paths { run_dir: self.path("run"), ..Paths::default() };
        let path = handover_path(&paths);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1",
            "kind": "CredentialProviderConfig",
            "providers": providers,
        });
        let file = json!({"path": "/etc/c.yaml", "text": "x", "config": config, "lines": {"kind": 2}});
        let (dir, path_of_init) = (self.dir.path(), "/init/bin");
        let environment = json!({"DIR": dir, "REGION": "init's", "ZONE": "z", "PATH": path_of_init});
        let handover = json!({"binDir": dir, "environment": environment, "files": [file]});
        fs::write(path, handover.to_string()).unwrap();
        paths
    }

    fn plugins(&self, providers: &[Value], limit: Duration) -> Plugins {
        let path = handover_path(&self.hand_over(&json!(providers)));
        let given = read_handover(&path).unwrap().unwrap();
        let clock = self.clock.clone();
        Plugins { clock, ..Plugins::of(given, limit, &self.metrics, &self.progress) }
    }

    /// Number of plugin runs.
    fn calls(&self) -> usize {
        fs::read_to_string(self.path("calls")).unwrap_or_default().lines().count()
    }

    /// The message of a condition that is not good.
    fn failed_condition(&self, condition: &str) -> Option<String> {
        let conditions = self.progress.report("0").conditions;
        conditions.into_iter().find(|found| found.name == condition && !found.ok).map(|found| found.message)
    }

    async fn until(&self, what: &str, good: impl Fn() -> bool) {
        let wait = async {
            while !good() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("not so: {what}"));
    }
}

async fn users(plugins: &Plugins, repository: &str) -> Vec<String> {
    plugins
        .find(repository, &"default/web".into())
        .await
        .into_iter()
        .map(|(credential, _)| credential.username)
        .collect()
}

/// The error of the only plugin.
async fn plugin_error(plugins: &Plugins) -> String {
    assert!(plugins.find(REPO, &"default/web".into()).await.is_empty());
    chain(&plugins.list[0].run_plugin(REPO).await.unwrap_err())
}

#[tokio::test]
async fn plugin_runs_with_its_arguments_and_environment() {
    let scene = Scene::new();
    let record = "echo \"$1|$2|$REGION|$ZONE|$KEELSON_LIFELINE_FD|$PATH\" > $DIR/record\n";
    scene.script("a", &format!("{record}{}", answering("Image", "r.example", "ann")));
    let plugins = scene.plugins(&[provider("a", "0s")], PATIENCE);
    let found = plugins.find(REPO, &"default/web".into()).await;
    assert_eq!((found[0].0.username.as_str(), found[0].0.password.as_str()), ("ann", "hunter2"));
    assert_eq!(found[0].1, Origin::Node);
    let request: Value = serde_json::from_slice(&fs::read(scene.path("request")).unwrap()).unwrap();
    assert_eq!(request["image"], REPO);
    let own = std::env::var("PATH").unwrap();
    assert_eq!(fs::read_to_string(scene.path("record")).unwrap(), format!("get|a b|north|z||{own}\n"));
}

#[tokio::test]
async fn plugin_responses_are_cached_until_they_expire() {
    let scene = Scene::new();
    scene.script("a", &answering("Registry", "*.example", "ann"));
    let plugins = scene.plugins(&[provider("a", "1m")], PATIENCE);
    for repository in [REPO, "r.example/b", REPO] {
        assert_eq!(users(&plugins, repository).await, ["ann"]);
    }
    assert_eq!(scene.calls(), 1);
    assert_eq!(users(&plugins, "s.example/a").await, ["ann"]);
    assert_eq!(scene.calls(), 2, "another registry");
    scene.clock.advance(60, 0);
    assert_eq!(users(&plugins, REPO).await, ["ann"]);
    assert_eq!(scene.calls(), 3);
    assert!(users(&plugins, "t.example/a").await.is_empty());
    assert_eq!(scene.calls(), 3, "no plugin matches");
}

#[tokio::test]
async fn concurrent_requests_for_one_image_share_a_plugin_run() {
    let scene = Scene::new();
    let waits = "while [ ! -e $DIR/go ]; do sleep 0.01; done\n";
    scene.script("a", &answering("Image", "r.example", "ann").replace("cat >", &format!("{waits}cat >")));
    let plugins = scene.plugins(&[provider("a", "0s")], PATIENCE);
    let (one, other, third, ()) =
        tokio::join!(users(&plugins, REPO), users(&plugins, REPO), users(&plugins, "r.example/b"), async {
            scene.until("both images are requested", || scene.calls() >= 2).await;
            fs::write(scene.path("go"), "").unwrap();
        });
    assert_eq!((one, other, third), (vec!["ann".into()], vec!["ann".into()], vec!["ann".into()]));
    assert_eq!(scene.calls(), 2, "one for each image");
    assert_eq!(users(&plugins, REPO).await, ["ann"]);
    assert_eq!(scene.calls(), 3, "the response is not cached");
}

#[tokio::test]
async fn credentials_order_is_pod_secrets_node_configuration_plugins() {
    let scene = Scene::new();
    scene.script("a", &answering("Image", "*.example", "plugin-a"));
    scene.script("b", &answering("Image", "r.example/team", "plugin-b"));
    let node = r#"{"auths": {"r.example": {"username": "node", "password": "p"}}}"#;
    fs::write(scene.path("config.json"), node).unwrap();
    let plugins = scene.plugins(&[provider("a", "1m"), provider("b", "1m")], PATIENCE);
    let secrets = [("default/s", Ok(secret("r.example", "pod", "p")))];
    let credentials = Credentials::of(&secrets, &[scene.path("")], scene.clock.clone()).with_plugins(plugins);
    let pod = PodRef { namespace: "default".into(), ..PodRef::default() };
    let names = |found: crate::credentials::FoundCredentials| {
        found.list.into_iter().map(|(credential, _)| credential.username).collect::<Vec<_>>()
    };
    let own = credentials.pod_credentials(&pod, &["s".into()], REPO).await.unwrap();
    assert_eq!(names(own), ["pod"]);
    assert_eq!(scene.calls(), 0);
    let all = credentials.find(&pod, &["s".into()], REPO).await.unwrap();
    assert_eq!(names(all), ["pod", "node", "plugin-b", "plugin-a"]);
}

/// Whether all processes that had this pipe open for writing have ended.
fn all_ended(mut pipe: &fs::File) -> bool {
    matches!(io::Read::read(&mut pipe, &mut [0; 8]), Ok(0))
}

/// Creates a plugin that holds a pipe open and never responds. Returns the pipe.
fn hanging(scene: &Scene) -> fs::File {
    let path = scene.path("alive");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    scene.script(
        "a",
        "exec 3> $DIR/alive\necho 'asks the cloud' >&2\nsleep 1000 &\necho x >> $DIR/calls\nwait",
    );
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    fs::OpenOptions::new().read(true).custom_flags(flags).open(path).unwrap()
}

#[tokio::test]
async fn hanging_plugin_is_killed_with_its_child_processes() {
    let scene = Scene::new();
    let alive = hanging(&scene);
    let plugins = scene.plugins(&[provider("a", "1m")], Duration::from_secs(2));
    let error = chain(&plugins.list[0].run_plugin(REPO).await.unwrap_err());
    assert_eq!(error, "it has not answered within 2s and was ended: \"asks the cloud\"");
    scene.until("all of it has ended", || all_ended(&alive)).await;
}

#[tokio::test]
async fn plugin_is_killed_when_no_request_waits_for_it() {
    let scene = Scene::new();
    let alive = hanging(&scene);
    let plugins = scene.plugins(&[provider("a", "1m")], PATIENCE);
    // Cancel-safe: the cancellation is what is tested.
    let pod = "default/web".into();
    tokio::select! {
        _ = plugins.find(REPO, &pod) => panic!("it hangs"),
        () = scene.until("it runs", || scene.calls() == 1) => {}
    }
    scene.until("all of it has ended", || all_ended(&alive)).await;
}

#[tokio::test]
async fn failed_plugin_is_counted_and_run_again() {
    let scene = Scene::new();
    scene.script("a", "echo x >> $DIR/calls\necho 'no role' >&2\nexit 3");
    scene.script("b", &answering("Image", "r.example", "bob"));
    let plugins = scene.plugins(&[provider("a", "1m"), provider("b", "0s")], PATIENCE);
    for calls in [2, 4] {
        assert_eq!(users(&plugins, REPO).await, ["bob"], "the others are used");
        assert_eq!(scene.calls(), calls);
    }
    let error = chain(&plugins.list[0].run_plugin(REPO).await.unwrap_err());
    assert_eq!(error, "it has ended with exit status: 3: \"no role\"");
    let text = scene.metrics.text();
    for line in [
        "kubelet_credential_provider_plugin_errors_total{plugin_name=\"a\"} 2",
        "kubelet_credential_provider_plugin_duration_count{plugin_name=\"a\"} 2",
        "kubelet_credential_provider_plugin_duration_count{plugin_name=\"b\"} 2",
    ] {
        assert!(text.contains(line), "{text}");
    }
    assert!(!text.contains("errors_total{plugin_name=\"b\"}"), "{text}");
    assert!(text.contains("kubelet_credential_provider_config_info{hash=\"sha256:"), "{text}");
}

#[tokio::test]
async fn invalid_plugin_output_is_refused_and_not_repeated() {
    let errors = "kubelet_credential_provider_plugin_errors_total{plugin_name=\"a\"} 1";
    let long = format!("head -c {} /dev/zero; sleep 1000", (1 << 20) + 1);
    for (script, expected, failed) in [
        ("echo hunter2", "its response is not a JSON object", false),
        ("true", "its response is not a JSON object", false),
        ("echo '{\"kind\": \"hunter2\"}'", "its response is not a CredentialProviderResponse", false),
        (long.as_str(), "its answer is longer than 1 MiB", true),
        ("kill -9 $$", "it has ended with signal: 9 (SIGKILL)", true),
    ] {
        let scene = Scene::new();
        scene.script("a", script);
        assert_eq!(plugin_error(&scene.plugins(&[provider("a", "1m")], PATIENCE)).await, expected);
        let text = scene.metrics.text();
        assert_eq!(text.contains(errors), failed, "only runs that failed are counted: {text}");
        assert!(
            text.contains("kubelet_credential_provider_plugin_duration_count{plugin_name=\"a\"} 1"),
            "{text}"
        );
    }
}

#[tokio::test]
async fn only_the_end_of_plugin_stderr_is_reported() {
    let scene = Scene::new();
    scene.script("a", "head -c 100000 /dev/zero | tr '\\0' x >&2; printf 'the\\nend' >&2; exit 1");
    let error = plugin_error(&scene.plugins(&[provider("a", "1m")], PATIENCE)).await;
    assert!(error.ends_with("xthe\\nend\""), "{error}");
    assert!(error.len() < MAX_ERROR_BYTES, "{}", error.len());
}

/// 1 KiB and the text around it.
const MAX_ERROR_BYTES: usize = 1024 + 100;

#[tokio::test]
async fn nothing_secret_is_shown() {
    let scene = Scene::new();
    scene.script("a", &answering("Image", "r.example", "ann"));
    let mut provider = provider("a", "1m");
    provider["env"] = json!([{"name": "TOKEN", "value": "hunter3"}]);
    provider["args"] = json!(["--password", "hunter4"]);
    let plugins = scene.plugins(&[provider], PATIENCE);
    assert_eq!(users(&plugins, REPO).await, ["ann"]);
    assert!(plugins.list[0].state().cache.get(REPO, scene.clock.read().boot_nanos).is_some());
    let shown = format!("{plugins:?}");
    assert!(!shown.contains("hunter"), "{shown}");
    assert!(!scene.metrics.text().contains("hunter"));
}
