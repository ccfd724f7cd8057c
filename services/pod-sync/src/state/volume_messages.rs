//! A pod's volumes as messages to volume-manager, which reads no Pod JSON.

use std::collections::BTreeSet;

use keelson_kube_model::volume_source::{ServedBy, pod_sources, served_by};
use keelson_kube_model::{
    ClusterTrustBundleProjection, Container, DownwardApiVolumeFile, KeyToPath, Pod, PodCertificateProjection,
    ProjectedVolumeSource, Quantity, ResourceList, SeLinuxOptions, ServiceAccountTokenProjection, Volume,
    VolumeProjection,
};
use keelson_pod_sync_core::config::{DownwardValue, TokenAccess, downward_value, token_access};
use keelson_proto::keelson::volume_manager::v1 as volume;
use keelson_proto::keelson::volume_manager::v1::file_source::Source as FileSource;
use keelson_proto::keelson::volume_manager::v1::file_volume::Kind;
use keelson_proto::keelson::volume_manager::v1::volume::Source;

/// The API's default for the lifetime of a token, in seconds (volumes.md §9.6).
const TOKEN_SECONDS: i64 = 3600;

/// What the control plane provides for projected volumes.
#[derive(Debug, Clone, Copy, Default)]
pub struct ApiSources {
    /// It issues service account tokens.
    pub tokens: bool,
    /// It has ClusterTrustBundles, and pods may use them (gate `ClusterTrustBundleProjection`).
    pub trust_bundles: bool,
    /// It has PodCertificateRequests, and pods may use them (gate `PodCertificateRequest`).
    pub certificates: bool,
}

/// The volumes that some container of a pod uses (volumes.md §3.2). Others may refer to objects that do not exist. `allocatable`: what
/// pods may use of the machine, empty while it is unknown; `api`: what the control plane provides for projected volumes.
pub fn messages(pod: &Pod, allocatable: &ResourceList, api: ApiSources) -> Vec<volume::Volume> {
    // The runtime mounts images itself (volumes.md §10.7).
    let is_image = |volume: &Volume| volume.source_kinds() == ["image"];
    let used = pod.spec.volumes.iter().filter(|volume| is_used(pod, &volume.name) && !is_image(volume));
    let message = |volume: &Volume| volume::Volume {
        name: volume.name.clone(),
        source: Some(source(pod, volume, allocatable, api)),
        mounted: is_mounted(pod, &volume.name),
        device: is_device(pod, &volume.name),
        se_linux_options: selinux_options(pod, &volume.name),
    };
    used.map(message).collect()
}

/// The sizes in bytes of the huge pages that a pod requests, in any container or as a whole (volumes.md §10.1).
pub fn huge_page_sizes(pod: &Pod) -> Vec<i64> {
    let own = containers(pod).map(|container| &container.resources);
    let lists = own.chain(&pod.spec.resources).flat_map(|resources| [&resources.requests, &resources.limits]);
    let requested = lists.flatten().filter(|(_, amount)| amount.value() > 0);
    let sizes: BTreeSet<i64> = requested
        .filter_map(|(name, _)| Quantity::parse(name.strip_prefix("hugepages-")?).ok())
        .map(|size| size.value())
        .collect();
    sizes.into_iter().collect()
}

/// Every container of a pod, of each kind.
fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.containers().map(|(_, container)| container)
}

fn is_used(pod: &Pod, name: &str) -> bool {
    is_mounted(pod, name) || is_device(pod, name)
}

fn is_mounted(pod: &Pod, name: &str) -> bool {
    containers(pod).any(|container| container.volume_mounts.iter().any(|mount| mount.name == name))
}

fn is_device(pod: &Pod, name: &str) -> bool {
    containers(pod).any(|container| container.volume_devices.iter().any(|device| device.name == name))
}

/// The SELinux options that hold for the containers that mount a volume, each once (volumes.md §6).
fn selinux_options(pod: &Pod, name: &str) -> Vec<volume::SeLinuxOptions> {
    let pods = pod.spec.security_context.as_ref().and_then(|context| context.se_linux_options.as_ref());
    let own = |container: &'_ Container| -> Option<SeLinuxOptions> {
        container.security_context.as_ref().and_then(|context| context.se_linux_options.clone())
    };
    let is_mounting = |container: &&Container| container.volume_mounts.iter().any(|mount| mount.name == name);
    let mut found = Vec::new();
    for container in containers(pod).filter(is_mounting) {
        let SeLinuxOptions { user, role, type_, level } =
            own(container).or_else(|| pods.cloned()).unwrap_or_default();
        let options = volume::SeLinuxOptions { user, role, r#type: type_, level };
        if !found.contains(&options) {
            found.push(options);
        }
    }
    if found == [volume::SeLinuxOptions::default()] { Vec::new() } else { found }
}

