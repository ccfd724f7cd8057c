//! The volumes of a pod as rows.

use std::collections::{BTreeMap, BTreeSet};

use keelson_config::ServiceName;
use keelson_proto::keelson::volume_manager::v1::{PodVolumes, VolumeMount, VolumeWait};
use serde::Serialize;
use serde_json::Value;

use crate::pods::{PodEntry, Scope};
use crate::session::Session;

/// A volume as `-o json` shows it; `null` is an unknown value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct VolumeRow {
    pub(super) namespace: Option<String>,
    /// The name, or the UID for a pod that volume-manager knows and pod-sync does not.
    pub(super) pod: String,
    pub(super) uid: String,
    pub(super) volume: String,
    /// The field of the spec: `emptyDir`, `secret`…
    pub(super) kind: Option<String>,
    /// `mounted`, or the state of all volumes of the pod: `pending`, `failed`, `unmounting` or `unmounted`.
    pub(super) state: String,
    /// What it waits for, or why it failed; if that is not known of this volume, then of the volumes of the pod. Empty for a
    /// mounted volume.
    pub(super) message: String,
    /// Who has to act: `you`, or the name of a service or controller; `null` if that is not known.
    pub(super) owner: Option<String>,
    /// The path on this machine; `null` while it is not mounted.
    pub(super) path: Option<String>,
    pub(super) read_only: Option<bool>,
    /// The name of the claim in the pod's namespace; `null` without one.
    pub(super) claim: Option<String>,
    /// The name of the PersistentVolume; `null` without one, and before the volume is mounted.
    pub(super) persistent_volume: Option<String>,
}

/// The volumes of one pod: those of its spec, and further ones of volume-manager. `pod` is from pod-sync,
/// `pod_volumes` from volume-manager.
pub(super) fn rows(uid: &str, pod: Option<&PodEntry>, pod_volumes: Option<&PodVolumes>) -> Vec<VolumeRow> {
    let json = pod.and_then(|pod| pod.json().ok()).unwrap_or_default();
    let spec = json["spec"]["volumes"].as_array().map(Vec::as_slice).unwrap_or_default();
    let specified = spec.iter().filter_map(|volume| Some((volume["name"].as_str()?, Some(volume))));
    let mut names: BTreeMap<&str, Option<&Value>> = specified.collect();
    let (mounts, waits) =
        pod_volumes.map(|all| (all.volumes.as_slice(), all.waits.as_slice())).unwrap_or_default();
    let known = mounts.iter().map(|mount| &mount.name).chain(waits.iter().map(|wait| &wait.volume));
    for name in known {
        names.entry(name).or_default();
    }
    let row = |(name, spec): (&str, Option<&Value>)| {
        let mount = mounts.iter().find(|mount| mount.name == name);
        let wait = waits.iter().find(|wait| wait.volume == name);
        let pod_state = pod_volumes.map_or("pending", |pod_volumes| &pod_volumes.state);
        // A mounted volume is usable while others are still pending.
        let state =
            if mount.is_some() && matches!(pod_state, "pending" | "failed") { "mounted" } else { pod_state };
        let message = match (wait, pod_volumes) {
            (Some(wait), _) => &wait.message,
            // The message is about volumes with a wait of their own, or this one is mounted while others are not.
            (None, Some(_)) if !waits.is_empty() || state == "mounted" && pod_state != "mounted" => "",
            // If all volumes are mounted, the message is about a failed update of one of them.
            (None, Some(pod_volumes)) => &pod_volumes.message,
            (None, None) => "",
        };
        VolumeRow {
            namespace: pod.map(|pod| pod.document.namespace.clone()),
            pod: pod.map_or_else(|| uid.to_owned(), |pod| pod.document.name.clone()),
            uid: uid.to_owned(),
            volume: name.to_owned(),
            kind: spec.and_then(kind),
            state: state.to_owned(),
            message: message.to_owned(),
            owner: wait.map(owner),
            path: mount.map(|mount| mount.host_path.clone()),
            read_only: mount.map(|mount| mount.read_only),
            claim: mount.and_then(claim_of_mount).or_else(|| claim_in_spec(name, spec?, pod?)),
            persistent_volume: mount.and_then(|mount| non_empty(&mount.persistent_volume)),
        }
    };
    names.into_iter().map(row).collect()
}

