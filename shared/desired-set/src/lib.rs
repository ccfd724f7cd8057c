//! The set of desired pods from the latest `Sync` stream, and the parts of a desire that every callee receives.

mod pod;

use std::collections::BTreeMap;

pub use pod::{Desire, DesireHeader, PodRef, Want};

/// Identifies a `Sync` stream; a later stream has a greater id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StreamId(u64);

/// The desired pods. Entries outlive their stream; only the latest stream may change them.
#[derive(Debug)]
pub struct DesiredSet<D> {
    latest: StreamId,
    may_sweep: bool,
    entries: BTreeMap<String, Entry<D>>,
}

#[derive(Debug)]
struct Entry<D> {
    desire: D,
    stream: StreamId,
}

impl<D> Default for DesiredSet<D> {
    fn default() -> Self {
        Self { latest: StreamId(0), may_sweep: false, entries: BTreeMap::new() }
    }
}

impl<D> DesiredSet<D> {
    /// Opens a new stream, which starts a new set. Earlier streams are ignored from now on.
    pub fn open(&mut self) -> StreamId {
        self.latest = StreamId(self.latest.0 + 1);
        self.may_sweep = false;
        self.latest
    }

    /// Whether `stream` is the latest one.
    pub fn is_latest(&self, stream: StreamId) -> bool {
        stream == self.latest
    }

    /// Inserts a pod. False when a later stream has taken over.
    pub fn insert(&mut self, stream: StreamId, uid: &str, desire: D) -> bool {
        if !self.is_latest(stream) {
            return false;
        }
        self.entries.insert(uid.to_owned(), Entry { desire, stream });
        true
    }

    /// Removes `uid`, which the sender no longer knows. True when the pod must be swept now. Before a complete set with
    /// all sources ready the pod only leaves the set, and [`Self::complete`] decides.
    pub fn remove(&mut self, stream: StreamId, uid: &str) -> bool {
        if !self.is_latest(stream) {
            return false;
        }
        if self.may_sweep {
            self.entries.remove(uid);
        } else if let Some(entry) = self.entries.get_mut(uid) {
            entry.stream = StreamId(0);
        }
        self.may_sweep
    }

    /// Marks the set of `stream` as complete. Returns the pods of `held` (found on the node) that it does not contain:
    /// they must be swept. Empty unless every source of pods has reported.
    pub fn complete<'a>(
        &mut self,
        stream: StreamId,
        sources_ready: bool,
        held: impl Iterator<Item = &'a str>,
    ) -> Vec<String> {
        if !self.is_latest(stream) || !sources_ready {
            return Vec::new();
        }
        self.may_sweep = true;
        let latest = self.latest;
        self.entries.retain(|_, entry| entry.stream == latest);
        held.filter(|uid| !self.entries.contains_key(*uid)).map(ToOwned::to_owned).collect()
    }

    /// Whether a newly found pod must be swept: the set is complete and does not contain it.
    pub fn must_sweep(&self, uid: &str) -> bool {
        self.may_sweep && !self.entries.contains_key(uid)
    }

    /// The desire for a pod, from any stream.
    pub fn get(&self, uid: &str) -> Option<&D> {
        self.entries.get(uid).map(|entry| &entry.desire)
    }

    /// The number of desired pods.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no pod is desired.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    fn held() -> impl Iterator<Item = &'static str> {
        ["a", "b", "c"].into_iter()
    }

    #[test]
    fn complete_set_with_ready_sources_removes_missing_pods() {
        let mut set = DesiredSet::default();
        let stream = set.open();
        assert!(set.insert(stream, "a", 1));
        assert_eq!(set.complete(stream, true, held()), ["b", "c"]);
        assert!(set.must_sweep("b") && !set.must_sweep("a"));
    }

    #[test]
    fn no_pod_is_removed_before_every_source_has_reported() {
        let mut set = DesiredSet::<u8>::default();
        let stream = set.open();
        assert!(set.complete(stream, false, held()).is_empty());
        assert!(!set.remove(stream, "a"));
        assert_eq!(set.complete(stream, true, held()), ["a", "b", "c"]);
    }

    #[test]
    fn desire_outlives_its_stream_until_a_new_set_is_complete() {
        let mut set = DesiredSet::default();
        let first = set.open();
        set.insert(first, "a", 1);
        let second = set.open();
        assert_eq!(set.get("a"), Some(&1));
        assert_eq!(set.complete(second, true, ["a"].into_iter()), ["a"]);
        assert_eq!(set.get("a"), None);
    }

    #[test]
    fn an_older_stream_is_ignored() {
        let mut set = DesiredSet::default();
        let old = set.open();
        let new = set.open();
        assert!(!set.insert(old, "a", 1));
        assert!(!set.remove(old, "a"));
        assert!(set.complete(old, true, held()).is_empty());
        assert!(set.insert(new, "a", 2));
        assert_eq!(set.get("a"), Some(&2));
    }

    #[test]
    fn pod_removed_after_a_complete_set_is_removed_at_once() {
        let mut set = DesiredSet::default();
        let stream = set.open();
        set.insert(stream, "a", 1);
        set.insert(stream, "b", 2);
        set.complete(stream, true, std::iter::empty());
        assert_eq!((set.is_empty(), set.len()), (false, 2));
        assert!(set.remove(stream, "b"));
        assert!(set.remove(stream, "a"));
        assert_eq!((set.is_empty(), set.len()), (true, 0));
    }

    /// For any earlier history, a pod in the latest set is never swept by it.
    #[test]
    fn pod_in_the_latest_set_is_never_removed() {
        let reached = &Reached::default();
        let before = prop::collection::vec((0u8..4, 0u8..6), 0..24);
        let named = prop::collection::btree_set(0u8..6, 0..6);
        proptest!(ProptestConfig::with_cases(512), |(before in before, named in named)| {
            let mut set = DesiredSet::default();
            let mut stream = set.open();
            let mut complete = false;
            for (act, pod) in before {
                match act {
                    0 => (stream, complete) = (set.open(), false),
                    1 => { set.insert(stream, &pod.to_string(), ()); }
                    2 => { set.remove(stream, &pod.to_string()); }
                    _ => {
                        set.complete(stream, pod % 2 == 0, std::iter::empty());
                        complete = pod % 2 == 0;
                    }
                }
            }
            let held: Vec<bool> = (0u8..6).map(|pod| set.get(&pod.to_string()).is_some()).collect();
            let stream = set.open();
            for pod in &named {
                set.insert(stream, &pod.to_string(), ());
            }
            let all: Vec<String> = (0u8..6).map(|p| p.to_string()).collect();
            let swept = set.complete(stream, true, all.iter().map(String::as_str));
            for pod in 0u8..6 {
                prop_assert_eq!(swept.contains(&pod.to_string()), !named.contains(&pod));
            }
            let met = |held_before: bool, named_now: bool| {
                (0u8..6).any(|pod| held[usize::from(pod)] == held_before && named.contains(&pod) == named_now)
            };
            reached.case([
                ("a pod is desired again", met(true, true)),
                ("a pod is newly desired", met(false, true)),
                ("a pod is dropped", met(true, false)),
                ("the set is empty", named.is_empty()),
                ("after a complete set", complete),
                ("after one that was cut off", !complete),
            ]);
        });
        // The rarest: "the set is empty", in one case of 6.
        reached.assert_each();
    }
}
