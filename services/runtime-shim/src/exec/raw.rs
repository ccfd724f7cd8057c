//! Streams that are passed through without interpretation between the caller and the runtime's streaming server.

use bytes::BytesMut;
use futures_util::{Stream, StreamExt as _};
use k8s_cri::v1 as cri;
use keelson_proto::keelson::runtime::v1 as pb;
use pb::stream_request::Item as RequestItem;
use pb::stream_response::Item as ResponseItem;
use pb::stream_start::What;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tonic::Status;

use crate::cri_objects::labels;

use super::dial::{self, HttpResponse, StreamUrl};
use super::{ExecError, Execs, START_TIMEOUT, TargetError, require_pod, runtime_error};

/// Responses to the caller. A small channel, so that the runtime waits for a slow caller instead of using memory.
pub type StreamResponses = mpsc::Sender<Result<pb::StreamResponse, Status>>;

/// Buffer size of one read.
const READ: usize = 32 << 10;
/// Headers between the client and the server that took its request (identity and address); not passed on.
const STRIPPED_HEADERS: [&str; 4] = ["host", "authorization", "cookie", "x-forwarded-for"];

impl Execs {
    /// Connects the caller to the target of its `start` message and passes bytes on until either side ends.
    ///
    /// # Errors
    /// The error to return to the caller instead of the head of the runtime's response.
    pub async fn stream<M>(&self, mut messages: M, responses: &StreamResponses) -> Result<(), ExecError>
    where
        M: Stream<Item = Result<pb::StreamRequest, Status>> + Unpin + Send,
    {
        // Cancel-safe: when the caller leaves, everything that was started for it is dropped. An unused URL expires.
        tokio::select! {
            end = self.connect(&mut messages, responses) => end,
            () = responses.closed() => Ok(()),
        }
    }

    async fn connect<M>(&self, messages: &mut M, responses: &StreamResponses) -> Result<(), ExecError>
    where
        M: Stream<Item = Result<pb::StreamRequest, Status>> + Unpin + Send,
    {
        let start = read_start(messages).await?;
        let _place = self.streams.take(&start)?;
        let url = self.passthrough_url(&start).await?;
        let headers: Vec<(&str, &str)> = start
            .headers
            .iter()
            .filter(|header| !STRIPPED_HEADERS.iter().any(|not| header.name.eq_ignore_ascii_case(not)))
            .map(|header| (header.name.as_str(), header.value.as_str()))
            .collect();
        let HttpResponse { mut socket, head, rest } =
            dial::send_request(&url, &start.method, &headers).await?;
        let response_head = pb::StreamHead {
            status: u32::from(head.status),
            headers: head
                .headers()
                .iter()
                .map(|(name, value)| pb::HttpHeader { name: name.clone(), value: value.clone() })
                .collect(),
        };
        if !send_response(responses, ResponseItem::Head(response_head)).await {
            return Ok(());
        }
        if head.status != 101 {
            let text = dial::read_body_text(&mut socket, rest, &head).await;
            send_response(responses, ResponseItem::Data(text.into_bytes())).await;
            return Ok(());
        }
        let (reader, writer) = socket.into_split();
        // Cancel-safe: when one direction has ended, the other is not needed any more.
        tokio::select! {
            () = from_runtime(reader, rest, responses) => Ok(()),
            end = to_runtime(writer, messages) => end,
        }
    }

    /// Requests the URL of the streams from the runtime.
    async fn passthrough_url(&self, start: &pb::StreamStart) -> Result<StreamUrl, ExecError> {
        let target = |container: &str| pb::ExecStart {
            pod_uid: start.pod_uid.clone(),
            namespace: start.namespace.clone(),
            name: start.name.clone(),
            container: container.to_owned(),
            ..pb::ExecStart::default()
        };
        let mut runtime = self.cri.runtime();
        let url = match &start.what {
            Some(What::Exec(exec)) => {
                let container_id = self.find_container(&target(&exec.container)).await?;
                log(start, "running a command in a container for a client of the kubelet API");
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
                let container_id = self.find_container(&target(&attach.container)).await?;
                log(start, "attaching a client of the kubelet API to a container");
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
                let pod_sandbox_id = self.find_sandbox(start).await?;
                log(start, "forwarding ports of a pod to a client of the kubelet API");
                let request = cri::PortForwardRequest { pod_sandbox_id, port: forward.ports.clone() };
                runtime.port_forward(self.cri.quick(request)).await.map(|answer| answer.into_inner().url)
            }
            None => return Err(ExecError::BadRequest("`start` does not say what to connect to".to_owned())),
        };
        Ok(StreamUrl::parse(&url.map_err(runtime_error)?)?)
    }

