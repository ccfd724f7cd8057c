//! Grace periods of containers, and the order in which they are stopped (§6.2, §9.11).

use keelson_kube_model::{Container, ContainerId, Pod};

use crate::observation::PodObservation;
use crate::reason::Reason;
use crate::restart::ContainerKind;

/// Grace period in seconds of a container without one in the spec.
pub const UNSPECIFIED_GRACE_SECONDS: i64 = 2;
/// Grace period in seconds of an orphan whose records have none.
pub const ORPHAN_GRACE_SECONDS: i64 = 1;
/// The shortest timeout that upstream passes to StopContainer, in seconds; used for every grace period but zero.
pub const MIN_STOP_TIMEOUT_SECONDS: i64 = 2;

/// The timeout for StopContainer, in seconds: the rest of the granted grace period, but at least 2 s, even if a preStop hook
/// or the wait for other containers has used it up (§9.11, step 6).
///
/// Parity: upstream never passes less than 2 s. Here a grace period of zero kills the process at once.
pub fn stop_timeout_seconds(granted_seconds: i64, left_seconds: i64) -> i64 {
    if granted_seconds <= 0 { 0 } else { left_seconds.max(MIN_STOP_TIMEOUT_SECONDS) }
}

/// Grace period in seconds of one container that is stopped while its pod continues: that of the deletion, else that of the
/// failed probe, else that of the spec, else 2.
pub fn container_grace_seconds(pod: &Pod, container: Option<&Container>, reason: Reason) -> i64 {
    if let Some(seconds) = pod.metadata.deletion_grace_period_seconds {
        return seconds;
    }
    let probe = container.and_then(|container| match reason {
        Reason::LivenessProbeFailed => container.liveness_probe.as_deref(),
        Reason::StartupProbeFailed => container.startup_probe.as_deref(),
        _ => None,
    });
    match pod.spec.termination_grace_period_seconds {
        Some(seconds) => probe.and_then(|probe| probe.termination_grace_period_seconds).unwrap_or(seconds),
        None => UNSPECIFIED_GRACE_SECONDS,
    }
}

/// One container to stop when the whole pod terminates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopStep {
    /// The running instance.
    pub id: ContainerId,
    /// Its name in the spec, or its name in the runtime.
    pub name: String,
    /// Its kind, if the spec has the name.
    pub kind: Option<ContainerKind>,
    /// SIGTERM waits until these containers have stopped or the grace period ends. preStop does not wait.
    pub after: Vec<String>,
}

/// The order in which the running containers of a pod are stopped: all at once, except that sidecars wait for the regular
/// containers and then stop in reverse order of the spec.
pub fn stop_plan(pod: Option<&Pod>, observed: &PodObservation) -> Vec<StopStep> {
    let kind_of = |name: &str| pod.and_then(|pod| pod.container(name)).map(|(kind, _)| kind);
    let place = |name: &str| {
        pod.and_then(|pod| pod.spec.init_containers.iter().position(|container| container.name == name))
    };
    let running: Vec<_> = observed.containers.iter().filter(|record| record.may_run()).collect();
    let steps = running.iter().map(|record| {
        let kind = kind_of(&record.name);
        let mut after: Vec<String> = Vec::new();
        if kind == Some(ContainerKind::Sidecar) {
            for other in running.iter().filter(|other| other.name != record.name) {
                let waits = match kind_of(&other.name) {
                    Some(ContainerKind::Sidecar) => place(&other.name) > place(&record.name),
                    Some(ContainerKind::Regular) => true,
                    Some(ContainerKind::Init | ContainerKind::Ephemeral) | None => false,
                };
                if waits && !after.contains(&other.name) {
                    after.push(other.name.clone());
                }
            }
        }
        StopStep { id: record.id.clone(), name: record.name.clone(), kind, after }
    });
    steps.collect()
}

