//! Containers of all kinds.

use std::collections::BTreeSet;

use super::fields::{self, Shown};
use super::resources::{self, Level};
use super::{Findings, names, probes, security};
use crate::pod_ext::ContainerKind;
use crate::types::{
    Container, ContainerPort, EnvFromSource, EnvVar, FileKeySelector, PodSpec, PullPolicy, RestartPolicy,
    Volume, VolumeMount,
};

/// What the checks of a container need to know of its pod.
struct Surroundings<'a> {
    spec: &'a PodSpec,
    host_network: bool,
    /// The pod has no user namespace of its own.
    host_users: bool,
    /// `restartPolicy` of the pod, where it is a good one.
    restart_policy: Option<RestartPolicy>,
    /// `terminationGracePeriodSeconds`, where it is a good one.
    grace: Option<i64>,
}

pub(super) fn check_containers(found: &mut Findings, spec: &PodSpec) {
    let grace = spec.termination_grace_period_seconds.filter(|seconds| *seconds >= 0);
    let around = Surroundings {
        spec,
        host_network: spec.host_network == Some(true),
        host_users: spec.host_users != Some(false),
        restart_policy: RestartPolicy::parse(&spec.restart_policy),
        grace,
    };
    let mut names = BTreeSet::new();
    let mut host_ports = BTreeSet::new();
    let init = spec.init_containers.iter().map(|container| (ContainerKind::of_init(container), container));
    let regular = spec.containers.iter().map(|container| (ContainerKind::Regular, container));
    for (index, (kind, container)) in init.enumerate().chain(regular.enumerate()) {
        let field = format!("spec.{}[{index}]", kind.spec_field());
        check_container(found, &field, kind, container, &around);
        if !container.name.is_empty() && !names.insert(container.name.as_str()) {
            found.duplicate(format!("{field}.name"), &container.name);
        }
        // Init containers use their ports one after the other, regular ones at the same time.
        match kind {
            ContainerKind::Regular => check_host_ports(found, &field, &container.ports, &mut host_ports),
            _ => check_host_ports(found, &field, &container.ports, &mut BTreeSet::new()),
        }
    }
}

fn check_container(
    found: &mut Findings,
    field: &str,
    kind: ContainerKind,
    container: &Container,
    around: &Surroundings<'_>,
) {
    if container.name.is_empty() {
        found.required(format!("{field}.name"), "");
    } else {
        found.name(format!("{field}.name"), &container.name, names::dns_label);
    }
    check_image(found, field, container);
    if let Some(policy) = container.restart_policy.as_deref()
        && (policy.is_empty() || RestartPolicy::parse(policy).is_none())
    {
        found.unsupported(format!("{field}.restartPolicy"), policy, &["Always", "OnFailure", "Never"]);
    }
    check_restart_rules(found, field, container);
    found.one_of(
        &format!("{field}.terminationMessagePolicy"),
        &container.termination_message_policy,
        &["FallbackToLogsOnError", "File"],
    );
    check_ports(found, field, &container.ports, around.host_network);
    for (index, env) in container.env.iter().enumerate() {
        check_env(found, &format!("{field}.env[{index}]"), env);
    }
    for (index, source) in container.env_from.iter().enumerate() {
        check_env_from(found, &format!("{field}.envFrom[{index}]"), source);
    }
    check_mounts(found, field, container, &around.spec.volumes);
    check_devices(found, field, container, &around.spec.volumes);
    probes::check_probes(found, field, kind, container);
    probes::check_hooks(found, field, kind, container, around.grace);
    probes::check_stop_signal(found, field, container, around.spec.os.as_ref());
    found.resources(&format!("{field}.resources"), &container.resources, Level::Container);
    resources::check_claims(found, field, container, around.spec);
    resources::check_resize_policy(found, field, container, around.restart_policy);
    security::check_container_security(found, field, container, around.host_users);
}

