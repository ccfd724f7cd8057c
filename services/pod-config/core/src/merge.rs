//! What a new set of a source changes (pod-lifecycle.md §2.5).
//!
//! Each source hands in its whole set; what is new, changed or gone falls out by UID.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use keelson_kube_model::{PodFullName, annotations, time};
use serde_json::{Value, json};

use crate::sight::{Sight, digest};
use crate::static_pod::{Fingerprint, StaticPod};

/// A pod as its source hands it in.
#[derive(Debug, Clone, PartialEq)]
pub struct SourcePod {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// Where it was read.
    pub origin: String,
    /// The Pod as JSON.
    pub json: Arc<[u8]>,
    /// What its versions are compared by.
    pub fingerprint: Fingerprint,
}

impl SourcePod {
    /// The pod of a manifest.
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

/// What a change is, in the order in which changes of one set are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Op {
    /// The UID left its source.
    Remove,
    /// A new UID.
    Add,
    /// Spec, labels or annotations differ.
    Update,
    /// Deletion was asked for.
    Delete,
    /// Only the status differs.
    Reconcile,
}

/// One change of the desired pods.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// What it is.
    pub op: Op,
    /// The pod after the change; on [`Op::Remove`] what it was, without its JSON.
    pub pod: MergedPod,
}

/// A pod with the marks of the merge step.
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
    /// The Pod as JSON, with its source and when it was first seen as annotations.
    pub json: Vec<u8>,
    /// Grows with each change of this UID, also over a restart of the service while the clock does not run back.
    pub revision: u64,
    /// When this UID was first seen, nanoseconds since 1970.
    pub seen_unix_nanos: i64,
    /// What [`MergedPod::revision`] stands for, see [`digest`]; 0 on [`Op::Remove`].
    pub digest: u64,
    /// The trace context of an earlier run of the service that sent exactly this.
    pub resumed: Option<String>,
}

impl MergedPod {
    /// What a later run of the service needs to send the same again, when it was sent with `traceparent`.
    pub fn sight(&self, traceparent: &str) -> Sight {
        Sight {
            seen_unix_nanos: self.seen_unix_nanos,
            revision: self.revision,
            digest: self.digest,
            traceparent: traceparent.to_owned(),
        }
    }
}

/// A pod that was not taken, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Refused {
    /// The pod.
    pub pod: SourcePod,
    /// The reason, for people.
    pub message: String,
}

/// The outcome of [`Merge::set`].
#[derive(Debug, Default, PartialEq)]
pub struct Outcome {
    /// The changes in the order in which they are to be told.
    pub changes: Vec<Change>,
    /// Pods that were left out.
    pub refused: Vec<Refused>,
    /// Whether this was the first set of the source: it counts as ready now.
    pub first: bool,
}

/// The desired pods of all sources.
#[derive(Debug, Default)]
pub struct Merge {
    sources: BTreeMap<String, BTreeMap<String, Known>>,
    /// By UID, what an earlier run of the service has sent and this one has not seen yet.
    earlier: BTreeMap<String, Sight>,
}

#[derive(Debug, Clone)]
struct Known {
    name: PodFullName,
    origin: String,
    fingerprint: Fingerprint,
    revision: u64,
    seen: i64,
}

impl Merge {
    /// No pods yet; `earlier` is what an earlier run of the service has sent, by UID.
    pub fn resuming(earlier: BTreeMap<String, Sight>) -> Self {
        Self { sources: BTreeMap::new(), earlier }
    }

    /// Every source has spoken: a UID that comes later is a new one.
    pub fn forget_earlier(&mut self) {
        self.earlier.clear();
    }

    /// Whether a source has a pod of this UID.
    pub fn knows(&self, uid: &str) -> bool {
        self.sources.values().any(|pods| pods.contains_key(uid))
    }

