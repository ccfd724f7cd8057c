//! Commands in running containers: from the RPC to the runtime's streaming server and back.
//!
//! CRI's `Exec` runs nothing. It answers with a URL of the runtime's streaming server, and whoever connects to it has
//! the command's streams: the URL is the permission, it is good for one connection within a minute, and it never leaves
//! this process (a caller that is not root gets it by no RPC, nor does it stand in a message or in the log).
//!
//! **SPDY and not WebSocket.** Both are served by every runtime that there is, over the same URL. Of the WebSocket
//! protocols only `v5.channel.k8s.io` can say that stdin has ended, and containerd knows it since 2.0: with 1.6 and 1.7
//! `echo x | keelson exec -i pod -- cat` would never end. SPDY/3.1 with `v4.channel.k8s.io` can, in all of them, and
//! is what a kubelet speaks to a runtime. One protocol that always works is less to keep than two of which one is
//! chosen. No usable crate speaks it; the part that is needed is small ([`keelson_runtime_shim_core::spdy`]).
//! `docs/adr/0005-exec-speaks-spdy.md` has what it costs.
//!
//! ```text
//! caller ⇄ gRPC stream ⇄ [`relay`] ⇄ one TCP connection: error, stdin, stdout, stderr, resize ⇄ runtime ⇄ command
//! ```
//!
//! **Nothing is stored up.** Everything that the runtime sends goes to one reader in the order in which it comes, so one
//! connection's backpressure is all that is needed: while the caller does not read, neither does this, and the command
//! waits at its own stdout. Input is taken from the caller when the runtime has taken what came before. Both
//! directions run side by side, so neither waits for the other.
//!
//! **Ends.** The status on the error stream is the only good one. When the connection ends without, how the command
//! ended is not known, and the error says so. When the caller goes, the connection is closed: the command reads the
//! end of its stdin, and nobody takes its output any more. CRI has no call that ends it. One that neither reads nor
//! writes, as `sleep`, goes on until its container ends, as with every client of CRI; the same is true when this
//! process is killed.

mod dial;
#[cfg(test)]
mod fake;
mod relay;
mod session;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use k8s_cri::v1 as cri;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::exec::{Instance, NotThere, State, choose};
use keelson_service_kit::status::is_unanswered;
use tokio::sync::{Semaphore, mpsc};
use tonic::Status;

use crate::cri::Cri;
use crate::labels;
use crate::observe::state_of;
use dial::StreamUrl;
use session::Wanted;

pub use dial::DialError;
pub use session::{FrameError, SetupError};

/// Commands that run at the same time. Each holds a connection to the runtime and at most some 300 KiB.
const AT_ONCE: usize = 64;
/// How long a caller may take to say what it wants.
const START_WITHIN: Duration = Duration::from_secs(10);

/// Why there is no exit code.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The caller says something that cannot be.
    #[error("{0}")]
    BadRequest(&'static str),
    /// What the caller has sent cannot be read, or it has gone.
    #[error("the caller's stream has broken: {}", .0.message())]
    Caller(Status),
    /// More than [`AT_ONCE`].
    #[error("{AT_ONCE} commands are being run already; try again when one has ended")]
    TooMany,
    /// No such pod, or no such container that runs.
    #[error(transparent)]
    NotThere(#[from] NotThere),
    /// The runtime does not answer.
    #[error("the container runtime does not answer: {}", .0.message())]
    Unavailable(Status),
    /// The runtime does not take the command; its own words.
    #[error("{}", .0.message())]
    Refused(Status),
    /// The command's streams could not be had.
    #[error("cannot get the command's streams from the container runtime")]
    Setup(#[from] SetupError),
    /// The connection has ended, and nobody has said how the command did.
    #[error(
        "the connection to the container runtime was lost while the command ran ({how}): how it ended is not known, \
         and it may still run"
    )]
    Lost {
        /// What was seen of it.
        how: String,
    },
    /// The runtime could not run the command; its own words.
    #[error("{0}")]
    Failed(String),
    /// The runtime has said how it ended, in a way that is not understood.
    #[error("the container runtime tells of the command's end what is not understood: {0:?}")]
    Unclear(String),
}

/// Where answers go. Few, so that the command waits for a slow caller and not memory.
pub type Answers = mpsc::Sender<Result<pb::ExecResponse, Status>>;

/// Runs commands.
#[derive(Debug, Clone)]
pub struct Execs {
    cri: Cri,
    permits: Arc<Semaphore>,
}

