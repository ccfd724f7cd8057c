//! A hint to the filesystem where to place the folders of pods.

use std::path::Path;

use rustix::fs::{IFlags, Mode, OFlags, ioctl_getflags, ioctl_setflags, open};
use rustix::io::Errno;

/// Marks the folders in `dir`, one per pod, as unrelated (chattr(1), attribute `T`), so that ext4 places them in different
/// block groups.
///
/// Otherwise all pods of a node share the block group of `dir`. ext4 without a journal does not reuse an inode within a
/// minute of its deletion, and each new file scans past such inodes of its group one by one: with many short-lived pods
/// this was half of the CPU time of a pod start. This is a hint; a filesystem that does not support it is left unchanged.
pub fn spread_below(dir: &Path) {
    match add_flag(dir) {
        Ok(()) | Err(Errno::NOTTY | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {}
        Err(error) => {
            tracing::debug!(dir = %dir.display(), %error, "cannot set the filesystem's placement hint; pod folders share a block group")
        }
    }
}

fn add_flag(dir: &Path) -> rustix::io::Result<()> {
    let folder = open(dir, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let flags = ioctl_getflags(&folder)?;
    if flags.contains(IFlags::TOPDIR) {
        return Ok(());
    }
    ioctl_setflags(&folder, flags | IFlags::TOPDIR)
}

/// Whether the hint of [`spread_below`] is set; always true on filesystems other than ext4. For tests.
#[doc(hidden)]
pub fn is_spread(dir: &Path) -> bool {
    /// `EXT4_SUPER_MAGIC` (statfs(2)).
    const EXT4: rustix::fs::FsWord = 0xEF53;
    let on_ext4 = rustix::fs::statfs(dir).is_ok_and(|fs| fs.f_type == EXT4);
    let flags = open(dir, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).and_then(ioctl_getflags);
    !on_ext4 || flags.is_ok_and(|flags| flags.contains(IFlags::TOPDIR))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placement_hint_keeps_other_flags_and_is_idempotent() {
        let dir = tempfile::tempdir().unwrap();
        let flags = || ioctl_getflags(open(dir.path(), OFlags::RDONLY, Mode::empty()).unwrap());
        let before = flags();
        spread_below(dir.path());
        assert!(is_spread(dir.path()));
        let after = flags();
        assert_eq!(after.map(|f| f - IFlags::TOPDIR), before);
        spread_below(dir.path());
        assert_eq!(flags(), after);
    }

    #[test]
    fn filesystem_without_placement_hints_is_left_unchanged() {
        spread_below(Path::new("/proc"));
        spread_below(Path::new("/nonexistent"));
        assert!(is_spread(Path::new("/proc")));
    }
}
