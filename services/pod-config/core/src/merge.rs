//! Merges the desired pods of all sources and computes the changes (pod-lifecycle.md §2.5).
//!
//! Each source passes its complete set; additions, changes and removals are found by UID.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use keelson_kube_model::PodFullName;

use crate::desired_pod::DesiredPod;
use crate::sent_record::{SentRecord, digest};

/// The kind of a change. Changes of one set are sent in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Op {
    /// The UID is no longer in its source.
    Remove,
    /// The UID is new.
    Add,
    /// Spec, labels or annotations have changed.
    Update,
    /// Deletion was requested.
    Delete,
    /// Only the status has changed.
    Reconcile,
}

/// One change of the desired pods.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// The kind of the change.
    pub op: Op,
    /// The pod after the change, as its source has passed it; for [`Op::Remove`] the pod before.
    pub pod: Arc<DesiredPod>,
    /// The version that is sent now, without a trace context. For [`Op::Remove`] its digest is 0.
    pub sent: SentRecord,
    /// The trace context with which the service sent exactly this version before its restart.
    pub restored_traceparent: Option<String>,
}

/// Why a pod of a set was rejected.
#[derive(Debug, Clone, PartialEq)]
pub struct MergeError {
    /// The rejected pod.
    pub pod: Arc<DesiredPod>,
    /// The reason, for people.
    pub message: String,
}

/// The outcome of [`Merge::set`].
#[derive(Debug, Default, PartialEq)]
pub struct Outcome {
    /// The changes in the order in which to send them.
    pub changes: Vec<Change>,
    /// Pods that were rejected.
    pub errors: Vec<MergeError>,
    /// Whether this was the first set of the source, so that the source is ready now.
    pub first: bool,
}

/// The desired pods of all sources.
#[derive(Debug, Default)]
pub struct Merge {
    sources: BTreeMap<String, BTreeMap<String, KnownPod>>,
    /// By UID, the records of the run before the restart that have not been matched with a pod yet.
    restored: BTreeMap<String, SentRecord>,
}

/// The last version of a pod that its source has passed.
#[derive(Debug)]
struct KnownPod {
    pod: Arc<DesiredPod>,
    revision: u64,
    seen_unix_nanos: i64,
}

impl Merge {
    /// A merge without pods; `restored` are the records of the run before the restart, by UID.
    pub fn restore(restored: BTreeMap<String, SentRecord>) -> Self {
        Self { sources: BTreeMap::new(), restored }
    }

    /// Drops the restored records once all sources have been read: UIDs that appear later are new.
    pub fn forget_restored(&mut self) {
        self.restored.clear();
    }

    /// Whether any source has a pod with this UID.
    pub fn contains(&self, uid: &str) -> bool {
        self.sources.values().any(|pods| pods.contains_key(uid))
    }

    /// Replaces the set of `source` as of `now` (nanoseconds since 1970) and returns the changes. A pod that is the same record
    /// as before is unchanged; others are compared by their fingerprints.
    pub fn set(&mut self, source: &str, pods: Vec<Arc<DesiredPod>>, now: i64) -> Outcome {
        let first = !self.sources.contains_key(source);
        let mut known = self.sources.remove(source).unwrap_or_default();
        let mut outcome = Outcome { first, ..Outcome::default() };
        let mut next = BTreeMap::new();
        let mut names = BTreeSet::new();
        for pod in &pods {
            let conflict = self.uid_conflict(&pod.uid);
            if let Some(message) = conflict.or_else(|| duplicate_in_set(pod, &names, &next)) {
                outcome.errors.push(MergeError { pod: Arc::clone(pod), message });
                continue;
            }
            names.insert(name_of(pod));
            let (uid, old) = match known.remove_entry(&pod.uid) {
                Some((uid, old)) => (uid, Some(old)),
                None => (pod.uid.clone(), None),
            };
            let (op, mut entry) = compare(pod, old, now);
            outcome.changes.extend(op.map(|op| self.change(op, source, &mut entry)));
            next.insert(uid, entry);
        }
        outcome.changes.extend(known.into_values().map(removal));
        outcome.changes.sort_by_key(|change| change.op);
        self.sources.insert(source.to_owned(), next);
        outcome
    }

