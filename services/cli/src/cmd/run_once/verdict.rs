//! How a pod of `keelson run --once` stands, and what it came to in the end.

use keelson_kube_model::{ContainerKind, ContainerStatus, Pod, PodPhase, RestartPolicy};
use serde::Serialize;

/// What the message of a pod that the node has refused begins with (pod-lifecycle.md §15.3).
const REJECTED: &str = "Pod was rejected: ";
/// Waiting reasons of a container whose turn has not come yet.
const NOT_YET: [&str; 3] = ["", "ContainerCreating", "PodInitializing"];

/// Where a pod is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stand {
    /// Nothing of it runs: it waits for something, or it is between two attempts.
    Idle,
    /// Some container runs.
    Working,
    /// It has no end of its own, and it is there: every regular container is ready or has ended well before.
    Up,
    /// It has ended, or a container that is always restarted has failed.
    Over,
}

/// How a pod or a manifest came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum Outcome {
    /// Every container has ended well.
    Succeeded,
    /// It has no end of its own and ran when it was ended.
    Running,
    /// It has failed, or has not come to run in time.
    Failed,
    /// The node refused the pod.
    Rejected,
    /// The manifest is not used.
    Refused,
    /// The command was told to end before the pod had.
    Interrupted,
}

impl Outcome {
    /// Whether the command fails because of it.
    pub(super) fn is_failure(self) -> bool {
        !matches!(self, Self::Succeeded | Self::Running)
    }
}

/// A line of the answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    pub(super) namespace: String,
    /// The pod, or the file of a manifest that is refused.
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) result: Outcome,
    /// `status.phase` when the result was taken.
    pub(super) phase: String,
    pub(super) reason: String,
    pub(super) message: String,
    pub(super) failed_containers: Vec<String>,
}

/// Why the wait for a pod is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// It stands as it stands.
    Settled,
    /// It has not come to run within this many seconds.
    TimedOut(u64),
    /// The command was told to end.
    Interrupted,
}

/// Whether a pod comes to an end by itself: no regular container of it is always restarted.
pub(super) fn ends(pod: &Pod) -> bool {
    pod.spec
        .containers
        .iter()
        .all(|container| pod.restart_policy_of(ContainerKind::Regular, container) != RestartPolicy::Always)
}

/// How the pod stands by its status.
pub(super) fn stand(pod: &Pod) -> Stand {
    if matches!(pod.status.phase(), PodPhase::Succeeded | PodPhase::Failed) {
        return Stand::Over;
    }
    let regular = || pod.spec.containers.iter().map(|container| status_of(pod, &container.name));
    if !ends(pod) {
        if regular().flatten().any(|status| last_exit(status).is_some_and(|code| code != 0)) {
            return Stand::Over;
        }
        let there = |status: Option<&ContainerStatus>| {
            status.is_some_and(|s| (s.state.running.is_some() && s.ready) || last_exit(s) == Some(0))
        };
        if regular().all(there) {
            return Stand::Up;
        }
    }
    let statuses = pod.status.init_container_statuses.iter().chain(&pod.status.container_statuses);
    if statuses.into_iter().any(|status| status.state.running.is_some()) {
        return Stand::Working;
    }
    // Between two attempts of a container it has begun already.
    if pod.status.phase() == PodPhase::Running { Stand::Working } else { Stand::Idle }
}

