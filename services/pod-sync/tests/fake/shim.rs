//! A fake of runtime-shim and the runtime.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use futures_util::{StreamExt as _, stream};
use k8s_cri::v1 as cri;
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_service_kit::{WatchHub, now_unix_nanos};
use keelson_testkit::fakes::{
    Conversation, FakeCriImages, FakeCriRuntime, FakeRuntime, Recorder, StreamAnswer,
};
use tokio::sync::{Semaphore, watch};
use tokio_stream::wrappers::WatchStream;
use tonic::Status;
use tonic::service::Routes;

use super::cri::answer_cri;
use super::watch_messages;

/// The pods in the runtime, the desired state that was sent, and the calls that were made.
pub struct Shim {
    pods: WatchHub<String, rt::RuntimePod>,
    state: Mutex<State>,
    unavailable: watch::Sender<bool>,
    /// The calls and what they named, in order.
    calls: Recorder<String>,
    desires: Recorder<rt::SyncRequest>,
    stops: Recorder<cri::StopContainerRequest>,
    updates: Recorder<cri::UpdateContainerResourcesRequest>,
}

#[derive(Default)]
struct State {
    ids: i64,
    held: Option<(Arc<Semaphore>, Arc<Semaphore>)>,
    commands: BTreeMap<String, (i32, String)>,
    held_commands: BTreeMap<String, (Arc<Semaphore>, Arc<Semaphore>)>,
    stops_held: bool,
    reads_fail: bool,
    images_fail: bool,
    missing_images: BTreeSet<String>,
    runtime: Option<(String, String)>,
    details: BTreeMap<String, Details>,
    handlers: Vec<rt::RuntimeHandler>,
    sources_are_ready: bool,
    late: BTreeSet<String>,
    updates_held: bool,
    updates_hang: bool,
    memory: u64,
}

/// What the runtime shows of a sandbox or container in its status.
#[derive(Clone, Default)]
pub(super) struct Details {
    pub(super) labels: BTreeMap<String, String>,
    pub(super) annotations: BTreeMap<String, String>,
    /// The configuration that it was created with.
    config: serde_json::Value,
}

impl Details {
    pub(super) fn info(&self) -> HashMap<String, String> {
        [("info".to_owned(), serde_json::json!({"config": self.config}).to_string())].into()
    }
}

