use std::io;
use std::path::{Path, PathBuf};

use keelson_config::ServiceName;

use crate::machine::Group;
use crate::output::{Colour, notice};

/// Why a command did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The reader of standard output has gone: nothing to say, nobody to say it to.
    #[error("the output was closed")]
    BrokenPipe,
    /// The command line asks for something that does not exist.
    #[error("{message}")]
    Usage { message: String, hint: String },
    /// No service of the agent answers below the run folder.
    #[error("the agent is not running: nothing answers at {}", socket.display())]
    NotRunning {
        socket: PathBuf,
        /// The run folders of the agents that this machine does run.
        others: Vec<PathBuf>,
    },
    /// The agent runs, but not this service.
    #[error("{service} is not running: nothing answers at {}", socket.display())]
    ServiceAway { service: ServiceName, socket: PathBuf },
    /// The services run without init, and whoever keeps them is not known.
    #[error("init is not running here, so nothing of ours starts or ends services: {}", socket.display())]
    NoInit {
        socket: PathBuf,
        /// Services, as they are to be restarted.
        services: Vec<ServiceName>,
    },
    /// The service is there but does not answer.
    #[error("{message}")]
    Silent { service: ServiceName, message: String },
    /// The socket is closed to this user.
    #[error("permission denied on the agent's socket {}", socket.display())]
    Forbidden { socket: PathBuf, group: Group },
    /// The service does not take this call from this user.
    #[error("{service} refuses: {message}")]
    Refused { service: ServiceName, message: String, group: Group },
    /// Only root may do it.
    #[error("{message}")]
    NotRoot { message: String, hint: String },
    /// The service answered with an error.
    #[error("{message}")]
    Answer { message: String, hint: Option<String> },
    /// What was asked for does not exist.
    #[error("{what}")]
    NotFound { what: String, hint: String },
    /// A short name fits several pods.
    #[error("the name {name:?} fits several pods: {}", candidates.join(", "))]
    Ambiguous { name: String, candidates: Vec<String> },
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// A file is not what it should be.
    #[error("{}: {reason}", path.display())]
    Manifest { path: PathBuf, reason: String },
    /// Several things were tried and some of them failed; each was reported where it failed.
    #[error("{failed} of {total} failed")]
    Some { failed: usize, total: usize },
    /// Something did not come about in time.
    #[error("{message}")]
    TimedOut { message: String, hint: String },
    /// The agent could not be started.
    #[error("{message}")]
    Start { message: String, hint: String },
    /// The container runtime is not there.
    #[error("{message}")]
    NoRuntime { message: String, hint: String },
    /// No member of etcd answers.
    #[error("{message}")]
    NoEtcd { message: String, hint: String },
    /// A node that is another machine does not answer.
    #[error("{message}")]
    NodeAway { message: String, hint: String },
    /// A node does not let in who asks.
    #[error("{message}")]
    NotLetIn { message: String, hint: String },
    /// The command that was run in a container has ended so; it has said itself what there was to say.
    #[error("the command ended with exit code {code}")]
    Ended { code: u8 },
    /// A signal has ended this command while the terminal was in its hands.
    #[error("ended by signal {signal}")]
    Signalled { signal: u8 },
    /// Standard output cannot be written.
    #[error("cannot write the output: {source}")]
    Output { source: io::Error },
    /// An answer cannot be put into the format asked for.
    #[error("cannot encode the answer: {reason}")]
    Encode { reason: String },
    /// The async runtime cannot be started.
    #[error("cannot start the async runtime: {source}")]
    Runtime { source: io::Error },
}

impl Failure {
    /// The way out, where one is known.
    pub(crate) fn hint(&self) -> Option<String> {
        match self {
            Self::NotRunning { others, .. } => Some(not_running(others)),
            Self::ServiceAway { service, .. } => Some(format!(
                "`keelson get services` says why; `keelson services restart {service}` starts it anew"
            )),
            Self::NoInit { socket, services } => Some(without_init(socket, services)),
            Self::Silent { service, .. } => Some(format!(
                "`keelson get services` shows its state; `keelson services restart {service}` starts it anew; \
                 --request-timeout waits longer"
            )),
            Self::Forbidden { group, .. } | Self::Refused { group, .. } => Some(group.way_in()),
            Self::Ambiguous { .. } => Some("give the full name with -n, or the UID".into()),
            Self::Usage { hint, .. }
            | Self::NotFound { hint, .. }
            | Self::NotRoot { hint, .. }
            | Self::TimedOut { hint, .. }
            | Self::Start { hint, .. }
            | Self::NoEtcd { hint, .. }
            | Self::NodeAway { hint, .. }
            | Self::NotLetIn { hint, .. }
            | Self::NoRuntime { hint, .. } => Some(hint.clone()),
            Self::Answer { hint, .. } => hint.clone(),
            Self::BrokenPipe
            | Self::Read { .. }
            | Self::Manifest { .. }
            | Self::Some { .. }
            | Self::Ended { .. }
            | Self::Signalled { .. }
            | Self::Output { .. }
            | Self::Encode { .. }
            | Self::Runtime { .. } => None,
        }
    }

