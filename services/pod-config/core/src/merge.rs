//! Merges the desired pods of all sources and computes the changes (pod-lifecycle.md §2.5).
//!
//! Each source passes its complete set; additions, changes and removals are found by UID.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use keelson_kube_model::{PodFullName, annotations, time};
use serde_json::{Value, json};

use crate::sent_record::{SentRecord, digest};
use crate::static_pod::{Fingerprint, StaticPod};

/// A pod as a source passes it.
#[derive(Debug, Clone, PartialEq)]
pub struct SourcePod {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// Where it was read: a file, URL or key.
    pub origin: String,
    /// The Pod as JSON.
    pub json: Arc<[u8]>,
    /// By which versions are compared.
    pub fingerprint: Fingerprint,
}

impl SourcePod {
    /// Converts a pod of a manifest.
    pub fn of(pod: &StaticPod, origin: &str) -> Self {
        Self {
            uid: pod.uid.clone(),
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            origin: origin.to_owned(),
            json: Arc::clone(&pod.json),
            fingerprint: pod.fingerprint,
        }
    }

    /// Name and namespace.
    pub fn full_name(&self) -> PodFullName {
        PodFullName::new(&self.name, &self.namespace)
    }
}

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
    /// The pod after the change; for [`Op::Remove`] the pod before, without its JSON.
    pub pod: MergedPod,
}

/// A desired pod as it is sent to subscribers.
#[derive(Debug, Clone, PartialEq)]
pub struct MergedPod {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// Where it was read.
    pub origin: String,
    /// The Pod as JSON, annotated with its source and the time at which it was first seen.
    pub json: Vec<u8>,
    /// Grows with each change of this UID; also over a restart of the service, unless the clock is set back.
    pub revision: u64,
    /// When this UID was first seen, nanoseconds since 1970.
    pub seen_unix_nanos: i64,
    /// Digest of this version, see [`digest`]; 0 for [`Op::Remove`].
    pub digest: u64,
    /// The trace context with which the service sent exactly this version before its restart.
    pub restored_traceparent: Option<String>,
}

impl MergedPod {
    /// The record from which a later run of the service sends the same again. It was sent with `traceparent`.
    pub fn sent_record(&self, traceparent: &str) -> SentRecord {
        SentRecord {
            seen_unix_nanos: self.seen_unix_nanos,
            revision: self.revision,
            digest: self.digest,
            traceparent: traceparent.to_owned(),
        }
    }
}

/// Why a pod of a set was rejected.
#[derive(Debug, Clone, PartialEq)]
pub struct MergeError {
    /// The rejected pod.
    pub pod: SourcePod,
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

#[derive(Debug, Clone)]
struct KnownPod {
    name: PodFullName,
    origin: String,
    fingerprint: Fingerprint,
    revision: u64,
    seen: i64,
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

    /// Replaces the set of `source` as of `now` (nanoseconds since 1970) and returns the changes.
    pub fn set(&mut self, source: &str, pods: Vec<SourcePod>, now: i64) -> Outcome {
        let first = !self.sources.contains_key(source);
        let mut known = self.sources.remove(source).unwrap_or_default();
        let mut outcome = Outcome { first, ..Outcome::default() };
        let mut next = BTreeMap::new();
        let mut names = BTreeSet::new();
        for pod in pods {
            let conflict = self.uid_conflict(&pod.uid);
            if let Some(message) = conflict.or_else(|| duplicate_in_set(&pod, &names, &next)) {
                outcome.errors.push(MergeError { pod, message });
                continue;
            }
            names.insert(pod.full_name());
            let uid = pod.uid.clone();
            let (op, mut entry) = compare(&pod, known.remove(&uid), now);
            if let Some(op) = op {
                let digest = digest(source, &pod.origin, &pod.json);
                let restored_traceparent =
                    self.restored.remove(&uid).and_then(|record| restore_record(&mut entry, record, digest));
                let pod = MergedPod { digest, restored_traceparent, ..merged(source, pod, &entry) };
                outcome.changes.push(Change { op, pod });
            }
            next.insert(uid, entry);
        }
        outcome
            .changes
            .extend(known.into_iter().map(|(uid, gone)| Change { op: Op::Remove, pod: removed(uid, gone) }));
        outcome.changes.sort_by_key(|change| change.op);
        self.sources.insert(source.to_owned(), next);
        outcome
    }

