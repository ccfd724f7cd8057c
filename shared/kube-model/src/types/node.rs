//! Node.
// Fields are named and defined by the Kubernetes API reference.
#![allow(missing_docs)]

use super::{ObjectMeta, ResourceList};

api_types! {
    /// A v1 Node, reduced to what a node agent decides about or reports.
    Node {
        api_version: String,
        kind: String,
        metadata: ObjectMeta,
        spec: NodeSpec,
        status: NodeStatus,
    }

    NodeSpec {
        pod_cidr = "podCIDR": String,
        pod_cidrs = "podCIDRs": Vec<String>,
        provider_id = "providerID": String,
        unschedulable: Option<bool>,
        taints: Vec<Taint>,
    }

    Taint {
        key: String,
        value: String,
        /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
        effect: String,
        time_added: Option<String>,
    }

    NodeStatus {
        capacity: ResourceList,
        allocatable: ResourceList,
        phase: String,
        conditions: Vec<NodeCondition>,
        addresses: Vec<NodeAddress>,
        daemon_endpoints: NodeDaemonEndpoints,
        node_info: NodeSystemInfo,
        images: Vec<ContainerImage>,
        volumes_in_use: Vec<String>,
        volumes_attached: Vec<AttachedVolume>,
        runtime_handlers: Vec<NodeRuntimeHandler>,
        features: Option<NodeFeatures>,
        declared_features: Vec<String>,
    }

    NodeCondition {
        type_ = "type": String,
        status: String,
        last_heartbeat_time: Option<String>,
        last_transition_time: Option<String>,
        reason: String,
        message: String,
    }

    NodeAddress {
        /// `Hostname`, `InternalIP`, `ExternalIP`, `InternalDNS` or `ExternalDNS`.
        type_ = "type": String,
        address: String,
    }

    NodeDaemonEndpoints {
        kubelet_endpoint: Option<DaemonEndpoint>,
    }

    DaemonEndpoint {
        port = "Port": i32,
    }

    NodeSystemInfo {
        machine_id = "machineID": String,
        system_uuid = "systemUUID": String,
        boot_id = "bootID": String,
        kernel_version: String,
        os_image: String,
        container_runtime_version: String,
        kubelet_version: String,
        kube_proxy_version: String,
        operating_system: String,
        architecture: String,
        swap: Option<NodeSwapStatus>,
    }

    NodeSwapStatus {
        /// Bytes.
        capacity: Option<i64>,
    }

    ContainerImage {
        names: Vec<String>,
        size_bytes: Option<i64>,
    }

    AttachedVolume {
        name: String,
        device_path: String,
    }

    NodeRuntimeHandler {
        name: String,
        features: Option<NodeRuntimeHandlerFeatures>,
    }

    NodeRuntimeHandlerFeatures {
        recursive_read_only_mounts: Option<bool>,
        user_namespaces: Option<bool>,
    }

    NodeFeatures {
        supplemental_groups_policy: Option<bool>,
    }
}
