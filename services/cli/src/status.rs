//! The READY, STATUS and RESTARTS columns of a pod.
//!
//! Parity: `kubectl get pods` shows the same text for the same Pod.

use keelson_kube_model::{ContainerStateTerminated, ContainerStatus, Pod};

use crate::human;

/// The columns of one pod.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PodSummary {
    /// Containers that are ready.
    pub(crate) ready: usize,
    /// Containers that count for readiness: regular ones and sidecars.
    pub(crate) total: usize,
    /// The phase, or a more specific reason.
    pub(crate) status: String,
    /// Restarts of the containers that count at present.
    pub(crate) restarts: i32,
    /// When the previous instance of the last restarted container ended; 0 when unknown.
    pub(crate) last_restart: i64,
}

impl PodSummary {
    /// `2`, or `2 (3m ago)` where the time is known.
    pub(crate) fn restarts_text(&self, now: i64) -> String {
        if self.restarts == 0 || self.last_restart == 0 {
            return self.restarts.to_string();
        }
        format!("{} ({} ago)", self.restarts, human::age(now - self.last_restart))
    }
}

/// Restarts of some containers and the latest end of a previous instance.
#[derive(Default)]
struct Restarts {
    count: i32,
    last: i64,
}

impl Restarts {
    fn add(&mut self, status: &ContainerStatus) {
        self.count += status.restart_count;
        if let Some(ended) = &status.last_state.terminated {
            self.last = self.last.max(human::nanos_of(ended.finished_at.as_deref()));
        }
    }
}

/// The state of the init containers.
struct Initialisation {
    /// The reason of the first init container that has not completed.
    reason: Option<String>,
    ready_sidecars: usize,
    all: Restarts,
    sidecars: Restarts,
}

/// Computes the columns of `pod`.
pub(crate) fn summarise(pod: &Pod) -> PodSummary {
    let sidecars = pod.spec.init_containers.iter().filter(|c| c.is_restartable_init()).count();
    let init = initialisation(pod);
    let mut summary = PodSummary {
        ready: init.ready_sidecars,
        total: pod.spec.containers.len() + sidecars,
        status: phase_or_reason(pod),
        restarts: init.all.count,
        last_restart: init.all.last,
    };
    let initialised =
        pod.status.condition("Initialized").is_some_and(keelson_kube_model::PodCondition::is_true);
    let initialising = init.reason.is_some();
    if let Some(reason) = init.reason {
        summary.status = reason;
    }
    if !initialising || initialised {
        regular_containers(pod, init.sidecars, &mut summary);
    }
    if pod.is_deleting() {
        if pod.status.reason == "NodeLost" {
            summary.status = "Unknown".into();
        } else if !pod.status.phase().is_terminal() {
            summary.status = "Terminating".into();
        }
    }
    summary
}

fn phase_or_reason(pod: &Pod) -> String {
    if pod.status.condition("PodScheduled").is_some_and(|c| c.reason == "SchedulingGated") {
        return "SchedulingGated".into();
    }
    if pod.status.reason.is_empty() { pod.status.phase().as_str().into() } else { pod.status.reason.clone() }
}

fn initialisation(pod: &Pod) -> Initialisation {
    let mut init = Initialisation {
        reason: None,
        ready_sidecars: 0,
        all: Restarts::default(),
        sidecars: Restarts::default(),
    };
    for (index, status) in pod.status.init_container_statuses.iter().enumerate() {
        init.all.add(status);
        let sidecar =
            pod.spec.init_containers.iter().any(|c| c.name == status.name && c.is_restartable_init());
        if sidecar {
            init.sidecars.add(status);
        }
        let reason = match (&status.state.terminated, &status.state.waiting) {
            (Some(ended), _) if ended.exit_code == 0 => continue,
            _ if sidecar && status.started == Some(true) => {
                init.ready_sidecars += usize::from(status.ready);
                continue;
            }
            (Some(ended), _) => termination_reason(ended),
            (None, Some(waiting)) if !matches!(waiting.reason.as_str(), "" | "PodInitializing") => {
                waiting.reason.clone()
            }
            _ => format!("{index}/{}", pod.spec.init_containers.len()),
        };
        init.reason = Some(format!("Init:{reason}"));
        break;
    }
    init
}

