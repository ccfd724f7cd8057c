//! Garbage collection of dead containers and sandboxes: which ones to remove (pod-lifecycle.md §9.12,
//! runtime-and-resources.md §7.3).

use std::collections::{BTreeMap, BTreeSet};

/// What pod-sync wants for a pod, as far as garbage collection is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// The pod is desired or still terminating: keep the newest dead container of each name.
    Keep,
    /// The pod has terminated for good and its last status is known, but the pod object still exists: as
    /// [`Self::Keep`], except that a collection that reclaims space removes all of it.
    Ended,
    /// Remove everything that belongs to the pod.
    Forget,
}

/// A container as the runtime lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedContainer {
    /// Runtime id.
    pub id: String,
    /// Name in the spec.
    pub name: String,
    /// The sandbox that it belongs to.
    pub sandbox_id: String,
    /// Whether a process may exist: running, or in an unknown state.
    pub alive: bool,
    /// Created and not started: a start may be in progress.
    pub pending: bool,
    /// When it was created.
    pub created_unix_nanos: i64,
}

/// A sandbox as the runtime lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedSandbox {
    /// Runtime id.
    pub id: String,
    /// Whether it is READY.
    pub ready: bool,
    /// Attempt number.
    pub attempt: u32,
    /// When it was created.
    pub created_unix_nanos: i64,
}

/// One pod as the runtime lists it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListedPod {
    /// Pod UID.
    pub uid: String,
    /// Its containers.
    pub containers: Vec<ListedContainer>,
    /// Its sandboxes.
    pub sandboxes: Vec<ListedSandbox>,
}

/// How many dead containers are kept (`--minimum-container-ttl-duration`, `--maximum-dead-containers-per-container`,
/// `--maximum-dead-containers`). Applies to desired pods; of other pods nothing is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GcPolicy {
    /// Nanoseconds for which a container is kept after its creation.
    pub minimum_age: i64,
    /// Maximum for each container name in a pod; `None`: no limit.
    pub max_per_container: Option<usize>,
    /// Maximum on the node; `None`: no limit.
    pub max_total: Option<usize>,
    /// Collect to reclaim disk space: keep only the newest container of each name regardless of the limits above, and
    /// nothing of pods that have ended.
    pub reclaim_space: bool,
}

impl Default for GcPolicy {
    fn default() -> Self {
        Self { minimum_age: 0, max_per_container: Some(1), max_total: None, reclaim_space: false }
    }
}

impl GcPolicy {
    /// Whether a container is too young to be removed.
    const fn is_too_young(&self, container: &ListedContainer, now: i64) -> bool {
        !self.reclaim_space && now.saturating_sub(container.created_unix_nanos) < self.minimum_age
    }

    /// How many containers of each name are kept: at least the newest, because restart decisions need it.
    fn kept_per_name(&self) -> usize {
        if self.reclaim_space { 1 } else { self.max_per_container.map_or(usize::MAX, |limit| limit.max(1)) }
    }
}

/// What to remove: first the containers, then the sandboxes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerGcPlan {
    /// Container ids.
    pub containers: Vec<String>,
    /// Sandbox ids; each is stopped before it is removed.
    pub sandboxes: Vec<String>,
    /// UIDs of pods that have nothing left after these removals: their log folders are removed too.
    pub forgotten: Vec<String>,
}

impl ContainerGcPlan {
    /// Whether there is nothing to remove.
    pub fn is_empty(&self) -> bool {
        self.containers.is_empty() && self.sandboxes.is_empty() && self.forgotten.is_empty()
    }
}

/// Decides what to remove.
///
/// `wanted` is the set that pod-sync has sent. `complete` says that the set is whole and every source of pods is
/// ready; only then does a pod that is not in the set count as [`Wanted::Forget`]. Running containers are never
/// removed: ending processes is pod-sync's decision. `now` is in unix nanoseconds.
///
/// Parity: the kubelet's limits may remove even the last dead container of a name, so that it no longer knows whether
/// to restart it; here the newest one is kept as long as its pod is desired. See `docs/parity.md`, L9.12.
pub fn plan_container_gc(
    pods: &[ListedPod],
    wanted: &BTreeMap<String, Wanted>,
    complete: bool,
    policy: &GcPolicy,
    now: i64,
) -> ContainerGcPlan {
    let wanted_state = |pod: &ListedPod| match wanted.get(&pod.uid) {
        Some(want) => *want,
        None if complete => Wanted::Forget,
        None => Wanted::Keep,
    };
    let mut removed: BTreeSet<&str> = BTreeSet::new();
    for pod in pods {
        removed.extend(excess_in_pod(pod, wanted_state(pod), policy, now));
    }
    removed.extend(excess_on_node(pods, &removed, policy, now));
    let mut plan = ContainerGcPlan::default();
    for pod in pods {
        plan_pod(pod, wanted_state(pod), &removed, policy, &mut plan);
    }
    plan
}