/// What the pod came to.
pub(super) fn report(pod: &Pod, ending: Ending) -> Report {
    let status = &pod.status;
    let rejected = status.phase() == PodPhase::Failed && status.message.starts_with(REJECTED);
    let failed_containers = if rejected { Vec::new() } else { failed_containers(pod) };
    let (mut reason, mut message) = (status.reason.clone(), status.message.clone());
    let result = match (status.phase(), stand(pod)) {
        _ if rejected => Outcome::Rejected,
        (PodPhase::Succeeded, _) => Outcome::Succeeded,
        (PodPhase::Failed, _) | (_, Stand::Over) => Outcome::Failed,
        (_, Stand::Up) if failed_containers.is_empty() => Outcome::Running,
        _ => match ending {
            Ending::Interrupted => Outcome::Interrupted,
            Ending::TimedOut(seconds) => {
                reason = "NotStarted".to_owned();
                message = format!("it does not run after {seconds} s");
                Outcome::Failed
            }
            // It was up when it settled.
            Ending::Settled => Outcome::Failed,
        },
    };
    if message.is_empty() && result.is_failure() {
        message = first_trouble(pod);
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

/// The exit code of the run that ended last.
fn last_exit(status: &ContainerStatus) -> Option<i32> {
    let ended = status.state.terminated.as_ref().or(status.last_state.terminated.as_ref());
    ended.map(|ended| ended.exit_code)
}

/// Init and regular containers whose last run has failed, or that could not be started, in the order of the spec.
/// How a sidecar ends says nothing: it is ended with its pod.
fn failed_containers(pod: &Pod) -> Vec<String> {
    let counts = |kind| matches!(kind, ContainerKind::Init | ContainerKind::Regular);
    let names = pod.containers().filter(|(kind, _)| counts(*kind)).map(|(_, container)| &container.name);
    let failed = |name: &&String| {
        status_of(pod, name).is_some_and(|status| {
            let held = status.state.waiting.as_ref().is_some_and(|w| !NOT_YET.contains(&w.reason.as_str()));
            let again = held && last_exit(status) == Some(0);
            last_exit(status).is_some_and(|code| code != 0) || (held && !again)
        })
    };
    names.filter(failed).cloned().collect()
}

/// What the first container that is in trouble says of itself.
fn first_trouble(pod: &Pod) -> String {
    let statuses = pod.status.init_container_statuses.iter().chain(&pod.status.container_statuses);
    let text = |status: &ContainerStatus| {
        let name = &status.name;
        if let Some(waiting) = status.state.waiting.as_ref().filter(|w| !NOT_YET.contains(&w.reason.as_str()))
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

    fn came_to(pod: &Pod, ending: Ending) -> (Outcome, Vec<String>) {
        let report = report(pod, ending);
        (report.result, report.failed_containers)
    }

    #[test]
    fn a_pod_that_ends_is_over_with_its_phase_and_names_what_failed() {
        let good = pod("Never", "Succeeded", json!([ended("a", 0)]));
        assert_eq!(stand(&good), Stand::Over);
        assert_eq!(came_to(&good, Ending::Settled), (Outcome::Succeeded, vec![]));
        let bad = pod("Never", "Failed", json!([ended("a", 0), ended("b", 3)]));
        assert_eq!(came_to(&bad, Ending::Settled), (Outcome::Failed, vec!["b".into()]));
        assert_eq!(report(&bad, Ending::Settled).message, "b: exit code 3 (Error)");
    }

    #[test]
    fn a_pod_that_ends_is_waited_for_while_it_runs_or_tries_again() {
        assert_eq!(stand(&pod("OnFailure", "Running", json!([running("a", true)]))), Stand::Working);
        let again = pod("OnFailure", "Running", json!([waits("a", "CrashLoopBackOff", Some(1))]));
        assert_eq!(stand(&again), Stand::Working);
        assert_eq!(stand(&pod("Never", "Pending", json!([waits("a", "ErrImagePull", None)]))), Stand::Idle);
    }

    #[test]
    fn a_pod_that_always_restarts_is_up_when_all_of_it_is_ready_or_has_ended_well() {
        assert_eq!(stand(&pod("Always", "Running", json!([running("a", false)]))), Stand::Working);
        let up =
            pod("Always", "Running", json!([running("a", true), waits("b", "CrashLoopBackOff", Some(0))]));
        assert_eq!(stand(&up), Stand::Up);
        assert_eq!(came_to(&up, Ending::Settled), (Outcome::Running, vec![]));
        let broken =
            pod("Always", "Running", json!([running("a", true), waits("b", "CrashLoopBackOff", Some(2))]));
        assert_eq!(stand(&broken), Stand::Over);
        assert_eq!(came_to(&broken, Ending::Settled), (Outcome::Failed, vec!["b".into()]));
    }

    #[test]
    fn a_refused_pod_is_no_failure_of_its_containers() {
        let mut refused = pod("Never", "Failed", json!([]));
        refused.status.reason = "OutOfcpu".into();
        refused.status.message = format!("{REJECTED}no room");
        assert_eq!(came_to(&refused, Ending::Settled), (Outcome::Rejected, vec![]));
    }

    #[test]
    fn what_did_not_come_to_run_says_which_container_and_why() {
        let stuck = pod(
            "Never",
            "Pending",
            json!([waits("a", "ErrImagePull", None), waits("b", "ContainerCreating", None)]),
        );
        assert_eq!(came_to(&stuck, Ending::TimedOut(7)), (Outcome::Failed, vec!["a".into()]));
        assert_eq!(report(&stuck, Ending::TimedOut(7)).message, "it does not run after 7 s");
        assert_eq!(came_to(&stuck, Ending::Interrupted).0, Outcome::Interrupted);
        assert_eq!(report(&stuck, Ending::Interrupted).message, "a: ErrImagePull why");
    }

    #[test]
    fn the_end_of_a_sidecar_says_nothing_and_that_of_an_init_container_does() {
        let mut ended_pod = pod("Never", "Failed", json!([waits("main", "PodInitializing", None)]));
        ended_pod.spec.init_containers =
            serde_json::from_value(json!([{"name": "side", "restartPolicy": "Always"}, {"name": "prepare"}]))
                .unwrap();
        ended_pod.status.init_container_statuses =
            serde_json::from_value(json!([ended("side", 143), ended("prepare", 1)])).unwrap();
        assert_eq!(came_to(&ended_pod, Ending::Settled), (Outcome::Failed, vec!["prepare".into()]));
    }
}
