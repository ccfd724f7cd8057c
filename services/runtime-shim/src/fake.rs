//! A fake container runtime for the unit tests: CRI on its own socket, with pods that a test defines and responses that
//! a test can make fail or hold.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, Full};
use k8s_cri::v1 as cri;
use keelson_config::{Config, Paths};
use keelson_proto::containerd::services::content::v1 as content;
use keelson_service_kit::CancellationToken;
use keelson_service_kit::server::{CallerPolicy, StackLayer, serve};
use keelson_testkit::eventually;
use prost::Message;
use tokio::sync::{Semaphore, oneshot};
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::{Code, Status};
use tower::Service;

use crate::cri::Cri;
use crate::files::Files;
use crate::labels;
use crate::observe::Observer;

/// What a call gets instead of its usual response.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    /// An error, this many times.
    Fail(usize, Code),
    /// The usual response once there is a permit.
    Held(Arc<Semaphore>),
    /// An error after a delay.
    Late(Duration, Code),
    /// Response headers and then a broken stream: the runtime has died.
    CutOff,
}

/// One received call.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub method: String,
    pub id: String,
    pub timeout: Option<String>,
}

#[derive(Debug, Default)]
struct State {
    sandboxes: Vec<cri::PodSandbox>,
    containers: Vec<cri::Container>,
    answers: HashMap<String, Answer>,
    calls: Vec<Call>,
    images: Vec<cri::Image>,
    /// User names that may pull; empty: all.
    pullers: Vec<String>,
    /// User names of the attempted pulls; an empty name for a pull without a credential.
    pulled_as: Vec<String>,
    /// Blobs being fetched; `None`: the runtime does not report them.
    blobs: Option<Vec<content::Status>>,
    /// Log paths of containers.
    logs: HashMap<String, PathBuf>,
    /// The folder on the images' file system.
    image_dir: PathBuf,
    /// The file system of layers, if it is reported separately.
    container_filesystem: Option<cri::FilesystemUsage>,
    /// Usage of each container's layer.
    layers: HashMap<String, cri::FilesystemUsage>,
    /// The sandbox image of the runtime's own configuration.
    sandbox_image: Option<String>,
    /// URL of the streams of commands.
    exec_url: String,
    /// Received exec requests.
    execs: Vec<cri::ExecRequest>,
    not_ready: bool,
    handlers: Vec<cri::RuntimeHandler>,
    features: Option<cri::RuntimeFeatures>,
    /// Response to `RuntimeConfig`; `None`: the call is not supported.
    config: Option<cri::RuntimeConfigResponse>,
}

/// The fake runtime, with the clients that a test needs.
#[derive(Debug)]
pub(crate) struct FakeRuntime {
    state: Arc<Mutex<State>>,
    /// Folder of all files.
    pub dir: tempfile::TempDir,
    pub cri: Cri,
    pub files: Files,
    pub observer: Observer,
}

