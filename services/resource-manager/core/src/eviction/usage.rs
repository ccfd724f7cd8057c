//! What a pod takes.

use std::collections::BTreeMap;

use crate::desire::PodDesire;

use super::signal::{Layout, Place, Resource};

/// Room on a filesystem.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Space {
    /// Bytes.
    pub bytes: u64,
    /// Files and folders.
    pub inodes: u64,
}

impl Space {
    /// The amount of a resource that it is; none of memory and of processes.
    pub const fn of(self, resource: Resource) -> u64 {
        match resource {
            Resource::EphemeralStorage => self.bytes,
            Resource::Inodes => self.inodes,
            Resource::Memory | Resource::Pids => 0,
        }
    }
}

/// What a container takes, as far as it was measured.
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
    /// Its writable layer and the files that are its own, in bytes; what was not measured takes nothing.
    pub fn local_storage(&self) -> u64 {
        let parts = [self.layer, self.logs, self.termination_log];
        parts.into_iter().flatten().fold(0, |sum, space| sum.saturating_add(space.bytes))
    }
}

/// What a volume takes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VolumeUsage {
    /// `spec.volumes[].name`.
    pub name: String,
    /// What is in it.
    pub space: Space,
    /// It lies on the node's disk and counts as the pod's local storage.
    pub local: bool,
}

/// What a pod takes, as far as it was measured.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodUsage {
    /// Bytes of the working set of all its processes.
    pub memory: Option<u64>,
    /// Its processes.
    pub processes: Option<u64>,
    /// By the names of its containers.
    pub containers: BTreeMap<String, ContainerUsage>,
    /// Those that were measured.
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
        all.fold(0, |sum, space| sum.saturating_add(space.of(resource)))
    }

    fn layers(&self, resource: Resource) -> u64 {
        let layers = self.containers.values().filter_map(|c| c.layer).map(|space| space.of(resource));
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

    /// What it takes of a resource, of a filesystem that part which lies there. What was not measured takes nothing.
    pub fn of(&self, resource: Resource, place: Option<Place>, layout: Layout) -> u64 {
        match (resource, place, layout) {
            (Resource::Memory, ..) => self.memory.unwrap_or(0),
            (Resource::Pids, ..) => self.processes.unwrap_or(0),
            // Images are nobody's: where nothing else lies, what pods take is none of it.
            (_, Some(Place::Images), Layout::Split) => 0,
            (_, Some(Place::Node), Layout::Separate) => self.files(resource),
            (_, Some(Place::Images | Place::Layers), Layout::Separate) => self.layers(resource),
            (_, _, Layout::One | Layout::Split) | (_, None, Layout::Separate) => {
                self.files(resource).saturating_add(self.layers(resource))
            }
        }
    }
}

/// A pod with what it takes.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// What is known of it.
    pub desire: &'a PodDesire,
    /// What it takes.
    pub usage: &'a PodUsage,
}

impl Candidate<'_> {
    /// What it asks for of a resource; nobody asks for inodes or processes.
    pub fn request(&self, resource: Resource) -> u64 {
        let amount = self.desire.requests.get(resource.name()).copied().unwrap_or(0);
        u64::try_from(amount).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_depends_on_where_layers_lie() {
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
            (Resource::Memory, None, Layout::One, 7),
            (Resource::Pids, None, Layout::One, 3),
            (disk, Some(Place::Node), Layout::One, 123),
            (disk, Some(Place::Images), Layout::One, 123),
            (disk, Some(Place::Node), Layout::Separate, 23),
            (disk, Some(Place::Images), Layout::Separate, 100),
            (disk, Some(Place::Layers), Layout::Separate, 100),
            (disk, Some(Place::Node), Layout::Split, 123),
            (disk, Some(Place::Layers), Layout::Split, 123),
            (disk, Some(Place::Images), Layout::Split, 0),
            (inodes, Some(Place::Node), Layout::Separate, 4),
        ] {
            assert_eq!(usage.of(resource, place, layout), amount, "{resource:?} {place:?} {layout:?}");
        }
        assert_eq!(PodUsage::default().of(Resource::Memory, None, Layout::One), 0);
    }
}
