//! Static pods that keep the UID under which a kubelet has started them, although their source gives them another one (docs/adr/0022).

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The UIDs that pods have here, by the UIDs of their sources. Each is stored in the record of its pod.
#[derive(Debug, Default)]
pub struct AdoptedUids(Mutex<BTreeMap<String, String>>);

impl AdoptedUids {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The UID of the pod that its source sends with this one, if it is another.
    pub fn of_source(&self, source_uid: &str) -> Option<String> {
        self.lock().get(source_uid).cloned()
    }

    /// The UID with which the source sends this pod, if it is another.
    pub fn source_of(&self, uid: &str) -> Option<String> {
        self.lock().iter().find(|(_, own)| *own == uid).map(|(source_uid, _)| source_uid.clone())
    }

    /// A pod has this UID from now on.
    pub fn insert(&self, source_uid: String, uid: String) {
        self.lock().insert(source_uid, uid);
    }

    /// The source no longer sends this UID. Returns the UID of the pod here, if it is another.
    pub fn remove(&self, source_uid: &str) -> Option<String> {
        self.lock().remove(source_uid)
    }

    /// Removes the UIDs of all pods for which `is_sent` is false.
    pub fn retain(&self, is_sent: impl Fn(&str) -> bool) {
        self.lock().retain(|_, uid| is_sent(uid));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adopted_uids_are_found_in_both_directions_until_their_source_drops_them() {
        let uids = AdoptedUids::default();
        uids.insert("source".into(), "kubelet".into());
        uids.insert("other".into(), "old".into());
        assert_eq!(uids.of_source("source").as_deref(), Some("kubelet"));
        assert_eq!((uids.source_of("kubelet").as_deref(), uids.source_of("source")), (Some("source"), None));
        assert_eq!((uids.remove("source").as_deref(), uids.remove("source")), (Some("kubelet"), None));
        uids.retain(|uid| uid != "old");
        assert_eq!(uids.of_source("other"), None);
    }
}
