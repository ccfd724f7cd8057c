//! Which static pod of a full name may start (§6.3).

use std::collections::{BTreeMap, VecDeque};

use keelson_kube_model::{PodFullName, PodUid};

/// Per full name: the UID that has started, and the UIDs that wait, in order of arrival. API pods are not in it: they start
/// at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StaticPodStarts {
    started: BTreeMap<PodFullName, PodUid>,
    waiting: BTreeMap<PodFullName, VecDeque<PodUid>>,
}

impl StaticPodStarts {
    /// The UID that has started under this name; others of the name wait.
    pub fn holder(&self, full_name: &PodFullName) -> Option<&PodUid> {
        self.started.get(full_name)
    }

    /// Frees the name of a worker that has terminated or was forgotten, and removes it from the queue.
    ///
    /// Returns the UID that is next in the queue of the name, to be woken.
    pub fn release(&mut self, full_name: &PodFullName, uid: &PodUid) -> Option<PodUid> {
        if let Some(queue) = self.waiting.get_mut(full_name) {
            queue.retain(|waiter| waiter != uid);
            if queue.is_empty() {
                self.waiting.remove(full_name);
            }
        }
        if self.started.get(full_name) == Some(uid) {
            self.started.remove(full_name);
        }
        if self.started.contains_key(full_name) {
            return None;
        }
        self.waiting.get(full_name).and_then(VecDeque::front).cloned()
    }

    /// Frees every name of a UID and removes it from every queue. Returns the next UID of each freed name, to be woken.
    pub fn release_all(&mut self, uid: &PodUid) -> Vec<PodUid> {
        let held = self.started.iter().filter(|(_, holder)| *holder == uid).map(|(name, _)| name.clone());
        let waited =
            self.waiting.iter().filter(|(_, queue)| queue.contains(uid)).map(|(name, _)| name.clone());
        let names: Vec<PodFullName> = held.chain(waited).collect();
        names.iter().filter_map(|name| self.release(name, uid)).collect()
    }

    /// Gives the name to a static pod that was found running when the service started, without queueing. The first one
    /// adopted wins; returns false if another UID has the name already.
    pub fn adopt(&mut self, full_name: &PodFullName, uid: &PodUid) -> bool {
        self.started.entry(full_name.clone()).or_insert_with(|| uid.clone()) == uid
    }
}

/// Whether this static pod may start now. At most one UID per full name is started; the others queue in the order in which
/// they first asked.
pub fn may_start(full_name: &PodFullName, uid: &PodUid, starts: &mut StaticPodStarts) -> bool {
    if let Some(holder) = starts.started.get(full_name)
        && holder == uid
    {
        return true;
    }
    let queue = starts.waiting.entry(full_name.clone()).or_default();
    if !queue.contains(uid) {
        queue.push_back(uid.clone());
    }
    if starts.started.contains_key(full_name) || queue.front() != Some(uid) {
        return false;
    }
    queue.pop_front();
    if queue.is_empty() {
        starts.waiting.remove(full_name);
    }
    starts.started.insert(full_name.clone(), uid.clone());
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> PodFullName {
        PodFullName::new("web", "shop")
    }

    fn uid(text: &str) -> PodUid {
        PodUid::from(text)
    }

    #[test]
    fn one_uid_per_full_name_starts() {
        let mut starts = StaticPodStarts::default();
        assert!(may_start(&name(), &uid("a"), &mut starts));
        assert!(may_start(&name(), &uid("a"), &mut starts), "asking again changes nothing");
        assert!(!may_start(&name(), &uid("b"), &mut starts));
        assert!(may_start(&PodFullName::new("web", "other"), &uid("c"), &mut starts));
    }

    #[test]
    fn waiting_static_pods_start_in_order_of_arrival() {
        let mut starts = StaticPodStarts::default();
        assert!(may_start(&name(), &uid("a"), &mut starts));
        assert!(!may_start(&name(), &uid("b"), &mut starts));
        assert!(!may_start(&name(), &uid("c"), &mut starts));
        assert_eq!(starts.release(&name(), &uid("a")), Some(uid("b")));
        assert!(!may_start(&name(), &uid("c"), &mut starts), "b came first");
        assert!(may_start(&name(), &uid("b"), &mut starts));
        assert_eq!(starts.release(&name(), &uid("b")), Some(uid("c")));
        assert!(may_start(&name(), &uid("c"), &mut starts));
    }

    #[test]
    fn a_waiting_static_pod_that_terminated_is_skipped() {
        let mut starts = StaticPodStarts::default();
        assert!(may_start(&name(), &uid("a"), &mut starts));
        assert!(!may_start(&name(), &uid("b"), &mut starts));
        assert!(!may_start(&name(), &uid("c"), &mut starts));
        assert_eq!(starts.release(&name(), &uid("b")), None, "a still holds the name");
        assert_eq!(starts.release(&name(), &uid("a")), Some(uid("c")));
        assert!(may_start(&name(), &uid("c"), &mut starts));
        assert_eq!(starts.release(&name(), &uid("c")), None);
        assert_eq!(starts, StaticPodStarts::default(), "nothing is left behind");
    }

    #[test]
    fn a_removed_uid_frees_every_full_name() {
        let mut starts = StaticPodStarts::default();
        let other = PodFullName::new("other", "shop");
        assert!(may_start(&name(), &uid("a"), &mut starts));
        assert!(may_start(&other, &uid("a"), &mut starts));
        assert!(!may_start(&other, &uid("b"), &mut starts));
        assert_eq!(starts.release_all(&uid("a")), [uid("b")]);
        assert!(may_start(&name(), &uid("c"), &mut starts));
    }

    #[test]
    fn an_adopted_static_pod_holds_its_full_name() {
        let mut starts = StaticPodStarts::default();
        assert!(starts.adopt(&name(), &uid("old")));
        assert!(!starts.adopt(&name(), &uid("other")));
        assert!(!may_start(&name(), &uid("new"), &mut starts));
        assert_eq!(starts.holder(&name()), Some(&uid("old")));
    }
}
