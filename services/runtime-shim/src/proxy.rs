//! CRI on runtime-shim's socket: every method is passed through as raw bytes, including methods that this version does
//! not know. After calls that change a pod, new objects are attributed to the pod and the pod is read again.

use std::convert::Infallible;
use std::future::Future;
use std::marker::PhantomData;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf as _, Bytes};
use http::{HeaderName, HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, Full};
use k8s_cri::v1 as cri;
use keelson_service_kit::status::{PEER_UNAVAILABLE, chain, error};
use prost::Message;
use tokio::sync::oneshot;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::{Code, Status};
use tower::{Service, ServiceExt as _};
use tracing::Instrument as _;

use crate::files::Files;
use crate::observe::Observer;
use crate::operations::{CountedBody, CriChannel};

/// The prefix of a gRPC message: a flag and four bytes of length.
const PREFIX: usize = 5;
const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
/// Deadline of a call without one: 90 days.
const NO_DEADLINE: HeaderValue = HeaderValue::from_static("2160H");
/// The same for a call that continues when its caller has left.
const POD_CALL_DEADLINE: HeaderValue = HeaderValue::from_static("1H");

/// One CRI service of the runtime on runtime-shim's socket.
#[derive(Debug)]
pub struct Proxy<N> {
    inner: ProxyInner,
    name: PhantomData<fn() -> N>,
}

impl<N> Clone for Proxy<N> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), name: PhantomData }
    }
}

#[derive(Debug, Clone)]
struct ProxyInner {
    channel: CriChannel,
    observer: Observer,
    files: Files,
}

/// `runtime.v1.RuntimeService`.
#[derive(Debug)]
pub struct RuntimeService;
/// `runtime.v1.ImageService`.
#[derive(Debug)]
pub struct ImageService;

impl NamedService for Proxy<RuntimeService> {
    const NAME: &'static str = "runtime.v1.RuntimeService";
}

impl NamedService for Proxy<ImageService> {
    const NAME: &'static str = "runtime.v1.ImageService";
}

impl<N> Proxy<N> {
    /// Passes calls on to `channel`.
    pub fn new(channel: CriChannel, observer: Observer, files: Files) -> Self {
        Self { inner: ProxyInner { channel, observer, files }, name: PhantomData }
    }
}

type ResponseFuture = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

impl<N> Service<Request<Body>> for Proxy<N> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> ResponseFuture {
        let inner = self.inner.clone();
        Box::pin(async move { Ok(inner.forward(request).await.unwrap_or_else(Status::into_http)) })
    }
}

/// The effect of a call on pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PodCall {
    RunSandbox,
    Create,
    /// The first field of the request is the id of a container or sandbox; its pod is read afterwards.
    ById,
    /// Like `ById`; the status of the container changes without its state.
    Update,
}

/// The pod and handler of a request.
#[derive(Debug, Default)]
struct CallTarget {
    uid: Option<String>,
    /// Runtime handler of a sandbox to create; `None` if the request cannot be decoded.
    runtime_handler: Option<String>,
}

fn pod_call_of(path: &str) -> Option<PodCall> {
    match path.strip_prefix("/runtime.v1.RuntimeService/")? {
        "RunPodSandbox" => Some(PodCall::RunSandbox),
        "CreateContainer" => Some(PodCall::Create),
        "StartContainer"
        | "StopContainer"
        | "RemoveContainer"
        | "UpdatePodSandboxResources"
        | "StopPodSandbox"
        | "RemovePodSandbox" => Some(PodCall::ById),
        "UpdateContainerResources" => Some(PodCall::Update),
        _ => None,
    }
}

impl ProxyInner {
    async fn forward(self, mut request: Request<Body>) -> Result<Response<Body>, Status> {
        let pod_call = pod_call_of(request.uri().path());
        // Without a deadline the channel would set its default, which would end streams.
        let none = if pod_call.is_some() { POD_CALL_DEADLINE } else { NO_DEADLINE };
        request.headers_mut().entry(GRPC_TIMEOUT).or_insert(none);
        let Some(pod_call) = pod_call else {
            return self.channel.clone().oneshot(request).await.map(into_plain);
        };
        let (head, body) = request.into_parts();
        let bytes = body.collect().await?.to_bytes();
        let CallTarget { uid, runtime_handler } = self.prepare(pod_call, &bytes)?;
        let channel = self.channel.clone().with_sandbox_handler(runtime_handler);
        let request = Request::from_parts(head, Body::new(Full::new(bytes)));
        // In its own task, because this future is dropped when the caller resets its stream or dies. The call then
        // continues until its own deadline, and the objects it creates are attributed and read. Otherwise a call that
        // is dropped half-way could leave objects that belong to no known pod.
        let (result_sender, result) = oneshot::channel();
        keelson_service_kit::spawn(
            "proxied call",
            async move {
                let response = self.forward_pod_call(channel, pod_call, uid.as_ref(), request).await;
                let left = result_sender.send(response).is_err();
                // The caller reads the pod itself after its call, unless it has left.
                if let Some(uid) = uid.filter(|_| left) {
                    self.observer.refresh(uid);
                }
            }
            .in_current_span(),
        );
        result.await.unwrap_or_else(|_| Err(connection_lost("the call was not completed")))
    }

