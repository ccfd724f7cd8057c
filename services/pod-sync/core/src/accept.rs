//! May a status be stored, and does storing it change anything (§14.5)?

use keelson_kube_model::{
    Container, ContainerKind, ContainerState, ContainerStatus, Pod, PodCondition, PodStatus, RestartPolicy,
};

use crate::conditions::{DISRUPTION_TARGET, OWNED};
use crate::moment::{Moment, status_time};
use crate::restart::exit_allows_restart;

/// Bytes that the termination messages of all containers of a pod share.
pub const MESSAGES_BYTES: usize = 12 * 1024;

/// A container that was seen to have ended for the first time (`terminated_containers_total`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewlyTerminated {
    /// What it was for.
    pub kind: ContainerKind,
    /// Its name.
    pub container: String,
    /// Its exit code.
    pub exit_code: i32,
    /// The reason in its status.
    pub reason: String,
}

/// What becomes of a status that is offered.
#[derive(Clone, Debug, PartialEq)]
pub enum Accepted {
    /// Nothing that this node owns differs.
    Unchanged,
    /// To be stored: version + 1, and the writer is woken.
    Stored {
        /// The status in the form to store.
        status: Box<PodStatus>,
        /// To be counted.
        newly_terminated: Vec<NewlyTerminated>,
    },
    /// A container would come back to life that may not; the old status stays.
    Refused {
        /// Which one.
        container: String,
    },
}

/// Decides whether `new` takes the place of `old`.
///
/// `force` stores it even when nothing differs: for the final status. A pod that is being deleted is always stored.
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

/// The first container that would go from terminated to something else although it may not start again.
fn resurrected(pod: &Pod, old: &PodStatus, new: &PodStatus) -> Option<String> {
    if pod.restart_policy() == RestartPolicy::Always || pod.containers().any(|(_, container)| has_restart_all(container)) {
        return None;
    }
    let forbidden = |kind: ContainerKind, container: &Container| {
        let ended = entry(old, kind, &container.name)?.state.terminated.as_ref()?;
        let stays = entry(new, kind, &container.name).is_some_and(|entry| entry.state.terminated.is_some());
        let may = kind == ContainerKind::Sidecar || exit_allows_restart(pod, container, ended.exit_code);
        (!stays && !may).then(|| container.name.clone())
    };
    pod.containers().filter(|(kind, _)| *kind != ContainerKind::Ephemeral).find_map(|(kind, c)| forbidden(kind, c))
}

fn has_restart_all(container: &Container) -> bool {
    container.restart_policy_rules.iter().any(|rule| rule.action == "RestartAllContainers")
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

/// Each message gets an even part of what the pod may use, cut between characters.
pub fn cut_messages(pod: &Pod, status: &mut PodStatus) {
    let most = MESSAGES_BYTES / pod.containers().count().max(1);
    let lists = [
        &mut status.init_container_statuses,
        &mut status.container_statuses,
        &mut status.ephemeral_container_statuses,
    ];
    for entry in lists.into_iter().flatten() {
        for state in [&mut entry.state, &mut entry.last_state] {
            if let Some(ended) = &mut state.terminated {
                cut(&mut ended.message, most);
            }
        }
    }
}

fn cut(text: &mut String, most: usize) {
    let mut end = most.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

/// Equal but for what belongs to others and for times of conditions that did not change.
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
