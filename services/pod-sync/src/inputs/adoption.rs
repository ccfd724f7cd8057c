//! Static pods that a kubelet has started and that keep the UIDs under which they run (docs/adr/0022).

use std::sync::Arc;
use std::time::Duration;

use keelson_kube_model::annotations::CONFIG_HASH;
use keelson_kube_model::with_source_annotations;
use keelson_pod_sync_core::adoption::SOURCES;
use keelson_proto::keelson::pod_config::v1::DesiredPod;
use keelson_service_kit::Backoff;
use serde_json::Value;

use crate::effects::Effects;
use crate::state::observed::Observed;
use crate::state::pod_state::decode_pod;
use crate::turn::adoption::difference;

/// The condition of the service's health that says why a static pod waits.
const CONDITION: &str = "static pods of a kubelet";

/// Whether a kubelet may have started a pod under another UID: it is a static pod whose UID was computed, and nothing is known of it.
pub fn may_run_already(effects: &Effects, pod: &DesiredPod) -> bool {
    SOURCES.contains(&pod.source.as_str())
        && is_computed(&pod.uid)
        && effects.registry.read(&pod.uid, |_| ()).is_none()
}

/// Whether a UID is one that an agent has computed from a manifest.
fn is_computed(uid: &str) -> bool {
    uid.len() == 32 && uid.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// What runs under the name of this pod with another computed UID, and belongs to no known pod.
pub fn candidate(effects: &Effects, pod: &DesiredPod) -> Option<Observed> {
    let unclaimed = effects.registry.unclaimed();
    if unclaimed.get(&pod.uid).is_some_and(|observed| observed.any_sandbox_ready()) {
        return None;
    }
    let is_candidate = |observed: &&Observed| {
        observed.name == pod.name
            && observed.namespace == pod.namespace
            && is_computed(observed.uid.as_str())
            && observed.ready_sandbox().is_some()
    };
    let created = |observed: &&Observed| observed.ready_sandbox().map(|sandbox| sandbox.created_unix_nanos);
    unclaimed.values().filter(is_candidate).max_by_key(created).map(Arc::clone)
}

/// Whether a pod keeps the UID of what runs. Tries again while a service or the runtime does not answer.
pub async fn keeps_uid(effects: &Effects, pod: &DesiredPod, uid: &str) -> bool {
    let name = format!("{}/{}", pod.namespace, pod.name);
    let renamed = with_uid(pod.clone(), uid);
    let json = with_source_annotations(&renamed.pod_json, &pod.source, pod.seen_unix_nanos);
    let Ok(typed) = decode_pod(&json) else { return false };
    let mut delay = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
    let progress = &effects.context.progress;
    let difference = loop {
        match difference(effects, &typed, &pod.source).await {
            Ok(difference) => break difference,
            Err(error) => {
                let text =
                    format!("cannot compare the static pod {name} with what runs of it: {}", error.message);
                progress.condition(CONDITION, Err(text));
                tokio::time::sleep(delay.next_delay()).await;
            }
        }
    };
    progress.condition(CONDITION, Ok(()));
    if let Some(difference) = &difference {
        tracing::info!(
            event = "static_pod_not_adopted",
            pod = name,
            uid,
            difference,
            "the static pod of this name that runs differs from its manifest; it is replaced"
        );
    } else {
        tracing::info!(
            event = "static_pod_adopted",
            pod = name,
            uid,
            "the static pod runs already as its manifest asks for; it keeps its UID"
        );
    }
    difference.is_none()
}

/// The pod with the UID under which it runs, if that is not the one of its source.
pub fn with_own_uid(effects: &Effects, pod: DesiredPod) -> DesiredPod {
    match effects.registry.adopted.of_source(&pod.uid) {
        Some(uid) => with_uid(pod, &uid),
        None => pod,
    }
}

fn with_uid(pod: DesiredPod, uid: &str) -> DesiredPod {
    let Ok(mut json) = serde_json::from_slice::<Value>(&pod.pod_json) else { return pod };
    json["metadata"]["uid"] = uid.into();
    json["metadata"]["annotations"][CONFIG_HASH] = uid.into();
    DesiredPod { uid: uid.to_owned(), pod_json: json.to_string().into_bytes().into(), ..pod }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_computed_uid_has_32_lower_case_hexadecimal_digits() {
        for (uid, computed) in [
            ("0123456789abcdef0123456789abcdef", true),
            ("0123456789ABCDEF0123456789abcdef", false),
            ("0123456789abcdef0123456789abcde", false),
            ("01234567-89ab-cdef-0123-456789abcdef", false),
            ("", false),
        ] {
            assert_eq!(is_computed(uid), computed, "{uid}");
        }
    }

    #[test]
    fn an_adopted_pod_has_its_uid_as_hash_and_keeps_every_other_field() {
        let json =
            r#"{"metadata":{"annotations":{"a":"b","kubernetes.io/config.hash":"x"},"uid":"x"},"new":1.50}"#;
        let pod = DesiredPod { uid: "x".into(), revision: 7, pod_json: json.into(), ..DesiredPod::default() };
        let renamed = with_uid(pod, "y");
        assert_eq!((renamed.uid.as_str(), renamed.revision), ("y", 7));
        let renamed: Value = serde_json::from_slice(&renamed.pod_json).unwrap();
        let mut expected: Value = serde_json::from_str(json).unwrap();
        expected["metadata"]["uid"] = "y".into();
        expected["metadata"]["annotations"]["kubernetes.io/config.hash"] = "y".into();
        assert_eq!(renamed, expected);
    }
}