    /// The exit code of the process, from sysexits(3) where one fits; the README has the table.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::BrokenPipe => 0,
            Self::Refused { .. } | Self::Forbidden { .. } | Self::NotRoot { .. } | Self::NotLetIn { .. } => {
                77
            }
            Self::Usage { .. } => 64,
            Self::NotRunning { .. }
            | Self::ServiceAway { .. }
            | Self::NoInit { .. }
            | Self::Silent { .. }
            | Self::NoEtcd { .. }
            | Self::NodeAway { .. }
            | Self::NoRuntime { .. } => 69,
            Self::Encode { .. } | Self::Runtime { .. } => 70,
            Self::Output { .. } => 74,
            Self::TimedOut { .. } => 75,
            Self::Ended { code } => *code,
            // As a shell counts.
            Self::Signalled { signal } => signal.saturating_add(128),
            Self::Answer { .. }
            | Self::NotFound { .. }
            | Self::Ambiguous { .. }
            | Self::Read { .. }
            | Self::Manifest { .. }
            | Self::Some { .. }
            | Self::Start { .. } => 1,
        }
    }

    /// Whether the service could not be reached at all: trying the next thing there is in vain.
    pub(crate) fn is_unreachable(&self) -> bool {
        matches!(
            self,
            Self::NotRunning { .. }
                | Self::ServiceAway { .. }
                | Self::Silent { .. }
                | Self::Forbidden { .. }
                | Self::NoEtcd { .. }
                | Self::NodeAway { .. }
        )
    }

    /// Tells the person: an `error:` line, and a `try:` line where there is a way out. What is wrong in several
    /// places of a manifest has a line for each.
    pub(crate) fn print(&self, colour: Colour) {
        if matches!(self, Self::Ended { .. } | Self::Signalled { .. }) {
            return;
        }
        for line in self.to_string().lines() {
            notice(&format!("{} {}", colour.paint("1;31", "error:"), crate::table::printable(line)));
        }
        if let Some(hint) = self.hint() {
            notice(&format!("{} {hint}", colour.paint("1;36", "try:")));
        }
    }
}

fn not_running(others: &[PathBuf]) -> String {
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

/// Services that somebody else starts: systemd's units have our names, and containers those that compose.yaml gives them, with
/// the number of the node, which its folder has as well.
fn without_init(socket: &Path, services: &[ServiceName]) -> String {
    let mut folders = socket.ancestors().filter_map(|folder| folder.file_name()?.to_str());
    let node = folders
        .find_map(|folder| folder.strip_prefix("node-").filter(|number| number.parse::<u8>().is_ok()))
        .unwrap_or("1");
    let names = |prefix: &str, suffix: &str| -> String {
        services.iter().map(|s| format!(" {prefix}{s}{suffix}")).collect()
    };
    format!(
        "whoever starts them: `systemctl restart{}` under systemd, `docker compose restart{}` (or docker-compose) on node-{node} of compose.yaml",
        names("keelson-", ""),
        names("", &format!("-{node}"))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_an_agent_here_those_of_the_machine_are_named() {
        let failure = |others: &[&str]| {
            let others = others.iter().map(PathBuf::from).collect();
            Failure::NotRunning { socket: "/run/keelson/x.sock".into(), others }.hint().unwrap()
        };
        assert!(failure(&[]).starts_with("`sudo keelson up`"));
        let hint = failure(&["/run/a", "/run/b"]);
        assert!(hint.starts_with("agents of this machine run in /run/a, /run/b: "), "{hint}");
        assert!(hint.contains("--run-dir") && hint.contains("sudo keelson up"), "{hint}");
    }

    #[test]
    fn without_init_the_means_of_systemd_and_compose_are_named() {
        let services = vec![ServiceName::PodSync, ServiceName::NodeApi];
        let failure = Failure::NoInit { socket: "/r/init.sock".into(), services };
        let hint = failure.hint().unwrap();
        assert!(hint.contains("`systemctl restart keelson-pod-sync keelson-node-api`"), "{hint}");
        assert!(hint.contains("`docker compose restart pod-sync-1 node-api-1`"), "{hint}");
        assert!(hint.contains("docker-compose) on node-1 of compose.yaml"), "{hint}");
        assert_eq!(failure.exit_code(), 69);
        let socket = "/var/lib/keelson-compose/node-2/run/init/init.sock".into();
        let hint = Failure::NoInit { socket, services: vec![ServiceName::PodSync] }.hint().unwrap();
        assert!(hint.contains("`docker compose restart pod-sync-2`") && hint.contains("on node-2"), "{hint}");
    }
}
