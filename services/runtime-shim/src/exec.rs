//! Commands in running containers: from the RPC to the runtime's streaming server and back.
//!
//! CRI's `Exec` does not run the command. It returns a URL of the runtime's streaming server, and the client that
//! connects to the URL gets the command's streams. The URL is a permission: it is valid for one connection within a
//! minute. It never leaves this process: no RPC returns it to a caller that is not root, and no message or log line
//! contains it.
//!
//! **SPDY and not WebSocket.** All runtimes serve both over the same URL. Of the WebSocket protocols only
//! `v5.channel.k8s.io` can signal the end of stdin, and containerd supports it since 2.0: with 1.6 and 1.7
//! `echo x | keelson exec -i pod -- cat` would never end. SPDY/3.1 with `v4.channel.k8s.io` can do it in all versions,
//! and it is what a kubelet uses with a runtime. One protocol that always works is less to maintain than a choice of
//! two. No usable crate implements it; the part that is needed is small ([`keelson_spdy`]).
//! `docs/adr/0005-exec-speaks-spdy.md` discusses the cost.
//!
//! ```text
//! caller ⇄ gRPC stream ⇄ [`keelson_spdy::relay`] ⇄ one TCP connection: error, stdin, stdout, stderr, resize ⇄ runtime ⇄ command
//! ```
//!
//! **No buffering.** Everything that the runtime sends goes to one reader in order, so the backpressure of one
//! connection is sufficient: while the caller does not read, this process does not read either, and the command blocks
//! on its stdout. Input is read from the caller only after the runtime has accepted the previous input. The two
//! directions run concurrently, so neither waits for the other.
//!
//! **End of a command.** Only the status on the error stream tells how a command ended. If the connection ends without
//! it, the result is unknown and the error says so. When the caller leaves, the connection is closed: the command reads
//! the end of its stdin, and its output is discarded. CRI has no call that ends a command. A command that neither reads
//! nor writes, such as `sleep`, continues until its container ends, as with every CRI client; the same happens when
//! this process is killed.

mod dial;
mod raw;
#[cfg(test)]
mod raw_tests;
mod streams;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use k8s_cri::v1 as cri;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::exec::{Instance, TargetError, choose_container};
use keelson_service_kit::status::is_unanswered;
use keelson_service_kit::{Metrics, NoPlace, Progress};
use keelson_spdy::relay::{self, Answers};
use keelson_spdy::session::{self, SETUP_WITHIN, Wanted};
use tokio::sync::Semaphore;
use tonic::Status;

use crate::cri::Cri;
use crate::cri_objects::{ContainerEntry, labels};
use dial::StreamUrl;
use streams::Streams;

pub use keelson_spdy::relay::RelayError;
pub use keelson_spdy::session::SetupError;

pub use dial::DialError;
pub use raw::StreamResponses;

