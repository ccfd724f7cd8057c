//! Which pod documents are news for the control plane.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use serde::Deserialize;

/// What of a pod's status a person asks for first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodView {
    /// `status.phase`; empty reads as `Pending`.
    pub phase: String,
    /// Whether the condition `Ready` is true.
    pub ready: bool,
}

/// How far a pod has come to its end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Ended {
    /// None of its containers runs, and none is started any more.
    pub stopped: bool,
    /// Nothing of it is left on this node.
    pub finished: bool,
}

/// A pod document that is no Pod.
#[derive(Debug, thiserror::Error)]
#[error("the document of pod {uid} is not a Pod")]
pub struct NotAPod {
    /// UID of the document.
    pub uid: String,
    /// What the decoder found.
    #[source]
    pub source: serde_json::Error,
}

/// How a document relates to what was reported before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// The control plane knows it already.
    Known,
    /// Something of the status changed, but neither phase nor readiness.
    Detail,
    /// The first report of the pod, or its phase or readiness changed, or its final phase may be told from now on.
    Turn(PodView),
}

#[derive(Debug)]
struct Reported {
    fingerprint: u64,
    phase: Box<str>,
    ready: bool,
    stopped: bool,
    seen: bool,
}

/// What was reported of each pod, as small as it can be: a fingerprint, the phase and the readiness.
///
/// The fingerprint is of the document itself, so a restarted pod-sync, whose versions begin anew, neither
/// hides a change nor repeats a report.
#[derive(Debug, Default)]
pub struct PodLedger {
    pods: BTreeMap<Box<str>, Reported>,
}

impl PodLedger {
    /// A new replay begins: pods that it does not name are gone at its end.
    pub fn begin_replay(&mut self) {
        for reported in self.pods.values_mut() {
            reported.seen = false;
        }
    }

    /// The replay is over. The UIDs that it did not name.
    pub fn end_replay(&mut self) -> Vec<String> {
        let gone: Vec<String> =
            self.pods.iter().filter(|(_, r)| !r.seen).map(|(uid, _)| uid.to_string()).collect();
        for uid in &gone {
            self.forget(uid);
        }
        gone
    }

    /// The UIDs of all pods that were reported and are not forgotten.
    pub fn uids(&self) -> BTreeSet<String> {
        self.pods.keys().map(ToString::to_string).collect()
    }

    /// Decides about a document and remembers it as reported; how far the pod has come to its end is part of what is reported.
    pub fn observe(&mut self, uid: &str, pod_json: &[u8], ended: Ended) -> Result<News, NotAPod> {
        let fingerprint = fingerprint(pod_json, ended);
        let old = self.pods.get_mut(uid);
        if let Some(old) = old
            && old.fingerprint == fingerprint
        {
            old.seen = true;
            return Ok(News::Known);
        }
        let view = PodView::of(uid, pod_json)?;
        let stopped = ended.stopped;
        let turned = self
            .pods
            .get(uid)
            .is_none_or(|o| *o.phase != *view.phase || o.ready != view.ready || o.stopped != stopped);
        let phase = view.phase.as_str().into();
        self.pods.insert(uid.into(), Reported { fingerprint, phase, ready: view.ready, stopped, seen: true });
        Ok(if turned { News::Turn(view) } else { News::Detail })
    }

    /// The pod is gone, or its report failed and must be made again. Whether it was known.
    pub fn forget(&mut self, uid: &str) -> bool {
        self.pods.remove(uid).is_some()
    }

    /// How many pods are known.
    pub fn len(&self) -> usize {
        self.pods.len()
    }

    /// Whether no pod is known.
    pub fn is_empty(&self) -> bool {
        self.pods.is_empty()
    }
}

fn fingerprint(pod_json: &[u8], ended: Ended) -> u64 {
    let mut hasher = DefaultHasher::new();
    pod_json.hash(&mut hasher);
    ended.hash(&mut hasher);
    hasher.finish()
}

// Only these fields are decoded; the decoder skips the rest of the document without keeping it.
#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    status: Status,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Status {
    phase: Option<String>,
    conditions: Option<Vec<Condition>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Condition {
    #[serde(rename = "type")]
    type_: String,
    status: String,
}

impl PodView {
    /// Reads phase and readiness of a Pod document.
    pub fn of(uid: &str, pod_json: &[u8]) -> Result<Self, NotAPod> {
        let document: Document =
            serde_json::from_slice(pod_json).map_err(|source| NotAPod { uid: uid.to_owned(), source })?;
        let conditions = document.status.conditions.unwrap_or_default();
        Ok(Self {
            phase: document.status.phase.filter(|p| !p.is_empty()).unwrap_or_else(|| "Pending".into()),
            ready: conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True"),
        })
    }
}
