//! The cgroup tree of the kernel.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::CgroupFs;

/// How long a killed process may take to leave its cgroup before the next round.
const END_WITHIN: Duration = Duration::from_millis(200);
/// The extended attributes that mark the owner of a cgroup (xattr(7)): the first one where this process may set it.
const MARKS: [&str; 2] = ["trusted.keelson.agent", "user.keelson.agent"];
/// The maximum length of a mark, which is a path (PATH_MAX).
const MARK_BYTES: usize = 4096;

/// The cgroup tree of the kernel.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct KernelCgroups;

impl CgroupFs for KernelCgroups {
    fn create(&self, dir: &Path) -> io::Result<bool> {
        match fs::create_dir(dir) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn remove(&self, dir: &Path) -> io::Result<()> {
        match fs::remove_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                Err(io::ErrorKind::ResourceBusy.into())
            }
            other => other,
        }
    }

    fn children(&self, dir: &Path) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                names.extend(entry.file_name().into_string().ok());
            }
        }
        Ok(names)
    }

    fn read(&self, dir: &Path, file: &str) -> io::Result<String> {
        fs::read_to_string(dir.join(file))
    }

    fn write(&self, dir: &Path, file: &str, value: &str) -> io::Result<()> {
        // One write: the kernel parses each write as a whole.
        fs::OpenOptions::new().write(true).open(dir.join(file))?.write_all(value.as_bytes())
    }

    fn mark(&self, dir: &Path, owner: &str) -> io::Result<()> {
        let set = |name| rustix::fs::setxattr(dir, name, owner.as_bytes(), XattrFlags::empty());
        match set(MARKS[0]) {
            Err(Errno::PERM | Errno::NOTSUP) => Ok(set(MARKS[1])?),
            other => Ok(other?),
        }
    }

    fn owner(&self, dir: &Path) -> Option<String> {
        let mut value = [0; MARK_BYTES];
        let length = MARKS.iter().find_map(|name| rustix::fs::getxattr(dir, *name, &mut value[..]).ok())?;
        String::from_utf8(value.get(..length)?.to_vec()).ok()
    }

    fn changed(&self, path: &Path) -> io::Result<SystemTime> {
        fs::metadata(path)?.modified()
    }

    fn kill(&self, dirs: &[PathBuf]) -> io::Result<usize> {
        let listed = self.processes(dirs)?;
        let mut opened = Vec::new();
        for pid in &listed {
            match pidfd_open(*pid, PidfdFlags::empty()) {
                Ok(fd) => opened.push((*pid, fd)),
                Err(Errno::SRCH) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        // A pid that is still listed belongs to the process of the pidfd.
        let still = self.processes(dirs)?;
        opened.retain(|(pid, _)| still.contains(pid));
        for (_, fd) in &opened {
            match pidfd_send_signal(fd, Signal::KILL) {
                Ok(()) | Err(Errno::SRCH) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        await_end(opened.into_iter().map(|(_, fd)| fd).collect())?;
        Ok(listed.len())
    }
}

impl KernelCgroups {
    fn processes(&self, dirs: &[PathBuf]) -> io::Result<HashSet<Pid>> {
        let own = rustix::process::getpid();
        let mut pids = HashSet::new();
        for dir in dirs {
            let text = match self.read(dir, "cgroup.procs") {
                Ok(text) => text,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            for line in text.lines() {
                let pid = line.parse().ok().and_then(Pid::from_raw).ok_or_else(|| {
                    io::Error::other(format!(
                        "{} has processes of another pid namespace; run this service in the host's",
                        dir.display()
                    ))
                })?;
                if pid == own {
                    let text = format!("resource-manager itself is in the pod's cgroup {}", dir.display());
                    return Err(io::Error::other(text));
                }
                pids.insert(pid);
            }
        }
        Ok(pids)
    }
}

/// Waits until each of the processes has ended, at most [`END_WITHIN`].
fn await_end(mut fds: Vec<OwnedFd>) -> io::Result<()> {
    let deadline = Instant::now() + END_WITHIN;
    while !fds.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let ended: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut ended = ended.into_iter();
        fds.retain(|_| !ended.next().unwrap_or(false));
    }
    Ok(())
}
