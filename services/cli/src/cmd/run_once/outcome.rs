//! The progress of a pod of `keelson run --once`, and its result.

use keelson_kube_model::{ContainerKind, ContainerStatus, Pod, PodPhase, RestartPolicy};
use serde::Serialize;

/// The beginning of the message of a pod that the node has rejected (pod-lifecycle.md §15.3).
const REJECTED: &str = "Pod was rejected: ";
/// Waiting reasons of a container that is not due to start yet.
const NOT_DUE: [&str; 3] = ["", "ContainerCreating", "PodInitializing"];

/// The progress of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PodProgress {
    /// No container runs: the pod waits for something, or it is between two attempts.
    Idle,
    /// A container runs.
    Working,
    /// The pod does not end by itself, and every regular container is ready or has succeeded.
    Up,
    /// The pod has ended, or a container that is always restarted has failed.
    Over,
}

/// The result of a pod or a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum Outcome {
    /// Every container has succeeded.
    Succeeded,
    /// The pod does not end by itself, and was running when it was stopped.
    Running,
    /// The pod has failed, or has not started in time.
    Failed,
    /// The node rejected the pod.
    Rejected,
    /// pod-config refused the manifest.
    Refused,
    /// The command was interrupted before the pod ended.
    Interrupted,
}

impl Outcome {
    /// Whether the command fails because of this outcome.
    pub(super) fn is_failure(self) -> bool {
        !matches!(self, Self::Succeeded | Self::Running)
    }
}

/// A row of the output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    pub(super) namespace: String,
    /// The pod, or the file of a refused manifest.
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) result: Outcome,
    /// `status.phase` when the result was determined.
    pub(super) phase: String,
    pub(super) reason: String,
    pub(super) message: String,
    pub(super) failed_containers: Vec<String>,
}

/// Why the wait for a pod ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitEnd {
    /// The pod has settled.
    Settled,
    /// The pod has not started within this many seconds.
    TimedOut(u64),
    /// The command was interrupted.
    Interrupted,
}

/// Whether a pod ends by itself: none of its regular containers is always restarted.
pub(super) fn ends(pod: &Pod) -> bool {
    pod.spec
        .containers
        .iter()
        .all(|container| pod.restart_policy_of(ContainerKind::Regular, container) != RestartPolicy::Always)
}

/// The progress of a pod according to its status.
pub(super) fn progress(pod: &Pod) -> PodProgress {
    if matches!(pod.status.phase(), PodPhase::Succeeded | PodPhase::Failed) {
        return PodProgress::Over;
    }
    let regular = || pod.spec.containers.iter().map(|container| status_of(pod, &container.name));
    if !ends(pod) {
        if regular().flatten().any(|status| last_exit(status).is_some_and(|code| code != 0)) {
            return PodProgress::Over;
        }
        let is_up = |status: Option<&ContainerStatus>| {
            status.is_some_and(|s| (s.state.running.is_some() && s.ready) || last_exit(s) == Some(0))
        };
        if regular().all(is_up) {
            return PodProgress::Up;
        }
    }
    let statuses = pod.status.init_container_statuses.iter().chain(&pod.status.container_statuses);
    if statuses.into_iter().any(|status| status.state.running.is_some()) {
        return PodProgress::Working;
    }
    // A running pod without a running container is between two attempts.
    if pod.status.phase() == PodPhase::Running { PodProgress::Working } else { PodProgress::Idle }
}

