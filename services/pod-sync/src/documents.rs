//! Pods with the status that this node sees, as they are shown to others.

use std::sync::Arc;

use keelson_kube_model::PodStatus;
use keelson_pod_sync_core::moment::SECOND;
use keelson_proto::keelson::pod_sync::v1 as pb;

use crate::agent::Wanted;

/// One version of one pod. The JSON is made when somebody reads it.
#[derive(Debug, Clone)]
pub struct Document {
    /// The pod as its source has it.
    pub wanted: Wanted,
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
    /// The message of the document.
    pub fn message(&self) -> pb::PodDocument {
        let pod = &self.wanted.pod;
        pb::PodDocument {
            uid: pod.metadata.uid.clone(),
            namespace: pod.metadata.namespace.clone(),
            name: pod.metadata.name.clone(),
            pod_json: self.json().into(),
            source: self.wanted.source.clone(),
            version: self.version,
            traceparent: self.wanted.traceparent.clone(),
            finished: self.finished,
            stopped: self.stopped,
        }
    }

    /// The object with our status in place of its own; unknown fields are kept.
    fn json(&self) -> Vec<u8> {
        let Ok(mut value) = serde_json::from_slice::<serde_json::Value>(&self.wanted.raw) else {
            return self.wanted.raw.to_vec();
        };
        if let (Some(object), Ok(status)) = (value.as_object_mut(), serde_json::to_value(&*self.status)) {
            object.insert("status".to_owned(), status);
        }
        if let Some((since, grace)) = self.ending {
            self.show_ending(&mut value, since, grace);
        }
        serde_json::to_vec(&value).unwrap_or_else(|_| self.wanted.raw.to_vec())
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