/// Rules for restarting a container by its exit code.
fn check_restart_rules(found: &mut Findings, field: &str, container: &Container) {
    const MOST_RULES: usize = 20;
    const MOST_VALUES: usize = 255;
    let rules = &container.restart_policy_rules;
    if rules.is_empty() {
        return;
    }
    if container.restart_policy.is_none() {
        found.required(
            format!("{field}.restartPolicy"),
            "must specify restartPolicy when restart rules are used",
        );
    }
    let field = format!("{field}.restartPolicyRules");
    if rules.len() > MOST_RULES {
        found.push(&field, format!("Too many: {}: must have at most {MOST_RULES} items", rules.len()));
    }
    for (index, rule) in rules.iter().enumerate() {
        let field = format!("{field}[{index}]");
        const ACTIONS: [&str; 2] = ["Restart", "RestartAllContainers"];
        match rule.action.as_str() {
            "" => found.required(format!("{field}.action"), ""),
            action if !ACTIONS.contains(&action) => {
                found.unsupported(format!("{field}.action"), action, &ACTIONS);
            }
            _ => {}
        }
        let field = format!("{field}.exitCodes");
        let Some(codes) = &rule.exit_codes else {
            found.required(field, "must be specified");
            continue;
        };
        const OPERATORS: [&str; 2] = ["In", "NotIn"];
        if !OPERATORS.contains(&codes.operator.as_str()) {
            found.unsupported(format!("{field}.operator"), &codes.operator, &OPERATORS);
        }
        match codes.values.len() {
            0 => found.required(format!("{field}.values"), "must have at least one exit code"),
            1..=MOST_VALUES => {}
            count => found.push(
                format!("{field}.values"),
                format!("Too many: {count}: must have at most {MOST_VALUES} items"),
            ),
        }
    }
}

fn check_image(found: &mut Findings, field: &str, container: &Container) {
    if container.image.is_empty() {
        found.required(format!("{field}.image"), "");
    } else if container.image.trim() != container.image {
        found.invalid(
            format!("{field}.image"),
            &container.image,
            "must not have leading or trailing whitespace",
        );
    }
    let policy = &container.image_pull_policy;
    if !policy.is_empty() && PullPolicy::parse(policy).is_none() {
        let supported = ["Always", "IfNotPresent", "Never"];
        found.unsupported(format!("{field}.imagePullPolicy"), policy, &supported);
    }
}

fn check_ports(found: &mut Findings, field: &str, ports: &[ContainerPort], host_network: bool) {
    const RANGE: &str = "must be between 1 and 65535, inclusive";
    let mut names = BTreeSet::new();
    for (index, port) in ports.iter().enumerate() {
        let field = format!("{field}.ports[{index}]");
        if !port.name.is_empty() {
            found.name(format!("{field}.name"), &port.name, names::port_name);
            if !names.insert(port.name.as_str()) {
                found.duplicate(format!("{field}.name"), &port.name);
            }
        }
        match port.container_port {
            0 => found.required(format!("{field}.containerPort"), ""),
            1..=65535 => {}
            other => found.invalid(format!("{field}.containerPort"), other, RANGE),
        }
        let host_port = port.host_port.unwrap_or(0);
        if !(0..=65535).contains(&host_port) {
            found.invalid(format!("{field}.hostPort"), host_port, RANGE);
        } else if host_network && host_port != 0 && host_port != port.container_port {
            found.invalid(
                format!("{field}.hostPort"),
                host_port,
                "must match containerPort with hostNetwork",
            );
        }
        found.one_of(&format!("{field}.protocol"), &port.protocol, &["SCTP", "TCP", "UDP"]);
        if !port.host_ip.is_empty() {
            found.name(format!("{field}.hostIP"), &port.host_ip, names::ip_address);
        }
    }
}

type HostPort<'a> = (&'a str, &'a str, i32);

fn check_host_ports<'a>(
    found: &mut Findings,
    field: &str,
    ports: &'a [ContainerPort],
    taken: &mut BTreeSet<HostPort<'a>>,
) {
    for (index, port) in ports.iter().enumerate() {
        let Some(number) = port.host_port.filter(|number| *number != 0) else { continue };
        let protocol = if port.protocol.is_empty() { "TCP" } else { &port.protocol };
        if !taken.insert((protocol, &port.host_ip, number)) {
            let shown = format!("{protocol}/{}/{number}", port.host_ip);
            found.duplicate(format!("{field}.ports[{index}].hostPort"), shown);
        }
    }
}

