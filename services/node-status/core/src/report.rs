//! What is reported of a pod.
//!
//! [`ReportedPod`] is decoded once for each revision of a pod, [`ReportedStatus`] once for each status. Both keep the JSON that
//! is written as text, and decoded only what is compared.

use std::borrow::Cow;
use std::sync::Arc;

use keelson_kube_model::pod_ext::API;
use keelson_kube_model::{PodFullName, time};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

/// How far the termination of a pod is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Termination {
    /// None of its containers runs, and none will be started.
    pub stopped: bool,
    /// Nothing of it is left on this node.
    pub finished: bool,
}

/// When a pod is deleted whose source does not say that it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Deletion {
    /// `metadata.deletionTimestamp`, in seconds since 1970.
    pub unix_seconds: i64,
    /// `metadata.deletionGracePeriodSeconds`.
    pub grace_seconds: i64,
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

/// The report of a pod: one is shared by everything that compares, queues or writes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodReport {
    /// UID as pod-sync knows it.
    pub uid: String,
    /// Name and namespace.
    pub name: PodFullName,
    /// Where the pod comes from: `file`, `api`…
    pub source: String,
    /// The pod without its status.
    pub pod: Arc<ReportedPod>,
    /// The status.
    pub status: ReportedStatus,
    /// When it is deleted, if its source does not say so.
    pub deletion: Option<Deletion>,
    /// How far its termination is.
    pub termination: Termination,
}

impl PodReport {
    /// Whether it is a static pod: an API server has at most its mirror pod.
    pub fn is_static(&self) -> bool {
        self.source != API
    }

    /// Whether it is being deleted.
    pub fn is_deleting(&self) -> bool {
        self.pod.is_deleting || self.deletion.is_some()
    }

    /// The Pod with this status, as JSON; `None` if the report does not have the pod's own JSON.
    pub fn document(&self) -> Option<Vec<u8>> {
        Some(self.pod.json.as_ref()?.with_status(&self.status.json, self.deletion))
    }

    /// The Pod as its source has it, with null as its status; `None` as in [`Self::document`].
    pub fn pod(&self) -> Option<Value> {
        serde_json::from_slice(&self.pod.json.as_ref()?.with_status(b"null", None)).ok()
    }
}

/// The parts of a pod that are reported or compared, without its status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReportedPod {
    /// `spec.hostNetwork`.
    pub host_network: bool,
    /// Its source says that it is being deleted: it has a `metadata.deletionTimestamp`.
    pub is_deleting: bool,
    /// The annotation `kubernetes.io/config.hash`.
    pub config_hash: Option<Box<str>>,
    /// The annotation `kubernetes.io/config.seen`: when the agent first saw the pod, RFC 3339; otherwise empty.
    pub seen: Box<str>,
    /// The JSON of the pod; only if the control plane is sent the pod itself.
    pub json: Option<PodJson>,
}

/// A Pod as pod-sync sends it.
#[derive(Deserialize)]
struct Document<'a> {
    #[serde(borrow, default, deserialize_with = "present")]
    metadata: Option<&'a RawValue>,
    #[serde(default)]
    spec: Spec,
    #[serde(borrow, default, deserialize_with = "present")]
    status: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Spec {
    host_network: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Metadata<'a> {
    #[serde(borrow)]
    annotations: Option<Annotations<'a>>,
    #[serde(borrow)]
    deletion_timestamp: Option<Cow<'a, str>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Annotations<'a> {
    #[serde(borrow, rename = "kubernetes.io/config.hash")]
    hash: Option<Cow<'a, str>>,
    #[serde(borrow, rename = "kubernetes.io/config.seen")]
    seen: Option<Cow<'a, str>>,
}

/// The text of a field, even if it is null.
pub(crate) fn present<'de: 'a, 'a, D: Deserializer<'de>>(field: D) -> Result<Option<&'a RawValue>, D::Error> {
    <&RawValue>::deserialize(field).map(Some)
}