/// The report of a pod.
pub(super) fn report(pod: &Pod, ending: WaitEnd) -> Report {
    let status = &pod.status;
    let rejected = status.phase() == PodPhase::Failed && status.message.starts_with(REJECTED);
    let failed_containers = if rejected { Vec::new() } else { failed_containers(pod) };
    let (mut reason, mut message) = (status.reason.clone(), status.message.clone());
    let result = match (status.phase(), progress(pod)) {
        _ if rejected => Outcome::Rejected,
        (PodPhase::Succeeded, _) => Outcome::Succeeded,
        (PodPhase::Failed, _) | (_, PodProgress::Over) => Outcome::Failed,
        (_, PodProgress::Up) if failed_containers.is_empty() => Outcome::Running,
        _ => match ending {
            WaitEnd::Interrupted => Outcome::Interrupted,
            WaitEnd::TimedOut(seconds) => {
                reason = "NotStarted".to_owned();
                message = format!("the pod has not started within {seconds} s");
                Outcome::Failed
            }
            // The pod was up when it settled and no longer is.
            WaitEnd::Settled => Outcome::Failed,
        },
    };
    if message.is_empty() && result.is_failure() {
        message = first_error(pod);
    }
    Report {
        namespace: pod.metadata.namespace.clone(),
        name: pod.metadata.name.clone(),
        uid: pod.metadata.uid.clone(),
        result,
        phase: status.phase.clone(),
        reason,
        message,
        failed_containers,
    }
}

fn status_of<'a>(pod: &'a Pod, name: &str) -> Option<&'a ContainerStatus> {
    let lists = [&pod.status.init_container_statuses, &pod.status.container_statuses];
    lists.into_iter().flatten().find(|status| status.name == name)
}

/// The exit code of the last run.
fn last_exit(status: &ContainerStatus) -> Option<i32> {
    let ended = status.state.terminated.as_ref().or(status.last_state.terminated.as_ref());
    ended.map(|ended| ended.exit_code)
}

/// Init and regular containers whose last run failed, or that could not be started, in the order of the spec.
/// Sidecars do not count, because they are ended with their pod.
fn failed_containers(pod: &Pod) -> Vec<String> {
    let counts = |kind| matches!(kind, ContainerKind::Init | ContainerKind::Regular);
    let names = pod.containers().filter(|(kind, _)| counts(*kind)).map(|(_, container)| &container.name);
    let failed = |name: &&String| {
        status_of(pod, name).is_some_and(|status| {
            let is_waiting =
                status.state.waiting.as_ref().is_some_and(|w| !NOT_DUE.contains(&w.reason.as_str()));
            let restarts = is_waiting && last_exit(status) == Some(0);
            last_exit(status).is_some_and(|code| code != 0) || (is_waiting && !restarts)
        })
    };
    names.filter(failed).cloned().collect()
}

