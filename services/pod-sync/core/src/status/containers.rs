//! Container statuses (§14.2): the runtime's records merged with the last status.

use std::collections::BTreeMap;

use keelson_kube_model::{
    Container, ContainerKind, ContainerState, ContainerStateRunning, ContainerStateTerminated,
    ContainerStateWaiting, ContainerStatus, ContainerUser, LinuxContainerUser, Pod, PodCondition, PodStatus,
    VolumeMountStatus,
};

use super::{StatusInputs, resources, shown_wait};
use crate::actions::{has_restart_all, is_restarting};
use crate::conditions::RESTARTING_ALL;
use crate::moment::{ended_time, status_time};
use crate::observation::{ContainerObservation, ContainerRecordState, PodObservation, UserObservation};
use crate::restart::{RESTARTING_REASON, should_restart};

/// Reason of a container whose termination was not observed.
pub const STATUS_UNKNOWN_REASON: &str = "ContainerStatusUnknown";
/// Exit code of a container whose termination was not observed.
const LOST_EXIT_CODE: i32 = 137;

struct Merge<'a> {
    pod: &'a Pod,
    observed: &'a PodObservation,
    inputs: &'a StatusInputs<'a>,
    old: BTreeMap<&'a str, &'a ContainerStatus>,
    /// All containers restart, or were just removed for that.
    restarting: bool,
    /// Some container has a rule for that.
    restarts_all: bool,
}

/// Fills the three lists of container statuses, without `ready` and `started`.
pub(super) fn fill(
    status: &mut PodStatus,
    pod: &Pod,
    observed: &PodObservation,
    old: &PodStatus,
    inputs: &StatusInputs<'_>,
) {
    let restarting =
        is_restarting(pod, observed) || old.condition(RESTARTING_ALL).is_some_and(PodCondition::is_true);
    let lists = [&old.init_container_statuses, &old.container_statuses, &old.ephemeral_container_statuses];
    let old = lists.into_iter().flatten().map(|status| (status.name.as_str(), status)).collect();
    let merge = Merge { pod, observed, inputs, old, restarting, restarts_all: has_restart_all(pod) };
    status.init_container_statuses = merge.list(&pod.spec.init_containers, ContainerKind::of_init);
    status.container_statuses = merge.list(&pod.spec.containers, |_| ContainerKind::Regular);
    status.ephemeral_container_statuses =
        merge.list(&pod.spec.ephemeral_containers, |_| ContainerKind::Ephemeral);
    status.container_statuses.sort_by(|a, b| a.name.cmp(&b.name));
    status.ephemeral_container_statuses.sort_by(|a, b| a.name.cmp(&b.name));
}

