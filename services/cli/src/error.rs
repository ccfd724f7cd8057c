//! The error of every command, with its exit code and the hint that a person gets.

use std::io;
use std::path::{Path, PathBuf};

use keelson_config::ServiceName;

use crate::host::Group;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// The reader of standard output closed it; nothing is printed.
    #[error("the output was closed")]
    BrokenPipe,
    /// The command line is wrong.
    #[error("{message}")]
    Usage { message: String, hint: String },
    /// No service of the agent answers below the run folder.
    #[error("the agent is not running: nothing answers at {}", socket.display())]
    NotRunning {
        socket: PathBuf,
        /// The run folders of the agents that do run on this machine.
        others: Vec<PathBuf>,
    },
    /// The agent runs, but not this service.
    #[error("{service} is not running: nothing answers at {}", socket.display())]
    ServiceNotRunning { service: ServiceName, socket: PathBuf },
    /// The services run without init, and no known service manager runs them.
    #[error("init is not running, so keelson cannot restart services: nothing answers at {}", socket.display())]
    InitNotRunning {
        socket: PathBuf,
        /// The services to restart.
        services: Vec<ServiceName>,
    },
    /// The service is running but did not answer in time.
    #[error("{message}")]
    ServiceTimeout { service: ServiceName, message: String },
    /// The socket is closed to this user.
    #[error("permission denied on the agent's socket {}", socket.display())]
    SocketForbidden { socket: PathBuf, group: Group },
    /// The service refuses this call from this user.
    #[error("{service} refuses: {message}")]
    CallRefused { service: ServiceName, message: String, group: Group },
    /// The command needs root.
    #[error("{message}")]
    NotRoot { message: String, hint: String },
    /// A service answered with an error, or a step of the command failed.
    #[error("{message}")]
    Failed { message: String, hint: Option<String> },
    /// The named object does not exist.
    #[error("{what}")]
    NotFound { what: String, hint: String },
    /// A short name matches several pods.
    #[error("the name {name:?} fits several pods: {}", candidates.join(", "))]
    Ambiguous { name: String, candidates: Vec<String> },
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// A file has invalid content.
    #[error("{}: {reason}", path.display())]
    Manifest { path: PathBuf, reason: String },
    /// Some of several operations failed; each error is already printed.
    #[error("{failed} of {total} failed")]
    SomeFailed { failed: usize, total: usize },
    /// An operation did not complete in time.
    #[error("{message}")]
    TimedOut { message: String, hint: String },
    /// The agent could not be started.
    #[error("{message}")]
    StartFailed { message: String, hint: String },
    /// The container runtime does not answer.
    #[error("{message}")]
    RuntimeUnavailable { message: String, hint: String },
    /// No member of etcd answers.
    #[error("{message}")]
    EtcdUnavailable { message: String, hint: String },
    /// A remote node does not answer.
    #[error("{message}")]
    NodeUnreachable { message: String, hint: String },
    /// A remote node refuses the client.
    #[error("{message}")]
    NodeDenied { message: String, hint: String },
    /// The command in the container ended with a non-zero exit code; nothing more is printed.
    #[error("the command ended with exit code {code}")]
    CommandEnded { code: u8 },
    /// A signal ended this command while its terminal was in raw mode.
    #[error("ended by signal {signal}")]
    Signalled { signal: u8 },
    /// Standard output cannot be written.
    #[error("cannot write the output: {source}")]
    Output { source: io::Error },
    /// An answer cannot be encoded in the requested format.
    #[error("cannot encode the answer: {reason}")]
    Encode { reason: String },
    /// The async runtime cannot be started.
    #[error("cannot start the async runtime: {source}")]
    AsyncRuntime { source: io::Error },
}

impl CliError {
    /// The error of a command about keys of etcd without `--etcd`.
    pub(crate) fn only_with_etcd(command: &str) -> Self {
        Self::Usage {
            message: format!("`keelson {command}` is about a key of etcd"),
            hint: "--etcd names the members, as `etcd.endpoints` of the KeelsonConfiguration does".into(),
        }
    }

    /// What the person can do about it, where that is known.
    pub(crate) fn hint(&self) -> Option<String> {
        match self {
            Self::NotRunning { others, .. } => Some(not_running_hint(others)),
            Self::ServiceNotRunning { service, .. } => Some(format!(
                "`keelson get services` shows why; `keelson services restart {service}` restarts it"
            )),
            Self::InitNotRunning { socket, services } => Some(init_not_running_hint(socket, services)),
            Self::ServiceTimeout { service, .. } => Some(format!(
                "`keelson get services` shows its state; `keelson services restart {service}` restarts it; \
                 --request-timeout waits longer"
            )),
            Self::SocketForbidden { group, .. } | Self::CallRefused { group, .. } => {
                Some(group.membership_hint())
            }
            Self::Ambiguous { .. } => Some("give the full name with -n, or the UID".into()),
            Self::Usage { hint, .. }
            | Self::NotFound { hint, .. }
            | Self::NotRoot { hint, .. }
            | Self::TimedOut { hint, .. }
            | Self::StartFailed { hint, .. }
            | Self::EtcdUnavailable { hint, .. }
            | Self::NodeUnreachable { hint, .. }
            | Self::NodeDenied { hint, .. }
            | Self::RuntimeUnavailable { hint, .. } => Some(hint.clone()),
            Self::Failed { hint, .. } => hint.clone(),
            Self::BrokenPipe
            | Self::Read { .. }
            | Self::Manifest { .. }
            | Self::SomeFailed { .. }
            | Self::CommandEnded { .. }
            | Self::Signalled { .. }
            | Self::Output { .. }
            | Self::Encode { .. }
            | Self::AsyncRuntime { .. } => None,
        }
    }

