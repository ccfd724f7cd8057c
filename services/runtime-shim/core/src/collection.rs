//! Which dead containers and sandboxes to remove (pod-lifecycle.md §9.12, runtime-and-resources.md §7.3).

use std::collections::{BTreeMap, BTreeSet};

/// What pod-sync wants of a pod, as far as collection cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// The pod is desired or still ending: the newest dead container of each name is kept.
    Keep,
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
/// removed: to end processes is pod-sync's decision.
pub fn plan_collection(pods: &[ListedPod], wanted: &BTreeMap<String, Wanted>, complete: bool) -> Collection {
    let mut plan = Collection::default();
    for pod in pods {
        let want = match wanted.get(&pod.uid) {
            Some(want) => *want,
            None if complete => Wanted::Forget,
            None => Wanted::Keep,
        };
        collect_pod(pod, want, &mut plan);
    }
    plan
}

fn collect_pod(pod: &ListedPod, want: Wanted, plan: &mut Collection) {
    let mut by_age: Vec<&ListedContainer> = pod.containers.iter().collect();
    by_age.sort_by(|a, b| b.created_unix_nanos.cmp(&a.created_unix_nanos).then_with(|| b.id.cmp(&a.id)));
    let mut kept_dead = BTreeSet::new();
    let mut occupied = BTreeSet::new();
    for container in by_age {
        let wanted = want == Wanted::Keep;
        let keep =
            container.alive || (wanted && (container.pending || kept_dead.insert(container.name.as_str())));
        if keep {
            occupied.insert(container.sandbox_id.as_str());
        } else {
            plan.containers.push(container.id.clone());
        }
    }
    let newest =
        pod.sandboxes.iter().max_by_key(|s| (s.attempt, s.created_unix_nanos)).map(|s| s.id.as_str());
    let mut left = !occupied.is_empty();
    for sandbox in &pod.sandboxes {
        let keep = sandbox.ready
            || occupied.contains(sandbox.id.as_str())
            || (want == Wanted::Keep && newest == Some(sandbox.id.as_str()));
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
mod tests {
    use super::*;

    fn container(id: &str, name: &str, alive: bool, created: i64) -> ListedContainer {
        ListedContainer {
            id: id.into(),
            name: name.into(),
            sandbox_id: "s".into(),
            alive,
            pending: false,
            created_unix_nanos: created,
        }
    }

    fn pod(containers: Vec<ListedContainer>, ready: bool) -> ListedPod {
        ListedPod {
            uid: "u".into(),
            containers,
            sandboxes: vec![ListedSandbox { id: "s".into(), ready, attempt: 0, created_unix_nanos: 0 }],
        }
    }

    fn wants(want: Wanted) -> BTreeMap<String, Wanted> {
        BTreeMap::from([("u".to_owned(), want)])
    }

    #[test]
    fn keeps_the_newest_dead_container_of_each_name_while_the_pod_is_wanted() {
        let pod = pod(
            vec![
                container("a1", "a", false, 1),
                container("a2", "a", false, 2),
                container("a3", "a", true, 3),
                container("b1", "b", false, 1),
            ],
            true,
        );
        let plan = plan_collection(&[pod], &wants(Wanted::Keep), true);
        assert_eq!(plan.containers, ["a1"]);
        assert!(plan.sandboxes.is_empty());
    }

    #[test]
    fn removes_everything_dead_of_a_forgotten_pod() {
        let pod = pod(vec![container("a1", "a", false, 1)], false);
        let plan = plan_collection(&[pod], &wants(Wanted::Forget), false);
        assert_eq!((plan.containers.len(), plan.sandboxes.len()), (1, 1));
        assert_eq!(plan.forgotten, ["u"]);
    }

    #[test]
    fn never_removes_what_is_alive_even_of_a_forgotten_pod() {
        let pod = pod(vec![container("a1", "a", true, 1)], true);
        assert!(plan_collection(&[pod], &wants(Wanted::Forget), true).is_empty());
    }

    #[test]
    fn a_container_that_is_about_to_start_stays_unless_the_pod_is_forgotten() {
        let pending = ListedContainer { pending: true, ..container("a1", "a", false, 1) };
        let pod = pod(vec![pending], false);
        let plan = plan_collection(std::slice::from_ref(&pod), &wants(Wanted::Keep), true);
        assert!(plan.containers.is_empty());
        assert_eq!(plan_collection(&[pod], &wants(Wanted::Forget), true).containers, ["a1"]);
    }

    #[test]
    fn an_unknown_pod_is_swept_only_once_the_set_is_complete() {
        let pod = pod(vec![container("a1", "a", false, 1)], false);
        assert!(plan_collection(std::slice::from_ref(&pod), &BTreeMap::new(), false).is_empty());
        assert_eq!(plan_collection(&[pod], &BTreeMap::new(), true).forgotten, ["u"]);
    }

    #[test]
    fn an_older_sandbox_without_containers_goes_while_the_newest_stays() {
        let mut pod = pod(vec![], false);
        pod.sandboxes.push(ListedSandbox {
            id: "s1".into(),
            ready: false,
            attempt: 1,
            created_unix_nanos: 5,
        });
        let plan = plan_collection(&[pod], &wants(Wanted::Keep), true);
        assert_eq!(plan.sandboxes, ["s"]);
    }

    #[test]
    fn a_sandbox_goes_after_its_containers_and_not_before() {
        // A live container in a sandbox that is not ready: a pod whose pause process has died.
        let orphaned = pod(vec![container("a1", "a", true, 1)], false);
        assert!(plan_collection(&[orphaned], &wants(Wanted::Forget), true).is_empty());
        let ready = pod(vec![], true);
        assert!(plan_collection(&[ready], &wants(Wanted::Forget), true).is_empty());
    }

    #[test]
    fn nothing_to_do_means_none_of_the_three() {
        assert!(Collection::default().is_empty());
        let one = || vec!["x".to_owned()];
        for some in [
            Collection { containers: one(), ..Collection::default() },
            Collection { sandboxes: one(), ..Collection::default() },
            Collection { forgotten: one(), ..Collection::default() },
        ] {
            assert!(!some.is_empty(), "{some:?}");
        }
    }
}
