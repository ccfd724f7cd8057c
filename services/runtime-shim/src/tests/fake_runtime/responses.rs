//! The usual responses of the fake runtime.

use std::collections::HashMap;
use std::future::{pending, ready};
use std::sync::{Arc, Mutex};

use futures_util::future::Either;
use k8s_cri::v1 as cri;
use keelson_proto::containerd::services::content::v1 as content;
use keelson_testkit::fakes::Unary;
use tonic::{Code, Status};

use super::{FakeRuntime, Fault, State, refusal};
use crate::cri_objects::labels;

impl FakeRuntime {
    /// Answers all calls from its pods and images, also those of methods for which a test has set another answer.
    pub(crate) fn answer_as_usual(&self) {
        self.answer_runtime_calls();
        self.answer_container_calls();
        self.answer_image_calls();
    }

    /// Answers a method from the state.
    fn answer<Request, Response>(
        &self,
        method: &Unary<Request, Response>,
        respond: impl Fn(&mut State, Request) -> Result<Response, Status> + Send + Sync + 'static,
    ) where
        Request: Clone,
        Response: Clone + Send + Sync + 'static,
    {
        let state = Arc::clone(&self.state);
        method.answer_with(move |request| respond(&mut state.lock().unwrap(), request));
    }

    fn answer_runtime_calls(&self) {
        let fake = &self.runtime;
        fake.version.answer(version());
        self.answer(&fake.status, |state, _| Ok(state.status()));
        self.answer(&fake.runtime_config, |state, _| {
            state.config.ok_or_else(|| Status::unimplemented("RuntimeConfig"))
        });
        self.answer(&fake.list_pod_sandbox, |state, request| Ok(state.list_sandboxes(request)));
        self.answer(&fake.pod_sandbox_status, |state, request| state.sandbox_status(&request.pod_sandbox_id));
        fake.run_pod_sandbox.answer(cri::RunPodSandboxResponse { pod_sandbox_id: "made".into() });
        fake.stop_pod_sandbox.answer(cri::StopPodSandboxResponse {});
        self.answer(&fake.remove_pod_sandbox, |state, request| {
            state.sandboxes.retain(|sandbox| sandbox.id != request.pod_sandbox_id);
            Ok(cri::RemovePodSandboxResponse {})
        });
    }

    fn answer_container_calls(&self) {
        let fake = &self.runtime;
        self.answer(&fake.list_containers, |state, request| Ok(state.list_containers(request)));
        self.answer(&fake.container_status, |state, request| state.container_status(&request.container_id));
        fake.start_container.answer(cri::StartContainerResponse {});
        fake.stop_container.answer(cri::StopContainerResponse {});
        let state = Arc::clone(&self.state);
        fake.remove_container.answer_async(move |request| remove_container(&state, &request.container_id));
        self.answer(&fake.reopen_container_log, |state, request| state.reopen_log(&request.container_id));
        self.answer(&fake.list_container_stats, |state, _| Ok(state.layer_stats()));
        self.answer(&fake.exec, |state, _| Ok(cri::ExecResponse { url: state.exec_url.clone() }));
        self.answer(&fake.attach, |state, _| Ok(cri::AttachResponse { url: state.exec_url.clone() }));
    }

    fn answer_image_calls(&self) {
        let fake = &self.images;
        self.answer(&fake.image_status, |state, request| Ok(state.image_status(request)));
        self.answer(&fake.list_images, |state, _| {
            Ok(cri::ListImagesResponse { images: state.images.clone() })
        });
        self.answer(&fake.remove_image, |state, request| {
            let reference = request.image.unwrap_or_default().image;
            state.images.retain(|image| !is_named(image, &reference));
            Ok(cri::RemoveImageResponse {})
        });
        self.answer(&fake.image_fs_info, |state, _| Ok(state.filesystems()));
        self.answer(&fake.pull_image, |state, request| state.pull(request));
        self.answer(&self.content.list_statuses, |state, _| {
            let statuses = state.blobs.clone().ok_or_else(|| Status::unimplemented("ListStatuses"))?;
            Ok(content::ListStatusesResponse { statuses })
        });
    }
}

/// Removes a container, unless it has a fault.
fn remove_container(
    state: &Mutex<State>,
    id: &str,
) -> impl Future<Output = Result<cri::RemoveContainerResponse, Status>> + use<> {
    let mut state = state.lock().unwrap();
    match state.faults.get(id) {
        Some(Fault::RemovalHangs) => return Either::Left(pending()),
        Some(Fault::RemovalFails) => {
            state.faults.remove(id);
            return Either::Right(ready(Err(refusal(Code::Internal))));
        }
        Some(Fault::StatusFails) | None => state.containers.retain(|container| container.id != id),
    }
    Either::Right(ready(Ok(cri::RemoveContainerResponse {})))
}

