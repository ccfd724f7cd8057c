//! Where a filesystem puts what is made.

use std::path::Path;

use rustix::fs::{IFlags, Mode, OFlags, ioctl_getflags, ioctl_setflags, open};
use rustix::io::Errno;

/// Tells the filesystem that the folders in `dir`, one a pod, have nothing to do with each other (chattr(1), attribute
/// `T`), so that ext4 puts them into different block groups.
///
/// Otherwise all pods of a node share the group of `dir`. ext4 without a journal does not give out an inode again within
/// a minute of its deletion, and whoever makes a file passes over those of its group one by one: where pods come and go,
/// that was half of what the agent needed of the CPU to start one. This is a hint; a filesystem that does not take it is
/// left as it is.
pub fn spread_below(dir: &Path) {
    match add_flag(dir) {
        Ok(()) | Err(Errno::NOTTY | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {}
        Err(error) => tracing::debug!(dir = %dir.display(), %error, "cannot tell the filesystem to spread"),
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

/// Whether [`spread_below`] is in force; always true where the filesystem is not ext4. For tests.
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
    fn what_was_set_stays_and_a_second_time_changes_nothing() {
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
    fn what_takes_no_hint_is_left_alone() {
        spread_below(Path::new("/proc"));
        spread_below(Path::new("/nonexistent"));
        assert!(is_spread(Path::new("/proc")));
    }
}
