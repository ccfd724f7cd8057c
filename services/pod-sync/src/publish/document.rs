//! A pod with its status, as `ListPods` and `WatchPods` send it.

use std::sync::Arc;

use keelson_kube_model::PodStatus;
use keelson_pod_sync_core::moment::SECOND;
use keelson_pod_sync_core::worker::WorkerPhase;
use keelson_proto::keelson::pod_sync::v1 as pb;

use crate::state::pod_state::{DesiredPod, PodState};

/// One version of a pod. The JSON is made when it is sent.
#[derive(Debug, Clone)]
pub struct Document {
    /// The pod as its source has it.
    pub desired: DesiredPod,
    /// The status.
    pub status: Arc<PodStatus>,
    /// Grows with each change.
    pub version: u64,
    /// Everything of it on this node is released.
    pub finished: bool,
    /// None of its containers runs or will be started.
    pub stopped: bool,
    /// Since when it is ending, unix nanoseconds, and with how many seconds of grace. A static pod has no API
    /// object that would say so.
    pub ending: Option<(i64, i64)>,
}

impl Document {
    /// The document of a pod in its present state.
    pub fn of(state: &PodState, desired: DesiredPod) -> Self {
        let worker = &state.worker;
        // A pod that ran to its end by itself is not being deleted.
        let is_deleted = worker.phase != WorkerPhase::Sync && !worker.desired && !state.released;
        let ending = is_deleted
            .then_some(worker.terminating_since_unix_nanos)
            .flatten()
            .map(|since| (since, worker.grace_seconds.unwrap_or(0)));
        let finished = state.released || (worker.phase == WorkerPhase::Finished && !state.awaits_cleanup);
        let is_over = matches!(worker.phase, WorkerPhase::Terminated | WorkerPhase::Finished);
        let stopped = state.stopped || finished || is_over || state.rejected;
        Self { desired, status: Arc::clone(&state.status), version: state.version, finished, stopped, ending }
    }

    /// The message of the document.
    pub fn message(&self) -> pb::PodDocument {
        let pod = &self.desired.pod;
        pb::PodDocument {
            uid: pod.metadata.uid.clone(),
            namespace: pod.metadata.namespace.clone(),
            name: pod.metadata.name.clone(),
            pod_json: self.json().into(),
            source: self.desired.source.clone(),
            version: self.version,
            traceparent: self.desired.traceparent.clone(),
            finished: self.finished,
            stopped: self.stopped,
        }
    }

    /// The object with our status in place of its own; unknown fields are kept.
    fn json(&self) -> Vec<u8> {
        let Ok(mut value) = serde_json::from_slice::<serde_json::Value>(&self.desired.raw) else {
            return self.desired.raw.to_vec();
        };
        if let (Some(object), Ok(status)) = (value.as_object_mut(), serde_json::to_value(&*self.status)) {
            object.insert("status".to_owned(), status);
        }
        if let Some((since, grace)) = self.ending {
            self.show_ending(&mut value, since, grace);
        }
        serde_json::to_vec(&value).unwrap_or_else(|_| self.desired.raw.to_vec())
    }

    fn show_ending(&self, value: &mut serde_json::Value, since: i64, grace: i64) {
        let Some(meta) = value.get_mut("metadata").and_then(serde_json::Value::as_object_mut) else { return };
        if meta.contains_key("deletionTimestamp") {
            return;
        }
        let at = since.div_euclid(SECOND).saturating_add(grace);
        if let Ok(text) = keelson_kube_model::time::format_seconds(at) {
            meta.insert("deletionTimestamp".to_owned(), text.into());
            meta.insert("deletionGracePeriodSeconds".to_owned(), grace.into());
        }
    }
}