impl Shim {
    /// A runtime without pods, and what serves it at the socket of runtime-shim.
    pub(super) fn start() -> (Arc<Self>, Routes) {
        let (runtime, cri) = (FakeRuntime::default(), FakeCriRuntime::default());
        let shim = Arc::new(Self {
            pods: WatchHub::new(),
            state: Mutex::default(),
            unavailable: watch::Sender::default(),
            calls: Recorder::default(),
            desires: runtime.sync.messages().clone(),
            stops: cri.stop_container.requests().clone(),
            updates: cri.update_container_resources.requests().clone(),
        });
        answer_runtime(&shim, &runtime);
        answer_cri(&shim, &cri);
        let images = FakeCriImages::default();
        images.image_status.answer(cri::ImageStatusResponse::default());
        (shim, Routes::new(runtime.server()).add_service(cri.server()).add_service(images.server()))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// The runtime supports recursive read-only mounts in its default handler, or only in another one.
    pub fn mounts_recursively(&self, default: bool) {
        let handler = |name: &str, recursive_read_only_mounts| rt::RuntimeHandler {
            name: name.into(),
            recursive_read_only_mounts,
            user_namespaces: false,
        };
        self.state().handlers = vec![handler("", default), handler("other", true)];
    }

    /// Sets the name and version of the runtime.
    pub fn set_runtime(&self, name: &str, version: &str) {
        self.state().runtime = Some((name.to_owned(), version.to_owned()));
    }

    /// Sets what the status of a sandbox or container shows.
    pub fn set_details(
        &self,
        id: &str,
        labels: BTreeMap<String, String>,
        annotations: BTreeMap<String, String>,
        config: serde_json::Value,
    ) {
        self.state().details.insert(id.to_owned(), Details { labels, annotations, config });
    }

    pub(super) fn details(&self, id: &str) -> Details {
        self.state().details.get(id).cloned().unwrap_or_default()
    }

    /// Makes the runtime unavailable, or available again.
    pub fn set_unavailable(&self, unavailable: bool) {
        self.unavailable.send_replace(unavailable);
    }

    /// The error of calls while the runtime is unavailable.
    pub(super) fn check_available(&self) -> Result<(), Status> {
        if *self.unavailable.borrow() {
            Err(Status::unavailable("the runtime does not answer"))
        } else {
            Ok(())
        }
    }

    fn runtime_state(&self) -> rt::RuntimeState {
        let unavailable = *self.unavailable.borrow();
        let (name, version) = self.state().runtime.clone().unwrap_or_else(|| ("fake".into(), String::new()));
        rt::RuntimeState {
            name,
            version,
            ready: !unavailable,
            network_ready: true,
            message: if unavailable { "the runtime does not answer".into() } else { String::new() },
            handlers: self.state().handlers.clone(),
            ..rt::RuntimeState::default()
        }
    }

    /// Whether the present pod-sync has said that every source has reported: other pods may be removed.
    pub fn sources_ready(&self) -> bool {
        self.state().sources_are_ready
    }

    /// The number of calls that create, start, stop or remove something.
    pub fn mutating_calls(&self) -> usize {
        const MUTATING: [&str; 6] = [
            "RunPodSandbox",
            "CreateContainer",
            "StartContainer",
            "StopContainer",
            "StopPodSandbox",
            "RemoveContainer",
        ];
        MUTATING.iter().map(|act| self.calls(act)).sum()
    }

    /// The methods that were called, in order.
    pub fn order(&self) -> Vec<String> {
        self.calls.all()
    }

    /// How many times a method was called; for `GetPod` the UID follows its name.
    pub fn calls(&self, method: &str) -> usize {
        self.calls.all().iter().filter(|call| *call == method).count()
    }

    /// How many calls so far begin with this text.
    pub fn calls_beginning(&self, text: &str) -> usize {
        self.calls.all().iter().filter(|call| call.starts_with(text)).count()
    }

    pub(super) fn called(&self, method: &str) {
        self.calls.record(method.to_owned());
    }

    /// The next number of a sequence.
    pub(super) fn next(&self) -> i64 {
        let mut state = self.state();
        state.ids += 1;
        state.ids
    }

    /// What pod-sync has requested for a pod.
    pub fn want(&self, uid: &str) -> Option<common::Want> {
        self.desires.last_desire(uid).map(|desire| desire.want())
    }

    /// The images that pod-sync has named as those of a pod.
    pub fn images(&self, uid: &str) -> Vec<String> {
        self.desires.last_desire(uid).map(|desire| desire.images).unwrap_or_default()
    }

    /// A pod in the runtime.
    pub fn pod(&self, uid: &str) -> Option<rt::RuntimePod> {
        self.pods.get(&uid.to_owned())
    }

    pub(super) fn all(&self) -> Vec<rt::RuntimePod> {
        self.pods.snapshot().into_iter().map(|(_, pod)| pod).collect()
    }

    /// Changes a pod and notifies watchers.
    pub fn change(&self, uid: &str, change: impl FnOnce(&mut rt::RuntimePod)) {
        let mut pod =
            self.pod(uid).unwrap_or_else(|| rt::RuntimePod { uid: uid.into(), ..Default::default() });
        change(&mut pod);
        pod.observed_boot_nanos = self.next();
        self.pods.set(uid.to_owned(), pod);
    }

    /// The running container of a pod exits with this code.
    pub fn exit(&self, uid: &str, code: i32) {
        self.change(uid, |pod| {
            for container in pod.containers.iter_mut().filter(|c| c.state() == rt::ContainerState::Running) {
                container.set_state(rt::ContainerState::Exited);
                container.exit_code = code;
                container.finished_unix_nanos = now_unix_nanos();
            }
        });
    }

    /// A sandbox of the pod appears when its volumes are unmounted: the runtime completes an interrupted creation.
    pub fn add_late_sandbox(&self, uid: &str) {
        self.state().late.insert(uid.to_owned());
    }

    pub(super) fn create_late_sandbox(&self, uid: &str) {
        if self.state().late.remove(uid) {
            let late = rt::Sandbox { id: format!("{uid}-late"), ready: true, ..rt::Sandbox::default() };
            self.change(uid, |pod| pod.sandboxes.push(late));
        }
    }

    /// Waits until no sandbox of the pod is ready.
    pub(super) async fn until_sandboxes_stopped(&self, uid: &str) {
        let mut changes = self.pods.subscribe();
        while self.pod(uid).is_some_and(|pod| pod.sandboxes.iter().any(|sandbox| sandbox.ready)) {
            changes.next().await;
        }
    }

    /// Removes all records of a pod.
    pub fn remove(&self, uid: &str) {
        self.pods.remove(&uid.to_owned());
    }

    /// The timeouts of all `StopContainer` so far, in seconds.
    pub fn stop_timeouts(&self) -> Vec<i64> {
        self.stops.all().iter().map(|stop| stop.timeout).collect()
    }

    /// The updates of containers, in order: the resources of each.
    pub fn updates(&self) -> Vec<cri::LinuxContainerResources> {
        self.updates.all().into_iter().filter_map(|update| update.linux).collect()
    }

    /// Updates of containers fail as if the runtime were not there, or work again.
    pub fn hold_updates(&self, held: bool) {
        self.state().updates_held = held;
    }

    /// Updates of containers never return.
    pub fn hang_updates(&self) {
        self.state().updates_hang = true;
    }

    pub(super) fn updates_hang(&self) -> bool {
        self.state().updates_hang
    }

    pub(super) fn updates_are_held(&self) -> bool {
        self.state().updates_held
    }

    /// The memory that each container uses, in bytes.
    pub fn use_memory(&self, bytes: u64) {
        self.state().memory = bytes;
    }

    pub(super) fn memory(&self) -> u64 {
        self.state().memory
    }

    pub(super) fn stops_are_held(&self) -> bool {
        self.state().stops_held
    }

    /// Stops of containers do not complete from now on.
    pub fn hold_stops(&self) {
        self.state().stops_held = true;
    }

    /// Stops of containers complete again.
    pub fn release_stops(&self) {
        self.state().stops_held = false;
    }

    /// Sets the exit code and output of commands with this first word; others exit with 0.
    pub fn command(&self, word: &str, code: i32, output: &str) {
        self.state().commands.insert(word.to_owned(), (code, output.to_owned()));
    }

    pub(super) fn outcome(&self, word: &str) -> (i32, String) {
        self.state().commands.get(word).cloned().unwrap_or_default()
    }

    /// From now on each command with this first word adds a permit to the first semaphore, and takes its outcome when it gets a
    /// permit of the second.
    pub fn hold_command(&self, word: &str) -> (Arc<Semaphore>, Arc<Semaphore>) {
        let held = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        self.state().held_commands.insert(word.to_owned(), held.clone());
        held
    }

    /// Later commands with this first word are not held any more. One that is held stays so.
    pub fn release_command(&self, word: &str) {
        self.state().held_commands.remove(word);
    }

    pub(super) async fn pass(&self, word: &str) {
        let held = self.state().held_commands.get(word).cloned();
        if let Some((arrived, answer)) = held {
            arrived.add_permits(1);
            answer.acquire().await.unwrap().forget();
        }
    }

    /// From now on each `GetPod` takes its result, adds a permit to the first semaphore, and returns the result when it gets a
    /// permit of the second.
    pub fn hold_reads(&self) -> (Arc<Semaphore>, Arc<Semaphore>) {
        let held = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        self.state().held = Some(held.clone());
        held
    }

    /// Every image pull fails from now on, and is retried after five minutes.
    pub fn fail_images(&self) {
        self.state().images_fail = true;
    }

    /// Pulls of this image fail from now on.
    pub fn fail_image(&self, image: &str) {
        self.state().missing_images.insert(image.to_owned());
    }

    /// Sets whether each `GetPod` fails.
    pub fn fail_reads(&self, refuse: bool) {
        self.state().reads_fail = refuse;
    }

    /// Reads return at once again.
    pub fn release_reads(&self) {
        self.state().held = None;
    }
}

/// Scripts what runtime-shim adds to CRI.
fn answer_runtime(shim: &Arc<Shim>, fake: &FakeRuntime) {
    let answering = Arc::clone(shim);
    fake.sync.handle(move |conversation| {
        answering.state().sources_are_ready = false;
        acknowledge_sets(Arc::clone(&answering), conversation)
    });
    let answering = Arc::clone(shim);
    fake.watch_pods.answer_with(move |_| Ok(watch_pods(&answering)));
    let answering = Arc::clone(shim);
    fake.get_pod.answer_async(move |request| get_pod(Arc::clone(&answering), request.uid));
    let answering = Arc::clone(shim);
    fake.ensure_image
        .answer_with(move |request| Ok(StreamAnswer::items([ensure_image(&answering, &request)])));
    fake.write_container_files.answer(rt::WriteContainerFilesResponse::default());
}

/// Acknowledges each set, and notes whether every source has reported.
async fn acknowledge_sets(
    shim: Arc<Shim>,
    mut conversation: Conversation<rt::SyncRequest, common::SyncAck>,
) -> Result<(), Status> {
    while let Some(message) = conversation.next().await {
        if let Some(rt::sync_request::Item::Complete(set)) = message.item {
            shim.state().sources_are_ready |= set.sources_ready;
            conversation.send(common::SyncAck { epoch: set.epoch }).await;
        }
    }
    Ok(())
}

/// The state of the runtime, then its pods and changes of both.
fn watch_pods(shim: &Arc<Shim>) -> StreamAnswer<rt::WatchPodsResponse> {
    use rt::watch_pods_response::Item;
    let changes = WatchStream::from_changes(shim.unavailable.subscribe());
    let now = Item::State(shim.runtime_state());
    let answering = Arc::clone(shim);
    let later = changes.map(move |_| Item::State(answering.runtime_state()));
    let pods = watch_messages(&shim.pods, Item::Pod, Item::GoneUid, Item::Synced);
    let items = stream::iter([now]).chain(stream::select(pods, later));
    StreamAnswer::stream(items.map(|item| Ok(rt::WatchPodsResponse { item: Some(item) })))
}

async fn get_pod(shim: Arc<Shim>, uid: String) -> Result<rt::GetPodResponse, Status> {
    shim.called(&format!("GetPod {uid}"));
    if shim.state().reads_fail {
        return Err(Status::internal("the record is broken"));
    }
    shim.check_available()?;
    let observed_boot_nanos = shim.next();
    let found = shim.pod(&uid).unwrap_or_else(|| rt::RuntimePod { uid, ..Default::default() });
    let held = shim.state().held.clone();
    if let Some((read, answer)) = held {
        read.add_permits(1);
        answer.acquire().await.unwrap().forget();
    }
    Ok(rt::GetPodResponse { pod: Some(rt::RuntimePod { observed_boot_nanos, ..found }) })
}

fn ensure_image(shim: &Shim, request: &rt::EnsureImageRequest) -> rt::EnsureImageResponse {
    use rt::ensure_image_response::Item;
    let rt::EnsureImageRequest { container, image, pull_policy, pull_secrets, .. } = request;
    let wanted = if container.is_empty() { "a volume" } else { container };
    shim.called(&format!("image {image} for {wanted}: {pull_policy} {}", pull_secrets.join(" ")));
    let missing = shim.state().images_fail || shim.state().missing_images.contains(image);
    let item = Some(if missing {
        Item::Failed(rt::ImageFailed {
            reason: "ImagePullBackOff".into(),
            message: "the registry does not have it".into(),
            next_retry_unix_nanos: now_unix_nanos() + 300_000_000_000,
        })
    } else if container.is_empty() {
        let message = format!("{image} is present");
        Item::Done(rt::ImageDone { image_ref: format!("sha256:{image}"), message, ..Default::default() })
    } else {
        Item::Done(rt::ImageDone { image_ref: "sha256:1".into(), ..Default::default() })
    });
    rt::EnsureImageResponse { item }
}
