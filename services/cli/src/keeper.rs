//! Who keeps a service running where init does not: a unit of systemd, or a container of Docker's.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use keelson_config::ServiceName;
use tokio::net::UnixStream;

use crate::error::Failure;

/// The digits of a container's id that its own command line shows.
const SHORT_ID: usize = 12;

/// Whoever starts a service again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Keeper {
    /// The unit of this name.
    Systemd(String),
    /// The container with this id.
    Docker(String),
}

impl Keeper {
    /// The keeper of whoever listens at `socket`: of its process, as the kernel names it (unix(7)), by the cgroup that
    /// this one is in. `None` where nobody listens, or somebody who is not this service's own binary.
    pub(crate) async fn of(service: ServiceName, socket: &Path) -> Option<Self> {
        let stream = UnixStream::connect(socket).await.ok()?;
        let process = Path::new("/proc").join(stream.peer_cred().ok()?.pid()?.to_string());
        let exe = fs::read_link(process.join("exe")).ok()?;
        if exe.file_name()? != service.binary() {
            return None;
        }
        Self::by_cgroups(service, &fs::read_to_string(process.join("cgroup")).ok()?)
    }

    /// The keeper that the lines of `/proc/<pid>/cgroup` tell (cgroups(7)).
    fn by_cgroups(service: ServiceName, lines: &str) -> Option<Self> {
        let paths = lines.lines().filter_map(|line| line.splitn(3, ':').nth(2));
        paths.filter_map(|path| path.rsplit('/').next()).find_map(|name| {
            // `docker-<id>.scope` with the systemd driver, `<id>` with cgroupfs.
            let id = name.strip_suffix(".scope").and_then(|n| n.strip_prefix("docker-")).unwrap_or(name);
            if id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Some(Self::Docker(id[..SHORT_ID].to_owned()));
            }
            // A unit of another name keeps something else, from which the service was started by hand.
            let is_own = name.ends_with(".service") && name.contains(service.as_str());
            is_own.then(|| Self::Systemd(name.to_owned()))
        })
    }

    /// The command by which a person would do it.
    fn words(&self) -> [&str; 3] {
        match self {
            Self::Systemd(unit) => ["systemctl", "restart", unit],
            Self::Docker(id) => ["docker", "restart", id],
        }
    }

    /// Ends the service and starts it again; returns when the keeper has done so.
    pub(crate) async fn restart(&self) -> Result<(), Failure> {
        let words = self.words();
        let line = words.join(" ");
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).stdin(Stdio::null());
        let reason = match tokio::task::spawn_blocking(move || command.output()).await {
            Ok(Ok(output)) if output.status.success() => return Ok(()),
            Ok(Ok(output)) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        Err(Failure::Answer {
            message: format!("`{line}` failed: {reason}"),
            hint: Some("do the same as a user who may".into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn the_cgroup_of_a_service_tells_who_keeps_it() {
        let of = |lines: &str| Keeper::by_cgroups(ServiceName::PodSync, lines);
        let container = Some(Keeper::Docker("0123456789ab".into()));
        assert_eq!(of(&format!("0::/system.slice/docker-{ID}.scope\n")), container);
        assert_eq!(of(&format!("9:name=systemd:/docker/{ID}\n8:pids:/docker/{ID}\n0::/\n")), container);
        let unit = Some(Keeper::Systemd("keelson-pod-sync.service".into()));
        assert_eq!(of("1:name=systemd:/\n0::/keelson.slice/keelson-pod-sync.service\n"), unit);
        for other in [
            "0::/\n",
            "0::/system.slice/ssh.service\n",
            "0::/keelson.slice/keelson-node-api.service\n",
            "0::/user.slice/user-0.slice/session-1.scope\n",
            "0::/user.slice/user-0.slice/user@0.service/app.slice/pod-sync.scope\n",
            "broken",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[tokio::test]
    async fn a_listener_with_another_binary_is_nobody_s_service() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("x.sock");
        assert_eq!(Keeper::of(ServiceName::PodSync, &socket).await, None);
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert_eq!(Keeper::of(ServiceName::PodSync, &socket).await, None);
    }

    #[tokio::test]
    async fn a_keeper_that_refuses_is_shown_with_its_command() {
        let error = Keeper::Docker("no-such-container".into()).restart().await.unwrap_err().to_string();
        assert!(error.starts_with("`docker restart no-such-container` failed: "), "{error}");
    }
}