impl Merge<'_> {
    fn list(
        &self,
        containers: &[Container],
        kind: impl Fn(&Container) -> ContainerKind,
    ) -> Vec<ContainerStatus> {
        containers.iter().map(|container| self.one(kind(container), container)).collect()
    }

    fn one(&self, kind: ContainerKind, container: &Container) -> ContainerStatus {
        let old = self.old.get(container.name.as_str()).copied();
        let mut status = match old {
            Some(old) if old.state.terminated.is_some() => old.clone(),
            _ => ContainerStatus {
                name: container.name.clone(),
                image: container.image.clone(),
                state: self.default_waiting(),
                restart_count: old.map_or(0, |old| old.restart_count),
                last_state: old.map(|old| old.last_state.clone()).unwrap_or_default(),
                ..ContainerStatus::default()
            },
        };
        let mut records = self.observed.records(&container.name);
        match records.next() {
            None => self.without_record(kind, old, &mut status),
            Some(newest) => {
                status = self.converted(newest, old);
                // A record that never ran does not count.
                let ended = |state: &ContainerState| state.terminated.is_some();
                if let Some(state) = records.map(|record| self.converted(record, old).state).find(ended) {
                    status.last_state = state;
                }
            }
        }
        self.show_failed_start(kind, container, &mut status);
        status.volume_mounts = self.volume_mounts(container);
        status.allocated_resources.clone_from(&container.resources.requests);
        status.resources =
            resources::actual(container, self.observed.current(&container.name), self.inputs.resize);
        status
    }

    fn default_waiting(&self) -> ContainerState {
        let init = !self.pod.spec.init_containers.is_empty();
        waiting(if init { "PodInitializing" } else { "ContainerCreating" }, "")
    }

    /// The runtime has no record of the container.
    fn without_record(
        &self,
        kind: ContainerKind,
        old: Option<&ContainerStatus>,
        status: &mut ContainerStatus,
    ) {
        if let Some(old) = old.filter(|old| self.restarting && old.state.waiting.is_none()) {
            self.show_removed(old, status);
            return;
        }
        let still_default = status.state == self.default_waiting();
        let was_running = old.is_some_and(|old| old.state.running.is_some());
        if was_running && still_default && status.last_state.terminated.is_none() {
            status.last_state.terminated =
                Some(lost("The container was running before, and the runtime has no record of it any more"));
            if !self.pod.is_deleting() {
                status.restart_count += 1;
            }
        }
        let regular_seen = || {
            self.pod.spec.containers.iter().any(|container| self.observed.current(&container.name).is_some())
        };
        if kind == ContainerKind::Init && status.state.waiting.is_some() && regular_seen() {
            status.state = ContainerState {
                terminated: Some(ContainerStateTerminated {
                    reason: "Completed".to_owned(),
                    message: "Unable to get init container status from container runtime; it has completed, \
                              because the pod's containers have been started"
                        .to_owned(),
                    ..ContainerStateTerminated::default()
                }),
                ..ContainerState::default()
            };
        }
    }

    /// Shows a container whose record was removed because all containers restart.
    fn show_removed(&self, old: &ContainerStatus, status: &mut ContainerStatus) {
        let message = "All containers of the pod are restarting".to_owned();
        let ended = ContainerStateTerminated { reason: RESTARTING_REASON.to_owned(), ..lost(&message) };
        status.state = waiting(RESTARTING_REASON, "");
        status.last_state = ContainerState { terminated: Some(ended), ..ContainerState::default() };
        status.restart_count = old.restart_count + 1;
    }

    fn converted(&self, record: &ContainerObservation, old: Option<&ContainerStatus>) -> ContainerStatus {
        let container_id = format!("{}://{}", self.inputs.runtime_name, record.id);
        let mut restart_count = i32::try_from(record.restart_count).unwrap_or(i32::MAX);
        let mut state = ContainerState::default();
        match record.state {
            ContainerRecordState::Running => {
                let started_at = status_time(record.started_unix_nanos);
                state.running = Some(ContainerStateRunning { started_at });
            }
            ContainerRecordState::Created => state = waiting("", ""),
            ContainerRecordState::Exited => {
                state.terminated = Some(ContainerStateTerminated {
                    exit_code: record.exit_code,
                    reason: record.reason.clone(),
                    message: joined_message(record),
                    started_at: ended_time(record.started_unix_nanos),
                    finished_at: ended_time(record.finished_unix_nanos),
                    container_id: container_id.clone(),
                    ..ContainerStateTerminated::default()
                });
            }
            ContainerRecordState::Unknown => match old.filter(|old| old.state.running.is_some()) {
                Some(old) => {
                    state.terminated = Some(lost(
                        "The container was running before, and the runtime reports its state as unknown",
                    ));
                    restart_count = old.restart_count + 1;
                }
                None => state = waiting("", ""),
            },
        }
        if let Some(old) = old.filter(|_| self.restarts_all) {
            // The count comes from log files, which may have been rotated away.
            restart_count = restart_count.max(old.restart_count);
        }
        ContainerStatus {
            name: record.name.clone(),
            state,
            restart_count,
            image: record.image.clone(),
            image_id: record.image_ref.clone(),
            container_id,
            user: record.user.as_deref().map(user),
            ..ContainerStatus::default()
        }
    }

    /// Shows why a container that should run could not be started.
    fn show_failed_start(&self, kind: ContainerKind, container: &Container, status: &mut ContainerStatus) {
        let record = self.observed.current(&container.name);
        let is_init = matches!(kind, ContainerKind::Init | ContainerKind::Sidecar);
        if is_init && record.is_some_and(|record| record.has_exited() && record.exit_code == 0) {
            return;
        }
        let ephemeral_ran = kind == ContainerKind::Ephemeral && record.is_some();
        if ephemeral_ran || !should_restart(self.pod, container, self.observed) {
            return;
        }
        let backoff =
            self.inputs.waiting.iter().find(|wait| wait.name == container.name).and_then(shown_wait);
        let failed = self
            .inputs
            .start_errors
            .get(&container.name)
            .map(|(reason, message)| (reason.as_str(), message.as_str()));
        let Some((reason, message)) = backoff.or(failed) else { return };
        if status.state.terminated.is_some() {
            status.last_state = std::mem::take(&mut status.state);
        }
        status.state = waiting(reason, message);
    }

    fn volume_mounts(&self, container: &Container) -> Vec<VolumeMountStatus> {
        let one = |mount: &keelson_kube_model::VolumeMount| {
            let read_only = mount.read_only.filter(|read_only| *read_only);
            let recursive = match mount.recursive_read_only.as_deref() {
                Some("Enabled") => "Enabled",
                Some("IfPossible") if self.inputs.recursive_read_only => "Enabled",
                _ => "Disabled",
            };
            VolumeMountStatus {
                name: mount.name.clone(),
                mount_path: mount.mount_path.clone(),
                read_only,
                recursive_read_only: read_only.map(|_| recursive.to_owned()),
                volume_status: None,
            }
        };
        container.volume_mounts.iter().map(one).collect()
    }
}

