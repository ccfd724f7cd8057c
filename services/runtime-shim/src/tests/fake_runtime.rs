//! A fake container runtime for the unit tests: CRI on its own socket, with pods and images that a test defines. It is made
//! of the test kit's fakes, by which a test makes calls fail or hold, and counts them.

mod responses;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_cri::v1 as cri;
use k8s_cri::v1::runtime_service_server::RuntimeServiceServer;
use keelson_config::Paths;
use keelson_proto::containerd::services::content::v1 as content;
use keelson_testkit::eventually;
use keelson_testkit::fakes::{FakeContainerdContent, FakeCriImages, FakeCriRuntime, FakeServer, Recorder};
use tonic::service::Routes;
use tonic::{Code, Request, Status};

use crate::cri::Cri;
use crate::cri_objects::labels;
use crate::files::Files;
use crate::observe::Observer;

/// What goes wrong with one container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Its status cannot be read.
    StatusFails,
    /// Its removal fails, once.
    RemovalFails,
    /// Its removal does not end.
    RemovalHangs,
}

#[derive(Debug, Default)]
struct State {
    sandboxes: Vec<cri::PodSandbox>,
    containers: Vec<cri::Container>,
    /// Faults of containers by their ids.
    faults: HashMap<String, Fault>,
    images: Vec<cri::Image>,
    /// User names that may pull; empty: all.
    pullers: Vec<String>,
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
    /// Its runtime service.
    pub runtime: FakeCriRuntime,
    /// Its image service.
    pub images: FakeCriImages,
    /// containerd's content service.
    pub content: FakeContainerdContent,
    /// Timeouts of the calls of its runtime service.
    pub timeouts: Recorder<String>,
    server: FakeServer,
    /// Folder of all files.
    pub dir: tempfile::TempDir,
    pub cri: Cri,
    pub files: Files,
    pub observer: Observer,
}

/// The error of a call that fails because a test wants it to.
pub(crate) fn refusal(code: Code) -> Status {
    Status::new(code, "as the test wants it")
}

impl FakeRuntime {
    pub(crate) async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("cri.sock");
        let (runtime, images) = (FakeCriRuntime::default(), FakeCriImages::default());
        let (content, timeouts) = (FakeContainerdContent::default(), Recorder::default());
        let record = timeouts.clone();
        let with_timeouts = move |request: Request<()>| {
            if let Some(timeout) = request.metadata().get("grpc-timeout") {
                record.record(timeout.to_str().unwrap().to_owned());
            }
            Ok(request)
        };
        let routes = Routes::new(RuntimeServiceServer::with_interceptor(runtime.clone(), with_timeouts))
            .add_service(images.server())
            .add_service(content.server());
        let server = FakeServer::at(&socket, routes).await.unwrap();
        let cri = Cri::new(socket.to_str().unwrap(), Duration::from_secs(20)).unwrap();
        let files = Files::new(Paths {
            root_dir: dir.path().join("root"),
            pod_logs_dir: dir.path().join("logs"),
            container_links_dir: dir.path().join("links"),
            ..Paths::default()
        });
        let observer = Observer::new(cri.clone(), files.clone());
        let state = State { image_dir: dir.path().to_owned(), ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let fake = Self { state, runtime, images, content, timeouts, server, dir, cri, files, observer };
        fake.answer_as_usual();
        fake
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Its socket.
    pub(crate) fn socket(&self) -> &Path {
        self.server.socket()
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

    /// User names of the attempted pulls; an empty name for a pull without a credential.
    pub(crate) fn pulled_as(&self) -> Vec<String> {
        let user = |pull: cri::PullImageRequest| pull.auth.unwrap_or_default().username;
        self.images.pull_image.requests().all().into_iter().map(user).collect()
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
    pub(crate) fn set_log_path(&self, container: &str, path: &Path) {
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

    /// The last attach request.
    pub(crate) fn last_attach(&self) -> cri::AttachRequest {
        self.runtime.attach.requests().last().unwrap()
    }

    /// The last exec request.
    pub(crate) fn last_exec(&self) -> cri::ExecRequest {
        self.runtime.exec.requests().last().unwrap()
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

    /// Sets what goes wrong with a container.
    pub(crate) fn set_fault(&self, container: &str, fault: Fault) {
        self.state().faults.insert(container.into(), fault);
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
