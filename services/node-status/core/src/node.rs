//! The Node object.

use std::collections::BTreeMap;
use std::sync::Arc;

use keelson_kube_model::quantity::QuantityFormat;
use keelson_kube_model::time::format_seconds;
use keelson_kube_model::{
    ContainerImage, DaemonEndpoint, Node, NodeCondition, NodeDaemonEndpoints, NodeFeatures,
    NodeRuntimeHandler, NodeRuntimeHandlerFeatures, NodeSpec, NodeStatus, NodeSwapStatus, NodeSystemInfo,
    ObjectMeta, Quantity, ResourceList,
};
use serde_json::{Value, json};

use crate::addresses::{AddressInputs, PROVIDED_NODE_IP};
use crate::conditions::{ReadyInputs, node_conditions};
use crate::csi_drivers::CsiDrivers;
use crate::reports::{Machine, RuntimeHandler, RuntimeState};
use crate::runtime_version::parsed;

/// The inputs from which a Node is built.
#[derive(Debug, Clone, Copy)]
pub struct NodeInputs<'a> {
    /// Name of the node, which is its host name too.
    pub node_name: &'a str,
    /// Labels from the configuration, which override our own.
    pub labels: &'a BTreeMap<String, String>,
    /// `maxPods`, shown while the machine is unknown.
    pub max_pods: u32,
    /// The port of the kubelet API.
    pub api_port: u16,
    /// Shown as the kubelet's version.
    pub kubelet_version: &'a str,
    /// The control plane attaches volumes for this node (`enableControllerAttachDetach`).
    pub controller_attach_detach: bool,
    /// The inputs for its addresses; `None`: they are unknown, and the Node keeps those that it has.
    pub addresses: Option<AddressInputs<'a>>,
    /// `None` before resource-manager has reported.
    pub machine: Option<&'a Machine>,
    /// `None` before runtime-shim has reported.
    pub runtime: Option<&'a RuntimeState>,
    /// The runtime's images that are listed (see [`crate::listed_images`]).
    pub images: &'a [ContainerImage],
    /// The attachable volumes that this node uses, sorted; `None` before volume-manager has reported.
    pub volumes_in_use: Option<&'a [String]>,
    /// The features that the node declares, sorted (node-and-api.md §9.7).
    pub declared_features: &'a [String],
    /// Errors of the services (see [`crate::Watchdog::errors`]).
    pub service_errors: &'a [String],
    /// When the first Node of this name was built here, in seconds since 1970-01-01 UTC; 0: not known.
    pub created_unix_seconds: i64,
    /// Now, in seconds since 1970-01-01 UTC.
    pub now_unix_seconds: i64,
}

const LABEL_HOSTNAME: &str = "kubernetes.io/hostname";
const OS: &str = "linux";
pub(crate) const ATTACH_DETACH: &str = "volumes.kubernetes.io/controller-managed-attach-detach";

/// Builds the Node as this node would report it now.
///
/// Level-triggered: depends only on the arguments. `previous` are the conditions of the last Node, for their transition times.
///
/// Parity: node-and-api.md §9.1 to §9.5. A control plane with API objects sets `creationTimestamp`; without one it is when this
/// node was first built.
pub fn build_node(inputs: &NodeInputs<'_>, previous: &[NodeCondition]) -> Node {
    let (capacity, allocatable) = resources(inputs);
    let now = format_seconds(inputs.now_unix_seconds).unwrap_or_default();
    let ready = ReadyInputs {
        runtime: inputs.runtime,
        capacity: capacity.keys().map(String::as_str).collect(),
        services: inputs.service_errors,
    };
    let conditions = node_conditions(inputs.machine, &ready, previous, &now);
    Node {
        api_version: "v1".into(),
        kind: "Node".into(),
        metadata: ObjectMeta {
            name: inputs.node_name.into(),
            labels: labels(inputs),
            annotations: annotations(inputs),
            creation_timestamp: Some(inputs.created_unix_seconds)
                .filter(|at| *at > 0)
                .and_then(|at| format_seconds(at).ok()),
            ..ObjectMeta::default()
        },
        status: NodeStatus {
            capacity,
            allocatable,
            conditions,
            addresses: inputs.addresses.map(|of| of.addresses(inputs.node_name)).unwrap_or_default(),
            daemon_endpoints: NodeDaemonEndpoints {
                kubelet_endpoint: Some(DaemonEndpoint { port: i32::from(inputs.api_port) }),
            },
            node_info: node_info(inputs),
            images: inputs.images.to_vec(),
            volumes_in_use: inputs.volumes_in_use.unwrap_or_default().to_vec(),
            runtime_handlers: inputs.runtime.map(handlers).unwrap_or_default(),
            features: inputs
                .runtime
                .and_then(|runtime| runtime.supplemental_groups_policy)
                .map(|strict| NodeFeatures { supplemental_groups_policy: Some(strict) }),
            declared_features: inputs.declared_features.to_vec(),
            ..NodeStatus::default()
        },
        spec: NodeSpec {
            // The API server, where there is one, has a `spec` of its own.
            unschedulable: inputs.machine.is_some_and(|machine| machine.drained).then_some(true),
            ..NodeSpec::default()
        },
    }
}

