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
//! chosen. No usable crate speaks it; the part that is needed is small ([`keelson_spdy`]).
//! `docs/adr/0005-exec-speaks-spdy.md` has what it costs.
//!
//! ```text
//! caller ⇄ gRPC stream ⇄ [`keelson_spdy::relay`] ⇄ one TCP connection: error, stdin, stdout, stderr, resize ⇄ runtime ⇄ command
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
mod raw;
#[cfg(test)]
mod raw_tests;
mod streams;
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
use keelson_service_kit::{Metrics, NoPlace, Progress};
use keelson_spdy::relay::{self, Answers};
use keelson_spdy::session::{self, SETUP_WITHIN, Wanted};
use tokio::sync::Semaphore;
use tonic::Status;

use crate::cri::Cri;
use crate::labels;
use crate::observe::state_of;
use dial::StreamUrl;
use streams::Streams;

pub use keelson_spdy::relay::RelayError;
pub use keelson_spdy::session::SetupError;

pub use dial::DialError;
pub use raw::Pieces;

/// Commands of the command on the node that run at the same time. Each holds a connection to the runtime and at most some 300 KiB.
const AT_ONCE: usize = 64;
/// Streams of the kubelet API at the same time, which cost as much; pods, namespaces and users have shares of them.
const STREAMS: usize = 128;
/// How long a caller may take to say what it wants.
const START_WITHIN: Duration = Duration::from_secs(10);

/// Why there is no exit code.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The caller says something that cannot be.
    #[error("{0}")]
    BadRequest(String),
    /// What the caller has sent cannot be read, or it has gone.
    #[error("the caller's stream has broken: {}", .0.message())]
    Caller(Status),
    /// More than [`AT_ONCE`].
    #[error("{AT_ONCE} commands are being run already; try again when one has ended")]
    TooMany,
    /// More than the share of the pod, its namespace or the user.
    #[error(
        "no stream into a container is free: {0}; close one, or use `keelson exec` on the node, which has places of its own"
    )]
    NoStream(#[from] NoPlace),
    /// No such pod, or no such container that runs.
    #[error(transparent)]
    NotThere(#[from] NotThere),
    /// The runtime does not answer.
    #[error("the container runtime does not answer: {}", .0.message())]
    Unavailable(Status),
    /// The runtime does not take the command; its own words.
    #[error("{}", .0.message())]
    Refused(Status),
    /// The runtime's streaming server could not be had.
    #[error("cannot get the command's streams from the container runtime")]
    Dial(#[from] DialError),
    /// The streams could not be had.
    #[error("cannot get the command's streams from the container runtime")]
    Setup(#[from] SetupError),
    /// Between the caller and the command.
    #[error(transparent)]
    Relay(#[from] RelayError),
}

/// Runs commands.
#[derive(Debug, Clone)]
pub struct Execs {
    cri: Cri,
    /// Of the command on the node, which is an operator's.
    permits: Arc<Semaphore>,
    /// Of the kubelet API: however many come over the network, an operator gets in.
    streams: Streams,
}

impl Execs {
    /// Commands are run by this runtime.
    pub fn new(cri: Cri, metrics: &Metrics, progress: Progress) -> Self {
        let permits = Arc::new(Semaphore::new(AT_ONCE));
        Self { cri, permits, streams: Streams::new(STREAMS, metrics, progress) }
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
        let wanted = Wanted::all(start.stdin, start.tty);
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
        let opened = async {
            let (socket, input) = dial::spdy(&url).await?;
            let (reader, writer) = socket.into_split();
            Ok::<_, ExecError>(session::open(reader, writer, input, wanted).await?)
        };
        let session =
            tokio::time::timeout(SETUP_WITHIN, opened).await.unwrap_or(Err(SetupError::Slow.into()))?;
        Ok(relay::relay(session, &container_id, start.size, messages, answers).await?)
    }

    /// The container that is meant, as the runtime has it now.
    async fn find(&self, start: &pb::ExecStart) -> Result<String, ExecError> {
        let wanted = selector(&start.pod_uid, &start.namespace, &start.name);
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
        Ok(StreamUrl::parse(&answer.into_inner().url)?)
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
    let bad = |text: &str| Err(ExecError::BadRequest(text.to_owned()));
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
    wants_a_pod(&start.pod_uid, &start.namespace, &start.name)?;
    Ok(start)
}

/// A request has to name a pod.
fn wants_a_pod(uid: &str, namespace: &str, name: &str) -> Result<(), ExecError> {
    if uid.is_empty() && (namespace.is_empty() || name.is_empty()) {
        let text = "the pod has to be named by `pod_uid` or by `namespace` and `name`";
        return Err(ExecError::BadRequest(text.to_owned()));
    }
    Ok(())
}

/// The labels by which the runtime finds what belongs to a pod; what is empty does not count.
fn selector(uid: &str, namespace: &str, name: &str) -> HashMap<String, String> {
    let wanted = [(labels::UID, uid), (labels::NAMESPACE, namespace), (labels::NAME, name)];
    let given = wanted.into_iter().filter(|(_, value)| !value.is_empty());
    given.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn doing(state: i32) -> State {
    match state_of(state) {
        pb::ContainerState::Created => State::Created,
        pb::ContainerState::Running => State::Running,
        pb::ContainerState::Exited => State::Exited,
        pb::ContainerState::Unknown | pb::ContainerState::Unspecified => State::Unknown,
    }
}
