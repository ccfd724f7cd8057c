//! CRI on our own socket: every method is passed through as raw bytes, also one that this version does not
//! know. Calls that change a pod are noticed: what they make is attributed, and the pod is read again.

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
use crate::operations::{Counted, CriChannel};

/// The length prefix of a gRPC message: a flag and four bytes.
const PREFIX: usize = 5;
const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
/// For a caller that sets no deadline: 90 days.
const NO_DEADLINE: HeaderValue = HeaderValue::from_static("2160H");
/// The same for a call that goes on when its caller has left.
const ACT_WITHOUT_DEADLINE: HeaderValue = HeaderValue::from_static("1H");

/// One CRI service of the runtime on our socket.
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

type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

impl<N> Service<Request<Body>> for Proxy<N> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Answer {
        let inner = self.inner.clone();
        Box::pin(async move { Ok(inner.pass(request).await.unwrap_or_else(Status::into_http)) })
    }
}

/// What a call does to pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    RunSandbox,
    Create,
    /// The request's first field is the id of a container or sandbox, and its pod is to be read afterwards.
    OnId,
}

/// What the request of an act is about.
#[derive(Debug, Default)]
struct About {
    uid: Option<String>,
    /// Of a sandbox that is to be made; `None` when the request cannot be read.
    runtime_handler: Option<String>,
}

fn act_of(path: &str) -> Option<Act> {
    match path.strip_prefix("/runtime.v1.RuntimeService/")? {
        "RunPodSandbox" => Some(Act::RunSandbox),
        "CreateContainer" => Some(Act::Create),
        "StartContainer" | "StopContainer" | "RemoveContainer" | "StopPodSandbox" | "RemovePodSandbox" => {
            Some(Act::OnId)
        }
        _ => None,
    }
}

impl ProxyInner {
    async fn pass(self, mut request: Request<Body>) -> Result<Response<Body>, Status> {
        let act = act_of(request.uri().path());
        // Without a deadline of the caller's own the channel would set its default, which cuts streams.
        let none = if act.is_some() { ACT_WITHOUT_DEADLINE } else { NO_DEADLINE };
        request.headers_mut().entry(GRPC_TIMEOUT).or_insert(none);
        let Some(act) = act else {
            return self.channel.clone().oneshot(request).await.map(plain);
        };
        let (head, body) = request.into_parts();
        let bytes = body.collect().await?.to_bytes();
        let About { uid, runtime_handler } = self.before(act, &bytes)?;
        let channel = self.channel.clone().making_a_sandbox(runtime_handler);
        let request = Request::from_parts(head, Body::new(Full::new(bytes)));
        // In a task of its own, because this future is dropped when the caller resets its stream or dies. The
        // call then goes on to its own deadline and what it has made is attributed and read: that is meant,
        // as a call that is cut half-way leaves something that nobody knows of.
        let (answer, answered) = oneshot::channel();
        tokio::spawn(
            async move {
                let response = self.act(channel, act, uid.as_ref(), request).await;
                let left = answer.send(response).is_err();
                // After an own act the caller reads the pod itself; one that has left does not.
                if let Some(uid) = uid.filter(|_| left) {
                    self.observer.refresh(uid);
                }
            }
            .in_current_span(),
        );
        answered.await.unwrap_or_else(|_| Err(cut_off("the call was not carried through")))
    }

    async fn act(
        &self,
        channel: CriChannel,
        act: Act,
        uid: Option<&String>,
        request: Request<Body>,
    ) -> Result<Response<Body>, Status> {
        let response = channel.oneshot(request).await;
        let response = match act {
            Act::RunSandbox | Act::Create => match response {
                Ok(response) => self.learn(uid, response).await,
                Err(status) => Err(status),
            },
            Act::OnId => response.map(plain),
        };
        // Also after an error: a call that was cut may have done its work.
        if let Some(uid) = uid
            && (act == Act::OnId || response.is_err())
        {
            self.observer.refresh(uid.clone());
        }
        response
    }

    /// What has to be there before the call, and what it is about.
    fn before(&self, act: Act, bytes: &Bytes) -> Result<About, Status> {
        let about = |uid| About { uid, runtime_handler: None };
        match act {
            Act::RunSandbox => {
                let Some(request) = decode::<cri::RunPodSandboxRequest>(bytes) else {
                    return Ok(About::default());
                };
                let runtime_handler = Some(request.runtime_handler);
                let Some(config) = request.config else {
                    return Ok(About { uid: None, runtime_handler });
                };
                self.files
                    .make_log_dir(Path::new(&config.log_directory))
                    .map_err(|e| Status::failed_precondition(chain(&e)))?;
                Ok(About { uid: config.metadata.map(|m| m.uid), runtime_handler })
            }
            Act::Create => Ok(about(
                decode::<cri::CreateContainerRequest>(bytes)
                    .and_then(|r| r.sandbox_config)
                    .and_then(|c| c.metadata)
                    .map(|m| m.uid),
            )),
            Act::OnId => Ok(about(
                decode::<cri::StartContainerRequest>(bytes)
                    .and_then(|r| self.observer.owner_of(&r.container_id)),
            )),
        }
    }

