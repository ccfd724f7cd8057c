//! The cgroup tree behind a port.

#[cfg(test)]
pub(crate) mod fake;
mod kernel;
mod notifier;
mod systemd;
mod tree;
mod usage;

use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use keelson_resource_manager_core::slices::Property;

pub(crate) use kernel::KernelCgroups;
pub(crate) use notifier::{KernelNotifier, MemoryNotifier};
pub(crate) use systemd::Systemd;
pub(crate) use tree::{DriverConfig, FoundPods, PodCgroups, Tree, TreeError};

/// The operations on cgroups; every call blocks.
pub(crate) trait CgroupFs: Debug + Send + Sync {
    /// Creates one cgroup. False when it existed.
    fn create(&self, dir: &Path) -> io::Result<bool>;
    /// Removes one cgroup; a missing one is fine. Fails with `ResourceBusy` while it has children or processes.
    fn remove(&self, dir: &Path) -> io::Result<()>;
    /// The names of the child cgroups; a missing cgroup has none.
    fn children(&self, dir: &Path) -> io::Result<Vec<String>>;
    /// Reads a file of a cgroup.
    fn read(&self, dir: &Path, file: &str) -> io::Result<String>;
    /// Writes an existing file of a cgroup.
    fn write(&self, dir: &Path, file: &str, value: &str) -> io::Result<()>;
    /// When a cgroup or a file of it was last modified; for most that is when they were created.
    fn changed(&self, path: &Path) -> io::Result<SystemTime>;
    /// Marks a cgroup with its owner.
    fn mark(&self, dir: &Path, owner: &str) -> io::Result<()>;
    /// The owner mark of a cgroup, if there is one.
    fn owner(&self, dir: &Path) -> Option<String>;
    /// Kills every process of these cgroups and waits briefly for their end; returns how many there were.
    fn kill(&self, dirs: &[PathBuf]) -> io::Result<usize>;
}

/// An error of a systemd operation.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SliceError {
    /// systemd has no unit of this name.
    #[error("systemd has no unit {unit}")]
    Missing { unit: String },
    /// systemd has answered with an error, or its job has failed.
    #[error("systemd cannot {act} {unit}: {why}")]
    Refused { act: &'static str, unit: String, why: String },
    /// systemd does not answer.
    #[error(
        "systemd is not reachable through {socket}: {why}; cgroupDriver systemd needs systemd as the first process and the \
         system's message bus (dbus)"
    )]
    Unreachable { why: String, socket: String },
}

/// The operations of systemd, which owns the tree with the systemd driver; every call blocks.
pub(crate) trait Slices: Debug + Send + Sync {
    /// Starts a slice with these properties. False when it existed: then its properties are unchanged.
    fn start(&self, slice: &str, properties: &[Property]) -> Result<bool, SliceError>;
    /// Sets properties of a unit until the next boot.
    fn set(&self, unit: &str, properties: &[Property]) -> Result<(), SliceError>;
    /// Stops a slice and what is left in it; a missing one is fine.
    fn stop(&self, slice: &str) -> Result<(), SliceError>;
}