impl FakeRuntime {
    pub(crate) async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("cri.sock");
        let state = State { image_dir: dir.path().to_owned(), ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let runtime = FakeService::<crate::proxy::RuntimeService>(Arc::clone(&state), Default::default());
        let images = FakeService::<crate::proxy::ImageService>(Arc::clone(&state), Default::default());
        let content = FakeService::<ContentService>(Arc::clone(&state), Default::default());
        let routes = Routes::new(runtime).add_service(images).add_service(content);
        let stack = StackLayer::new(CallerPolicy::new(&Config::default()), Default::default());
        let (bound, is_bound) = oneshot::channel();
        let at = socket.clone();
        tokio::spawn(async move {
            let tell = || bound.send(()).unwrap();
            serve(&at, routes, stack, CancellationToken::new(), tell).await.unwrap();
        });
        is_bound.await.unwrap();
        let cri = Cri::new(socket.to_str().unwrap(), Duration::from_secs(20)).unwrap();
        let files = Files::new(Paths {
            root_dir: dir.path().join("root"),
            pod_logs_dir: dir.path().join("logs"),
            container_links_dir: dir.path().join("links"),
            ..Paths::default()
        });
        let observer = Observer::new(cri.clone(), files.clone());
        Self { state, dir, cri, files, observer }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Adds or replaces a pod's sandbox. The pod is `default/<uid>`.
    pub(crate) fn sandbox(&self, id: &str, uid: &str, ready: bool) {
        let state =
            if ready { cri::PodSandboxState::SandboxReady } else { cri::PodSandboxState::SandboxNotready };
        let mut fake = self.state();
        fake.sandboxes.retain(|s| s.id != id);
        fake.sandboxes.push(cri::PodSandbox {
            id: id.into(),
            state: state as i32,
            labels: pod_labels(uid),
            ..Default::default()
        });
    }

    /// Adds or replaces a container of a pod, with its id as its name, in sandbox `s-<uid>`.
    pub(crate) fn container(&self, id: &str, uid: &str, state: cri::ContainerState) {
        let mut fake = self.state();
        fake.containers.retain(|c| c.id != id);
        let mut found = pod_labels(uid);
        found.insert(labels::CONTAINER.into(), id.into());
        fake.containers.push(cri::Container {
            id: id.into(),
            pod_sandbox_id: format!("s-{uid}"),
            state: state as i32,
            labels: found,
            ..Default::default()
        });
    }

    /// Adds an image.
    pub(crate) fn image(&self, reference: &str) {
        self.add_image(cri::Image {
            id: "sha256:1".into(),
            repo_tags: vec![reference.into()],
            size: 1,
            ..Default::default()
        });
    }

    /// Adds an image as the runtime lists it.
    pub(crate) fn add_image(&self, image: cri::Image) {
        self.state().images.push(image);
    }

    /// Allows only these users to pull.
    pub(crate) fn allow_pulls_by(&self, users: &[&str]) {
        self.state().pullers = users.iter().map(|user| (*user).to_owned()).collect();
    }

    /// User names of the attempted pulls.
    pub(crate) fn pulled_as(&self) -> Vec<String> {
        self.state().pulled_as.clone()
    }

    /// Sets the blobs being fetched, as name and received bytes of 100.
    pub(crate) fn set_blobs(&self, blobs: &[(&str, i64)]) {
        let status = |(name, offset): &(&str, i64)| content::Status {
            r#ref: (*name).into(),
            offset: *offset,
            total: 100,
            ..Default::default()
        };
        self.state().blobs = Some(blobs.iter().map(status).collect());
    }

    /// Ids of the images.
    pub(crate) fn image_ids(&self) -> Vec<String> {
        self.state().images.iter().map(|image| image.id.clone()).collect()
    }

    /// Sets the image that a container was created from.
    pub(crate) fn set_image_ref(&self, container: &str, image_ref: &str) {
        let mut fake = self.state();
        let found = fake.containers.iter_mut().find(|c| c.id == container).unwrap();
        found.image_ref = image_ref.into();
    }

    /// Sets the name of a container in the spec.
    pub(crate) fn set_container_name(&self, container: &str, name: &str) {
        let mut fake = self.state();
        let found = fake.containers.iter_mut().find(|c| c.id == container).unwrap();
        found.labels.insert(labels::CONTAINER.into(), name.into());
    }

    /// Sets the usage of a container's layer.
    pub(crate) fn set_layer(&self, container: &str, usage: cri::FilesystemUsage) {
        self.state().layers.insert(container.into(), usage);
    }

    /// Sets a file system of layers that is separate from that of images.
    pub(crate) fn set_container_filesystem(&self, usage: cri::FilesystemUsage) {
        self.state().container_filesystem = Some(usage);
    }

    /// Sets a container's log path; reopening the log creates the file.
    pub(crate) fn set_log_path(&self, container: &str, path: &std::path::Path) {
        self.state().logs.insert(container.into(), path.to_owned());
    }

    /// Sets the sandbox image in the runtime's configuration.
    pub(crate) fn sandbox_image(&self, reference: &str) {
        self.state().sandbox_image = Some(reference.into());
    }

    /// URL of the streams of commands.
    pub(crate) fn set_exec_url(&self, url: &str) {
        self.state().exec_url = url.into();
    }

    /// The last exec request.
    pub(crate) fn last_exec(&self) -> cri::ExecRequest {
        self.state().execs.last().cloned().unwrap()
    }

    /// Supports `RuntimeConfig`, with this number of a cgroup driver or without one.
    pub(crate) fn set_cgroup_driver(&self, driver: Option<i32>) {
        let linux = driver.map(|cgroup_driver| cri::LinuxRuntimeConfiguration { cgroup_driver });
        self.state().config = Some(cri::RuntimeConfigResponse { linux });
    }

    /// Sets the handlers, each with its support of recursive read-only mounts, and the support of strict groups.
    pub(crate) fn set_features(&self, handlers: &[(&str, bool)], strict_groups: bool) {
        let handler = |(name, recursive_read_only_mounts): &(&str, bool)| cri::RuntimeHandler {
            name: (*name).to_owned(),
            features: Some(cri::RuntimeHandlerFeatures {
                recursive_read_only_mounts: *recursive_read_only_mounts,
                user_namespaces: true,
            }),
        };
        let mut state = self.state();
        state.handlers = handlers.iter().map(handler).collect();
        state.features = Some(cri::RuntimeFeatures { supplemental_groups_policy: strict_groups });
    }

    /// Reports neither the runtime nor its network as ready.
    pub(crate) fn set_not_ready(&self) {
        self.state().not_ready = true;
    }

    /// Sets the answer to later calls; `to` is a method, or a method and an id separated by a space.
    pub(crate) fn answer(&self, to: &str, answer: Answer) {
        self.state().answers.insert(to.into(), answer);
    }

    /// Holds calls of `to` until the returned semaphore gets permits.
    pub(crate) fn hold(&self, to: &str) -> Arc<Semaphore> {
        let permits = Arc::new(Semaphore::new(0));
        self.answer(to, Answer::Held(Arc::clone(&permits)));
        permits
    }

    pub(crate) fn calls(&self, method: &str) -> Vec<Call> {
        self.state().calls.iter().filter(|c| c.method == method).cloned().collect()
    }

    /// Waits until `method` has been called `times` times.
    pub(crate) async fn wait_for_calls(&self, method: &str, times: usize) {
        until(method, || self.calls(method).len() >= times).await;
    }
}

/// Waits until `condition` holds.
pub(crate) async fn until(what: &str, condition: impl Fn() -> bool) {
    eventually(Duration::from_secs(20), what, async || condition()).await.unwrap();
}

fn pod_labels(uid: &str) -> HashMap<String, String> {
    let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    [pair(labels::UID, uid), pair(labels::NAME, uid), pair(labels::NAMESPACE, "default")].into()
}

/// containerd's content service.
struct ContentService;

impl NamedService for FakeService<ContentService> {
    const NAME: &'static str = "containerd.services.content.v1.Content";
}

/// One of the services.
struct FakeService<N>(Arc<Mutex<State>>, std::marker::PhantomData<fn() -> N>);

impl<N> Clone for FakeService<N> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0), Default::default())
    }
}

