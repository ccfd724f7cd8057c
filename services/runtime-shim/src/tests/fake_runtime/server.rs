//! Serves the fake runtime on a socket.

use std::convert::Infallible;
use std::future::Future;
use std::marker::PhantomData;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, Full};
use k8s_cri::v1 as cri;
use keelson_config::Config;
use keelson_service_kit::CancellationToken;
use keelson_service_kit::server::{CallerPolicy, StackLayer, serve};
use tokio::sync::oneshot;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::Routes;
use tower::Service;

use super::responses::decode;
use super::{Answer, Call, State};
use crate::proxy::{ImageService, RuntimeService};

/// Serves the fake on `socket`, and returns when it accepts connections.
pub(super) async fn start(socket: &Path, state: &Arc<Mutex<State>>) {
    let runtime = FakeService::<RuntimeService>::new(state);
    let images = FakeService::<ImageService>::new(state);
    let content = FakeService::<ContentService>::new(state);
    let routes = Routes::new(runtime).add_service(images).add_service(content);
    let stack = StackLayer::new(CallerPolicy::new(&Config::default()), Default::default());
    let (bound, is_bound) = oneshot::channel();
    let socket = socket.to_owned();
    tokio::spawn(async move {
        let tell = || bound.send(()).unwrap();
        serve(&socket, routes, stack, CancellationToken::new(), tell).await.unwrap();
    });
    is_bound.await.unwrap();
}

/// containerd's content service.
struct ContentService;

impl NamedService for FakeService<ContentService> {
    const NAME: &'static str = "containerd.services.content.v1.Content";
}

/// One of the services.
struct FakeService<N>(Arc<Mutex<State>>, PhantomData<fn() -> N>);

impl<N> FakeService<N> {
    fn new(state: &Arc<Mutex<State>>) -> Self {
        Self(Arc::clone(state), PhantomData)
    }
}

impl<N> Clone for FakeService<N> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0), Default::default())
    }
}

impl NamedService for FakeService<RuntimeService> {
    const NAME: &'static str = "runtime.v1.RuntimeService";
}

impl NamedService for FakeService<ImageService> {
    const NAME: &'static str = "runtime.v1.ImageService";
}

impl<N> Service<Request<Body>> for FakeService<N> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let state = Arc::clone(&self.0);
        Box::pin(async move { Ok(respond(state, request).await.unwrap_or_else(Status::into_http)) })
    }
}

async fn respond(state: Arc<Mutex<State>>, request: Request<Body>) -> Result<Response<Body>, Status> {
    let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
    let timeout = request.headers().get("grpc-timeout").map(|v| v.to_str().unwrap().to_owned());
    let body = request.into_body().collect().await?.to_bytes().slice(5..);
    let id = decode::<cri::StartContainerRequest>(&body).container_id;
    let answer = {
        let mut state = state.lock().unwrap();
        state.calls.push(Call { method: method.clone(), id: id.clone(), timeout });
        state.take_answer(&method, &id)
    };
    match answer {
        Some(Answer::Fail(_, code)) => return Err(Status::new(code, "as the test wants it")),
        Some(Answer::Late(after, code)) => {
            tokio::time::sleep(after).await;
            return Err(Status::new(code, "as the test wants it"));
        }
        Some(Answer::CutOff) => return Ok(cut_off()),
        Some(Answer::Held(permits)) => permits.acquire().await.unwrap().forget(),
        None => {}
    }
    let message = state.lock().unwrap().respond(&method, &id, &body)?;
    Ok(success(&message))
}

/// The response with a message.
fn success(message: &[u8]) -> Response<Body> {
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

fn cut_off() -> Response<Body> {
    let broken = http_body_util::StreamBody::new(futures_util::stream::once(async {
        Err::<http_body::Frame<Bytes>, _>(std::io::Error::other("the runtime has died"))
    }));
    let mut response = Response::new(Body::new(broken));
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}
