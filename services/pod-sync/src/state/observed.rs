//! Observations of runtime-shim, as the core's types.

use std::sync::Arc;

use keelson_pod_sync_core::observation::{
    ContainerObservation, ContainerRecordState, PodObservation, ResourcesObservation, SandboxObservation,
    UserObservation,
};
use keelson_proto::keelson::runtime::v1 as pb;

/// A shared observation of one pod.
pub type Observed = Arc<PodObservation>;

/// Makes an observation of a message.
pub fn observation(pod: pb::RuntimePod) -> Observed {
    let mut observation = PodObservation {
        uid: pod.uid.into(),
        name: pod.name,
        namespace: pod.namespace,
        sandboxes: pod.sandboxes.into_iter().map(sandbox).collect(),
        containers: pod.containers.into_iter().map(container).collect(),
        // It only orders observations: see `is_older`.
        observed_boot_nanos: pod.observed_boot_nanos,
    };
    observation.sort();
    observation.shrink_to_fit();
    Arc::new(observation)
}

/// Whether the read of `a` began before that of `b`, by runtime-shim's monotonic clock: the wall clock may be set back, and every read would
/// count as older until it has caught up. 0 is what an older runtime-shim sends; then the order of arrival counts.
pub fn is_older(a: &PodObservation, b: &PodObservation) -> bool {
    a.observed_boot_nanos != 0 && a.observed_boot_nanos < b.observed_boot_nanos
}

/// Whether both show the same, regardless of when they were read.
pub fn same(a: &PodObservation, b: &PodObservation) -> bool {
    a.sandboxes == b.sandboxes && a.containers == b.containers
}

fn sandbox(sandbox: pb::Sandbox) -> SandboxObservation {
    SandboxObservation {
        id: sandbox.id.into(),
        attempt: sandbox.attempt,
        ready: sandbox.ready,
        created_unix_nanos: sandbox.created_unix_nanos,
        ips: sandbox.ips,
        host_network: sandbox.host_network,
    }
}

fn container(container: pb::Container) -> ContainerObservation {
    let state = match pb::ContainerState::try_from(container.state) {
        Ok(pb::ContainerState::Created) => ContainerRecordState::Created,
        Ok(pb::ContainerState::Running) => ContainerRecordState::Running,
        Ok(pb::ContainerState::Exited) => ContainerRecordState::Exited,
        Ok(pb::ContainerState::Unknown | pb::ContainerState::Unspecified) | Err(_) => {
            ContainerRecordState::Unknown
        }
    };
    ContainerObservation {
        id: container.id.into(),
        name: container.name,
        sandbox_id: container.sandbox_id.into(),
        attempt: container.attempt,
        state,
        created_unix_nanos: container.created_unix_nanos,
        started_unix_nanos: container.started_unix_nanos,
        finished_unix_nanos: container.finished_unix_nanos,
        exit_code: container.exit_code,
        reason: container.reason,
        message: container.message,
        image: container.image,
        image_ref: container.image_ref,
        hash: container.hash,
        restart_count: container.restart_count,
        termination_grace_seconds: container.termination_grace_seconds,
        log_path: container.log_path,
        termination_message: container.termination_message,
        user: container.user.map(|user| Box::new(self::user(user))),
        resources: container.resources.map(|resources| Box::new(self::resources(resources))),
    }
}

fn user(user: pb::ContainerUser) -> UserObservation {
    UserObservation { uid: user.uid, gid: user.gid, supplemental_groups: user.supplemental_groups }
}

fn resources(resources: pb::ContainerResources) -> ResourcesObservation {
    ResourcesObservation {
        cpu_shares: resources.cpu_shares,
        cpu_quota_us: resources.cpu_quota_us,
        cpu_period_us: resources.cpu_period_us,
        memory_limit_bytes: resources.memory_limit_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(unix_seconds: i64, boot_seconds: i64) -> Observed {
        observation(pb::RuntimePod {
            uid: "u".into(),
            observed_unix_nanos: unix_seconds * 1_000_000_000,
            observed_boot_nanos: boot_seconds * 1_000_000_000,
            ..Default::default()
        })
    }

    #[test]
    fn a_containers_user_is_observed_if_the_runtime_reports_it() {
        let observed_user = |user: Option<pb::ContainerUser>| {
            let container = pb::Container { user, ..Default::default() };
            let pod = pb::RuntimePod { containers: vec![container], ..Default::default() };
            observation(pod).containers[0].user.clone()
        };
        let seen = UserObservation { uid: 1000, gid: 3000, supplemental_groups: vec![3000, 4000] };
        let user = pb::ContainerUser { uid: 1000, gid: 3000, supplemental_groups: vec![3000, 4000] };
        assert_eq!(observed_user(Some(user)), Some(Box::new(seen)));
        assert_eq!(observed_user(None), None);
    }

    #[test]
    fn an_observation_has_no_spare_capacity() {
        let mut containers = Vec::with_capacity(4);
        containers.push(pb::Container::default());
        let observed = observation(pb::RuntimePod { containers, ..Default::default() });
        assert_eq!((observed.containers.len(), observed.containers.capacity()), (1, 1));
    }

    #[test]
    fn a_read_after_the_clock_was_set_back_is_newer() {
        let (before, after) = (read(10_000, 100), read(2_800, 101));
        assert!(!is_older(&after, &before));
        assert!(is_older(&before, &after));
    }

    #[test]
    fn reads_of_an_older_runtime_shim_are_ordered_too() {
        let (old, new) = (read(10_000, 0), read(10_001, 101));
        assert!(!is_older(&old, &new) && !is_older(&new, &old));
    }
}