fn check_env(found: &mut Findings, field: &str, env: &EnvVar) {
    if env.name.is_empty() {
        found.required(format!("{field}.name"), "");
    } else {
        found.name(format!("{field}.name"), &env.name, names::env_name);
    }
    let Some(source) = &env.value_from else { return };
    let field = format!("{field}.valueFrom");
    let count = [
        source.field_ref.is_some(),
        source.resource_field_ref.is_some(),
        source.config_map_key_ref.is_some(),
        source.secret_key_ref.is_some(),
        source.file_key_ref.is_some(),
    ]
    .into_iter()
    .filter(|set| *set)
    .count();
    if count > 0 && !env.value.is_empty() {
        found.invalid(&field, "", "may not be specified when `value` is not empty");
    }
    if count != 1 {
        found.invalid(&field, "", "must have exactly one source");
    }
    for (kind, reference) in
        [("configMapKeyRef", &source.config_map_key_ref), ("secretKeyRef", &source.secret_key_ref)]
    {
        if let Some(reference) = reference {
            if reference.name.is_empty() {
                found.required(format!("{field}.{kind}.name"), "");
            }
            if reference.key.is_empty() {
                found.required(format!("{field}.{kind}.key"), "");
            }
        }
    }
    if let Some(selector) = &source.file_key_ref {
        check_file_key(found, &format!("{field}.fileKeyRef"), selector);
    }
    if let Some(selector) = &source.field_ref {
        fields::check_field(found, &format!("{field}.fieldRef"), selector, Shown::InVariable);
    }
    if let Some(selector) = &source.resource_field_ref {
        resources::check_resource_field(found, &format!("{field}.resourceFieldRef"), selector, false);
    }
}

/// A variable from a file of a volume: the path must not leave the volume.
fn check_file_key(found: &mut Findings, field: &str, selector: &FileKeySelector) {
    if selector.volume_name.is_empty() {
        found.required(format!("{field}.volumeName"), "");
    }
    if selector.path.is_empty() {
        found.required(format!("{field}.path"), "");
    } else {
        found.name(format!("{field}.path"), &selector.path, names::projected_path);
    }
    if selector.key.is_empty() {
        found.required(format!("{field}.key"), "");
    } else {
        found.name(format!("{field}.key"), &selector.key, names::env_name);
    }
}

fn check_env_from(found: &mut Findings, field: &str, source: &EnvFromSource) {
    if !source.prefix.is_empty() {
        found.name(format!("{field}.prefix"), &source.prefix, names::env_name);
    }
    let references = [("configMapRef", &source.config_map_ref), ("secretRef", &source.secret_ref)];
    if references.iter().filter(|(_, reference)| reference.is_some()).count() != 1 {
        found.invalid(field, "", "must have exactly one of `configMapRef` or `secretRef`");
    }
    for (kind, reference) in references {
        if reference.as_ref().is_some_and(|reference| reference.name.is_empty()) {
            found.required(format!("{field}.{kind}.name"), "");
        }
    }
}

fn check_mounts(found: &mut Findings, field: &str, container: &Container, volumes: &[Volume]) {
    let privileged = container.security_context.as_ref().and_then(|c| c.privileged).unwrap_or(false);
    let mut paths = BTreeSet::new();
    for (index, mount) in container.volume_mounts.iter().enumerate() {
        let field = format!("{field}.volumeMounts[{index}]");
        check_mount(found, &field, mount, privileged);
        if !mount.name.is_empty() && !volumes.iter().any(|volume| volume.name == mount.name) {
            found.not_found(format!("{field}.name"), &mount.name);
        }
        if !mount.mount_path.is_empty() && !paths.insert(mount.mount_path.as_str()) {
            found.invalid(format!("{field}.mountPath"), &mount.mount_path, "must be unique");
        }
    }
}

