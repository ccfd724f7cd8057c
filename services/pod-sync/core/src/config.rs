//! The CRI requests as plain structs; the caller converts them to wire types.
//!
//! [`sandbox_plan`] and [`container_plan`] are pure: files, objects and addresses are arguments, so the same pod gives the
//! same request (runtime-and-resources.md §2.1 to §2.5, §3.2 to §3.5, §4, §5).

mod container;
mod dns;
mod downward;
mod env;
mod expand;
mod fields;
mod hostname;
mod inputs;
mod mounts;
mod resources;
mod sandbox;
mod security;
mod spec;
mod swap;
mod token;

use keelson_kube_model::Quantity;
use thiserror::Error;

pub use container::container_plan;
pub use dns::{DnsInputs, DnsSpec, ResolvConf, dns_for};
pub use downward::{DownwardValue, downward_value};
pub use env::{FileLookup, NoObjects, ObjectLookup, environment, referenced_files, referenced_objects};
pub use expand::expand;
pub use hostname::{HostNames, host_names};
pub use inputs::{
    AssignedResources, ContainerInputs, EnvSources, NodeInputs, PodInputs, ResolvedImage, RuntimeFeatures,
    SecuritySettings, VolumeInputs,
};
pub use mounts::{FileMount, SubPath, VolumePath, image_volumes, subpaths};
pub use resources::{CgroupVersion, MachineInputs, of_container as container_resources, sandbox_resources};
pub use sandbox::{SandboxInputs, UserNamespace, remedy, sandbox_plan};
pub use security::{ImageUser, MASKED_PATHS, READONLY_PATHS};
pub use spec::*;
pub use swap::has_swap;
pub use token::{TokenAccess, token_access};

/// Labels and annotations on the runtime's records.
pub mod keys {
    /// Name of the pod.
    pub const POD_NAME: &str = "io.kubernetes.pod.name";
    /// Namespace of the pod.
    pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
    /// UID of the pod.
    pub const POD_UID: &str = "io.kubernetes.pod.uid";
    /// Name of the container.
    pub const CONTAINER_NAME: &str = "io.kubernetes.container.name";
    /// Hash of image and name.
    pub const CONTAINER_HASH: &str = "io.kubernetes.container.hash";
    /// How often the container was restarted.
    pub const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
    /// `terminationMessagePath`.
    pub const TERMINATION_MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
    /// `terminationMessagePolicy`.
    pub const TERMINATION_MESSAGE_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";
    /// The preStop hook as JSON.
    pub const PRE_STOP_HANDLER: &str = "io.kubernetes.container.preStopHandler";
    /// The container's ports as JSON.
    pub const PORTS: &str = "io.kubernetes.container.ports";
    /// `spec.terminationGracePeriodSeconds`.
    pub const TERMINATION_GRACE_PERIOD: &str = "io.kubernetes.pod.terminationGracePeriod";
    /// `metadata.deletionGracePeriodSeconds`.
    pub const DELETION_GRACE_PERIOD: &str = "io.kubernetes.pod.deletionGracePeriod";
}

/// A Warning event that does not stop the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigWarning {
    /// Reason of the event.
    pub reason: &'static str,
    /// Its message.
    pub message: String,
}

