//! Pod and container status.
// Fields are named and defined by the Kubernetes API reference.
#![allow(missing_docs)]

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ResourceList, ResourceRequirements, nullable};

api_types! {
    PodStatus {
        observed_generation: Option<i64>,
        /// See [`PodPhase`].
        phase: String,
        conditions: Vec<PodCondition>,
        message: String,
        reason: String,
        nominated_node_name: String,
        host_ip = "hostIP": String,
        host_ips = "hostIPs": Vec<IpAddress>,
        pod_ip = "podIP": String,
        pod_ips = "podIPs": Vec<IpAddress>,
        start_time: Option<String>,
        init_container_statuses: Vec<ContainerStatus>,
        container_statuses: Vec<ContainerStatus>,
        ephemeral_container_statuses: Vec<ContainerStatus>,
        qos_class: String,
        resize: String,
        resource_claim_statuses: Option<Value>,
        extended_resource_claim_status: Option<Value>,
        node_allocatable_resource_claim_statuses: Option<Value>,
        allocated_resources: ResourceList,
        resources: Option<ResourceRequirements>,
    }

    PodCondition {
        type_ = "type": String,
        observed_generation: Option<i64>,
        /// `True`, `False` or `Unknown`.
        status: String,
        last_probe_time: Option<String>,
        last_transition_time: Option<String>,
        reason: String,
        message: String,
    }

    /// An entry of `podIPs` or `hostIPs`.
    IpAddress {
        ip: String,
    }

    /// At most one is set; none means waiting.
    ContainerState {
        waiting: Option<ContainerStateWaiting>,
        running: Option<ContainerStateRunning>,
        terminated: Option<ContainerStateTerminated>,
    }

    ContainerStateWaiting {
        reason: String,
        message: String,
    }

    ContainerStateRunning {
        started_at: Option<String>,
    }

    ContainerStateTerminated {
        exit_code: i32,
        signal: Option<i32>,
        reason: String,
        message: String,
        started_at: Option<String>,
        finished_at: Option<String>,
        container_id = "containerID": String,
    }

    VolumeMountStatus {
        name: String,
        mount_path: String,
        read_only: Option<bool>,
        recursive_read_only: Option<String>,
        volume_status: Option<Value>,
    }

    ContainerUser {
        linux: Option<LinuxContainerUser>,
    }

    LinuxContainerUser {
        uid: i64,
        gid: i64,
        supplemental_groups: Vec<i64>,
    }

    /// Health of the devices of one resource.
    ResourceStatus {
        name: String,
        resources: Vec<ResourceHealth>,
    }

    ResourceHealth {
        resource_id = "resourceID": String,
        health: String,
        message: Option<String>,
    }
}

/// Status of one container. Unlike elsewhere `image` and `imageID` are written even when empty, as the API
/// requires both.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerStatus {
    pub name: String,
    #[serde(deserialize_with = "nullable")]
    pub state: ContainerState,
    #[serde(deserialize_with = "nullable")]
    pub last_state: ContainerState,
    pub ready: bool,
    pub restart_count: i32,
    pub image: String,
    #[serde(rename = "imageID")]
    pub image_id: String,
    /// `<runtime>://<id>`; see [`crate::ContainerId::from_status`].
    #[serde(rename = "containerID", skip_serializing_if = "String::is_empty")]
    pub container_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started: Option<bool>,
    #[serde(deserialize_with = "nullable", skip_serializing_if = "ResourceList::is_empty")]
    pub allocated_resources: ResourceList,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourceRequirements>,
    #[serde(deserialize_with = "nullable", skip_serializing_if = "Vec::is_empty")]
    pub volume_mounts: Vec<VolumeMountStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<ContainerUser>,
    #[serde(deserialize_with = "nullable", skip_serializing_if = "Vec::is_empty")]
    pub allocated_resources_status: Vec<ResourceStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
}

/// `status.phase` of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PodPhase {
    /// Accepted, but not every container has started.
    #[default]
    Pending,
    /// At least one container runs or will run again.
    Running,
    /// All containers ended with 0 and none starts again.
    Succeeded,
    /// All containers ended, at least one of them badly, and none starts again.
    Failed,
    /// Nothing is known; obsolete, but the API still has it.
    Unknown,
}

impl PodPhase {
    /// Reads the wire text; empty reads as `Pending`, other text as `Unknown`.
    pub fn parse(text: &str) -> Self {
        match text {
            "" | "Pending" => Self::Pending,
            "Running" => Self::Running,
            "Succeeded" => Self::Succeeded,
            "Failed" => Self::Failed,
            _ => Self::Unknown,
        }
    }

    /// The wire text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Running => "Running",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
            Self::Unknown => "Unknown",
        }
    }

    /// True for `Succeeded` and `Failed`, which never change again.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

impl PodStatus {
    /// The phase as an enum.
    pub fn phase(&self) -> PodPhase {
        PodPhase::parse(&self.phase)
    }

    /// The condition of this type, if present.
    pub fn condition(&self, type_: &str) -> Option<&PodCondition> {
        self.conditions.iter().find(|condition| condition.type_ == type_)
    }

    /// Frees the excess capacity of lists, as [`Pod::shrink_to_fit`](crate::Pod::shrink_to_fit) does.
    pub fn shrink_to_fit(&mut self) {
        self.conditions.shrink_to_fit();
        for addresses in [&mut self.host_ips, &mut self.pod_ips] {
            addresses.shrink_to_fit();
        }
        let Self { init_container_statuses, container_statuses, ephemeral_container_statuses, .. } = self;
        for list in [init_container_statuses, container_statuses, ephemeral_container_statuses] {
            list.shrink_to_fit();
            list.iter_mut().for_each(|container| container.volume_mounts.shrink_to_fit());
        }
    }
}

impl PodCondition {
    /// True when `status` is `True`.
    pub fn is_true(&self) -> bool {
        self.status == "True"
    }
}
