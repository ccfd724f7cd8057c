//! A disk that is full soon.

use std::ffi::CString;
use std::path::PathBuf;

use anyhow::Context as _;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// A small filesystem, unmounted when dropped.
#[derive(Debug)]
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Makes the folder and mounts so many bytes of memory over it.
    ///
    /// # Errors
    /// The folder cannot be made, or nothing can be mounted.
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
        // The agent has unmounted it when it has removed the folder around it.
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}
