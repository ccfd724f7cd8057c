//! What a static pod may refer to.

use serde_json::Value;

use crate::types::{Container, Pod, Volume, VolumeProjection};
use crate::volume_source::pod_sources;

/// API objects that a static pod may refer to, because its source also provides them.
/// The default allows nothing, as the kubelet does with the gate `PreventStaticPodAPIReferences`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllowedReferences {
    /// ConfigMaps in environments and volumes.
    pub config_maps: bool,
    /// Secrets in environments, volumes and image pull secrets.
    pub secrets: bool,
}

/// The first kind of API object that the pod refers to and that is not allowed, as the plural resource name
/// (`secrets`, `serviceaccounts`, …), with the field where the kind alone would be ambiguous. `None` when the pod refers to
/// no such object.
///
/// An unknown volume source is refused too, by its name: it may contain a reference.
pub fn static_pod_api_references(pod: &Pod, allowed: AllowedReferences) -> Option<String> {
    let spec = &pod.spec;
    if !spec.service_account_name.is_empty() {
        return Some("serviceaccounts".to_owned());
    }
    let containers = || pod.containers().map(|(_, container)| container);
    let secrets = !spec.image_pull_secrets.is_empty()
        || containers().any(names_secret)
        || spec.volumes.iter().any(volume_names_secret);
    if secrets && !allowed.secrets {
        return Some("secrets".to_owned());
    }
    if !allowed.config_maps
        && (containers().any(names_config_map) || spec.volumes.iter().any(volume_names_config_map))
    {
        return Some("configmaps".to_owned());
    }
    if !spec.resource_claims.is_empty() {
        return Some("resourceclaims".to_owned());
    }
    spec.volumes.iter().find_map(volume_reference)
}

fn names_secret(container: &Container) -> bool {
    container.env.iter().any(|env| env.value_from.as_ref().is_some_and(|from| from.secret_key_ref.is_some()))
        || container.env_from.iter().any(|from| from.secret_ref.is_some())
}

fn names_config_map(container: &Container) -> bool {
    container
        .env
        .iter()
        .any(|env| env.value_from.as_ref().is_some_and(|from| from.config_map_key_ref.is_some()))
        || container.env_from.iter().any(|from| from.config_map_ref.is_some())
}

fn projections(volume: &Volume) -> impl Iterator<Item = &VolumeProjection> {
    volume.projected.iter().flat_map(|projected| &projected.sources)
}

/// The fields by which the sources of plugins refer to a Secret.
const SECRET_FIELDS: [&str; 3] = ["nodePublishSecretRef", "secretName", "secretRef"];

fn volume_names_secret(volume: &Volume) -> bool {
    let has = |source: &Value, key: &str| source.get(key).is_some_and(|value| !value.is_null());
    volume.secret.is_some()
        || projections(volume).any(|source| source.secret.is_some())
        || volume.other.values().any(|source| SECRET_FIELDS.iter().any(|field| has(source, field)))
}

fn volume_names_config_map(volume: &Volume) -> bool {
    volume.config_map.is_some() || projections(volume).any(|source| source.config_map.is_some())
}

fn volume_reference(volume: &Volume) -> Option<String> {
    let resource = match volume.source_kind()? {
        "csi" => "csidrivers (via CSI volumes)",
        "persistentVolumeClaim" => "persistentvolumeclaims",
        "ephemeral" => "persistentvolumeclaims (via ephemeral volumes)",
        "glusterfs" => "endpoints (via glusterFS volumes)",
        "azureFile" => "secrets (via azureFile volumes)",
        "projected" => return projections(volume).find_map(projection_reference).map(str::to_owned),
        // The others need nothing from the API, or were checked before.
        known if pod_sources().any(|source| source == known) => return None,
        unknown => return Some(format!("objects of the unknown volume type {unknown:?}")),
    };
    Some(resource.to_owned())
}

fn projection_reference(source: &VolumeProjection) -> Option<&'static str> {
    if source.service_account_token.is_some() {
        return Some("serviceaccounts (via projected volumes)");
    }
    if source.cluster_trust_bundle.is_some() {
        return Some("clustertrustbundles");
    }
    if source.pod_certificate.is_some() {
        return Some("podcertificates");
    }
    let known = source.secret.is_some() || source.config_map.is_some() || source.downward_api.is_some();
    (!known).then_some("objects of an unknown projected source")
}
