//! What the commands show and check of PersistentVolumes and PersistentVolumeClaims.

use serde_json::Value;

use super::manifests::ObjectKind;
use crate::human;
use crate::pods::{self, PodEntry};

/// The phase of a PersistentVolume or claim that is bound.
const BOUND: &str = "Bound";

/// `metadata.name`.
pub(crate) fn name(object: &Value) -> &str {
    text(object, "/metadata/name")
}

/// `metadata.namespace`; empty for a PersistentVolume.
pub(crate) fn namespace(object: &Value) -> &str {
    text(object, "/metadata/namespace")
}

/// The name without its type: `db` for `pvc/db`.
pub(crate) fn bare_name_of(kind: ObjectKind, name: &str) -> &str {
    let short = match kind {
        ObjectKind::Pod => return pods::bare_name(name),
        ObjectKind::Secret | ObjectKind::ConfigMap => return name,
        ObjectKind::PersistentVolumeClaim => "pvc",
        ObjectKind::PersistentVolume => "pv",
    };
    let plural = kind.plural();
    let types = [short, plural.trim_end_matches('s'), plural.as_str()];
    name.split_once('/').filter(|(written, _)| types.contains(written)).map_or(name, |(_, bare)| bare)
}

/// The age as `kubectl` shows it. The object was created when pod-config first saw it; an older one does not say when.
pub(crate) fn age(object: &Value, now: i64) -> String {
    let created = object.pointer("/metadata/creationTimestamp").and_then(Value::as_str);
    human::since(human::nanos_of(created), now)
}

fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

/// The status of a PersistentVolume or claim as `kubectl` shows it: `Terminating` from its deletion on, else its phase.
pub(crate) fn status(object: &Value) -> &str {
    let deleted = object.pointer("/metadata/deletionTimestamp").is_some_and(|value| !value.is_null());
    match text(object, "/status/phase") {
        _ if deleted => "Terminating",
        "" => "Unknown",
        phase => phase,
    }
}

/// Why a claim is not bound; empty if it is, or if nothing is known.
pub(crate) fn reason(claim: &Value) -> String {
    if text(claim, "/status/phase") == "Lost" {
        return format!("the PersistentVolume {} is gone", text(claim, "/spec/volumeName"));
    }
    let conditions = claim.pointer("/status/conditions").and_then(Value::as_array);
    let unbound = conditions.into_iter().flatten().find(|c| c["type"] == BOUND && c["status"] == "False");
    unbound.map(|condition| text(condition, "/message").to_owned()).unwrap_or_default()
}

/// The claim that a PersistentVolume refers to, as `namespace/name`; empty if it refers to none.
pub(crate) fn claim_of(volume: &Value) -> String {
    match (text(volume, "/spec/claimRef/namespace"), text(volume, "/spec/claimRef/name")) {
        (_, "") => String::new(),
        (namespace, name) => format!("{namespace}/{name}"),
    }
}

/// The claim that has the PersistentVolume, as `namespace/name`.
pub(crate) fn binding_of(volume: &Value) -> Option<String> {
    (text(volume, "/status/phase") == BOUND).then(|| claim_of(volume))
}

/// The access modes as `kubectl` abbreviates them.
pub(crate) fn access_modes(modes: Option<&Value>) -> String {
    let short = |mode: &str| match mode {
        "ReadWriteOnce" => "RWO".to_owned(),
        "ReadOnlyMany" => "ROX".to_owned(),
        "ReadWriteMany" => "RWX".to_owned(),
        "ReadWriteOncePod" => "RWOP".to_owned(),
        other => other.to_owned(),
    };
    let modes = modes.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    modes.map(short).collect::<Vec<_>>().join(",")
}

/// The storage class. The annotation takes precedence over the field, as for a kubelet (volumes.md §3.4).
pub(crate) fn class(object: &Value) -> String {
    let annotation = "/metadata/annotations/volume.beta.kubernetes.io~1storage-class";
    let of_annotation = object.pointer(annotation).and_then(Value::as_str);
    of_annotation.unwrap_or_else(|| text(object, "/spec/storageClassName")).to_owned()
}

/// The size of a PersistentVolume.
pub(crate) fn capacity(volume: &Value) -> String {
    text(volume, "/spec/capacity/storage").to_owned()
}

/// What a claim requests.
pub(crate) fn request(claim: &Value) -> String {
    text(claim, "/spec/resources/requests/storage").to_owned()
}

/// `spec.volumeMode`.
pub(crate) fn volume_mode(object: &Value) -> String {
    match text(object, "/spec/volumeMode") {
        "" => "Filesystem".to_owned(),
        mode => mode.to_owned(),
    }
}

/// `spec.persistentVolumeReclaimPolicy`.
pub(crate) fn reclaim_policy(volume: &Value) -> String {
    match text(volume, "/spec/persistentVolumeReclaimPolicy") {
        "" => "Retain".to_owned(),
        policy => policy.to_owned(),
    }
}

/// The PersistentVolume of a claim.
pub(crate) fn volume_of(claim: &Value) -> String {
    text(claim, "/spec/volumeName").to_owned()
}

/// The size of the PersistentVolume that a claim is bound to.
pub(crate) fn bound_capacity(claim: &Value) -> String {
    text(claim, "/status/capacity/storage").to_owned()
}

/// Whether a pod has a volume of the claim `name` of its namespace.
pub(crate) fn uses_claim(pod: &keelson_kube_model::Pod, name: &str) -> bool {
    let claims = pod.spec.volumes.iter().filter_map(|volume| volume.persistent_volume_claim.as_ref());
    claims.into_iter().any(|claim| claim.claim_name == name)
}

