//! A pod's volumes as messages to volume-manager, which reads no Pod JSON.

use std::collections::BTreeSet;

use keelson_kube_model::{
    Container, DownwardApiVolumeFile, KeyToPath, Pod, ProjectedVolumeSource, Quantity, ResourceList,
    SeLinuxOptions, ServiceAccountTokenProjection, Volume, VolumeProjection,
};
use keelson_pod_sync_core::config::{DownwardValue, TokenAccess, downward_value, token_access};
use keelson_proto::keelson::volume_manager::v1 as volume;
use keelson_proto::keelson::volume_manager::v1::file_source::Source as FileSource;
use keelson_proto::keelson::volume_manager::v1::file_volume::Kind;
use keelson_proto::keelson::volume_manager::v1::volume::Source;

/// The API's default for the lifetime of a token, in seconds (volumes.md §9.6).
const TOKEN_SECONDS: i64 = 3600;

/// The sources that plugins of volume-manager provide, that CSI drivers have taken over, or that Kubernetes has removed (volumes.md §12),
/// by wire name. volume-manager says of the last ones since when, and what to use instead. Any other source is unsupported.
const PLUGIN_SOURCES: [&str; 21] = [
    "awsElasticBlockStore",
    "azureDisk",
    "azureFile",
    "cephfs",
    "cinder",
    "csi",
    "fc",
    "flexVolume",
    "flocker",
    "gcePersistentDisk",
    "gitRepo",
    "glusterfs",
    "iscsi",
    "nfs",
    "photonPersistentDisk",
    "portworxVolume",
    "quobyte",
    "rbd",
    "scaleIO",
    "storageos",
    "vsphereVolume",
];