impl NamedService for FakeService<crate::proxy::RuntimeService> {
    const NAME: &'static str = "runtime.v1.RuntimeService";
}

impl NamedService for FakeService<crate::proxy::ImageService> {
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
        let key = [format!("{method} {id}"), method.clone()];
        let key = key.into_iter().find(|k| state.answers.contains_key(k));
        key.and_then(|key| match state.answers.get_mut(&key) {
            Some(Answer::Fail(0, _)) => None,
            Some(Answer::Fail(times, code)) => {
                *times -= 1;
                Some(Answer::Fail(*times, *code))
            }
            other => other.cloned(),
        })
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
    let message = state.lock().unwrap().act(&method, &id, &body)?;
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).unwrap());
    framed.extend_from_slice(&message);
    let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static("0"))]);
    let body = Full::new(framed.freeze()).with_trailers(std::future::ready(Some(Ok(trailers))));
    let mut response = Response::new(Body::new(body));
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    Ok(response)
}

fn cut_off() -> Response<Body> {
    let broken = http_body_util::StreamBody::new(futures_util::stream::once(async {
        Err::<http_body::Frame<Bytes>, _>(std::io::Error::other("the runtime has died"))
    }));
    let mut response = Response::new(Body::new(broken));
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}

/// Decodes a message; one of another type is empty, because not every request begins with an id.
fn decode<T: Message + Default>(body: &Bytes) -> T {
    T::decode(body.clone()).unwrap_or_default()
}

