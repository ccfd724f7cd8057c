//! The statuses of sandboxes and containers.

use std::net::IpAddr;
use std::path::PathBuf;

use k8s_cri::v1 as cri;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::termination_message::falls_back_to_log;
use tonic::Status;

use super::list::{ContainerEntry, SandboxEntry};
use super::{labels, response_checks};

/// A container's status.
#[derive(Debug, Clone, PartialEq)]
pub struct ContainerStatus {
    /// The published message; its `termination_message` has not been read yet and is empty.
    pub container: pb::Container,
    /// Where the termination message is.
    pub termination: TerminationMessageSource,
}

/// Where the termination message of a container is on the host (pod-lifecycle.md §11).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TerminationMessageSource {
    /// The termination file; `None` if none is mounted.
    pub file: Option<PathBuf>,
    /// The log whose end replaces an empty message; `None` if none does.
    pub fallback_log: Option<PathBuf>,
}

impl TerminationMessageSource {
    pub(crate) fn of(status: &cri::ContainerStatus) -> Self {
        let annotation = |key: &str| status.annotations.get(key).map_or("", String::as_str);
        let path = annotation(labels::MESSAGE_PATH);
        let mount = status.mounts.iter().find(|m| !path.is_empty() && m.container_path == path);
        let falls_back =
            falls_back_to_log(annotation(labels::MESSAGE_POLICY), status.exit_code, &status.reason);
        Self {
            file: mount.map(|mount| PathBuf::from(&mount.host_path)),
            fallback_log: falls_back.then(|| PathBuf::from(&status.log_path)),
        }
    }
}

impl ContainerStatus {
    /// Translates the status of a listed container.
    ///
    /// # Errors
    /// INTERNAL, with the names of the mandatory fields that are missing.
    pub fn parse(listed: &ContainerEntry, status: cri::ContainerStatus) -> Result<Self, Status> {
        response_checks::check_container(&listed.id, &status)?;
        let termination = TerminationMessageSource::of(&status);
        Ok(Self { container: container_message(status, listed.sandbox_id.clone()), termination })
    }
}

/// Translates the status of a listed sandbox.
///
/// # Errors
/// INTERNAL, with the names of the mandatory fields that are missing.
pub(crate) fn parse_sandbox(
    listed: &SandboxEntry,
    status: cri::PodSandboxStatus,
) -> Result<pb::Sandbox, Status> {
    response_checks::check_sandbox(&listed.id, &status)?;
    Ok(sandbox_message(status, listed.ready))
}

/// The state of a container from its number in CRI.
pub(crate) fn container_state(state: i32) -> pb::ContainerState {
    match cri::ContainerState::try_from(state) {
        Ok(cri::ContainerState::ContainerCreated) => pb::ContainerState::Created,
        Ok(cri::ContainerState::ContainerRunning) => pb::ContainerState::Running,
        Ok(cri::ContainerState::ContainerExited) => pb::ContainerState::Exited,
        Ok(cri::ContainerState::ContainerUnknown) | Err(_) => pb::ContainerState::Unknown,
    }
}

fn sandbox_message(status: cri::PodSandboxStatus, ready: bool) -> pb::Sandbox {
    let options = status.linux.as_ref().and_then(|l| l.namespaces.as_ref()).and_then(|n| n.options.as_ref());
    let host_network = options.is_some_and(|o| o.network == cri::NamespaceMode::Node as i32);
    let ips = status.network.map(|n| {
        std::iter::once(n.ip)
            .chain(n.additional_ips.into_iter().map(|i| i.ip))
            .filter(|ip| ip.parse::<IpAddr>().is_ok())
            .collect()
    });
    pb::Sandbox {
        id: status.id,
        attempt: status.metadata.map_or(0, |m| m.attempt),
        ready,
        created_unix_nanos: status.created_at,
        ips: ips.unwrap_or_default(),
        host_network,
        pid: 0,
    }
}

fn container_message(status: cri::ContainerStatus, sandbox_id: String) -> pb::Container {
    let annotation = |key: &str| status.annotations.get(key).cloned();
    pb::Container {
        name: status.labels.get(labels::CONTAINER).cloned().unwrap_or_default(),
        sandbox_id,
        attempt: status.metadata.as_ref().map_or(0, |m| m.attempt),
        state: container_state(status.state) as i32,
        created_unix_nanos: status.created_at,
        started_unix_nanos: status.started_at,
        finished_unix_nanos: status.finished_at,
        exit_code: status.exit_code,
        hash: annotation(labels::HASH).unwrap_or_default(),
        restart_count: annotation(labels::RESTART_COUNT).and_then(|v| v.parse().ok()).unwrap_or(0),
        termination_grace_seconds: annotation(labels::GRACE).and_then(|v| v.parse().ok()),
        termination_message: String::new(),
        user: status.user.and_then(|user| user.linux).map(|user| pb::ContainerUser {
            uid: user.uid,
            gid: user.gid,
            supplemental_groups: user.supplemental_groups,
        }),
        resources: status.resources.and_then(|resources| resources.linux).map(resources_message),
        id: status.id,
        reason: status.reason,
        message: status.message,
        image: status.image.map(|i| i.image).unwrap_or_default(),
        image_ref: status.image_ref,
        log_path: status.log_path,
    }
}

