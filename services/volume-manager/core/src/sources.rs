//! The sources of nfs, iscsi, fc, local and flexVolume volumes as the API writes them, in pods and in PersistentVolumes
//! (volumes.md §10.3 to §10.6, §10.8). Unknown fields are ignored; a null is a missing field.

use serde::{Deserialize, Serialize};

use crate::objects::{Strings, or_default};

/// The Secret of a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SecretReference {
    /// Its name.
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    /// Its namespace; empty: the pod's.
    #[serde(deserialize_with = "or_default")]
    pub namespace: String,
}

/// `nfs`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NfsSource {
    /// The server's name or address.
    #[serde(deserialize_with = "or_default")]
    pub server: String,
    /// The path that the server exports.
    #[serde(deserialize_with = "or_default")]
    pub path: String,
    /// Mount read-only. Of a PersistentVolume the claim's field counts instead.
    #[serde(deserialize_with = "or_default")]
    pub read_only: bool,
}

/// `iscsi`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct IscsiSource {
    /// The first portal: an address, with or without a port.
    #[serde(deserialize_with = "or_default")]
    pub target_portal: String,
    /// Further portals of the same target.
    #[serde(deserialize_with = "or_default")]
    pub portals: Vec<String>,
    /// The name of the target.
    #[serde(deserialize_with = "or_default")]
    pub iqn: String,
    /// The number of the disk at the target.
    #[serde(deserialize_with = "or_default")]
    pub lun: i64,
    /// The iscsiadm interface; empty: `default`.
    #[serde(deserialize_with = "or_default")]
    pub iscsi_interface: String,
    /// The name under which the node logs in; empty: the interface's.
    #[serde(deserialize_with = "or_default")]
    pub initiator_name: String,
    /// The filesystem; empty: ext4.
    #[serde(deserialize_with = "or_default")]
    pub fs_type: String,
    /// Mount read-only. Of a PersistentVolume the claim's field counts instead.
    #[serde(deserialize_with = "or_default")]
    pub read_only: bool,
    /// Discovery authenticates with CHAP.
    #[serde(deserialize_with = "or_default")]
    pub chap_auth_discovery: bool,
    /// Sessions authenticate with CHAP.
    #[serde(deserialize_with = "or_default")]
    pub chap_auth_session: bool,
    /// The Secret with the CHAP credentials.
    pub secret_ref: Option<SecretReference>,
}

/// `fc`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FcSource {
    /// The world wide names of the targets.
    #[serde(rename = "targetWWNs", deserialize_with = "or_default")]
    pub target_wwns: Vec<String>,
    /// The number of the disk at the targets.
    pub lun: Option<i64>,
    /// The world wide identifiers of the disk.
    #[serde(deserialize_with = "or_default")]
    pub wwids: Vec<String>,
    /// The filesystem; empty: ext4.
    #[serde(deserialize_with = "or_default")]
    pub fs_type: String,
    /// Mount read-only. Of a PersistentVolume the claim's field counts instead.
    #[serde(deserialize_with = "or_default")]
    pub read_only: bool,
}

/// `local`, of PersistentVolumes only.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LocalSource {
    /// A directory or a block device on the node.
    #[serde(deserialize_with = "or_default")]
    pub path: String,
    /// The filesystem of a block device; empty: ext4.
    #[serde(deserialize_with = "or_default")]
    pub fs_type: String,
}

/// `flexVolume`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FlexSource {
    /// `vendor/driver`.
    #[serde(deserialize_with = "or_default")]
    pub driver: String,
    /// The filesystem, as the driver understands it.
    #[serde(deserialize_with = "or_default")]
    pub fs_type: String,
    /// The Secret that the driver gets.
    pub secret_ref: Option<SecretReference>,
    /// Mount read-only. Of a PersistentVolume the claim's field counts instead.
    #[serde(deserialize_with = "or_default")]
    pub read_only: bool,
    /// Options for the driver.
    #[serde(deserialize_with = "or_default")]
    pub options: Strings,
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    fn read<T: DeserializeOwned>(text: Value) -> T {
        serde_json::from_value(text).unwrap()
    }

    #[test]
    fn every_field_of_a_source_is_read_under_its_wire_name() {
        let iscsi: IscsiSource = read(json!({
            "targetPortal": "10.0.0.1", "portals": ["10.0.0.2"], "iqn": "iqn.2001-04.com.example:x", "lun": 3,
            "iscsiInterface": "i", "initiatorName": "n", "fsType": "xfs", "readOnly": true,
            "chapAuthDiscovery": true, "chapAuthSession": true, "secretRef": {"name": "s", "namespace": "ns"},
        }));
        let expected = IscsiSource {
            target_portal: "10.0.0.1".into(),
            portals: vec!["10.0.0.2".into()],
            iqn: "iqn.2001-04.com.example:x".into(),
            lun: 3,
            iscsi_interface: "i".into(),
            initiator_name: "n".into(),
            fs_type: "xfs".into(),
            read_only: true,
            chap_auth_discovery: true,
            chap_auth_session: true,
            secret_ref: Some(SecretReference { name: "s".into(), namespace: "ns".into() }),
        };
        assert_eq!(iscsi, expected);
        let fc: FcSource =
            read(json!({"targetWWNs": ["a"], "lun": 0, "wwids": ["b"], "fsType": "xfs", "readOnly": true}));
        let expected = FcSource {
            target_wwns: vec!["a".into()],
            lun: Some(0),
            wwids: vec!["b".into()],
            fs_type: "xfs".into(),
            read_only: true,
        };
        assert_eq!(fc, expected);
        let flex: FlexSource = read(json!({
            "driver": "v/d", "fsType": "ext4", "secretRef": {"name": "s"}, "readOnly": true, "options": {"k": "v"},
        }));
        assert_eq!((flex.driver.as_str(), flex.fs_type.as_str(), flex.read_only), ("v/d", "ext4", true));
        assert_eq!((flex.secret_ref.unwrap().name.as_str(), flex.options["k"].as_str()), ("s", "v"));
        let nfs: NfsSource = read(json!({"server": "s", "path": "/p", "readOnly": true}));
        assert_eq!(nfs, NfsSource { server: "s".into(), path: "/p".into(), read_only: true });
        let local: LocalSource = read(json!({"path": "/p", "fsType": "xfs"}));
        assert_eq!(local, LocalSource { path: "/p".into(), fs_type: "xfs".into() });
    }

    #[test]
    fn a_null_or_missing_field_of_a_source_is_its_default() {
        assert_eq!(read::<NfsSource>(json!({"server": null, "readOnly": null})), NfsSource::default());
        assert_eq!(
            read::<IscsiSource>(json!({"portals": null, "lun": null, "secretRef": null})),
            IscsiSource::default()
        );
        assert_eq!(read::<FcSource>(json!({"lun": null, "wwids": null})), FcSource::default());
        assert_eq!(read::<FlexSource>(json!({"options": null, "other": 1})), FlexSource::default());
        assert_eq!(read::<LocalSource>(json!({"fsType": null})), LocalSource::default());
    }

    #[test]
    fn a_field_of_a_source_with_a_wrong_type_is_an_error() {
        assert!(serde_json::from_value::<IscsiSource>(json!({"lun": "1"})).is_err());
        assert!(serde_json::from_value::<FcSource>(json!({"wwids": "a"})).is_err());
        assert!(serde_json::from_value::<FlexSource>(json!({"options": {"k": 1}})).is_err());
    }
}