    async fn forward_pod_call(
        &self,
        channel: CriChannel,
        pod_call: PodCall,
        uid: Option<&String>,
        request: Request<Body>,
    ) -> Result<Response<Body>, Status> {
        let response = channel.oneshot(request).await;
        let response = match pod_call {
            PodCall::RunSandbox | PodCall::Create => match response {
                Ok(response) => self.attribute(uid, response).await,
                Err(status) => Err(status),
            },
            PodCall::ById | PodCall::Update => response.map(into_plain),
        };
        // Also after an error: a call whose response was lost may have had its effect.
        if let Some(uid) = uid
            && (matches!(pod_call, PodCall::ById | PodCall::Update) || response.is_err())
        {
            self.observer.refresh(uid.clone());
        }
        response
    }

    /// Prepares a call, and returns its pod and handler.
    fn prepare(&self, pod_call: PodCall, bytes: &Bytes) -> Result<CallTarget, Status> {
        let target_of = |uid| CallTarget { uid, runtime_handler: None };
        match pod_call {
            PodCall::RunSandbox => {
                let Some(request) = decode::<cri::RunPodSandboxRequest>(bytes) else {
                    return Ok(CallTarget::default());
                };
                let runtime_handler = Some(request.runtime_handler);
                let Some(config) = request.config else {
                    return Ok(CallTarget { uid: None, runtime_handler });
                };
                self.files
                    .make_log_dir(Path::new(&config.log_directory))
                    .map_err(|e| Status::failed_precondition(chain(&e)))?;
                Ok(CallTarget { uid: config.metadata.map(|m| m.uid), runtime_handler })
            }
            PodCall::Create => Ok(target_of(
                decode::<cri::CreateContainerRequest>(bytes)
                    .and_then(|r| r.sandbox_config)
                    .and_then(|c| c.metadata)
                    .map(|m| m.uid),
            )),
            PodCall::ById | PodCall::Update => {
                let id = decode::<cri::StartContainerRequest>(bytes).map(|request| request.container_id);
                if let Some(id) = id.as_deref().filter(|_| pod_call == PodCall::Update) {
                    self.observer.record_update(id);
                }
                Ok(target_of(id.and_then(|id| self.observer.owner_of(&id))))
            }
        }
    }

    /// Attributes the new object to its pod; both kinds of response have the new id as their first field.
    async fn attribute(
        &self,
        uid: Option<&String>,
        response: Response<CountedBody>,
    ) -> Result<Response<Body>, Status> {
        let (head, body) = response.into_parts();
        let collected = body.collect().await.map_err(|source| connection_lost(&chain(&source)))?;
        let trailers = collected.trailers().cloned();
        let bytes = collected.to_bytes();
        if let (Some(uid), Some(created)) = (uid, decode::<cri::CreateContainerResponse>(&bytes)) {
            self.observer.record_owner(&created.container_id, uid);
        }
        let body = Full::new(bytes).with_trailers(std::future::ready(trailers.map(Ok)));
        Ok(Response::from_parts(head, Body::new(body)))
    }
}

/// A response as passed on to the caller.
fn into_plain(response: Response<CountedBody>) -> Response<Body> {
    response.map(CountedBody::into_body)
}

/// The error of a call whose response was lost. It is marked, so that the caller does not take it for the runtime's
/// answer.
fn connection_lost(how: &str) -> Status {
    let message = format!("the connection to the container runtime was lost during the call: {how}");
    error(Code::Unavailable, PEER_UNAVAILABLE, message)
}

