//! The cgroup tree behind a port.

mod alarm;
#[cfg(test)]
pub(crate) mod fake;
mod kernel;
mod systemd;
mod tree;
mod usage;

use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use keelson_resource_manager_core::slices::Property;

pub(crate) use alarm::{KernelAlarm, UsageAlarm};
pub(crate) use kernel::KernelCgroups;
pub(crate) use systemd::Systemd;
pub(crate) use tree::{Driving, Found, Stock, Tree, TreeError};

/// The few things that are done to cgroups; every call blocks.
pub(crate) trait CgroupFs: Debug + Send + Sync {
    /// Makes one cgroup. False when it was there.
    fn make(&self, dir: &Path) -> io::Result<bool>;
    /// Removes one cgroup; missing is fine. Fails with `ResourceBusy` while it has children or processes.
    fn remove(&self, dir: &Path) -> io::Result<()>;
    /// The names of the cgroups in one; a missing one has none.
    fn children(&self, dir: &Path) -> io::Result<Vec<String>>;
    /// The text of a file of a cgroup.
    fn read(&self, dir: &Path, file: &str) -> io::Result<String>;
    /// Writes a file that the kernel has put there.
    fn write(&self, dir: &Path, file: &str, value: &str) -> io::Result<()>;
    /// When a cgroup, or a file of it, was changed last; for most that is when they were made.
    fn changed(&self, path: &Path) -> io::Result<SystemTime>;
    /// Notes on a cgroup who has made it.
    fn mark(&self, dir: &Path, owner: &str) -> io::Result<()>;
    /// Who has made a cgroup, where that is noted.
    fn owner(&self, dir: &Path) -> Option<String>;
    /// Kills every process of these cgroups and waits a little for their end. How many there were.
    fn kill(&self, dirs: &[PathBuf]) -> io::Result<usize>;
}

/// systemd did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SliceError {
    /// It has no unit of this name.
    #[error("systemd has no unit {unit}")]
    Missing { unit: String },
    /// It has answered with an error, or its job has ended without success.
    #[error("systemd cannot {act} {unit}: {why}")]
    Refused { act: &'static str, unit: String, why: String },
    /// It does not answer.
    #[error(
        "systemd is not reachable through {socket}: {why}; where cgroupDriver is systemd it must run as the first \
         process, and the system's message bus (dbus) beside it"
    )]
    Unreachable { why: String, socket: String },
}

/// What is asked of systemd, the owner of the tree with the systemd driver; every call blocks.
pub(crate) trait Slices: Debug + Send + Sync {
    /// Starts a slice with these properties. False when it was there: then it has the ones that it had.
    fn start(&self, slice: &str, properties: &[Property]) -> Result<bool, SliceError>;
    /// Sets properties of a unit until the next boot.
    fn set(&self, unit: &str, properties: &[Property]) -> Result<(), SliceError>;
    /// Ends a slice and what is left in it; missing is fine.
    fn stop(&self, slice: &str) -> Result<(), SliceError>;
}