fn annotations(inputs: &NodeInputs<'_>) -> BTreeMap<String, String> {
    let provided = inputs.addresses.and_then(|of| of.provided());
    let provided = provided.map(|list| (PROVIDED_NODE_IP.to_owned(), list));
    let attach = inputs.controller_attach_detach.then(|| (ATTACH_DETACH.to_owned(), "true".to_owned()));
    attach.into_iter().chain(provided).collect()
}

fn handlers(runtime: &RuntimeState) -> Vec<NodeRuntimeHandler> {
    let one = |handler: &RuntimeHandler| NodeRuntimeHandler {
        name: handler.name.clone(),
        features: Some(NodeRuntimeHandlerFeatures {
            recursive_read_only_mounts: Some(handler.recursive_read_only_mounts),
            user_namespaces: Some(handler.user_namespaces),
        }),
    };
    runtime.handlers.iter().map(one).collect()
}

fn labels(inputs: &NodeInputs<'_>) -> BTreeMap<String, String> {
    let arch = go_arch(inputs.machine.map_or("", |m| &m.architecture));
    let mut labels = BTreeMap::from([(LABEL_HOSTNAME.to_owned(), inputs.node_name.to_owned())]);
    for prefix in ["kubernetes.io", "beta.kubernetes.io"] {
        labels.insert(format!("{prefix}/os"), OS.to_owned());
        if !arch.is_empty() {
            labels.insert(format!("{prefix}/arch"), arch.to_owned());
        }
    }
    labels.extend(inputs.labels.clone());
    labels
}

/// Go's name of an architecture that the kernel names; Go's own names are returned unchanged.
fn go_arch(machine: &str) -> &str {
    match machine {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "armv6l" | "armv7l" | "armv8l" => "arm",
        "i386" | "i486" | "i586" | "i686" => "386",
        "loongarch64" => "loong64",
        other => other,
    }
}

fn resources(inputs: &NodeInputs<'_>) -> (ResourceList, ResourceList) {
    match inputs.machine {
        Some(machine) => (quantities(&machine.capacity), quantities(&machine.allocatable)),
        None => {
            let unknown = ResourceList::from([
                ("cpu".to_owned(), Quantity::ZERO),
                ("memory".to_owned(), Quantity::ZERO),
                ("pods".to_owned(), count(i64::from(inputs.max_pods))),
            ]);
            (unknown.clone(), unknown)
        }
    }
}

/// Amounts in the notation that the kubelet uses for each: cores for `cpu`, `Ki` for memory and storage, plain
/// numbers for the rest. Process ids are reserved but never shown.
fn quantities(amounts: &BTreeMap<String, i64>) -> ResourceList {
    let quantity = |name: &str, amount: i64| match name {
        "cpu" => Quantity::from_milli(amount),
        "memory" | "ephemeral-storage" => Quantity::from_units(amount, QuantityFormat::BinarySi),
        _ if name.starts_with("hugepages-") => Quantity::from_units(amount, QuantityFormat::BinarySi),
        _ => count(amount),
    };
    amounts
        .iter()
        .filter(|(name, _)| name.as_str() != "pid")
        .map(|(name, amount)| (name.clone(), quantity(name, *amount)))
        .collect()
}