/// The error of the first container that waits or has failed.
fn first_error(pod: &Pod) -> String {
    let statuses = pod.status.init_container_statuses.iter().chain(&pod.status.container_statuses);
    let text = |status: &ContainerStatus| {
        let name = &status.name;
        if let Some(waiting) = status.state.waiting.as_ref().filter(|w| !NOT_DUE.contains(&w.reason.as_str()))
        {
            return Some(format!("{name}: {} {}", waiting.reason, waiting.message).trim_end().to_owned());
        }
        let ended = status.state.terminated.as_ref().or(status.last_state.terminated.as_ref());
        let ended = ended.filter(|ended| ended.exit_code != 0)?;
        Some(format!("{name}: exit code {} ({})", ended.exit_code, ended.reason))
    };
    statuses.into_iter().find_map(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(policy: &str, phase: &str, statuses: Value) -> Pod {
        let names = statuses.as_array().unwrap().iter().map(|s| json!({"name": s["name"]}));
        let mut status = json!({"phase": phase});
        status["containerStatuses"] = statuses.clone();
        serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "default", "uid": "u"},
            "spec": {"restartPolicy": policy, "containers": names.collect::<Vec<_>>()},
            "status": status,
        }))
        .unwrap()
    }

    fn running(name: &str, ready: bool) -> Value {
        json!({"name": name, "ready": ready, "state": {"running": {}}})
    }

    fn ended(name: &str, code: i32) -> Value {
        json!({"name": name, "state": {"terminated": {"exitCode": code, "reason": "Error"}}})
    }

    fn waits(name: &str, reason: &str, last: Option<i32>) -> Value {
        let mut status = json!({"name": name, "state": {"waiting": {"reason": reason, "message": "why"}}});
        if let Some(code) = last {
            status["lastState"] = json!({"terminated": {"exitCode": code}});
        }
        status
    }

    fn outcome_of(pod: &Pod, ending: WaitEnd) -> (Outcome, Vec<String>) {
        let report = report(pod, ending);
        (report.result, report.failed_containers)
    }

    #[test]
    fn finished_pod_reports_its_phase_and_failed_containers() {
        let good = pod("Never", "Succeeded", json!([ended("a", 0)]));
        assert_eq!(progress(&good), PodProgress::Over);
        assert_eq!(outcome_of(&good, WaitEnd::Settled), (Outcome::Succeeded, vec![]));
        let bad = pod("Never", "Failed", json!([ended("a", 0), ended("b", 3)]));
        assert_eq!(outcome_of(&bad, WaitEnd::Settled), (Outcome::Failed, vec!["b".into()]));
        assert_eq!(report(&bad, WaitEnd::Settled).message, "b: exit code 3 (Error)");
    }

    #[test]
    fn pod_is_working_while_it_runs_or_retries() {
        assert_eq!(progress(&pod("OnFailure", "Running", json!([running("a", true)]))), PodProgress::Working);
        let again = pod("OnFailure", "Running", json!([waits("a", "CrashLoopBackOff", Some(1))]));
        assert_eq!(progress(&again), PodProgress::Working);
        assert_eq!(
            progress(&pod("Never", "Pending", json!([waits("a", "ErrImagePull", None)]))),
            PodProgress::Idle
        );
    }

    #[test]
    fn always_restarting_pod_is_up_when_all_containers_are_ready_or_succeeded() {
        assert_eq!(progress(&pod("Always", "Running", json!([running("a", false)]))), PodProgress::Working);
        let up =
            pod("Always", "Running", json!([running("a", true), waits("b", "CrashLoopBackOff", Some(0))]));
        assert_eq!(progress(&up), PodProgress::Up);
        assert_eq!(outcome_of(&up, WaitEnd::Settled), (Outcome::Running, vec![]));
        let broken =
            pod("Always", "Running", json!([running("a", true), waits("b", "CrashLoopBackOff", Some(2))]));
        assert_eq!(progress(&broken), PodProgress::Over);
        assert_eq!(outcome_of(&broken, WaitEnd::Settled), (Outcome::Failed, vec!["b".into()]));
    }

    #[test]
    fn rejected_pod_has_no_failed_containers() {
        let mut refused = pod("Never", "Failed", json!([]));
        refused.status.reason = "OutOfcpu".into();
        refused.status.message = format!("{REJECTED}no room");
        assert_eq!(outcome_of(&refused, WaitEnd::Settled), (Outcome::Rejected, vec![]));
    }

    #[test]
    fn pod_that_did_not_start_names_the_container_and_reason() {
        let stuck = pod(
            "Never",
            "Pending",
            json!([waits("a", "ErrImagePull", None), waits("b", "ContainerCreating", None)]),
        );
        assert_eq!(outcome_of(&stuck, WaitEnd::TimedOut(7)), (Outcome::Failed, vec!["a".into()]));
        assert_eq!(report(&stuck, WaitEnd::TimedOut(7)).message, "the pod has not started within 7 s");
        assert_eq!(outcome_of(&stuck, WaitEnd::Interrupted).0, Outcome::Interrupted);
        assert_eq!(report(&stuck, WaitEnd::Interrupted).message, "a: ErrImagePull why");
    }

    #[test]
    fn failed_init_container_counts_and_ended_sidecar_does_not() {
        let mut ended_pod = pod("Never", "Failed", json!([waits("main", "PodInitializing", None)]));
        ended_pod.spec.init_containers =
            serde_json::from_value(json!([{"name": "side", "restartPolicy": "Always"}, {"name": "prepare"}]))
                .unwrap();
        ended_pod.status.init_container_statuses =
            serde_json::from_value(json!([ended("side", 143), ended("prepare", 1)])).unwrap();
        assert_eq!(outcome_of(&ended_pod, WaitEnd::Settled), (Outcome::Failed, vec!["prepare".into()]));
    }
}
