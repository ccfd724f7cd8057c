//! The rule action `RestartAllContainers` (§9.9): the end of one container begins every container of the pod anew, in
//! the same sandbox. All records go, those of the containers that asked for it last of all, so that whoever is
//! interrupted finds them and goes on; what is gone then starts as in a new pod.
//!
//! Parity: as the kubelet, except that the crash-loop back-off counts for the container that asked: a pod whose
//! container ends so at once is not begun anew at the speed of the loop.

use keelson_kube_model::{Container, ContainerId, ContainerKind, Pod};

use super::{Inputs, PodActions};
use crate::backoff::{BackoffBook, BackoffKey};
use crate::moment::Moment;
use crate::observation::{ContainerObservation, PodObservation};
use crate::restart::matching_rule;

/// The action's name, and the reason of containers whose record it has removed.
pub const RESTART_ALL: &str = "RestartAllContainers";

/// A record to be removed; its log stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResetContainer {
    /// The record.
    pub id: ContainerId,
    /// The name in the spec.
    pub name: String,
    /// It has not ended: it is stopped first, without a hook.
    pub kill: bool,
    /// Only when all others are gone.
    pub last: bool,
}

/// Containers that the action is about.
fn counts(kind: ContainerKind) -> bool {
    kind != ContainerKind::Ephemeral
}

/// Some container of the pod can ask for it.
pub fn has_restart_all(pod: &Pod) -> bool {
    let mut containers = pod.containers().filter(|(kind, _)| counts(*kind));
    containers.any(|(_, c)| c.restart_policy_rules.iter().any(|rule| rule.action == RESTART_ALL))
}

/// The containers whose end asks for it, with the record of that end.
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

/// A container has asked for it, and its record is not gone yet.
pub fn is_restarting(pod: &Pod, observed: &PodObservation) -> bool {
    !pod.is_deleting() && observed.ready_sandbox().is_some() && triggers(pod, observed).next().is_some()
}

/// What is removed now; `None` when nobody asks for it or those who do are in back-off.
pub(super) fn reset(inputs: &Inputs<'_>, book: &BackoffBook, at: &Moment) -> Option<PodActions> {
    let (pod, observed) = (inputs.pod, inputs.observed);
    if !is_restarting(pod, observed) {
        return None;
    }
    let key = |(container, record): (&Container, &ContainerObservation)| {
        (BackoffKey::of(pod, container), record.finished_unix_nanos)
    };
    let due = |(key, finished): &(BackoffKey, i64)| book.waits_until(key, *finished, at).is_none();
    let reset_backoff: Vec<(BackoffKey, i64)> = triggers(pod, observed).map(key).filter(due).collect();
    if reset_backoff.is_empty() {
        return None;
    }
    let asked: Vec<&str> = triggers(pod, observed).map(|(container, _)| container.name.as_str()).collect();
    let of = |container: &Container| {
        let last = asked.contains(&container.name.as_str());
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
    use crate::testing::{Seen, at, deleting, in_sandbox, nanos, pod};

    fn rule(code: i32) -> serde_json::Value {
        json!([{"action": RESTART_ALL, "exitCodes": {"operator": "In", "values": [code]}}])
    }

    fn asking() -> Pod {
        pod(json!({
            "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
            "containers": [
                {"name": "a", "restartPolicy": "Never", "restartPolicyRules": rule(42)},
                {"name": "b"},
            ],
        }))
    }

    fn decide(pod: &Pod, seen: &Seen, book: &BackoffBook, seconds: i64) -> PodActions {
        compute_pod_actions(pod, &seen.0, &ProbeHints::without_probes(), book, &at(seconds))
    }

    fn beginning() -> Seen {
        in_sandbox().exited("i", 0).running("s")
    }

    #[test]
    fn every_record_goes_regular_ones_first_and_who_asked_last() {
        let seen = beginning().exited("b", 1).running("b").exited("a", 42);
        let actions = decide(&asking(), &seen, &BackoffBook::default(), 60);
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
    fn another_exit_code_restarts_nothing_and_a_deletion_goes_before() {
        let ended = beginning().running("b").exited("a", 1);
        assert!(decide(&asking(), &ended, &BackoffBook::default(), 60).reset.is_empty());
        let asked = beginning().running("b").exited("a", 42);
        assert!(is_restarting(&asking(), &asked.0));
        assert!(!is_restarting(&deleting(asking()), &asked.0));
        assert!(decide(&deleting(asking()), &asked, &BackoffBook::default(), 60).reset.is_empty());
    }

    #[test]
    fn who_is_interrupted_goes_on_and_what_is_gone_begins_with_the_first_init_container() {
        let half = in_sandbox().exited("a", 42);
        let actions = decide(&asking(), &half, &BackoffBook::default(), 60);
        assert_eq!(actions.reset.len(), 1);
        let none = decide(&asking(), &in_sandbox(), &BackoffBook::default(), 60);
        assert!(none.reset.is_empty());
        assert_eq!(none.start.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["i"]);
        assert!(none.start[0].attempt_from_logs, "restart counts continue");
    }

    #[test]
    fn an_end_in_an_earlier_sandbox_asks_for_nothing() {
        let lost = in_sandbox().exited("a", 42).sandbox(1, true).running("b");
        assert!(!is_restarting(&asking(), &lost.0));
    }

    #[test]
    fn who_asks_again_and_again_waits_in_between() {
        let asking = asking();
        let key = BackoffKey::of(&asking, &asking.spec.containers[0]);
        let mut book = BackoffBook::default();
        let seen = beginning().running("b").exited("a", 42).edit(|r| r.finished_unix_nanos = nanos(60));
        let first = decide(&asking, &seen, &book, 60);
        assert_eq!(first.reset_backoff, [(key.clone(), nanos(60))]);
        book.advance(&key, nanos(60), &at(60));
        let held = decide(&asking, &seen, &book, 61);
        assert!(held.reset.is_empty());
        assert_eq!(held.next_wake_unix_nanos(), Some(nanos(60) + 10 * SECOND));
        assert_eq!(held.waiting[0].name, "a");
        assert!(!decide(&asking, &seen, &book, 70).reset.is_empty());
    }
}
