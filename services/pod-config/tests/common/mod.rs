//! Runs the real binary on a real socket, with its own folders.

#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

pub mod fleet;
pub mod http_server;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use keelson_config::{Config, ConfigExtras, ServiceName};
use keelson_proto::keelson::admin::v1::admin_client::AdminClient;
use keelson_proto::keelson::admin::v1::{Condition, GetMetricsRequest, GetProgressRequest};
use keelson_proto::keelson::events::v1::events_client::EventsClient;
use keelson_proto::keelson::events::v1::{Event, ListEventsRequest};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_proto::keelson::pod_config::v1::watch_pods_response::Item;
use keelson_service_kit::{PeerChannel, connect_unix, store_config};
use tempfile::TempDir;
use tonic::Streaming;

/// Longer than anything in the tests takes; a test that reaches it has failed.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// The folders of one node, which are kept over restarts of its service.
pub struct Node {
    dir: TempDir,
    pub config: Config,
    /// Additional environment variables of the service.
    pub environment: Vec<(String, PathBuf)>,
}

/// A running service; dropping it kills it.
pub struct Service {
    child: Child,
    log: Receiver<String>,
    channel: PeerChannel,
    seen: Vec<String>,
}

impl Node {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config { node_name: "n1".into(), ..Config::default() };
        config.paths.run_dir = dir.path().join("run");
        config.paths.state_dir = dir.path().join("state");
        config.logging.level = "info,keelson_pod_config=debug".into();
        config.sources.static_pod_path = Some(dir.path().join("manifests"));
        fs::create_dir_all(config.paths.socket_dir(ServiceName::PodConfig)).unwrap();
        fs::create_dir(dir.path().join("manifests")).unwrap();
        Self { dir, config, environment: Vec::new() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn manifest(&self, name: &str) -> PathBuf {
        self.path("manifests").join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.manifest(name), text).unwrap();
    }

    /// Writes a manifest that was modified a minute ago, so that a starting service reads it at once.
    pub fn write_backdated(&self, name: &str, text: &str) {
        self.write(name, text);
        backdate(&self.manifest(name));
    }

    /// The database of the service's checkpoint.
    pub fn checkpoint(&self) -> PathBuf {
        self.config.paths.state(ServiceName::PodConfig).join("checkpoint.redb")
    }

    pub fn start(&self) -> Service {
        let file = self.path("run/config.json");
        store_config(&file, &self.config, ConfigExtras::default()).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_keelson-pod-config"))
            .arg("--config")
            .arg(&file)
            .envs(self.environment.clone())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, log) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || {
            stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let socket = self.config.paths.socket(ServiceName::PodConfig);
        let mut service =
            Service { child, log, channel: connect_unix("pod-config", &socket), seen: Vec::new() };
        service.wait_for_event("service_ready");
        service
    }
}

