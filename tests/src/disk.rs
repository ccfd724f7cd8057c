//! A small filesystem that a test can fill.

use std::ffi::CString;
use std::path::PathBuf;

use anyhow::Context as _;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// A small filesystem, unmounted when dropped.
#[derive(Debug)]
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Creates the folder and mounts a tmpfs of this size in bytes.
    ///
    /// # Errors
    /// The folder cannot be created, or the tmpfs cannot be mounted.
    pub fn at(path: PathBuf, bytes: u64) -> anyhow::Result<Self> {
        std::fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        let options = CString::new(format!("size={bytes},mode=0755"))?;
        mount("keelson-test", &path, "tmpfs", MountFlags::empty(), options.as_c_str())
            .with_context(|| format!("cannot mount a tmpfs at {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Fails if the agent's clean-up has unmounted it already.
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}
