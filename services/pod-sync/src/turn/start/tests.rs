//! Starts against a fake runtime-shim with the responses of a test, on a socket of its own.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Mutex;
use std::task::{Context as TaskContext, Poll};

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, Full};
use k8s_cri::v1 as cri;
use keelson_config::{Config, ServiceName};
use keelson_kube_model::{ContainerId, Pod};
use keelson_pod_sync_core::actions::SandboxPlan;
use keelson_pod_sync_core::explain::YOU;
use keelson_pod_sync_core::observation::{PodObservation, SandboxObservation};
use keelson_pod_sync_core::reason::Reason;
use keelson_pod_sync_core::worker::{Input, UpdateKind, WorkerState};
use keelson_proto::keelson::events::v1 as events;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_proto::keelson::runtime::v1 as runtime;
use keelson_service_kit::server::{CallerPolicy, StackLayer, serve};
use keelson_service_kit::status::{PEER_UNAVAILABLE, error};
use keelson_service_kit::{CancellationToken, Context};
use keelson_testkit::eventually;
use prost::Message;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::{Code, Status};

use super::*;
use crate::effects::images::fetch_all;

/// A response instead of the default one.
#[derive(Debug, Clone)]
enum Answer {
    Fail(Status),
    Never,
    Other(Vec<u8>),
}

#[derive(Debug, Default)]
struct Shim {
    answers: HashMap<&'static str, Answer>,
    calls: Vec<String>,
}

impl Shim {
    fn usual(method: &str) -> Vec<u8> {
        match method {
            "EnsureImage" => {
                let message = "Container image \"i:1\" already present on machine".into();
                let done = runtime::ImageDone { image_ref: "sha256:1".into(), message, ..Default::default() };
                let item = Some(runtime::ensure_image_response::Item::Done(done));
                runtime::EnsureImageResponse { item }.encode_to_vec()
            }
            "CreateContainer" => cri::CreateContainerResponse { container_id: "made".into() }.encode_to_vec(),
            "ContainerStatus" => container_in(cri::ContainerState::ContainerCreated),
            _ => Vec::new(),
        }
    }
}

fn container_in(state: cri::ContainerState) -> Vec<u8> {
    let status = cri::ContainerStatus { state: state.into(), ..Default::default() };
    cri::ContainerStatusResponse { status: Some(status), ..Default::default() }.encode_to_vec()
}

/// The fake as one of the two services on its socket.
struct Api<N>(Arc<Mutex<Shim>>, PhantomData<fn() -> N>);
struct OwnApi;
struct CriApi;

impl NamedService for Api<OwnApi> {
    const NAME: &'static str = "keelson.runtime.v1.Runtime";
}

impl NamedService for Api<CriApi> {
    const NAME: &'static str = "runtime.v1.RuntimeService";
}

impl<N> Clone for Api<N> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0), PhantomData)
    }
}

impl<N> tower::Service<Request<Body>> for Api<N> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let shim = Arc::clone(&self.0);
        Box::pin(async move { Ok(respond(&shim, request).await) })
    }
}

async fn respond(shim: &Mutex<Shim>, request: Request<Body>) -> Response<Body> {
    let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
    let answer = {
        let mut shim = shim.lock().unwrap();
        shim.calls.push(method.clone());
        shim.answers.get(method.as_str()).cloned()
    };
    match answer {
        Some(Answer::Fail(status)) => return status.into_http(),
        Some(Answer::Never) => std::future::pending().await,
        Some(Answer::Other(message)) => return framed(&message),
        None => {}
    }
    framed(&Shim::usual(&method))
}

fn framed(message: &[u8]) -> Response<Body> {
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).unwrap());
    framed.extend_from_slice(message);
    let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static("0"))]);
    let body = Full::new(framed.freeze()).with_trailers(std::future::ready(Some(Ok(trailers))));
    let mut response = Response::new(Body::new(body));
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}

