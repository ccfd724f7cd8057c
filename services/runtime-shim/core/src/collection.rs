//! Which dead containers and sandboxes to remove (pod-lifecycle.md §9.12, runtime-and-resources.md §7.3).

use std::collections::{BTreeMap, BTreeSet};

/// What pod-sync wants of a pod, as far as collection cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// The pod is desired or still ending: the newest dead container of each name is kept.
    Keep,
    /// The pod has ended for good, its last status is known, and the pod itself is still there: as [`Self::Keep`],
    /// except that nothing of it is kept from an order.
    Ended,
    /// Nothing of the pod is to remain.
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
    /// Whether a process may exist: running or of unknown state.
    pub alive: bool,
    /// Created and not started: a start may be on its way.
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
/// `--maximum-dead-containers`). They are for containers of pods that are wanted; of other pods nothing is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Nanoseconds for which a container stays after it was made.
    pub minimum_age: i64,
    /// Of each name in a pod; `None`: all.
    pub per_container: Option<usize>,
    /// In all; `None`: any number.
    pub total: Option<usize>,
    /// Under an order to make room: the newest of each name whatever stands above, and nothing of pods that have ended.
    pub order: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self { minimum_age: 0, per_container: Some(1), total: None, order: false }
    }
}

impl Limits {
    /// Whether a container is too young to go.
    const fn spares(&self, container: &ListedContainer, now: i64) -> bool {
        !self.order && now.saturating_sub(container.created_unix_nanos) < self.minimum_age
    }

    /// How many of each name are kept: at least the newest, which restarts are decided by.
    fn of_each_name(&self) -> usize {
        if self.order { 1 } else { self.per_container.map_or(usize::MAX, |kept| kept.max(1)) }
    }
}

/// What to remove, in this order: containers, then sandboxes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Collection {
    /// Container ids.
    pub containers: Vec<String>,
    /// Sandbox ids; each is stopped before it is removed.
    pub sandboxes: Vec<String>,
    /// UIDs of which nothing is left once the above is gone: their log folders go too.
    pub forgotten: Vec<String>,
}

impl Collection {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.containers.is_empty() && self.sandboxes.is_empty() && self.forgotten.is_empty()
    }
}

/// Decides what to remove.
///
/// `wanted` is the set that pod-sync has sent; `complete` says that it is a whole set with every source of
/// pods ready, and only then a pod that it does not name counts as [`Wanted::Forget`]. Nothing alive is ever
/// removed: to end processes is pod-sync's decision. `now` is in unix nanoseconds.
///
/// Parity: the kubelet's maximum numbers may take the last dead container of a name, too, so that it does not know any
/// more whether to restart it; here the newest one stays as long as its pod is wanted. See `docs/parity.md`, L9.12.
pub fn plan_collection(
    pods: &[ListedPod],
    wanted: &BTreeMap<String, Wanted>,
    complete: bool,
    limits: &Limits,
    now: i64,
) -> Collection {
    let want_of = |pod: &ListedPod| match wanted.get(&pod.uid) {
        Some(want) => *want,
        None if complete => Wanted::Forget,
        None => Wanted::Keep,
    };
    let mut gone: BTreeSet<&str> = BTreeSet::new();
    for pod in pods {
        gone.extend(dead_beyond(pod, want_of(pod), limits, now));
    }
    gone.extend(beyond_total(pods, &gone, limits, now));
    let mut plan = Collection::default();
    for pod in pods {
        collect_pod(pod, want_of(pod), &gone, limits, &mut plan);
    }
    plan
}

/// A pod's containers, newest first.
fn newest_first(pod: &ListedPod) -> Vec<&ListedContainer> {
    let mut by_age: Vec<&ListedContainer> = pod.containers.iter().collect();
    by_age.sort_by(|a, b| b.created_unix_nanos.cmp(&a.created_unix_nanos).then_with(|| b.id.cmp(&a.id)));
    by_age
}

/// The containers of one pod that go for the pod's own sake, newest first.
fn dead_beyond<'a>(pod: &'a ListedPod, want: Wanted, limits: &Limits, now: i64) -> Vec<&'a str> {
    let nothing_kept = want == Wanted::Forget || (want == Wanted::Ended && limits.order);
    let mut kept: BTreeMap<&str, usize> = BTreeMap::new();
    let mut keeps = |container: &ListedContainer, name: &'a str| {
        if container.alive || nothing_kept || container.pending {
            return container.alive || !nothing_kept;
        }
        let count = kept.entry(name).or_default();
        *count += 1;
        *count <= limits.of_each_name() || limits.spares(container, now)
    };
    let going = newest_first(pod).into_iter().filter(|container| !keeps(container, &container.name));
    going.map(|container| container.id.as_str()).collect()
}

/// What goes besides because there are too many in all: an equal share of each name is kept, then the oldest go; the
/// newest of a name never.
fn beyond_total<'a>(pods: &'a [ListedPod], gone: &BTreeSet<&str>, limits: &Limits, now: i64) -> Vec<&'a str> {
    let Some(total) = limits.total.filter(|_| !limits.order) else { return Vec::new() };
    let mut groups: BTreeMap<(&str, &str), Vec<&ListedContainer>> = BTreeMap::new();
    for pod in pods {
        let dead = |c: &&ListedContainer| !c.alive && !c.pending && !gone.contains(c.id.as_str());
        for container in newest_first(pod).into_iter().filter(dead) {
            groups.entry((&pod.uid, &container.name)).or_default().push(container);
        }
    }
    let count: usize = groups.values().map(Vec::len).sum();
    let share = (total / groups.len().max(1)).max(1);
    // Of each name what is beyond its share, then of what is left the oldest: both without the newest.
    let (mut beyond, mut within) = (Vec::new(), Vec::new());
    for group in groups.values() {
        let spare = group.iter().skip(1).filter(|c| !limits.spares(c, now));
        within.extend(spare.clone().take(share - 1).copied());
        beyond.extend(spare.skip(share - 1).copied());
    }
    for list in [&mut beyond, &mut within] {
        list.sort_by(|a, b| a.created_unix_nanos.cmp(&b.created_unix_nanos).then_with(|| a.id.cmp(&b.id)));
    }
    let surplus = count.saturating_sub(total);
    beyond.into_iter().chain(within).take(surplus).map(|container| container.id.as_str()).collect()
}

fn collect_pod(pod: &ListedPod, want: Wanted, gone: &BTreeSet<&str>, limits: &Limits, plan: &mut Collection) {
    let mut occupied = BTreeSet::new();
    for container in newest_first(pod) {
        if gone.contains(container.id.as_str()) {
            plan.containers.push(container.id.clone());
        } else {
            occupied.insert(container.sandbox_id.as_str());
        }
    }
    let keeps_newest = want == Wanted::Keep || (want == Wanted::Ended && !limits.order);
    let newest =
        pod.sandboxes.iter().max_by_key(|s| (s.attempt, s.created_unix_nanos)).map(|s| s.id.as_str());
    let mut left = !occupied.is_empty();
    for sandbox in &pod.sandboxes {
        let keep = sandbox.ready
            || occupied.contains(sandbox.id.as_str())
            || (keeps_newest && newest == Some(sandbox.id.as_str()));
        if keep {
            left = true;
        } else {
            plan.sandboxes.push(sandbox.id.clone());
        }
    }
    if !left && want == Wanted::Forget {
        plan.forgotten.push(pod.uid.clone());
    }
}

#[cfg(test)]
mod tests;
