//! The watcher with plugins on real sockets.

#![allow(clippy::unwrap_used, reason = "tests and their helpers")]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use keelson_plugin_watcher::{Plugin, PluginHandler, PluginWatcher};
use keelson_proto::pluginregistration as pb;
use keelson_service_kit::{CancellationToken, Metrics, Progress};
use keelson_testkit::fakes::{FakePluginRegistration, FakeServer, Recorder};
use tokio::task::JoinHandle;
use tonic::Status;
use tonic::service::Routes;

/// Registers plugins, and records in order what it was asked.
#[derive(Default)]
struct Handler {
    /// `register <name>`, `registered <name>`, `unregister <name>`.
    calls: Recorder<String>,
    plugins: Recorder<Plugin>,
    refusals: Mutex<Vec<String>>,
    /// The name of a plugin whose registration never ends.
    hanging: Mutex<Option<String>>,
}

impl PluginHandler for Handler {
    fn register<'a>(&'a self, plugin: &'a Plugin) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            self.calls.record(format!("register {}", plugin.name));
            self.plugins.record(plugin.clone());
            if self.hanging.lock().unwrap().as_ref() == Some(&plugin.name) {
                std::future::pending::<()>().await;
            }
            if let Some(refusal) = self.refusals.lock().unwrap().pop() {
                return Err(refusal);
            }
            self.calls.record(format!("registered {}", plugin.name));
            Ok(())
        })
    }

    fn unregister<'a>(&'a self, plugin: &'a Plugin) -> BoxFuture<'a, ()> {
        Box::pin(async move { self.calls.record(format!("unregister {}", plugin.name)) })
    }
}

impl Handler {
    async fn until(&self, call: &str) -> Vec<String> {
        self.calls.until(|calls| calls.iter().any(|made| made == call)).await
    }
}

/// A watcher that runs.
struct Watching {
    shutdown: CancellationToken,
    task: JoinHandle<()>,
    metrics: Metrics,
}

impl Watching {
    fn start(folder: &Path, handler: &Arc<Handler>) -> Self {
        let (shutdown, metrics) = (CancellationToken::new(), Metrics::new());
        let handler: Arc<dyn PluginHandler> = Arc::<Handler>::clone(handler);
        let watcher = PluginWatcher::new(folder, &metrics).with("CSIPlugin", handler).leaving("DRAPlugin");
        let task = tokio::spawn(watcher.run(shutdown.clone(), Progress::default().register("plugins")));
        Self { shutdown, task, metrics }
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.task.await.unwrap();
    }

    fn has_metric(&self, socket: &Path, state: &str) -> bool {
        let socket = socket.display();
        let line = format!("plugin_manager_total_plugins{{socket_path=\"{socket}\",state=\"{state}\"}} 1");
        self.metrics.text().lines().any(|other| other == line)
    }
}

/// A plugin that serves the API of registration.
struct FakePlugin {
    api: FakePluginRegistration,
    socket: PathBuf,
    server: FakeServer,
}

impl FakePlugin {
    async fn start(socket: PathBuf, kind: &str, name: &str) -> Self {
        let api = FakePluginRegistration::default();
        api.get_info.answer(pb::PluginInfo {
            r#type: kind.into(),
            name: name.into(),
            endpoint: String::new(),
            supported_versions: vec!["1.0.0".into()],
        });
        api.notify_registration_status.answer(pb::RegistrationStatusResponse {});
        let server = FakeServer::at(&socket, Routes::new(api.server())).await.unwrap();
        Self { api, socket, server }
    }

    async fn is_told(&self) -> pb::RegistrationStatus {
        self.api.notify_registration_status.requests().until_len(1).await.remove(0)
    }

    fn leave(self) {
        self.server.kill();
        std::fs::remove_file(&self.socket).unwrap();
    }
}

