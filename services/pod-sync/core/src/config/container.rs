//! The request for a container (§3.2 to §3.6).

use std::collections::BTreeMap;

use keelson_kube_model::{Container, Pod, ResourceList};

use super::env::{EnvInputs, FileLookup, ObjectLookup};
use super::fields::FieldInputs;
use super::mounts::{FileMount, MountInputs, VolumePath, block_devices, mounts};
use super::sandbox::{identity, users_of};
use super::security::SecurityInputs;
use super::{
    ConfigError, ContainerSpec, DeviceSpec, ImageUser, MachineInputs, MountSpec, UserNamespace, env, expand,
    keys, resources, security,
};

/// What a container depends on in addition to its pod.
#[derive(Clone, Copy)]
pub struct ContainerInputs<'a> {
    /// CRI `metadata.attempt` and restart count.
    pub attempt: u32,
    /// The resolved image.
    pub image_ref: &'a str,
    /// The user of the image.
    pub image_user: ImageUser<'a>,
    /// Volumes of the pod by name.
    pub volumes: &'a BTreeMap<String, VolumePath>,
    /// Host path of each prepared subpath, by index of the mount; see [`super::subpaths`].
    pub subpaths: &'a BTreeMap<usize, String>,
    /// Files that the agent mounts: /etc/hosts, the termination message.
    pub files: &'a [FileMount],
    /// Addresses of the pod, primary first.
    pub pod_ips: &'a [String],
    /// Addresses of the node, primary first.
    pub node_ips: &'a [String],
    /// Name of the node.
    pub node_name: &'a str,
    /// The node's allocatable resources.
    pub allocatable: &'a ResourceList,
    /// ConfigMaps and Secrets.
    pub objects: &'a dyn ObjectLookup,
    /// Keys of files.
    pub env_files: &'a dyn FileLookup,
    /// Service variables of the pod.
    pub services: &'a BTreeMap<String, String>,
    /// Machine and configuration.
    pub machine: MachineInputs<'a>,
    /// Devices and CPUs assigned to the container.
    pub assigned: &'a AssignedResources,
    /// `seccompDefault`.
    pub seccomp_default: bool,
    /// `<root>/seccomp`.
    pub seccomp_dir: &'a str,
    /// Paths to mask in addition to [`super::MASKED_PATHS`]: the existing ones of
    /// `/sys/devices/system/cpu/cpu<N>/thermal_throttle`.
    pub masked_paths: &'a [String],
    /// Groups of the pod's volumes.
    pub volume_groups: &'a [i64],
    /// Container id of an ephemeral container's target.
    pub target_id: Option<&'a str>,
    /// The runtime supports recursive read-only mounts.
    pub recursive_read_only: bool,
    /// The runtime supports image volumes.
    pub image_volumes: bool,
    /// SELinux is enabled.
    pub selinux: bool,
    /// Id mapping of the pod.
    pub users: Option<UserNamespace>,
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

impl<'a> ContainerInputs<'a> {
    pub(super) fn env_inputs(&self) -> EnvInputs<'a> {
        EnvInputs {
            objects: self.objects,
            files: self.env_files,
            fields: FieldInputs {
                pod_ips: self.pod_ips,
                node_ips: self.node_ips,
                node_name: self.node_name,
                allocatable: self.allocatable,
            },
            devices: &self.assigned.envs,
            services: self.services,
        }
    }
}

/// Builds the request.
pub fn container_plan(
    pod: &Pod,
    container: &Container,
    inputs: &ContainerInputs<'_>,
) -> Result<ContainerSpec, ConfigError> {
    let users = users_of(pod, inputs.users)?;
    let envs = env::build(pod, container, &inputs.env_inputs())?;
    let known = |name: &str| envs.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
    let expanded = |list: &[String]| list.iter().map(|text| expand(text, known)).collect::<Vec<_>>();
    let mount_inputs = MountInputs {
        volumes: inputs.volumes,
        subpaths: inputs.subpaths,
        files: inputs.files,
        recursive_read_only: inputs.recursive_read_only,
        image_volumes: inputs.image_volumes,
        selinux: inputs.selinux,
        users,
    };
    let mut all_mounts = mounts(pod, container, &envs, &mount_inputs)?;
    all_mounts.extend_from_slice(&inputs.assigned.mounts);
    let mut devices = block_devices(container, inputs.volumes)?;
    devices.extend_from_slice(&inputs.assigned.devices);
    let mut limits = resources::of_container(pod, container, inputs.assigned.exclusive_cpus, &inputs.machine);
    limits.cpuset_cpus.clone_from(&inputs.assigned.cpuset_cpus);
    limits.cpuset_mems.clone_from(&inputs.assigned.cpuset_mems);
    let mut labels: BTreeMap<String, String> = identity(pod).into();
    labels.insert(keys::CONTAINER_NAME.to_owned(), container.name.clone());
    Ok(ContainerSpec {
        name: container.name.clone(),
        attempt: inputs.attempt,
        image_ref: inputs.image_ref.to_owned(),
        user_specified_image: container.image.clone(),
        command: expanded(&container.command),
        args: expanded(&container.args),
        working_dir: container.working_dir.clone(),
        mounts: all_mounts,
        devices,
        cdi_devices: inputs.assigned.cdi_devices.clone(),
        labels,
        annotations: annotations(pod, container, inputs),
        log_path: format!("{}/{}.log", container.name, inputs.attempt),
        stdin: container.stdin == Some(true),
        stdin_once: container.stdin_once == Some(true),
        tty: container.tty == Some(true),
        resources: limits,
        security: security::of_container(pod, container, &security_inputs(inputs, users))?,
        envs,
    })
}

fn security_inputs<'a>(inputs: &ContainerInputs<'a>, users: Option<UserNamespace>) -> SecurityInputs<'a> {
    SecurityInputs {
        image_user: inputs.image_user,
        seccomp_default: inputs.seccomp_default,
        seccomp_dir: inputs.seccomp_dir,
        masked_paths: inputs.masked_paths,
        volume_groups: inputs.volume_groups,
        target_id: inputs.target_id,
        users,
    }
}

/// Annotations with which a later process can stop the container properly without its pod object.
fn annotations(pod: &Pod, container: &Container, inputs: &ContainerInputs<'_>) -> BTreeMap<String, String> {
    let mut all = inputs.assigned.annotations.clone();
    let mut set = |key: &str, value: String| all.insert(key.to_owned(), value);
    set(keys::CONTAINER_HASH, crate::container_hash(container));
    set(keys::RESTART_COUNT, inputs.attempt.to_string());
    set(keys::TERMINATION_MESSAGE_PATH, container.termination_message_path.clone());
    set(keys::TERMINATION_MESSAGE_POLICY, container.termination_message_policy.clone());
    if let Some(seconds) = pod.spec.termination_grace_period_seconds {
        set(keys::TERMINATION_GRACE_PERIOD, seconds.to_string());
    }
    if let Some(seconds) = pod.metadata.deletion_grace_period_seconds {
        set(keys::DELETION_GRACE_PERIOD, seconds.to_string());
    }
    let pre_stop = container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.pre_stop.as_ref());
    if let Some(json) = pre_stop.and_then(|hook| serde_json::to_string(hook).ok()) {
        set(keys::PRE_STOP_HANDLER, json);
    }
    if !container.ports.is_empty()
        && let Ok(json) = serde_json::to_string(&container.ports)
    {
        set(keys::PORTS, json);
    }
    all
}
