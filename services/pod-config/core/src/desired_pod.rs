//! The record of a desired pod, which goes unchanged from its source to the wire.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher};

use bytes::Bytes;
use keelson_kube_model::{Pod, PodFullName, Volume, annotations, with_source_annotations};
use serde_json::Value;

use crate::offline::SingleRun;

/// A pod as its source defines it. It is decoded and encoded once, when it is read; sources, merge and subscribers share the
/// record. What the merge decides about it is in [`SentRecord`](crate::sent_record::SentRecord).
#[derive(Debug, Clone, PartialEq)]
pub struct DesiredPod {
    /// `metadata.uid`, from the object or computed.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`; for a pod of a manifest with the node's name appended.
    pub name: String,
    /// Where it was read: a file, URL or key, or the namespace and name of an API pod.
    pub origin: String,
    /// Document in its file, 1-based; 0 for an API pod.
    pub document: u32,
    /// Line where its document begins, 1-based; 0 for an API pod.
    pub line: u32,
    /// The Pod as JSON, as all subscribers share it: without the annotations that [`Self::annotated_json`] adds.
    pub json: Bytes,
    /// By which versions are compared.
    pub fingerprint: Fingerprint,
    /// Why the pod must not run twice; `None` if it may.
    pub single_run: Option<SingleRun>,
    /// The claims that it uses, by their names in its namespace.
    pub claims: Box<[String]>,
    /// Fields that were removed: they belong to the control plane from which the manifest was exported.
    pub ignored: Vec<String>,
}

impl DesiredPod {
    /// Encodes the complete Pod `value`, read from `origin`; `pod` is the same Pod, decoded.
    pub fn new(value: &Value, pod: &Pod, origin: &str) -> Self {
        Self {
            uid: pod.metadata.uid.clone(),
            namespace: pod.metadata.namespace.clone(),
            name: pod.metadata.name.clone(),
            origin: origin.to_owned(),
            document: 0,
            line: 0,
            json: value.to_string().into_bytes().into_boxed_slice().into(),
            fingerprint: Fingerprint::of(value),
            single_run: SingleRun::of(pod),
            claims: claims_of(pod),
            ignored: Vec::new(),
        }
    }

    /// Name and namespace.
    pub fn full_name(&self) -> PodFullName {
        PodFullName::new(&self.name, &self.namespace)
    }

    /// A copy of the Pod as clients of earlier releases expect it: with its source, and the time (nanoseconds since 1970) at which
    /// it was first seen, as annotations.
    pub fn annotated_json(&self, source: &str, seen_unix_nanos: i64) -> Vec<u8> {
        with_source_annotations(&self.json, source, seen_unix_nanos)
    }
}

/// The names of the claims that a pod uses. That of an `ephemeral` volume is created for the pod (volumes.md §3.4).
fn claims_of(pod: &Pod) -> Box<[String]> {
    let claim = |volume: &Volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
        (Some(claim), _) => Some(claim.claim_name.clone()),
        (None, Some(_)) => Some(format!("{}-{}", pod.metadata.name, volume.name)),
        (None, None) => None,
    };
    pod.spec.volumes.iter().filter_map(claim).collect()
}

/// By which two versions of a pod are compared (pod-lifecycle.md §2.5). Valid only within one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint {
    /// Spec, labels, deletion fields and annotations except [`LOCAL_ANNOTATIONS`].
    pub semantic: u64,
    /// The status.
    pub status: u64,
    /// Whether deletion was requested.
    pub deleting: bool,
}

impl Fingerprint {
    /// The fingerprint of a Pod.
    pub fn of(pod: &Value) -> Self {
        let null = Value::Null;
        let at = |pointer| pod.pointer(pointer).unwrap_or(&null);
        let mut hasher = DefaultHasher::new();
        for pointer in [
            "/spec",
            "/metadata/labels",
            "/metadata/deletionTimestamp",
            "/metadata/deletionGracePeriodSeconds",
        ] {
            hash_value(at(pointer), &mut hasher);
        }
        let own: BTreeMap<_, _> = at("/metadata/annotations")
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(key, _)| !LOCAL_ANNOTATIONS.contains(&key.as_str()))
            .collect();
        for (key, value) in own {
            key.hash(&mut hasher);
            hash_value(value, &mut hasher);
        }
        let semantic = hasher.finish();
        let mut hasher = DefaultHasher::new();
        hash_value(at("/status"), &mut hasher);
        let deleting = !at("/metadata/deletionTimestamp").is_null();
        Self { semantic, status: hasher.finish(), deleting }
    }
}

/// Annotations that the agent writes for itself; they do not count as changes of a pod.
pub const LOCAL_ANNOTATIONS: [&str; 3] =
    [annotations::CONFIG_SOURCE, annotations::CONFIG_MIRROR, annotations::CONFIG_SEEN];

/// Hashes a value independently of the order of its keys.
fn hash_value(value: &Value, hasher: &mut impl Hasher) {
    match value {
        Value::Null => 0u8.hash(hasher),
        Value::Bool(b) => (1u8, b).hash(hasher),
        Value::Number(n) => (2u8, n.to_string()).hash(hasher),
        Value::String(s) => (3u8, s).hash(hasher),
        Value::Array(items) => {
            (4u8, items.len()).hash(hasher);
            items.iter().for_each(|item| hash_value(item, hasher));
        }
        Value::Object(map) => {
            (5u8, map.len()).hash(hasher);
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| key.as_str());
            for (key, value) in entries {
                key.hash(hasher);
                hash_value(value, hasher);
            }
        }
    }
}
