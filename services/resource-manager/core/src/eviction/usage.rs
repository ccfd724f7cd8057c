//! The resource usage of a pod.

use std::collections::BTreeMap;

use crate::desire::PodDesire;

use super::signal::{FsKind, FsLayout, Resource};

/// Space on a filesystem.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Space {
    /// Bytes.
    pub bytes: u64,
    /// Files and directories.
    pub inodes: u64,
}

impl Space {
    /// The amount in terms of `resource`; 0 for memory and processes.
    pub const fn amount(self, resource: Resource) -> u64 {
        match resource {
            Resource::EphemeralStorage => self.bytes,
            Resource::Inodes => self.inodes,
            Resource::Memory | Resource::Pids => 0,
        }
    }
}

/// The usage of a container, as far as it was measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ContainerUsage {
    /// Bytes of its working set.
    pub memory: Option<u64>,
    /// Its writable layer.
    pub layer: Option<Space>,
    /// Its logs.
    pub logs: Option<Space>,
    /// Its termination logs.
    pub termination_log: Option<Space>,
}

impl ContainerUsage {
    /// Its writable layer and its own files, in bytes; unmeasured parts count as 0.
    pub fn local_storage(&self) -> u64 {
        let parts = [self.layer, self.logs, self.termination_log];
        parts.into_iter().flatten().fold(0, |sum, space| sum.saturating_add(space.bytes))
    }
}

/// The usage of a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VolumeUsage {
    /// `spec.volumes[].name`.
    pub name: String,
    /// The used space.
    pub space: Space,
    /// It is on the node's disk and counts as the pod's local storage.
    pub local: bool,
}

/// The usage of a pod, as far as it was measured.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodUsage {
    /// Bytes of the working set of all its processes.
    pub memory: Option<u64>,
    /// Its processes.
    pub processes: Option<u64>,
    /// Usage by container name.
    pub containers: BTreeMap<String, ContainerUsage>,
    /// The measured volumes.
    pub volumes: Vec<VolumeUsage>,
    /// The hosts file that its containers share.
    pub hosts_file: Option<Space>,
}

impl PodUsage {
    /// Logs, termination logs, the hosts file and local volumes.
    fn files(&self, resource: Resource) -> u64 {
        let own = self.containers.values().flat_map(|c| [c.logs, c.termination_log]).flatten();
        let volumes = self.volumes.iter().filter(|v| v.local).map(|v| v.space);
        let all = own.chain(self.hosts_file).chain(volumes);
        all.fold(0, |sum, space| sum.saturating_add(space.amount(resource)))
    }

    fn layers(&self, resource: Resource) -> u64 {
        let layers = self.containers.values().filter_map(|c| c.layer).map(|space| space.amount(resource));
        layers.fold(0, u64::saturating_add)
    }

    /// Writable layers, logs, termination logs, the hosts file and local volumes together, in bytes.
    pub fn local_storage(&self) -> u64 {
        let resource = Resource::EphemeralStorage;
        self.files(resource).saturating_add(self.layers(resource))
    }

    /// The same in bytes and inodes.
    pub fn local_space(&self) -> Space {
        let inodes = Resource::Inodes;
        Space { bytes: self.local_storage(), inodes: self.files(inodes).saturating_add(self.layers(inodes)) }
    }

    /// Its usage of a resource; for a filesystem only the part that is stored there. Unmeasured parts count as 0.
    pub fn of(&self, resource: Resource, filesystem: Option<FsKind>, layout: FsLayout) -> u64 {
        match (resource, filesystem, layout) {
            (Resource::Memory, ..) => self.memory.unwrap_or(0),
            (Resource::Pids, ..) => self.processes.unwrap_or(0),
            // Images belong to no pod: with only images on a filesystem, pods use nothing of it.
            (_, Some(FsKind::Imagefs), FsLayout::Split) => 0,
            (_, Some(FsKind::Nodefs), FsLayout::Separate) => self.files(resource),
            (_, Some(FsKind::Imagefs | FsKind::Containerfs), FsLayout::Separate) => self.layers(resource),
            (_, _, FsLayout::One | FsLayout::Split) | (_, None, FsLayout::Separate) => {
                self.files(resource).saturating_add(self.layers(resource))
            }
        }
    }
}

/// A pod that may be evicted, with its usage.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// Its desired state.
    pub desire: &'a PodDesire,
    /// Its measured usage.
    pub usage: &'a PodUsage,
}

impl Candidate<'_> {
    /// Its request of a resource; there are no requests of inodes and processes.
    pub fn request(&self, resource: Resource) -> u64 {
        let amount = self.desire.requests.get(resource.name()).copied().unwrap_or(0);
        u64::try_from(amount).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_usage_depends_on_the_filesystem_layout() {
        let space = |bytes| Some(Space { bytes, inodes: bytes / 10 });
        let file = |bytes| Some(Space { bytes, inodes: 1 });
        let container =
            ContainerUsage { memory: Some(5), layer: space(100), logs: space(10), termination_log: file(7) };
        let volume =
            |local, bytes| VolumeUsage { name: "v".into(), space: Space { bytes, inodes: 1 }, local };
        let usage = PodUsage {
            memory: Some(7),
            processes: Some(3),
            containers: [("a".to_owned(), container), ("b".to_owned(), ContainerUsage::default())].into(),
            volumes: vec![volume(true, 3), volume(false, 1000)],
            hosts_file: file(3),
        };
        assert_eq!(usage.local_storage(), 123);
        assert_eq!(usage.containers["a"].local_storage(), 117);
        let (disk, inodes) = (Resource::EphemeralStorage, Resource::Inodes);
        for (resource, place, layout, amount) in [
            (Resource::Memory, None, FsLayout::One, 7),
            (Resource::Pids, None, FsLayout::One, 3),
            (disk, Some(FsKind::Nodefs), FsLayout::One, 123),
            (disk, Some(FsKind::Imagefs), FsLayout::One, 123),
            (disk, Some(FsKind::Nodefs), FsLayout::Separate, 23),
            (disk, Some(FsKind::Imagefs), FsLayout::Separate, 100),
            (disk, Some(FsKind::Containerfs), FsLayout::Separate, 100),
            (disk, Some(FsKind::Nodefs), FsLayout::Split, 123),
            (disk, Some(FsKind::Containerfs), FsLayout::Split, 123),
            (disk, Some(FsKind::Imagefs), FsLayout::Split, 0),
            (inodes, Some(FsKind::Nodefs), FsLayout::Separate, 4),
        ] {
            assert_eq!(usage.of(resource, place, layout), amount, "{resource:?} {place:?} {layout:?}");
        }
        assert_eq!(PodUsage::default().of(Resource::Memory, None, FsLayout::One), 0);
    }
}