    /// The exit code of the process, from sysexits(3) where one fits; docs/command.md has the table.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::BrokenPipe => 0,
            Self::CallRefused { .. }
            | Self::SocketForbidden { .. }
            | Self::NotRoot { .. }
            | Self::NodeDenied { .. } => 77,
            Self::Usage { .. } => 64,
            Self::NotRunning { .. }
            | Self::ServiceNotRunning { .. }
            | Self::InitNotRunning { .. }
            | Self::ServiceTimeout { .. }
            | Self::EtcdUnavailable { .. }
            | Self::NodeUnreachable { .. }
            | Self::RuntimeUnavailable { .. } => 69,
            Self::Encode { .. } | Self::AsyncRuntime { .. } => 70,
            Self::Output { .. } => 74,
            Self::TimedOut { .. } => 75,
            Self::CommandEnded { code } => *code,
            // As shells do.
            Self::Signalled { signal } => signal.saturating_add(128),
            Self::Failed { .. }
            | Self::NotFound { .. }
            | Self::Ambiguous { .. }
            | Self::Read { .. }
            | Self::Manifest { .. }
            | Self::SomeFailed { .. }
            | Self::StartFailed { .. } => 1,
        }
    }

    /// Whether the service could not be reached at all, so that another call to it would fail as well.
    pub(crate) fn is_unreachable(&self) -> bool {
        matches!(
            self,
            Self::NotRunning { .. }
                | Self::ServiceNotRunning { .. }
                | Self::ServiceTimeout { .. }
                | Self::SocketForbidden { .. }
                | Self::EtcdUnavailable { .. }
                | Self::NodeUnreachable { .. }
        )
    }
}

fn not_running_hint(others: &[PathBuf]) -> String {
    if others.is_empty() {
        return "`sudo keelson up`, or name the run folder of a running agent with --run-dir or KEELSON_RUN_DIR"
            .into();
    }
    let list: Vec<String> = others.iter().map(|dir| dir.display().to_string()).collect();
    format!(
        "agents of this machine run in {}: name one with --run-dir or KEELSON_RUN_DIR; `sudo keelson up` starts one here",
        list.join(", ")
    )
}

/// The hint for services that systemd or Docker Compose may run: units are named after the services, containers as in compose.yaml
/// with the number of the node, which is also in the name of the node's folder.
fn init_not_running_hint(socket: &Path, services: &[ServiceName]) -> String {
    let mut folders = socket.ancestors().filter_map(|folder| folder.file_name()?.to_str());
    let node = folders
        .find_map(|folder| folder.strip_prefix("node-").filter(|number| number.parse::<u8>().is_ok()))
        .unwrap_or("1");
    let names = |prefix: &str, suffix: &str| -> String {
        services.iter().map(|s| format!(" {prefix}{s}{suffix}")).collect()
    };
    format!(
        "restart them where they were started: `systemctl restart{}` under systemd, `docker compose restart{}` (or docker-compose) on node-{node} of compose.yaml",
        names("keelson-", ""),
        names("", &format!("-{node}"))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_not_running_names_other_agents_of_the_machine() {
        let error = |others: &[&str]| {
            let others = others.iter().map(PathBuf::from).collect();
            CliError::NotRunning { socket: "/run/keelson/x.sock".into(), others }.hint().unwrap()
        };
        assert!(error(&[]).starts_with("`sudo keelson up`"));
        let hint = error(&["/run/a", "/run/b"]);
        assert!(hint.starts_with("agents of this machine run in /run/a, /run/b: "), "{hint}");
        assert!(hint.contains("--run-dir") && hint.contains("sudo keelson up"), "{hint}");
    }

    #[test]
    fn error_without_init_names_systemd_and_compose_commands() {
        let services = vec![ServiceName::PodSync, ServiceName::NodeApi];
        let error = CliError::InitNotRunning { socket: "/r/init.sock".into(), services };
        let hint = error.hint().unwrap();
        assert!(hint.contains("`systemctl restart keelson-pod-sync keelson-node-api`"), "{hint}");
        assert!(hint.contains("`docker compose restart pod-sync-1 node-api-1`"), "{hint}");
        assert!(hint.contains("docker-compose) on node-1 of compose.yaml"), "{hint}");
        assert_eq!(error.exit_code(), 69);
        let socket = "/var/lib/keelson-compose/node-2/run/init/init.sock".into();
        let hint = CliError::InitNotRunning { socket, services: vec![ServiceName::PodSync] }.hint().unwrap();
        assert!(hint.contains("`docker compose restart pod-sync-2`") && hint.contains("on node-2"), "{hint}");
    }
}
