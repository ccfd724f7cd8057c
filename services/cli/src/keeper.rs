//! Who keeps a service running where init does not: a unit of systemd, or a container of Docker's.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use keelson_config::ServiceName;
use keelson_service_kit::program;
use tokio::net::UnixStream;

use crate::error::Failure;

/// The digits of a container's id that its own command line shows.
const SHORT_ID: usize = 12;

/// systemd as it is asked for what it knows.
struct Systemd<'a> {
    /// There while it runs (sd_booted(3)).
    booted: &'a Path,
    /// Its command.
    systemctl: &'a str,
}

/// Whoever starts a service again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Keeper {
    /// The unit of this name.
    Systemd(String),
    /// The container with this id.
    Docker(String),
}

impl Keeper {
    /// The keeper of whoever listens at `socket`; where nobody does, the unit of systemd that is to. `None` where it is
    /// somebody who is not this service's own binary, or nobody known is to.
    pub(crate) async fn of(service: ServiceName, socket: &Path) -> Option<Self> {
        match UnixStream::connect(socket).await {
            Ok(stream) => Self::of_listener(service, &stream),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
                let systemd = Systemd { booted: Path::new("/run/systemd/system"), systemctl: "systemctl" };
                // `<run-dir>/<service>/<service>.sock`
                systemd.unit_of(service, &socket.ancestors().nth(2)?.join("config.json")).await
            }
            Err(_) => None,
        }
    }

    /// Of the process, as the kernel names it (unix(7)), by the cgroup that it is in.
    fn of_listener(service: ServiceName, stream: &UnixStream) -> Option<Self> {
        Self::of_process(service, &Path::new("/proc").join(stream.peer_cred().ok()?.pid()?.to_string()))
    }

    /// Of the process with this folder (proc(5)).
    fn of_process(service: ServiceName, process: &Path) -> Option<Self> {
        if program(process)?.file_name()? != service.binary() {
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
        let reason = match run(&words).await {
            Ok(output) if output.status.success() => return Ok(()),
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(reason) => reason,
        };
        Err(Failure::Answer {
            message: format!("`{line}` failed: {reason}"),
            hint: Some("do the same as a user who may".into()),
        })
    }
}

impl Systemd<'_> {
    /// The unit of a service that does not run, where it is there for the agent with this resolved configuration: a
    /// machine may have another agent besides.
    async fn unit_of(&self, service: ServiceName, config: &Path) -> Option<Keeper> {
        if !self.booted.is_dir() {
            return None;
        }
        let unit = format!("{}.service", service.binary());
        let output = run(&[self.systemctl, "show", "--property=LoadState,ExecStart", &unit]).await.ok()?;
        is_for(&String::from_utf8_lossy(&output.stdout), config).then_some(Keeper::Systemd(unit))
    }
}

/// Whether `systemctl show` tells of a unit that can be started and starts a service with this configuration.
fn is_for(shown: &str, config: &Path) -> bool {
    let is_config = |word: &str| Path::new(word.trim_start_matches("--config=")) == config;
    let mut lines = shown.lines().filter_map(|line| line.split_once('='));
    lines.clone().any(|line| line == ("LoadState", "loaded"))
        && lines.any(|(name, value)| name == "ExecStart" && value.split_whitespace().any(is_config))
}

/// What a command says and how it ends; an error says why it cannot be run.
async fn run(words: &[&str]) -> Result<Output, String> {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::null());
    match tokio::task::spawn_blocking(move || command.output()).await {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::os::unix::process::CommandExt as _;

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

    #[test]
    fn a_service_whose_binary_was_replaced_has_its_keeper_still() {
        let folder = tempfile::tempdir().unwrap();
        let binary = folder.path().join("keelson-pod-sync");
        fs::copy("/bin/sleep", &binary).unwrap();
        let mut child = Command::new(&binary).arg0("sleep").arg("60").spawn().unwrap();
        fs::remove_file(&binary).unwrap();
        let link = fs::read_link(format!("/proc/{}/exe", child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        let link = link.unwrap();
        assert!(link.to_str().unwrap().ends_with("/keelson-pod-sync (deleted)"), "{link:?}");
        symlink(link, folder.path().join("exe")).unwrap();
        fs::write(folder.path().join("cgroup"), "0::/keelson.slice/keelson-pod-sync.service\n").unwrap();
        let unit = Some(Keeper::Systemd("keelson-pod-sync.service".into()));
        assert_eq!(Keeper::of_process(ServiceName::PodSync, folder.path()), unit);
        assert_eq!(Keeper::of_process(ServiceName::NodeApi, folder.path()), None);
    }

    #[test]
    fn a_unit_is_one_that_can_be_started_with_this_configuration() {
        let config = Path::new("/run/keelson/config.json");
        let shown = |state: &str, argument: &str| {
            let program = "/usr/libexec/keelson/keelson-pod-sync";
            format!(
                "ExecStart={{ path={program} ; argv[]={program} {argument} ; ignore_errors=no ; pid=0 }}\nLoadState={state}\n"
            )
        };
        assert!(is_for(&shown("loaded", "--config /run/keelson/config.json"), config));
        assert!(is_for(&shown("loaded", "--config=/run/keelson/config.json"), config));
        for other in [
            shown("masked", "--config /run/keelson/config.json"),
            shown("loaded", "--config /run/other/config.json"),
            shown("loaded", ""),
            "LoadState=not-found\n".to_owned(),
            String::new(),
        ] {
            assert!(!is_for(&other, config), "{other}");
        }
    }

    #[tokio::test]
    async fn systemd_is_asked_for_the_unit_of_a_dead_service_where_it_runs() {
        let folder = tempfile::tempdir().unwrap();
        let systemctl = folder.path().join("systemctl");
        let script =
            "#!/bin/sh\necho LoadState=loaded\necho \"ExecStart={ argv[]=$3 --config /r/config.json ; }\"\n";
        fs::write(&systemctl, script).unwrap();
        fs::set_permissions(&systemctl, fs::Permissions::from_mode(0o755)).unwrap();
        let systemd = Systemd { booted: folder.path(), systemctl: systemctl.to_str().unwrap() };
        let of = async |systemd: &Systemd<'_>, config: &str| {
            systemd.unit_of(ServiceName::PodSync, Path::new(config)).await
        };
        let unit = Some(Keeper::Systemd("keelson-pod-sync.service".into()));
        assert_eq!(of(&systemd, "/r/config.json").await, unit);
        assert_eq!(of(&systemd, "/other/config.json").await, None);
        let absent = folder.path().join("absent");
        assert_eq!(of(&Systemd { booted: &absent, ..systemd }, "/r/config.json").await, None);
    }

    #[tokio::test]
    async fn a_keeper_that_refuses_is_shown_with_its_command() {
        let error = Keeper::Docker("no-such-container".into()).restart().await.unwrap_err().to_string();
        assert!(error.starts_with("`docker restart no-such-container` failed: "), "{error}");
    }
}