impl State {
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

    fn list_sandboxes(&self, request: cri::ListPodSandboxRequest) -> cri::ListPodSandboxResponse {
        let filter = request.filter.unwrap_or_default();
        let selected = |s: &&cri::PodSandbox| matches(&s.labels, &filter.label_selector);
        cri::ListPodSandboxResponse { items: self.sandboxes.iter().filter(selected).cloned().collect() }
    }

    fn list_containers(&self, request: cri::ListContainersRequest) -> cri::ListContainersResponse {
        let filter = request.filter.unwrap_or_default();
        let selected = |c: &&cri::Container| matches(&c.labels, &filter.label_selector);
        cri::ListContainersResponse { containers: self.containers.iter().filter(selected).cloned().collect() }
    }

    fn sandbox_status(&self, id: &str) -> Result<cri::PodSandboxStatusResponse, Status> {
        let found = self.sandboxes.iter().find(|s| s.id == id).ok_or_else(|| Status::not_found(id))?;
        let metadata = cri::PodSandboxMetadata {
            name: "pod".into(),
            uid: found.labels.get(labels::UID).cloned().unwrap_or_default(),
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
        Ok(cri::PodSandboxStatusResponse { status: Some(status), ..Default::default() })
    }

    fn container_status(&self, id: &str) -> Result<cri::ContainerStatusResponse, Status> {
        if self.faults.get(id) == Some(&Fault::StatusFails) {
            return Err(refusal(Code::Unknown));
        }
        let found = self.containers.iter().find(|c| c.id == id).ok_or_else(|| Status::not_found(id))?;
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
        Ok(cri::ContainerStatusResponse { status: Some(status), ..Default::default() })
    }

    fn reopen_log(&self, id: &str) -> Result<cri::ReopenContainerLogResponse, Status> {
        let path = self.logs.get(id).ok_or_else(|| Status::not_found(id))?;
        let open = std::fs::File::options().create(true).append(true).open(path);
        open.map_err(|error| Status::unknown(error.to_string()))?;
        Ok(cri::ReopenContainerLogResponse {})
    }

    fn layer_stats(&self) -> cri::ListContainerStatsResponse {
        let stats = |(id, layer): (&String, &cri::FilesystemUsage)| cri::ContainerStats {
            attributes: Some(cri::ContainerAttributes { id: id.clone(), ..Default::default() }),
            writable_layer: Some(layer.clone()),
            ..Default::default()
        };
        cri::ListContainerStatsResponse { stats: self.layers.iter().map(stats).collect() }
    }

    fn image_status(&self, request: cri::ImageStatusRequest) -> cri::ImageStatusResponse {
        let reference = request.image.unwrap_or_default().image;
        let image = self.images.iter().find(|image| is_named(image, &reference)).cloned();
        cri::ImageStatusResponse { image, ..Default::default() }
    }

    fn filesystems(&self) -> cri::ImageFsInfoResponse {
        let fs_id = cri::FilesystemIdentifier { mountpoint: self.image_dir.to_str().unwrap().to_owned() };
        let usage = cri::FilesystemUsage { fs_id: Some(fs_id), ..Default::default() };
        let container_filesystems = self.container_filesystem.iter().cloned().collect();
        cri::ImageFsInfoResponse { image_filesystems: vec![usage], container_filesystems }
    }

    fn pull(&self, request: cri::PullImageRequest) -> Result<cri::PullImageResponse, Status> {
        let user = request.auth.unwrap_or_default().username;
        if !self.pullers.is_empty() && !self.pullers.contains(&user) {
            return Err(Status::unknown(format!("{user:?} may not pull")));
        }
        Ok(cri::PullImageResponse { image_ref: "sha256:1".into() })
    }
}

fn version() -> cri::VersionResponse {
    cri::VersionResponse {
        version: "0.1.0".into(),
        runtime_name: "fake".into(),
        runtime_version: "1".into(),
        runtime_api_version: "v1".into(),
    }
}

fn is_named(image: &cri::Image, reference: &str) -> bool {
    image.id == reference || image.repo_tags.iter().chain(&image.repo_digests).any(|name| name == reference)
}

fn matches(labels: &HashMap<String, String>, selector: &HashMap<String, String>) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}
