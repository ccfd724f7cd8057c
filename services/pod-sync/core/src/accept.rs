//! Whether a new status may replace the stored one, and whether it differs (§14.5).

use keelson_kube_model::{
    Container, ContainerKind, ContainerState, ContainerStatus, Pod, PodCondition, PodStatus, RestartPolicy,
};

use crate::actions::has_restart_all;
use crate::conditions::{DISRUPTION_TARGET, OWNED};
use crate::moment::{Moment, status_time};
use crate::restart::exit_allows_restart;

/// Bytes that the termination messages of all containers of a pod share.
pub const MESSAGES_BYTES: usize = 12 * 1024;

/// A container whose termination is observed for the first time (`terminated_containers_total`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewlyTerminated {
    /// Its kind.
    pub kind: ContainerKind,
    /// Its name.
    pub container: String,
    /// Its exit code.
    pub exit_code: i32,
    /// The reason in its status.
    pub reason: String,
}

/// The decision about a new status.
#[derive(Clone, Debug, PartialEq)]
pub enum Accepted {
    /// Nothing that this node owns differs.
    Unchanged,
    /// Store it with version + 1 and wake the status writer.
    Stored {
        /// The status in the form to store.
        status: Box<PodStatus>,
        /// To be counted.
        newly_terminated: Vec<NewlyTerminated>,
    },
    /// A terminated container would run again that may not restart; the old status is kept.
    Refused {
        /// Which one.
        container: String,
    },
}

/// Decides whether `new` replaces `old`.
///
/// `force` stores it even if nothing differs: for the final status. The status of a pod that is being deleted is always
/// stored.
pub fn accept_status(
    pod: &Pod,
    old: Option<&PodStatus>,
    new: PodStatus,
    force: bool,
    at: &Moment,
) -> Accepted {
    let before = old.unwrap_or(&pod.status);
    if let Some(container) = resurrected(pod, before, &new) {
        return Accepted::Refused { container };
    }
    let mut status = new;
    status.start_time = before
        .start_time
        .clone()
        .or_else(|| pod.status.start_time.clone())
        .or(status.start_time)
        .or_else(|| status_time(at.now_unix_nanos));
    status.observed_generation = status.observed_generation.max(before.observed_generation);
    cut_messages(pod, &mut status);
    if old.is_some_and(|old| owned_parts_equal(old, &status)) && !force && !pod.is_deleting() {
        return Accepted::Unchanged;
    }
    let newly_terminated = newly_terminated(pod, before, &status);
    Accepted::Stored { status: Box::new(status), newly_terminated }
}

/// The first container that would change from terminated to another state although it may not restart.
fn resurrected(pod: &Pod, old: &PodStatus, new: &PodStatus) -> Option<String> {
    if pod.restart_policy() == RestartPolicy::Always || has_restart_all(pod) {
        return None;
    }
    let forbidden = |kind: ContainerKind, container: &Container| {
        let ended = entry(old, kind, &container.name)?.state.terminated.as_ref()?;
        let stays = entry(new, kind, &container.name).is_some_and(|entry| entry.state.terminated.is_some());
        let may = kind == ContainerKind::Sidecar || exit_allows_restart(pod, container, ended.exit_code);
        (!stays && !may).then(|| container.name.clone())
    };
    pod.containers()
        .filter(|(kind, _)| *kind != ContainerKind::Ephemeral)
        .find_map(|(kind, c)| forbidden(kind, c))
}

fn list(status: &PodStatus, kind: ContainerKind) -> &[ContainerStatus] {
    match kind {
        ContainerKind::Init | ContainerKind::Sidecar => &status.init_container_statuses,
        ContainerKind::Regular => &status.container_statuses,
        ContainerKind::Ephemeral => &status.ephemeral_container_statuses,
    }
}

fn entry<'a>(status: &'a PodStatus, kind: ContainerKind, name: &str) -> Option<&'a ContainerStatus> {
    list(status, kind).iter().find(|entry| entry.name == name)
}

fn newly_terminated(pod: &Pod, old: &PodStatus, new: &PodStatus) -> Vec<NewlyTerminated> {
    let was_seen = |kind, name: &str, id: &str| {
        entry(old, kind, name).is_some_and(|entry| {
            [&entry.state, &entry.last_state]
                .iter()
                .any(|state| state.terminated.as_ref().is_some_and(|ended| ended.container_id == id))
        })
    };
    let mut found = Vec::new();
    for (kind, container) in pod.containers() {
        let Some(entry) = entry(new, kind, &container.name) else { continue };
        let states: [&ContainerState; 2] = [&entry.state, &entry.last_state];
        for ended in states.iter().filter_map(|state| state.terminated.as_ref()) {
            if !was_seen(kind, &container.name, &ended.container_id) {
                found.push(NewlyTerminated {
                    kind,
                    container: container.name.clone(),
                    exit_code: ended.exit_code,
                    reason: ended.reason.clone(),
                });
            }
        }
    }
    found
}

