//! Which pod documents have changed since the last report to the control plane.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use serde::Deserialize;

/// The phase and readiness of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodView {
    /// `status.phase`; empty reads as `Pending`.
    pub phase: String,
    /// Whether the condition `Ready` is true.
    pub ready: bool,
}

/// How far the termination of a pod is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Termination {
    /// None of its containers runs, and none will be started.
    pub stopped: bool,
    /// Nothing of it is left on this node.
    pub finished: bool,
}

/// A document is not a Pod.
#[derive(Debug, thiserror::Error)]
#[error("the document of pod {uid} is not a Pod")]
pub struct NotAPod {
    /// UID of the document.
    pub uid: String,
    /// The error of the decoder.
    #[source]
    pub source: serde_json::Error,
}

/// What a document changes against the last report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodChange {
    /// Nothing.
    Unchanged,
    /// Something of the status, but neither phase nor readiness.
    Detail,
    /// It is the first report of the pod, its phase or readiness has changed, or its final phase may be reported from now on.
    PhaseOrReadiness(PodView),
}

#[derive(Debug)]
struct Reported {
    fingerprint: u64,
    phase: Box<str>,
    ready: bool,
    stopped: bool,
    seen: bool,
}

/// What was reported of each pod, to save memory only a fingerprint, the phase and the readiness.
///
/// The fingerprint is that of the document itself, so a restarted pod-sync, whose versions start again, neither
/// hides a change nor repeats a report.
#[derive(Debug, Default)]
pub struct ReportedPods {
    pods: BTreeMap<Box<str>, Reported>,
}

impl ReportedPods {
    /// Begins a replay: pods that it does not contain are gone at its end.
    pub fn begin_replay(&mut self) {
        for reported in self.pods.values_mut() {
            reported.seen = false;
        }
    }

    /// Ends the replay. Returns the UIDs of pods that it did not contain.
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

    /// Compares a document with the last report and stores it as reported; the termination is part of the report.
    pub fn observe(
        &mut self,
        uid: &str,
        pod_json: &[u8],
        termination: Termination,
    ) -> Result<PodChange, NotAPod> {
        let fingerprint = fingerprint(pod_json, termination);
        let old = self.pods.get_mut(uid);
        if let Some(old) = old
            && old.fingerprint == fingerprint
        {
            old.seen = true;
            return Ok(PodChange::Unchanged);
        }
        let view = PodView::of(uid, pod_json)?;
        let stopped = termination.stopped;
        let urgent = self
            .pods
            .get(uid)
            .is_none_or(|o| *o.phase != *view.phase || o.ready != view.ready || o.stopped != stopped);
        let phase = view.phase.as_str().into();
        self.pods.insert(uid.into(), Reported { fingerprint, phase, ready: view.ready, stopped, seen: true });
        Ok(if urgent { PodChange::PhaseOrReadiness(view) } else { PodChange::Detail })
    }

    /// Forgets a pod that is gone, or whose report failed and must be repeated. Returns whether it was known.
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

fn fingerprint(pod_json: &[u8], termination: Termination) -> u64 {
    let mut hasher = DefaultHasher::new();
    pod_json.hash(&mut hasher);
    termination.hash(&mut hasher);
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
