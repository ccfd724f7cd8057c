//! Security contexts (§2.5, §5): fields of the container override those of the pod.

use keelson_kube_model::{
    AppArmorProfile, Container, FieldError, Pod, SeLinuxOptions, SeccompProfile, SecurityContext,
    unsafe_fields,
};

use super::inputs::SecuritySettings;
use super::{
    ConfigError, ContainerSecurity, NamespaceMode, Namespaces, SandboxSecurity, SecurityProfile,
    UserNamespace,
};
use crate::backoff::pod_text;

/// Paths that are masked in containers.
pub const MASKED_PATHS: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];

/// Paths that are read-only in containers.
pub const READONLY_PATHS: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Annotation prefix of AppArmor profiles, from before there was a field.
const APPARMOR_ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";

/// The user of the image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageUser<'a> {
    /// Number, if the image names one.
    pub uid: Option<i64>,
    /// Name, if the image names one.
    pub username: &'a str,
}

/// What security contexts depend on in addition to the pod.
pub(super) struct SecurityInputs<'a> {
    pub(super) image_user: ImageUser<'a>,
    pub(super) settings: SecuritySettings<'a>,
    /// Groups of the pod's volumes.
    pub(super) volume_groups: &'a [i64],
    /// Container id whose processes an ephemeral container sees.
    pub(super) target_id: Option<&'a str>,
    pub(super) users: Option<UserNamespace>,
}

/// Namespaces of the pod.
pub(super) fn namespaces(pod: &Pod, users: Option<UserNamespace>) -> Namespaces {
    let node_if = |host: Option<bool>, other| if host == Some(true) { NamespaceMode::Node } else { other };
    let shared = pod.spec.share_process_namespace == Some(true);
    let pid = if shared { NamespaceMode::Pod } else { NamespaceMode::Container };
    Namespaces {
        network: node_if(pod.spec.host_network, NamespaceMode::Pod),
        ipc: node_if(pod.spec.host_ipc, NamespaceMode::Pod),
        pid: node_if(pod.spec.host_pid, pid),
        target_id: String::new(),
        users,
    }
}

fn is_privileged(container: &Container) -> bool {
    container.security_context.as_ref().is_some_and(|context| context.privileged == Some(true))
}

/// The supplemental groups of a sandbox or container, and whether the runtime adds none from the image. A group of a volume is added once,
/// and only if the pod does not have it anyway (volumes.md §3.4 step 8).
fn groups(pod: &Pod, volume_groups: &[i64], volumes_before_own: bool) -> (Vec<i64>, bool) {
    let context = pod.spec.security_context.as_ref();
    let mut groups: Vec<i64> = context.and_then(|context| context.fs_group).into_iter().collect();
    let own = context.map(|context| context.supplemental_groups.as_slice()).unwrap_or_default();
    if !volumes_before_own {
        groups.extend_from_slice(own);
    }
    for group in volume_groups {
        if !groups.contains(group) && !own.contains(group) {
            groups.push(*group);
        }
    }
    if volumes_before_own {
        groups.extend_from_slice(own);
    }
    let strict = context.and_then(|context| context.supplemental_groups_policy.as_deref()) == Some("Strict");
    (groups, strict)
}

/// The sandbox's security context.
pub(super) fn of_sandbox(pod: &Pod, volume_groups: &[i64], users: Option<UserNamespace>) -> SandboxSecurity {
    let context = pod.spec.security_context.as_ref();
    let (supplemental_groups, strict_groups) = groups(pod, volume_groups, true);
    let run_as_user = context.and_then(|context| context.run_as_user);
    SandboxSecurity {
        namespaces: namespaces(pod, users),
        privileged: pod.spec.init_containers.iter().chain(&pod.spec.containers).any(is_privileged),
        run_as_user,
        run_as_group: run_as_user.and(context.and_then(|context| context.run_as_group)),
        supplemental_groups,
        strict_groups,
        selinux: context.and_then(|context| context.se_linux_options.clone()),
    }
}

/// A container's security context.
pub(super) fn of_container(
    pod: &Pod,
    container: &Container,
    inputs: &SecurityInputs<'_>,
) -> Result<ContainerSecurity, ConfigError> {
    refuse_unsafe(pod)?;
    let own = container.security_context.clone().unwrap_or_default();
    let pods = pod.spec.security_context.as_ref();
    let asked_user = own.run_as_user.or_else(|| pods.and_then(|pods| pods.run_as_user));
    let non_root = own.run_as_non_root.or_else(|| pods.and_then(|pods| pods.run_as_non_root));
    if non_root == Some(true) {
        verify_non_root(pod, container, asked_user, inputs.image_user)?;
    }
    let image = inputs.image_user;
    let named = asked_user.is_none() && image.uid.is_none() && !image.username.is_empty();
    let run_as_user = asked_user.or(image.uid).or((!named).then_some(0));
    let (supplemental_groups, strict_groups) = groups(pod, inputs.volume_groups, false);
    let unmasked = own.proc_mount.as_deref() == Some("Unmasked");
    let mut namespaces = namespaces(pod, inputs.users);
    if let Some(target) = inputs.target_id.filter(|_| namespaces.pid == NamespaceMode::Container) {
        namespaces.pid = NamespaceMode::Target;
        target.clone_into(&mut namespaces.target_id);
    }
    let capabilities = own.capabilities.clone().unwrap_or_default();
    Ok(ContainerSecurity {
        capabilities_add: capabilities.add,
        capabilities_drop: capabilities.drop,
        privileged: own.privileged == Some(true),
        namespaces,
        selinux: selinux(own.se_linux_options.as_ref(), pods.and_then(|pods| pods.se_linux_options.as_ref())),
        run_as_user,
        run_as_username: if named { image.username.to_owned() } else { String::new() },
        run_as_group: own.run_as_group.or_else(|| pods.and_then(|pods| pods.run_as_group)),
        readonly_rootfs: own.read_only_root_filesystem == Some(true),
        supplemental_groups,
        strict_groups,
        no_new_privs: own.allow_privilege_escalation == Some(false),
        masked_paths: if unmasked { Vec::new() } else { masked(inputs.settings.masked_paths) },
        readonly_paths: if unmasked { Vec::new() } else { READONLY_PATHS.map(str::to_owned).to_vec() },
        seccomp: seccomp(&own, pod, inputs)?,
        apparmor: apparmor(&own, pod, container)?,
    })
}

