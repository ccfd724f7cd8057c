//! Conversions between wire types and this service's types.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use keelson_pod_reconciler::Item;
use keelson_pod_reconciler::wire::{MissingField, header, positive};
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_volume_manager_core::desire::{
    FsGroupPolicy, Medium, PodDesire, PodRef, Source, Volume, VolumeUse,
};
use keelson_volume_manager_core::names::is_path_component;
use keelson_volume_manager_core::payload::{
    DownwardFile, DownwardValue, FileSource, Files, FilesKind, KeyFile, ObjectFiles, ObjectKind, TokenFile,
};
use keelson_volume_manager_core::pod_certificate::CertificateName;
use keelson_volume_manager_core::selinux::{ChangePolicy, SeLinuxOptions};
use keelson_volume_manager_core::token::TokenName;
use keelson_volume_manager_core::user_namespaces::IdRange;
use keelson_volume_manager_core::wait_owner::WaitOwner;

use crate::orphans::{Left, LeftKind};
use crate::prepare::{ContainerRequest, FileKey, FileKeyValue, PreparedContainer};
use crate::stats::{PodStats, VolumeStats};
use crate::subpath::SubPath;
use crate::view::{MountedVolume, PodVolumeStatus, VolumeWait};

mod pod_certificate;
mod trust_bundle;