fn waiting(reason: &str, message: &str) -> ContainerState {
    let waiting = ContainerStateWaiting { reason: reason.to_owned(), message: message.to_owned() };
    ContainerState { waiting: Some(waiting), ..ContainerState::default() }
}

fn user(seen: &UserObservation) -> ContainerUser {
    let groups = seen.supplemental_groups.clone();
    let linux = LinuxContainerUser { uid: seen.uid, gid: seen.gid, supplemental_groups: groups };
    ContainerUser { linux: Some(linux) }
}

fn lost(message: &str) -> ContainerStateTerminated {
    ContainerStateTerminated {
        exit_code: LOST_EXIT_CODE,
        reason: STATUS_UNKNOWN_REASON.to_owned(),
        message: message.to_owned(),
        ..ContainerStateTerminated::default()
    }
}

/// The runtime's message and the container's termination message, joined if both exist (§11).
fn joined_message(record: &ContainerObservation) -> String {
    match (record.message.as_str(), record.termination_message.as_str()) {
        ("", own) => own.to_owned(),
        (runtimes, "") => runtimes.to_owned(),
        (runtimes, own) => format!("{runtimes}: {own}"),
    }
}

/// Fills `ready` and `started` (§13.4): only running containers are started or ready, except that a regular init container
/// that exited with 0 is ready.
pub(super) fn fill_readiness(status: &mut PodStatus, pod: &Pod, inputs: &StatusInputs<'_>) {
    let sets = |entry: &mut ContainerStatus, counts: bool| {
        let probes = inputs.readiness.get(&entry.name).copied().unwrap_or_default();
        let running = entry.state.running.is_some();
        entry.started = Some(running && probes.started);
        entry.ready = counts && running && probes.started && probes.ready;
    };
    for entry in &mut status.init_container_statuses {
        let sidecar =
            pod.spec.init_containers.iter().any(|c| c.name == entry.name && c.is_restartable_init());
        sets(entry, sidecar);
        if !sidecar {
            entry.ready = entry.state.terminated.as_ref().is_some_and(|ended| ended.exit_code == 0);
        }
    }
    for entry in &mut status.container_statuses {
        sets(entry, true);
    }
    for entry in &mut status.ephemeral_container_statuses {
        entry.ready = false;
        entry.started = None;
    }
}

/// Declares containers lost that are not known to have terminated: regular ones if the pod was ever initialised, and init
/// containers up to the last one that ever left Waiting, at least the first.
pub fn finalise_containers(status: &mut PodStatus) {
    let left_waiting =
        |entry: &ContainerStatus| entry.state.waiting.is_none() || entry.last_state.terminated.is_some();
    let regular_ran = status.container_statuses.iter().any(left_waiting);
    let inits_done =
        status.init_container_statuses.iter().all(|entry| entry.ready || entry.started == Some(true));
    let initialised =
        regular_ran || inits_done || status.condition("Initialized").is_some_and(|c| c.is_true());
    let last_init = status.init_container_statuses.iter().rposition(left_waiting).unwrap_or(0);
    for (index, entry) in status.init_container_statuses.iter_mut().enumerate() {
        if index <= last_init {
            declare_lost(entry);
        }
    }
    if initialised {
        status.container_statuses.iter_mut().for_each(declare_lost);
    }
}

fn declare_lost(entry: &mut ContainerStatus) {
    if entry.state.terminated.is_none() {
        entry.state = ContainerState {
            terminated: Some(lost("The pod has ended, and the end of this container was not seen")),
            ..ContainerState::default()
        };
        entry.ready = false;
        entry.started = Some(false);
    }
}