fn folder() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("plugins_registry");
    std::fs::create_dir(&folder).unwrap();
    (dir, folder)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_is_registered_with_what_it_says_and_is_told_so() {
    let (_dir, folder) = folder();
    let handler = Arc::new(Handler::default());
    let watching = Watching::start(&folder, &handler);
    let plugin = FakePlugin::start(folder.join("a.sock"), "CSIPlugin", "a").await;
    let expected = pb::RegistrationStatus { plugin_registered: true, error: String::new() };
    assert_eq!(plugin.is_told().await, expected);
    let registered = handler.plugins.until_len(1).await.remove(0);
    let socket = plugin.socket.clone();
    let expected = Plugin {
        kind: "CSIPlugin".into(),
        name: "a".into(),
        endpoint: socket.clone(),
        supported_versions: vec!["1.0.0".into()],
        socket: socket.clone(),
    };
    assert_eq!(registered, expected);
    assert!(watching.has_metric(&socket, "desired_state_of_world"), "{}", watching.metrics.text());
    plugin.leave();
    handler.until("unregister a").await;
    assert!(!watching.has_metric(&socket, "desired_state_of_world"), "{}", watching.metrics.text());
    watching.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_of_its_own_is_handed_to_the_handler() {
    let (_dir, folder) = folder();
    let handler = Arc::new(Handler::default());
    let plugin = FakePlugin::start(folder.join("a.sock"), "CSIPlugin", "a").await;
    let info = pb::PluginInfo {
        r#type: "CSIPlugin".into(),
        name: "a".into(),
        endpoint: "/csi/csi.sock".into(),
        supported_versions: vec![],
    };
    plugin.api.get_info.answer(info);
    let watching = Watching::start(&folder, &handler);
    assert_eq!(handler.plugins.until_len(1).await[0].endpoint, Path::new("/csi/csi.sock"));
    watching.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_plugin_is_told_why_and_is_tried_again() {
    let (_dir, folder) = folder();
    let handler = Arc::new(Handler::default());
    handler.refusals.lock().unwrap().push("not now".to_owned());
    let watching = Watching::start(&folder, &handler);
    let plugin = FakePlugin::start(folder.join("a.sock"), "CSIPlugin", "a").await;
    let answers = plugin.api.notify_registration_status.requests().until_len(2).await;
    let expected = pb::RegistrationStatus { plugin_registered: false, error: "not now".into() };
    assert_eq!(answers[0], expected);
    assert!(answers[1].plugin_registered);
    watching.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_whose_socket_is_replaced_is_unregistered_and_registered_again() {
    let (_dir, folder) = folder();
    let handler = Arc::new(Handler::default());
    let watching = Watching::start(&folder, &handler);
    let first = FakePlugin::start(folder.join("a.sock"), "CSIPlugin", "a").await;
    first.is_told().await;
    let hidden = FakePlugin::start(folder.join(".new"), "CSIPlugin", "b").await;
    std::fs::rename(&hidden.socket, &first.socket).unwrap();
    hidden.is_told().await;
    let calls = handler.until("registered b").await;
    assert_eq!(calls, ["register a", "registered a", "unregister a", "register b", "registered b"]);
    watching.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn plugins_of_unknown_kinds_are_refused_and_those_of_others_left() {
    let (_dir, folder) = folder();
    let handler = Arc::new(Handler::default());
    let left = FakePlugin::start(folder.join("left.sock"), "DRAPlugin", "left").await;
    let unknown = FakePlugin::start(folder.join("unknown.sock"), "OtherPlugin", "unknown").await;
    let watching = Watching::start(&folder, &handler);
    let answer = unknown.is_told().await;
    assert!(!answer.plugin_registered);
    let text = "unknown plugin type \"OtherPlugin\": this agent registers CSIPlugin, DRAPlugin";
    assert_eq!(answer.error, text);
    left.api.get_info.requests().until_len(1).await;
    watching.stop().await;
    assert!(left.api.notify_registration_status.requests().is_empty());
    assert!(handler.calls.is_empty(), "{:?}", handler.calls.all());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_hangs_or_breaks_holds_up_no_other_plugin() {
    let (_dir, folder) = folder();
    let handler = Arc::new(Handler::default());
    *handler.hanging.lock().unwrap() = Some("endless".to_owned());
    let silent = FakePlugin::start(folder.join("0-silent.sock"), "CSIPlugin", "silent").await;
    let _gate = silent.api.get_info.hold();
    let endless = FakePlugin::start(folder.join("1-endless.sock"), "CSIPlugin", "endless").await;
    let failing = FakePlugin::start(folder.join("2-failing.sock"), "CSIPlugin", "failing").await;
    failing.api.get_info.fail(Status::internal("broken"));
    // A socket that accepts connections and sends nothing.
    let _mute = std::os::unix::net::UnixListener::bind(folder.join("3-mute.sock")).unwrap();
    let watching = Watching::start(&folder, &handler);
    handler.until("register endless").await;
    silent.api.get_info.requests().until_len(1).await;
    let good = FakePlugin::start(folder.join("4-good.sock"), "CSIPlugin", "good").await;
    assert!(good.is_told().await.plugin_registered);
    // A registration that hangs ends with its socket.
    endless.leave();
    handler.until("unregister endless").await;
    let stop = tokio::time::timeout(Duration::from_secs(30), watching.stop());
    stop.await.expect("hanging plugins do not hold up the shutdown");
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_restart_plugins_register_again_from_their_sockets() {
    let (_dir, folder) = folder();
    let handler = Arc::new(Handler::default());
    let plugin = FakePlugin::start(folder.join("a.sock"), "CSIPlugin", "a").await;
    let watching = Watching::start(&folder, &handler);
    plugin.is_told().await;
    watching.stop().await;
    assert_eq!(handler.calls.all(), ["register a", "registered a"], "a shutdown unregisters nothing");

    let handler = Arc::new(Handler::default());
    let watching = Watching::start(&folder, &handler);
    handler.until("registered a").await;
    assert!(plugin.api.notify_registration_status.requests().until_len(2).await[1].plugin_registered);
    watching.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn plugins_are_found_in_new_subfolders_and_a_missing_folder_is_created() {
    let (dir, _) = folder();
    let folder = dir.path().join("new/plugins_registry");
    let handler = Arc::new(Handler::default());
    let watching = Watching::start(&folder, &handler);
    let other = dir.path().join("prepared");
    std::fs::create_dir_all(other.join("deep")).unwrap();
    let _hidden = FakePlugin::start(other.join("deep/.hidden.sock"), "CSIPlugin", "hidden").await;
    let plugin = FakePlugin::start(other.join("deep/a.sock"), "CSIPlugin", "a").await;
    while !folder.exists() {
        tokio::task::yield_now().await;
    }
    std::fs::rename(&other, folder.join("vendor")).unwrap();
    plugin.is_told().await;
    assert_eq!(handler.plugins.all()[0].socket, folder.join("vendor/deep/a.sock"));
    let later = FakePlugin::start(folder.join("vendor/deep/b.sock"), "CSIPlugin", "b").await;
    later.is_told().await;
    assert_eq!(handler.calls.all(), ["register a", "registered a", "register b", "registered b"]);
    watching.stop().await;
}
