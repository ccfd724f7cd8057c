//! A pod with its status, as `ListPods` and `WatchPods` send it: complete, or as two halves of which the pod is sent only when it has
//! changed.
//!
//! The bytes of the annotated pod are never decoded as a whole. The complete document is these bytes with another `status`, and for a pod
//! that is ending with another `metadata`.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use keelson_kube_model::time::format_seconds;
use keelson_kube_model::{JsonFields, PodStatus};
use keelson_pod_sync_core::moment::SECOND;
use keelson_pod_sync_core::worker::WorkerPhase;
use keelson_proto::keelson::pod_sync::v1 as pb;

use crate::state::pod_state::{DesiredPod, PodState};

/// One version of a pod. The JSON is made when it is sent.
#[derive(Debug, Clone)]
pub struct Document {
    /// The pod: `raw` is as its source has it, with the annotations of source and first-seen time, `pod` has the resources that it was admitted with.
    pub desired: Arc<DesiredPod>,
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

/// `metadata.deletionTimestamp` and `metadata.deletionGracePeriodSeconds` of a pod that is ending and whose source does not have them.
struct Deletion {
    unix_seconds: i64,
    grace_seconds: i64,
    timestamp: String,
}

impl Document {
    /// The document of a pod in its present state.
    pub fn of(state: &PodState, desired: Arc<DesiredPod>) -> Self {
        let (worker, published) = (&state.worker, &state.published);
        // A pod that ran to its end by itself is not being deleted.
        let is_deleted = worker.phase != WorkerPhase::Sync && !worker.desired && !published.released;
        let ending = is_deleted
            .then_some(worker.terminating_since_unix_nanos)
            .flatten()
            .map(|since| (since, worker.grace_seconds.unwrap_or(0)));
        let finished =
            published.released || (worker.phase == WorkerPhase::Finished && !state.awaits_cleanup());
        let is_over = matches!(worker.phase, WorkerPhase::Terminated | WorkerPhase::Finished);
        let stopped = published.stopped || finished || is_over || published.rejected;
        let status = Arc::clone(&published.status);
        Self { desired, status, version: published.version, finished, stopped, ending }
    }

    /// The message with the complete Pod in `pod_json`: our status in place of its own, unknown fields as they are.
    pub fn complete_message(&self) -> pb::PodDocument {
        let json = self.complete_json().map(Bytes::from);
        pb::PodDocument { pod_json: json.unwrap_or_else(|_| self.desired.raw.clone()), ..self.header() }
    }

    /// The message with the status apart. `with_pod`: it contains the annotated Pod of its source, too.
    pub fn separate_message(&self, with_pod: bool) -> pb::PodDocument {
        let deletion = self.deletion();
        pb::PodDocument {
            pod_json: if with_pod { self.desired.raw.clone() } else { Bytes::new() },
            status_json: self.status_json().into(),
            pod_revision: self.desired.revision,
            deletion_unix_seconds: deletion.as_ref().map_or(0, |deletion| deletion.unix_seconds),
            deletion_grace_seconds: deletion.as_ref().map_or(0, |deletion| deletion.grace_seconds),
            ..self.header()
        }
    }

    /// The message without JSON.
    fn header(&self) -> pb::PodDocument {
        let meta = &self.desired.pod.metadata;
        pb::PodDocument {
            uid: meta.uid.clone(),
            namespace: meta.namespace.clone(),
            name: meta.name.clone(),
            source: self.desired.source.clone(),
            version: self.version,
            traceparent: self.desired.traceparent.clone(),
            finished: self.finished,
            stopped: self.stopped,
            ..pb::PodDocument::default()
        }
    }

    fn status_json(&self) -> Vec<u8> {
        // An empty object, because an empty `status_json` would mean that the status is in `pod_json`.
        serde_json::to_vec(&*self.status).unwrap_or_else(|_| b"{}".to_vec())
    }

    fn complete_json(&self) -> Result<Vec<u8>, serde_json::Error> {
        let (status, deletion) = (self.status_json(), self.deletion());
        let mut pod = JsonFields::parse(&self.desired.raw)?;
        pod.set("status", &status);
        let metadata = deletion.zip(pod.get("metadata")).map(|(deletion, json)| deletion.add_to(json));
        if let Some(Ok(metadata)) = &metadata {
            pod.set("metadata", metadata);
        }
        pod.to_json()
    }

