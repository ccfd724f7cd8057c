//! Has the kernel tell when a cgroup's usage of memory crosses a line: eventfds of cgroup v1 (`cgroup.event_control`,
//! Documentation/admin-guide/cgroup-v1/memory.rst). v2 has nothing like it.

use std::fmt::Debug;
use std::fs;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

use rustix::event::{EventfdFlags, eventfd};

use super::tree::USAGE_V1;

/// The port.
pub(crate) trait UsageAlarm: Debug + Send + Sync {
    /// A descriptor that becomes readable when the memory used by the cgroup in this folder goes above `bytes`, or below
    /// again; closed it is forgotten. Blocks.
    fn set(&self, dir: &Path, bytes: u64) -> io::Result<OwnedFd>;
}

/// The kernel's.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct KernelAlarm;

impl UsageAlarm for KernelAlarm {
    fn set(&self, dir: &Path, bytes: u64) -> io::Result<OwnedFd> {
        let alarm = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let usage = fs::File::open(dir.join(USAGE_V1))?;
        let request = format!("{} {} {bytes}", alarm.as_raw_fd(), usage.as_raw_fd());
        // The kernel holds on to the cgroup itself; the file may be closed.
        fs::OpenOptions::new()
            .write(true)
            .open(dir.join("cgroup.event_control"))?
            .write_all(request.as_bytes())?;
        Ok(alarm)
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    /// A cgroup of the v1 hierarchy of memory that goes with the test.
    struct Cgroup(PathBuf);

    impl Cgroup {
        /// None on a machine that governs memory by cgroup v2.
        fn make() -> Option<Self> {
            let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
            let found = mounts.lines().find(|line| {
                let options = line.split_once(" - cgroup ").map(|(_, rest)| rest);
                options.is_some_and(|options| options.split([' ', ',']).any(|option| option == "memory"))
            });
            let mount = found?.split(' ').nth(4).unwrap();
            let name = format!("keelson-alarm-{}-{:08x}", std::process::id(), fastrand::u32(..));
            let dir = Path::new(mount).join(name);
            fs::create_dir(&dir).unwrap();
            Some(Self(dir))
        }
    }

    impl Drop for Cgroup {
        fn drop(&mut self) {
            let _ = fs::remove_dir(&self.0);
        }
    }

    fn rings(alarm: &OwnedFd, within: Duration) -> bool {
        let timeout = Timespec::try_from(within).unwrap();
        poll(&mut [PollFd::new(alarm, PollFlags::IN)], Some(&timeout)).unwrap() > 0
    }

    #[test]
    fn the_kernel_tells_when_more_is_used() {
        let Some(cgroup) = Cgroup::make() else { return };
        let alarm = KernelAlarm.set(&cgroup.0, 8 << 20).unwrap();
        let high = KernelAlarm.set(&cgroup.0, 1 << 40).unwrap();
        assert!(!rings(&alarm, Duration::ZERO));
        // It takes 32 MiB once it is in the cgroup, and ends.
        let script = "read go; exec dd if=/dev/zero of=/dev/null bs=32M count=1";
        let mut command = Command::new("sh");
        let mut child =
            command.args(["-c", script]).stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        fs::write(cgroup.0.join("cgroup.procs"), child.id().to_string()).unwrap();
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        assert!(rings(&alarm, Duration::from_secs(20)));
        let mut count = [0; 8];
        rustix::io::read(&alarm, &mut count).unwrap();
        assert!(u64::from_ne_bytes(count) >= 1);
        assert!(!rings(&high, Duration::ZERO), "nobody has used a TiB");
        // The top of the tree can be watched, too.
        assert!(!rings(&KernelAlarm.set(cgroup.0.parent().unwrap(), 1 << 60).unwrap(), Duration::ZERO));
    }

    #[test]
    fn a_cgroup_that_is_not_there_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let error = KernelAlarm.set(dir.path(), 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