/// Why a message is invalid; names the field.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    /// A required field is missing.
    #[error(transparent)]
    Missing(#[from] MissingField),
    /// A name is not a single path component.
    #[error("{field} {value:?} is not a valid name")]
    InvalidName { field: &'static str, value: String },
    /// A number is out of range.
    #[error("{field} {value} is out of range")]
    OutOfRange { field: &'static str, value: i64 },
    /// The field has no such value.
    #[error("{field} {value:?} is unknown")]
    UnknownValue { field: &'static str, value: String },
}

/// Checks that a name is a single path component.
pub(crate) fn path_component(field: &'static str, value: &str) -> Result<String, WireError> {
    if is_path_component(value) {
        Ok(value.to_owned())
    } else {
        Err(WireError::InvalidName { field, value: value.to_owned() })
    }
}

impl TryFrom<pb::PodDesire> for PodDesireFromWire {
    type Error = WireError;

    fn try_from(message: pb::PodDesire) -> Result<Self, WireError> {
        let want = message.want();
        let mut header = header(message.pod, message.revision, want)?;
        header.pod.uid = path_component("pod.pod.uid", &header.pod.uid)?;
        let group = |value: i64| {
            u32::try_from(value).map_err(|_| WireError::OutOfRange { field: "pod.fs_group", value })
        };
        let selinux_options = selinux_options(&message.volumes);
        Ok(Self(PodDesire {
            header,
            volumes: message.volumes.into_iter().map(volume).collect::<Result<_, _>>()?,
            fs_group: message.fs_group.map(group).transpose()?,
            memory_limit: positive(message.memory_limit_bytes),
            huge_pages: message.huge_page_sizes.into_iter().filter_map(positive).collect(),
            storage_limited: message.storage_limited,
            fs_group_policy: fs_group_policy(&message.fs_group_change_policy)?,
            service_account: message.service_account,
            selinux_policy: change_policy(&message.se_linux_change_policy)?,
            selinux_options,
            user_namespace: message.user_namespace,
        }))
    }
}

/// A [`PodDesire`] converted from the wire.
pub(crate) struct PodDesireFromWire(pub(crate) PodDesire);

/// The IDs of a pod's user namespace on the wire.
pub(crate) const fn id_range(range: IdRange) -> pb::IdRange {
    pb::IdRange { host_id: range.host_id, length: range.length }
}

/// Converts a message of the `Sync` stream.
pub(crate) fn sync_item(message: pb::SyncRequest) -> Option<Item<PodDesire, WireError>> {
    Some(match message.item? {
        pb::sync_request::Item::Pod(pod) => Item::Pod(PodDesireFromWire::try_from(pod).map(|pod| pod.0)),
        pb::sync_request::Item::DroppedUid(uid) => Item::Dropped(uid),
        pb::sync_request::Item::Complete(set) => Item::Complete(set),
    })
}

fn volume(message: pb::Volume) -> Result<Volume, WireError> {
    let name = path_component("pod.volumes.name", &message.name)?;
    let source = match message.source.ok_or(MissingField("pod.volumes.source"))? {
        pb::volume::Source::EmptyDir(dir) => Source::EmptyDir {
            medium: Medium::parse(&dir.medium),
            size_limit: positive(dir.size_limit_bytes),
        },
        pb::volume::Source::HostPath(host) => Source::HostPath { path: host.path, kind: host.r#type },
        pb::volume::Source::Files(volume) => Source::Files(files(&name, volume)?),
        pb::volume::Source::Claim(claim) => self::claim(claim)?,
        pb::volume::Source::Plugin(plugin) => Source::Plugin { kind: plugin.kind, json: plugin.source_json },
        pb::volume::Source::Unsupported(kind) => Source::Unsupported(kind),
    };
    let used = VolumeUse { mounts: message.mounted, devices: message.device };
    Ok(Volume { name, source, used })
}

fn claim(message: pb::ClaimVolume) -> Result<Source, WireError> {
    let field = "pod.volumes.claim.claim_name";
    let name = match (message.ephemeral, message.claim_name) {
        (true, _) => None,
        (false, name) => Some(path_component(field, &name)?),
    };
    Ok(Source::Claim { name, read_only: message.read_only })
}

fn fs_group_policy(text: &str) -> Result<FsGroupPolicy, WireError> {
    match text {
        "" | "Always" => Ok(FsGroupPolicy::Always),
        "OnRootMismatch" => Ok(FsGroupPolicy::OnRootMismatch),
        _ => Err(WireError::UnknownValue { field: "pod.fs_group_change_policy", value: text.to_owned() }),
    }
}

fn change_policy(text: &str) -> Result<ChangePolicy, WireError> {
    ChangePolicy::parse(Some(text))
        .map_err(|_| WireError::UnknownValue { field: "pod.se_linux_change_policy", value: text.to_owned() })
}

/// The options of the containers that mount each volume, for volumes that have some.
fn selinux_options(volumes: &[pb::Volume]) -> BTreeMap<String, Vec<SeLinuxOptions>> {
    let options = |options: &pb::SeLinuxOptions| {
        let pb::SeLinuxOptions { user, role, r#type, level } = options.clone();
        SeLinuxOptions { user, role, kind: r#type, level }
    };
    let labelled = volumes.iter().filter(|volume| !volume.se_linux_options.is_empty());
    labelled
        .map(|volume| (volume.name.clone(), volume.se_linux_options.iter().map(options).collect()))
        .collect()
}

fn files(volume: &str, message: pb::FileVolume) -> Result<Files, WireError> {
    let kind = match message.kind() {
        pb::file_volume::Kind::ConfigMap => FilesKind::ConfigMap,
        pb::file_volume::Kind::Secret => FilesKind::Secret,
        pb::file_volume::Kind::DownwardApi => FilesKind::DownwardApi,
        pb::file_volume::Kind::Projected => FilesKind::Projected,
        pb::file_volume::Kind::Unspecified => return Err(MissingField("pod.volumes.files.kind").into()),
    };
    let source =
        |(source, message)| file_source(CertificateName { volume: volume.to_owned(), source }, message);
    let sources = message.sources.into_iter().enumerate().map(source).collect::<Result<_, _>>()?;
    Ok(Files { kind, sources, default_mode: message.default_mode, nested: message.nested })
}

/// Converts a source. `name`: of the certificate, if the source is one.
fn file_source(name: CertificateName, message: pb::FileSource) -> Result<FileSource, WireError> {
    Ok(match message.source.ok_or(MissingField("pod.volumes.files.sources.source"))? {
        pb::file_source::Source::Object(object) => FileSource::Object(ObjectFiles {
            kind: ObjectKind::parse(&object.kind).filter(|kind| kind.has_keys()).ok_or(
                WireError::UnknownValue {
                    field: "pod.volumes.files.sources.object.kind",
                    value: object.kind,
                },
            )?,
            name: object.name,
            items: object
                .items
                .into_iter()
                .map(|item| KeyFile { key: item.key, path: item.path, mode: item.mode })
                .collect(),
            optional: object.optional,
        }),
        pb::file_source::Source::Downward(fields) => {
            FileSource::Downward(fields.files.into_iter().map(downward).collect::<Result<_, _>>()?)
        }
        pb::file_source::Source::Token(token) => FileSource::Token(self::token(token)?),
        pb::file_source::Source::TrustBundle(bundle) => {
            FileSource::TrustBundle(trust_bundle::from_wire(bundle)?)
        }
        pb::file_source::Source::PodCertificate(certificate) => {
            FileSource::Certificate(pod_certificate::from_wire(name, certificate)?)
        }
        pb::file_source::Source::Unsupported(field) => FileSource::Unsupported(field),
    })
}

fn token(message: pb::ServiceAccountToken) -> Result<TokenFile, WireError> {
    let pb::ServiceAccountToken { service_account, audience, expiration_seconds, path, mode, owner_uid } =
        message;
    let name = TokenName { service_account, audience, expiration_seconds };
    Ok(TokenFile { name, path, mode, owner: owner("pod.volumes.files.sources.token.owner_uid", owner_uid)? })
}

fn owner(field: &'static str, uid: Option<i64>) -> Result<Option<u32>, WireError> {
    uid.map(|value| u32::try_from(value).map_err(|_| WireError::OutOfRange { field, value })).transpose()
}

fn downward(message: pb::DownwardFile) -> Result<DownwardFile, WireError> {
    use pb::downward_file::Value;
    let value = match message.value.ok_or(MissingField("pod.volumes.files.sources.downward.value"))? {
        Value::Content(bytes) => DownwardValue::Content(bytes),
        Value::Error(why) => DownwardValue::Invalid(why),
        Value::WaitsFor(what) => DownwardValue::Pending(what),
    };
    Ok(DownwardFile { path: message.path, mode: message.mode, value })
}

/// Converts a `PrepareContainer` request.
pub(crate) fn container_request(message: pb::PrepareContainerRequest) -> Result<ContainerRequest, WireError> {
    let subpath = |subpath: pb::SubPath| {
        let volume = path_component("subpaths.volume", &subpath.volume)?;
        Ok(SubPath { index: subpath.index, volume, path: subpath.path, read_only: subpath.read_only })
    };
    let key = |key: pb::FileKey| FileKey { volume: key.volume, path: key.path, key: key.key };
    Ok(ContainerRequest {
        uid: path_component("uid", &message.uid)?,
        container: path_component("container", &message.container)?,
        subpaths: message.subpaths.into_iter().map(subpath).collect::<Result<_, WireError>>()?,
        keys: message.keys.into_iter().map(key).collect(),
    })
}

/// Converts the result of `PrepareContainer`.
pub(crate) fn prepared_container(prepared: PreparedContainer) -> pb::PrepareContainerResponse {
    use pb::file_key_value::Found;
    let subpath = |(index, path): (u32, PathBuf)| pb::PreparedSubPath {
        index,
        host_path: path.to_string_lossy().into_owned(),
    };
    let value = |value| {
        let found = match value {
            FileKeyValue::Found(value) => Found::Value(value),
            FileKeyValue::Missing => Found::Missing(true),
            FileKeyValue::Error(why) => Found::Error(why),
        };
        pb::FileKeyValue { found: Some(found) }
    };
    pb::PrepareContainerResponse {
        subpaths: prepared.subpaths.into_iter().map(subpath).collect(),
        values: prepared.values.into_iter().map(value).collect(),
    }
}

/// Converts the stats of a pod's volumes.
pub(crate) fn pod_stats(stats: PodStats) -> pb::PodVolumeStatsResponse {
    let PodRef { uid, namespace, name } = stats.pod;
    let volume = |(name, stats): (String, VolumeStats)| {
        let (measured_unix_nanos, usage) = stats.measured.unwrap_or_default();
        let limit = stats.measure.size_limit.unwrap_or(0);
        pb::VolumeStats {
            name,
            measured_unix_nanos,
            used_bytes: usage.used_bytes,
            capacity_bytes: usage.capacity_bytes,
            available_bytes: usage.available_bytes,
            inodes_used: usage.inodes_used,
            inodes: usage.inodes,
            inodes_free: usage.inodes_free,
            local_ephemeral: stats.measure.local_ephemeral,
            size_limit_bytes: i64::try_from(limit).unwrap_or(i64::MAX),
            message: stats.message,
            claim: stats.claim,
            abnormal: stats.abnormal,
        }
    };
    pb::PodVolumeStatsResponse {
        pod: Some(common::PodRef { uid, namespace, name }),
        volumes: stats.volumes.into_iter().map(volume).collect(),
    }
}

/// Converts ready volumes.
pub(crate) fn mounts(mounts: Vec<MountedVolume>) -> Vec<pb::VolumeMount> {
    mounts
        .into_iter()
        .map(|m| pb::VolumeMount {
            name: m.name,
            host_path: m.host_path,
            read_only: m.read_only,
            block_device: m.is_block_device,
            supplemental_group: m.supplemental_group,
            plugin: m.plugin,
            claim: m.claim,
            persistent_volume: m.persistent_volume,
            selinux_relabel: m.selinux_relabel,
        })
        .collect()
}

/// Converts the status of a pod for `WatchPodVolumes`.
pub(crate) fn pod_volumes(uid: String, status: PodVolumeStatus) -> pb::PodVolumes {
    pb::PodVolumes {
        uid,
        state: status.phase.as_str().to_owned(),
        volumes: mounts(status.mounts),
        message: status.message,
        namespace: status.pod.namespace,
        name: status.pod.name,
        waits: status.waits.into_iter().map(wait).collect(),
    }
}

/// Converts what is left of an orphaned pod; the paths are relative to its folder.
pub(crate) fn orphaned_paths(folder: &Path, left: Vec<Left>) -> Vec<pb::OrphanedPath> {
    let path = |left: Left| {
        let kind = match left.kind {
            LeftKind::Mount => pb::orphaned_path::Kind::Mount,
            LeftKind::Volume => pb::orphaned_path::Kind::Volume,
            LeftKind::File => pb::orphaned_path::Kind::File,
        };
        let path = left.path.strip_prefix(folder).unwrap_or(&left.path).display().to_string();
        pb::OrphanedPath { path, kind: kind.into() }
    };
    left.into_iter().map(path).collect()
}

fn wait(wait: VolumeWait) -> pb::VolumeWait {
    let VolumeWait { volume, message, owner } = wait;
    let owner = match owner {
        WaitOwner::VolumeManager => String::new(),
        owner => owner.to_string(),
    };
    pb::VolumeWait { volume, message, owner }
}

#[cfg(test)]
mod tests {
    use keelson_volume_manager_core::desire::Want;

    use super::*;

    fn message() -> pb::PodDesire {
        pb::PodDesire {
            pod: Some(common::PodRef { uid: "u".into(), namespace: "ns".into(), name: "n".into() }),
            revision: 3,
            want: common::Want::Run.into(),
            volumes: vec![pb::Volume {
                name: "v".into(),
                source: Some(pb::volume::Source::EmptyDir(pb::EmptyDir {
                    medium: "Memory".into(),
                    size_limit_bytes: 0,
                })),
                mounted: true,
                device: false,
                se_linux_options: vec![pb::SeLinuxOptions { level: "s0:c1".into(), ..Default::default() }],
            }],
            fs_group: Some(5),
            memory_limit_bytes: 7,
            huge_page_sizes: vec![2 << 20, 0],
            storage_limited: true,
            fs_group_change_policy: "OnRootMismatch".into(),
            service_account: "web".into(),
            se_linux_change_policy: "Recursive".into(),
            user_namespace: true,
        }
    }

    #[test]
    fn a_complete_desire_is_converted_from_the_wire() {
        let desire = PodDesireFromWire::try_from(message()).unwrap().0;
        assert_eq!((desire.header.revision, desire.header.want, desire.fs_group), (3, Want::Run, Some(5)));
        assert_eq!(desire.memory_limit, Some(7));
        assert_eq!(desire.huge_pages, [2 << 20].into());
        let source = Source::EmptyDir { medium: Medium::Memory, size_limit: None };
        let used = VolumeUse { mounts: true, devices: false };
        assert_eq!(desire.volumes, [Volume { name: "v".into(), source, used }]);
        let other = (desire.fs_group_policy, desire.service_account.as_str());
        assert_eq!(other, (FsGroupPolicy::OnRootMismatch, "web"));
        assert_eq!(desire.selinux_policy, ChangePolicy::Recursive);
        assert!(desire.user_namespace);
        let options = SeLinuxOptions { level: "s0:c1".into(), ..SeLinuxOptions::default() };
        assert_eq!(desire.selinux_options, [("v".to_owned(), vec![options])].into());
    }

    #[test]
    fn claims_and_plugins_are_converted_from_the_wire() {
        let claim = |claim_name: &str, ephemeral| pb::ClaimVolume {
            claim_name: claim_name.into(),
            ephemeral,
            read_only: true,
        };
        let read =
            |source| volume(pb::Volume { name: "v".into(), source: Some(source), ..pb::Volume::default() });
        let claims = [(claim("data", false), Some("data".to_owned())), (claim("", true), None)];
        for (message, name) in claims {
            let volume = read(pb::volume::Source::Claim(message)).unwrap();
            assert_eq!(volume.source, Source::Claim { name, read_only: true });
        }
        for name in ["", "..", "a/b"] {
            assert!(read(pb::volume::Source::Claim(claim(name, false))).is_err(), "{name:?}");
        }
        let plugin = pb::PluginVolume { kind: "nfs".into(), source_json: b"{}".to_vec() };
        let volume = read(pb::volume::Source::Plugin(plugin)).unwrap();
        assert_eq!(volume.source, Source::Plugin { kind: "nfs".into(), json: b"{}".to_vec() });
    }

    #[test]
    fn an_unknown_fs_group_change_policy_is_refused() {
        let message = pb::PodDesire { fs_group_change_policy: "Never".into(), ..message() };
        assert!(PodDesireFromWire::try_from(message).is_err());
    }

    #[test]
    fn an_unknown_selinux_change_policy_is_refused() {
        let message = pb::PodDesire { se_linux_change_policy: "Never".into(), ..message() };
        assert!(PodDesireFromWire::try_from(message).is_err());
    }

    fn files_of(sources: Vec<pb::FileSource>) -> pb::volume::Source {
        pb::volume::Source::Files(pb::FileVolume {
            kind: pb::file_volume::Kind::Projected.into(),
            sources,
            default_mode: Some(0o644),
            nested: vec!["sub".into()],
        })
    }

    fn source(source: pb::file_source::Source) -> pb::FileSource {
        pb::FileSource { source: Some(source) }
    }

    #[test]
    fn each_kind_of_file_source_is_converted_from_the_wire() {
        use pb::downward_file::Value;
        let item = pb::KeyFile { key: "k".into(), path: "p".into(), mode: Some(0o400) };
        let field = |value| pb::DownwardFile { path: "f".into(), mode: None, value: Some(value) };
        let object =
            pb::ObjectFiles { kind: "Secret".into(), name: "s".into(), items: vec![item], optional: true };
        let fields = vec![
            field(Value::Content(b"x".to_vec())),
            field(Value::Error("e".into())),
            field(Value::WaitsFor("w".into())),
        ];
        let mut message = message();
        message.volumes[0].source = Some(files_of(vec![
            source(pb::file_source::Source::Object(object)),
            source(pb::file_source::Source::Downward(pb::DownwardFiles { files: fields })),
            source(pb::file_source::Source::Unsupported("serviceAccountToken".into())),
        ]));
        let desire = PodDesireFromWire::try_from(message).unwrap().0;
        let item = KeyFile { key: "k".into(), path: "p".into(), mode: Some(0o400) };
        let object =
            ObjectFiles { kind: ObjectKind::Secret, name: "s".into(), items: vec![item], optional: true };
        let field = |value| DownwardFile { path: "f".into(), mode: None, value };
        let fields = vec![
            field(DownwardValue::Content(b"x".to_vec())),
            field(DownwardValue::Invalid("e".into())),
            field(DownwardValue::Pending("w".into())),
        ];
        let files = Files {
            kind: FilesKind::Projected,
            sources: vec![
                FileSource::Object(object),
                FileSource::Downward(fields),
                FileSource::Unsupported("serviceAccountToken".into()),
            ],
            default_mode: Some(0o644),
            nested: vec!["sub".into()],
        };
        assert_eq!(desire.volumes[0].files(), Some(&files));
    }

    #[test]
    fn conversion_errors_name_the_field() {
        type Corrupt = fn(&mut pb::PodDesire);
        let cases: [(&str, Corrupt); 9] = [
            ("pod.volumes.files.sources.token.owner_uid", |m| {
                let token = pb::ServiceAccountToken { owner_uid: Some(-1), ..Default::default() };
                m.volumes[0].source = Some(files_of(vec![source(pb::file_source::Source::Token(token))]));
            }),
            ("pod.volumes.files.kind", |m| {
                m.volumes[0].source = Some(pb::volume::Source::Files(pb::FileVolume::default()));
            }),
            ("pod.volumes.files.sources.source", |m| {
                m.volumes[0].source = Some(files_of(vec![pb::FileSource::default()]));
            }),
            ("pod.volumes.files.sources.object.kind", |m| {
                let object = pb::file_source::Source::Object(pb::ObjectFiles::default());
                m.volumes[0].source = Some(files_of(vec![source(object)]));
            }),
            ("pod.pod", |m| m.pod = None),
            ("pod.want", |m| m.want = 0),
            ("pod.pod.uid", |m| m.pod.as_mut().unwrap().uid = "../x".into()),
            ("pod.volumes.name", |m| m.volumes[0].name = "..".into()),
            ("pod.fs_group", |m| m.fs_group = Some(-1)),
        ];
        for (field, corrupt) in cases {
            let mut message = message();
            corrupt(&mut message);
            let error = PodDesireFromWire::try_from(message).err().unwrap().to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}