/// A pod's containers, newest first.
fn newest_first(pod: &ListedPod) -> Vec<&ListedContainer> {
    let mut by_age: Vec<&ListedContainer> = pod.containers.iter().collect();
    by_age.sort_by(|a, b| b.created_unix_nanos.cmp(&a.created_unix_nanos).then_with(|| b.id.cmp(&a.id)));
    by_age
}

/// The containers that exceed the limits of their own pod, newest first.
fn excess_in_pod<'a>(pod: &'a ListedPod, want: Wanted, policy: &GcPolicy, now: i64) -> Vec<&'a str> {
    let nothing_kept = want == Wanted::Forget || (want == Wanted::Ended && policy.reclaim_space);
    let mut dead_by_name: BTreeMap<&str, usize> = BTreeMap::new();
    let mut is_kept = |container: &ListedContainer, name: &'a str| {
        if container.alive || nothing_kept || container.pending {
            return container.alive || !nothing_kept;
        }
        let count = dead_by_name.entry(name).or_default();
        *count += 1;
        *count <= policy.kept_per_name() || policy.is_too_young(container, now)
    };
    let excess = newest_first(pod).into_iter().filter(|container| !is_kept(container, &container.name));
    excess.map(|container| container.id.as_str()).collect()
}

/// Further containers to remove because the node has too many in total. Each name keeps an equal share; then the
/// oldest are removed, but never the newest of a name.
fn excess_on_node<'a>(
    pods: &'a [ListedPod],
    removed: &BTreeSet<&str>,
    policy: &GcPolicy,
    now: i64,
) -> Vec<&'a str> {
    let Some(max_total) = policy.max_total.filter(|_| !policy.reclaim_space) else { return Vec::new() };
    let mut groups: BTreeMap<(&str, &str), Vec<&ListedContainer>> = BTreeMap::new();
    for pod in pods {
        let dead = |c: &&ListedContainer| !c.alive && !c.pending && !removed.contains(c.id.as_str());
        for container in newest_first(pod).into_iter().filter(dead) {
            groups.entry((&pod.uid, &container.name)).or_default().push(container);
        }
    }
    let count: usize = groups.values().map(Vec::len).sum();
    let share = (max_total / groups.len().max(1)).max(1);
    // First what exceeds the share of its name, then the oldest of the rest; both lists leave out the newest.
    let (mut over_share, mut within_share) = (Vec::new(), Vec::new());
    for group in groups.values() {
        let removable = group.iter().skip(1).filter(|c| !policy.is_too_young(c, now));
        within_share.extend(removable.clone().take(share - 1).copied());
        over_share.extend(removable.skip(share - 1).copied());
    }
    for list in [&mut over_share, &mut within_share] {
        list.sort_by(|a, b| a.created_unix_nanos.cmp(&b.created_unix_nanos).then_with(|| a.id.cmp(&b.id)));
    }
    let surplus = count.saturating_sub(max_total);
    over_share.into_iter().chain(within_share).take(surplus).map(|container| container.id.as_str()).collect()
}

fn plan_pod(
    pod: &ListedPod,
    want: Wanted,
    removed: &BTreeSet<&str>,
    policy: &GcPolicy,
    plan: &mut ContainerGcPlan,
) {
    let mut sandboxes_in_use = BTreeSet::new();
    for container in newest_first(pod) {
        if removed.contains(container.id.as_str()) {
            plan.containers.push(container.id.clone());
        } else {
            sandboxes_in_use.insert(container.sandbox_id.as_str());
        }
    }
    let keeps_newest = want == Wanted::Keep || (want == Wanted::Ended && !policy.reclaim_space);
    let newest =
        pod.sandboxes.iter().max_by_key(|s| (s.attempt, s.created_unix_nanos)).map(|s| s.id.as_str());
    let mut pod_has_objects = !sandboxes_in_use.is_empty();
    for sandbox in &pod.sandboxes {
        let keep = sandbox.ready
            || sandboxes_in_use.contains(sandbox.id.as_str())
            || (keeps_newest && newest == Some(sandbox.id.as_str()));
        if keep {
            pod_has_objects = true;
        } else {
            plan.sandboxes.push(sandbox.id.clone());
        }
    }
    if !pod_has_objects && want == Wanted::Forget {
        plan.forgotten.push(pod.uid.clone());
    }
}

#[cfg(test)]
mod tests;
