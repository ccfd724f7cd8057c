//! The request for a container (§3.2 to §3.6).

use std::collections::BTreeMap;

use keelson_kube_model::{Container, Pod};

use super::inputs::ContainerInputs;
use super::mounts::{MountInputs, block_devices, mounts};
use super::sandbox::{identity, users_of};
use super::security::SecurityInputs;
use super::{ConfigError, ContainerSpec, UserNamespace, env, expand, keys, resources, security};

/// Builds the request.
pub fn container_plan(
    pod: &Pod,
    container: &Container,
    inputs: &ContainerInputs<'_>,
) -> Result<ContainerSpec, ConfigError> {
    let users = users_of(pod, inputs.pod.users)?;
    let envs = env::environment(pod, container, inputs)?;
    let known = |name: &str| envs.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
    let expanded = |list: &[String]| list.iter().map(|text| expand(text, known)).collect::<Vec<_>>();
    let mount_inputs = MountInputs {
        volumes: inputs.volumes,
        runtime: inputs.runtime,
        selinux: inputs.security.selinux,
        users,
    };
    let mut all_mounts = mounts(pod, container, &envs, &mount_inputs)?;
    all_mounts.extend_from_slice(&inputs.assigned.mounts);
    let mut devices = block_devices(container, inputs.volumes.paths)?;
    devices.extend_from_slice(&inputs.assigned.devices);
    let mut limits = resources::of_container(pod, container, inputs.assigned.exclusive_cpus, &inputs.machine);
    limits.cpuset_cpus.clone_from(&inputs.assigned.cpuset_cpus);
    limits.cpuset_mems.clone_from(&inputs.assigned.cpuset_mems);
    let mut labels: BTreeMap<String, String> = identity(pod).into();
    labels.insert(keys::CONTAINER_NAME.to_owned(), container.name.clone());
    Ok(ContainerSpec {
        name: container.name.clone(),
        attempt: inputs.attempt,
        image_ref: inputs.image.reference.to_owned(),
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
        image_user: inputs.image.user,
        settings: inputs.security,
        volume_groups: inputs.pod.volume_groups,
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
