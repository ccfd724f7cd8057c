//! The eviction signals (runtime-and-resources.md §12.1).

use std::collections::BTreeMap;

use keelson_kube_model::Quantity;
use keelson_kube_model::quantity::QuantityFormat;

/// An eviction signal. The order is that in which signals are acted on: memory comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Signal {
    /// Node memory less its working set.
    MemoryAvailable,
    /// Memory left below the limit of all pods together.
    AllocatableMemoryAvailable,
    /// Bytes left on the filesystem of the root directory.
    NodefsAvailable,
    /// Inodes left there.
    NodefsInodesFree,
    /// Bytes left on the filesystem of images.
    ImagefsAvailable,
    /// Inodes left there.
    ImagefsInodesFree,
    /// Bytes left on the filesystem of writable layers.
    ContainerfsAvailable,
    /// Inodes left there.
    ContainerfsInodesFree,
    /// Process ids left.
    PidAvailable,
}

/// The resource that the node is short of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resource {
    /// Bytes of memory.
    Memory,
    /// Bytes of a filesystem.
    EphemeralStorage,
    /// Inodes of a filesystem.
    Inodes,
    /// Processes and threads.
    Pids,
}

/// A pressure condition of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Condition {
    /// `MemoryPressure`.
    Memory,
    /// `DiskPressure`.
    Disk,
    /// `PIDPressure`.
    Pid,
}

/// The filesystem that a signal is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FsKind {
    /// That of the root directory.
    Nodefs,
    /// That of images.
    Imagefs,
    /// That of writable layers.
    Containerfs,
}

impl Signal {
    /// Every signal.
    pub const ALL: [Self; 9] = [
        Self::MemoryAvailable,
        Self::AllocatableMemoryAvailable,
        Self::NodefsAvailable,
        Self::NodefsInodesFree,
        Self::ImagefsAvailable,
        Self::ImagefsInodesFree,
        Self::ContainerfsAvailable,
        Self::ContainerfsInodesFree,
        Self::PidAvailable,
    ];

    /// Its name in the configuration and in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MemoryAvailable => "memory.available",
            Self::AllocatableMemoryAvailable => "allocatableMemory.available",
            Self::NodefsAvailable => "nodefs.available",
            Self::NodefsInodesFree => "nodefs.inodesFree",
            Self::ImagefsAvailable => "imagefs.available",
            Self::ImagefsInodesFree => "imagefs.inodesFree",
            Self::ContainerfsAvailable => "containerfs.available",
            Self::ContainerfsInodesFree => "containerfs.inodesFree",
            Self::PidAvailable => "pid.available",
        }
    }

    /// Parses the name of a signal.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|signal| signal.name() == name)
    }

    /// The resource that is short when it is met.
    pub const fn resource(self) -> Resource {
        match self {
            Self::MemoryAvailable | Self::AllocatableMemoryAvailable => Resource::Memory,
            Self::NodefsAvailable | Self::ImagefsAvailable | Self::ContainerfsAvailable => {
                Resource::EphemeralStorage
            }
            Self::NodefsInodesFree | Self::ImagefsInodesFree | Self::ContainerfsInodesFree => {
                Resource::Inodes
            }
            Self::PidAvailable => Resource::Pids,
        }
    }

    /// The condition that the node has while it is met.
    pub const fn condition(self) -> Condition {
        match self.resource() {
            Resource::Memory => Condition::Memory,
            Resource::EphemeralStorage | Resource::Inodes => Condition::Disk,
            Resource::Pids => Condition::Pid,
        }
    }

    /// The filesystem that it is about, if any.
    pub const fn filesystem(self) -> Option<FsKind> {
        match self {
            Self::NodefsAvailable | Self::NodefsInodesFree => Some(FsKind::Nodefs),
            Self::ImagefsAvailable | Self::ImagefsInodesFree => Some(FsKind::Imagefs),
            Self::ContainerfsAvailable | Self::ContainerfsInodesFree => Some(FsKind::Containerfs),
            Self::MemoryAvailable | Self::AllocatableMemoryAvailable | Self::PidAvailable => None,
        }
    }
}

impl Resource {
    /// Its name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::EphemeralStorage => "ephemeral-storage",
            Self::Inodes => "inodes",
            Self::Pids => "pids",
        }
    }

    /// An amount of it as the kubelet prints it.
    pub fn quantity(self, amount: u64) -> Quantity {
        match self {
            Self::Memory | Self::EphemeralStorage => Quantity::from_bytes(amount),
            Self::Inodes | Self::Pids => {
                let count = i64::try_from(amount).unwrap_or(i64::MAX);
                Quantity::from_units(count, QuantityFormat::DecimalSi)
            }
        }
    }
}

impl Condition {
    /// Every condition, in the order of the node status.
    pub const ALL: [Self; 3] = [Self::Memory, Self::Disk, Self::Pid];

    /// Its condition type.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "MemoryPressure",
            Self::Disk => "DiskPressure",
            Self::Pid => "PIDPressure",
        }
    }

    /// Parses a condition type.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|condition| condition.name() == name)
    }
}

/// One measurement of a signal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Observation {
    /// The total; percentages refer to it.
    pub capacity: u64,
    /// What is still available.
    pub available: u64,
    /// When it was measured; increases with each new measurement.
    pub taken: i64,
}

/// The last measurement of each observed signal.
pub type Observations = BTreeMap<Signal, Observation>;

/// Where images and writable layers are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FsLayout {
    /// Everything on the filesystem of the root directory.
    #[default]
    One,
    /// Images and layers together on a separate filesystem.
    Separate,
    /// Images on a separate filesystem, layers on that of the root directory.
    Split,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eviction_signals_round_trip_by_name_and_have_a_condition() {
        for signal in Signal::ALL {
            assert_eq!(Signal::parse(signal.name()), Some(signal));
            let disk = signal.filesystem().is_some();
            assert_eq!(signal.condition() == Condition::Disk, disk, "{signal:?}");
        }
        assert_eq!(Signal::parse("memory.free"), None);
        assert_eq!(Signal::AllocatableMemoryAvailable.condition(), Condition::Memory);
        assert_eq!(Signal::PidAvailable.condition().name(), "PIDPressure");
        for condition in Condition::ALL {
            assert_eq!(Condition::parse(condition.name()), Some(condition));
        }
    }

    #[test]
    fn bytes_are_printed_in_powers_of_two_and_counts_in_powers_of_ten() {
        for (resource, amount, text) in [
            (Resource::Memory, 100 << 20, "100Mi"),
            (Resource::EphemeralStorage, 1025, "1025"),
            (Resource::Inodes, 2000, "2k"),
            (Resource::Pids, 12, "12"),
        ] {
            assert_eq!(resource.quantity(amount).to_string(), text, "{resource:?}");
        }
    }
}
