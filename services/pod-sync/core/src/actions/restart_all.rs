//! The rule action `RestartAllContainers` (§9.9): the exit of one container restarts every container of the pod in the same
//! sandbox. All records are removed, those of the triggering containers last, so that an interrupted restart finds them and
//! continues. Containers without a record then start as in a new pod.
//!
//! Parity: as the kubelet, except that the triggering container is subject to crash-loop back-off, so that a container that
//! exits at once does not restart its pod in a tight loop.

use keelson_kube_model::{Container, ContainerId, ContainerKind, Pod};

use super::{Inputs, PodActions};
use crate::backoff::{BackoffKey, Backoffs};
use crate::moment::Moment;
use crate::observation::{ContainerObservation, PodObservation};
use crate::restart::matching_rule;

/// The action's name, and the reason of containers whose record it has removed.
pub const RESTART_ALL: &str = "RestartAllContainers";

/// A record to remove; its log is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResetContainer {
    /// The record.
    pub id: ContainerId,
    /// The name in the spec.
    pub name: String,
    /// It has not terminated: it is stopped first, without a hook.
    pub kill: bool,
    /// Remove it only after all others.
    pub last: bool,
}

/// Whether the action applies to containers of this kind.
fn counts(kind: ContainerKind) -> bool {
    kind != ContainerKind::Ephemeral
}

/// Whether some container of the pod has a rule with this action.
pub fn has_restart_all(pod: &Pod) -> bool {
    let mut containers = pod.containers().filter(|(kind, _)| counts(*kind));
    containers.any(|(_, c)| c.restart_policy_rules.iter().any(|rule| rule.action == RESTART_ALL))
}

/// The containers whose exit triggers the action, with the record of that exit.
fn triggers<'a>(
    pod: &'a Pod,
    observed: &'a PodObservation,
) -> impl Iterator<Item = (&'a Container, &'a ContainerObservation)> {
    let ended = |container: &'a Container| {
        let record = observed.in_newest_sandbox(&container.name).filter(|record| record.has_exited())?;
        (matching_rule(container, record.exit_code) == Some(RESTART_ALL)).then_some((container, record))
    };
    pod.containers().filter(|(kind, _)| counts(*kind)).filter_map(move |(_, container)| ended(container))
}

/// Whether a container has triggered the action and its record is not removed yet.
pub fn is_restarting(pod: &Pod, observed: &PodObservation) -> bool {
    !pod.is_deleting() && observed.ready_sandbox().is_some() && triggers(pod, observed).next().is_some()
}

