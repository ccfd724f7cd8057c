//! Mount points, tmpfs, and the shared root folder.

use std::ffi::CString;
use std::io;
use std::path::{Path, PathBuf};

use keelson_volume_manager_core::hugepages;
use keelson_volume_manager_core::mountinfo::{self, Mount, RootNeeds};
use keelson_volume_manager_core::tmpfs;
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};

/// `TMPFS_MAGIC` (statfs(2)).
const TMPFS_MAGIC: i128 = 0x0102_1994;
/// `HUGETLBFS_MAGIC` (statfs(2)).
const HUGETLBFS_MAGIC: i128 = 0x9584_58f6;
/// Mounts that may lie on each other at one path.
const STACKED: usize = 8;

/// Why a mount could not be made, looked at or undone.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MountError {
    /// mountinfo cannot be read.
    #[error("cannot read /proc/self/mountinfo")]
    ReadMounts(#[source] io::Error),
    /// The path cannot be looked at.
    #[error("cannot look at {}", path.display())]
    Look { path: PathBuf, source: io::Error },
    /// mount(2) of a tmpfs.
    #[error("cannot mount a tmpfs on {} with the options {options:?}", path.display())]
    Tmpfs { path: PathBuf, options: String, source: io::Error },
    /// mount(2) of huge pages.
    #[error("cannot mount huge pages on {} with the options {options:?}; does the node have pages of that size?", path.display())]
    HugePages { path: PathBuf, options: String, source: io::Error },
    /// Huge pages of another size are there already.
    #[error("{} has huge pages of {found} bytes, not of {wanted}", path.display())]
    PageSize { path: PathBuf, found: u64, wanted: u64 },
    /// umount(2).
    #[error("cannot unmount {}{}", path.display(), below_text(below))]
    Unmount { path: PathBuf, below: Vec<PathBuf>, source: io::Error },
    /// Something is mounted that this service has not mounted.
    #[error("{} is a mount point of something that is no memory-backed volume; it is left alone", path.display())]
    Foreign { path: PathBuf },
    /// The root folder cannot be mounted on itself.
    #[error("cannot mount {} on itself; mounts of containers will not be seen by others unless it lies on a shared mount", path.display())]
    Bind { path: PathBuf, source: io::Error },
    /// The root folder's mount cannot be shared.
    #[error("cannot make the mount {} shared; mounts of containers will not be seen by others", path.display())]
    Share { path: PathBuf, source: io::Error },
}

fn below_text(below: &[PathBuf]) -> String {
    if below.is_empty() {
        return String::new();
    }
    let names: Vec<String> = below.iter().map(|p| p.display().to_string()).collect();
    format!("; below it are mounted {}", names.join(", "))
}

/// The mounts of this process.
pub(crate) fn read_mounts() -> Result<Vec<Mount>, MountError> {
    let bytes = std::fs::read("/proc/self/mountinfo").map_err(MountError::ReadMounts)?;
    Ok(mountinfo::parse(&String::from_utf8_lossy(&bytes)))
}

/// Whether something is mounted on `path` itself; a missing path is no mount point.
pub(crate) fn is_mount_point(path: &Path) -> Result<bool, MountError> {
    let look = |errno: Errno| MountError::Look { path: path.to_owned(), source: errno.into() };
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let here = match statx(CWD, path, flags, StatxFlags::TYPE) {
        Ok(here) => here,
        Err(Errno::NOENT) => return Ok(false),
        Err(errno) => return Err(look(errno)),
    };
    if here.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) {
        return Ok(here.stx_attributes.contains(StatxAttributes::MOUNT_ROOT));
    }
    // A kernel before 5.8: a tmpfs has another device than its parent, which is what we mount.
    let parent = path.parent().unwrap_or(path);
    let above = statx(CWD, parent, flags, StatxFlags::TYPE).map_err(look)?;
    Ok((here.stx_dev_major, here.stx_dev_minor) != (above.stx_dev_major, above.stx_dev_minor))
}