/// Cuts each termination message to an equal share of the pod's limit, between characters.
pub fn cut_messages(pod: &Pod, status: &mut PodStatus) {
    let max_bytes = MESSAGES_BYTES / pod.containers().count().max(1);
    let lists = [
        &mut status.init_container_statuses,
        &mut status.container_statuses,
        &mut status.ephemeral_container_statuses,
    ];
    for entry in lists.into_iter().flatten() {
        for state in [&mut entry.state, &mut entry.last_state] {
            if let Some(ended) = &mut state.terminated {
                cut(&mut ended.message, max_bytes);
            }
        }
    }
}

fn cut(text: &mut String, max_bytes: usize) {
    let mut end = max_bytes.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

/// Whether they are equal, ignoring fields that others own and times of conditions that did not change.
fn owned_parts_equal(a: &PodStatus, b: &PodStatus) -> bool {
    let strip = |status: &PodStatus| {
        let mut status = status.clone();
        status.conditions.retain(|c| OWNED.contains(&c.type_.as_str()) || c.type_ == DISRUPTION_TARGET);
        status.conditions.sort_by(|x: &PodCondition, y| x.type_.cmp(&y.type_));
        status.resource_claim_statuses = None;
        status.extended_resource_claim_status = None;
        status.node_allocatable_resource_claim_statuses = None;
        status.nominated_node_name.clear();
        status
    };
    strip(a) == strip(b)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::status::{StatusInputs, generate_status};
    use crate::testing::{ObservationBuilder, at, deleting, in_sandbox, pod};

    fn status(pod: &Pod, seen: &ObservationBuilder, old: Option<&PodStatus>, second: i64) -> PodStatus {
        let inputs = StatusInputs { runtime_name: "containerd", ..StatusInputs::default() };
        generate_status(pod, &seen.0, old, &inputs, &at(second))
    }

    fn stored(accepted: Accepted) -> (PodStatus, Vec<NewlyTerminated>) {
        match accepted {
            Accepted::Stored { status, newly_terminated } => (*status, newly_terminated),
            other => panic!("{other:?}"),
        }
    }

    fn plain(policy: &str, container: Value) -> Pod {
        pod(json!({"restartPolicy": policy, "containers": [container]}))
    }

    #[test]
    fn the_start_time_is_set_by_the_first_store_and_kept() {
        let pod = plain("Always", json!({"name": "a"}));
        let (first, _) =
            stored(accept_status(&pod, None, status(&pod, &in_sandbox(), None, 10), false, &at(10)));
        assert_eq!(first.start_time, status_time(at(10).now_unix_nanos));
        let mut next = status(&pod, &in_sandbox().running("a"), Some(&first), 20);
        next.start_time = None;
        let (second, _) = stored(accept_status(&pod, Some(&first), next, false, &at(20)));
        assert_eq!(second.start_time, first.start_time);
    }

    #[test]
    fn an_equal_status_is_not_stored_unless_forced_or_the_pod_is_deleted() {
        let pod = plain("Always", json!({"name": "a"}));
        let (first, _) =
            stored(accept_status(&pod, None, status(&pod, &in_sandbox(), None, 10), false, &at(10)));
        let again = || status(&pod, &in_sandbox(), Some(&first), 20);
        assert_eq!(accept_status(&pod, Some(&first), again(), false, &at(20)), Accepted::Unchanged);
        assert!(matches!(accept_status(&pod, Some(&first), again(), true, &at(20)), Accepted::Stored { .. }));
        let deleted = deleting(pod.clone());
        assert!(matches!(
            accept_status(&deleted, Some(&first), again(), false, &at(20)),
            Accepted::Stored { .. }
        ));
        let mut foreign = again();
        foreign.conditions.push(PodCondition { type_: "x/mine".into(), ..PodCondition::default() });
        assert_eq!(accept_status(&pod, Some(&first), foreign, false, &at(20)), Accepted::Unchanged);
    }

    #[test]
    fn the_observed_generation_never_decreases() {
        let pod = plain("Always", json!({"name": "a"}));
        let mut old = status(&pod, &in_sandbox(), None, 10);
        old.observed_generation = Some(9);
        let (got, _) =
            stored(accept_status(&pod, Some(&old), status(&pod, &in_sandbox(), None, 20), true, &at(20)));
        assert_eq!(got.observed_generation, Some(9));
    }

    #[test]
    fn a_terminated_container_that_may_not_restart_stays_terminated() {
        let rule = json!({"action": "Restart", "exitCodes": {"operator": "In", "values": [0]}});
        let all = json!({"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [77]}});
        for (policy, container, code, may) in [
            ("Always", json!({"name": "a"}), 0, true),
            ("OnFailure", json!({"name": "a"}), 1, true),
            ("OnFailure", json!({"name": "a"}), 0, false),
            ("Never", json!({"name": "a"}), 1, false),
            ("Never", json!({"name": "a", "restartPolicy": "Always"}), 1, true),
            ("Never", json!({"name": "a", "restartPolicy": "Never", "restartPolicyRules": [rule]}), 0, true),
            ("Never", json!({"name": "a", "restartPolicy": "Never", "restartPolicyRules": [all]}), 0, true),
        ] {
            let case = format!("{policy} {container} {code}");
            let pod = plain(policy, container);
            let old = status(&pod, &in_sandbox().exited("a", code), None, 10);
            let new = status(&pod, &in_sandbox().exited("a", code).running("a"), Some(&old), 20);
            let refused = accept_status(&pod, Some(&old), new, false, &at(20))
                == Accepted::Refused { container: "a".to_owned() };
            assert_eq!(refused, !may, "{case}");
        }
    }

    #[test]
    fn a_terminated_sidecar_may_always_run_again() {
        let pod = pod(json!({"restartPolicy": "Never", "containers": [{"name": "a"}],
            "initContainers": [{"name": "s", "restartPolicy": "Always"}, {"name": "i"}]}));
        let old = status(&pod, &in_sandbox().exited("s", 0).exited("i", 0), None, 10);
        let sidecar = status(&pod, &in_sandbox().exited("s", 0).exited("i", 0).running("s"), Some(&old), 20);
        assert!(matches!(accept_status(&pod, Some(&old), sidecar, false, &at(20)), Accepted::Stored { .. }));
        let init = status(&pod, &in_sandbox().exited("s", 0).exited("i", 0).running("i"), Some(&old), 20);
        assert_eq!(
            accept_status(&pod, Some(&old), init, false, &at(20)),
            Accepted::Refused { container: "i".into() }
        );
    }

    #[test]
    fn a_newly_terminated_container_is_counted_once() {
        let pod = plain("Always", json!({"name": "a"}));
        let running = status(&pod, &in_sandbox().running("a"), None, 10);
        let ended = status(&pod, &in_sandbox().exited("a", 3), Some(&running), 20);
        let (first, counted) = stored(accept_status(&pod, Some(&running), ended, false, &at(20)));
        let expected = NewlyTerminated {
            kind: ContainerKind::Regular,
            container: "a".into(),
            exit_code: 3,
            reason: "Error".into(),
        };
        assert_eq!(counted, [expected]);
        let again = status(&pod, &in_sandbox().exited("a", 3).running("a"), Some(&first), 30);
        assert!(stored(accept_status(&pod, Some(&first), again, false, &at(30))).1.is_empty());
    }

    #[test]
    fn termination_messages_share_12_kib_and_are_cut_between_characters() {
        let pod = pod(json!({"restartPolicy": "Never", "containers": [{"name": "a"}, {"name": "b"}]}));
        let seen = in_sandbox().exited("a", 1).edit(|record| record.termination_message = "é".repeat(4000));
        let (got, _) = stored(accept_status(&pod, None, status(&pod, &seen, None, 10), false, &at(10)));
        let message = &got.container_statuses[0].state.terminated.as_ref().unwrap().message;
        assert_eq!(message.len(), 6144);
        let mut text = "éé".to_owned();
        cut(&mut text, 3);
        assert_eq!(text, "é");
    }

    #[test]
    fn disruption_target_is_an_owned_condition_and_unknown_ones_are_not() {
        let status = |type_: &str| -> PodStatus {
            serde_json::from_value(
                json!({"phase": "Running", "conditions": [{"type": type_, "status": "True"}]}),
            )
            .unwrap()
        };
        let plain: PodStatus = serde_json::from_value(json!({"phase": "Running"})).unwrap();
        assert!(owned_parts_equal(&plain, &status("example.com/gate")));
        for ours in [DISRUPTION_TARGET, "Ready"] {
            assert!(!owned_parts_equal(&plain, &status(ours)), "{ours}");
        }
    }
}
