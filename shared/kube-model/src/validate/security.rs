//! Security contexts of pods and containers. Unknown values are refused: a later step could otherwise treat one as the
//! weaker choice.

use std::collections::BTreeSet;

use super::{Findings, names};
use crate::sysctl::{SysctlNamespace, dotted, namespace_of};
use crate::types::{
    AppArmorProfile, Container, Pod, PodSecurityContext, PodSpec, SeccompProfile, SecurityContext,
};

/// Annotation prefix of AppArmor profiles, used before the field existed.
const APPARMOR_ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";
/// Longest name of an AppArmor profile on the node, in bytes.
const MAX_APPARMOR_PROFILE: usize = 4095;
/// Longest name of a kernel parameter.
const MAX_SYSCTL: usize = 253;
/// The capability that allows almost everything.
const ALL_POWERS: &str = "CAP_SYS_ADMIN";
/// Kinds of seccomp and AppArmor profiles.
const PROFILES: [&str; 3] = ["Localhost", "RuntimeDefault", "Unconfined"];

/// Checks the security context of the pod.
pub(super) fn check_pod_security(found: &mut Findings, pod: &Pod) {
    let spec = &pod.spec;
    check_host_users(found, spec);
    check_apparmor_annotations(found, pod);
    let Some(context) = &spec.security_context else { return };
    let field = "spec.securityContext";
    for (name, id) in [
        ("runAsUser", context.run_as_user),
        ("runAsGroup", context.run_as_group),
        ("fsGroup", context.fs_group),
    ] {
        check_id(found, &format!("{field}.{name}"), id);
    }
    for (index, id) in context.supplemental_groups.iter().enumerate() {
        check_id(found, &format!("{field}.supplementalGroups[{index}]"), Some(*id));
    }
    for (name, value, known) in [
        ("fsGroupChangePolicy", &context.fs_group_change_policy, ["Always", "OnRootMismatch"]),
        ("supplementalGroupsPolicy", &context.supplemental_groups_policy, ["Merge", "Strict"]),
        ("seLinuxChangePolicy", &context.se_linux_change_policy, ["MountOption", "Recursive"]),
    ] {
        if let Some(value) = value.as_deref().filter(|value| !known.contains(value)) {
            found.unsupported(format!("{field}.{name}"), value, &known);
        }
    }
    check_seccomp(found, &format!("{field}.seccompProfile"), context.seccomp_profile.as_ref());
    check_apparmor(found, &format!("{field}.appArmorProfile"), context.app_armor_profile.as_ref());
    check_sysctls(found, field, context, spec);
}

/// Checks the security context of a container. `host_users`: the pod has no user namespace of its own.
pub(super) fn check_container_security(
    found: &mut Findings,
    field: &str,
    container: &Container,
    host_users: bool,
) {
    let Some(context) = container.security_context.as_deref() else { return };
    let field = format!("{field}.securityContext");
    check_id(found, &format!("{field}.runAsUser"), context.run_as_user);
    check_id(found, &format!("{field}.runAsGroup"), context.run_as_group);
    check_escalation(found, &field, context);
    match context.proc_mount.as_deref() {
        None | Some("Default") => {}
        Some("Unmasked") if !host_users => {}
        Some("Unmasked") => found.invalid(
            format!("{field}.procMount"),
            "Unmasked",
            "`hostUsers` must be false to use `Unmasked`",
        ),
        Some(other) => found.unsupported(format!("{field}.procMount"), other, &["Default", "Unmasked"]),
    }
    check_seccomp(found, &format!("{field}.seccompProfile"), context.seccomp_profile.as_ref());
    check_apparmor(found, &format!("{field}.appArmorProfile"), context.app_armor_profile.as_ref());
}

fn check_id(found: &mut Findings, field: &str, id: Option<i64>) {
    if let Some(id) = id.filter(|id| !(0..=i64::from(i32::MAX)).contains(id)) {
        found.invalid(field, id, "must be between 0 and 2147483647, inclusive");
    }
}

fn check_escalation(found: &mut Findings, field: &str, context: &SecurityContext) {
    if context.allow_privilege_escalation != Some(false) {
        return;
    }
    if context.privileged == Some(true) {
        let detail = "cannot set `allowPrivilegeEscalation` to false and `privileged` to true";
        found.invalid(field, "", detail);
    }
    let added = context.capabilities.iter().flat_map(|capabilities| &capabilities.add);
    if added.into_iter().any(|capability| capability == ALL_POWERS) {
        let detail = "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN";
        found.invalid(field, "", detail);
    }
}

fn check_seccomp(found: &mut Findings, field: &str, profile: Option<&SeccompProfile>) {
    let Some(profile) = profile else { return };
    let at = format!("{field}.localhostProfile");
    match (profile.type_.as_str(), profile.localhost_profile.as_deref()) {
        ("Localhost", None | Some("")) => found.required(at, "must be set when seccomp type is Localhost"),
        ("Localhost", Some(name)) => check_descending(found, at, name),
        ("RuntimeDefault" | "Unconfined", Some(name)) => {
            found.invalid(at, name, "can only be set when seccomp type is Localhost");
        }
        ("RuntimeDefault" | "Unconfined", None) => {}
        ("", _) => found.required(format!("{field}.type"), "type is required when seccompProfile is set"),
        (other, _) => found.unsupported(format!("{field}.type"), other, &PROFILES),
    }
}

/// A path that does not leave its folder.
fn check_descending(found: &mut Findings, field: String, path: &str) {
    if let Some(detail) = names::relative_path(path) {
        found.invalid(field, path, detail);
    } else if path.contains('\0') {
        found.invalid(field, path, "must not contain NUL");
    }
}