impl Service {
    /// Waits for a log line that contains the text, after those returned before.
    pub fn wait_for_log(&mut self, text: &str) -> String {
        let end = std::time::Instant::now() + TIMEOUT;
        loop {
            let left = end.saturating_duration_since(std::time::Instant::now());
            match self.log.recv_timeout(left) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if line.contains(text) {
                        return line;
                    }
                }
                Err(_) => panic!("no line with {text:?} in\n{}", self.seen.join("\n")),
            }
        }
    }

    /// Waits for a log line with this `event` field, after those returned before.
    pub fn wait_for_event(&mut self, event: &str) -> String {
        self.wait_for_log(&event_field(event))
    }

    /// Waits until this many checkpoint rows have been written since the start.
    pub fn wait_for_rows(&mut self, rows: usize) {
        let mut written = 0;
        while written < rows {
            let line = self.wait_for_event("checkpoint_written");
            let number = line.split("rows=").nth(1).expect("the line says how many");
            let number: String = number.chars().take_while(char::is_ascii_digit).collect();
            written += number.parse::<usize>().unwrap();
        }
    }

    /// How many of the lines so far contain the text.
    pub fn count_log(&mut self, text: &str) -> usize {
        self.seen.extend(self.log.try_iter());
        self.seen.iter().filter(|line| line.contains(text)).count()
    }

    /// How many of the lines so far have this `event` field.
    pub fn count_event(&mut self, event: &str) -> usize {
        self.count_log(&event_field(event))
    }

    pub fn client(&self) -> PodConfigClient<PeerChannel> {
        PodConfigClient::new(self.channel.clone()).max_encoding_message_size(64 << 20)
    }

    pub async fn watch(&self) -> Watch {
        self.watch_with(pb::WatchPodsRequest::default()).await
    }

    /// A stream whose pods have no annotations of the agent.
    pub async fn watch_unannotated(&self) -> Watch {
        self.watch_with(pb::WatchPodsRequest { unannotated: true }).await
    }

    async fn watch_with(&self, request: pb::WatchPodsRequest) -> Watch {
        Watch(self.client().watch_pods(request).await.unwrap().into_inner())
    }

    pub async fn sources(&self) -> Vec<pb::Source> {
        self.client().list_sources(pb::ListSourcesRequest {}).await.unwrap().into_inner().sources
    }

    pub async fn problems(&self) -> Vec<pb::SourceProblem> {
        self.sources().await.into_iter().flat_map(|source| source.problems).collect()
    }

    pub async fn events(&self) -> Vec<Event> {
        let mut client = EventsClient::new(self.channel.clone());
        client.list_events(ListEventsRequest::default()).await.unwrap().into_inner().events
    }

    pub async fn condition(&self, name: &str) -> Option<Condition> {
        let mut client = AdminClient::new(self.channel.clone());
        let report = client.get_progress(GetProgressRequest {}).await.unwrap().into_inner();
        report.conditions.into_iter().find(|condition| condition.name == name)
    }

    pub async fn metrics(&self) -> String {
        let mut client = AdminClient::new(self.channel.clone());
        client.get_metrics(GetMetricsRequest {}).await.unwrap().into_inner().text
    }

    pub async fn apply(&self, text: &str) -> Result<Vec<pb::AppliedPod>, tonic::Status> {
        let request = pb::ApplyManifestRequest { manifest: text.into(), name_hint: "given.yaml".into() };
        self.client().apply_manifest(request).await.map(|answer| answer.into_inner().pods)
    }

    pub async fn delete(&self, name: &str) -> Result<String, tonic::Status> {
        let request = pb::DeleteManifestRequest { name: name.into(), ..Default::default() };
        self.client().delete_manifest(request).await.map(|answer| answer.into_inner().uid)
    }

    pub async fn delete_kind(&self, kind: &str, name: &str) -> Result<String, tonic::Status> {
        let request =
            pb::DeleteManifestRequest { kind: kind.into(), name: name.into(), ..Default::default() };
        self.client().delete_manifest(request).await.map(|answer| answer.into_inner().uid)
    }

    /// The PersistentVolumes or the claims as `ListVolumeObjects` returns them.
    pub async fn volume_objects(&self, kind: &str) -> Result<Vec<serde_json::Value>, tonic::Status> {
        let request = pb::ListVolumeObjectsRequest { kind: kind.into() };
        let mut stream = self.client().list_volume_objects(request).await?.into_inner();
        let mut objects = Vec::new();
        while let Some(item) = stream.message().await? {
            objects.push(serde_json::from_slice(&item.object_json).unwrap());
        }
        Ok(objects)
    }

    /// Sends SIGKILL: the service writes nothing.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM; returns the exit code.
    pub fn end(mut self) -> Option<i32> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.child.wait().unwrap().code()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A `WatchPods` stream.
pub struct Watch(Streaming<pb::WatchPodsResponse>);

impl Watch {
    pub async fn next(&mut self) -> Item {
        let message =
            tokio::time::timeout(TIMEOUT, self.0.message()).await.expect("an item is received in time");
        message.unwrap().expect("the stream continues").item.unwrap()
    }

    pub async fn pod(&mut self) -> pb::DesiredPod {
        match self.next().await {
            Item::Pod(pod) => pod,
            other => panic!("expected a pod, got {other:?}"),
        }
    }

    pub async fn removed_uid(&mut self) -> String {
        match self.next().await {
            Item::GoneUid(uid) => uid,
            other => panic!("expected a pod to go, got {other:?}"),
        }
    }

    /// Waits for the next pod of this UID; its removal may be sent before.
    pub async fn next_version_of(&mut self, uid: &str) -> pb::DesiredPod {
        loop {
            match self.next().await {
                Item::Pod(pod) if pod.uid == uid => return pod,
                Item::GoneUid(gone) if gone == uid => {}
                other => panic!("expected the pod again, got {other:?}"),
            }
        }
    }

    /// Pods and ready sources up to `synced`.
    pub async fn replay(&mut self) -> (Vec<pb::DesiredPod>, Vec<String>) {
        let (mut pods, mut sources) = (Vec::new(), Vec::new());
        loop {
            match self.next().await {
                Item::Pod(pod) => pods.push(pod),
                Item::SourceReady(ready) => sources.push(ready.source),
                Item::GoneUid(uid) => pods.retain(|pod| pod.uid != uid),
                Item::Synced(_) => return (pods, sources),
            }
        }
    }

    /// Waits for the end of the stream.
    pub async fn end(&mut self) {
        let drain = async { while let Ok(Some(_)) = self.0.message().await {} };
        tokio::time::timeout(TIMEOUT, drain).await.expect("the stream ends");
    }
}

/// The field as it is written in the log.
fn event_field(event: &str) -> String {
    format!("event=\"{event}\"")
}

/// The first image in a pod's JSON.
pub fn image(pod: &pb::DesiredPod) -> String {
    let json = std::str::from_utf8(&pod.pod_json).unwrap();
    json.split("\"image\":").nth(1).unwrap().split(',').next().unwrap().to_owned()
}

pub fn pod(name: &str, image: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  containers:\n  - name: main\n    image: {image}\n"
    )
}

/// Sets the modification time to a minute ago.
pub fn backdate(path: &Path) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_modified(std::time::SystemTime::now() - Duration::from_secs(60)).unwrap();
}

/// Replaces a file by rename.
pub fn replace(path: &Path, text: &str) {
    let temporary = path.with_file_name(".new");
    fs::write(&temporary, text).unwrap();
    fs::rename(&temporary, path).unwrap();
}