/// A pod with one container, `main`, to be started in an existing sandbox.
struct Bench {
    shim: Arc<Mutex<Shim>>,
    effects: Arc<Effects>,
    job: Job,
    desired: Arc<DesiredPod>,
    pulled: PulledImages,
    _dir: tempfile::TempDir,
}

impl Bench {
    /// `main` has these additional fields.
    async fn new(fields: Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.run_dir = dir.path().to_owned();
        config.users.operator_gid = 64_200;
        let socket = keelson_config::Paths::socket_below(dir.path(), ServiceName::RuntimeShim);
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        let shim = Arc::new(Mutex::new(Shim::default()));
        let own: Api<OwnApi> = Api(Arc::clone(&shim), PhantomData);
        let cri: Api<CriApi> = Api(Arc::clone(&shim), PhantomData);
        let stack = StackLayer::new(CallerPolicy::new(&config), Default::default());
        let (bound, is_bound) = oneshot::channel();
        tokio::spawn(async move {
            let routes = Routes::new(own).add_service(cri);
            serve(&socket, routes, stack, CancellationToken::new(), || bound.send(()).unwrap())
                .await
                .unwrap();
        });
        is_bound.await.unwrap();
        let context = Context::detached(ServiceName::PodSync, config);
        // The pod has no worker that would act on it.
        context.shutdown.cancel();
        let effects = Effects::new(context, None);
        let mut container = json!({"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent"});
        container.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "default", "uid": "u"},
            "spec": {"dnsPolicy": "Default", "containers": [container]},
        }))
        .unwrap();
        effects.registry.apply("u", &Input::Update { kind: UpdateKind::Create, pod: &pod, observed: None });
        let desired = Arc::new(DesiredPod {
            pod: Arc::new(pod),
            raw: Bytes::new(),
            source: "file".into(),
            traceparent: String::new(),
            revision: 1,
            added_unix_nanos: 0,
        });
        let sandbox = SandboxObservation {
            id: "s".into(),
            ready: true,
            ips: vec!["10.0.0.2".into()],
            ..SandboxObservation::default()
        };
        let observed =
            PodObservation { uid: "u".into(), sandboxes: vec![sandbox], ..PodObservation::default() };
        let job = Job {
            uid: "u".into(),
            worker: WorkerState::default(),
            desired: Some(Arc::clone(&desired)),
            observed: Arc::new(observed),
            cancel: CancellationToken::new(),
        };
        Self { shim, effects, job, desired, pulled: PulledImages::default(), _dir: dir }
    }

    fn answer(&self, method: &'static str, answer: Answer) {
        self.shim.lock().unwrap().answers.insert(method, answer);
    }

    fn calls(&self, method: &str) -> usize {
        self.shim.lock().unwrap().calls.iter().filter(|c| *c == method).count()
    }

    /// One start of `main`, in a new sandbox if `sandbox` is given.
    async fn start(&self, sandbox: Option<SandboxPlan>) -> Result<(), StartError> {
        self.start_in_place_of(None, sandbox).await
    }

    /// One start of `main`, replacing a container that was created and not started.
    async fn start_in_place_of(
        &self,
        unstarted: Option<&str>,
        sandbox: Option<SandboxPlan>,
    ) -> Result<(), StartError> {
        let start = Start {
            effects: &self.effects,
            job: &self.job,
            desired: &self.desired,
            observed: &self.job.observed,
            mounts: Mounts::default(),
            cgroup_parent: String::new(),
            pulled: &self.pulled,
        };
        let main = StartContainer {
            name: "main".into(),
            kind: ContainerKind::Regular,
            attempt: 0,
            attempt_from_logs: false,
            replaces: unstarted.map(|id| ContainerId(id.to_owned())),
            reason: Reason::ContainerNotStarted,
            backoff: None,
        };
        let images = fetch_all(&self.effects, &self.pulled, &self.desired.pod, ["main"]);
        let actions = PodActions { create_sandbox: sandbox, start: vec![main], ..PodActions::default() };
        Box::pin(start_containers(&start, &actions, images)).await
    }

    async fn error(&self) -> SyncError {
        match self.start(None).await {
            Err(StartError::Failed(error)) => error,
            other => panic!("{other:?}"),
        }
    }

    fn owner(&self, step: StepName, subject: &str) -> Option<String> {
        self.effects
            .registry
            .with("u", |e| e.steps.get(step, subject).map(|c| c.owner.clone().into_owned()))
            .unwrap()
    }

    fn reasons(&self) -> Vec<String> {
        self.effects
            .registry
            .with("u", |e| e.start.errors.values().map(|(reason, _)| reason.clone()).collect())
            .unwrap()
    }

    async fn warnings(&self) -> Vec<String> {
        self.events_of("Warning").await
    }

    async fn events_of(&self, kind: &str) -> Vec<String> {
        let request = tonic::Request::new(events::ListEventsRequest::default());
        let events = self.effects.context.events.list_events(request).await.unwrap().into_inner().events;
        let events = events.into_iter().filter(|e| e.r#type == kind);
        events.map(|e| format!("{}: {}", e.reason, e.message)).collect()
    }
}

