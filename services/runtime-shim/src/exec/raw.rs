//! Streams whose bytes are not looked at: the caller and the runtime's streaming server speak with each other.

use bytes::BytesMut;
use futures_util::{Stream, StreamExt as _};
use k8s_cri::v1 as cri;
use keelson_proto::keelson::runtime::v1 as pb;
use pb::stream_request::Item as Asked;
use pb::stream_response::Item as Told;
use pb::stream_start::What;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tonic::Status;

use super::dial::{self, Answered, StreamUrl};
use super::{ExecError, Execs, NotThere, START_WITHIN, runtime_says, wants_a_pod};

/// Where the bytes of the runtime go. Few, so that it waits for a slow caller and not memory.
pub type Pieces = mpsc::Sender<Result<pb::StreamResponse, Status>>;

/// Room for one read.
const READ: usize = 32 << 10;
/// Headers that are between the caller and who has taken its request: who it is, and where it has connected to.
const NOT_HANDED_ON: [&str; 4] = ["host", "authorization", "cookie", "x-forwarded-for"];

impl Execs {
    /// Connects the caller with what `start` names and hands bytes on until either side ends.
    ///
    /// # Errors
    /// What the caller is to be told instead of the head of the runtime's answer.
    pub async fn stream<M>(&self, mut messages: M, pieces: &Pieces) -> Result<(), ExecError>
    where
        M: Stream<Item = Result<pb::StreamRequest, Status>> + Unpin + Send,
    {
        // Cancel-safe: with the caller everything goes that was begun for it. A URL that was not used expires.
        tokio::select! {
            end = self.connect(&mut messages, pieces) => end,
            () = pieces.closed() => Ok(()),
        }
    }

    async fn connect<M>(&self, messages: &mut M, pieces: &Pieces) -> Result<(), ExecError>
    where
        M: Stream<Item = Result<pb::StreamRequest, Status>> + Unpin + Send,
    {
        let start = first(messages).await?;
        let _place = self.streams.take(&start)?;
        let url = self.streams_of(&start).await?;
        let headers: Vec<(&str, &str)> = start
            .headers
            .iter()
            .filter(|header| !NOT_HANDED_ON.iter().any(|not| header.name.eq_ignore_ascii_case(not)))
            .map(|header| (header.name.as_str(), header.value.as_str()))
            .collect();
        let Answered { mut socket, head, rest } = dial::ask(&url, &start.method, &headers).await?;
        let told = pb::StreamHead {
            status: u32::from(head.status),
            headers: head
                .headers()
                .iter()
                .map(|(name, value)| pb::HttpHeader { name: name.clone(), value: value.clone() })
                .collect(),
        };
        if !piece(pieces, Told::Head(told)).await {
            return Ok(());
        }
        if head.status != 101 {
            let text = dial::what_it_says(&mut socket, rest, &head).await;
            piece(pieces, Told::Data(text.into_bytes())).await;
            return Ok(());
        }
        let (reader, writer) = socket.into_split();
        // Cancel-safe: when one direction has ended, nothing of the other is needed any more.
        tokio::select! {
            () = from_runtime(reader, rest, pieces) => Ok(()),
            end = to_runtime(writer, messages) => end,
        }
    }

    /// Asks the runtime for the address of the streams.
    async fn streams_of(&self, start: &pb::StreamStart) -> Result<StreamUrl, ExecError> {
        let named = |container: &str| pb::ExecStart {
            pod_uid: start.pod_uid.clone(),
            namespace: start.namespace.clone(),
            name: start.name.clone(),
            container: container.to_owned(),
            ..pb::ExecStart::default()
        };
        let mut runtime = self.cri.runtime();
        let url = match &start.what {
            Some(What::Exec(exec)) => {
                let container_id = self.find(&named(&exec.container)).await?;
                log(start, "runs a command in a container for whoever has asked over the network");
                let request = cri::ExecRequest {
                    container_id,
                    cmd: exec.command.clone(),
                    tty: exec.tty,
                    stdin: exec.stdin,
                    stdout: exec.stdout,
                    stderr: exec.stderr,
                };
                runtime.exec(self.cri.quick(request)).await.map(|answer| answer.into_inner().url)
            }
            Some(What::Attach(attach)) => {
                let container_id = self.find(&named(&attach.container)).await?;
                log(start, "connects whoever has asked over the network with a container");
                let request = cri::AttachRequest {
                    container_id,
                    stdin: attach.stdin,
                    tty: attach.tty,
                    stdout: attach.stdout,
                    stderr: attach.stderr,
                };
                runtime.attach(self.cri.quick(request)).await.map(|answer| answer.into_inner().url)
            }
            Some(What::PortForward(forward)) => {
                let pod_sandbox_id = self.sandbox(start).await?;
                log(start, "connects whoever has asked over the network with ports of a pod");
                let request = cri::PortForwardRequest { pod_sandbox_id, port: forward.ports.clone() };
                runtime.port_forward(self.cri.quick(request)).await.map(|answer| answer.into_inner().url)
            }
            None => return Err(ExecError::BadRequest("`start` does not say what to connect to".to_owned())),
        };
        Ok(StreamUrl::parse(&url.map_err(runtime_says)?)?)
    }