/// The names of the pods that use a claim, except those with the UIDs of `deleted`.
pub(crate) fn users<'a>(
    pods: &'a [PodEntry],
    namespace: &str,
    claim: &str,
    deleted: &[&str],
) -> Vec<&'a str> {
    let using = pods.iter().filter(|pod| {
        pod.document.namespace == namespace
            && !pod.document.finished
            && !deleted.contains(&pod.document.uid.as_str())
            && pod.pod.as_ref().is_some_and(|pod| uses_claim(pod, claim))
    });
    using.map(|pod| pod.document.name.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use keelson_proto::keelson::pod_sync::v1::PodDocument;
    use serde_json::json;

    use super::*;

    #[test]
    fn names_may_begin_with_their_own_type_only() {
        for (kind, name, expected) in [
            (ObjectKind::PersistentVolumeClaim, "pvc/db", "db"),
            (ObjectKind::PersistentVolumeClaim, "persistentvolumeclaim/db", "db"),
            (ObjectKind::PersistentVolumeClaim, "persistentvolumeclaims/db", "db"),
            (ObjectKind::PersistentVolumeClaim, "pv/db", "pv/db"),
            (ObjectKind::PersistentVolume, "persistentvolumes/disk", "disk"),
            (ObjectKind::PersistentVolume, "disk", "disk"),
            (ObjectKind::Pod, "pod/web", "web"),
        ] {
            assert_eq!(bare_name_of(kind, name), expected, "{name}");
        }
    }

    #[test]
    fn age_is_unknown_without_a_creation_time() {
        let now = human::nanos_of(Some("2026-01-01T01:00:00Z"));
        assert_eq!(age(&json!({"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}}), now), "60m");
        assert_eq!(age(&json!({"metadata": {"creationTimestamp": null}}), now), "<unknown>");
    }

    #[test]
    fn status_of_a_deleted_object_is_terminating_whatever_its_phase() {
        for (object, expected) in [
            (json!({"status": {"phase": "Bound"}}), "Bound"),
            (json!({"status": {"phase": "Released"}, "metadata": {"deletionTimestamp": null}}), "Released"),
            (
                json!({"status": {"phase": "Bound"}, "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}),
                "Terminating",
            ),
            (json!({}), "Unknown"),
        ] {
            assert_eq!(status(&object), expected, "{object}");
        }
    }

    #[test]
    fn pending_and_lost_claims_have_a_reason_and_bound_ones_have_none() {
        let condition = |kind: &str, status: &str| {
            json!({"status": {"phase": "Pending", "conditions": [
            {"type": "Resizing", "status": "False", "message": "x"}, {"type": kind, "status": status, "message": "no volume fits"}]}})
        };
        for (claim, expected) in [
            (condition("Bound", "False"), "no volume fits"),
            (condition("Bound", "True"), ""),
            (condition("Other", "False"), ""),
            (
                json!({"status": {"phase": "Lost"}, "spec": {"volumeName": "disk"}}),
                "the PersistentVolume disk is gone",
            ),
            (json!({"status": {"phase": "Bound"}}), ""),
        ] {
            assert_eq!(reason(&claim), expected, "{claim}");
        }
    }

    #[test]
    fn a_volume_is_bound_only_in_the_phase_bound() {
        let volume = |phase: &str| json!({"status": {"phase": phase}, "spec": {"claimRef": {"namespace": "web", "name": "db"}}});
        assert_eq!(binding_of(&volume("Bound")).as_deref(), Some("web/db"));
        assert_eq!((binding_of(&volume("Released")), claim_of(&volume("Released"))), (None, "web/db".into()));
        assert_eq!(claim_of(&json!({"spec": {"claimRef": {}}})), "");
    }

    #[test]
    fn access_modes_are_abbreviated_and_unknown_ones_shown() {
        let modes = json!(["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod", "New"]);
        assert_eq!(access_modes(Some(&modes)), "RWO,ROX,RWX,RWOP,New");
        assert_eq!(access_modes(None), "");
    }

    #[test]
    fn class_annotation_takes_precedence_over_the_field() {
        let mut claim = json!({"spec": {"storageClassName": "disks"}});
        assert_eq!(class(&claim), "disks");
        claim["metadata"] = json!({"annotations": {"volume.beta.kubernetes.io/storage-class": "old"}});
        assert_eq!(class(&claim), "old");
    }

    #[test]
    fn users_of_a_claim_are_the_pods_of_its_namespace_that_are_not_deleted() {
        let pod = |namespace: &str, name: &str, claim: &str, finished: bool| {
            let spec = json!({"containers": [], "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]});
            PodEntry::new(PodDocument {
                uid: format!("uid-{name}"),
                namespace: namespace.into(),
                name: name.into(),
                pod_json: json!({"metadata": {"name": name}, "spec": spec}).to_string().into(),
                finished,
                ..PodDocument::default()
            })
        };
        let pods = [
            pod("default", "a", "db", false),
            pod("default", "b", "other", false),
            pod("web", "c", "db", false),
            pod("default", "d", "db", true),
            pod("default", "e", "db", false),
        ];
        assert_eq!(users(&pods, "default", "db", &[]), ["a", "e"]);
        assert_eq!(users(&pods, "default", "db", &["uid-e"]), ["a"]);
        assert_eq!(users(&pods, "web", "db", &[]), ["c"]);
    }
}