fn count(amount: i64) -> Quantity {
    Quantity::from_units(amount, QuantityFormat::DecimalSi)
}

fn node_info(inputs: &NodeInputs<'_>) -> NodeSystemInfo {
    let machine = inputs.machine.cloned().unwrap_or_default();
    let runtime_version = inputs.runtime.filter(|r| !r.name.is_empty()).map_or_else(
        || "Unknown".to_owned(),
        |r| format!("{}://{}", r.name, parsed(&r.version).unwrap_or_else(|| "Unknown".to_owned())),
    );
    NodeSystemInfo {
        architecture: go_arch(&machine.architecture).to_owned(),
        machine_id: machine.machine_id,
        system_uuid: machine.system_uuid,
        boot_id: machine.boot_id,
        kernel_version: machine.kernel_version,
        os_image: machine.os_image,
        container_runtime_version: runtime_version,
        kubelet_version: inputs.kubelet_version.to_owned(),
        kube_proxy_version: String::new(),
        operating_system: OS.to_owned(),
        swap: (machine.swap > 0).then_some(NodeSwapStatus { capacity: Some(machine.swap) }),
    }
}

/// A Node as it is written to the control plane.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeReport {
    /// The Node.
    pub node: Arc<Node>,
    /// Whether `status.volumesInUse` is known. If it is not, the control plane keeps the list that it has: a list without a
    /// volume would permit its detachment (volumes.md §3.15).
    pub has_volumes_in_use: bool,
    /// The CSI drivers that it shows. Only an API server gets them.
    pub csi_drivers: Arc<CsiDrivers>,
}

impl NodeReport {
    /// The Node as JSON. `status.volumesInUse` is an empty list if no volume is in use, and absent if the list is not known.
    ///
    /// # Errors
    /// The Node cannot be encoded.
    pub fn to_json(&self) -> serde_json::Result<Value> {
        let mut json = serde_json::to_value(&*self.node)?;
        if self.has_volumes_in_use {
            json["status"]["volumesInUse"] = json!(self.node.status.volumes_in_use);
        }
        Ok(json)
    }
}

/// Whether a Node is written at once: none was written before, or it differs from the last written one in more than heartbeat
/// times.
pub fn worth_reporting(written: Option<&NodeReport>, report: &NodeReport) -> bool {
    written.is_none_or(|written| {
        written.has_volumes_in_use != report.has_volumes_in_use
            || written.csi_drivers != report.csi_drivers
            || without_heartbeats(&written.node) != without_heartbeats(&report.node)
    })
}

/// How long an unchanged Node waits until it is written again, in milliseconds (node-and-api.md §9.8). After a change it is from
/// half to one and a half times `every_ms`, chosen by `spread` from 0 to 1, so that nodes that change together do not write
/// together.
pub fn report_after_ms(every_ms: u64, changed: bool, spread: f64) -> u64 {
    if changed { (every_ms as f64 * (0.5 + spread)) as u64 } else { every_ms }
}

/// A Node without heartbeat times, for the comparison at each heartbeat; borrowed, since a Node with images is large.
fn without_heartbeats(node: &Node) -> impl PartialEq + '_ {
    // All fields are named, so that a new one is not forgotten here.
    let Node { api_version, kind, metadata, spec, status } = node;
    let NodeStatus {
        capacity,
        allocatable,
        phase,
        conditions,
        addresses,
        daemon_endpoints,
        node_info,
        images,
        volumes_in_use,
        volumes_attached,
        runtime_handlers,
        features,
        declared_features,
    } = status;
    let conditions: Vec<_> = conditions.iter().map(condition_without_heartbeat).collect();
    (
        (api_version, kind, metadata, spec, conditions),
        (capacity, allocatable, phase, addresses, daemon_endpoints, node_info, images),
        (volumes_in_use, volumes_attached, runtime_handlers, features, declared_features),
    )
}

fn condition_without_heartbeat(condition: &NodeCondition) -> impl PartialEq + '_ {
    let NodeCondition { type_, status, last_heartbeat_time: _, last_transition_time, reason, message } =
        condition;
    (type_, status, last_transition_time, reason, message)
}
