//! Which static pod of a full name may start (§6.3).

use std::collections::{BTreeMap, VecDeque};

use keelson_kube_model::{PodFullName, PodUid};

/// Who of each full name has started, and who waits in the order of arrival. Pods of the API server are not in it:
/// they start at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StartBook {
    started: BTreeMap<PodFullName, PodUid>,
    waiting: BTreeMap<PodFullName, VecDeque<PodUid>>,
}

impl StartBook {
    /// The UID that keeps others of this name from starting.
    pub fn holder(&self, full_name: &PodFullName) -> Option<&PodUid> {
        self.started.get(full_name)
    }

    /// A worker has terminated or was forgotten: its name is free again, and it waits for nothing any more.
    ///
    /// Returns the UID that is next in the queue of a name, to be woken.
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

    /// A UID is gone for good: every name that it holds is free and it waits for none. Returns who is next for each
    /// name that became free, to be woken.
    pub fn release_all(&mut self, uid: &PodUid) -> Vec<PodUid> {
        let held = self.started.iter().filter(|(_, holder)| *holder == uid).map(|(name, _)| name.clone());
        let waited =
            self.waiting.iter().filter(|(_, queue)| queue.contains(uid)).map(|(name, _)| name.clone());
        let names: Vec<PodFullName> = held.chain(waited).collect();
        names.iter().filter_map(|name| self.release(name, uid)).collect()
    }

    /// A static pod that was found running at the start of the service holds its name without queueing. The first
    /// one adopted wins; false says that another UID holds the name already.
    pub fn adopt(&mut self, full_name: &PodFullName, uid: &PodUid) -> bool {
        self.started.entry(full_name.clone()).or_insert_with(|| uid.clone()) == uid
    }
}

/// May this static pod start now? At most one started UID per full name; the others start in the order in which they
/// first asked. Whoever is told no has a place in the queue.
pub fn may_start(full_name: &PodFullName, uid: &PodUid, book: &mut StartBook) -> bool {
    if let Some(holder) = book.started.get(full_name)
        && holder == uid
    {
        return true;
    }
    let queue = book.waiting.entry(full_name.clone()).or_default();
    if !queue.contains(uid) {
        queue.push_back(uid.clone());
    }
    if book.started.contains_key(full_name) || queue.front() != Some(uid) {
        return false;
    }
    queue.pop_front();
    if queue.is_empty() {
        book.waiting.remove(full_name);
    }
    book.started.insert(full_name.clone(), uid.clone());
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
    fn one_uid_per_full_name_is_started() {
        let mut book = StartBook::default();
        assert!(may_start(&name(), &uid("a"), &mut book));
        assert!(may_start(&name(), &uid("a"), &mut book), "asking again changes nothing");
        assert!(!may_start(&name(), &uid("b"), &mut book));
        assert!(may_start(&PodFullName::new("web", "other"), &uid("c"), &mut book));
    }

    #[test]
    fn waiters_start_in_the_order_of_arrival() {
        let mut book = StartBook::default();
        assert!(may_start(&name(), &uid("a"), &mut book));
        assert!(!may_start(&name(), &uid("b"), &mut book));
        assert!(!may_start(&name(), &uid("c"), &mut book));
        assert_eq!(book.release(&name(), &uid("a")), Some(uid("b")));
        assert!(!may_start(&name(), &uid("c"), &mut book), "b came first");
        assert!(may_start(&name(), &uid("b"), &mut book));
        assert_eq!(book.release(&name(), &uid("b")), Some(uid("c")));
        assert!(may_start(&name(), &uid("c"), &mut book));
    }

    #[test]
    fn a_waiter_that_terminated_is_skipped() {
        let mut book = StartBook::default();
        assert!(may_start(&name(), &uid("a"), &mut book));
        assert!(!may_start(&name(), &uid("b"), &mut book));
        assert!(!may_start(&name(), &uid("c"), &mut book));
        assert_eq!(book.release(&name(), &uid("b")), None, "a still holds the name");
        assert_eq!(book.release(&name(), &uid("a")), Some(uid("c")));
        assert!(may_start(&name(), &uid("c"), &mut book));
        assert_eq!(book.release(&name(), &uid("c")), None);
        assert_eq!(book, StartBook::default(), "nothing is left behind");
    }

    #[test]
    fn a_uid_that_is_gone_frees_every_name_that_it_held() {
        let mut book = StartBook::default();
        let other = PodFullName::new("other", "shop");
        assert!(may_start(&name(), &uid("a"), &mut book));
        assert!(may_start(&other, &uid("a"), &mut book));
        assert!(!may_start(&other, &uid("b"), &mut book));
        assert_eq!(book.release_all(&uid("a")), [uid("b")]);
        assert!(may_start(&name(), &uid("c"), &mut book));
    }

    #[test]
    fn a_pod_that_was_found_running_holds_its_name() {
        let mut book = StartBook::default();
        assert!(book.adopt(&name(), &uid("old")));
        assert!(!book.adopt(&name(), &uid("other")));
        assert!(!may_start(&name(), &uid("new"), &mut book));
        assert_eq!(book.holder(&name()), Some(&uid("old")));
    }
}