/// The records to remove now; `None` if no container triggers the action, or if those that do are in back-off.
pub(super) fn reset(inputs: &Inputs<'_>, backoffs: &Backoffs, at: &Moment) -> Option<PodActions> {
    let (pod, observed) = (inputs.pod, inputs.observed);
    if !is_restarting(pod, observed) {
        return None;
    }
    let key = |(container, record): (&Container, &ContainerObservation)| {
        (BackoffKey::of(pod, container), record.finished_unix_nanos)
    };
    let due = |(key, finished): &(BackoffKey, i64)| backoffs.waits_until(key, *finished, at).is_none();
    let reset_backoff: Vec<(BackoffKey, i64)> = triggers(pod, observed).map(key).filter(due).collect();
    if reset_backoff.is_empty() {
        return None;
    }
    let triggering: Vec<&str> =
        triggers(pod, observed).map(|(container, _)| container.name.as_str()).collect();
    let of = |container: &Container| {
        let last = triggering.contains(&container.name.as_str());
        let name = container.name.clone();
        let one = move |record: &ContainerObservation| ResetContainer {
            id: record.id.clone(),
            name: name.clone(),
            kill: !record.has_exited(),
            last,
        };
        observed.records(&container.name).map(one).collect::<Vec<_>>()
    };
    let mut reset: Vec<ResetContainer> =
        pod.spec.containers.iter().chain(&pod.spec.init_containers).flat_map(of).collect();
    // Stable: regular containers before init containers.
    reset.sort_by_key(|one| one.last);
    Some(PodActions { reset, reset_backoff, ..PodActions::default() })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::actions::{ProbeHints, compute_pod_actions};
    use crate::moment::SECOND;
    use crate::testing::{ObservationBuilder, at, deleting, in_sandbox, nanos, pod};

    fn rule(code: i32) -> serde_json::Value {
        json!([{"action": RESTART_ALL, "exitCodes": {"operator": "In", "values": [code]}}])
    }

    fn pod_with_rule() -> Pod {
        pod(json!({
            "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
            "containers": [
                {"name": "a", "restartPolicy": "Never", "restartPolicyRules": rule(42)},
                {"name": "b"},
            ],
        }))
    }

    fn decide(pod: &Pod, seen: &ObservationBuilder, backoffs: &Backoffs, seconds: i64) -> PodActions {
        compute_pod_actions(pod, &seen.0, &ProbeHints::without_probes(), backoffs, &at(seconds))
    }

    fn initial() -> ObservationBuilder {
        in_sandbox().exited("i", 0).running("s")
    }

    #[test]
    fn restart_all_removes_regular_containers_first_and_the_trigger_last() {
        let seen = initial().exited("b", 1).running("b").exited("a", 42);
        let actions = decide(&pod_with_rule(), &seen, &Backoffs::default(), 60);
        let list: Vec<(&str, bool, bool)> =
            actions.reset.iter().map(|one| (one.name.as_str(), one.kill, one.last)).collect();
        let rest = [("b", true, false), ("b", false, false), ("i", false, false), ("s", true, false)];
        assert_eq!(list[..4], rest);
        assert_eq!(list[4..], [("a", false, true)]);
        assert!(
            actions.start.is_empty() && actions.kill.is_empty() && !actions.terminal && !actions.is_empty()
        );
    }

    #[test]
    fn restart_all_needs_its_exit_code_and_a_pod_that_is_not_deleted() {
        let ended = initial().running("b").exited("a", 1);
        assert!(decide(&pod_with_rule(), &ended, &Backoffs::default(), 60).reset.is_empty());
        let triggered = initial().running("b").exited("a", 42);
        assert!(is_restarting(&pod_with_rule(), &triggered.0));
        assert!(!is_restarting(&deleting(pod_with_rule()), &triggered.0));
        assert!(decide(&deleting(pod_with_rule()), &triggered, &Backoffs::default(), 60).reset.is_empty());
    }

    #[test]
    fn an_interrupted_restart_all_continues_and_starts_with_init_containers() {
        let half = in_sandbox().exited("a", 42);
        let actions = decide(&pod_with_rule(), &half, &Backoffs::default(), 60);
        assert_eq!(actions.reset.len(), 1);
        let none = decide(&pod_with_rule(), &in_sandbox(), &Backoffs::default(), 60);
        assert!(none.reset.is_empty());
        assert_eq!(none.start.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["i"]);
        assert!(none.start[0].attempt_from_logs, "restart counts continue");
    }

    #[test]
    fn an_exit_in_an_earlier_sandbox_does_not_trigger_restart_all() {
        let lost = in_sandbox().exited("a", 42).sandbox(1, true).running("b");
        assert!(!is_restarting(&pod_with_rule(), &lost.0));
    }

    #[test]
    fn repeated_restart_all_is_subject_to_back_off() {
        let asking = pod_with_rule();
        let key = BackoffKey::of(&asking, &asking.spec.containers[0]);
        let mut backoffs = Backoffs::default();
        let seen = initial().running("b").exited("a", 42).edit(|r| r.finished_unix_nanos = nanos(60));
        let first = decide(&asking, &seen, &backoffs, 60);
        assert_eq!(first.reset_backoff, [(key.clone(), nanos(60))]);
        backoffs.advance(&key, nanos(60), &at(60));
        let held = decide(&asking, &seen, &backoffs, 61);
        assert!(held.reset.is_empty());
        assert_eq!(held.next_wake_unix_nanos(), Some(nanos(60) + 10 * SECOND));
        assert_eq!(held.waiting[0].name, "a");
        assert!(!decide(&asking, &seen, &backoffs, 70).reset.is_empty());
    }
}