/// The resources of a container. containerd reports an unlimited quota as a negative number.
fn resources_message(linux: cri::LinuxContainerResources) -> pb::ContainerResources {
    pb::ContainerResources {
        cpu_shares: u64::try_from(linux.cpu_shares).unwrap_or(0),
        cpu_quota_us: linux.cpu_quota.max(0),
        cpu_period_us: linux.cpu_period.max(0),
        memory_limit_bytes: linux.memory_limit_in_bytes.max(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_resources_are_shown_if_the_runtime_reports_them() {
        let resources_of = |linux: Option<cri::LinuxContainerResources>| {
            let resources = Some(cri::ContainerResources { linux, windows: None });
            let status = cri::ContainerStatus { resources, ..Default::default() };
            container_message(status, "s".into()).resources
        };
        let linux = cri::LinuxContainerResources {
            cpu_shares: 512,
            cpu_quota: -1,
            cpu_period: 100_000,
            memory_limit_in_bytes: 1 << 20,
            ..Default::default()
        };
        let shown = pb::ContainerResources {
            cpu_shares: 512,
            cpu_quota_us: 0,
            cpu_period_us: 100_000,
            memory_limit_bytes: 1 << 20,
        };
        assert_eq!(resources_of(Some(linux)), Some(shown));
        assert_eq!(resources_of(None), None);
    }

    #[test]
    fn container_user_is_shown_if_the_runtime_reports_it() {
        let user_of = |user: Option<cri::ContainerUser>| {
            let status = cri::ContainerStatus { user, ..Default::default() };
            container_message(status, "s".into()).user
        };
        let linux = cri::LinuxContainerUser { uid: 1000, gid: 3000, supplemental_groups: vec![3000, 4000] };
        let shown = pb::ContainerUser { uid: 1000, gid: 3000, supplemental_groups: vec![3000, 4000] };
        assert_eq!(user_of(Some(cri::ContainerUser { linux: Some(linux) })), Some(shown));
        let root = cri::ContainerUser { linux: Some(cri::LinuxContainerUser::default()) };
        assert_eq!(user_of(Some(root)), Some(pb::ContainerUser::default()));
        assert_eq!(user_of(Some(cri::ContainerUser { linux: None })), None);
        assert_eq!(user_of(None), None);
    }

    #[test]
    fn container_annotations_are_read_and_invalid_numbers_ignored() {
        let annotations = |pairs: &[(&str, &str)]| {
            let annotations = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
            let status = cri::ContainerStatus { annotations: annotations.collect(), ..Default::default() };
            let container = container_message(status, "s".into());
            (container.hash, container.restart_count, container.termination_grace_seconds)
        };
        let all = [(labels::HASH, "abc"), (labels::RESTART_COUNT, "3"), (labels::GRACE, "30")];
        assert_eq!(annotations(&all), ("abc".to_owned(), 3, Some(30)));
        let invalid = [(labels::RESTART_COUNT, "many"), (labels::GRACE, "")];
        assert_eq!(annotations(&invalid), (String::new(), 0, None));
    }

    #[test]
    fn sandbox_addresses_that_are_no_ip_addresses_are_left_out() {
        let network = cri::PodSandboxNetworkStatus {
            ip: "10.0.0.2".into(),
            additional_ips: ["", "fd00::2"].map(|ip| cri::PodIp { ip: ip.into() }).into(),
        };
        let status = cri::PodSandboxStatus { network: Some(network), ..Default::default() };
        assert_eq!(sandbox_message(status, true).ips, ["10.0.0.2", "fd00::2"]);
    }

    #[test]
    fn termination_message_is_in_the_mounted_file_or_in_the_log() {
        let status = |policy: &str| cri::ContainerStatus {
            annotations: [(labels::MESSAGE_PATH, "/dev/termination-log"), (labels::MESSAGE_POLICY, policy)]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
            mounts: vec![cri::Mount {
                container_path: "/dev/termination-log".into(),
                host_path: "/root/message".into(),
                ..Default::default()
            }],
            exit_code: 1,
            log_path: "/logs/0.log".into(),
            ..Default::default()
        };
        let file = Some(PathBuf::from("/root/message"));
        let from_file = TerminationMessageSource { file: file.clone(), fallback_log: None };
        assert_eq!(TerminationMessageSource::of(&status("File")), from_file);
        let from_both = TerminationMessageSource { file, fallback_log: Some("/logs/0.log".into()) };
        assert_eq!(TerminationMessageSource::of(&status("FallbackToLogsOnError")), from_both);
        let unmounted = cri::ContainerStatus { mounts: Vec::new(), ..status("File") };
        assert_eq!(TerminationMessageSource::of(&unmounted), TerminationMessageSource::default());
    }
}