/// Maximum concurrent commands of `keelson exec` on the node. Each holds a connection to the runtime and at most about 300 KiB.
const MAX_EXECS: usize = 64;
/// Maximum concurrent streams of the kubelet API, with the same cost each. Pods, namespaces and users have shares.
const MAX_STREAMS: usize = 128;
/// How long a caller may take to send its first message.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a command has no exit code.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The caller's request is not valid.
    #[error("{0}")]
    BadRequest(String),
    /// The caller's stream failed.
    #[error("the caller's stream has broken: {}", .0.message())]
    Caller(Status),
    /// [`MAX_EXECS`] commands are running.
    #[error("{MAX_EXECS} commands are already running; try again when one has ended")]
    TooMany,
    /// The pod, its namespace or the user has used up its share.
    #[error(
        "no stream into a container is free: {0}; close one, or use `keelson exec` on the node, which has places of its own"
    )]
    NoFreeStream(#[from] NoPlace),
    /// There is no such pod, or no such running container.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The runtime does not answer.
    #[error("the container runtime does not answer: {}", .0.message())]
    Unavailable(Status),
    /// The runtime refuses the command; the message is its own.
    #[error("{}", .0.message())]
    Refused(Status),
    /// The connection to the runtime's streaming server failed.
    #[error("cannot get the command's streams from the container runtime")]
    Dial(#[from] DialError),
    /// The streams could not be opened.
    #[error("cannot get the command's streams from the container runtime")]
    Setup(#[from] SetupError),
    /// The relay between the caller and the command failed.
    #[error(transparent)]
    Relay(#[from] RelayError),
}

/// Runs commands in containers.
#[derive(Debug, Clone)]
pub struct Execs {
    cri: Cri,
    /// For `keelson exec` on the node, which operators use.
    permits: Arc<Semaphore>,
    /// For the kubelet API. Separate, so that streams over the network never lock out an operator.
    streams: Streams,
}

impl Execs {
    /// Runs commands by this runtime.
    pub fn new(cri: Cri, metrics: &Metrics, progress: Progress) -> Self {
        let permits = Arc::new(Semaphore::new(MAX_EXECS));
        Self { cri, permits, streams: Streams::new(MAX_STREAMS, metrics, progress) }
    }

    /// Serves one exec until the command has ended or the caller has left. `uid` is the caller's, for the log.
    ///
    /// # Errors
    /// The error to return to the caller instead of an exit code.
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
        // Cancel-safe: when the caller leaves, everything that was started for it is dropped. An unused URL expires.
        tokio::select! {
            end = self.run(&mut messages, uid, answers) => end,
            () = answers.closed() => Ok(()),
        }
    }

    async fn run<M>(&self, messages: &mut M, uid: Option<u32>, answers: &Answers) -> Result<(), ExecError>
    where
        M: Stream<Item = Result<pb::ExecRequest, Status>> + Unpin + Send,
    {
        let start = read_start(messages).await?;
        let container_id = self.find_container(&start).await?;
        let wanted = Wanted::all(start.stdin, start.tty);
        tracing::info!(
            namespace = start.namespace,
            pod = start.name,
            uid = start.pod_uid,
            container = start.container,
            container_id,
            tty = start.tty,
            attach = start.attach,
            caller_uid = uid,
            "running a command in a container, or attaching to it"
        );
        let url = self.stream_url(&container_id, &start).await?;
        let opened = async {
            let (socket, input) = dial::spdy(&url).await?;
            let (reader, writer) = socket.into_split();
            Ok::<_, ExecError>(session::open(reader, writer, input, wanted).await?)
        };
        let session =
            tokio::time::timeout(SETUP_WITHIN, opened).await.unwrap_or(Err(SetupError::Slow.into()))?;
        Ok(relay::relay(session, &container_id, start.size, messages, answers).await?)
    }

    /// Finds the requested container in the runtime's current list.
    async fn find_container(&self, start: &pb::ExecStart) -> Result<String, ExecError> {
        let labels = labels::selector(&start.pod_uid, &start.namespace, &start.name);
        let listed = self.cri.list_labelled(labels).await.map_err(runtime_error)?;
        let instances: Vec<Instance<'_>> = listed.containers.iter().map(ContainerEntry::instance).collect();
        Ok(choose_container(!listed.sandboxes.is_empty(), &instances, &start.container)?.to_owned())
    }

    async fn stream_url(&self, container_id: &str, start: &pb::ExecStart) -> Result<StreamUrl, ExecError> {
        let mut runtime = self.cri.runtime();
        // With a terminal there is only one output.
        let (stdin, tty, stdout, stderr) = (start.stdin, start.tty, true, !start.tty);
        let container_id = container_id.to_owned();
        let url = if start.attach {
            let request = cri::AttachRequest { container_id, stdin, tty, stdout, stderr };
            runtime.attach(self.cri.quick(request)).await.map(|answer| answer.into_inner().url)
        } else {
            let cmd = start.command.clone();
            let request = cri::ExecRequest { container_id, cmd, tty, stdin, stdout, stderr };
            runtime.exec(self.cri.quick(request)).await.map(|answer| answer.into_inner().url)
        };
        Ok(StreamUrl::parse(&url.map_err(runtime_error)?)?)
    }
}

/// Distinguishes a runtime that does not answer from one that refuses.
fn runtime_error(status: Status) -> ExecError {
    if is_unanswered(&status) { ExecError::Unavailable(status) } else { ExecError::Refused(status) }
}

/// Reads the first message.
async fn read_start<M>(messages: &mut M) -> Result<pb::ExecStart, ExecError>
where
    M: Stream<Item = Result<pb::ExecRequest, Status>> + Unpin + Send,
{
    let bad = |text: &str| Err(ExecError::BadRequest(text.to_owned()));
    let message = match tokio::time::timeout(START_TIMEOUT, messages.next()).await {
        Ok(Some(message)) => message.map_err(ExecError::Caller)?,
        Ok(None) => return bad("the stream ended before its first message"),
        Err(_) => return bad("the first message did not arrive within 10 s"),
    };
    let Some(pb::exec_request::Item::Start(start)) = message.item else {
        return bad("the first message must be `start`");
    };
    if start.command.is_empty() && !start.attach {
        return bad("`command` is empty");
    }
    if start.attach && !start.command.is_empty() {
        return bad("`attach` takes no `command`");
    }
    if start.container.is_empty() {
        return bad("`container` is empty");
    }
    require_pod(&start.pod_uid, &start.namespace, &start.name)?;
    Ok(start)
}

/// Requires that a request names a pod.
fn require_pod(uid: &str, namespace: &str, name: &str) -> Result<(), ExecError> {
    if uid.is_empty() && (namespace.is_empty() || name.is_empty()) {
        let text = "the pod must be named by `pod_uid`, or by `namespace` and `name`";
        return Err(ExecError::BadRequest(text.to_owned()));
    }
    Ok(())
}