impl State {
    fn act(&mut self, method: &str, id: &str, body: &Bytes) -> Result<Vec<u8>, Status> {
        Ok(match method {
            "Version" => {
                let version = cri::VersionResponse {
                    version: "0.1.0".into(),
                    runtime_name: "fake".into(),
                    runtime_version: "1".into(),
                    runtime_api_version: "v1".into(),
                };
                version.encode_to_vec()
            }
            "Status" => self.status().encode_to_vec(),
            "RuntimeConfig" => {
                let config = self.config.as_ref().ok_or_else(|| Status::unimplemented("RuntimeConfig"))?;
                config.encode_to_vec()
            }
            "ListPodSandbox" => {
                let filter = decode::<cri::ListPodSandboxRequest>(body).filter.unwrap_or_default();
                let selected = |s: &&cri::PodSandbox| matches(&s.labels, &filter.label_selector);
                cri::ListPodSandboxResponse {
                    items: self.sandboxes.iter().filter(selected).cloned().collect(),
                }
                .encode_to_vec()
            }
            "ListContainers" => {
                let filter = decode::<cri::ListContainersRequest>(body).filter.unwrap_or_default();
                let selected = |c: &&cri::Container| matches(&c.labels, &filter.label_selector);
                cri::ListContainersResponse {
                    containers: self.containers.iter().filter(selected).cloned().collect(),
                }
                .encode_to_vec()
            }
            "PodSandboxStatus" => {
                let found =
                    self.sandboxes.iter().find(|s| s.id == id).ok_or_else(|| Status::not_found(id))?;
                let labels = crate::labels::UID;
                let metadata = cri::PodSandboxMetadata {
                    name: "pod".into(),
                    uid: found.labels.get(labels).cloned().unwrap_or_default(),
                    namespace: "default".into(),
                    ..Default::default()
                };
                let status = cri::PodSandboxStatus {
                    id: id.into(),
                    metadata: Some(metadata),
                    state: found.state,
                    created_at: 1,
                    ..Default::default()
                };
                cri::PodSandboxStatusResponse { status: Some(status), ..Default::default() }.encode_to_vec()
            }
            "ContainerStatus" => {
                let found =
                    self.containers.iter().find(|c| c.id == id).ok_or_else(|| Status::not_found(id))?;
                let status = cri::ContainerStatus {
                    id: id.into(),
                    state: found.state,
                    labels: found.labels.clone(),
                    log_path: self.logs.get(id).map(|p| p.display().to_string()).unwrap_or_default(),
                    metadata: Some(cri::ContainerMetadata { name: "main".into(), attempt: 0 }),
                    created_at: 1,
                    image: Some(cri::ImageSpec { image: "i".into(), ..Default::default() }),
                    image_ref: "i".into(),
                    ..Default::default()
                };
                // A response without most of the mandatory fields.
                let hollow = cri::ContainerStatus { id: id.into(), ..Default::default() };
                let status = if id.starts_with("hollow") { hollow } else { status };
                cri::ContainerStatusResponse { status: Some(status), ..Default::default() }.encode_to_vec()
            }
            "RemoveContainer" => {
                self.containers.retain(|c| c.id != id);
                Vec::new()
            }
            "RemovePodSandbox" => {
                self.sandboxes.retain(|s| s.id != id);
                Vec::new()
            }
            "StopPodSandbox" | "StopContainer" | "StartContainer" => Vec::new(),
            "RunPodSandbox" => cri::RunPodSandboxResponse { pod_sandbox_id: "made".into() }.encode_to_vec(),
            "ReopenContainerLog" => {
                let path = self.logs.get(id).ok_or_else(|| Status::not_found(id))?;
                let open = std::fs::File::options().create(true).append(true).open(path);
                open.map_err(|error| Status::unknown(error.to_string()))?;
                Vec::new()
            }
            "ImageStatus" => {
                let reference = decode::<cri::ImageStatusRequest>(body).image.unwrap_or_default().image;
                let image = self.images.iter().find(|image| is_named(image, &reference)).cloned();
                cri::ImageStatusResponse { image, ..Default::default() }.encode_to_vec()
            }
            "ListImages" => cri::ListImagesResponse { images: self.images.clone() }.encode_to_vec(),
            "RemoveImage" => {
                let reference = decode::<cri::RemoveImageRequest>(body).image.unwrap_or_default().image;
                self.images.retain(|image| !is_named(image, &reference));
                Vec::new()
            }
            "ImageFsInfo" => {
                let fs_id =
                    cri::FilesystemIdentifier { mountpoint: self.image_dir.to_str().unwrap().to_owned() };
                let usage = cri::FilesystemUsage { fs_id: Some(fs_id), ..Default::default() };
                let container_filesystems = self.container_filesystem.iter().cloned().collect();
                cri::ImageFsInfoResponse { image_filesystems: vec![usage], container_filesystems }
                    .encode_to_vec()
            }
            "ListContainerStats" => {
                let stats = |(id, layer): (&String, &cri::FilesystemUsage)| cri::ContainerStats {
                    attributes: Some(cri::ContainerAttributes { id: id.clone(), ..Default::default() }),
                    writable_layer: Some(layer.clone()),
                    ..Default::default()
                };
                let stats = self.layers.iter().map(stats).collect();
                cri::ListContainerStatsResponse { stats }.encode_to_vec()
            }
            "Exec" => {
                self.execs.push(decode(body));
                cri::ExecResponse { url: self.exec_url.clone() }.encode_to_vec()
            }
            "PullImage" => {
                let user = decode::<cri::PullImageRequest>(body).auth.unwrap_or_default().username;
                self.pulled_as.push(user.clone());
                if !self.pullers.is_empty() && !self.pullers.contains(&user) {
                    return Err(Status::unknown(format!("{user:?} may not pull")));
                }
                cri::PullImageResponse { image_ref: "sha256:1".into() }.encode_to_vec()
            }
            "ListStatuses" => {
                let statuses = self.blobs.clone().ok_or_else(|| Status::unimplemented("ListStatuses"))?;
                content::ListStatusesResponse { statuses }.encode_to_vec()
            }
            other => return Err(Status::unimplemented(other)),
        })
    }

    fn status(&self) -> cri::StatusResponse {
        let condition = |kind: &str| cri::RuntimeCondition {
            r#type: kind.into(),
            status: !self.not_ready,
            reason: "R".into(),
            message: "M".into(),
        };
        let conditions = vec![condition("RuntimeReady"), condition("NetworkReady")];
        let config = |image| ("config".to_owned(), format!("{{\"sandboxImage\":{image:?}}}"));
        cri::StatusResponse {
            status: Some(cri::RuntimeStatus { conditions }),
            info: self.sandbox_image.iter().map(config).collect(),
            runtime_handlers: self.handlers.clone(),
            features: self.features,
        }
    }
}

fn is_named(image: &cri::Image, reference: &str) -> bool {
    image.id == reference || image.repo_tags.iter().chain(&image.repo_digests).any(|name| name == reference)
}

fn matches(labels: &HashMap<String, String>, selector: &HashMap<String, String>) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}