fn unavailable() -> Answer {
    Answer::Fail(error(Code::Unavailable, PEER_UNAVAILABLE, "the container runtime is not reachable"))
}

fn hook() -> Value {
    json!({"lifecycle": {"postStart": {"exec": {"command": ["true"]}}}})
}

#[tokio::test]
async fn removing_a_pod_during_its_post_start_hook_is_no_error() {
    let bench = Bench::new(hook()).await;
    bench.answer("ExecSync", Answer::Never);
    let start = bench.start(None);
    let remove = async {
        eventually(Duration::from_secs(20), "the hook", async || bench.calls("ExecSync") == 1).await.unwrap();
        bench.job.cancel.cancel();
    };
    let (ended, ()) = tokio::join!(start, remove);
    assert!(matches!(ended, Err(StartError::Superseded)), "{ended:?}");
    assert_eq!(bench.warnings().await, Vec::<String>::new());
    assert_eq!(bench.reasons(), Vec::<String>::new());
}

#[tokio::test]
async fn a_cancelled_start_that_waits_records_no_event() {
    let bench = Bench::new(json!({})).await;
    bench.answer("EnsureImage", Answer::Never);
    bench.job.cancel.cancel();
    let ended = bench.start(None).await;
    assert!(matches!(ended, Err(StartError::Superseded)), "{ended:?}");
    let permits = u32::try_from(bench.effects.start_permits.available_permits()).unwrap();
    let _others_start = bench.effects.start_permits.acquire_many(permits).await.unwrap();
    let ended = bench.start(None).await;
    assert!(matches!(ended, Err(StartError::Superseded)), "{ended:?}");
    assert_eq!(bench.warnings().await, Vec::<String>::new());
}

#[tokio::test]
async fn runtime_errors_are_owned_by_you_and_lost_calls_by_the_service() {
    for (method, reason) in
        [("CreateContainer", "CreateContainerError"), ("StartContainer", "RunContainerError")]
    {
        let bench = Bench::new(json!({})).await;
        bench.answer(method, Answer::Fail(Status::unknown("failed to mount /none: no such file")));
        let error = bench.error().await;
        assert!(!error.peer_unavailable && error.message.ends_with("no such file"), "{error:?}");
        assert_eq!(bench.owner(StepName::Container, "main").as_deref(), Some(YOU), "{method}");
        assert_eq!(bench.reasons(), [reason]);

        // An unavailable service is in no event and in no status.
        let bench = Bench::new(json!({})).await;
        bench.answer(method, unavailable());
        assert!(bench.error().await.peer_unavailable);
        assert_eq!(bench.owner(StepName::Container, "main").as_deref(), Some("runtime-shim"), "{method}");
        assert_eq!(bench.warnings().await, Vec::<String>::new());
        assert_eq!(bench.reasons(), Vec::<String>::new());
    }
}