    /// Attributes what a call made to its pod; both answers carry the new id as their first field.
    async fn learn(
        &self,
        uid: Option<&String>,
        response: Response<Counted>,
    ) -> Result<Response<Body>, Status> {
        let (head, body) = response.into_parts();
        let collected = body.collect().await.map_err(|source| cut_off(&chain(&source)))?;
        let trailers = collected.trailers().cloned();
        let bytes = collected.to_bytes();
        if let (Some(uid), Some(made)) = (uid, decode::<cri::CreateContainerResponse>(&bytes)) {
            self.observer.learn(&made.container_id, uid);
        }
        let body = Full::new(bytes).with_trailers(std::future::ready(trailers.map(Ok)));
        Ok(Response::from_parts(head, Body::new(body)))
    }
}

/// An answer as it goes on to the caller.
fn plain(response: Response<Counted>) -> Response<Body> {
    response.map(Counted::into_body)
}

/// A call whose answer was lost on its way here: marked, so that the caller does not take it for an answer.
fn cut_off(how: &str) -> Status {
    let message = format!("the connection to the container runtime was lost during the call: {how}");
    error(Code::Unavailable, PEER_UNAVAILABLE, message)
}

/// The single message of a unary body; `None` when it is compressed, empty or of another shape.
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
    use crate::fake::{Answer, FakeRuntime, until};
    use bytes::{BufMut as _, BytesMut};
    use futures_util::FutureExt as _;
    use keelson_service_kit::status::{is_cut, is_unanswered};
    use std::time::Duration;

    #[test]
    fn a_framed_message_is_decoded_and_a_torn_one_is_not() {
        let message = cri::StartContainerRequest { container_id: "c1".into() };
        let mut body = vec![0, 0, 0, 0, u8::try_from(message.encoded_len()).unwrap()];
        message.encode(&mut body).unwrap();
        let bytes = Bytes::from(body);
        assert_eq!(decode::<cri::StartContainerRequest>(&bytes), Some(message));
        assert_eq!(decode::<cri::StartContainerRequest>(&bytes.slice(..6)), None);
        assert_eq!(decode::<cri::StartContainerRequest>(&Bytes::new()), None);
    }

    #[test]
    fn only_calls_that_change_a_pod_are_looked_into() {
        assert_eq!(act_of("/runtime.v1.RuntimeService/StopContainer"), Some(Act::OnId));
        assert_eq!(act_of("/runtime.v1.RuntimeService/ExecSync"), None);
        assert_eq!(act_of("/runtime.v1.ImageService/RemoveImage"), None);
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
    async fn what_a_call_makes_is_attributed_and_read_though_its_caller_has_died() {
        let fake = FakeRuntime::start().await;
        let held = fake.hold("RunPodSandbox");
        let metadata = cri::PodSandboxMetadata { uid: "u".into(), ..Default::default() };
        let config = cri::PodSandboxConfig { metadata: Some(metadata), ..Default::default() };
        let request = cri::RunPodSandboxRequest { config: Some(config), ..Default::default() };
        let mut answer = proxy(&fake).call(call("RunPodSandbox", &request));
        assert!((&mut answer).now_or_never().is_none());
        fake.called("RunPodSandbox", 1).await;
        drop(answer);
        fake.sandbox("made", "u", true);
        held.add_permits(1);
        until("the sandbox is attributed", || fake.observer.owner_of("made").as_deref() == Some("u")).await;
        until("the pod is read", || fake.observer.cached("u").is_some()).await;
    }

    /// The status of a refused call, as the caller's client reads it.
    async fn refused(proxy: &mut Proxy<RuntimeService>, method: &str) -> Status {
        let response = proxy.call(call(method, &cri::CreateContainerRequest::default())).await.unwrap();
        Status::from_header_map(response.headers()).unwrap()
    }

    #[tokio::test]
    async fn a_call_that_was_cut_on_its_way_is_marked_and_what_the_runtime_answers_is_not() {
        let fake = FakeRuntime::start().await;
        fake.answer("CreateContainer", Answer::Fail(1, Code::Unknown));
        let answered = refused(&mut proxy(&fake), "CreateContainer").await;
        assert_eq!(answered.code(), Code::Unknown);
        assert!(!is_cut(&answered), "{answered:?}");
        fake.answer("CreateContainer", Answer::CutOff);
        let lost = refused(&mut proxy(&fake), "CreateContainer").await;
        assert!(is_unanswered(&lost) && is_cut(&lost), "{lost:?}");
        let dead = fake.dir.path().join("dead.sock");
        let nobody = crate::cri::Cri::new(dead.to_str().unwrap(), Duration::from_secs(5)).unwrap();
        let mut proxy = Proxy::new(nobody.channel(), fake.observer.clone(), fake.files.clone());
        for method in ["CreateContainer", "StartContainer", "ExecSync"] {
            let unreached = refused(&mut proxy, method).await;
            assert!(is_unanswered(&unreached) && is_cut(&unreached), "{method}: {unreached:?}");
        }
    }

    #[tokio::test]
    async fn a_call_without_deadline_gets_none_of_ours_and_another_keeps_its_own() {
        let fake = FakeRuntime::start().await;
        let events = cri::GetEventsRequest::default();
        proxy(&fake).call(call("GetContainerEvents", &events)).await.unwrap();
        let mut with = call("GetContainerEvents", &events);
        with.headers_mut().insert(GRPC_TIMEOUT, HeaderValue::from_static("7S"));
        proxy(&fake).call(with).await.unwrap();
        let seen: Vec<_> = fake.calls("GetContainerEvents").into_iter().map(|c| c.timeout.unwrap()).collect();
        assert_eq!(seen, ["2160H", "7S"]);
    }
}