impl ReportedPod {
    /// Decodes a Pod; returns it and the text of its status, if it has one. The JSON itself is kept only `with_json`.
    ///
    /// # Errors
    /// It is not the JSON of a Pod.
    pub fn decode(json: &[u8], with_json: bool) -> Result<(Self, Option<&str>), serde_json::Error> {
        let document: Document<'_> = serde_json::from_slice(json)?;
        let metadata = match document.metadata {
            Some(text) => serde_json::from_str::<Metadata<'_>>(text.get())?,
            None => Metadata::default(),
        };
        let annotations = metadata.annotations.unwrap_or_default();
        let own = Self {
            host_network: document.spec.host_network == Some(true),
            is_deleting: metadata.deletion_timestamp.is_some(),
            config_hash: annotations.hash.map(Into::into),
            seen: annotations.seen.unwrap_or_default().into(),
            json: with_json.then(|| PodJson::of(json, &document)),
        };
        Ok((own, document.status.map(RawValue::get)))
    }
}

/// The JSON of a Pod, with places for the status and the deletion of a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodJson {
    /// The text without the value of `status`.
    text: Box<[u8]>,
    /// Where the status belongs.
    status_at: usize,
    /// The end of the fields of `metadata`, and whether there is a field; `None`: the pod has no metadata.
    metadata_end: Option<(usize, bool)>,
}

