//! Volumes and their sources.
// Fields are named and defined by the Kubernetes API reference.
#![allow(missing_docs)]

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{ObjectFieldSelector, ResourceFieldSelector};
use crate::quantity::Quantity;

/// A volume of a pod. Sources that nothing reads field by field are kept as JSON in `other`: those that plugins provide, and
/// unknown ones.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Volume {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub empty_dir: Option<EmptyDirVolumeSource>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_path: Option<HostPathVolumeSource>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_map: Option<ConfigMapVolumeSource>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<SecretVolumeSource>,
    #[serde(rename = "downwardAPI", skip_serializing_if = "Option::is_none")]
    pub downward_api: Option<DownwardApiVolumeSource>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub projected: Option<ProjectedVolumeSource>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<PersistentVolumeClaimVolumeSource>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageVolumeSource>,
    /// `ephemeral.volumeClaimTemplate` as JSON: only the control plane acts on its contents.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ephemeral: Option<Value>,
    /// Every other key, by wire name: `csi`, `nfs`, `iscsi`…
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Volume {
    /// Wire names of all sources that are set, known ones first. A valid volume has exactly one.
    pub fn source_kinds(&self) -> Vec<&str> {
        let known = [
            ("emptyDir", self.empty_dir.is_some()),
            ("hostPath", self.host_path.is_some()),
            ("configMap", self.config_map.is_some()),
            ("secret", self.secret.is_some()),
            ("downwardAPI", self.downward_api.is_some()),
            ("projected", self.projected.is_some()),
            ("persistentVolumeClaim", self.persistent_volume_claim.is_some()),
            ("image", self.image.is_some()),
            ("ephemeral", self.ephemeral.is_some()),
        ];
        let others = self.other.iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| name.as_str());
        known.into_iter().filter(|(_, set)| *set).map(|(name, _)| name).chain(others).collect()
    }

    /// Wire name of the source (`emptyDir`, `configMap`, …), unknown ones included; `None` when no source is set.
    pub fn source_kind(&self) -> Option<&str> {
        self.source_kinds().first().copied()
    }
}

api_types! {
    EmptyDirVolumeSource {
        /// Empty for the node's disk, `Memory`, `HugePages` or `HugePages-<size>`.
        medium: String,
        size_limit: Option<Quantity>,
    }

    HostPathVolumeSource {
        path: String,
        type_ = "type": Option<String>,
    }

    ConfigMapVolumeSource {
        name: String,
        items: Vec<KeyToPath>,
        default_mode: Option<i32>,
        optional: Option<bool>,
    }

    SecretVolumeSource {
        secret_name: String,
        items: Vec<KeyToPath>,
        default_mode: Option<i32>,
        optional: Option<bool>,
    }

    KeyToPath {
        key: String,
        path: String,
        mode: Option<i32>,
    }

    DownwardApiVolumeSource {
        items: Vec<DownwardApiVolumeFile>,
        default_mode: Option<i32>,
    }

    DownwardApiVolumeFile {
        path: String,
        field_ref: Option<ObjectFieldSelector>,
        resource_field_ref: Option<ResourceFieldSelector>,
        mode: Option<i32>,
    }

    ProjectedVolumeSource {
        sources: Vec<VolumeProjection>,
        default_mode: Option<i32>,
    }

    /// One projected source; exactly one is set.
    VolumeProjection {
        secret: Option<ObjectProjection>,
        config_map: Option<ObjectProjection>,
        downward_api = "downwardAPI": Option<DownwardApiProjection>,
        service_account_token: Option<ServiceAccountTokenProjection>,
        cluster_trust_bundle: Option<ClusterTrustBundleProjection>,
        pod_certificate: Option<PodCertificateProjection>,
    }

    /// Keys of a ConfigMap or Secret.
    ObjectProjection {
        name: String,
        items: Vec<KeyToPath>,
        optional: Option<bool>,
    }

    DownwardApiProjection {
        items: Vec<DownwardApiVolumeFile>,
    }

    ServiceAccountTokenProjection {
        audience: String,
        expiration_seconds: Option<i64>,
        path: String,
    }

    ClusterTrustBundleProjection {
        name: Option<String>,
        signer_name: Option<String>,
        label_selector: Option<Value>,
        optional: Option<bool>,
        path: String,
    }

    PodCertificateProjection {
        signer_name: String,
        key_type: String,
        max_expiration_seconds: Option<i32>,
        credential_bundle_path: String,
        key_path: String,
        certificate_chain_path: String,
        user_annotations: BTreeMap<String, String>,
    }

    PersistentVolumeClaimVolumeSource {
        claim_name: String,
        read_only: Option<bool>,
    }

    ImageVolumeSource {
        reference: String,
        pull_policy: String,
    }
}
