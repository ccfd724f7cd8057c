//! The service manager that runs a service where init does not: systemd, or Docker.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use keelson_config::ServiceName;
use keelson_service_kit::program;
use tokio::net::UnixStream;

use crate::error::CliError;

/// The length of a container id as `docker ps` shows it.
const SHORT_ID: usize = 12;

/// Queries systemd about units.
struct Systemd<'a> {
    /// Exists while systemd runs (sd_booted(3)).
    booted: &'a Path,
    /// The command `systemctl`.
    systemctl: &'a str,
}

/// The unit or container that runs a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ServiceManager {
    /// The systemd unit of this name.
    Systemd(String),
    /// The Docker container with this id.
    Docker(String),
}

impl ServiceManager {
    /// The manager of the process that listens at `socket`; where none listens, the service's systemd unit. `None` where
    /// another program listens, or where no manager is known.
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

    /// The manager of the peer process of a connection (unix(7)).
    fn of_listener(service: ServiceName, stream: &UnixStream) -> Option<Self> {
        Self::of_process(service, &Path::new("/proc").join(stream.peer_cred().ok()?.pid()?.to_string()))
    }

    /// The manager of the process with this folder below /proc (proc(5)).
    fn of_process(service: ServiceName, process: &Path) -> Option<Self> {
        if program(process)?.file_name()? != service.binary() {
            return None;
        }
        Self::from_cgroups(service, &fs::read_to_string(process.join("cgroup")).ok()?)
    }

    /// The manager according to the lines of `/proc/<pid>/cgroup` (cgroups(7)).
    fn from_cgroups(service: ServiceName, lines: &str) -> Option<Self> {
        let paths = lines.lines().filter_map(|line| line.splitn(3, ':').nth(2));
        paths.filter_map(|path| path.rsplit('/').next()).find_map(|name| {
            // `docker-<id>.scope` with the systemd driver, `<id>` with cgroupfs.
            let id = name.strip_suffix(".scope").and_then(|n| n.strip_prefix("docker-")).unwrap_or(name);
            if id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Some(Self::Docker(id[..SHORT_ID].to_owned()));
            }
            // A unit without the service's name is one from which the service was started by hand.
            let is_own = name.ends_with(".service") && name.contains(service.as_str());
            is_own.then(|| Self::Systemd(name.to_owned()))
        })
    }

    /// The command that restarts the service.
    fn restart_command(&self) -> [&str; 3] {
        match self {
            Self::Systemd(unit) => ["systemctl", "restart", unit],
            Self::Docker(id) => ["docker", "restart", id],
        }
    }

    /// Restarts the service; returns when the manager has done so.
    pub(crate) async fn restart(&self) -> Result<(), CliError> {
        let words = self.restart_command();
        let line = words.join(" ");
        let reason = match run(&words).await {
            Ok(output) if output.status.success() => return Ok(()),
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(reason) => reason,
        };
        Err(CliError::Failed {
            message: format!("`{line}` failed: {reason}"),
            hint: Some("run the command as a user with permission".into()),
        })
    }
}

impl Systemd<'_> {
    /// The unit of a service that is not running, if it belongs to the agent with this resolved configuration: a
    /// machine may have several agents.
    async fn unit_of(&self, service: ServiceName, config: &Path) -> Option<ServiceManager> {
        if !self.booted.is_dir() {
            return None;
        }
        let unit = format!("{}.service", service.binary());
        let output = run(&[self.systemctl, "show", "--property=LoadState,ExecStart", &unit]).await.ok()?;
        starts_with_config(&String::from_utf8_lossy(&output.stdout), config)
            .then_some(ServiceManager::Systemd(unit))
    }
}

/// Whether the output of `systemctl show` is of a loaded unit that starts a service with this configuration.
fn starts_with_config(shown: &str, config: &Path) -> bool {
    let is_config = |word: &str| Path::new(word.trim_start_matches("--config=")) == config;
    let mut lines = shown.lines().filter_map(|line| line.split_once('='));
    lines.clone().any(|line| line == ("LoadState", "loaded"))
        && lines.any(|(name, value)| name == "ExecStart" && value.split_whitespace().any(is_config))
}

/// Runs a command and returns its output and exit status; the error says why it cannot be run.
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
    fn service_manager_is_found_by_cgroup() {
        let of = |lines: &str| ServiceManager::from_cgroups(ServiceName::PodSync, lines);
        let container = Some(ServiceManager::Docker("0123456789ab".into()));
        assert_eq!(of(&format!("0::/system.slice/docker-{ID}.scope\n")), container);
        assert_eq!(of(&format!("9:name=systemd:/docker/{ID}\n8:pids:/docker/{ID}\n0::/\n")), container);
        let unit = Some(ServiceManager::Systemd("keelson-pod-sync.service".into()));
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
    async fn listener_with_another_binary_has_no_service_manager() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("x.sock");
        assert_eq!(ServiceManager::of(ServiceName::PodSync, &socket).await, None);
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert_eq!(ServiceManager::of(ServiceName::PodSync, &socket).await, None);
    }

    #[test]
    fn replaced_binary_keeps_its_service_manager() {
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
        let unit = Some(ServiceManager::Systemd("keelson-pod-sync.service".into()));
        assert_eq!(ServiceManager::of_process(ServiceName::PodSync, folder.path()), unit);
        assert_eq!(ServiceManager::of_process(ServiceName::NodeApi, folder.path()), None);
    }

    #[test]
    fn unit_must_be_loaded_and_name_the_configuration() {
        let config = Path::new("/run/keelson/config.json");
        let shown = |state: &str, argument: &str| {
            let program = "/usr/libexec/keelson/keelson-pod-sync";
            format!(
                "ExecStart={{ path={program} ; argv[]={program} {argument} ; ignore_errors=no ; pid=0 }}\nLoadState={state}\n"
            )
        };
        assert!(starts_with_config(&shown("loaded", "--config /run/keelson/config.json"), config));
        assert!(starts_with_config(&shown("loaded", "--config=/run/keelson/config.json"), config));
        for other in [
            shown("masked", "--config /run/keelson/config.json"),
            shown("loaded", "--config /run/other/config.json"),
            shown("loaded", ""),
            "LoadState=not-found\n".to_owned(),
            String::new(),
        ] {
            assert!(!starts_with_config(&other, config), "{other}");
        }
    }

    #[tokio::test]
    async fn dead_service_has_its_systemd_unit_where_systemd_runs() {
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
        let unit = Some(ServiceManager::Systemd("keelson-pod-sync.service".into()));
        assert_eq!(of(&systemd, "/r/config.json").await, unit);
        assert_eq!(of(&systemd, "/other/config.json").await, None);
        let absent = folder.path().join("absent");
        assert_eq!(of(&Systemd { booted: &absent, ..systemd }, "/r/config.json").await, None);
    }

    #[tokio::test]
    async fn failed_restart_names_the_command() {
        let error =
            ServiceManager::Docker("no-such-container".into()).restart().await.unwrap_err().to_string();
        assert!(error.starts_with("`docker restart no-such-container` failed: "), "{error}");
    }
}
