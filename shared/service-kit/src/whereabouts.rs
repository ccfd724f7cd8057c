//! Where the process at the other end of a socket runs: on the node itself, or in a pod or another namespace (ADR 0004).
//!
//! A user id identifies a caller only if no other process can have it. Containers can: they run as any user that the pod or
//! their image names, often root. So a caller in a pod's cgroup, or in another pid or user namespace, is refused.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::net::UnixStream;

/// `SO_PEERPIDFD` (Linux 6.5).
const SO_PEERPIDFD: libc::c_int = 77;

/// Why a caller is not one of the node's own processes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Outside {
    /// It is in a pod's cgroup.
    #[error("its process {pid} runs in a pod, in the cgroup {cgroup}")]
    Pod {
        /// As this process sees it.
        pid: i32,
        /// The path, as in `/proc/<pid>/cgroup`.
        cgroup: String,
    },
    /// It is in another pid namespace.
    #[error("its process runs in another pid namespace")]
    PidNamespace,
    /// It is in another user namespace.
    #[error("its process {0} runs in another user namespace")]
    UserNamespace(i32),
    /// The process cannot be inspected.
    #[error(
        "its process {pid} cannot be looked at ({error}): it has ended, or /proc hides it; where /proc is mounted with hidepid, add \
         the option gid=<operator group>"
    )]
    Unseen {
        /// As this process sees it.
        pid: i32,
        /// The cause.
        error: String,
    },
}

/// What `/proc` reports of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Seen {
    /// The paths of its cgroups.
    cgroups: Vec<String>,
    /// Number of pid namespaces in which it has a pid, starting with that of `/proc`.
    pid_namespaces: usize,
    /// `uid_map` as it is.
    user_namespace: String,
    /// Its effective user.
    uid: Option<u32>,
}

impl Seen {
    fn of(pid: &str) -> io::Result<Self> {
        let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}"));
        Ok(Self::parse(&read("cgroup")?, &read("status")?, &read("uid_map")?))
    }

    /// Of the texts of `cgroup` (cgroups(7)), `status` (proc(5)) and `uid_map` (user_namespaces(7)).
    fn parse(cgroup: &str, status: &str, uid_map: &str) -> Self {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let path = |line: &str| line.splitn(3, ':').nth(2).map(ToOwned::to_owned);
        Self {
            cgroups: cgroup.lines().filter_map(path).collect(),
            // Kernels without pid namespaces do not report it.
            pid_namespaces: field("NSpid").map_or(1, |numbers| numbers.split_whitespace().count()),
            user_namespace: uid_map.split_whitespace().collect::<Vec<_>>().join(" "),
            uid: field("Uid").and_then(|ids| ids.split_whitespace().nth(1)?.parse().ok()),
        }
    }

    /// This process, which never changes its namespaces or cgroup.
    fn own() -> &'static Self {
        static OWN: OnceLock<Seen> = OnceLock::new();
        OWN.get_or_init(|| Self::of("self").unwrap_or_default())
    }

    /// Why this process does not run in the same place as `own`.
    fn outside_of(&self, own: &Self, pid: i32) -> Option<Outside> {
        // All processes of an agent that itself runs in a pod are below that pod's cgroup.
        let around = own.cgroups.iter().filter_map(|path| pod_cgroup(path)).max_by_key(|pod| pod.len());
        let is_in_pod = |path: &&String| {
            let below = around
                .and_then(|pod| path.strip_prefix(pod))
                .filter(|rest| rest.is_empty() || rest.starts_with('/'));
            pod_cgroup(below.unwrap_or(path)).is_some()
        };
        if let Some(cgroup) = self.cgroups.iter().find(is_in_pod) {
            return Some(Outside::Pod { pid, cgroup: cgroup.clone() });
        }
        if self.pid_namespaces != own.pid_namespaces {
            return Some(Outside::PidNamespace);
        }
        if self.user_namespace != own.user_namespace {
            return Some(Outside::UserNamespace(pid));
        }
        None
    }
}

/// The cgroups of QoS classes in `kubepods` (runtime-and-resources.md §8.1); guaranteed pods are directly in it.
const QOS_CGROUPS: [&str; 2] = ["burstable", "besteffort"];