/// Why the request for a sandbox or a container cannot be built. For a container the waiting reason is
/// `CreateContainerConfigError`, for a sandbox the event is `FailedCreatePodSandBox`; both are retried.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// The name with `setHostnameAsFQDN` is too long for the kernel.
    #[error(
        "failed to construct FQDN from pod hostname and cluster domain, FQDN {fqdn} is too long (64 characters is the max, {length} characters requested)"
    )]
    FqdnTooLong {
        /// The name.
        fqdn: String,
        /// Its length.
        length: usize,
    },
    /// `hostnameOverride` is not a DNS subdomain.
    #[error(
        "spec.hostnameOverride {name:?} is not a DNS subdomain: use lower-case letters, digits, '-' and '.'"
    )]
    HostnameOverride {
        /// The name.
        name: String,
    },
    /// `hostUsers: false` is not supported by the runtime.
    #[error("can't set `spec.hostUsers: false`, runtime does not support user namespaces")]
    UserNamespaces,
    /// A ConfigMap or Secret does not exist.
    #[error("{kind} {name:?} not found")]
    ObjectMissing {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// A ConfigMap or Secret could not be read.
    #[error("could not read {kind} {name:?}: {message}")]
    ObjectUnreadable {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// Its name.
        name: String,
        /// The error of the lookup.
        message: String,
    },
    /// A ConfigMap or Secret lacks a key.
    #[error("couldn't find key {key} in {kind} {namespace}/{name}")]
    KeyMissing {
        /// `ConfigMap` or `Secret`.
        kind: &'static str,
        /// Namespace of the pod.
        namespace: String,
        /// Its name.
        name: String,
        /// The key.
        key: String,
    },
    /// A file in a volume lacks a key.
    #[error("environment variable key {key:?} not found in file {path:?} of volume {volume:?}")]
    FileKeyMissing {
        /// The volume.
        volume: String,
        /// The file.
        path: String,
        /// The key.
        key: String,
    },
    /// A file in a volume could not be read.
    #[error("could not read file {path:?} of volume {volume:?}: {message}")]
    FileUnreadable {
        /// The volume.
        volume: String,
        /// The file.
        path: String,
        /// The error of the lookup.
        message: String,
    },
    /// An unsupported `fieldPath`.
    #[error("env {variable}: field path {path:?} is not supported")]
    FieldPath {
        /// The variable.
        variable: String,
        /// The path.
        path: String,
    },
    /// A `resourceFieldRef` that cannot be resolved.
    #[error("env {variable}: resource {resource:?} of container {container:?} is not known")]
    Resource {
        /// The variable.
        variable: String,
        /// The container named.
        container: String,
        /// The resource named.
        resource: String,
    },
    /// A divisor that is not above zero.
    #[error("env {variable}: divisor {divisor} must be above zero")]
    Divisor {
        /// The variable.
        variable: String,
        /// The divisor.
        divisor: Quantity,
    },
    /// A mount names a volume that is not mounted.
    #[error("cannot find volume {volume:?} to mount into container {container:?}")]
    VolumeMissing {
        /// The container.
        container: String,
        /// The volume.
        volume: String,
    },
    /// A block device cannot be passed to a container.
    #[error("cannot pass volume {volume:?} to container {container:?} as the device {path:?}: {detail}")]
    VolumeDevice {
        /// The container.
        container: String,
        /// The volume.
        volume: String,
        /// The path in the container.
        path: String,
        /// Why.
        detail: &'static str,
    },
    /// `subPathExpr` names a variable that the container does not have, or leads out of the volume.
    #[error("subPath {path:?} of volumeMount {mount:?} of container {container:?}: {detail}")]
    SubPath {
        /// The container.
        container: String,
        /// The mount.
        mount: String,
        /// The path or expression.
        path: String,
        /// What is wrong.
        detail: String,
    },
    /// The subpath has not been prepared.
    #[error("failed to prepare subPath for volumeMount {mount:?} of container {container:?}")]
    SubPathNotPrepared {
        /// The container.
        container: String,
        /// The mount.
        mount: String,
    },
    /// Recursive read-only is requested and the runtime does not support it.
    #[error(
        "failed to resolve recursive read-only mode: volume {mount:?} requested recursive read-only mode, but it is not supported by the runtime"
    )]
    RecursiveReadOnly {
        /// The mount.
        mount: String,
    },
    /// An image volume on a runtime that does not support it.
    #[error("{detail}")]
    ImageVolume {
        /// The volume, the runtime, and what to do.
        detail: String,
    },
    /// A value that is unknown or contradicts another one, where the alternative would be the weaker choice.
    #[error("{field}: {message}")]
    Unsafe {
        /// The field, such as `spec.securityContext.seccompProfile.type`.
        field: String,
        /// What is wrong with it.
        message: String,
    },
    /// The user of the container violates `runAsNonRoot`.
    #[error("{detail} (pod: \"{pod}\", container: {container})")]
    NonRoot {
        /// What violates the rule.
        detail: String,
        /// `<name>_<namespace>(<uid>)`.
        pod: String,
        /// The container.
        container: String,
    },
}

#[cfg(test)]
mod tests;
