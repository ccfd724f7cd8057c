//! Volumes of CSI drivers (volumes.md §11): what is decided without a driver, a disk or an API server.
//!
//! | module | answers |
//! |---|---|
//! | [`access_mode`] | which access mode and capability a driver is called with |
//! | [`error_class`] | whether a failed call may have left something behind |
//! | [`paths`] | where a volume's files are, and how volumes and attachments are named |
//! | [`vol_data`] | what `vol_data.json` contains |
//! | [`volume_context`] | what a driver learns about the pod, and which tokens it gets |
//! | [`registration`] | whether a plugin's registration is accepted |
//! | [`fs_group`] | who applies fsGroup to a volume |
//! | [`csi_node`] | how the Node and the CSINode change when a driver comes or goes |
//! | [`attachment`] | whether a volume has to be attached, and whether it is |
//! | [`source`] | what the source in a PersistentVolume or a pod says |
//!
//! This file has the CSIDriver, which several of them read.

use serde::Deserialize;

use crate::objects::Metadata;

pub mod access_mode;
pub mod attachment;
pub mod csi_node;
pub mod error_class;
pub mod fs_group;
pub mod paths;
pub mod registration;
pub mod source;
pub mod vol_data;
pub mod volume_context;

/// A CSIDriver (`storage.k8s.io/v1`), as far as a node reads it. Unknown fields are ignored; a null is a missing field.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct CsiDriver {
    /// Its name is the driver's.
    pub metadata: Metadata,
    /// What the driver needs.
    pub spec: CsiDriverSpec,
}

/// `spec` of a CSIDriver. `None` is a field that is not set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CsiDriverSpec {
    /// Volumes have to be attached before they are used; unset: they have to.
    pub attach_required: Option<bool>,
    /// `None`, `File` or `ReadWriteOnceWithFSType`; unset: the last of them.
    pub fs_group_policy: Option<String>,
    /// How often, in seconds, the driver is asked again how many volumes the node can have; unset: never.
    pub node_allocatable_update_period_seconds: Option<i64>,
    /// The driver wants to know the pod; unset: no.
    pub pod_info_on_mount: Option<bool>,
    /// Volumes are published again with each pod sync; unset: no.
    pub requires_republish: Option<bool>,
    /// Volumes are mounted with an SELinux context; unset: no.
    #[serde(rename = "seLinuxMount")]
    pub selinux_mount: Option<bool>,
    /// Tokens are passed with the secrets, not with the volume context; unset: no.
    pub service_account_token_in_secrets: Option<bool>,
    /// The tokens that the driver wants for the pod's service account.
    pub token_requests: Option<Vec<TokenRequest>>,
    /// `Persistent`, `Ephemeral` or both; unset: `Persistent`.
    pub volume_lifecycle_modes: Option<Vec<String>>,
}

/// An entry of `spec.tokenRequests` of a CSIDriver.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TokenRequest {
    /// The audience; empty or unset: the API server.
    pub audience: Option<String>,
    /// The requested lifetime in seconds; unset: an hour.
    pub expiration_seconds: Option<i64>,
}

/// How long a volume lives (`volumeLifecycleModes` of a CSIDriver).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LifecycleMode {
    /// The volume of a PersistentVolume.
    Persistent,
    /// An inline volume, which lives as long as its pod.
    Ephemeral,
}

impl LifecycleMode {
    /// The mode as the API and `vol_data.json` write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Persistent => "Persistent",
            Self::Ephemeral => "Ephemeral",
        }
    }

    /// Parses the API's text; `None` for any other.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Persistent, Self::Ephemeral].into_iter().find(|mode| mode.as_str() == text)
    }
}

/// Why a driver may not be used for a volume. Both may resolve themselves and are retried: a CSIDriver is often created
/// after the first pod that needs it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LifecycleError {
    /// An inline volume needs a CSIDriver.
    #[error(
        "there is no CSIDriver {driver}, and an inline volume needs one with Ephemeral in volumeLifecycleModes; \
         install the driver, or use a claim"
    )]
    NoCsiDriver {
        /// The driver.
        driver: String,
    },
    /// The CSIDriver does not list the mode.
    #[error(
        "the driver {driver} does not support {} volumes: volumeLifecycleModes of its CSIDriver is [{}]",
        .mode.as_str(), .supported.join(", ")
    )]
    ModeNotSupported {
        /// The driver.
        driver: String,
        /// The mode of the volume.
        mode: LifecycleMode,
        /// The modes that the CSIDriver lists.
        supported: Vec<String>,
    },
}