impl PodJson {
    fn of(json: &[u8], document: &Document<'_>) -> Self {
        let start_of = |part: &RawValue| part.get().as_ptr().addr() - json.as_ptr().addr();
        let (before, key, after) = match document.status {
            Some(status) => {
                let start = start_of(status);
                (start, "", start + status.get().len())
            }
            None => {
                let end = json.iter().rposition(|byte| *byte == b'}').unwrap_or(json.len());
                let is_empty = json[..end].trim_ascii_end().ends_with(b"{");
                (end, if is_empty { r#""status":"# } else { r#","status":"# }, end)
            }
        };
        let metadata_end = document.metadata.and_then(|metadata| {
            let fields = metadata.get().strip_prefix('{')?.strip_suffix('}')?;
            let end = start_of(metadata) + metadata.get().len() - 1;
            let moved = if end > before { end - (after - before) + key.len() } else { end };
            Some((moved, !fields.trim_ascii().is_empty()))
        });
        let text = [&json[..before], key.as_bytes(), &json[after..]].concat();
        Self { text: text.into(), status_at: before + key.len(), metadata_end }
    }

    /// The whole JSON with this status, and with the deletion in its metadata.
    fn with_status(&self, status: &[u8], deletion: Option<Deletion>) -> Vec<u8> {
        let deletion = deletion.zip(self.metadata_end).and_then(|(deletion, (end, has_fields))| {
            let at = time::format_seconds(deletion.unix_seconds).ok()?;
            let separator = if has_fields { "," } else { "" };
            let grace = deletion.grace_seconds;
            let fields =
                format!(r#"{separator}"deletionTimestamp":"{at}","deletionGracePeriodSeconds":{grace}"#);
            Some((end, fields))
        });
        let mut inserted = vec![(self.status_at, status)];
        inserted.extend(deletion.as_ref().map(|(end, fields)| (*end, fields.as_bytes())));
        inserted.sort_by_key(|(at, _)| *at);
        let length = self.text.len() + inserted.iter().map(|(_, part)| part.len()).sum::<usize>();
        let (mut whole, mut written) = (Vec::with_capacity(length), 0);
        for (at, part) in inserted {
            whole.extend_from_slice(&self.text[written..at]);
            whole.extend_from_slice(part);
            written = at;
        }
        whole.extend_from_slice(&self.text[written..]);
        whole
    }
}

/// The status of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReportedStatus {
    /// The PodStatus as JSON.
    pub json: Box<[u8]>,
    /// `status.phase`; empty reads as `Pending`.
    pub phase: Box<str>,
    /// Whether the condition `Ready` is true.
    pub ready: bool,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Status<'a> {
    #[serde(borrow)]
    phase: Option<&'a str>,
    #[serde(borrow)]
    conditions: Option<Vec<Condition<'a>>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Condition<'a> {
    #[serde(rename = "type")]
    type_: &'a str,
    status: &'a str,
}

impl ReportedStatus {
    /// Decodes a status; returns it and all its fields.
    ///
    /// # Errors
    /// It is not the JSON of a PodStatus.
    pub fn decode(json: &[u8]) -> Result<(Self, Value), serde_json::Error> {
        let fields: Value = serde_json::from_slice(json)?;
        let status = Status::deserialize(&fields)?;
        let conditions = status.conditions.unwrap_or_default();
        let own = Self {
            json: json.into(),
            phase: status.phase.filter(|phase| !phase.is_empty()).unwrap_or("Pending").into(),
            ready: conditions
                .iter()
                .any(|condition| condition.type_ == "Ready" && condition.status == "True"),
        };
        Ok((own, fields))
    }

    /// All fields of the status; null if it is not JSON.
    pub fn fields(&self) -> Value {
        serde_json::from_slice(&self.json).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(pod: &str, status: &str, deletion: Option<Deletion>) -> String {
        let (pod, _) = ReportedPod::decode(pod.as_bytes(), true).unwrap();
        let (status, _) = ReportedStatus::decode(status.as_bytes()).unwrap();
        let report = PodReport { pod: Arc::new(pod), status, deletion, ..PodReport::default() };
        String::from_utf8(report.document().unwrap()).unwrap()
    }

    #[test]
    fn a_document_has_the_reported_status_in_place_of_its_own() {
        let status = r#"{"phase":"Running"}"#;
        for (pod, expected) in [
            ("{}", r#"{"status":{"phase":"Running"}}"#),
            (" { } ", r#" { "status":{"phase":"Running"}} "#),
            (r#"{"metadata":{"uid":"u"}}"#, r#"{"metadata":{"uid":"u"},"status":{"phase":"Running"}}"#),
            (r#"{"status":null,"x":"}"}"#, r#"{"status":{"phase":"Running"},"x":"}"}"#),
            (
                r#"{"x":{"status":1},"status":{"a":[1]}}"#,
                r#"{"x":{"status":1},"status":{"phase":"Running"}}"#,
            ),
        ] {
            assert_eq!(document(pod, status, None), expected, "{pod}");
        }
    }

    #[test]
    fn a_document_has_the_deletion_that_its_source_does_not_have() {
        let deletion = Some(Deletion { unix_seconds: 1_767_225_600, grace_seconds: 30 });
        let fields = r#""deletionTimestamp":"2026-01-01T00:00:00Z","deletionGracePeriodSeconds":30"#;
        for (pod, expected) in [
            (r#"{"metadata":{"a":"b"}}"#, format!(r#"{{"metadata":{{"a":"b",{fields}}},"status":{{}}}}"#)),
            (r#"{"metadata":{ },"z":1}"#, format!(r#"{{"metadata":{{ {fields}}},"z":1,"status":{{}}}}"#)),
            (
                r#"{"status":{"phase":"Pending"},"metadata":{"a":"b"}}"#,
                format!(r#"{{"status":{{}},"metadata":{{"a":"b",{fields}}}}}"#),
            ),
            ("{}", r#"{"status":{}}"#.to_owned()),
        ] {
            assert_eq!(document(pod, "{}", deletion), expected, "{pod}");
        }
    }

    #[test]
    fn a_pod_without_its_json_keeps_only_the_compared_fields() {
        let json = br#"{"metadata":{"deletionTimestamp":"2026-01-01T00:00:00Z","annotations":
            {"kubernetes.io/config.hash":"h","kubernetes.io/config.seen":"s"}},
            "spec":{"hostNetwork":true,"containers":[]},"status":{"phase":"Running"}}"#;
        let (pod, status) = ReportedPod::decode(json, false).unwrap();
        let expected = ReportedPod {
            host_network: true,
            is_deleting: true,
            config_hash: Some("h".into()),
            seen: "s".into(),
            json: None,
        };
        assert_eq!((pod, status), (expected, Some(r#"{"phase":"Running"}"#)));
        assert_eq!(ReportedPod::decode(b"{}", false).unwrap(), (ReportedPod::default(), None));
        assert!(ReportedPod::decode(b"no pod", false).is_err());
    }
}