/// The grace period in seconds of an orphan: that of its records (the annotation
/// `io.kubernetes.pod.terminationGracePeriod`), else 1.
///
/// Parity: upstream always uses 1 s; with the annotations an orphan gets the grace period of its spec.
pub fn orphan_grace_seconds(observed: &PodObservation) -> i64 {
    observed
        .containers
        .iter()
        .filter_map(|container| container.termination_grace_seconds)
        .max()
        .unwrap_or(ORPHAN_GRACE_SECONDS)
        .max(0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::{in_sandbox, pod};

    #[test]
    fn a_grace_period_of_zero_kills_at_once_and_others_are_at_least_two_seconds() {
        for (grace, timeout) in [(-1, 0), (0, 0), (1, 2), (2, 2), (30, 30)] {
            assert_eq!(stop_timeout_seconds(grace, grace), timeout);
        }
        assert_eq!(stop_timeout_seconds(0, 5), 0, "no grace period was granted");
    }

    #[test]
    fn an_exhausted_grace_period_leaves_two_seconds() {
        for (left, timeout) in [(-3, 2), (0, 2), (1, 2), (7, 7)] {
            assert_eq!(stop_timeout_seconds(30, left), timeout);
        }
    }

    #[test]
    fn container_grace_period_is_that_of_deletion_then_probe_then_spec() {
        let probe = json!({"terminationGracePeriodSeconds": 7});
        let mut pod = pod(json!({"terminationGracePeriodSeconds": 30,
            "containers": [{"name": "a", "livenessProbe": probe, "startupProbe": {}}]}));
        let grace = |pod: &Pod, reason| container_grace_seconds(pod, pod.spec.containers.first(), reason);
        assert_eq!(grace(&pod, Reason::ContainerDefinitionChanged), 30);
        assert_eq!(grace(&pod, Reason::LivenessProbeFailed), 7);
        assert_eq!(grace(&pod, Reason::StartupProbeFailed), 30);
        pod.spec.termination_grace_period_seconds = None;
        assert_eq!(grace(&pod, Reason::LivenessProbeFailed), UNSPECIFIED_GRACE_SECONDS);
        pod.metadata.deletion_grace_period_seconds = Some(3);
        assert_eq!(grace(&pod, Reason::LivenessProbeFailed), 3);
    }

    #[test]
    fn sidecars_stop_after_regular_containers_in_reverse_order() {
        let sidecar = |name: &str| json!({"name": name, "restartPolicy": "Always"});
        let pod = pod(json!({"initContainers": [sidecar("s0"), {"name": "i"}, sidecar("s2")],
            "containers": [{"name": "a"}, {"name": "b"}]}));
        let seen = in_sandbox().running("s0").exited("i", 0).running("s2").running("a").exited("b", 0);
        let mut steps: Vec<(String, Vec<String>)> =
            stop_plan(Some(&pod), &seen.0).into_iter().map(|step| (step.name, step.after)).collect();
        steps.sort();
        let texts = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        assert_eq!(
            steps,
            [("a".into(), texts(&[])), ("s0".into(), texts(&["a", "s2"])), ("s2".into(), texts(&["a"]))]
        );
    }

    #[test]
    fn without_a_spec_all_containers_stop_at_once() {
        let steps = stop_plan(None, &in_sandbox().running("s0").unknown("a").created("b").0);
        assert_eq!(steps.len(), 2);
        assert!(steps.iter().all(|step| step.after.is_empty() && step.kind.is_none()));
    }

    #[test]
    fn an_orphan_has_the_grace_period_of_its_records() {
        assert_eq!(orphan_grace_seconds(&in_sandbox().running("a").0), 1);
        let seen = in_sandbox().running("a").edit(|record| record.termination_grace_seconds = Some(0));
        assert_eq!(orphan_grace_seconds(&seen.0), 0);
        let more = seen.running("b").edit(|record| record.termination_grace_seconds = Some(12));
        assert_eq!(orphan_grace_seconds(&more.0), 12);
    }

    #[test]
    fn container_grace_period_is_that_of_the_failed_probe() {
        let pod = pod(json!({"terminationGracePeriodSeconds": 30, "containers": [{
            "name": "a",
            "livenessProbe": {"terminationGracePeriodSeconds": 5},
            "startupProbe": {"terminationGracePeriodSeconds": 7}
        }]}));
        let grace = |reason| container_grace_seconds(&pod, Some(&pod.spec.containers[0]), reason);
        assert_eq!(grace(Reason::LivenessProbeFailed), 5);
        assert_eq!(grace(Reason::StartupProbeFailed), 7);
        assert_eq!(grace(Reason::PodRemoved), 30);
    }
}