#[tokio::test]
async fn a_created_container_left_by_a_lost_call_is_removed_and_recreated() {
    let bench = Bench::new(json!({})).await;
    bench.start_in_place_of(Some("cut"), None).await.unwrap();
    let calls = |method| bench.calls(method);
    assert_eq!((calls("RemoveContainer"), calls("CreateContainer"), calls("StartContainer")), (1, 1, 1));
    // It may have been removed meanwhile.
    bench.answer("RemoveContainer", Answer::Fail(Status::not_found("no such container")));
    bench.start_in_place_of(Some("cut"), None).await.unwrap();
    bench.answer("RemoveContainer", Answer::Fail(Status::unknown("in use")));
    assert!(matches!(bench.start_in_place_of(Some("cut"), None).await, Err(StartError::Failed(_))));
    assert_eq!(bench.calls("CreateContainer"), 2);
}

#[tokio::test]
async fn a_container_that_was_started_after_all_is_not_removed_but_read_again() {
    for state in [cri::ContainerState::ContainerRunning, cri::ContainerState::ContainerExited] {
        let bench = Bench::new(json!({})).await;
        bench.answer("ContainerStatus", Answer::Other(container_in(state)));
        let ended = bench.start_in_place_of(Some("cut"), None).await;
        assert!(matches!(&ended, Err(StartError::Failed(t)) if t.peer_unavailable), "{ended:?}");
        assert_eq!((bench.calls("RemoveContainer"), bench.calls("CreateContainer")), (0, 0));
        assert!(
            bench.effects.registry.with("u", |state| state.runtime.freshness.stale()).flatten().is_some()
        );
        assert_eq!((bench.warnings().await, bench.reasons()), (Vec::new(), Vec::new()));
    }
    let bench = Bench::new(json!({})).await;
    bench.answer("ContainerStatus", Answer::Fail(Status::not_found("no such container")));
    bench.start_in_place_of(Some("cut"), None).await.unwrap();
    assert_eq!((bench.calls("RemoveContainer"), bench.calls("CreateContainer")), (0, 1));
}

/// A runtime's answer about a container whose first process has these further groups, in either of the two places.
fn container_with_groups(groups: &[i64], in_info: bool) -> Vec<u8> {
    let state = cri::ContainerState::ContainerCreated.into();
    let mut response = cri::ContainerStatusResponse::default();
    let mut status = cri::ContainerStatus { state, ..Default::default() };
    if in_info {
        let user = json!({"uid": 1000, "gid": 1000, "additionalGids": groups});
        let info = json!({"runtimeSpec": {"process": {"user": user}}});
        response.info.insert("info".to_owned(), info.to_string());
    } else {
        let linux = cri::LinuxContainerUser { uid: 1000, gid: 1000, supplemental_groups: groups.to_vec() };
        status.user = Some(cri::ContainerUser { linux: Some(linux) });
    }
    response.status = Some(status);
    response.encode_to_vec()
}

#[tokio::test]
async fn a_container_with_an_agent_id_from_its_image_is_removed_unstarted() {
    for in_info in [true, false] {
        let bench = Bench::new(json!({})).await;
        bench.answer("ContainerStatus", Answer::Other(container_with_groups(&[5, 64_200], in_info)));
        let error = bench.error().await;
        assert!(!error.peer_unavailable && error.message.contains("the id 64200"), "{error:?}");
        assert_eq!(bench.reasons(), ["CreateContainerConfigError"]);
        assert_eq!((bench.calls("RemoveContainer"), bench.calls("StartContainer")), (1, 0));

        let bench = Bench::new(json!({})).await;
        bench.answer("ContainerStatus", Answer::Other(container_with_groups(&[5, 64_199], in_info)));
        bench.start(None).await.unwrap();
        assert_eq!((bench.calls("RemoveContainer"), bench.calls("StartContainer")), (0, 1));
    }
    // An unavailable service is no error of the container.
    let bench = Bench::new(json!({})).await;
    bench.answer("ContainerStatus", unavailable());
    assert!(bench.error().await.peer_unavailable);
    assert_eq!(bench.calls("StartContainer"), 0);
}