    fn deletion(&self) -> Option<Deletion> {
        let (since, grace_seconds) = self.ending?;
        if self.desired.pod.metadata.deletion_timestamp.is_some() {
            return None;
        }
        let unix_seconds = since.div_euclid(SECOND).saturating_add(grace_seconds);
        let timestamp = format_seconds(unix_seconds).ok()?;
        Some(Deletion { unix_seconds, grace_seconds, timestamp })
    }
}

impl Deletion {
    /// Adds the fields to the JSON of a pod's metadata.
    fn add_to(&self, metadata: &[u8]) -> Result<Vec<u8>, serde_json::Error> {
        let timestamp = serde_json::to_vec(&self.timestamp)?;
        let grace = serde_json::to_vec(&self.grace_seconds)?;
        let mut fields = JsonFields::parse(metadata)?;
        if fields.get("deletionTimestamp").is_none_or(|json| json == b"null") {
            fields.set("deletionTimestamp", &timestamp);
            fields.set("deletionGracePeriodSeconds", &grace);
        }
        fields.to_json()
    }
}

/// The pods that one stream has sent, by UID, so that it sends each revision of a pod once.
#[derive(Debug, Default)]
pub struct SentPods(BTreeMap<String, (u64, Bytes)>);

impl SentPods {
    /// The message with the status apart, and with the pod if this stream has not sent this revision of it.
    pub fn message(&mut self, document: &Document) -> pb::PodDocument {
        let desired = &document.desired;
        // The bytes are compared, too: a pod that was restored has no revision of its source.
        let pod = (desired.revision, desired.raw.clone());
        let with_pod = self.0.get(&desired.pod.metadata.uid) != Some(&pod);
        if with_pod {
            self.0.insert(desired.pod.metadata.uid.clone(), pod);
        }
        document.separate_message(with_pod)
    }

    /// The stream has said that the pod is gone.
    pub fn forget(&mut self, uid: &str) {
        self.0.remove(uid);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn document(raw: &str, status: PodStatus, ending: Option<(i64, i64)>) -> Document {
        let desired = Arc::new(DesiredPod {
            pod: Arc::new(serde_json::from_str(raw).unwrap()),
            raw: Bytes::from(raw.to_owned()),
            source: "file".into(),
            traceparent: "trace".into(),
            revision: 7,
            added_unix_nanos: 0,
        });
        Document { desired, status: Arc::new(status), version: 3, finished: false, stopped: true, ending }
    }

    /// Pods as a source may send them, in the order of their fields.
    const PODS: [&str; 7] = [
        r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web","namespace":"shop","uid":"u","labels":{"b":"1","a":"2"}},
            "spec":{"containers":[{"name":"c","image":"i:1","resources":{"limits":{"cpu":"0.50"}}}]}}"#,
        // A status of its own, in the middle, and fields that no type here has.
        r#"{"metadata":{"uid":"u","futureField":{"x":[1,2.5,1e3]}},"status":{"phase":"Pending","podIP":"10.0.0.9"},
            "spec":{"containers":[],"futureField":null},"extra":"\u00e9\n\"quoted\""}"#,
        // Ending at its source already.
        r#"{"metadata":{"uid":"u","deletionTimestamp":"2026-01-02T03:04:05Z","deletionGracePeriodSeconds":9},"spec":{}}"#,
        r#"{"metadata":{"uid":"u","deletionTimestamp":null,"deletionGracePeriodSeconds":null},"spec":{}}"#,
        r#"{"spec":{"containers":[]},"metadata":{"uid":"u","annotations":{"k":"{\"status\":1}"}}}"#,
        r#"{"spec":{"hostNetwork":true}}"#,
        r#"{}"#,
    ];

    fn cases() -> Vec<Document> {
        let running =
            PodStatus { phase: "Running".into(), pod_ip: "10.0.0.2".into(), ..PodStatus::default() };
        let endings = [None, Some((1_700_000_000_900_000_000, 30)), Some((i64::MAX, 0)), Some((1, i64::MAX))];
        let mut cases = Vec::new();
        for raw in PODS {
            for status in [PodStatus::default(), running.clone()] {
                cases.extend(endings.map(|ending| document(raw, status.clone(), ending)));
            }
        }
        cases
    }