impl Execs {
    /// Commands are run by this runtime.
    pub fn new(cri: Cri) -> Self {
        Self { cri, permits: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// Does what the caller's messages say and answers until the command has ended or the caller has gone. `uid` is who
    /// calls, for the log.
    ///
    /// # Errors
    /// What the caller is to be told instead of an exit code.
    pub async fn serve<M>(
        &self,
        mut messages: M,
        uid: Option<u32>,
        answers: &Answers,
    ) -> Result<(), ExecError>
    where
        M: Stream<Item = Result<pb::ExecRequest, Status>> + Unpin + Send,
    {
        let _permit = self.permits.try_acquire().map_err(|_| ExecError::TooMany)?;
        // Cancel-safe: with the caller everything goes that was begun for it. A URL that was not used expires.
        tokio::select! {
            end = self.run(&mut messages, uid, answers) => end,
            () = answers.closed() => Ok(()),
        }
    }

    async fn run<M>(&self, messages: &mut M, uid: Option<u32>, answers: &Answers) -> Result<(), ExecError>
    where
        M: Stream<Item = Result<pb::ExecRequest, Status>> + Unpin + Send,
    {
        let start = first(messages).await?;
        let container_id = self.find(&start).await?;
        let wanted = Wanted { stdin: start.stdin, tty: start.tty };
        tracing::info!(
            namespace = start.namespace,
            pod = start.name,
            uid = start.pod_uid,
            container = start.container,
            container_id,
            tty = start.tty,
            caller_uid = uid,
            "runs a command in a container"
        );
        let url = self.url(&container_id, &start).await?;
        let session = session::open(&url, wanted).await?;
        relay::relay(session, &container_id, start.size, messages, answers).await
    }

    /// The container that is meant, as the runtime has it now.
    async fn find(&self, start: &pb::ExecStart) -> Result<String, ExecError> {
        let wanted = [
            (labels::UID, &start.pod_uid),
            (labels::NAMESPACE, &start.namespace),
            (labels::NAME, &start.name),
        ];
        let wanted: HashMap<String, String> = wanted
            .into_iter()
            .filter(|(_, value)| !value.is_empty())
            .map(|(key, value)| (key.to_owned(), value.clone()))
            .collect();
        let (sandboxes, containers) = self.cri.list_labelled(wanted).await.map_err(runtime_says)?;
        let instances: Vec<Instance<'_>> = containers
            .iter()
            .map(|container| Instance {
                name: container.labels.get(labels::CONTAINER).map_or("", String::as_str),
                id: &container.id,
                created: container.created_at,
                state: doing(container.state),
            })
            .collect();
        Ok(choose(!sandboxes.is_empty(), &instances, &start.container)?.to_owned())
    }

    async fn url(&self, container_id: &str, start: &pb::ExecStart) -> Result<StreamUrl, ExecError> {
        let request = cri::ExecRequest {
            container_id: container_id.to_owned(),
            cmd: start.command.clone(),
            tty: start.tty,
            stdin: start.stdin,
            stdout: true,
            // A terminal has one output.
            stderr: !start.tty,
        };
        let answer = self.cri.runtime().exec(self.cri.quick(request)).await.map_err(runtime_says)?;
        Ok(StreamUrl::parse(&answer.into_inner().url).map_err(SetupError::from)?)
    }
}

/// Whether a failed call has reached the runtime.
fn runtime_says(status: Status) -> ExecError {
    if is_unanswered(&status) { ExecError::Unavailable(status) } else { ExecError::Refused(status) }
}

/// The first message.
async fn first<M>(messages: &mut M) -> Result<pb::ExecStart, ExecError>
where
    M: Stream<Item = Result<pb::ExecRequest, Status>> + Unpin + Send,
{
    let bad = |text| Err(ExecError::BadRequest(text));
    let message = match tokio::time::timeout(START_WITHIN, messages.next()).await {
        Ok(Some(message)) => message.map_err(ExecError::Caller)?,
        Ok(None) => return bad("the stream has ended before it said what to run"),
        Err(_) => return bad("nothing has come within 10 s that says what to run"),
    };
    let Some(pb::exec_request::Item::Start(start)) = message.item else {
        return bad("the first message has to be `start`");
    };
    if start.command.is_empty() {
        return bad("`command` is empty");
    }
    if start.container.is_empty() {
        return bad("`container` is empty");
    }
    if start.pod_uid.is_empty() && (start.namespace.is_empty() || start.name.is_empty()) {
        return bad("the pod has to be named by `pod_uid` or by `namespace` and `name`");
    }
    Ok(start)
}

fn doing(state: i32) -> State {
    match state_of(state) {
        pb::ContainerState::Created => State::Created,
        pb::ContainerState::Running => State::Running,
        pb::ContainerState::Exited => State::Exited,
        pb::ContainerState::Unknown | pb::ContainerState::Unspecified => State::Unknown,
    }
}