    /// The sandbox of the pod that runs; of several the newest.
    async fn sandbox(&self, start: &pb::StreamStart) -> Result<String, ExecError> {
        let wanted = super::selector(&start.pod_uid, &start.namespace, &start.name);
        let (sandboxes, _) = self.cri.list_labelled(wanted).await.map_err(runtime_says)?;
        let ready = i32::from(cri::PodSandboxState::SandboxReady);
        let newest =
            sandboxes.into_iter().filter(|sandbox| sandbox.state == ready).max_by_key(|s| s.created_at);
        Ok(newest.ok_or(NotThere::Pod)?.id)
    }
}

fn log(start: &pb::StreamStart, what: &str) {
    let container = match &start.what {
        Some(What::Exec(exec)) => exec.container.as_str(),
        Some(What::Attach(attach)) => attach.container.as_str(),
        Some(What::PortForward(_)) | None => "",
    };
    tracing::info!(
        namespace = start.namespace,
        pod = start.name,
        uid = start.pod_uid,
        container,
        user = start.user,
        "{what}"
    );
}

/// False: the caller has gone.
async fn piece(pieces: &Pieces, item: Told) -> bool {
    pieces.send(Ok(pb::StreamResponse { item: Some(item) })).await.is_ok()
}

/// The first message.
async fn first<M>(messages: &mut M) -> Result<pb::StreamStart, ExecError>
where
    M: Stream<Item = Result<pb::StreamRequest, Status>> + Unpin + Send,
{
    let bad = |text: &str| Err(ExecError::BadRequest(text.to_owned()));
    let message = match tokio::time::timeout(START_WITHIN, messages.next()).await {
        Ok(Some(message)) => message.map_err(ExecError::Caller)?,
        Ok(None) => return bad("the stream has ended before it said what to connect to"),
        Err(_) => return bad("nothing has come within 10 s that says what to connect to"),
    };
    let Some(Asked::Start(start)) = message.item else {
        return bad("the first message has to be `start`");
    };
    if !["GET", "POST"].contains(&start.method.as_str()) {
        return bad("`method` has to be GET or POST");
    }
    // A line break in one of them would be a header, or a request, of its own.
    let is_odd = |text: &str| text.chars().any(|c| c.is_control() && c != '\t');
    if let Some(odd) = start.headers.iter().find(|h| is_odd(&h.name) || is_odd(&h.value)) {
        return bad(&format!("the header {:?} has characters that none may have", odd.name));
    }
    wants_a_pod(&start.pod_uid, &start.namespace, &start.name)?;
    Ok(start)
}

/// Hands on what the runtime sends, until it has ended or the caller has gone.
async fn from_runtime(mut reader: OwnedReadHalf, mut read: BytesMut, pieces: &Pieces) {
    loop {
        if !read.is_empty() && !piece(pieces, Told::Data(read.split().to_vec())).await {
            return;
        }
        read.reserve(READ);
        match reader.read_buf(&mut read).await {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "the runtime's streaming server has broken a connection");
                return;
            }
        }
    }
}

/// Hands on what the caller sends, until it has ended or the runtime takes no more.
async fn to_runtime<M>(mut writer: OwnedWriteHalf, messages: &mut M) -> Result<(), ExecError>
where
    M: Stream<Item = Result<pb::StreamRequest, Status>> + Unpin + Send,
{
    while let Some(message) = messages.next().await {
        match message.map_err(ExecError::Caller)?.item {
            // How it ended may still be read.
            Some(Asked::Data(bytes)) if writer.write_all(&bytes).await.is_err() => {
                return std::future::pending().await;
            }
            Some(Asked::Data(_)) => {}
            Some(Asked::Start(_)) => {
                return Err(ExecError::BadRequest("`start` has come a second time".to_owned()));
            }
            // What a newer caller has and this version does not know.
            None => {}
        }
    }
    Ok(())
}
