//! Wire types to our own and back.

use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_sync_callee::Item;
use keelson_sync_callee::wire::{Missing, positive, want};
use keelson_volume_manager_core::desire::{Medium, PodDesire, PodRef, Source, Volume};
use keelson_volume_manager_core::names::is_one_component;

use crate::view::{Mounted, Report};

/// A message that cannot be taken, by the field that is wrong.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    /// A field that must be there is not.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// A name that would lead out of its folder.
    #[error("{field} {value:?} is no plain name")]
    Name { field: &'static str, value: String },
    /// A number outside its range.
    #[error("{field} {value} is out of range")]
    Range { field: &'static str, value: i64 },
}

/// A name that is one path component.
pub(crate) fn plain(field: &'static str, value: &str) -> Result<String, WireError> {
    if is_one_component(value) {
        Ok(value.to_owned())
    } else {
        Err(WireError::Name { field, value: value.to_owned() })
    }
}

impl TryFrom<pb::PodDesire> for PodDesireFromWire {
    type Error = WireError;

    fn try_from(message: pb::PodDesire) -> Result<Self, WireError> {
        let want = want(message.want())?;
        let pod = message.pod.ok_or(Missing("pod.pod"))?;
        let group =
            |value: i64| u32::try_from(value).map_err(|_| WireError::Range { field: "pod.fs_group", value });
        Ok(Self(PodDesire {
            pod: PodRef { uid: plain("pod.pod.uid", &pod.uid)?, namespace: pod.namespace, name: pod.name },
            revision: message.revision,
            want,
            volumes: message.volumes.into_iter().map(volume).collect::<Result<_, _>>()?,
            fs_group: message.fs_group.map(group).transpose()?,
            memory_limit: positive(message.memory_limit_bytes),
        }))
    }
}

/// A [`PodDesire`] that came over the wire.
pub(crate) struct PodDesireFromWire(pub(crate) PodDesire);

/// What a message of the `Sync` stream says.
pub(crate) fn item(message: pb::SyncRequest) -> Option<Item<PodDesire, WireError>> {
    Some(match message.item? {
        pb::sync_request::Item::Pod(pod) => Item::Pod(PodDesireFromWire::try_from(pod).map(|pod| pod.0)),
        pb::sync_request::Item::DroppedUid(uid) => Item::Dropped(uid),
        pb::sync_request::Item::Complete(set) => Item::Complete(set),
    })
}

fn volume(message: pb::Volume) -> Result<Volume, WireError> {
    let name = plain("pod.volumes.name", &message.name)?;
    let source = match message.source.ok_or(Missing("pod.volumes.source"))? {
        pb::volume::Source::EmptyDir(dir) => Source::EmptyDir {
            medium: Medium::parse(&dir.medium),
            size_limit: positive(dir.size_limit_bytes),
        },
        pb::volume::Source::HostPath(host) => Source::HostPath { path: host.path, kind: host.r#type },
        pb::volume::Source::Unsupported(kind) => Source::Unsupported(kind),
    };
    Ok(Volume { name, source })
}

/// Volumes as containers mount them.
pub(crate) fn mounts(mounts: Vec<Mounted>) -> Vec<pb::VolumeMount> {
    mounts
        .into_iter()
        .map(|m| pb::VolumeMount { name: m.name, host_path: m.host_path, read_only: false })
        .collect()
}

/// A pod in `WatchPodVolumes`.
pub(crate) fn pod_volumes(uid: String, report: Report) -> pb::PodVolumes {
    pb::PodVolumes {
        uid,
        state: report.phase.as_str().to_owned(),
        volumes: mounts(report.mounts),
        message: report.message,
    }
}

#[cfg(test)]
mod tests {
    use keelson_proto::keelson::common::v1 as common;
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
            }],
            fs_group: Some(5),
            memory_limit_bytes: 7,
        }
    }

    #[test]
    fn a_whole_desire_is_taken() {
        let desire = PodDesireFromWire::try_from(message()).unwrap().0;
        assert_eq!((desire.revision, desire.want, desire.fs_group), (3, Want::Run, Some(5)));
        assert_eq!(desire.memory_limit, Some(7));
        let source = Source::EmptyDir { medium: Medium::Memory, size_limit: None };
        assert_eq!(desire.volumes, [Volume { name: "v".into(), source }]);
    }

    #[test]
    fn what_is_wrong_is_named_by_its_field() {
        type Spoil = fn(&mut pb::PodDesire);
        let cases: [(&str, Spoil); 5] = [
            ("pod.pod", |m| m.pod = None),
            ("pod.want", |m| m.want = 0),
            ("pod.pod.uid", |m| m.pod.as_mut().unwrap().uid = "../x".into()),
            ("pod.volumes.name", |m| m.volumes[0].name = "..".into()),
            ("pod.fs_group", |m| m.fs_group = Some(-1)),
        ];
        for (field, spoil) in cases {
            let mut message = message();
            spoil(&mut message);
            let error = PodDesireFromWire::try_from(message).err().unwrap().to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}