fn check_apparmor(found: &mut Findings, field: &str, profile: Option<&AppArmorProfile>) {
    let Some(profile) = profile else { return };
    let at = format!("{field}.localhostProfile");
    match (profile.type_.as_str(), profile.localhost_profile.as_deref()) {
        ("Localhost", Some(name)) if !name.trim().is_empty() => {
            if name.trim() != name {
                found.invalid(at, name, "must not be padded with whitespace");
            } else if name.len() > MAX_APPARMOR_PROFILE {
                found.push(at, format!("Too long: may not be more than {MAX_APPARMOR_PROFILE} bytes"));
            }
        }
        ("Localhost", _) => found.required(at, "must be set when AppArmor type is Localhost"),
        ("RuntimeDefault" | "Unconfined", Some(name)) => {
            found.invalid(at, name, "can only be set when AppArmor type is Localhost");
        }
        ("RuntimeDefault" | "Unconfined", None) => {}
        ("", _) => found.required(format!("{field}.type"), "type is required when appArmorProfile is set"),
        (other, _) => found.unsupported(format!("{field}.type"), other, &PROFILES),
    }
}

/// An annotation for a container that does not exist is refused: its author relies on the profile.
fn check_apparmor_annotations(found: &mut Findings, pod: &Pod) {
    for (key, value) in &pod.metadata.annotations {
        let Some(name) = key.strip_prefix(APPARMOR_ANNOTATION) else { continue };
        let field = format!("metadata.annotations[{key}]");
        if !pod.containers().any(|(_, container)| container.name == name) {
            found.invalid(&field, name, "container not found");
        }
        let known = ["", "runtime/default", "unconfined"].contains(&value.as_str());
        let local = value.strip_prefix("localhost/").is_some_and(|profile| !profile.trim().is_empty());
        if !known && !local {
            let detail =
                "invalid AppArmor profile name: must be runtime/default, unconfined or localhost/<profile>";
            found.invalid(&field, value, detail);
            continue;
        }
        if !value.is_empty() {
            contradiction(found, &pod.spec, name, value);
        }
    }
}

/// The legacy annotation and the field of a container must agree.
fn contradiction(found: &mut Findings, spec: &PodSpec, container: &str, annotation: &str) {
    let lists = [("initContainers", &spec.init_containers), ("containers", &spec.containers)];
    for (list, containers) in lists {
        let Some(index) = containers.iter().position(|known| known.name == container) else { continue };
        let context = containers[index].security_context.as_deref();
        let Some(profile) = context.and_then(|context| context.app_armor_profile.as_ref()) else { return };
        let field = format!("spec.{list}[{index}].securityContext.appArmorProfile");
        let (kind, name) = match annotation.strip_prefix("localhost/") {
            Some(name) => ("Localhost", Some(name)),
            None if annotation == "unconfined" => ("Unconfined", None),
            None => ("RuntimeDefault", None),
        };
        if profile.type_ != kind {
            found.forbidden(format!("{field}.type"), "apparmor type in annotation and field must match");
        } else if profile.localhost_profile.as_deref() != name {
            let detail = "apparmor profile in annotation and field must match";
            found.forbidden(format!("{field}.localhostProfile"), detail);
        }
    }
}

/// A pod with a user namespace must not use namespaces of the host.
fn check_host_users(found: &mut Findings, spec: &PodSpec) {
    if spec.host_users != Some(false) {
        return;
    }
    let detail = "when `hostUsers` is false";
    for (name, host) in
        [("hostNetwork", spec.host_network), ("hostPID", spec.host_pid), ("hostIPC", spec.host_ipc)]
    {
        if host == Some(true) {
            found.forbidden(format!("spec.{name}"), detail);
        }
    }
    for (list, containers) in [("initContainers", &spec.init_containers), ("containers", &spec.containers)] {
        for (index, container) in containers.iter().enumerate() {
            if !container.volume_devices.is_empty() {
                found.forbidden(format!("spec.{list}[{index}].volumeDevices"), detail);
            }
        }
    }
}

fn check_sysctls(found: &mut Findings, field: &str, context: &PodSecurityContext, spec: &PodSpec) {
    let mut seen = BTreeSet::new();
    for (index, sysctl) in context.sysctls.iter().enumerate() {
        let field = format!("{field}.sysctls[{index}].name");
        if sysctl.name.is_empty() {
            found.required(field, "");
            continue;
        }
        if !is_sysctl(&sysctl.name) {
            let detail = "must have at most 253 characters and be parts of lower case letters, digits, '-' and '_' that are \
                          joined by '.' or '/'";
            found.invalid(&field, &sysctl.name, detail);
            continue;
        }
        let name = dotted(&sysctl.name);
        match namespace_of(&name) {
            Some(SysctlNamespace::Net) if spec.host_network == Some(true) => {
                found.invalid(&field, &sysctl.name, "may not be specified when 'hostNetwork' is true");
            }
            Some(SysctlNamespace::Ipc) if spec.host_ipc == Some(true) => {
                found.invalid(&field, &sysctl.name, "may not be specified when 'hostIPC' is true");
            }
            Some(_) | None => {}
        }
        if !seen.insert(name) {
            found.duplicate(field, &sysctl.name);
        }
    }
}

fn is_sysctl(name: &str) -> bool {
    let is_end = |byte: Option<&u8>| byte.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let is_part = |part: &str| {
        let bytes = part.as_bytes();
        let inner = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_".contains(b);
        is_end(bytes.first()) && is_end(bytes.last()) && bytes.iter().all(inner)
    };
    name.len() <= MAX_SYSCTL && name.split(['.', '/']).all(is_part)
}