/// The volumes that some container of a pod uses (volumes.md §3.2). Others may refer to objects that do not exist. `allocatable`: what
/// pods may use of the machine, empty while it is unknown; `tokens`: the control plane issues service account tokens.
pub fn messages(pod: &Pod, allocatable: &ResourceList, tokens: bool) -> Vec<volume::Volume> {
    // The runtime mounts images itself (volumes.md §10.7).
    let is_image = |volume: &Volume| volume.source_kinds() == ["image"];
    let used = pod.spec.volumes.iter().filter(|volume| is_used(pod, &volume.name) && !is_image(volume));
    let message = |volume: &Volume| volume::Volume {
        name: volume.name.clone(),
        source: Some(source(pod, volume, allocatable, tokens)),
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

fn source(pod: &Pod, volume: &Volume, allocatable: &ResourceList, tokens: bool) -> Source {
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
    if let Some(files) = files(pod, volume, allocatable, tokens) {
        return Source::Files(files);
    }
    let kind = kinds.first().copied().unwrap_or("no source");
    match volume.other.get(kind).filter(|_| PLUGIN_SOURCES.contains(&kind)) {
        Some(source) => Source::Plugin(volume::PluginVolume {
            kind: kind.to_owned(),
            source_json: source.to_string().into_bytes(),
        }),
        None => Source::Unsupported(kind.to_owned()),
    }
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
fn files(pod: &Pod, volume: &Volume, allocatable: &ResourceList, tokens: bool) -> Option<volume::FileVolume> {
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
        (Kind::Projected, projections(pod, projected, allocatable, tokens), projected.default_mode)
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
    tokens: bool,
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
        if let Some(projection) = source.service_account_token.as_ref().filter(|_| tokens) {
            return token(pod, projection);
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
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(mounts: serde_json::Value, volumes: serde_json::Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "web", "labels": {"tier": "front"}},
            "spec": {
                "containers": [{"name": "c", "volumeMounts": mounts}],
                "initContainers": [{"name": "i", "volumeMounts": [{"name": "early", "mountPath": "/e"}]}],
                "volumes": volumes
            }
        }))
        .unwrap()
    }

    fn only(mounts: serde_json::Value, volume: serde_json::Value) -> volume::FileVolume {
        let messages = messages(&pod(mounts, json!([volume])), &ResourceList::new(), false);
        match messages.into_iter().next().and_then(|volume| volume.source) {
            Some(Source::Files(files)) => files,
            other => panic!("{other:?}"),
        }
    }

    fn at(path: &str) -> serde_json::Value {
        json!([{"name": "v", "mountPath": path}])
    }

    #[test]
    fn config_map_secret_and_downward_volumes_have_sources_modes_and_optional() {
        let files = only(
            at("/v"),
            json!({"name": "v", "configMap": {"name": "m", "defaultMode": 420, "optional": true,
                "items": [{"key": "k", "path": "p", "mode": 256}]}}),
        );
        assert_eq!((files.kind(), files.default_mode), (Kind::ConfigMap, Some(0o644)));
        let item = volume::KeyFile { key: "k".into(), path: "p".into(), mode: Some(0o400) };
        let object = |kind: &str, name: &str, items, optional| {
            let (kind, name) = (kind.to_owned(), name.to_owned());
            FileSource::Object(volume::ObjectFiles { kind, name, items, optional })
        };
        assert_eq!(files.sources[0].source, Some(object("ConfigMap", "m", vec![item], true)));
        let files = only(at("/v"), json!({"name": "v", "secret": {"secretName": "s"}}));
        assert_eq!((files.kind(), files.default_mode), (Kind::Secret, None));
        assert_eq!(files.sources[0].source, Some(object("Secret", "s", vec![], false)));
        let files = only(
            at("/v"),
            json!({"name": "v", "downwardAPI": {"items": [
                {"path": "tier", "fieldRef": {"fieldPath": "metadata.labels['tier']"}},
                {"path": "ip", "fieldRef": {"fieldPath": "status.podIP"}},
                {"path": "cpu", "resourceFieldRef": {"containerName": "c", "resource": "limits.cpu"}},
            ]}}),
        );
        assert_eq!(files.kind(), Kind::DownwardApi);
        let Some(FileSource::Downward(fields)) = &files.sources[0].source else { panic!("{files:?}") };
        use volume::downward_file::Value;
        assert_eq!(fields.files[0].value, Some(Value::Content(b"front".to_vec())));
        assert!(matches!(&fields.files[1].value, Some(Value::Error(why)) if why.contains("status.podIP")));
        assert!(
            matches!(&fields.files[2].value, Some(Value::WaitsFor(what)) if what.contains("resource-manager"))
        );
    }

    #[test]
    fn projected_sources_keep_their_order_and_unsupported_ones_are_named() {
        let files = only(
            at("/v"),
            json!({"name": "v", "projected": {"defaultMode": 256, "sources": [
                {"secret": {"name": "s"}},
                {"serviceAccountToken": {"path": "token"}},
                {"downwardAPI": {"items": [{"path": "n", "fieldRef": {"fieldPath": "metadata.name"}}]}},
                {"clusterTrustBundle": {"path": "ca"}},
                {"configMap": {"name": "m"}},
                {"podCertificate": {"signerName": "x/y"}},
            ]}}),
        );
        assert_eq!((files.kind(), files.default_mode), (Kind::Projected, Some(0o400)));
        let names: Vec<String> = files
            .sources
            .into_iter()
            .map(|source| match source.source.unwrap() {
                FileSource::Object(object) => format!("{}/{}", object.kind, object.name),
                FileSource::Downward(_) => "downward".to_owned(),
                FileSource::Token(token) => format!("token {}", token.path),
                FileSource::Unsupported(field) => field,
            })
            .collect();
        let expected = [
            "Secret/s",
            "serviceAccountToken",
            "downward",
            "clusterTrustBundle",
            "ConfigMap/m",
            "podCertificate",
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn a_projected_token_has_its_account_lifetime_and_mode() {
        let volume = json!({"name": "v", "projected": {"defaultMode": 420, "sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
            {"serviceAccountToken": {"path": "other", "audience": "vault"}},
        ]}});
        let mut pod = pod(at("/v"), json!([volume]));
        pod.spec.service_account_name = "web".into();
        let sources = |pod: &Pod| match messages(pod, &ResourceList::new(), true).remove(0).source {
            Some(Source::Files(files)) => files.sources.into_iter().filter_map(|source| source.source),
            other => panic!("{other:?}"),
        };
        let token = |audience: &str, expiration_seconds, path: &str, mode| {
            FileSource::Token(volume::ServiceAccountToken {
                service_account: "web".into(),
                audience: audience.into(),
                expiration_seconds,
                path: path.into(),
                mode,
                owner_uid: None,
            })
        };
        let both = |mode| vec![token("", 3607, "token", mode), token("vault", 3600, "other", mode)];
        assert_eq!(sources(&pod).collect::<Vec<_>>(), both(None));
        pod.spec.security_context = serde_json::from_value(json!({"fsGroup": 5})).unwrap();
        assert_eq!(sources(&pod).collect::<Vec<_>>(), both(Some(0o600)));
    }

    #[test]
    fn volumes_that_no_container_mounts_are_left_out() {
        let map = |name: &str| json!({"name": name, "configMap": {"name": "m"}});
        let unused = [
            json!({"name": "none", "emptyDir": {}}),
            json!({"name": "host", "hostPath": {"path": "/none", "type": "Directory"}}),
            json!({"name": "claim", "persistentVolumeClaim": {"claimName": "none"}}),
        ];
        let mut volumes =
            vec![map("v"), map("early"), map("unused"), json!({"name": "disk", "emptyDir": {}})];
        volumes.extend(unused);
        let mut pod = pod(at("/v"), json!(volumes));
        let device = json!([{"name": "disk", "devicePath": "/dev/x"}]);
        pod.spec.containers[0].volume_devices = serde_json::from_value(device).unwrap();
        let names: Vec<String> =
            messages(&pod, &ResourceList::new(), false).into_iter().map(|volume| volume.name).collect();
        assert_eq!(names, ["v", "early", "disk"]);
    }

    /// The message for the only volume of a pod, with this source.
    fn message_of(source: &serde_json::Value) -> Source {
        let mut volume = source.clone();
        volume["name"] = json!("v");
        let pod = pod(at("/v"), json!([volume]));
        messages(&pod, &ResourceList::new(), true).remove(0).source.unwrap()
    }

    #[test]
    fn claims_are_sent_by_name_and_ephemeral_ones_without() {
        let claim = |claim_name: &str, ephemeral, read_only| {
            Source::Claim(volume::ClaimVolume { claim_name: claim_name.into(), ephemeral, read_only })
        };
        for (source, expected) in [
            (json!({"persistentVolumeClaim": {"claimName": "d"}}), claim("d", false, false)),
            (
                json!({"persistentVolumeClaim": {"claimName": "d", "readOnly": false}}),
                claim("d", false, false),
            ),
            (json!({"persistentVolumeClaim": {"claimName": "d", "readOnly": true}}), claim("d", false, true)),
            (
                json!({"ephemeral": {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}}}),
                claim("", true, false),
            ),
        ] {
            assert_eq!(message_of(&source), expected, "{source}");
        }
    }

    #[test]
    fn plugin_sources_are_sent_unchanged_with_unknown_fields() {
        for kind in PLUGIN_SOURCES {
            let value = json!({"server": "a", "readOnly": false, "empty": "", "none": null, "new": {"list": [1, {}]}});
            match message_of(&json!({ kind: value })) {
                Source::Plugin(plugin) => {
                    assert_eq!(plugin.kind, kind);
                    let sent: serde_json::Value = serde_json::from_slice(&plugin.source_json).unwrap();
                    assert_eq!(sent, value, "{kind}");
                }
                other => panic!("{kind}: {other:?}"),
            }
        }
    }

    #[test]
    fn an_image_volume_is_left_to_the_runtime() {
        let volumes = json!([{"name": "v", "image": {"reference": "i:1"}}]);
        assert_eq!(messages(&pod(at("/v"), volumes), &ResourceList::new(), false), []);
        let both = json!({"image": {"reference": "i:1"}, "emptyDir": {}});
        assert_eq!(message_of(&both), Source::Unsupported("emptyDir and image".into()));
    }

    #[test]
    fn novel_sources_are_unsupported_by_their_field() {
        assert_eq!(message_of(&json!({"novel": {}})), Source::Unsupported("novel".into()));
        assert_eq!(message_of(&json!({})), Source::Unsupported("no source".into()));
        assert_eq!(message_of(&json!({"nfs": null})), Source::Unsupported("no source".into()));
    }

    #[test]
    fn a_volume_with_two_sources_is_refused_with_both_names() {
        let both = json!({"emptyDir": {}, "nfs": {"server": "a", "path": "/"}});
        assert_eq!(message_of(&both), Source::Unsupported("emptyDir and nfs".into()));
    }

    #[test]
    fn a_volume_says_whether_containers_mount_it_or_use_it_as_a_device() {
        let claim = |name: &str| json!({"name": name, "persistentVolumeClaim": {"claimName": name}});
        let mut pod = pod(at("/v"), json!([claim("v"), claim("disk"), claim("early")]));
        let device =
            json!([{"name": "disk", "devicePath": "/dev/x"}, {"name": "early", "devicePath": "/dev/y"}]);
        pod.spec.containers[0].volume_devices = serde_json::from_value(device).unwrap();
        let uses: Vec<(String, bool, bool)> = messages(&pod, &ResourceList::new(), false)
            .into_iter()
            .map(|volume| (volume.name, volume.mounted, volume.device))
            .collect();
        let uses: Vec<(&str, bool, bool)> = uses.iter().map(|(name, m, d)| (name.as_str(), *m, *d)).collect();
        assert_eq!(uses, [("v", true, false), ("disk", false, true), ("early", true, true)]);
    }

    #[test]
    fn huge_page_sizes_are_those_requested_once_each() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "web"},
            "spec": {
                "resources": {"requests": {"hugepages-64Ki": "64Ki"}},
                "containers": [
                    {"name": "a", "resources": {"limits": {"hugepages-2Mi": "4Mi", "memory": "1Gi"}}},
                    {"name": "b", "resources": {"requests": {"hugepages-2Mi": "2Mi", "hugepages-1Mi": "0"}}},
                ],
                "initContainers": [{"name": "i", "resources": {"limits": {"hugepages-1Gi": "1Gi"}}}],
            }
        }))
        .unwrap();
        assert_eq!(huge_page_sizes(&pod), [64 << 10, 2 << 20, 1 << 30]);
        let none: Pod = serde_json::from_value(json!({"metadata": {}, "spec": {"containers": []}})).unwrap();
        assert!(huge_page_sizes(&none).is_empty());
    }

    #[test]
    fn nested_mount_points_are_the_outermost_ones_below_a_volume() {
        let mounts = json!([
            {"name": "v", "mountPath": "/etc/app/"},
            {"name": "a", "mountPath": "/etc/app/one"},
            {"name": "b", "mountPath": "/etc/app/one/two"},
            {"name": "c", "mountPath": "/etc/./app//deep/er"},
            {"name": "d", "mountPath": "/etc/application"},
            {"name": "e", "mountPath": "/etc"},
        ]);
        let files = only(mounts, json!({"name": "v", "secret": {"secretName": "s"}}));
        assert_eq!(files.nested, ["deep/er", "one"]);
    }

    #[test]
    fn selinux_options_are_those_of_each_mounting_container_over_the_pods() {
        let mount = json!([{"name": "v", "mountPath": "/v"}]);
        let levels = |pods: serde_json::Value, own: &[serde_json::Value]| {
            let container = |(i, own): (usize, &serde_json::Value)| {
                let name = format!("c{i}");
                json!({"name": name, "securityContext": own, "volumeMounts": mount})
            };
            let containers: Vec<_> = own.iter().enumerate().map(container).collect();
            let other = json!({"name": "other", "securityContext": {"seLinuxOptions": {"level": "s0:c9"}}});
            let pod: Pod = serde_json::from_value(json!({
                "metadata": {"name": "web"},
                "spec": {
                    "securityContext": pods,
                    "containers": containers,
                    "initContainers": [other],
                    "volumes": [{"name": "v", "emptyDir": {}}],
                },
            }))
            .unwrap();
            let messages = messages(&pod, &ResourceList::new(), false);
            let options = messages[0].se_linux_options.iter();
            options.map(|o| format!("{}:{}:{}", o.user, o.r#type, o.level)).collect::<Vec<_>>()
        };
        let label = |level: &str| json!({"seLinuxOptions": {"level": level}});
        let none = json!({});
        assert!(levels(none.clone(), &[none.clone(), none.clone()]).is_empty());
        assert_eq!(levels(label("s0:c1"), &[none.clone(), none.clone()]), ["::s0:c1"]);
        assert_eq!(levels(label("s0:c1"), &[label("s0:c2"), none.clone()]), ["::s0:c2", "::s0:c1"]);
        assert_eq!(levels(none.clone(), &[label("s0:c2"), none]), ["::s0:c2", "::"]);
        let whole = json!({"seLinuxOptions": {"user": "u", "type": "t"}});
        assert_eq!(
            levels(label("s0:c1"), &[whole]),
            ["u:t:"],
            "the options of a container replace the pod's"
        );
    }
}