fn regular_containers(pod: &Pod, sidecars: Restarts, summary: &mut PodSummary) {
    let mut restarts = sidecars;
    let mut running = false;
    // In reverse order, so that the reason of the first container wins.
    for status in pod.status.container_statuses.iter().rev() {
        restarts.add(status);
        if let Some(waiting) = status.state.waiting.as_ref().filter(|w| !w.reason.is_empty()) {
            summary.status.clone_from(&waiting.reason);
        } else if let Some(ended) = &status.state.terminated {
            summary.status = termination_reason(ended);
        } else if status.ready && status.state.running.is_some() {
            running = true;
            summary.ready += 1;
        }
    }
    summary.restarts = restarts.count;
    summary.last_restart = restarts.last;
    if summary.status == "Completed" && running {
        let ready = pod.status.condition("Ready").is_some_and(keelson_kube_model::PodCondition::is_true);
        summary.status = if ready { "Running" } else { "NotReady" }.into();
    }
}

fn termination_reason(ended: &ContainerStateTerminated) -> String {
    match ended.signal {
        _ if !ended.reason.is_empty() => ended.reason.clone(),
        Some(signal) if signal != 0 => format!("Signal:{signal}"),
        _ => format!("ExitCode:{}", ended.exit_code),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const SECOND: i64 = 1_000_000_000;

    fn pod(spec: Value, status: Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "web"}, "spec": spec, "status": status})).unwrap()
    }

    fn row(spec: Value, status: Value) -> (String, String, i32) {
        let summary = summarise(&pod(spec, status));
        (format!("{}/{}", summary.ready, summary.total), summary.status, summary.restarts)
    }

    fn two() -> Value {
        json!({"containers": [{"name": "a"}, {"name": "b"}]})
    }

    fn with_init() -> Value {
        json!({"initContainers": [{"name": "i0"}, {"name": "i1"}], "containers": [{"name": "a"}]})
    }

    fn sidecar() -> Value {
        json!({"initContainers": [{"name": "s", "restartPolicy": "Always"}], "containers": [{"name": "a"}]})
    }

    fn is(ready: &str, status: &str, restarts: i32) -> (String, String, i32) {
        (ready.into(), status.into(), restarts)
    }

    #[test]
    fn a_pod_without_any_container_status_shows_its_phase_or_reason() {
        assert_eq!(row(two(), json!({})), is("0/2", "Pending", 0));
        assert_eq!(row(two(), json!({"phase": "Pending"})), is("0/2", "Pending", 0));
        assert_eq!(row(two(), json!({"phase": "Failed", "reason": "OutOfcpu"})), is("0/2", "OutOfcpu", 0));
    }

    #[test]
    fn running_containers_are_counted_when_they_are_ready() {
        let status = json!({"phase": "Running", "containerStatuses": [
            {"name": "a", "ready": true, "state": {"running": {}}},
            {"name": "b", "ready": false, "restartCount": 3, "state": {"running": {}}},
        ]});
        assert_eq!(row(two(), status), is("1/2", "Running", 3));
    }

    #[test]
    fn waiting_reason_takes_precedence_over_the_phase() {
        let status = json!({"phase": "Pending", "containerStatuses": [
            {"name": "a", "state": {"waiting": {"reason": "ImagePullBackOff"}}},
            {"name": "b", "state": {"waiting": {"reason": "ContainerCreating"}}},
        ]});
        assert_eq!(row(two(), status), is("0/2", "ImagePullBackOff", 0));
    }

    #[test]
    fn terminated_container_shows_reason_signal_or_exit_code() {
        let end = |ended: Value| {
            row(two(), json!({"phase": "Failed", "containerStatuses": [{"name": "a", "state": {"terminated": ended}}]})).1
        };
        assert_eq!(end(json!({"exitCode": 137, "reason": "OOMKilled"})), "OOMKilled");
        assert_eq!(end(json!({"exitCode": 0, "signal": 9})), "Signal:9");
        assert_eq!(end(json!({"exitCode": 2})), "ExitCode:2");
    }

    #[test]
    fn partly_completed_pod_is_running_or_not_ready() {
        let status = |ready: &str| {
            json!({"phase": "Running", "conditions": [{"type": "Ready", "status": ready}], "containerStatuses": [
                {"name": "a", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}},
                {"name": "b", "ready": true, "state": {"running": {}}},
            ]})
        };
        assert_eq!(row(two(), status("True")), is("1/2", "Running", 0));
        assert_eq!(row(two(), status("False")), is("1/2", "NotReady", 0));
    }

    #[test]
    fn succeeded_pod_is_completed() {
        let status = json!({"phase": "Succeeded", "containerStatuses": [
            {"name": "a", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}},
            {"name": "b", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}},
        ]});
        assert_eq!(row(two(), status), is("0/2", "Completed", 0));
    }

    #[test]
    fn init_containers_are_counted_until_they_complete() {
        let waiting = json!([
            {"name": "a", "state": {"waiting": {"reason": "PodInitializing"}}},
        ]);
        let init = |statuses: Value| {
            row(
                with_init(),
                json!({"phase": "Pending", "initContainerStatuses": statuses, "containerStatuses": waiting}),
            )
        };
        let done = json!({"name": "i0", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}});
        assert_eq!(init(json!([{"name": "i0", "state": {"running": {}}}])), is("0/1", "Init:0/2", 0));
        assert_eq!(
            init(
                json!([done, {"name": "i1", "restartCount": 2, "state": {"waiting": {"reason": "PodInitializing"}}}])
            ),
            is("0/1", "Init:1/2", 2)
        );
        assert_eq!(
            init(json!([done, {"name": "i1", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}])),
            is("0/1", "Init:CrashLoopBackOff", 0)
        );
        assert_eq!(
            init(json!([done, {"name": "i1", "state": {"terminated": {"exitCode": 3}}}])),
            is("0/1", "Init:ExitCode:3", 0)
        );
        assert_eq!(
            init(json!([done, {"name": "i1", "state": {"terminated": {"exitCode": 3, "reason": "Error"}}}])),
            is("0/1", "Init:Error", 0)
        );
        assert_eq!(
            init(json!([done, {"name": "i1", "state": {"terminated": {"exitCode": 0}}}])),
            is("0/1", "PodInitializing", 0)
        );
    }

    #[test]
    fn sidecars_count_as_containers_and_their_restarts_stay() {
        let status = |started: bool| {
            json!({"phase": "Running",
                "initContainerStatuses": [{"name": "s", "ready": true, "started": started, "restartCount": 4, "state": {"running": {}}}],
                "containerStatuses": [{"name": "a", "ready": true, "restartCount": 1, "state": {"running": {}}}]})
        };
        assert_eq!(row(sidecar(), status(true)), is("2/2", "Running", 5));
        assert_eq!(row(sidecar(), status(false)), is("0/2", "Init:0/1", 4));
    }

    #[test]
    fn restarts_of_finished_init_containers_do_not_count() {
        let status = json!({"phase": "Running",
            "initContainerStatuses": [
                {"name": "i0", "restartCount": 7, "state": {"terminated": {"exitCode": 0}}},
                {"name": "i1", "state": {"terminated": {"exitCode": 0}}}],
            "containerStatuses": [{"name": "a", "ready": true, "restartCount": 1, "state": {"running": {}}}]});
        assert_eq!(row(with_init(), status), is("1/1", "Running", 1));
    }

    #[test]
    fn an_initialised_pod_whose_init_container_runs_again_shows_its_containers() {
        let status = json!({"phase": "Running", "conditions": [{"type": "Initialized", "status": "True"}],
            "initContainerStatuses": [{"name": "i0", "state": {"running": {}}}],
            "containerStatuses": [{"name": "a", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]});
        assert_eq!(row(with_init(), status), is("0/1", "CrashLoopBackOff", 0));
    }

    #[test]
    fn a_pod_that_is_being_deleted_is_terminating_unless_it_has_ended() {
        let deleting = |phase: &str, reason: &str| {
            let mut pod = pod(two(), json!({"phase": phase, "reason": reason}));
            pod.metadata.deletion_timestamp = Some("2026-01-01T00:00:00Z".into());
            summarise(&pod).status
        };
        assert_eq!(deleting("Running", ""), "Terminating");
        assert_eq!(deleting("Succeeded", ""), "Succeeded");
        assert_eq!(deleting("Running", "NodeLost"), "Unknown");
    }

    #[test]
    fn the_last_restart_is_shown_where_it_is_known() {
        let summary = summarise(&pod(
            two(),
            json!({"phase": "Running", "containerStatuses": [
                {"name": "a", "restartCount": 2, "state": {"running": {}},
                 "lastState": {"terminated": {"exitCode": 1, "finishedAt": "1970-01-01T00:01:40Z"}}},
                {"name": "b", "restartCount": 1, "state": {"running": {}},
                 "lastState": {"terminated": {"exitCode": 1, "finishedAt": "1970-01-01T00:00:10Z"}}},
            ]}),
        ));
        assert_eq!(summary.restarts_text(300 * SECOND), "3 (3m20s ago)");
        assert_eq!(PodSummary { last_restart: 0, ..summary }.restarts_text(0), "3");
    }

    #[test]
    fn gated_pod_shows_scheduling_gated() {
        let status = json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]});
        assert_eq!(row(two(), status), is("0/2", "SchedulingGated", 0));
    }
}