#[tokio::test]
async fn a_container_with_a_numeric_agent_uid_is_not_created() {
    let bench = Bench::new(json!({"securityContext": {"runAsUser": 64_200}})).await;
    let error = bench.error().await;
    assert!(error.message.contains("the id 64200"), "{error:?}");
    assert_eq!((bench.calls("CreateContainer"), bench.calls("StartContainer")), (0, 0));
}

#[tokio::test]
async fn a_present_image_is_one_pulled_event_per_start() {
    let bench = Bench::new(json!({})).await;
    let pulled =
        async || bench.events_of("Normal").await.into_iter().filter(|e| e.starts_with("Pulled")).count();
    for _ in 0..5 {
        // Turns that end before the container starts: its volumes are not mounted.
        let mut images = fetch_all(&bench.effects, &bench.pulled, &bench.desired.pod, ["main"]);
        images.containers.remove("main").unwrap().outcome().await.unwrap();
    }
    assert_eq!(pulled().await, 0);
    bench.start(None).await.unwrap();
    assert_eq!(pulled().await, 1);
}

#[tokio::test]
async fn a_sandbox_network_error_is_owned_by_you() {
    let bench = Bench::new(json!({})).await;
    let plan = || Some(SandboxPlan { attempt: 1, replaces: None, reason: Reason::NoSandbox });
    bench.answer("RunPodSandbox", Answer::Fail(Status::unknown("plugin type=\"bridge\" failed (add)")));
    let ended = bench.start(plan()).await;
    assert!(matches!(&ended, Err(StartError::Failed(t)) if !t.peer_unavailable), "{ended:?}");
    assert_eq!(bench.owner(StepName::Sandbox, "").as_deref(), Some(YOU));
    bench.answer("RunPodSandbox", unavailable());
    let ended = bench.start(plan()).await;
    assert!(matches!(&ended, Err(StartError::Failed(t)) if t.peer_unavailable), "{ended:?}");
    assert_eq!(bench.owner(StepName::Sandbox, "").as_deref(), Some("runtime-shim"));
}

#[tokio::test]
async fn an_unavailable_runtime_is_no_image_error_and_no_back_off() {
    let bench = Bench::new(json!({})).await;
    bench.answer("EnsureImage", unavailable());
    let error = bench.error().await;
    assert!(error.peer_unavailable && error.retry_unix_nanos.is_none(), "{error:?}");
    assert_eq!(bench.owner(StepName::Image, "main").as_deref(), Some("runtime-shim"));
    assert_eq!(bench.warnings().await, Vec::<String>::new());
    assert_eq!(bench.reasons(), Vec::<String>::new());
}

#[tokio::test]
async fn an_unsupported_hook_is_named_and_its_container_is_not_started() {
    let bench = Bench::new(json!({"lifecycle": {"postStart": {"tcpSocket": {"port": 80}}}})).await;
    let error = bench.error().await;
    assert!(!error.peer_unavailable, "{error:?}");
    assert_eq!(bench.reasons(), ["CreateContainerConfigError"]);
    let events = bench.warnings().await.join("\n");
    assert!(events.contains("lifecycle.postStart.tcpSocket: "), "{events}");
    assert_eq!((bench.calls("CreateContainer"), bench.calls("StopContainer")), (0, 0));
    let bench = Bench::new(hook()).await;
    bench.start(None).await.unwrap();
    assert_eq!(bench.calls("ExecSync"), 1);
}