fn source(pod: &Pod, volume: &Volume, allocatable: &ResourceList, api: ApiSources) -> Source {
    let kinds = volume.source_kinds();
    if kinds.len() > 1 {
        return Source::Unsupported(kinds.join(" and "));
    }
    if let Some(empty) = &volume.empty_dir {
        return Source::EmptyDir(volume::EmptyDir {
            medium: empty.medium.clone(),
            size_limit_bytes: empty.size_limit.as_ref().map_or(0, Quantity::value),
        });
    }
    if let Some(host) = &volume.host_path {
        return Source::HostPath(volume::HostPath {
            path: host.path.clone(),
            r#type: host.type_.clone().unwrap_or_default(),
        });
    }
    if let Some(claim) = claim(volume) {
        return Source::Claim(claim);
    }
    if let Some(files) = files(pod, volume, allocatable, api) {
        return Source::Files(files);
    }
    let kind = kinds.first().copied().unwrap_or("no source");
    match volume.other.get(kind).filter(|_| goes_to_plugins(kind)) {
        Some(source) => Source::Plugin(volume::PluginVolume {
            kind: kind.to_owned(),
            source_json: source.to_string().into_bytes(),
        }),
        None => Source::Unsupported(kind.to_owned()),
    }
}

/// Whether volume-manager serves the source of a pod's volume, by a plugin or a CSI driver, or says why nothing serves it any more.
fn goes_to_plugins(kind: &str) -> bool {
    pod_sources().any(|source| source == kind)
        && matches!(served_by(kind), Some(ServedBy::Plugin | ServedBy::CsiMigration | ServedBy::Nothing))
}

/// The claim of a volume. volume-manager derives the name of an `ephemeral` volume's claim from pod and volume, and only the control plane
/// acts on its template.
fn claim(volume: &Volume) -> Option<volume::ClaimVolume> {
    match &volume.persistent_volume_claim {
        Some(claim) => Some(volume::ClaimVolume {
            claim_name: claim.claim_name.clone(),
            ephemeral: false,
            read_only: claim.read_only == Some(true),
        }),
        None => volume
            .ephemeral
            .as_ref()
            .map(|_| volume::ClaimVolume { ephemeral: true, ..volume::ClaimVolume::default() }),
    }
}

/// The files of a volume that volume-manager writes.
fn files(
    pod: &Pod,
    volume: &Volume,
    allocatable: &ResourceList,
    api: ApiSources,
) -> Option<volume::FileVolume> {
    let (kind, sources, mode) = if let Some(map) = &volume.config_map {
        let source = object("ConfigMap", &map.name, &map.items, map.optional);
        (Kind::ConfigMap, vec![source], map.default_mode)
    } else if let Some(secret) = &volume.secret {
        let source = object("Secret", &secret.secret_name, &secret.items, secret.optional);
        (Kind::Secret, vec![source], secret.default_mode)
    } else if let Some(fields) = &volume.downward_api {
        let source = downward(pod, &fields.items, allocatable);
        (Kind::DownwardApi, vec![source], fields.default_mode)
    } else if let Some(projected) = &volume.projected {
        (Kind::Projected, projections(pod, projected, allocatable, api), projected.default_mode)
    } else {
        return None;
    };
    Some(volume::FileVolume {
        kind: kind.into(),
        sources: sources.into_iter().map(|source| volume::FileSource { source: Some(source) }).collect(),
        default_mode: mode.map(bits),
        nested: nested(pod, &volume.name),
    })
}

fn projections(
    pod: &Pod,
    projected: &ProjectedVolumeSource,
    allocatable: &ResourceList,
    api: ApiSources,
) -> Vec<FileSource> {
    let one = |source: &VolumeProjection| {
        if let Some(map) = &source.config_map {
            return object("ConfigMap", &map.name, &map.items, map.optional);
        }
        if let Some(secret) = &source.secret {
            return object("Secret", &secret.name, &secret.items, secret.optional);
        }
        if let Some(fields) = &source.downward_api {
            return downward(pod, &fields.items, allocatable);
        }
        if let Some(projection) = source.service_account_token.as_ref().filter(|_| api.tokens) {
            return token(pod, projection);
        }
        if let Some(projection) = source.cluster_trust_bundle.as_ref().filter(|_| api.trust_bundles)
            && let Some(bundle) = trust_bundle(pod, projection)
        {
            return bundle;
        }
        if let Some(projection) = source.pod_certificate.as_ref().filter(|_| api.certificates) {
            return certificate(pod, projection);
        }
        let field = match source {
            VolumeProjection { service_account_token: Some(_), .. } => "serviceAccountToken",
            VolumeProjection { cluster_trust_bundle: Some(_), .. } => "clusterTrustBundle",
            VolumeProjection { pod_certificate: Some(_), .. } => "podCertificate",
            _ => "a source of an unknown kind",
        };
        FileSource::Unsupported(field.to_owned())
    };
    projected.sources.iter().map(one).collect()
}

