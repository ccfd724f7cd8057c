//! Kubernetes objects as a node agent sees them, and the arithmetic the kubelet does on them.
//!
//! This crate is pure: no I/O, no clock, no randomness. Every function depends on its arguments only, so the
//! services that link it (`pod-config`, `pod-sync`, `node-status`) reach the same result from the same object.
//!
//! | module | content |
//! |---|---|
//! | [`ids`] | newtypes for pod, container and sandbox identity |
//! | [`types`] | lean serde structs of Pod and Node: only the fields a node agent decides about |
//! | [`duration`] | durations as Go writes them, read and written |
//! | [`kernel`] | features of a kernel by its release |
//! | [`time`] | RFC 3339 text from and to seconds and nanoseconds of the epoch |
//! | [`quantity`] | `resource.Quantity`: exact parsing, arithmetic, canonical text |
//! | [`qos`] | the QoS class of a pod and the cgroup it lives below |
//! | [`resources`] | effective requests and limits of a pod, cgroup values, OOM scores |
//! | [`sysctl`] | names of kernel parameters and the namespaces that they belong to |
//! | [`hash`] | the container hash and the UID of a static pod |
//! | [`defaults`] | API defaulting on raw JSON, so that unknown fields survive |
//! | [`nulls`] | what a null in a map or a list means |
//! | [`json_fields`] | fields of a JSON object, replaced without decoding the others |
//! | [`validate`] | the checks of pod creation, in the API server's wording |
//! | [`persistent_volume`] | PersistentVolumes and claims: what is read of them, and their validation |
//! | [`volume_source`] | every source of a volume, where it may be, and what serves it |
//! | [`node_ext`] | accessors of a Node: the addresses that its pods show |
//! | [`pod_ext`] | accessors of a pod: whether it is static or critical, its containers |
//! | [`source_annotations`] | source and first-seen time of a pod, as annotations in its JSON |
//!
//! The structs drop fields that they do not know. Code that must pass an object on keeps its JSON as well.

pub mod base64;
pub mod defaults;
pub mod duration;
pub mod hash;
pub mod ids;
pub mod json_fields;
pub mod kernel;
pub mod node_ext;
pub mod nulls;
pub mod persistent_volume;
pub mod pod_ext;
pub mod qos;
pub mod quantity;
pub mod resources;
pub mod source_annotations;
pub mod sysctl;
pub mod time;
pub mod types;
pub mod validate;
pub mod volume_source;

pub use defaults::default_pod;
pub use duration::{format_go_duration, parse_go_duration};
pub use hash::{PodOrigin, container_hash, static_pod_uid};
pub use ids::{ContainerId, PodFullName, PodUid, SandboxId};
pub use json_fields::JsonFields;
pub use nulls::fill_nulls;
pub use pod_ext::{ContainerKind, annotations};
pub use qos::{QosClass, compute_qos, qos_class};
pub use quantity::{ParseQuantityError, Quantity};
pub use resources::PodCgroupValues;
pub use source_annotations::with_source_annotations;
pub use types::*;
pub use validate::{
    AllowedReferences, FieldError, static_pod_api_references, unsafe_fields, validate_plugin_source,
    validate_pod,
};
