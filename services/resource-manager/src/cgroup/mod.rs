//! The cgroup tree behind a port.

#[cfg(test)]
mod fake;
mod kernel;
mod tree;
mod usage;

use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};

pub(crate) use kernel::KernelCgroups;
pub(crate) use tree::{Tree, TreeError};

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
    /// Kills every process of these cgroups and waits a little for their end. How many there were.
    fn kill(&self, dirs: &[PathBuf]) -> io::Result<usize>;
}
