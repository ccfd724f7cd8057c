//! A filesystem of the run's own, fresh and with a journal.
//!
//! ext4 without a journal does not give out an inode again within a minute of its deletion, and whoever makes a file
//! passes over those of its block group one by one: what earlier rounds, or whatever ran on the machine before, have
//! removed costs time then.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

/// Sparse: only what is written takes room.
const BYTES: u64 = 16 << 30;

/// Makes the filesystem in `folder`, mounts it there and returns where. Whoever removes the folder unmounts it.
///
/// # Errors
/// There is no mkfs.ext4 (Debian: e2fsprogs), or no free loop device.
pub fn mount_fresh(folder: &Path) -> anyhow::Result<PathBuf> {
    let (image, target) = (folder.join("disk.img"), folder.join("d"));
    File::create(&image)
        .and_then(|file| file.set_len(BYTES))
        .and_then(|()| fs::create_dir(&target))
        .with_context(|| format!("cannot make {}", image.display()))?;
    // Tables are written now, so that no kernel thread does it while something is measured.
    let now = "lazy_itable_init=0,lazy_journal_init=0";
    run(Command::new("mkfs.ext4").args(["-q", "-F", "-E", now]).arg(&image))?;
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
    fn it_is_there_with_a_journal_and_gone_with_its_folder() {
        let scratch = Scratch::new().unwrap();
        let target = mount_fresh(scratch.path()).unwrap();
        fs::write(target.join("file"), "there").unwrap();
        let line = format!(" {} ext4 ", target.display());
        let mounted = mounts();
        let device = mounted.lines().find(|text| text.contains(&line)).unwrap().split(' ').next().unwrap();
        let journal = Path::new("/proc/fs/jbd2").join(format!("{}-8", device.trim_start_matches("/dev/")));
        assert!(journal.is_dir(), "{} is not there", journal.display());
        let path = scratch.path().to_owned();
        drop(scratch);
        assert!(!path.exists() && !mounts().contains(&line));
        assert!(!journal.is_dir(), "the loop device is still in use");
    }
}