/// A token of the pod's service account.
fn token(pod: &Pod, projection: &ServiceAccountTokenProjection) -> FileSource {
    let TokenAccess { mode, owner } = token_access(pod);
    FileSource::Token(volume::ServiceAccountToken {
        service_account: pod.spec.service_account_name.clone(),
        audience: projection.audience.clone(),
        expiration_seconds: projection.expiration_seconds.unwrap_or(TOKEN_SECONDS),
        path: projection.path.clone(),
        mode,
        owner_uid: owner,
    })
}

/// The trust anchors of ClusterTrustBundles. `None`: it names neither a bundle nor a signer.
fn trust_bundle(pod: &Pod, projection: &ClusterTrustBundleProjection) -> Option<FileSource> {
    let TokenAccess { mode, owner } = token_access(pod);
    let name = projection.name.clone().unwrap_or_default();
    let signer_name = projection.signer_name.clone().unwrap_or_default();
    let is_named = !name.is_empty() || !signer_name.is_empty();
    is_named.then(|| {
        FileSource::TrustBundle(volume::ClusterTrustBundle {
            name,
            signer_name,
            label_selector_json: projection.label_selector.as_ref().map(|json| json.to_string().into_bytes()),
            optional: projection.optional == Some(true),
            path: projection.path.clone(),
            mode,
            owner_uid: owner,
        })
    })
}

/// The values of `keyType` that volume-manager knows.
const KEY_TYPES: [&str; 6] = ["RSA3072", "RSA4096", "ECDSAP256", "ECDSAP384", "ECDSAP521", "ED25519"];

/// A certificate of the pod.
fn certificate(pod: &Pod, projection: &PodCertificateProjection) -> FileSource {
    let TokenAccess { mode, owner } = token_access(pod);
    let PodCertificateProjection { signer_name, key_type, .. } = projection;
    if signer_name.is_empty() {
        return FileSource::Unsupported("podCertificate".to_owned());
    }
    if !KEY_TYPES.contains(&key_type.as_str()) {
        return FileSource::Unsupported(format!("podCertificate with the keyType {key_type:?}"));
    }
    FileSource::PodCertificate(volume::PodCertificate {
        signer_name: signer_name.clone(),
        key_type: key_type.clone(),
        max_expiration_seconds: projection.max_expiration_seconds,
        credential_bundle_path: projection.credential_bundle_path.clone(),
        key_path: projection.key_path.clone(),
        certificate_chain_path: projection.certificate_chain_path.clone(),
        user_annotations: projection.user_annotations.clone().into_iter().collect(),
        mode,
        owner_uid: owner,
    })
}

fn object(kind: &str, name: &str, items: &[KeyToPath], optional: Option<bool>) -> FileSource {
    let item = |item: &KeyToPath| volume::KeyFile {
        key: item.key.clone(),
        path: item.path.clone(),
        mode: item.mode.map(bits),
    };
    FileSource::Object(volume::ObjectFiles {
        kind: kind.to_owned(),
        name: name.to_owned(),
        items: items.iter().map(item).collect(),
        optional: optional == Some(true),
    })
}

fn downward(pod: &Pod, items: &[DownwardApiVolumeFile], allocatable: &ResourceList) -> FileSource {
    use volume::downward_file::Value;
    let one = |item: &DownwardApiVolumeFile| {
        let value = match downward_value(pod, item, allocatable) {
            DownwardValue::Value(text) => Value::Content(text.into_bytes()),
            DownwardValue::Invalid(why) => Value::Error(why),
            DownwardValue::NeedsAllocatable => {
                Value::WaitsFor("resource-manager to report what pods may use of the machine".to_owned())
            }
        };
        volume::DownwardFile { path: item.path.clone(), mode: item.mode.map(bits), value: Some(value) }
    };
    FileSource::Downward(volume::DownwardFiles { files: items.iter().map(one).collect() })
}

/// Permission bits; 0 for a value that validation refuses.
fn bits(mode: i32) -> u32 {
    u32::try_from(mode).unwrap_or(0)
}

/// Folders in a volume at which a container mounts another volume, the outermost of each branch, relative to the
/// volume (volumes.md §9.1).
fn nested(pod: &Pod, name: &str) -> Vec<String> {
    let mut found = BTreeSet::new();
    for container in containers(pod) {
        let mounts = &container.volume_mounts;
        for own in mounts.iter().filter(|mount| mount.name == name) {
            let own = parts(&own.mount_path);
            let others =
                mounts.iter().filter(|mount| mount.name != name).map(|mount| parts(&mount.mount_path));
            let below: BTreeSet<Vec<&str>> = others
                .filter(|other| other.len() > own.len() && other.starts_with(&own))
                .map(|other| other[own.len()..].to_vec())
                .collect();
            let is_outermost =
                |path: &&Vec<&str>| !below.iter().any(|o| o.len() < path.len() && path.starts_with(o));
            found.extend(below.iter().filter(is_outermost).map(|path| path.join("/")));
        }
    }
    found.into_iter().collect()
}

/// The components of a path of a container.
fn parts(path: &str) -> Vec<&str> {
    path.split('/').filter(|part| !part.is_empty() && *part != ".").collect()
}

#[cfg(test)]
mod tests;