/// Decodes the single message of a unary body; `None` if it is compressed, empty or of another type.
fn decode<T: Message + Default>(body: &Bytes) -> Option<T> {
    let mut prefix = body.get(..PREFIX)?;
    if prefix.get_u8() != 0 {
        return None;
    }
    let length = prefix.get_u32() as usize;
    T::decode(body.get(PREFIX..PREFIX + length)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fake_runtime::{FakeRuntime, refusal, until};
    use bytes::{BufMut as _, BytesMut};
    use futures_util::FutureExt as _;
    use keelson_service_kit::status::{is_cut, is_unanswered};
    use keelson_testkit::fakes::cut_off;
    use std::time::Duration;

    #[test]
    fn framed_message_is_decoded_and_a_truncated_one_is_not() {
        let message = cri::StartContainerRequest { container_id: "c1".into() };
        let mut body = vec![0, 0, 0, 0, u8::try_from(message.encoded_len()).unwrap()];
        message.encode(&mut body).unwrap();
        let bytes = Bytes::from(body);
        assert_eq!(decode::<cri::StartContainerRequest>(&bytes), Some(message));
        assert_eq!(decode::<cri::StartContainerRequest>(&bytes.slice(..6)), None);
        assert_eq!(decode::<cri::StartContainerRequest>(&Bytes::new()), None);
    }

    #[test]
    fn only_calls_that_change_a_pod_are_decoded() {
        for (method, pod_call) in [
            ("StopContainer", PodCall::ById),
            ("UpdatePodSandboxResources", PodCall::ById),
            ("UpdateContainerResources", PodCall::Update),
        ] {
            let path = format!("/runtime.v1.RuntimeService/{method}");
            assert_eq!(pod_call_of(&path), Some(pod_call));
        }
        assert_eq!(pod_call_of("/runtime.v1.RuntimeService/ExecSync"), None);
        assert_eq!(pod_call_of("/runtime.v1.ImageService/RemoveImage"), None);
    }

    fn proxy(fake: &FakeRuntime) -> Proxy<RuntimeService> {
        Proxy::new(fake.cri.channel(), fake.observer.clone(), fake.files.clone())
    }

    fn call(method: &str, message: &impl Message) -> Request<Body> {
        let mut body = BytesMut::new();
        body.put_u8(0);
        body.put_u32(u32::try_from(message.encoded_len()).unwrap());
        message.encode(&mut body).unwrap();
        Request::post(format!("http://localhost/runtime.v1.RuntimeService/{method}"))
            .header("content-type", "application/grpc")
            .body(Body::new(Full::new(body.freeze())))
            .unwrap()
    }

    #[tokio::test]
    async fn new_sandbox_is_attributed_and_read_after_its_caller_died() {
        let fake = FakeRuntime::start().await;
        let held = fake.runtime.run_pod_sandbox.hold();
        let metadata = cri::PodSandboxMetadata { uid: "u".into(), ..Default::default() };
        let config = cri::PodSandboxConfig { metadata: Some(metadata), ..Default::default() };
        let request = cri::RunPodSandboxRequest { config: Some(config), ..Default::default() };
        let mut call = proxy(&fake).call(call("RunPodSandbox", &request));
        assert!((&mut call).now_or_never().is_none());
        fake.runtime.run_pod_sandbox.requests().until_len(1).await;
        drop(call);
        fake.sandbox("made", "u", true);
        held.open();
        until("the sandbox is attributed", || fake.observer.owner_of("made").as_deref() == Some("u")).await;
        until("the pod is read", || fake.observer.cached("u").is_some()).await;
    }

    /// The status of a failed call, as the caller's client reads it.
    async fn refused(proxy: &mut Proxy<RuntimeService>, method: &str) -> Status {
        let response = proxy.call(call(method, &cri::CreateContainerRequest::default())).await.unwrap();
        Status::from_header_map(response.headers()).unwrap()
    }

    #[tokio::test]
    async fn lost_call_is_marked_and_an_error_of_the_runtime_is_not() {
        let fake = FakeRuntime::start().await;
        fake.runtime.create_container.answer_once(Err(refusal(Code::Unknown)));
        let result = refused(&mut proxy(&fake), "CreateContainer").await;
        assert_eq!(result.code(), Code::Unknown);
        assert!(!is_cut(&result), "{result:?}");
        fake.runtime.create_container.fail(cut_off());
        let lost = refused(&mut proxy(&fake), "CreateContainer").await;
        assert!(is_unanswered(&lost) && is_cut(&lost), "{lost:?}");
        let dead = fake.dir.path().join("dead.sock");
        let dead_cri = crate::cri::Cri::new(dead.to_str().unwrap(), Duration::from_secs(5)).unwrap();
        let mut proxy = Proxy::new(dead_cri.channel(), fake.observer.clone(), fake.files.clone());
        for method in ["CreateContainer", "StartContainer", "ExecSync"] {
            let not_reached = refused(&mut proxy, method).await;
            assert!(is_unanswered(&not_reached) && is_cut(&not_reached), "{method}: {not_reached:?}");
        }
    }

    #[tokio::test]
    async fn passed_through_call_keeps_its_deadline_or_gets_a_very_long_one() {
        let fake = FakeRuntime::start().await;
        let events = cri::GetEventsRequest::default();
        proxy(&fake).call(call("GetContainerEvents", &events)).await.unwrap();
        let mut with_timeout = call("GetContainerEvents", &events);
        with_timeout.headers_mut().insert(GRPC_TIMEOUT, HeaderValue::from_static("7S"));
        proxy(&fake).call(with_timeout).await.unwrap();
        assert_eq!(fake.timeouts.all(), ["2160H", "7S"]);
    }
}