    /// The newest ready sandbox of the pod.
    async fn find_sandbox(&self, start: &pb::StreamStart) -> Result<String, ExecError> {
        let wanted = labels::selector(&start.pod_uid, &start.namespace, &start.name);
        let listed = self.cri.list_labelled(wanted).await.map_err(runtime_error)?;
        let ready = listed.sandboxes.into_iter().filter(|sandbox| sandbox.ready);
        let newest = ready.max_by_key(|sandbox| sandbox.created_unix_nanos);
        Ok(newest.ok_or(TargetError::PodNotFound)?.id)
    }
}

fn log(start: &pb::StreamStart, message: &str) {
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
        "{message}"
    );
}

/// Sends an item to the caller; false if the caller has left.
async fn send_response(responses: &StreamResponses, item: ResponseItem) -> bool {
    responses.send(Ok(pb::StreamResponse { item: Some(item) })).await.is_ok()
}

/// Reads the first message.
async fn read_start<M>(messages: &mut M) -> Result<pb::StreamStart, ExecError>
where
    M: Stream<Item = Result<pb::StreamRequest, Status>> + Unpin + Send,
{
    let bad = |text: &str| Err(ExecError::BadRequest(text.to_owned()));
    let message = match tokio::time::timeout(START_TIMEOUT, messages.next()).await {
        Ok(Some(message)) => message.map_err(ExecError::Caller)?,
        Ok(None) => return bad("the stream ended before its first message"),
        Err(_) => return bad("the first message did not arrive within 10 s"),
    };
    let Some(RequestItem::Start(start)) = message.item else {
        return bad("the first message must be `start`");
    };
    if !["GET", "POST"].contains(&start.method.as_str()) {
        return bad("`method` must be GET or POST");
    }
    // A line break in one of them would inject another header or request.
    let is_invalid = |text: &str| text.chars().any(|c| c.is_control() && c != '\t');
    if let Some(header) = start.headers.iter().find(|h| is_invalid(&h.name) || is_invalid(&h.value)) {
        return bad(&format!("the header {:?} contains control characters", header.name));
    }
    require_pod(&start.pod_uid, &start.namespace, &start.name)?;
    Ok(start)
}

/// Passes on what the runtime sends, until it ends the stream or the caller has left.
async fn from_runtime(mut reader: OwnedReadHalf, mut read: BytesMut, responses: &StreamResponses) {
    loop {
        if !read.is_empty() && !send_response(responses, ResponseItem::Data(read.split().to_vec())).await {
            return;
        }
        read.reserve(READ);
        match reader.read_buf(&mut read).await {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "the runtime's streaming server broke a connection");
                return;
            }
        }
    }
}

/// Passes on what the caller sends, until it ends the stream or the runtime accepts no more.
async fn to_runtime<M>(mut writer: OwnedWriteHalf, messages: &mut M) -> Result<(), ExecError>
where
    M: Stream<Item = Result<pb::StreamRequest, Status>> + Unpin + Send,
{
    while let Some(message) = messages.next().await {
        match message.map_err(ExecError::Caller)?.item {
            // The runtime's last output may still be read.
            Some(RequestItem::Data(bytes)) if writer.write_all(&bytes).await.is_err() => {
                return std::future::pending().await;
            }
            Some(RequestItem::Data(_)) => {}
            Some(RequestItem::Start(_)) => {
                return Err(ExecError::BadRequest("`start` has come a second time".to_owned()));
            }
            // A kind of message from a newer caller that this version does not know.
            None => {}
        }
    }
    Ok(())
}
