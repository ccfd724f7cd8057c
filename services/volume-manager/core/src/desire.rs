//! The desired volumes of a pod, as pod-sync sends them.

use std::collections::{BTreeMap, BTreeSet};

pub use keelson_desired_set::{Desire, DesireHeader, PodRef, Want};

pub use crate::claims::VolumeUse;
use crate::names::VolumeKey;
use crate::payload::Files;
use crate::selinux::{ChangePolicy, SeLinuxOptions};

/// The desired volumes of one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodDesire {
    /// The pod, whose UID is the name of its folder, and what is wanted. `Run`: set up the volumes. `Stop`: keep the
    /// volumes and set up no others. `Unmount`: tear the volumes down. `Forget`: tear them down and remove the pod's
    /// folder.
    pub header: DesireHeader,
    /// The volumes that at least one container of the pod mounts.
    pub volumes: Vec<Volume>,
    /// `spec.securityContext.fsGroup`.
    pub fs_group: Option<u32>,
    /// Memory limit of the pod in bytes, if it has one.
    pub memory_limit: Option<u64>,
    /// The sizes in bytes of the huge pages that the pod requests.
    pub huge_pages: BTreeSet<u64>,
    /// A container or the pod as a whole has a limit for local ephemeral storage.
    pub storage_limited: bool,
    /// `spec.securityContext.fsGroupChangePolicy`.
    pub fs_group_policy: FsGroupPolicy,
    /// `spec.serviceAccountName`.
    pub service_account: String,
    /// `spec.securityContext.seLinuxChangePolicy`.
    pub selinux_policy: ChangePolicy,
    /// The SELinux options of the containers that mount a volume, by `spec.volumes[].name`. Empty options are those of a
    /// container without any; a volume without an entry is mounted by containers without options.
    pub selinux_options: BTreeMap<String, Vec<SeLinuxOptions>>,
    /// `spec.hostUsers` is false: the pod gets a range of the node's user and group IDs.
    pub user_namespace: bool,
}

/// `spec.securityContext.fsGroupChangePolicy`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FsGroupPolicy {
    /// The ownership of all files is changed at each set-up.
    #[default]
    Always,
    /// It is changed only if the volume's root does not have it yet.
    OnRootMismatch,
}

impl Desire for PodDesire {
    fn header(&self) -> &DesireHeader {
        &self.header
    }
}

impl From<DesireHeader> for PodDesire {
    fn from(header: DesireHeader) -> Self {
        Self {
            header,
            volumes: Vec::new(),
            fs_group: None,
            memory_limit: None,
            huge_pages: BTreeSet::new(),
            storage_limited: false,
            fs_group_policy: FsGroupPolicy::Always,
            service_account: String::new(),
            selinux_policy: ChangePolicy::MountOption,
            selinux_options: BTreeMap::new(),
            user_namespace: false,
        }
    }
}

/// A volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// `spec.volumes[].name`, a DNS label.
    pub name: String,
    /// Where the volume's content comes from.
    pub source: Source,
    /// How the pod's containers use it.
    pub used: VolumeUse,
}

impl Volume {
    /// The volume's place below the pod's folder; `None` for a volume that has none.
    pub fn key(&self) -> Option<VolumeKey> {
        match &self.source {
            Source::EmptyDir { .. } => Some(VolumeKey::empty_dir(&self.name)),
            Source::Files(files) => {
                Some(VolumeKey { plugin: files.kind.plugin().to_owned(), name: self.name.clone() })
            }
            Source::HostPath { .. }
            | Source::Claim { .. }
            | Source::Plugin { .. }
            | Source::Unsupported(_) => None,
        }
    }

    /// Whether a plugin provides it: it may need a device that pods share, and it is set up beside the pod's other
    /// volumes ([`world`](crate::world)).
    pub const fn has_plugin(&self) -> bool {
        matches!(self.source, Source::Claim { .. } | Source::Plugin { .. })
    }

    /// The volume's files, if they come from the API.
    pub fn files(&self) -> Option<&Files> {
        match &self.source {
            Source::Files(files) => Some(files),
            Source::EmptyDir { .. }
            | Source::HostPath { .. }
            | Source::Claim { .. }
            | Source::Plugin { .. }
            | Source::Unsupported(_) => None,
        }
    }
}

/// Where a volume's content comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A folder of the pod's own.
    EmptyDir {
        /// `emptyDir.medium`.
        medium: Medium,
        /// `emptyDir.sizeLimit` in bytes.
        size_limit: Option<u64>,
    },
    /// A path of the node.
    HostPath {
        /// `hostPath.path`.
        path: String,
        /// `hostPath.type`.
        kind: String,
    },
    /// Files whose content comes from the API.
    Files(Files),
    /// A PersistentVolume, through a claim in the pod's namespace.
    Claim {
        /// `persistentVolumeClaim.claimName`; `None` for `ephemeral`, whose claim is named after pod and volume.
        name: Option<String>,
        /// `persistentVolumeClaim.readOnly`.
        read_only: bool,
    },
    /// A plugin, without a claim.
    Plugin {
        /// The field of the spec: `nfs`, `csi`…
        kind: String,
        /// The field's value as JSON.
        json: Vec<u8>,
    },
    /// An unsupported kind, by its name in the spec.
    Unsupported(String),
}

/// `emptyDir.medium`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Medium {
    /// The filesystem of the agent's root folder.
    Disk,
    /// A tmpfs.
    Memory,
    /// Huge pages, with the text after `HugePages`.
    HugePages(String),
    /// Another text, as written.
    Unknown(String),
}

impl Medium {
    /// Parses the text of a spec.
    pub fn parse(text: &str) -> Self {
        match text {
            "" => Self::Disk,
            "Memory" => Self::Memory,
            other => match other.strip_prefix("HugePages") {
                Some(rest) if rest.is_empty() || rest.starts_with('-') => Self::HugePages(rest.to_owned()),
                _ => Self::Unknown(other.to_owned()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_medium_is_read_as_the_spec_writes_it() {
        let cases = [
            ("", Medium::Disk),
            ("Memory", Medium::Memory),
            ("HugePages", Medium::HugePages(String::new())),
            ("HugePages-2Mi", Medium::HugePages("-2Mi".into())),
            ("HugePagesX", Medium::Unknown("HugePagesX".into())),
            ("memory", Medium::Unknown("memory".into())),
        ];
        for (text, medium) in cases {
            assert_eq!(Medium::parse(text), medium, "{text:?}");
        }
    }
}
