use std::io;
use std::path::PathBuf;

use keelson_config::ServiceName;

use crate::output::{Colour, notice};

/// The group whose members may talk to the agent.
const OPERATOR_GROUP: &str = "keelson";

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
    NotRunning { socket: PathBuf },
    /// The agent runs, but not this service.
    #[error("{service} is not running: nothing answers at {}", socket.display())]
    ServiceAway { service: ServiceName, socket: PathBuf },
    /// The service is there but does not answer.
    #[error("{message}")]
    Silent { service: ServiceName, message: String },
    /// The socket is closed to this user.
    #[error("permission denied on the agent's socket {}", socket.display())]
    Forbidden { socket: PathBuf },
    /// The service does not take this call from this user.
    #[error("{service} refuses: {message}")]
    Refused { service: ServiceName, message: String },
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
            Self::NotRunning { .. } => Some(
                "`sudo keelson up`, or name the run folder of a running agent with --run-dir or KEELSON_RUN_DIR"
                    .into(),
            ),
            Self::ServiceAway { service, .. } => {
                Some(format!("`keelson get services` says why; `keelson services restart {service}` starts it anew"))
            }
            Self::Silent { service, .. } => Some(format!(
                "`keelson get services` shows its state; `keelson services restart {service}` starts it anew; \
                 --request-timeout waits longer"
            )),
            Self::Forbidden { .. } | Self::Refused { .. } => Some(format!(
                "join the group {OPERATOR_GROUP} (`sudo usermod -aG {OPERATOR_GROUP} $USER`, then log in again), \
                 or use sudo"
            )),
            Self::Ambiguous { .. } => Some("give the full name with -n, or the UID".into()),
            Self::Usage { hint, .. }
            | Self::NotFound { hint, .. }
            | Self::TimedOut { hint, .. }
            | Self::Start { hint, .. }
            | Self::NoRuntime { hint, .. } => Some(hint.clone()),
            Self::Answer { hint, .. } => hint.clone(),
            Self::BrokenPipe
            | Self::Read { .. }
            | Self::Manifest { .. }
            | Self::Some { .. }
            | Self::Output { .. }
            | Self::Encode { .. }
            | Self::Runtime { .. } => None,
        }
    }

    /// The exit code of the process, from sysexits(3) where one fits.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::BrokenPipe => 0,
            Self::Usage { .. } => 64,
            Self::NotRunning { .. }
            | Self::ServiceAway { .. }
            | Self::Silent { .. }
            | Self::Forbidden { .. }
            | Self::NoRuntime { .. } => 69,
            Self::Refused { .. }
            | Self::Answer { .. }
            | Self::NotFound { .. }
            | Self::Ambiguous { .. }
            | Self::Read { .. }
            | Self::Manifest { .. }
            | Self::Some { .. }
            | Self::TimedOut { .. }
            | Self::Start { .. }
            | Self::Output { .. }
            | Self::Encode { .. }
            | Self::Runtime { .. } => 1,
        }
    }

    /// Whether nothing of the agent could be reached at all.
    pub(crate) fn is_unreachable(&self) -> bool {
        self.exit_code() == 69
    }

    /// Tells the person: an `error:` line, and a `try:` line where there is a way out. What is wrong in several
    /// places of a manifest has a line for each.
    pub(crate) fn print(&self, colour: Colour) {
        for line in self.to_string().lines() {
            notice(&format!("{} {}", colour.paint("1;31", "error:"), crate::table::printable(line)));
        }
        if let Some(hint) = self.hint() {
            notice(&format!("{} {hint}", colour.paint("1;36", "try:")));
        }
    }
}