/// The part of a cgroup's path down to a pod's own cgroup: what a kubelet, and this agent, make below `kubepods` or, with systemd,
/// `kubepods.slice`, whose name begins with the names of the slices above it (runtime-and-resources.md §8.1). `None` when the path is
/// not in a pod.
pub fn pod_cgroup(path: &str) -> Option<&str> {
    let mut end = 0;
    let mut below = false;
    for part in path.split('/') {
        end += part.len() + 1;
        let is_class = QOS_CGROUPS.iter().any(|class| {
            part == *class || slice_suffix(part).is_some_and(|suffix| suffix.strip_prefix('-') == Some(class))
        });
        if below && !is_class && !part.is_empty() {
            return path.get(..end - 1);
        }
        below |= part == "kubepods" || slice_suffix(part) == Some("");
    }
    None
}

/// What follows `kubepods` in the name of a slice, the slices above it left out; `None` for any other name.
fn slice_suffix(part: &str) -> Option<&str> {
    let name = part.strip_suffix(".slice")?;
    let (above, suffix) = name.rsplit_once("kubepods")?;
    (above.is_empty() || above.ends_with('-')).then_some(suffix)
}

/// Why the process that opened `stream`, with this pid and user, is not one of the node's own; `None` when it is one.
pub(crate) fn outside(stream: &UnixStream, pid: Option<i32>, uid: u32) -> Option<Outside> {
    // The kernel reports no pid for a process in a sibling or parent pid namespace.
    let pid = pid.filter(|pid| *pid > 0);
    let Some(pid) = pid else { return Some(Outside::PidNamespace) };
    let unseen = |error: &dyn std::fmt::Display| Some(Outside::Unseen { pid, error: error.to_string() });
    let (process, is_certain) = match peer_process(stream, pid) {
        Ok(process) => process,
        Err(error) => return unseen(&error),
    };
    let seen = match Seen::of(&pid.to_string()) {
        Ok(seen) => seen,
        Err(error) => return unseen(&error),
    };
    // The pid may be reused by now, unless the process behind the descriptor still runs.
    if has_ended(&process) {
        return unseen(&"it has ended");
    }
    if !is_certain && seen.uid.is_some_and(|now| now != uid) {
        return unseen(&"it has become another user");
    }
    seen.outside_of(Seen::own(), pid)
}

/// A pidfd of the peer's process, and whether it is certainly that process: before Linux 6.5 it is opened by pid, which may
/// be reused.
fn peer_process(stream: &UnixStream, pid: i32) -> io::Result<(OwnedFd, bool)> {
    let mut descriptor: libc::c_int = -1;
    let mut length = libc::socklen_t::try_from(size_of::<libc::c_int>()).expect("an int is small");
    // SAFETY: the kernel writes at most `length` bytes, which is the size of the descriptor.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut descriptor).cast(),
            &raw mut length,
        )
    };
    if result == 0 && descriptor >= 0 {
        // SAFETY: the kernel has just given this descriptor to this process, and nobody else has it.
        return Ok((unsafe { OwnedFd::from_raw_fd(descriptor) }, true));
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() != Some(libc::ENOPROTOOPT) {
        return Err(error);
    }
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    Ok((pidfd_open(pid, PidfdFlags::empty())?, false))
}

