//! What a container depends on in addition to its pod, grouped by where the facts come from.

use std::collections::BTreeMap;

use keelson_kube_model::ResourceList;

use super::env::{FileLookup, ObjectLookup};
use super::mounts::{FileMount, VolumePath};
use super::security::ImageUser;
use super::{DeviceSpec, MachineInputs, MountSpec, UserNamespace};
use crate::runtime_version::ImageVolumeSupport;

/// What a container depends on in addition to its pod.
#[derive(Clone, Copy)]
pub struct ContainerInputs<'a> {
    /// CRI `metadata.attempt` and restart count.
    pub attempt: u32,
    /// Container id of an ephemeral container's target.
    pub target_id: Option<&'a str>,
    /// The resolved image.
    pub image: ResolvedImage<'a>,
    /// What all containers of the pod share.
    pub pod: PodInputs<'a>,
    /// The node, as fields of the environment name it.
    pub node: NodeInputs<'a>,
    /// Objects, files and services that the environment refers to.
    pub env: EnvSources<'a>,
    /// Volumes and files on the node.
    pub volumes: VolumeInputs<'a>,
    /// Machine and configuration.
    pub machine: MachineInputs<'a>,
    /// The node's security settings.
    pub security: SecuritySettings<'a>,
    /// What the runtime supports.
    pub runtime: RuntimeFeatures<'a>,
    /// Devices and CPUs assigned to the container.
    pub assigned: &'a AssignedResources,
}

/// The image of a container as the runtime has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResolvedImage<'a> {
    /// The reference that the runtime starts containers from.
    pub reference: &'a str,
    /// The user of the image.
    pub user: ImageUser<'a>,
}

/// What all containers of a pod share.
#[derive(Clone, Copy, Debug, Default)]
pub struct PodInputs<'a> {
    /// Addresses of the pod, primary first.
    pub ips: &'a [String],
    /// Groups of the pod's volumes.
    pub volume_groups: &'a [i64],
    /// Id mapping of the pod.
    pub users: Option<UserNamespace>,
}

/// The node, as fields of the environment name it.
#[derive(Clone, Copy)]
pub struct NodeInputs<'a> {
    /// Name of the node.
    pub name: &'a str,
    /// Addresses of the node, primary first.
    pub ips: &'a [String],
    /// The node's allocatable resources.
    pub allocatable: &'a ResourceList,
}

/// Where the values of the environment come from that are not in the pod.
#[derive(Clone, Copy)]
pub struct EnvSources<'a> {
    /// ConfigMaps and Secrets.
    pub objects: &'a dyn ObjectLookup,
    /// Keys of files.
    pub files: &'a dyn FileLookup,
    /// Service variables of the pod.
    pub services: &'a BTreeMap<String, String>,
}

/// The volumes of the pod and the agent's own files, on the node.
#[derive(Clone, Copy)]
pub struct VolumeInputs<'a> {
    /// Volumes of the pod by name.
    pub paths: &'a BTreeMap<String, VolumePath>,
    /// Host path of each prepared subpath, by index of the mount; see [`super::subpaths`].
    pub subpaths: &'a BTreeMap<usize, String>,
    /// The runtime's reference of the image of each image volume that is present, by name of the volume.
    pub images: &'a BTreeMap<String, String>,
    /// The pod's runtime handler, for its image volumes; empty: the runtime's default.
    pub runtime_handler: &'a str,
    /// Files that the agent mounts: /etc/hosts, the termination message.
    pub files: &'a [FileMount],
}

/// Security settings of the node.
#[derive(Clone, Copy, Debug, Default)]
pub struct SecuritySettings<'a> {
    /// `seccompDefault`.
    pub seccomp_default: bool,
    /// `<root>/seccomp`, the directory of localhost profiles.
    pub seccomp_dir: &'a str,
    /// Paths to mask in addition to [`super::MASKED_PATHS`]: the existing ones of
    /// `/sys/devices/system/cpu/cpu<N>/thermal_throttle`.
    pub masked_paths: &'a [String],
    /// SELinux is enabled.
    pub selinux: bool,
}

/// What the runtime supports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuntimeFeatures<'a> {
    /// Its name, for messages.
    pub name: &'a str,
    /// Its version, for messages.
    pub version: &'a str,
    /// Recursive read-only mounts.
    pub recursive_read_only: bool,
    /// Image volumes.
    pub image_volumes: ImageVolumeSupport,
}

/// Resources that resource-manager has assigned to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AssignedResources {
    /// Environment variables of devices.
    pub envs: Vec<(String, String)>,
    /// Annotations of devices.
    pub annotations: BTreeMap<String, String>,
    /// Mounts of devices.
    pub mounts: Vec<MountSpec>,
    /// Devices.
    pub devices: Vec<DeviceSpec>,
    /// CDI names.
    pub cdi_devices: Vec<String>,
    /// CPUs in list form; empty for all.
    pub cpuset_cpus: String,
    /// Memory nodes in list form; empty for all.
    pub cpuset_mems: String,
    /// The CPUs are exclusive to the container.
    pub exclusive_cpus: bool,
}