    /// Whether the source has passed a set.
    pub fn has_source(&self, source: &str) -> bool {
        self.sources.contains_key(source)
    }

    /// How many pods the source has.
    pub fn count(&self, source: &str) -> usize {
        self.sources.get(source).map_or(0, BTreeMap::len)
    }

    /// UID and origin of the pod with this name in `source`.
    pub fn find(&self, source: &str, name: &PodFullName) -> Option<(&str, &str)> {
        let (uid, known) = self.sources.get(source)?.iter().find(|(_, known)| known.name == *name)?;
        Some((uid, &known.origin))
    }

    fn uid_conflict(&self, uid: &str) -> Option<String> {
        let (source, known) =
            self.sources.iter().find_map(|(source, pods)| Some((source, pods.get(uid)?)))?;
        Some(format!("the UID {uid} belongs to a pod of the source {source} already: {}", known.origin))
    }
}

fn duplicate_in_set(
    pod: &SourcePod,
    names: &BTreeSet<PodFullName>,
    next: &BTreeMap<String, KnownPod>,
) -> Option<String> {
    if names.contains(&pod.full_name()) {
        return Some(format!("the source has another pod {}/{}", pod.namespace, pod.name));
    }
    let other = next.get(&pod.uid)?;
    Some(format!("the source has another pod with the UID {}: {}", pod.uid, other.origin))
}

fn compare(pod: &SourcePod, old: Option<KnownPod>, now: i64) -> (Option<Op>, KnownPod) {
    let fresh = KnownPod {
        name: pod.full_name(),
        origin: pod.origin.clone(),
        fingerprint: pod.fingerprint,
        revision: u64::try_from(now).unwrap_or(0),
        seen: now,
    };
    let Some(old) = old else { return (Some(Op::Add), fresh) };
    let op = if old.fingerprint.semantic != pod.fingerprint.semantic {
        Some(if pod.fingerprint.deleting { Op::Delete } else { Op::Update })
    } else if old.fingerprint.status != pod.fingerprint.status || old.origin != pod.origin {
        // The manifest of a pod with its own UID was moved: only the origin is different.
        Some(Op::Reconcile)
    } else {
        None
    };
    let revision = if op.is_some() { fresh.revision.max(old.revision + 1) } else { old.revision };
    (op, KnownPod { revision, seen: old.seen, ..fresh })
}

/// Continues from the record of the run before the restart. Returns its trace context if the version is the same.
fn restore_record(entry: &mut KnownPod, restored: SentRecord, digest: u64) -> Option<String> {
    entry.seen = restored.seen_unix_nanos;
    if restored.digest == digest {
        entry.revision = restored.revision;
        return Some(restored.traceparent);
    }
    entry.revision = entry.revision.max(restored.revision + 1);
    None
}

fn merged(source: &str, pod: SourcePod, known: &KnownPod) -> MergedPod {
    let json = add_annotations(&pod.json, source, known.seen);
    MergedPod {
        uid: pod.uid,
        namespace: pod.namespace,
        name: pod.name,
        origin: pod.origin,
        json,
        revision: known.revision,
        seen_unix_nanos: known.seen,
        digest: 0,
        restored_traceparent: None,
    }
}

fn removed(uid: String, known: KnownPod) -> MergedPod {
    MergedPod {
        uid,
        namespace: known.name.namespace,
        name: known.name.name,
        origin: known.origin,
        json: Vec::new(),
        revision: known.revision + 1,
        seen_unix_nanos: known.seen,
        digest: 0,
        restored_traceparent: None,
    }
}

/// Adds the source and the time at which the pod was first seen as annotations. Leaves anything but an object unchanged.
fn add_annotations(pod: &[u8], source: &str, seen: i64) -> Vec<u8> {
    let Ok(mut value) = serde_json::from_slice::<Value>(pod) else { return pod.to_vec() };
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        let annotations = metadata.entry("annotations").or_insert_with(|| json!({}));
        if let Some(annotations) = annotations.as_object_mut() {
            annotations.insert(annotations::CONFIG_SOURCE.into(), json!(source));
            if let Ok(seen) = time::format_nanos(i128::from(seen)) {
                annotations.insert(annotations::CONFIG_SEEN.into(), json!(seen));
            }
        }
    }
    value.to_string().into_bytes()
}
