//! Whether a CSI volume has to be attached to the node, and whether it is (volumes.md §11.4).
//!
//! Nothing waits in here: an error is retried with back-off.

use serde::Deserialize;

use super::CsiDriver;
use super::error_class::is_attach_limit;
use super::paths::DriverName;
use crate::objects::{Metadata, Strings};

/// A VolumeAttachment (`storage.k8s.io/v1`), as far as a node reads it. A null is a missing field.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct VolumeAttachment {
    /// Name and deletion.
    pub metadata: Metadata,
    /// What the external attacher has reported.
    pub status: Option<AttachmentStatus>,
}

/// `status` of a VolumeAttachment.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AttachmentStatus {
    /// The volume is attached.
    pub attached: Option<bool>,
    /// What the driver needs to find the volume on the node.
    pub attachment_metadata: Option<Strings>,
    /// Why the latest attempt to attach has failed.
    pub attach_error: Option<VolumeError>,
}

/// An error in the status of a VolumeAttachment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeError {
    /// The driver's message.
    pub message: Option<String>,
    /// The gRPC code of the driver's answer.
    pub error_code: Option<i32>,
}

/// The CSIDriver of a driver, as a watch has it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DriverLookup<'a> {
    /// The watch has not delivered the first list yet.
    NotSynced,
    /// There is none.
    Missing,
    /// It exists.
    Found(&'a CsiDriver),
}

/// The watch of the CSIDrivers has not delivered the first list yet. Only decisions about CSI volumes wait for it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "it is not known yet whether volumes of the driver {driver} have to be attached: the list of CSIDrivers has not \
     arrived from the API server"
)]
pub struct NotSynced {
    /// The driver.
    pub driver: DriverName,
}

/// Whether volumes of the driver have to be attached: unless its CSIDriver says that they need not be.
pub fn is_attachable(driver: &DriverName, object: DriverLookup<'_>) -> Result<bool, NotSynced> {
    match object {
        DriverLookup::NotSynced => Err(NotSynced { driver: driver.clone() }),
        DriverLookup::Missing => Ok(true),
        DriverLookup::Found(object) => Ok(object.spec.attach_required != Some(false)),
    }
}

/// The volume that a VolumeAttachment is for; the names appear in errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttachedVolume<'a> {
    /// The volume's handle.
    pub handle: &'a str,
    /// The name of its VolumeAttachment, see [`super::paths::attachment_name`].
    pub attachment: &'a str,
    /// The node.
    pub node: &'a str,
}

/// Why an attachable volume cannot be used yet. Nothing was started, so each error is transient (volumes.md §3.12).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// Nobody has asked for the volume to be attached yet.
    #[error(
        "the volume {handle} is not attached to the node {node}: the VolumeAttachment {attachment} is missing; the \
         attach-detach controller creates it"
    )]
    Missing {
        /// The volume's handle.
        handle: String,
        /// The VolumeAttachment.
        attachment: String,
        /// The node.
        node: String,
    },
    /// The volume is about to be detached.
    #[error(
        "the volume {handle} cannot be used on the node {node}: the VolumeAttachment {attachment} is being deleted; the \
         attach-detach controller creates another one after the volume was detached"
    )]
    BeingDeleted {
        /// The volume's handle.
        handle: String,
        /// The VolumeAttachment.
        attachment: String,
        /// The node.
        node: String,
    },
    /// The external attacher has not attached it yet.
    #[error(
        "the volume {handle} is not attached to the node {node}: the external attacher has not finished the \
         VolumeAttachment {attachment}"
    )]
    NotAttached {
        /// The volume's handle.
        handle: String,
        /// The VolumeAttachment.
        attachment: String,
        /// The node.
        node: String,
    },
    /// The external attacher could not attach it.
    #[error(
        "the volume {handle} is not attached to the node {node}: {message} (VolumeAttachment {attachment}; the external \
         attacher retries)"
    )]
    Failed {
        /// The volume's handle.
        handle: String,
        /// The VolumeAttachment.
        attachment: String,
        /// The node.
        node: String,
        /// The driver's message.
        message: String,
        /// The driver's gRPC code.
        code: Option<i32>,
    },
}

impl AttachError {
    /// Whether the node has no room for another volume of the driver (volumes.md §3.14).
    pub fn is_limit(&self) -> bool {
        match self {
            Self::Failed { code, .. } => is_attach_limit(*code),
            Self::Missing { .. } | Self::BeingDeleted { .. } | Self::NotAttached { .. } => false,
        }
    }
}

