//! A fresh ext4 filesystem with a journal for one run.
//!
//! ext4 without a journal does not reuse an inode within a minute of its deletion. Creating a file then skips the recently
//! deleted inodes of the block group one by one, so files that earlier rounds or other programs have removed cost time.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

/// The size of the image. The file is sparse, so it uses only the space that is written.
const BYTES: u64 = 16 << 30;

/// Creates the filesystem in `folder`, mounts it there and returns the mount point. The caller unmounts it when it removes the
/// folder.
///
/// # Errors
/// mkfs.ext4 is not installed (Debian: e2fsprogs), or there is no free loop device.
pub fn mount_fresh(folder: &Path) -> anyhow::Result<PathBuf> {
    let (image, target) = (folder.join("disk.img"), folder.join("d"));
    File::create(&image)
        .and_then(|file| file.set_len(BYTES))
        .and_then(|()| fs::create_dir(&target))
        .with_context(|| format!("cannot create {}", image.display()))?;
    // Writes all tables now. By default, a kernel thread would do that during the measurement.
    let not_lazy = "lazy_itable_init=0,lazy_journal_init=0";
    run(Command::new("mkfs.ext4").args(["-q", "-F", "-E", not_lazy]).arg(&image))?;
    run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&target))?;
    Ok(target)
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot run {name}"))?;
    ensure!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Scratch;

    use super::*;

    fn mounts() -> String {
        fs::read_to_string("/proc/mounts").unwrap()
    }

    #[test]
    fn the_filesystem_has_a_journal_and_is_unmounted_with_its_folder() {
        let scratch = Scratch::new().unwrap();
        let target = mount_fresh(scratch.path()).unwrap();
        fs::write(target.join("file"), "there").unwrap();
        let line = format!(" {} ext4 ", target.display());
        let mounted = mounts();
        let device = mounted.lines().find(|text| text.contains(&line)).unwrap().split(' ').next().unwrap();
        let journal = Path::new("/proc/fs/jbd2").join(format!("{}-8", device.trim_start_matches("/dev/")));
        assert!(journal.is_dir(), "{} does not exist", journal.display());
        let path = scratch.path().to_owned();
        drop(scratch);
        assert!(!path.exists() && !mounts().contains(&line));
        assert!(!journal.is_dir(), "the loop device is still in use");
    }
}
