//! CRI on our own socket: every method is passed through as raw bytes, also one that this version does not
//! know. Calls that change a pod are noticed: what they make is attributed, and the pod is read again.

use std::convert::Infallible;
use std::future::Future;
use std::marker::PhantomData;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf as _, Bytes};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use k8s_cri::v1 as cri;
use keelson_service_kit::PeerChannel;
use prost::Message;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::{Service, ServiceExt as _};

use crate::files::Files;
use crate::observe::Observer;

/// The length prefix of a gRPC message: a flag and four bytes.
const PREFIX: usize = 5;

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
    channel: PeerChannel,
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
    pub fn new(channel: PeerChannel, observer: Observer, files: Files) -> Self {
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
    async fn pass(self, request: Request<Body>) -> Result<Response<Body>, Status> {
        let Some(act) = act_of(request.uri().path()) else {
            return self.channel.clone().oneshot(request).await;
        };
        let (head, body) = request.into_parts();
        let bytes = body.collect().await?.to_bytes();
        let uid = self.before(act, &bytes)?;
        let request = Request::from_parts(head, Body::new(Full::new(bytes)));
        let response = self.channel.clone().oneshot(request).await;
        match (act, response) {
            (Act::RunSandbox | Act::Create, Ok(response)) => self.learn(uid, response).await,
            (Act::OnId, response) => {
                // Also after an error: a call that was cut may have done its work.
                if let Some(uid) = uid {
                    self.observer.refresh(uid);
                }
                response
            }
            (_, Err(status)) => Err(status),
        }
    }

    /// What has to be there before the call, and the pod that it is about.
    fn before(&self, act: Act, bytes: &Bytes) -> Result<Option<String>, Status> {
        match act {
            Act::RunSandbox => {
                let Some(config) = decode::<cri::RunPodSandboxRequest>(bytes).and_then(|r| r.config) else {
                    return Ok(None);
                };
                self.files
                    .make_log_dir(Path::new(&config.log_directory))
                    .map_err(|e| Status::failed_precondition(keelson_service_kit::status::chain(&e)))?;
                Ok(config.metadata.map(|m| m.uid))
            }
            Act::Create => Ok(decode::<cri::CreateContainerRequest>(bytes)
                .and_then(|r| r.sandbox_config)
                .and_then(|c| c.metadata)
                .map(|m| m.uid)),
            Act::OnId => Ok(decode::<cri::StartContainerRequest>(bytes)
                .and_then(|r| self.observer.owner_of(&r.container_id))),
        }
    }

    /// Attributes what a call made to its pod; both answers carry the new id as their first field.
    async fn learn(&self, uid: Option<String>, response: Response<Body>) -> Result<Response<Body>, Status> {
        let (head, body) = response.into_parts();
        let collected = body.collect().await?;
        let trailers = collected.trailers().cloned();
        let bytes = collected.to_bytes();
        if let (Some(uid), Some(made)) = (uid, decode::<cri::CreateContainerResponse>(&bytes)) {
            self.observer.learn(&made.container_id, &uid);
        }
        let body = Full::new(bytes).with_trailers(std::future::ready(trailers.map(Ok)));
        Ok(Response::from_parts(head, Body::new(body)))
    }
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
}
