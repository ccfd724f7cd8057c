//! The usual responses of the fake runtime.

use std::collections::HashMap;

use bytes::Bytes;
use k8s_cri::v1 as cri;
use keelson_proto::containerd::services::content::v1 as content;
use prost::Message;
use tonic::Status;

use super::{Answer, State};
use crate::cri_objects::labels;

/// Decodes a message; one of another type is empty, because not every request begins with an id.
pub(super) fn decode<T: Message + Default>(body: &Bytes) -> T {
    T::decode(body.clone()).unwrap_or_default()
}

impl State {
    /// What a call gets instead of its usual response.
    pub(super) fn take_answer(&mut self, method: &str, id: &str) -> Option<Answer> {
        let keys = [format!("{method} {id}"), method.to_owned()];
        let key = keys.into_iter().find(|key| self.answers.contains_key(key))?;
        match self.answers.get_mut(&key) {
            Some(Answer::Fail(0, _)) => None,
            Some(Answer::Fail(times, code)) => {
                *times -= 1;
                Some(Answer::Fail(*times, *code))
            }
            other => other.cloned(),
        }
    }

    /// The usual response, encoded. `id` is the first field of the request, if that is a string.
    pub(super) fn respond(&mut self, method: &str, id: &str, body: &Bytes) -> Result<Vec<u8>, Status> {
        Ok(match method {
            "Version" => version().encode_to_vec(),
            "Status" => self.status().encode_to_vec(),
            "RuntimeConfig" => {
                let config = self.config.as_ref().ok_or_else(|| Status::unimplemented("RuntimeConfig"))?;
                config.encode_to_vec()
            }
            "ListPodSandbox" => self.list_sandboxes(decode(body)).encode_to_vec(),
            "ListContainers" => self.list_containers(decode(body)).encode_to_vec(),
            "PodSandboxStatus" => self.sandbox_status(id)?.encode_to_vec(),
            "ContainerStatus" => self.container_status(id)?.encode_to_vec(),
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
                self.reopen_log(id)?;
                Vec::new()
            }
            "ListContainerStats" => self.layer_stats().encode_to_vec(),
            "Exec" => {
                self.execs.push(decode(body));
                cri::ExecResponse { url: self.exec_url.clone() }.encode_to_vec()
            }
            "ImageStatus" => self.image_status(decode(body)).encode_to_vec(),
            "ListImages" => cri::ListImagesResponse { images: self.images.clone() }.encode_to_vec(),
            "RemoveImage" => {
                let reference = decode::<cri::RemoveImageRequest>(body).image.unwrap_or_default().image;
                self.images.retain(|image| !is_named(image, &reference));
                Vec::new()
            }
            "ImageFsInfo" => self.filesystems().encode_to_vec(),
            "PullImage" => self.pull(decode(body))?.encode_to_vec(),
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

    fn reopen_log(&self, id: &str) -> Result<(), Status> {
        let path = self.logs.get(id).ok_or_else(|| Status::not_found(id))?;
        let open = std::fs::File::options().create(true).append(true).open(path);
        open.map(drop).map_err(|error| Status::unknown(error.to_string()))
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

    fn pull(&mut self, request: cri::PullImageRequest) -> Result<cri::PullImageResponse, Status> {
        let user = request.auth.unwrap_or_default().username;
        self.pulled_as.push(user.clone());
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