fn check_devices(found: &mut Findings, field: &str, container: &Container, volumes: &[Volume]) {
    let (mut names, mut paths) = (BTreeSet::new(), BTreeSet::new());
    for (index, device) in container.volume_devices.iter().enumerate() {
        let field = format!("{field}.volumeDevices[{index}]");
        let (name, path) = (device.name.as_str(), device.device_path.as_str());
        let name_field = format!("{field}.name");
        match volumes.iter().find(|volume| volume.name == name) {
            _ if name.is_empty() => found.required(&name_field, ""),
            None => found.not_found(&name_field, name),
            Some(volume) if volume.persistent_volume_claim.is_none() && volume.ephemeral.is_none() => {
                const CLAIMS: &str =
                    "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode";
                found.invalid(&name_field, name, CLAIMS);
            }
            Some(_) => {}
        }
        if !name.is_empty() && !names.insert(name) {
            found.invalid(&name_field, name, "must be unique");
        }
        if !name.is_empty() && container.volume_mounts.iter().any(|mount| mount.name == name) {
            found.invalid(&name_field, name, "must not already exist in volumeMounts");
        }
        let path_field = format!("{field}.devicePath");
        if path.is_empty() {
            found.required(path_field, "");
        } else if names::no_backsteps(path).is_some() {
            found.invalid(path_field, path, "can not contain backsteps ('..')");
        } else if !paths.insert(path) {
            found.invalid(path_field, path, "must be unique");
        } else if container.volume_mounts.iter().any(|mount| mount.mount_path == path) {
            found.invalid(path_field, path, "must not already exist as a path in volumeMounts");
        }
    }
}

fn check_mount(found: &mut Findings, field: &str, mount: &VolumeMount, privileged: bool) {
    if mount.name.is_empty() {
        found.required(format!("{field}.name"), "");
    }
    if mount.mount_path.is_empty() {
        found.required(format!("{field}.mountPath"), "");
    }
    if !mount.sub_path.is_empty() && !mount.sub_path_expr.is_empty() {
        found.invalid(
            format!("{field}.subPathExpr"),
            &mount.sub_path_expr,
            "cannot be combined with subPath",
        );
    }
    for (key, path) in [("subPath", &mount.sub_path), ("subPathExpr", &mount.sub_path_expr)] {
        found.name(format!("{field}.{key}"), path, names::relative_path);
    }
    check_mount_mode(found, field, mount, privileged);
}

/// How the volumes of a container are mounted.
pub(super) fn check_mount_modes(found: &mut Findings, field: &str, container: &Container) {
    let privileged = container.security_context.as_ref().and_then(|c| c.privileged).unwrap_or(false);
    for (index, mount) in container.volume_mounts.iter().enumerate() {
        check_mount_mode(found, &format!("{field}.volumeMounts[{index}]"), mount, privileged);
    }
}

fn check_mount_mode(found: &mut Findings, field: &str, mount: &VolumeMount, privileged: bool) {
    if let Some(mode) = &mount.mount_propagation {
        const MODES: [&str; 3] = ["Bidirectional", "HostToContainer", "None"];
        let key = format!("{field}.mountPropagation");
        if mode == "Bidirectional" && !privileged {
            found
                .forbidden(key, "Bidirectional mount propagation is available only to privileged containers");
        } else if !MODES.contains(&mode.as_str()) {
            found.unsupported(key, mode, &MODES);
        }
    }
    if let Some(mode) = &mount.recursive_read_only {
        let key = format!("{field}.recursiveReadOnly");
        const MODES: [&str; 3] = ["Disabled", "Enabled", "IfPossible"];
        if !MODES.contains(&mode.as_str()) {
            return found.unsupported(key, mode, &MODES);
        }
        if mode == "Disabled" {
            return;
        }
        if mount.read_only != Some(true) {
            found.forbidden(&key, "may only be specified when readOnly is true");
        }
        if mount.mount_propagation.as_deref().is_some_and(|mode| mode != "None") {
            found.forbidden(key, "may only be specified when mountPropagation is None or not specified");
        }
    }
}