/// The `publish_context` for staging and publishing an attachable volume. `object` is its VolumeAttachment, read for this
/// call; `None` if there is none.
pub fn publish_context(
    volume: AttachedVolume<'_>,
    object: Option<&VolumeAttachment>,
) -> Result<Strings, AttachError> {
    let handle = volume.handle.to_owned();
    let attachment = volume.attachment.to_owned();
    let node = volume.node.to_owned();
    let Some(object) = object else { return Err(AttachError::Missing { handle, attachment, node }) };
    if object.metadata.deletion_timestamp.is_some() {
        return Err(AttachError::BeingDeleted { handle, attachment, node });
    }
    let status = object.status.clone().unwrap_or_default();
    if status.attached == Some(true) {
        return Ok(status.attachment_metadata.unwrap_or_default());
    }
    Err(match status.attach_error {
        Some(error) => AttachError::Failed {
            handle,
            attachment,
            node,
            message: error.message.unwrap_or_else(|| "the external attacher gives no reason".to_owned()),
            code: error.error_code,
        },
        None => AttachError::NotAttached { handle, attachment, node },
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const VOLUME: AttachedVolume<'_> = AttachedVolume { handle: "vol-1", attachment: "csi-00", node: "n1" };

    fn object(deleted: Option<&str>, status: Value) -> VolumeAttachment {
        let object = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttachment",
            "metadata": {"name": "csi-00", "deletionTimestamp": deleted},
            "spec": {"attacher": "d.io", "nodeName": "n1", "source": {"persistentVolumeName": "pv"}},
            "status": status,
        });
        serde_json::from_value(object).unwrap()
    }

    fn error(deleted: Option<&str>, status: Value) -> AttachError {
        publish_context(VOLUME, Some(&object(deleted, status))).unwrap_err()
    }

    #[test]
    fn a_volume_is_attachable_unless_its_csi_driver_says_otherwise() {
        let driver = DriverName::parse("d.io").unwrap();
        assert_eq!(is_attachable(&driver, DriverLookup::Missing), Ok(true));
        for (value, attachable) in [(json!(null), true), (json!(true), true), (json!(false), false)] {
            let object = serde_json::from_value(json!({"spec": {"attachRequired": value}})).unwrap();
            assert_eq!(is_attachable(&driver, DriverLookup::Found(&object)), Ok(attachable), "{value}");
        }
        let text = is_attachable(&driver, DriverLookup::NotSynced).unwrap_err().to_string();
        assert!(text.contains("driver d.io") && text.contains("list of CSIDrivers"), "{text}");
    }

    #[test]
    fn an_attached_volume_gives_its_attachment_metadata() {
        let status = json!({"attached": true, "attachmentMetadata": {"devicePath": "/dev/sdb"}});
        let context = publish_context(VOLUME, Some(&object(None, status))).unwrap();
        assert_eq!(context, Strings::from([("devicePath".to_owned(), "/dev/sdb".to_owned())]));
        for status in [json!({"attached": true}), json!({"attached": true, "attachmentMetadata": null})] {
            assert_eq!(publish_context(VOLUME, Some(&object(None, status))), Ok(Strings::new()));
        }
    }

    #[test]
    fn an_attached_volume_with_an_older_error_is_attached() {
        let status = json!({"attached": true, "attachError": {"message": "earlier"}});
        assert!(publish_context(VOLUME, Some(&object(None, status))).is_ok());
    }

    #[test]
    fn an_attachment_that_is_being_deleted_is_refused_even_if_attached() {
        for status in [json!({"attached": true}), json!({"attached": false}), json!(null)] {
            let error = error(Some("2026-01-01T00:00:00Z"), status);
            assert!(matches!(error, AttachError::BeingDeleted { .. }), "{error}");
            let text = error.to_string();
            assert!(
                text.contains("VolumeAttachment csi-00 is being deleted") && text.contains("vol-1"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_missing_attachment_names_volume_node_and_attachment() {
        let error = publish_context(VOLUME, None).unwrap_err();
        let expected = "the volume vol-1 is not attached to the node n1: the VolumeAttachment csi-00 is missing; the \
                        attach-detach controller creates it";
        assert_eq!(error.to_string(), expected);
        assert!(!error.is_limit());
    }

    #[test]
    fn a_volume_that_is_not_attached_says_why_if_the_status_does() {
        for status in [
            json!(null),
            json!({}),
            json!({"attached": false}),
            json!({"attached": null, "attachError": null}),
        ] {
            let error = error(None, status);
            assert!(matches!(error, AttachError::NotAttached { .. }), "{error}");
            assert!(error.to_string().contains("vol-1 is not attached to the node n1"), "{error}");
        }
        let error = error(None, json!({"attached": false, "attachError": {"message": "rpc error: busy"}}));
        let text = error.to_string();
        assert!(text.contains("vol-1 is not attached to the node n1: rpc error: busy"), "{text}");
    }

    #[test]
    fn only_resource_exhausted_says_that_the_node_is_full() {
        for (code, is_limit) in [(json!(8), true), (json!(9), false), (json!(null), false)] {
            let error = error(None, json!({"attachError": {"message": null, "errorCode": code}}));
            assert_eq!(error.is_limit(), is_limit, "{code}");
            assert!(error.to_string().contains("gives no reason"), "{error}");
        }
    }

    #[test]
    fn a_status_of_wrong_types_is_no_attachment() {
        for status in [json!({"attached": "true"}), json!({"attachmentMetadata": {"a": 1}}), json!(7)] {
            let object = json!({"metadata": {"name": "csi-00"}, "status": status});
            assert!(serde_json::from_value::<VolumeAttachment>(object).is_err(), "{status}");
        }
    }
}
