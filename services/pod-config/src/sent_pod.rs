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
    /// The message to a subscriber. All that want the Pod `unannotated` share its bytes; others get a copy with source and time as
    /// annotations.
    pub fn to_wire(&self, unannotated: bool) -> pb::DesiredPod {
        let Self { pod, source, record, added_unix_nanos } = self;
        let pod_json = if unannotated {
            pod.json.clone()
        } else {
            pod.annotated_json(source, record.seen_unix_nanos).into()
        };
        pb::DesiredPod {
            uid: pod.uid.clone(),
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            source: source.clone(),
            pod_json,
            revision: record.revision,
            traceparent: record.traceparent.clone(),
            origin: pod.origin.clone(),
            seen_unix_nanos: record.seen_unix_nanos,
            added_unix_nanos: *added_unix_nanos,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unannotated_messages_share_the_bytes_of_the_pod() {
        let value = json!({"metadata": {"name": "web", "uid": "u"}, "spec": {"containers": []}});
        let pod = DesiredPod::new(&value, &serde_json::from_value(value.clone()).unwrap(), "/m/web.yaml");
        let record =
            SentRecord { seen_unix_nanos: 5_000_000_000, revision: 7, digest: 0, traceparent: String::new() };
        let sent = SentPod { pod: Arc::new(pod), source: "file".into(), record, added_unix_nanos: 0 };
        let (first, second) = (sent.to_wire(true), sent.to_wire(true));
        assert_eq!(first.pod_json, value.to_string());
        assert_eq!(first.pod_json.as_ptr(), second.pod_json.as_ptr(), "no copy");
        assert_eq!((first.source.as_str(), first.seen_unix_nanos), ("file", 5_000_000_000));

        let mut annotated = value;
        annotated["metadata"]["annotations"] = json!({
            "kubernetes.io/config.source": "file", "kubernetes.io/config.seen": "1970-01-01T00:00:05Z",
        });
        let expected = pb::DesiredPod { pod_json: annotated.to_string().into(), ..first };
        assert_eq!(sent.to_wire(false), expected, "for clients of earlier releases");
    }
}
