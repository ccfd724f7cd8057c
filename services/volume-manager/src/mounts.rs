//! Mount points, tmpfs, and the shared root folder.

use std::ffi::CString;
use std::io;
use std::path::{Path, PathBuf};

use keelson_mountinfo::{Mount, RootNeeds};
use keelson_volume_manager_core::hugepages;
use keelson_volume_manager_core::tmpfs;
use rustix::fd::{AsRawFd as _, OwnedFd};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxAttributes, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount_change};

/// `TMPFS_MAGIC` (statfs(2)).
const TMPFS_MAGIC: i128 = 0x0102_1994;
/// `HUGETLBFS_MAGIC` (statfs(2)).
const HUGETLBFS_MAGIC: i128 = 0x9584_58f6;
/// The number of mounts that may be stacked at one path.
const MAX_STACKED: usize = 8;

/// An error of a mount, an unmount, or a check of a mount.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MountError {
    /// mountinfo cannot be read.
    #[error("cannot read /proc/self/mountinfo")]
    ReadMounts(#[source] io::Error),
    /// stat(2) of the path has failed.
    #[error("cannot stat {}", path.display())]
    Stat { path: PathBuf, source: io::Error },
    /// mount(2) of a tmpfs.
    #[error("cannot mount a tmpfs on {} with the options {options:?}", path.display())]
    Tmpfs { path: PathBuf, options: String, source: io::Error },
    /// mount(2) of huge pages.
    #[error("cannot mount huge pages on {} with the options {options:?}; does the node have pages of that size?", path.display())]
    HugePages { path: PathBuf, options: String, source: io::Error },
    /// Huge pages of another size are already mounted.
    #[error("{} has huge pages of {found} bytes, not of {wanted}", path.display())]
    PageSize { path: PathBuf, found: u64, wanted: u64 },
    /// umount(2).
    #[error("cannot unmount {}{}", path.display(), below_text(below))]
    Unmount { path: PathBuf, below: Vec<PathBuf>, source: io::Error },
    /// The mount at the path was not made by this service.
    #[error("{} is a mount point, but not of a memory-backed volume; it is left mounted", path.display())]
    Foreign { path: PathBuf },
    /// The root folder cannot be bind-mounted on itself.
    #[error("cannot bind-mount {} on itself; mounts of containers will not propagate unless it is on a shared mount", path.display())]
    Bind { path: PathBuf, source: io::Error },
    /// The root folder's mount cannot be made shared.
    #[error("cannot make the mount {} shared; mounts of containers will not propagate", path.display())]
    Share { path: PathBuf, source: io::Error },
}

fn below_text(below: &[PathBuf]) -> String {
    if below.is_empty() {
        return String::new();
    }
    let names: Vec<String> = below.iter().map(|p| p.display().to_string()).collect();
    format!("; below it are mounted {}", names.join(", "))
}

/// Reads the mounts of this process.
pub(crate) fn read_mounts() -> Result<Vec<Mount>, MountError> {
    let bytes = std::fs::read("/proc/self/mountinfo").map_err(MountError::ReadMounts)?;
    Ok(keelson_mountinfo::parse(&bytes))
}

/// As [`read_mounts`], without those that no path leads to, because another mount is on a folder above them.
pub(crate) fn reachable_mounts() -> Result<Vec<Mount>, MountError> {
    let bytes = std::fs::read("/proc/self/mountinfo").map_err(MountError::ReadMounts)?;
    Ok(keelson_mountinfo::parse_reachable(&bytes))
}

/// Whether something is mounted on `path` itself. A missing path is not a mount point.
pub(crate) fn is_mount_point(path: &Path) -> Result<bool, MountError> {
    let stat_error = |errno: Errno| MountError::Stat { path: path.to_owned(), source: errno.into() };
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let here = match statx(CWD, path, flags, StatxFlags::TYPE) {
        Ok(here) => here,
        Err(Errno::NOENT) => return Ok(false),
        Err(errno) => return Err(stat_error(errno)),
    };
    if here.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) {
        return Ok(here.stx_attributes.contains(StatxAttributes::MOUNT_ROOT));
    }
    // On a kernel before 5.8, compare devices: the tmpfs that we mount has another device than its parent.
    let parent = path.parent().unwrap_or(path);
    let above = statx(CWD, parent, flags, StatxFlags::TYPE).map_err(stat_error)?;
    Ok((here.stx_dev_major, here.stx_dev_minor) != (above.stx_dev_major, above.stx_dev_minor))
}