    /// The change that sends `entry`, which continues from its restored record.
    fn change(&mut self, op: Op, source: &str, entry: &mut KnownPod) -> Change {
        let pod = Arc::clone(&entry.pod);
        let digest = digest(source, &pod.origin, &pod.json);
        let record = self.restored.remove(&pod.uid);
        let restored_traceparent = record.and_then(|record| restore_record(entry, record, digest));
        Change { op, pod, sent: sent_record(entry, entry.revision, digest), restored_traceparent }
    }

    /// Whether the source has passed a set.
    pub fn has_source(&self, source: &str) -> bool {
        self.sources.contains_key(source)
    }

    /// The claims that pods of any source use, by namespace and name.
    pub fn used_claims(&self) -> impl Iterator<Item = (&str, &str)> {
        let pods = self.sources.values().flat_map(BTreeMap::values);
        pods.flat_map(|known| {
            known.pod.claims.iter().map(|claim| (known.pod.namespace.as_str(), claim.as_str()))
        })
    }

    /// How many pods the source has.
    pub fn count(&self, source: &str) -> usize {
        self.sources.get(source).map_or(0, BTreeMap::len)
    }

    /// UID and origin of the pod with this name in `source`.
    pub fn find(&self, source: &str, name: &PodFullName) -> Option<(&str, &str)> {
        let is_named =
            |known: &&KnownPod| known.pod.name == name.name && known.pod.namespace == name.namespace;
        let known = self.sources.get(source)?.values().find(is_named)?;
        Some((&known.pod.uid, &known.pod.origin))
    }

    fn uid_conflict(&self, uid: &str) -> Option<String> {
        let (source, known) =
            self.sources.iter().find_map(|(source, pods)| Some((source, pods.get(uid)?)))?;
        Some(format!("the UID {uid} belongs to a pod of the source {source} already: {}", known.pod.origin))
    }
}

fn name_of(pod: &DesiredPod) -> (&str, &str) {
    (&pod.namespace, &pod.name)
}

fn duplicate_in_set(
    pod: &DesiredPod,
    names: &BTreeSet<(&str, &str)>,
    next: &BTreeMap<String, KnownPod>,
) -> Option<String> {
    if names.contains(&name_of(pod)) {
        return Some(format!("the source has another pod {}/{}", pod.namespace, pod.name));
    }
    let other = next.get(&pod.uid)?;
    Some(format!("the source has another pod with the UID {}: {}", pod.uid, other.pod.origin))
}

fn compare(pod: &Arc<DesiredPod>, old: Option<KnownPod>, now: i64) -> (Option<Op>, KnownPod) {
    let revision = u64::try_from(now).unwrap_or(0);
    let Some(old) = old else {
        return (Some(Op::Add), KnownPod { pod: Arc::clone(pod), revision, seen_unix_nanos: now });
    };
    if Arc::ptr_eq(&old.pod, pod) {
        return (None, old);
    }
    let (before, after) = (&old.pod.fingerprint, &pod.fingerprint);
    let op = if before.semantic != after.semantic {
        Some(if after.deleting { Op::Delete } else { Op::Update })
    } else if before.status != after.status || old.pod.origin != pod.origin {
        // The manifest of a pod with its own UID was moved: only the origin is different.
        Some(Op::Reconcile)
    } else {
        None
    };
    let revision = if op.is_some() { revision.max(old.revision + 1) } else { old.revision };
    (op, KnownPod { pod: Arc::clone(pod), revision, ..old })
}

/// Continues from the record of the run before the restart. Returns its trace context if the version is the same.
fn restore_record(entry: &mut KnownPod, restored: SentRecord, digest: u64) -> Option<String> {
    entry.seen_unix_nanos = restored.seen_unix_nanos;
    if restored.digest == digest {
        entry.revision = restored.revision;
        return Some(restored.traceparent);
    }
    entry.revision = entry.revision.max(restored.revision + 1);
    None
}

fn sent_record(known: &KnownPod, revision: u64, digest: u64) -> SentRecord {
    SentRecord { seen_unix_nanos: known.seen_unix_nanos, revision, digest, traceparent: String::new() }
}

fn removal(known: KnownPod) -> Change {
    let sent = sent_record(&known, known.revision + 1, 0);
    Change { op: Op::Remove, pod: known.pod, sent, restored_traceparent: None }
}
