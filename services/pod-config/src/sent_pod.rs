//! A desired pod as it was sent to subscribers.

use std::sync::Arc;

use keelson_pod_config_core::desired_pod::DesiredPod;
use keelson_pod_config_core::sent_record::SentRecord;
use keelson_proto::keelson::pod_config::v1 as pb;

/// A pod and its version.
#[derive(Debug)]
pub struct SentPod {
    /// The record, shared with the source.
    pub pod: Arc<DesiredPod>,
    /// The name of the source.
    pub source: String,
    /// The version, which the checkpoint stores.
    pub record: SentRecord,
    /// When the pod was added to a source that had been read before, nanoseconds since 1970; else 0.
    pub added_unix_nanos: i64,
}

impl SentPod {
    /// The message to subscribers.
    pub fn to_wire(&self) -> pb::DesiredPod {
        let Self { pod, source, record, added_unix_nanos } = self;
        pb::DesiredPod {
            uid: pod.uid.clone(),
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            source: source.clone(),
            pod_json: pod.annotated_json(source, record.seen_unix_nanos).into(),
            revision: record.revision,
            traceparent: record.traceparent.clone(),
            origin: pod.origin.clone(),
            seen_unix_nanos: record.seen_unix_nanos,
            added_unix_nanos: *added_unix_nanos,
        }
    }
}
