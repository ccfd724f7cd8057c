//! A fake of runtime-shim and the runtime.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use futures_util::{Stream, StreamExt as _, stream};
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_proto::keelson::runtime::v1::runtime_server::{Runtime, RuntimeServer};
use keelson_service_kit::{WatchHub, WatchItem, now_unix_nanos};
use tokio::sync::{Semaphore, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use super::cri::Cri;

pub type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The pods in the runtime, the desired state that was sent, and the calls that were made.
#[derive(Default)]
pub struct Shim {
    pods: WatchHub<String, rt::RuntimePod>,
    state: Mutex<State>,
    unavailable: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    calls: HashMap<String, usize>,
    /// The calls in order.
    order: Vec<String>,
    wants: BTreeMap<String, common::Want>,
    ids: i64,
    held: Option<(Arc<Semaphore>, Arc<Semaphore>)>,
    commands: BTreeMap<String, (i32, String)>,
    stops: Vec<i64>,
    stops_held: bool,
    reads_fail: bool,
    images_fail: bool,
    handlers: Vec<rt::RuntimeHandler>,
    sources_are_ready: bool,
    late: BTreeSet<String>,
}

pub fn routes(shim: &Arc<Shim>) -> Routes {
    Routes::new(RuntimeServer::new(Handle(Arc::clone(shim)))).add_service(Cri(Arc::clone(shim)))
}

impl Shim {
    /// The runtime supports recursive read-only mounts in its default handler, or only in another one.
    pub fn mounts_recursively(&self, default: bool) {
        let handler = |name: &str, recursive_read_only_mounts| rt::RuntimeHandler {
            name: name.into(),
            recursive_read_only_mounts,
            user_namespaces: false,
        };
        self.state.lock().unwrap().handlers = vec![handler("", default), handler("other", true)];
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
        rt::RuntimeState {
            name: "fake".into(),
            ready: !unavailable,
            network_ready: true,
            message: if unavailable { "the runtime does not answer".into() } else { String::new() },
            handlers: self.state.lock().unwrap().handlers.clone(),
            ..rt::RuntimeState::default()
        }
    }

    /// Whether the present pod-sync has said that every source has reported: other pods may be removed.
    pub fn sources_ready(&self) -> bool {
        self.state.lock().unwrap().sources_are_ready
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
        self.state.lock().unwrap().order.clone()
    }

    /// How many times a method was called; for `GetPod` the UID follows its name.
    pub fn calls(&self, method: &str) -> usize {
        self.state.lock().unwrap().calls.get(method).copied().unwrap_or(0)
    }

    pub(super) fn called(&self, method: &str) {
        let mut state = self.state.lock().unwrap();
        *state.calls.entry(method.to_owned()).or_default() += 1;
        state.order.push(method.to_owned());
    }

    /// The next number of a sequence.
    pub(super) fn next(&self) -> i64 {
        let mut state = self.state.lock().unwrap();
        state.ids += 1;
        state.ids
    }

    /// What pod-sync has requested for a pod.
    pub fn want(&self, uid: &str) -> Option<common::Want> {
        self.state.lock().unwrap().wants.get(uid).copied()
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
        self.state.lock().unwrap().late.insert(uid.to_owned());
    }

    pub(super) fn create_late_sandbox(&self, uid: &str) {
        if self.state.lock().unwrap().late.remove(uid) {
            let late = rt::Sandbox { id: format!("{uid}-late"), ready: true, ..rt::Sandbox::default() };
            self.change(uid, |pod| pod.sandboxes.push(late));
        }
    }

    /// Removes all records of a pod.
    pub fn remove(&self, uid: &str) {
        self.pods.remove(&uid.to_owned());
    }

    /// The timeouts of all `StopContainer` so far, in seconds.
    pub fn stop_timeouts(&self) -> Vec<i64> {
        self.state.lock().unwrap().stops.clone()
    }

    pub(super) fn stopping(&self, timeout: i64) -> bool {
        let mut state = self.state.lock().unwrap();
        state.stops.push(timeout);
        !state.stops_held
    }

    /// Stops of containers do not complete from now on.
    pub fn hold_stops(&self) {
        self.state.lock().unwrap().stops_held = true;
    }

    /// Stops of containers complete again.
    pub fn release_stops(&self) {
        self.state.lock().unwrap().stops_held = false;
    }

    /// Sets the exit code and output of commands with this first word; others exit with 0.
    pub fn command(&self, word: &str, code: i32, output: &str) {
        self.state.lock().unwrap().commands.insert(word.to_owned(), (code, output.to_owned()));
    }

    pub(super) fn outcome(&self, word: &str) -> (i32, String) {
        self.state.lock().unwrap().commands.get(word).cloned().unwrap_or_default()
    }

    /// From now on each `GetPod` takes its result, adds a permit to the first semaphore, and returns the result when it gets a
    /// permit of the second.
    pub fn hold_reads(&self) -> (Arc<Semaphore>, Arc<Semaphore>) {
        let held = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        self.state.lock().unwrap().held = Some(held.clone());
        held
    }

    /// Every image pull fails from now on, and is retried after five minutes.
    pub fn fail_images(&self) {
        self.state.lock().unwrap().images_fail = true;
    }

    /// Sets whether each `GetPod` fails.
    pub fn fail_reads(&self, refuse: bool) {
        self.state.lock().unwrap().reads_fail = refuse;
    }

    /// Reads return at once again.
    pub fn release_reads(&self) {
        self.state.lock().unwrap().held = None;
    }
}

struct Handle(Arc<Shim>);

#[tonic::async_trait]
impl Runtime for Handle {
    type SyncStream = Answers<common::SyncAck>;
    type WatchPodsStream = Answers<rt::WatchPodsResponse>;
    type EnsureImageStream = Answers<rt::EnsureImageResponse>;
    type ReadLogsStream = Answers<rt::ReadLogsResponse>;
    type ExecStream = Answers<rt::ExecResponse>;
    type StreamStream = Answers<rt::StreamResponse>;

    async fn sync(
        &self,
        request: Request<Streaming<rt::SyncRequest>>,
    ) -> Result<Response<Self::SyncStream>, Status> {
        use rt::sync_request::Item;
        let (mut items, shim) = (request.into_inner(), Arc::clone(&self.0));
        let (acks, receiver) = tokio::sync::mpsc::channel(8);
        shim.state.lock().unwrap().sources_are_ready = false;
        tokio::spawn(async move {
            while let Ok(Some(message)) = items.message().await {
                match message.item.unwrap() {
                    Item::Pod(desire) => {
                        let want = desire.want();
                        shim.state.lock().unwrap().wants.insert(desire.pod.unwrap().uid, want);
                    }
                    Item::DroppedUid(uid) => {
                        shim.state.lock().unwrap().wants.remove(&uid);
                    }
                    Item::Complete(end) => {
                        shim.state.lock().unwrap().sources_are_ready |= end.sources_ready;
                        let _ = acks.send(Ok(common::SyncAck { epoch: end.epoch })).await;
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn watch_pods(
        &self,
        _: Request<rt::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        use rt::watch_pods_response::Item;
        let answer = |item| Ok(rt::WatchPodsResponse { item: Some(item) });
        let unavailable = self.0.unavailable.subscribe();
        let now = answer(Item::State(self.0.runtime_state()));
        let later =
            stream::unfold((unavailable, Arc::clone(&self.0)), move |(mut unavailable, shim)| async move {
                unavailable.changed().await.ok()?;
                let item = answer(Item::State(shim.runtime_state()));
                Some((item, (unavailable, shim)))
            });
        let pods = self.0.pods.subscribe().into_stream(move |item| match item {
            WatchItem::Set(_, pod) => answer(Item::Pod(pod)),
            WatchItem::Gone(uid) => answer(Item::GoneUid(uid)),
            WatchItem::Synced => answer(Item::Synced(common::Synced {})),
        });
        Ok(Response::new(Box::pin(stream::iter([now]).chain(stream::select(pods, later)))))
    }

    async fn get_pod(
        &self,
        request: Request<rt::GetPodRequest>,
    ) -> Result<Response<rt::GetPodResponse>, Status> {
        let uid = request.into_inner().uid;
        self.0.called(&format!("GetPod {uid}"));
        if self.0.state.lock().unwrap().reads_fail {
            return Err(Status::internal("the record is broken"));
        }
        self.0.check_available()?;
        let at = self.0.next();
        let found = self.0.pod(&uid).unwrap_or_else(|| rt::RuntimePod { uid, ..Default::default() });
        let held = self.0.state.lock().unwrap().held.clone();
        if let Some((read, answer)) = held {
            read.add_permits(1);
            answer.acquire().await.unwrap().forget();
        }
        Ok(Response::new(rt::GetPodResponse {
            pod: Some(rt::RuntimePod { observed_boot_nanos: at, ..found }),
        }))
    }

    async fn ensure_image(
        &self,
        _: Request<rt::EnsureImageRequest>,
    ) -> Result<Response<Self::EnsureImageStream>, Status> {
        use rt::ensure_image_response::Item;
        let item = Some(if self.0.state.lock().unwrap().images_fail {
            Item::Failed(rt::ImageFailed {
                reason: "ImagePullBackOff".into(),
                message: "the registry does not have it".into(),
                next_retry_unix_nanos: now_unix_nanos() + 300_000_000_000,
            })
        } else {
            Item::Done(rt::ImageDone { image_ref: "sha256:1".into(), ..Default::default() })
        });
        Ok(Response::new(Box::pin(stream::iter([Ok(rt::EnsureImageResponse { item })]))))
    }

    async fn write_container_files(
        &self,
        _: Request<rt::WriteContainerFilesRequest>,
    ) -> Result<Response<rt::WriteContainerFilesResponse>, Status> {
        Ok(Response::new(rt::WriteContainerFilesResponse::default()))
    }

    async fn read_logs(
        &self,
        _: Request<rt::ReadLogsRequest>,
    ) -> Result<Response<Self::ReadLogsStream>, Status> {
        Err(Status::unimplemented("not faked"))
    }

    async fn filesystem_stats(
        &self,
        _: Request<rt::FilesystemStatsRequest>,
    ) -> Result<Response<rt::FilesystemStatsResponse>, Status> {
        Err(Status::unimplemented("not faked"))
    }

    async fn list_images(
        &self,
        _: Request<rt::ListImagesRequest>,
    ) -> Result<Response<rt::ListImagesResponse>, Status> {
        Err(Status::unimplemented("not faked"))
    }

    async fn stream(
        &self,
        _: Request<Streaming<rt::StreamRequest>>,
    ) -> Result<Response<Self::StreamStream>, Status> {
        Err(Status::unimplemented("not faked"))
    }

    async fn exec(
        &self,
        _: Request<Streaming<rt::ExecRequest>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        Err(Status::unimplemented("not faked"))
    }

    async fn collect_garbage(
        &self,
        _: Request<rt::CollectGarbageRequest>,
    ) -> Result<Response<rt::CollectGarbageResponse>, Status> {
        Err(Status::unimplemented("not faked"))
    }
}