/// Refuses unknown values, even if admission has accepted them: none of the choices below falls back to the weaker one.
///
/// # Errors
/// [`ConfigError::Unsafe`], with the first field.
pub(super) fn refuse_unsafe(pod: &Pod) -> Result<(), ConfigError> {
    match unsafe_fields(pod).into_iter().next() {
        Some(FieldError { field, message }) => Err(ConfigError::Unsafe { field, message }),
        None => Ok(()),
    }
}

fn masked(further: &[String]) -> Vec<String> {
    MASKED_PATHS.iter().map(|path| (*path).to_owned()).chain(further.iter().cloned()).collect()
}

fn verify_non_root(
    pod: &Pod,
    container: &Container,
    asked: Option<i64>,
    image: ImageUser<'_>,
) -> Result<(), ConfigError> {
    let detail = match (asked, image.uid) {
        (Some(0), _) => "container's runAsUser breaks non-root policy".to_owned(),
        (Some(_), _) => return Ok(()),
        (None, Some(0)) => "container has runAsNonRoot and image will run as root".to_owned(),
        (None, Some(_)) => return Ok(()),
        (None, None) if image.username.is_empty() => {
            "container has runAsNonRoot and image will run as root".to_owned()
        }
        (None, None) => format!(
            "container has runAsNonRoot and image has non-numeric user ({}), cannot verify user is non-root",
            image.username
        ),
    };
    Err(ConfigError::NonRoot { detail, pod: pod_text(pod), container: container.name.clone() })
}

fn selinux(own: Option<&SeLinuxOptions>, pods: Option<&SeLinuxOptions>) -> Option<SeLinuxOptions> {
    own.or(pods).cloned()
}

fn seccomp(
    own: &SecurityContext,
    pod: &Pod,
    inputs: &SecurityInputs<'_>,
) -> Result<SecurityProfile, ConfigError> {
    let pods = pod.spec.security_context.as_ref().and_then(|context| context.seccomp_profile.as_ref());
    let profile: Option<&SeccompProfile> = own.seccomp_profile.as_ref().or(pods);
    match profile.map(|profile| (profile.type_.as_str(), profile.localhost_profile.as_deref())) {
        Some(("Localhost", Some(name))) => {
            let folder = inputs.settings.seccomp_dir.trim_end_matches('/');
            Ok(SecurityProfile::Localhost(format!("{folder}/{name}")))
        }
        Some(("RuntimeDefault", _)) => Ok(SecurityProfile::RuntimeDefault),
        Some(("Unconfined", _)) => Ok(SecurityProfile::Unconfined),
        Some((other, _)) => Err(unknown_profile("seccompProfile", other)),
        None if inputs.settings.seccomp_default => Ok(SecurityProfile::RuntimeDefault),
        None => Ok(SecurityProfile::Unconfined),
    }
}

/// The error for a profile of an unknown kind, or without its file.
fn unknown_profile(field: &str, kind: &str) -> ConfigError {
    let message = format!("a profile of type {kind:?} is not known, or lacks its localhostProfile");
    ConfigError::Unsafe { field: format!("securityContext.{field}"), message }
}

fn apparmor(
    own: &SecurityContext,
    pod: &Pod,
    container: &Container,
) -> Result<Option<SecurityProfile>, ConfigError> {
    let of_field = |profile: &AppArmorProfile| match (profile.type_.as_str(), &profile.localhost_profile) {
        ("RuntimeDefault", _) => Ok(SecurityProfile::RuntimeDefault),
        ("Unconfined", _) => Ok(SecurityProfile::Unconfined),
        ("Localhost", Some(name)) => Ok(SecurityProfile::Localhost(name.clone())),
        (other, _) => Err(unknown_profile("appArmorProfile", other)),
    };
    let of_text = |text: &str| match (text, text.strip_prefix("localhost/")) {
        ("runtime/default", _) => Ok(SecurityProfile::RuntimeDefault),
        ("unconfined", _) => Ok(SecurityProfile::Unconfined),
        (_, Some(name)) => Ok(SecurityProfile::Localhost(name.to_owned())),
        (other, None) => Err(unknown_profile("appArmorProfile", other)),
    };
    let annotation = pod.annotation(&format!("{APPARMOR_ANNOTATION}{}", container.name));
    let pods = pod.spec.security_context.as_ref().and_then(|context| context.app_armor_profile.as_ref());
    match (&own.app_armor_profile, annotation.filter(|text| !text.is_empty()), pods) {
        (Some(profile), _, _) => of_field(profile).map(Some),
        (None, Some(text), _) => of_text(text).map(Some),
        (None, None, Some(profile)) => of_field(profile).map(Some),
        (None, None, None) => Ok(None),
    }
}

#[cfg(test)]
mod tests;
