//! What the observer remembers about pods besides their last state.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use keelson_proto::keelson::runtime::v1 as pb;
use tokio::sync::Notify;

/// How long the disappearance of a pod is remembered: no read takes longer.
const GONE_RETENTION_NANOS: i64 = 120 * 1_000_000_000;

#[derive(Debug, Default)]
pub(super) struct Index {
    /// Owners by container or sandbox id.
    owner: HashMap<String, Owner>,
    /// When the last published read of each pod began, nanoseconds since the boot. Pods that no longer exist are kept
    /// for a short time.
    pub(super) observed: HashMap<String, i64>,
    /// Pods that are being read because of a hint, and whether another hint has arrived meanwhile.
    pub(super) refreshing: HashMap<String, bool>,
    /// Pods with an exit event that the runtime's state does not show yet.
    pub(super) settling: HashMap<String, Settling>,
    /// Pods that the runtime lists but cannot describe, with the runtime's error.
    pub(super) unreadable: HashMap<String, String>,
}

/// The pod that an id belongs to.
#[derive(Debug)]
struct Owner {
    /// The pod's UID, shared by the ids that one read has found.
    uid: Arc<str>,
    /// When the owner was recorded, or when the read that shows it began, nanoseconds since the boot. Older reads do not
    /// count.
    since: i64,
    /// The id is a container whose resources were updated: its status changes without its state.
    is_updated: bool,
}

#[derive(Debug, Default)]
pub(super) struct Settling {
    /// Containers and sandboxes that have exited.
    pub(super) ids: HashSet<String>,
    /// Notified of a further exit.
    pub(super) more_exits: Arc<Notify>,
}

impl Index {
    /// The pod that a container or sandbox id belongs to.
    pub(super) fn owner_of(&self, id: &str) -> Option<&str> {
        self.owner.get(id).map(|owner| &*owner.uid)
    }

    /// Records which pod a new sandbox or container belongs to.
    pub(super) fn record_owner(&mut self, id: &str, uid: &str, since: i64) {
        self.owner.insert(id.to_owned(), Owner { uid: uid.into(), since, is_updated: false });
    }

    /// The resources of a container are being updated: from now on each read of its pod reads its status.
    pub(super) fn record_update(&mut self, id: &str) {
        if let Some(owner) = self.owner.get_mut(id) {
            owner.is_updated = true;
        }
    }

    /// Whether the resources of a container were updated.
    pub(super) fn is_updated(&self, id: &str) -> bool {
        self.owner.get(id).is_some_and(|owner| owner.is_updated)
    }

    /// Updates the owners from a read of a pod. Owners that were recorded after the read began are kept.
    pub(super) fn update_owners(&mut self, pod: &pb::RuntimePod) {
        let (uid, began): (Arc<str>, i64) = (pod.uid.as_str().into(), pod.observed_boot_nanos);
        let ids = || pod.sandboxes.iter().map(|s| &s.id).chain(pod.containers.iter().map(|c| &c.id));
        self.owner.retain(|id, owner| owner.uid != uid || owner.since > began || ids().any(|i| i == id));
        for id in ids() {
            let owner = || Owner { uid: Arc::clone(&uid), since: began, is_updated: false };
            self.owner.entry(id.clone()).or_insert_with(owner);
        }
    }

    /// Forgets what belongs to pods that are neither `listed` nor `known` by a list requested at `began`, unless it is
    /// recent.
    pub(super) fn drop_unlisted(&mut self, listed: &HashSet<String>, known: &HashSet<String>, began: i64) {
        let recent = |since: i64| since > began - GONE_RETENTION_NANOS;
        self.unreadable.retain(|uid, _| listed.contains(uid));
        self.observed.retain(|uid, since| known.contains(uid) || recent(*since));
        self.owner.retain(|_, owner| known.contains(&*owner.uid) || recent(owner.since));
    }
}