    /// Replaces the set of `source` at the moment `now` (nanoseconds since 1970) and says what that changes.
    pub fn set(&mut self, source: &str, pods: Vec<SourcePod>, now: i64) -> Outcome {
        let first = !self.sources.contains_key(source);
        let mut known = self.sources.remove(source).unwrap_or_default();
        let mut outcome = Outcome { first, ..Outcome::default() };
        let mut next = BTreeMap::new();
        let mut names = BTreeSet::new();
        for pod in pods {
            let taken = self.owner(&pod.uid);
            if let Some(message) = taken.or_else(|| twice(&pod, &names, &next)) {
                outcome.refused.push(Refused { pod, message });
                continue;
            }
            names.insert(pod.full_name());
            let uid = pod.uid.clone();
            let (op, mut entry) = compare(&pod, known.remove(&uid), now);
            if let Some(op) = op {
                let digest = digest(source, &pod);
                let resumed = self.earlier.remove(&uid).and_then(|sight| resume(&mut entry, sight, digest));
                let pod = MergedPod { digest, resumed, ..merged(source, pod, &entry) };
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

    /// Whether the source has handed in a set.
    pub fn has(&self, source: &str) -> bool {
        self.sources.contains_key(source)
    }

    /// How many pods the source has.
    pub fn count(&self, source: &str) -> usize {
        self.sources.get(source).map_or(0, BTreeMap::len)
    }

    /// UID and origin of the pod that `source` has under this name.
    pub fn find(&self, source: &str, name: &PodFullName) -> Option<(&str, &str)> {
        let (uid, known) = self.sources.get(source)?.iter().find(|(_, known)| known.name == *name)?;
        Some((uid, &known.origin))
    }

    fn owner(&self, uid: &str) -> Option<String> {
        let (source, known) =
            self.sources.iter().find_map(|(source, pods)| Some((source, pods.get(uid)?)))?;
        Some(format!("the UID {uid} belongs to a pod of the source {source} already: {}", known.origin))
    }
}

fn twice(pod: &SourcePod, names: &BTreeSet<PodFullName>, next: &BTreeMap<String, Known>) -> Option<String> {
    if names.contains(&pod.full_name()) {
        return Some(format!("the source has another pod {}/{}", pod.namespace, pod.name));
    }
    let other = next.get(&pod.uid)?;
    Some(format!("the source has another pod with the UID {}: {}", pod.uid, other.origin))
}

fn compare(pod: &SourcePod, old: Option<Known>, now: i64) -> (Option<Op>, Known) {
    let fresh = Known {
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
        // A moved manifest of a pod with its own UID changes nothing but where to look for it.
        Some(Op::Reconcile)
    } else {
        None
    };
    let revision = if op.is_some() { fresh.revision.max(old.revision + 1) } else { old.revision };
    (op, Known { revision, seen: old.seen, ..fresh })
}

/// Goes on where an earlier run has ended. The trace context when it sent exactly this.
fn resume(entry: &mut Known, earlier: Sight, digest: u64) -> Option<String> {
    entry.seen = earlier.seen_unix_nanos;
    if earlier.digest == digest {
        entry.revision = earlier.revision;
        return Some(earlier.traceparent);
    }
    entry.revision = entry.revision.max(earlier.revision + 1);
    None
}

fn merged(source: &str, pod: SourcePod, known: &Known) -> MergedPod {
    let json = stamp(&pod.json, source, known.seen);
    MergedPod {
        uid: pod.uid,
        namespace: pod.namespace,
        name: pod.name,
        origin: pod.origin,
        json,
        revision: known.revision,
        seen_unix_nanos: known.seen,
        digest: 0,
        resumed: None,
    }
}

fn removed(uid: String, known: Known) -> MergedPod {
    MergedPod {
        uid,
        namespace: known.name.namespace,
        name: known.name.name,
        origin: known.origin,
        json: Vec::new(),
        revision: known.revision + 1,
        seen_unix_nanos: known.seen,
        digest: 0,
        resumed: None,
    }
}

/// Writes the annotations of the merge step. What is no object is left as it is.
fn stamp(pod: &[u8], source: &str, seen: i64) -> Vec<u8> {
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