/// Mounts a tmpfs on `path` with at most `size` bytes; a kernel that refuses `noswap` gets one without.
pub(crate) fn mount_tmpfs(path: &Path, size: u64, noswap: bool) -> Result<(), MountError> {
    let attempt = |noswap: bool| {
        let options = tmpfs::options(size, noswap);
        let data = CString::new(options.clone()).unwrap_or_default();
        rustix::mount::mount("tmpfs", path, "tmpfs", MountFlags::empty(), data.as_c_str())
            .map_err(|errno| (errno, options))
    };
    let result = match attempt(noswap) {
        Err((Errno::INVAL, _)) if noswap => attempt(false),
        other => other,
    };
    result.map_err(|(errno, options)| MountError::Tmpfs {
        path: path.to_owned(),
        options,
        source: errno.into(),
    })
}

/// Mounts huge pages of `page_size` bytes on `path`, or finds them mounted.
pub(crate) fn mount_huge_pages(path: &Path, page_size: u64) -> Result<(), MountError> {
    if is_mount_point(path)? {
        let stat = rustix::fs::statfs(path)
            .map_err(|errno| MountError::Look { path: path.to_owned(), source: errno.into() })?;
        if i128::from(stat.f_type) != HUGETLBFS_MAGIC {
            return Err(MountError::Foreign { path: path.to_owned() });
        }
        let found = u64::try_from(stat.f_bsize).unwrap_or(0);
        let other = MountError::PageSize { path: path.to_owned(), found, wanted: page_size };
        return if found == page_size { Ok(()) } else { Err(other) };
    }
    let options = hugepages::options(page_size);
    let data = CString::new(options.clone()).unwrap_or_default();
    rustix::mount::mount("nodev", path, "hugetlbfs", MountFlags::empty(), data.as_c_str())
        .map_err(|errno| MountError::HugePages { path: path.to_owned(), options, source: errno.into() })
}

/// Unmounts every tmpfs and hugetlbfs that lies on `path`; refuses anything else. Whether there was any.
pub(crate) fn unmount_memory(path: &Path) -> Result<bool, MountError> {
    for round in 0..STACKED {
        if !is_mount_point(path)? {
            return Ok(round > 0);
        }
        let kind = rustix::fs::statfs(path)
            .map_err(|errno| MountError::Look { path: path.to_owned(), source: errno.into() })?;
        if ![TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(&i128::from(kind.f_type)) {
            return Err(MountError::Foreign { path: path.to_owned() });
        }
        match rustix::mount::unmount(path, UnmountFlags::NOFOLLOW) {
            // Somebody else was faster; the next round sees it.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(errno) => return Err(busy(path, errno)),
        }
    }
    Err(busy(path, Errno::BUSY))
}

fn busy(path: &Path, errno: Errno) -> MountError {
    let mounts = read_mounts().unwrap_or_default();
    let below = mountinfo::below(&mounts, path).map(|m| m.point.clone()).collect();
    MountError::Unmount { path: path.to_owned(), below, source: errno.into() }
}

/// Sees to it that the root folder lies on a shared mount (volumes.md §2).
pub(crate) fn share_root(root: &Path) -> Result<(), MountError> {
    let real = root.canonicalize().map_err(|source| MountError::Look { path: root.to_owned(), source })?;
    let needs = mountinfo::root_needs(&read_mounts()?, &real);
    if needs == RootNeeds::Nothing {
        return Ok(());
    }
    if needs == RootNeeds::BindAndSharing {
        // Recursive, so that volumes which are mounted already stay visible.
        rustix::mount::mount_bind_recursive(&real, &real)
            .map_err(|errno| MountError::Bind { path: real.clone(), source: errno.into() })?;
    }
    rustix::mount::mount_change(&real, MountPropagationFlags::SHARED | MountPropagationFlags::REC)
        .map_err(|errno| MountError::Share { path: real.clone(), source: errno.into() })?;
    tracing::info!(root = %real.display(), "the root folder is a shared mount now");
    Ok(())
}