    /// The complete document by way of a tree of the whole pod.
    fn by_tree(document: &Document) -> Value {
        let mut pod: Value = serde_json::from_slice(&document.desired.raw).unwrap();
        let object = pod.as_object_mut().unwrap();
        object.insert("status".to_owned(), serde_json::to_value(&*document.status).unwrap());
        let ending = document.ending.and_then(|(since, grace)| {
            let at = since.div_euclid(SECOND).saturating_add(grace);
            Some((format_seconds(at).ok()?, grace))
        });
        if let (Some((at, grace)), Some(meta)) = (ending, pod.get_mut("metadata"))
            && meta.get("deletionTimestamp").is_none_or(Value::is_null)
        {
            meta["deletionTimestamp"] = at.into();
            meta["deletionGracePeriodSeconds"] = grace.into();
        }
        pod
    }

    /// What a reader makes of the two halves.
    fn merged(message: &pb::PodDocument) -> Value {
        let mut pod: Value = serde_json::from_slice(&message.pod_json).unwrap();
        pod["status"] = serde_json::from_slice(&message.status_json).unwrap();
        let (at, grace) = (message.deletion_unix_seconds, message.deletion_grace_seconds);
        if (at, grace) != (0, 0)
            && let Some(meta) = pod.get_mut("metadata")
        {
            meta["deletionTimestamp"] = format_seconds(at).unwrap().into();
            meta["deletionGracePeriodSeconds"] = grace.into();
        }
        pod
    }

    #[test]
    fn the_complete_document_has_our_status_and_every_other_field_in_its_order() {
        for document in cases() {
            let message = document.complete_message();
            let got: Value = serde_json::from_slice(&message.pod_json).unwrap();
            // As text, because the order of the fields counts.
            assert_eq!(got.to_string(), by_tree(&document).to_string());
            assert_eq!((message.status_json.len(), message.pod_revision), (0, 0));
            assert_eq!((message.deletion_unix_seconds, message.deletion_grace_seconds), (0, 0));
            assert_eq!((message.version, message.stopped, message.finished), (3, true, false));
        }
        let no_json = Document {
            desired: Arc::new(DesiredPod { raw: Bytes::new(), ..(*cases()[0].desired).clone() }),
            ..cases()[0].clone()
        };
        assert_eq!(no_json.complete_message().pod_json, Bytes::new());
    }

    #[test]
    fn the_pod_and_its_separate_status_are_together_the_complete_document() {
        for document in cases() {
            let halves = document.separate_message(true);
            assert_eq!(halves.pod_json, document.desired.raw, "the bytes of the annotated pod");
            assert_eq!(merged(&halves).to_string(), by_tree(&document).to_string());
            let header = pb::PodDocument { pod_json: Bytes::new(), ..document.complete_message() };
            let rest = pb::PodDocument {
                status_json: Bytes::new(),
                pod_revision: 0,
                deletion_unix_seconds: 0,
                deletion_grace_seconds: 0,
                ..document.separate_message(false)
            };
            assert_eq!(rest, header);
        }
    }

    #[test]
    fn a_stream_sends_each_revision_of_a_pod_once() {
        let first = document(PODS[0], PodStatus::default(), None);
        let with_status = Document {
            status: Arc::new(PodStatus { phase: "Running".into(), ..PodStatus::default() }),
            ..first.clone()
        };
        let (mut sent, mut other) = (SentPods::default(), SentPods::default());
        assert_eq!(sent.message(&first).pod_json, first.desired.raw);
        let message = sent.message(&with_status);
        assert_eq!((message.pod_json.len(), message.pod_revision), (0, 7));
        assert_eq!(serde_json::from_slice::<Value>(&message.status_json).unwrap()["phase"], json!("Running"));
        assert_eq!(other.message(&with_status).pod_json, first.desired.raw, "another stream");

        let with_desired = |desired| Document { desired: Arc::new(desired), ..first.clone() };
        let next = DesiredPod { revision: 8, ..(*first.desired).clone() };
        assert_eq!(sent.message(&with_desired(next)).pod_json, first.desired.raw);
        // A pod restored from a record, whose revision is not known, then the same UID with other bytes.
        let raw = Bytes::from_static(br#"{"metadata":{"uid":"u"}}"#);
        let restored = DesiredPod { revision: 0, ..(*first.desired).clone() };
        assert_eq!(sent.message(&with_desired(restored)).pod_json, first.desired.raw);
        let changed = with_desired(DesiredPod { revision: 0, raw: raw.clone(), ..(*first.desired).clone() });
        assert_eq!(sent.message(&changed).pod_json, raw);
        assert_eq!(sent.message(&changed).pod_json, Bytes::new());
        sent.forget("u");
        assert_eq!(sent.message(&changed).pod_json, raw, "the UID was gone");
    }
}
