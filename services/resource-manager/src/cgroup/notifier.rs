//! Kernel notifications when the memory usage of a cgroup crosses a threshold: eventfds of cgroup v1 (`cgroup.event_control`,
//! Documentation/admin-guide/cgroup-v1/memory.rst). v2 has no equivalent.

use std::fmt::Debug;
use std::fs;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

use rustix::event::{EventfdFlags, eventfd};

use super::tree::USAGE_V1;

/// Registers memory notifications.
pub(crate) trait MemoryNotifier: Debug + Send + Sync {
    /// Returns a descriptor that becomes readable when the memory usage of the cgroup in this directory rises above `bytes` or
    /// falls below it. Closing it ends the notification. Blocks.
    fn register(&self, dir: &Path, bytes: u64) -> io::Result<OwnedFd>;
}

/// The notifications of the kernel.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct KernelNotifier;

impl MemoryNotifier for KernelNotifier {
    fn register(&self, dir: &Path, bytes: u64) -> io::Result<OwnedFd> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let usage = fs::File::open(dir.join(USAGE_V1))?;
        let request = format!("{} {} {bytes}", event.as_raw_fd(), usage.as_raw_fd());
        // The kernel keeps a reference to the cgroup itself; the file may be closed.
        fs::OpenOptions::new()
            .write(true)
            .open(dir.join("cgroup.event_control"))?
            .write_all(request.as_bytes())?;
        Ok(event)
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    /// A cgroup in the v1 memory hierarchy that is removed with the test.
    struct Cgroup(PathBuf);

    impl Cgroup {
        /// None on a machine with memory on cgroup v2.
        fn create() -> Option<Self> {
            let mounts = keelson_mountinfo::parse(&fs::read("/proc/self/mountinfo").unwrap());
            let has_memory = |options: &str| options.split(',').any(|option| option == "memory");
            let mount = mounts.into_iter().find(|m| m.fs_type == "cgroup" && has_memory(&m.super_options))?;
            let name = format!("keelson-alarm-{}-{:08x}", std::process::id(), fastrand::u32(..));
            let dir = mount.point.join(name);
            fs::create_dir(&dir).unwrap();
            Some(Self(dir))
        }
    }

    impl Drop for Cgroup {
        fn drop(&mut self) {
            let _ = fs::remove_dir(&self.0);
        }
    }

    fn is_notified(event: &OwnedFd, within: Duration) -> bool {
        let timeout = Timespec::try_from(within).unwrap();
        poll(&mut [PollFd::new(event, PollFlags::IN)], Some(&timeout)).unwrap() > 0
    }

    #[test]
    fn the_kernel_notifies_when_memory_usage_crosses_the_threshold() {
        let Some(cgroup) = Cgroup::create() else { return };
        let low = KernelNotifier.register(&cgroup.0, 8 << 20).unwrap();
        let high = KernelNotifier.register(&cgroup.0, 1 << 40).unwrap();
        assert!(!is_notified(&low, Duration::ZERO));
        // It uses 32 MiB once it is in the cgroup, and exits.
        let script = "read go; exec dd if=/dev/zero of=/dev/null bs=32M count=1";
        let mut command = Command::new("sh");
        let mut child =
            command.args(["-c", script]).stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        fs::write(cgroup.0.join("cgroup.procs"), child.id().to_string()).unwrap();
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        assert!(is_notified(&low, Duration::from_secs(20)));
        let mut count = [0; 8];
        rustix::io::read(&low, &mut count).unwrap();
        assert!(u64::from_ne_bytes(count) >= 1);
        assert!(!is_notified(&high, Duration::ZERO), "nobody has used a TiB");
        // The root cgroup can be watched, too.
        assert!(!is_notified(
            &KernelNotifier.register(cgroup.0.parent().unwrap(), 1 << 60).unwrap(),
            Duration::ZERO
        ));
    }

    #[test]
    fn a_notification_for_a_missing_cgroup_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let error = KernelNotifier.register(dir.path(), 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