/// A process's descriptor becomes readable when it ends (pidfd_open(2)).
fn has_ended(process: &OwnedFd) -> bool {
    let mut events = [PollFd::new(process, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    !matches!(poll(&mut events, Some(&now)), Ok(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: &str = "         0          0 4294967295\n";

    fn status(numbers: &str) -> String {
        format!("Name:\tsh\nUid:\t64200\t64201\t64200\t64200\nNSpid:\t{numbers}\n")
    }

    #[test]
    fn pod_cgroups_are_recognised_for_both_drivers_and_cgroup_versions() {
        for (path, expected) in [
            ("/", None),
            ("/system.slice/keelson.service", None),
            ("/user.slice/user-1000.slice/session-1.scope", None),
            ("/kubepods", None),
            ("/kubepods/burstable", None),
            ("/kubepods/burstable/pod1/c1", Some("/kubepods/burstable/pod1")),
            ("/kubepods/pod1", Some("/kubepods/pod1")),
            ("/own/kubepods/besteffort/pod1/c1", Some("/own/kubepods/besteffort/pod1")),
            ("/../../kubepods/burstable/pod1/c1", Some("/../../kubepods/burstable/pod1")),
            (
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-c1.scope",
                Some("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice"),
            ),
            ("/kubepods.slice/kubepods-pod1.slice", Some("/kubepods.slice/kubepods-pod1.slice")),
            ("/my-kubepods/pod1", None),
            ("/mykubepods.slice/mykubepods-pod1.slice", None),
            (
                "/my.slice/my-kubepods.slice/my-kubepods-besteffort.slice/my-kubepods-besteffort-pod1.slice/c1.scope",
                Some(
                    "/my.slice/my-kubepods.slice/my-kubepods-besteffort.slice/my-kubepods-besteffort-pod1.slice",
                ),
            ),
            (
                "/my.slice/my-kubepods.slice/my-kubepods-pod1.slice",
                Some("/my.slice/my-kubepods.slice/my-kubepods-pod1.slice"),
            ),
        ] {
            assert_eq!(pod_cgroup(path), expected, "{path}");
        }
    }

    #[test]
    fn only_processes_in_the_nodes_own_namespaces_and_cgroups_are_accepted() {
        let own = Seen::parse("0::/system.slice/keelson.service\n", &status("10"), ALL);
        let nested = Seen::parse("0::/kubepods/pod1/agent\n", &status("10"), ALL);
        let in_pod = |cgroup: &str| Some(Outside::Pod { pid: 7, cgroup: cgroup.to_owned() });
        for (own, cgroup, numbers, uid_map, expected) in [
            (&own, "0::/user.slice\n", "7", ALL, None),
            (&own, "0::/user.slice\n", "7 1", ALL, Some(Outside::PidNamespace)),
            (&own, "0::/user.slice\n", "7", "0 100000 65536\n", Some(Outside::UserNamespace(7))),
            (&own, "0::/kubepods/pod1/c1\n", "7", ALL, in_pod("/kubepods/pod1/c1")),
            // On cgroup v1 each hierarchy is checked: a container may be missing in some.
            (
                &own,
                "2:cpu:/\n1:memory:/kubepods/besteffort/pod1/c1\n",
                "7",
                ALL,
                in_pod("/kubepods/besteffort/pod1/c1"),
            ),
            // An agent in a pod: a process in the same pod, one in a pod that it runs, and one in another pod of the outer
            // node.
            (&nested, "0::/kubepods/pod1/other\n", "7", ALL, None),
            (
                &nested,
                "0::/kubepods/pod1/agent/kubepods/pod2/c\n",
                "7",
                ALL,
                in_pod("/kubepods/pod1/agent/kubepods/pod2/c"),
            ),
            (&nested, "0::/kubepods/pod3/c\n", "7", ALL, in_pod("/kubepods/pod3/c")),
            (&nested, "0::/kubepods/pod10/c\n", "7", ALL, in_pod("/kubepods/pod10/c")),
        ] {
            let seen = Seen::parse(cgroup, &status(numbers), uid_map);
            assert_eq!(seen.outside_of(own, 7), expected, "{cgroup} {numbers} {uid_map}");
            assert_eq!(seen.uid, Some(64201));
        }
    }

    #[tokio::test]
    async fn a_peer_is_identified_and_refused_once_it_has_exited() {
        let (own, _other) = UnixStream::pair().unwrap();
        let (pid, uid) = (std::process::id().cast_signed(), rustix::process::geteuid().as_raw());
        assert_eq!(outside(&own, Some(pid), uid), None);
        assert_eq!(outside(&own, Some(0), uid), Some(Outside::PidNamespace));
        assert_eq!(outside(&own, None, uid), Some(Outside::PidNamespace));

        let mut child = std::process::Command::new("true").spawn().unwrap();
        let gone = child.id().cast_signed();
        child.wait().unwrap();
        let ended = outside(&own, Some(gone), uid);
        assert!(matches!(&ended, Some(Outside::Unseen { error, .. }) if !error.is_empty()), "{ended:?}");
    }
}
