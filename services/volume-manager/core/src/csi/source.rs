//! The sources of CSI volumes as the API writes them: `spec.csi` of a PersistentVolume, and `csi` of a volume in a pod.

use serde::{Deserialize, Serialize};

use super::LifecycleMode;
use super::paths::{self, DriverName, NameError};
use crate::objects::{Strings, or_default};
use crate::sources::SecretReference;

/// `csi`. Unknown fields are ignored; a null is a missing field. A pod has no handle and only one of the references to
/// Secrets, `nodePublishSecretRef`, which names a Secret of the pod's namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CsiSource {
    /// The name of the driver.
    #[serde(deserialize_with = "or_default")]
    pub driver: String,
    /// The driver's id of the volume.
    #[serde(deserialize_with = "or_default")]
    pub volume_handle: String,
    /// The filesystem; empty: the driver's default.
    #[serde(deserialize_with = "or_default")]
    pub fs_type: String,
    /// The volume is mounted read-only. Of a PersistentVolume the claim's field counts instead.
    #[serde(deserialize_with = "or_default")]
    pub read_only: bool,
    /// `volumeAttributes`.
    #[serde(rename = "volumeAttributes", deserialize_with = "or_default")]
    pub attributes: Strings,
    /// `controllerPublishSecretRef`, which only the external attacher reads.
    #[serde(rename = "controllerPublishSecretRef", skip_serializing_if = "Option::is_none")]
    pub controller_publish_secret: Option<SecretReference>,
    /// `nodeStageSecretRef`.
    #[serde(rename = "nodeStageSecretRef", skip_serializing_if = "Option::is_none")]
    pub node_stage_secret: Option<SecretReference>,
    /// `nodePublishSecretRef`.
    #[serde(rename = "nodePublishSecretRef", skip_serializing_if = "Option::is_none")]
    pub node_publish_secret: Option<SecretReference>,
    /// `nodeExpandSecretRef`.
    #[serde(rename = "nodeExpandSecretRef", skip_serializing_if = "Option::is_none")]
    pub node_expand_secret: Option<SecretReference>,
}

/// What identifies a CSI volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CsiIdentity {
    /// The driver.
    pub driver: DriverName,
    /// The driver's id of the volume; not empty.
    pub id: String,
    /// How long it lives.
    pub lifecycle: LifecycleMode,
}

impl CsiIdentity {
    /// The name of the volume on the node if all pods share it, that is, if it is persistent (volumes.md §1).
    pub fn shared_name(&self) -> Option<String> {
        match self.lifecycle {
            LifecycleMode::Persistent => Some(paths::unique_volume_name(&self.driver, &self.id)),
            LifecycleMode::Ephemeral => None,
        }
    }
}

impl CsiSource {
    /// The volume of a PersistentVolume.
    ///
    /// # Errors
    /// The driver's name is invalid, or the handle is empty.
    pub fn persistent(&self) -> Result<CsiIdentity, NameError> {
        let driver = DriverName::parse(&self.driver)?;
        if self.volume_handle.is_empty() {
            return Err(NameError::EmptyHandle);
        }
        Ok(CsiIdentity { driver, id: self.volume_handle.clone(), lifecycle: LifecycleMode::Persistent })
    }

    /// The volume called `volume` in the spec of a pod (volumes.md §11.6).
    ///
    /// # Errors
    /// The driver's name is invalid.
    pub fn inline(&self, pod_uid: &str, volume: &str) -> Result<CsiIdentity, NameError> {
        let driver = DriverName::parse(&self.driver)?;
        let id = paths::inline_volume_id(pod_uid, volume);
        Ok(CsiIdentity { driver, id, lifecycle: LifecycleMode::Ephemeral })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_csi_source_has_every_field_of_the_api() {
        let reference = |name: &str| json!({"name": name, "namespace": "ns"});
        let json = json!({"driver": "d.example", "volumeHandle": "h", "fsType": "xfs", "readOnly": true,
            "volumeAttributes": {"a": "b"}, "controllerPublishSecretRef": reference("c"),
            "nodeStageSecretRef": reference("s"), "nodePublishSecretRef": reference("p"),
            "nodeExpandSecretRef": reference("e")});
        let source: CsiSource = serde_json::from_value(json.clone()).unwrap();
        assert_eq!((source.driver.as_str(), source.volume_handle.as_str()), ("d.example", "h"));
        assert!(source.read_only && source.fs_type == "xfs" && source.attributes["a"] == "b");
        let names = [
            &source.controller_publish_secret,
            &source.node_stage_secret,
            &source.node_publish_secret,
            &source.node_expand_secret,
        ]
        .map(|secret| secret.as_ref().unwrap().name.as_str());
        assert_eq!(names, ["c", "s", "p", "e"]);
        assert_eq!(serde_json::to_value(&source).unwrap(), json, "written as it is read");
    }

    #[test]
    fn null_fields_of_a_csi_source_count_as_missing() {
        let json = json!({"driver": "d", "volumeHandle": null, "fsType": null, "readOnly": null,
            "volumeAttributes": null, "nodeStageSecretRef": null, "nodePublishSecretRef": null,
            "nodeExpandSecretRef": null});
        let source: CsiSource = serde_json::from_value(json).unwrap();
        assert_eq!(source, CsiSource { driver: "d".to_owned(), ..CsiSource::default() });
    }

    #[test]
    fn a_persistent_volume_is_shared_by_its_handle_and_an_inline_one_is_not() {
        let source = CsiSource {
            driver: "d.example".to_owned(),
            volume_handle: "h".to_owned(),
            ..CsiSource::default()
        };
        let persistent = source.persistent().unwrap();
        assert_eq!(persistent.shared_name().as_deref(), Some("kubernetes.io/csi/d.example^h"));
        let inline = source.inline("uid", "data").unwrap();
        assert_eq!((inline.shared_name(), inline.lifecycle), (None, LifecycleMode::Ephemeral));
        assert!(inline.id.starts_with("csi-"), "{}", inline.id);
        let no_handle = CsiSource { volume_handle: String::new(), ..source.clone() };
        assert_eq!(no_handle.persistent(), Err(NameError::EmptyHandle));
        assert!(no_handle.inline("uid", "data").is_ok(), "an inline volume has no handle");
        let no_driver = CsiSource { driver: "../x".to_owned(), ..source };
        assert!(no_driver.persistent().is_err() && no_driver.inline("u", "v").is_err());
    }
}