/// Mounts a tmpfs of at most `size` bytes on `path`. Tries again without `noswap` if the kernel refuses it.
pub(crate) fn mount_tmpfs(path: &Path, size: u64, noswap: bool) -> Result<(), MountError> {
    let attempt = |noswap: bool| {
        let options = tmpfs::mount_options(size, noswap);
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

/// Mounts huge pages of `page_size` bytes on `path`, unless they are mounted already.
pub(crate) fn mount_huge_pages(path: &Path, page_size: u64) -> Result<(), MountError> {
    if is_mount_point(path)? {
        let stat = rustix::fs::statfs(path)
            .map_err(|errno| MountError::Stat { path: path.to_owned(), source: errno.into() })?;
        if i128::from(stat.f_type) != HUGETLBFS_MAGIC {
            return Err(MountError::Foreign { path: path.to_owned() });
        }
        let found = u64::try_from(stat.f_bsize).unwrap_or(0);
        let other = MountError::PageSize { path: path.to_owned(), found, wanted: page_size };
        return if found == page_size { Ok(()) } else { Err(other) };
    }
    let options = hugepages::mount_options(page_size);
    let data = CString::new(options.clone()).unwrap_or_default();
    rustix::mount::mount("nodev", path, "hugetlbfs", MountFlags::empty(), data.as_c_str())
        .map_err(|errno| MountError::HugePages { path: path.to_owned(), options, source: errno.into() })
}

/// Unmounts every tmpfs and hugetlbfs on `path` and refuses to unmount anything else. Returns whether there was one.
pub(crate) fn unmount_memory(path: &Path) -> Result<bool, MountError> {
    for round in 0..MAX_STACKED {
        if !is_mount_point(path)? {
            return Ok(round > 0);
        }
        let kind = rustix::fs::statfs(path)
            .map_err(|errno| MountError::Stat { path: path.to_owned(), source: errno.into() })?;
        if ![TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(&i128::from(kind.f_type)) {
            return Err(MountError::Foreign { path: path.to_owned() });
        }
        match rustix::mount::unmount(path, UnmountFlags::NOFOLLOW) {
            // INVAL: another process has unmounted it; the next round checks.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(errno) => return Err(busy(path, errno)),
        }
    }
    Err(busy(path, Errno::BUSY))
}

fn busy(path: &Path, errno: Errno) -> MountError {
    let mounts = read_mounts().unwrap_or_default();
    let below = keelson_mountinfo::below(&mounts, path).map(|m| m.point.clone()).collect();
    MountError::Unmount { path: path.to_owned(), below, source: errno.into() }
}

/// Makes sure that the root folder is on a shared mount (volumes.md §2).
pub(crate) fn share_root(root: &Path) -> Result<(), MountError> {
    let real = root.canonicalize().map_err(|source| MountError::Stat { path: root.to_owned(), source })?;
    let mounts = reachable_mounts()?;
    let needs = keelson_mountinfo::root_needs(&mounts, &real);
    if needs == RootNeeds::Nothing {
        return Ok(());
    }
    if needs == RootNeeds::BindAndSharing {
        let failed = |errno: Errno| MountError::Bind { path: real.clone(), source: errno.into() };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let covered = rustix::fs::open(&real, flags, Mode::empty()).map_err(failed)?;
        // Recursive, so that volumes that are already mounted stay visible.
        rustix::mount::mount_bind_recursive(&real, &real).map_err(failed)?;
        unmount_covered(&mounts, &real, &covered);
    }
    mount_change(&real, MountPropagationFlags::SHARED | MountPropagationFlags::REC)
        .map_err(|errno| MountError::Share { path: real.clone(), source: errno.into() })?;
    tracing::info!(root = %real.display(), "made the root folder a shared mount");
    Ok(())
}

/// Unmounts the mounts below the root folder that its bind mount on itself has covered with copies, in the folder as it was
/// before (`covered`). No path would lead to them any more, and they would hold each volume, and its folder, for ever. A
/// failure is only logged: the volumes can be used.
fn unmount_covered(mounts: &[Mount], root: &Path, covered: &OwnedFd) {
    let below: Vec<&Mount> = keelson_mountinfo::below(mounts, root).collect();
    // Of several mounts on one point only the last one can be made private, see below.
    if let Some(stacked) = below.iter().find(|m| below.iter().filter(|n| n.point == m.point).count() > 1) {
        let point = stacked.point.display();
        tracing::warn!(%point, "mounts are stacked; the folders of older volumes stay busy until the node is restarted");
        return;
    }
    let base = PathBuf::from(format!("/proc/self/fd/{}", covered.as_raw_fd()));
    let old =
        |mount: &Mount| mount.point.strip_prefix(root).map_or_else(|_| base.clone(), |path| base.join(path));
    // All of them before the first unmount, which would otherwise propagate to the copies.
    let private = below.iter().try_for_each(|m| mount_change(old(m), MountPropagationFlags::PRIVATE));
    let unmounted = private.and_then(|()| {
        let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
        below.iter().rev().try_for_each(|m| rustix::mount::unmount(old(m), flags))
    });
    if let Err(error) = unmounted {
        tracing::warn!(%error, "the folders of older volumes stay busy until the node is restarted");
    }
}