/// The kind of a volume: its only field other than the name.
fn kind(volume: &Value) -> Option<String> {
    volume.as_object()?.keys().find(|key| *key != "name").cloned()
}

/// Who has to act so that a volume stops waiting.
fn owner(wait: &VolumeWait) -> String {
    non_empty(&wait.owner).unwrap_or_else(|| ServiceName::VolumeManager.to_string())
}

fn claim_of_mount(mount: &VolumeMount) -> Option<String> {
    non_empty(&mount.claim)
}

/// The claim that the spec of a volume names; that of an `ephemeral` volume is named after pod and volume.
fn claim_in_spec(name: &str, spec: &Value, pod: &PodEntry) -> Option<String> {
    if spec.get("ephemeral").is_some() {
        return Some(format!("{}-{name}", pod.document.name));
    }
    spec["persistentVolumeClaim"]["claimName"].as_str().map(ToOwned::to_owned)
}

fn non_empty(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

/// Selects the pods whose volumes are shown.
pub(super) struct PodFilter {
    pub(super) scope: Scope,
    /// Namespace and name of each named pod; empty for all of the scope.
    pub(super) names: BTreeSet<(String, String)>,
}

impl PodFilter {
    pub(super) fn matches(&self, pod: Option<&PodEntry>) -> bool {
        match pod {
            Some(pod) if self.names.is_empty() => self.scope.contains(&pod.document.namespace),
            Some(pod) => self.names.contains(&(pod.document.namespace.clone(), pod.document.name.clone())),
            // The namespace of an unknown pod is not known, so it is shown only with all namespaces.
            None => self.names.is_empty() && self.scope.namespace.is_none(),
        }
    }
}

pub(super) fn header(session: &Session) -> Vec<String> {
    let mut header = vec!["POD", "VOLUME", "KIND", "STATE", "OWNER", "WAITS FOR", "PATH"];
    if session.global.all_namespaces {
        header.insert(0, "NAMESPACE");
    }
    if session.is_wide() {
        header.extend(["READ ONLY", "CLAIM", "PV", "UID"]);
    }
    header.into_iter().map(ToOwned::to_owned).collect()
}

pub(super) fn cells(session: &Session, row: VolumeRow) -> Vec<String> {
    let or_unknown = |text: Option<String>| text.unwrap_or_else(|| "<unknown>".into());
    let or_dash = |text: Option<String>| text.filter(|t| !t.is_empty()).unwrap_or_else(|| "-".into());
    let mut cells = Vec::with_capacity(12);
    if session.global.all_namespaces {
        cells.push(or_unknown(row.namespace));
    }
    cells.extend([
        row.pod,
        row.volume,
        or_unknown(row.kind),
        row.state,
        or_dash(row.owner),
        or_dash(Some(row.message)),
        or_dash(row.path),
    ]);
    if session.is_wide() {
        cells.extend([
            or_dash(row.read_only.map(|read_only| read_only.to_string())),
            or_dash(row.claim),
            or_dash(row.persistent_volume),
            row.uid,
        ]);
    }
    cells
}

#[cfg(test)]
mod tests {
    use keelson_proto::keelson::pod_sync::v1::PodDocument;
    use keelson_proto::keelson::volume_manager::v1::VolumeMount;
    use serde_json::json;

    use super::*;

    fn pod() -> PodEntry {
        let pod = json!({"spec": {"volumes": [
            {"name": "scratch", "emptyDir": {}},
            {"name": "key", "secret": {"secretName": "tls"}},
        ]}});
        PodEntry::new(PodDocument {
            uid: "u1".into(),
            namespace: "default".into(),
            name: "web-edge".into(),
            pod_json: pod.to_string().into(),
            ..PodDocument::default()
        })
    }

    fn pod_volumes(state: &str, message: &str, mounted: &[&str]) -> PodVolumes {
        let mount = |name: &&str| VolumeMount {
            name: (*name).into(),
            host_path: format!("/v/{name}"),
            ..VolumeMount::default()
        };
        let volumes = mounted.iter().map(mount).collect();
        PodVolumes {
            uid: "u1".into(),
            state: state.into(),
            volumes,
            message: message.into(),
            ..PodVolumes::default()
        }
    }

    /// Name, kind, state and message of each row.
    fn row_texts(pod: Option<&PodEntry>, pod_volumes: Option<&PodVolumes>) -> Vec<String> {
        let text = |row: VolumeRow| {
            format!("{} {} {} {:?}", row.volume, row.kind.unwrap_or_default(), row.state, row.message)
        };
        rows("u1", pod, pod_volumes).into_iter().map(text).collect()
    }

    #[test]
    fn volume_is_mounted_while_another_of_its_pod_is_pending() {
        let pod_volumes = pod_volumes("failed", "no secret tls", &["scratch"]);
        assert_eq!(
            row_texts(Some(&pod()), Some(&pod_volumes)),
            ["key secret failed \"no secret tls\"", "scratch emptyDir mounted \"\""]
        );
    }

    #[test]
    fn mounted_volume_shows_why_its_update_fails() {
        let pod_volumes = pod_volumes("mounted", "no connection", &["scratch", "key"]);
        assert_eq!(
            row_texts(Some(&pod()), Some(&pod_volumes)),
            ["key secret mounted \"no connection\"", "scratch emptyDir mounted \"no connection\""]
        );
    }

    #[test]
    fn unmounting_volumes_are_not_shown_as_mounted() {
        let pod_volumes = pod_volumes("unmounting", "still running", &["scratch"]);
        assert_eq!(
            row_texts(Some(&pod()), Some(&pod_volumes)),
            ["key secret unmounting \"still running\"", "scratch emptyDir unmounting \"still running\""]
        );
    }

    #[test]
    fn volumes_unknown_to_volume_manager_are_pending() {
        assert_eq!(
            row_texts(Some(&pod()), None),
            ["key secret pending \"\"", "scratch emptyDir pending \"\""]
        );
    }

    #[test]
    fn each_waiting_volume_shows_its_own_message_and_owner() {
        let wait = |volume: &str, message: &str, owner: &str| VolumeWait {
            volume: volume.into(),
            message: message.into(),
            owner: owner.into(),
        };
        let waits = vec![wait("key", "the claim is not bound", "you"), wait("late", "not attached", "")];
        let pod_volumes = PodVolumes { waits, ..pod_volumes("pending", "2 volumes wait", &[]) };
        let text = |row: &VolumeRow| format!("{} {:?} {:?}", row.volume, row.message, row.owner);
        let rows: Vec<String> = rows("u1", Some(&pod()), Some(&pod_volumes)).iter().map(text).collect();
        assert_eq!(
            rows,
            [
                "key \"the claim is not bound\" Some(\"you\")",
                "late \"not attached\" Some(\"volume-manager\")",
                "scratch \"\" None",
            ]
        );
    }

    #[test]
    fn a_claim_is_known_from_the_spec_before_its_volume_is_mounted() {
        let spec = json!({"spec": {"volumes": [
            {"name": "disk", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "tmp", "ephemeral": {"volumeClaimTemplate": {}}},
            {"name": "plain", "emptyDir": {}},
        ]}});
        let pod = PodEntry::new(PodDocument {
            uid: "u1".into(),
            name: "web".into(),
            pod_json: spec.to_string().into(),
            ..PodDocument::default()
        });
        let claims = |pod_volumes: Option<&PodVolumes>| -> Vec<String> {
            let text =
                |row: &VolumeRow| format!("{} {:?} {:?}", row.volume, row.claim, row.persistent_volume);
            rows("u1", Some(&pod), pod_volumes).iter().map(text).collect()
        };
        assert_eq!(
            claims(None),
            ["disk Some(\"data\") None", "plain None None", "tmp Some(\"web-tmp\") None"]
        );
        let mut pod_volumes = pod_volumes("mounted", "", &["disk"]);
        pod_volumes.volumes[0].claim = "data".into();
        pod_volumes.volumes[0].persistent_volume = "pv-7".into();
        assert_eq!(claims(Some(&pod_volumes))[0], "disk Some(\"data\") Some(\"pv-7\")");
    }

    #[test]
    fn volumes_of_a_pod_unknown_to_pod_sync_show_its_uid() {
        let pod_volumes = pod_volumes("unmounting", "", &["scratch"]);
        let rows = rows("u1", None, Some(&pod_volumes));
        assert_eq!((rows[0].pod.as_str(), &rows[0].namespace, &rows[0].kind), ("u1", &None, &None));
        assert_eq!(rows[0].path.as_deref(), Some("/v/scratch"));
    }
}
