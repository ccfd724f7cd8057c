//! Which pods have changed since the last report to the control plane.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::sync::Arc;

use keelson_kube_model::PodFullName;
use serde_json::Value;

use crate::report::{Deletion, NotAPod, PodReport, ReportedPod, ReportedStatus, Termination};

/// A pod as pod-sync sends it.
#[derive(Debug, Clone, Copy, Default)]
pub struct PodDocument<'a> {
    /// UID.
    pub uid: &'a str,
    /// Namespace.
    pub namespace: &'a str,
    /// Name.
    pub name: &'a str,
    /// Where the pod comes from: `file`, `api`…
    pub source: &'a str,
    /// The Pod as JSON. It is empty if the status is separate and the stream has already sent this revision of the pod.
    pub pod_json: &'a [u8],
    /// The PodStatus as JSON. It is empty if `pod_json` has the status.
    pub status_json: &'a [u8],
    /// The revision of the pod without its status; only with `status_json`.
    pub pod_revision: u64,
    /// When the pod is deleted, if its source does not say so.
    pub deletion: Option<Deletion>,
    /// How far its termination is.
    pub termination: Termination,
}

/// A changed report.
#[derive(Debug, Clone, PartialEq)]
pub struct PodUpdate {
    /// The report.
    pub report: Arc<PodReport>,
    /// The fields of its status, for a writer that compares them.
    pub status: Value,
    /// It is the first report of the pod, its phase or readiness has changed, or its final phase may be reported from now on.
    /// It is written before others.
    pub urgent: bool,
}

impl PodUpdate {
    /// The first report of a pod, from a document with its JSON. The report keeps that JSON only `with_json`.
    ///
    /// # Errors
    /// The document is not a Pod.
    pub fn first(document: &PodDocument<'_>, with_json: bool) -> Result<Self, NotAPod> {
        let (report, status) = report(document, None, with_json)?;
        Ok(Self { report: Arc::new(report), status, urgent: true })
    }
}

/// Decodes a document; `pod` is its pod, if that is known already.
fn report(
    document: &PodDocument<'_>,
    pod: Option<Arc<ReportedPod>>,
    with_json: bool,
) -> Result<(PodReport, Value), NotAPod> {
    let not_a_pod = |source| NotAPod { uid: document.uid.to_owned(), source };
    let (pod, own_status) = match pod {
        Some(pod) => (pod, None),
        None => {
            let (pod, status) = ReportedPod::decode(document.pod_json, with_json).map_err(not_a_pod)?;
            (Arc::new(pod), status)
        }
    };
    let status_json = match document.status_json {
        [] => own_status.unwrap_or("{}").as_bytes(),
        separate => separate,
    };
    let (status, fields) = ReportedStatus::decode(status_json).map_err(not_a_pod)?;
    let report = PodReport {
        uid: document.uid.to_owned(),
        name: PodFullName::new(document.name, document.namespace),
        source: document.source.to_owned(),
        pod,
        status,
        deletion: document.deletion,
        termination: document.termination,
    };
    Ok((report, fields))
}

/// A pod of which the last report is known.
#[derive(Debug)]
struct LastReport {
    /// The fingerprint of the report; `None`: it failed and is repeated.
    fingerprint: Option<u64>,
    phase: Box<str>,
    ready: bool,
    stopped: bool,
    /// The current replay has contained it.
    seen: bool,
    pod: Arc<ReportedPod>,
    /// The fingerprint of the JSON of `pod`.
    pod_fingerprint: u64,
    /// The revision that the current stream has sent; `None` before it has sent one.
    pod_revision: Option<u64>,
}

impl LastReport {
    /// The fingerprint of the JSON of the pod in a document, which need not contain a pod that the stream has sent before.
    fn fingerprint_of(&self, document: &PodDocument<'_>) -> u64 {
        let is_known = document.pod_json.is_empty()
            && !document.status_json.is_empty()
            && self.pod_revision == Some(document.pod_revision);
        if is_known { self.pod_fingerprint } else { fingerprint(&document.pod_json) }
    }
}

/// What was reported of each pod. To save memory, it has only a fingerprint of the status.
///
/// The fingerprints are those of the JSON itself, so a restarted pod-sync, whose versions and revisions start again, neither
/// hides a change nor repeats a report.
#[derive(Debug, Default)]
pub struct ReportedPods {
    pods: BTreeMap<Box<str>, LastReport>,
}

impl ReportedPods {
    /// Begins the replay of a new stream: pods that it does not contain are gone at its end.
    pub fn begin_replay(&mut self) {
        for last in self.pods.values_mut() {
            last.seen = false;
            last.pod_revision = None;
        }
    }

    /// Ends the replay. Returns the UIDs of pods that it did not contain.
    pub fn end_replay(&mut self) -> Vec<String> {
        let gone: Vec<String> =
            self.pods.iter().filter(|(_, last)| !last.seen).map(|(uid, _)| uid.to_string()).collect();
        for uid in &gone {
            self.forget(uid);
        }
        gone
    }

    /// The UIDs of all pods that were reported and are not forgotten.
    pub fn uids(&self) -> BTreeSet<String> {
        self.pods.keys().map(ToString::to_string).collect()
    }

    /// Compares a document with the last report and stores it as reported; termination and deletion are parts of the report.
    /// Returns the report if it has changed; it has the JSON of the pod only `with_json`.
    ///
    /// # Errors
    /// The document is not a Pod, or has none although the stream has not sent one.
    pub fn observe(
        &mut self,
        document: &PodDocument<'_>,
        with_json: bool,
    ) -> Result<Option<PodUpdate>, NotAPod> {
        let pod_revision = (!document.status_json.is_empty()).then_some(document.pod_revision);
        let last = self.pods.get_mut(document.uid);
        let pod_fingerprint = last
            .as_ref()
            .map_or_else(|| fingerprint(&document.pod_json), |last| last.fingerprint_of(document));
        let parts = (pod_fingerprint, document.status_json, document.deletion, document.termination);
        let fingerprint = Some(fingerprint(&parts));
        let mut pod = None;
        if let Some(last) = last {
            let is_same_pod = last.pod_fingerprint == pod_fingerprint;
            if is_same_pod {
                last.pod_revision = pod_revision;
            }
            if last.fingerprint == fingerprint {
                last.seen = true;
                return Ok(None);
            }
            // Without a separate status the JSON has to be decoded for its status in any case.
            pod = (is_same_pod && pod_revision.is_some()).then(|| Arc::clone(&last.pod));
        }
        let (report, status) = report(document, pod, with_json)?;
        let (phase, ready, stopped) =
            (report.status.phase.clone(), report.status.ready, document.termination.stopped);
        let is_same = |last: &LastReport| {
            last.fingerprint.is_some()
                && last.phase == phase
                && last.ready == ready
                && last.stopped == stopped
        };
        let urgent = !self.pods.get(document.uid).is_some_and(is_same);
        let pod = Arc::clone(&report.pod);
        let reported =
            LastReport { fingerprint, phase, ready, stopped, seen: true, pod, pod_fingerprint, pod_revision };
        self.pods.insert(document.uid.into(), reported);
        Ok(Some(PodUpdate { report: Arc::new(report), status, urgent }))
    }

    /// Has the next document of a pod reported, even if it has not changed: the last report has failed.
    pub fn repeat(&mut self, uid: &str) {
        if let Some(last) = self.pods.get_mut(uid) {
            last.fingerprint = None;
        }
    }

    /// Forgets a pod that is gone. Returns whether it was known.
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

fn fingerprint(part: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    part.hash(&mut hasher);
    hasher.finish()
}