/// Whether the driver supports volumes that live so long (volumes.md §11.6). A persistent volume needs no CSIDriver.
pub fn check_lifecycle(
    driver: &str,
    object: Option<&CsiDriver>,
    mode: LifecycleMode,
) -> Result<(), LifecycleError> {
    let Some(object) = object else {
        return match mode {
            LifecycleMode::Persistent => Ok(()),
            LifecycleMode::Ephemeral => Err(LifecycleError::NoCsiDriver { driver: driver.to_owned() }),
        };
    };
    let listed = object.spec.volume_lifecycle_modes.clone().unwrap_or_default();
    let supported =
        if listed.is_empty() { vec![LifecycleMode::Persistent.as_str().to_owned()] } else { listed };
    if supported.iter().any(|text| text == mode.as_str()) {
        return Ok(());
    }
    Err(LifecycleError::ModeNotSupported { driver: driver.to_owned(), mode, supported })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn driver(modes: serde_json::Value) -> CsiDriver {
        let object = json!({"metadata": {"name": "d"}, "spec": {"volumeLifecycleModes": modes}});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn an_inline_volume_needs_a_csi_driver_that_lists_ephemeral() {
        use LifecycleMode::{Ephemeral, Persistent};
        for (object, mode, allowed) in [
            (None, Persistent, true),
            (None, Ephemeral, false),
            (Some(driver(json!(null))), Persistent, true),
            (Some(driver(json!(null))), Ephemeral, false),
            (Some(driver(json!([]))), Persistent, true),
            (Some(driver(json!([]))), Ephemeral, false),
            (Some(driver(json!(["Persistent"]))), Ephemeral, false),
            (Some(driver(json!(["Ephemeral"]))), Ephemeral, true),
            (Some(driver(json!(["Ephemeral"]))), Persistent, false),
            (Some(driver(json!(["Ephemeral", "Persistent"]))), Persistent, true),
            (Some(driver(json!(["ephemeral", "Other"]))), Ephemeral, false),
        ] {
            let result = check_lifecycle("d", object.as_ref(), mode);
            assert_eq!(result.is_ok(), allowed, "{object:?} {mode:?}: {result:?}");
        }
    }

    #[test]
    fn a_refused_lifecycle_names_the_driver_the_mode_and_what_is_supported() {
        let text = check_lifecycle("d.io", None, LifecycleMode::Ephemeral).unwrap_err().to_string();
        assert!(text.contains("no CSIDriver d.io") && text.contains("use a claim"), "{text}");
        let object = driver(json!(["Ephemeral", "Other"]));
        let error = check_lifecycle("d.io", Some(&object), LifecycleMode::Persistent).unwrap_err();
        let expected = "the driver d.io does not support Persistent volumes: volumeLifecycleModes of its CSIDriver is \
                        [Ephemeral, Other]";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn a_lifecycle_mode_is_read_as_it_is_written() {
        for mode in [LifecycleMode::Persistent, LifecycleMode::Ephemeral] {
            assert_eq!(LifecycleMode::parse(mode.as_str()), Some(mode));
        }
        assert_eq!(LifecycleMode::parse("persistent"), None);
        assert_eq!(LifecycleMode::parse(""), None);
    }

    #[test]
    fn a_csi_driver_is_read_with_every_field_that_a_node_uses() {
        let object: CsiDriver = serde_json::from_value(json!({
            "metadata": {"name": "d"},
            "spec": {
                "attachRequired": false, "fsGroupPolicy": "File", "nodeAllocatableUpdatePeriodSeconds": 60,
                "podInfoOnMount": true, "requiresRepublish": true, "seLinuxMount": true, "storageCapacity": true,
                "serviceAccountTokenInSecrets": true, "volumeLifecycleModes": ["Ephemeral"],
                "tokenRequests": [{"audience": "a", "expirationSeconds": 600}, {"audience": null}],
            },
        }))
        .unwrap();
        let expected = CsiDriverSpec {
            attach_required: Some(false),
            fs_group_policy: Some("File".into()),
            node_allocatable_update_period_seconds: Some(60),
            pod_info_on_mount: Some(true),
            requires_republish: Some(true),
            selinux_mount: Some(true),
            service_account_token_in_secrets: Some(true),
            token_requests: Some(vec![
                TokenRequest { audience: Some("a".into()), expiration_seconds: Some(600) },
                TokenRequest::default(),
            ]),
            volume_lifecycle_modes: Some(vec!["Ephemeral".into()]),
        };
        assert_eq!(object.spec, expected);
    }
}
