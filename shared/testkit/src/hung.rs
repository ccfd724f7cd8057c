//! A file system that hangs, as an NFS mount does whose server is gone.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// A FUSE mount whose server never answers: every access below it blocks until the mount is gone. Dropping it ends the
/// blocked calls with an error and unmounts it.
#[derive(Debug)]
pub struct HungMount {
    path: PathBuf,
    /// Where the server would read requests; closing it aborts the connection.
    server: Option<File>,
}

impl HungMount {
    /// Mounts over an existing folder.
    ///
    /// # Errors
    /// No `/dev/fuse` (the kernel module `fuse` is missing: `modprobe fuse`), or not root.
    pub fn over(path: &Path) -> anyhow::Result<Self> {
        let server = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .context("cannot open /dev/fuse; `modprobe fuse` loads the module that makes it")?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other\0", server.as_raw_fd());
        let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes())?;
        mount("keelson-hung", path, "fuse", MountFlags::NOSUID | MountFlags::NODEV, options)
            .with_context(|| format!("cannot mount FUSE at {}", path.display()))?;
        Ok(Self { path: path.to_owned(), server: Some(server) })
    }
}

impl Drop for HungMount {
    fn drop(&mut self) {
        self.server = None;
        if let Err(error) = unmount(&self.path, UnmountFlags::DETACH) {
            eprintln!("{} stays mounted: {error}", self.path.display());
        }
    }
}
