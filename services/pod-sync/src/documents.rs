//! Pods with the status that this node sees, as they are shown to others.

use std::sync::Arc;

use keelson_kube_model::PodStatus;
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
        serde_json::to_vec(&value).unwrap_or_else(|_| self.wanted.raw.to_vec())
    }
}
