//! The gRPC server of runtime-shim.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::{Stream, StreamExt as _};
use keelson_proto::keelson::common::v1::{PodRef, SyncAck, Synced};
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::runtime_server::Runtime;
use keelson_runtime_shim_core::exec::TargetError;
use keelson_service_kit::status::{chain, error as error_status};
use keelson_service_kit::{PeerIdentity, WatchItem};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::checkpoint::{CheckpointError, checkpoint};
use crate::container_gc::Collector;
use crate::exec::{DialError, ExecError, Execs, RelayError, SetupError};
use crate::files::FileError;
use crate::filesystem::Filesystems;
use crate::image_gc::{Freed, ImageGcError};
use crate::image_list;
use crate::logs;
use crate::node_logs::{NodeLogError, NodeLogs};
use crate::observe::{Observer, WatchKey, WatchValue};

/// `keelson.runtime.v1.Runtime`.
#[derive(Debug, Clone)]
pub struct RuntimeServer {
    /// The collector, which has the clients of most RPCs.
    collector: Collector,
    /// Runs commands in containers.
    execs: Execs,
    /// Usage of file systems.
    filesystems: Filesystems,
    /// Reads the logs of the node.
    node_logs: NodeLogs,
}

type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl RuntimeServer {
    /// A server that reads the logs of this node.
    pub fn new(collector: Collector, execs: Execs, filesystems: Filesystems) -> Self {
        Self { collector, execs, filesystems, node_logs: NodeLogs::default() }
    }

    fn observer(&self) -> &Observer {
        &self.collector.observer
    }

    async fn pod(&self, uid: &str) -> Result<Arc<pb::RuntimePod>, Status> {
        self.observer().read(uid).await.map_err(|status| {
            error_status(
                Code::Unavailable,
                "RUNTIME_UNAVAILABLE",
                format!("cannot read pod {uid} from the container runtime: {}", status.message()),
            )
        })
    }
}

fn watch_message(item: WatchItem<WatchKey, WatchValue>, state_only: bool) -> Option<pb::WatchPodsResponse> {
    use pb::watch_pods_response::Item;
    let item = match item {
        WatchItem::Set(_, WatchValue::State(state)) => Item::State(*state),
        WatchItem::Set(..) | WatchItem::Gone(_) if state_only => return None,
        WatchItem::Set(_, WatchValue::Pod(pod)) => Item::Pod((*pod).clone()),
        WatchItem::Gone(WatchKey::Pod(uid)) => Item::GoneUid(uid),
        WatchItem::Gone(WatchKey::State) => return None,
        WatchItem::Synced => Item::Synced(Synced {}),
    };
    Some(pb::WatchPodsResponse { item: Some(item) })
}

#[tonic::async_trait]
impl Runtime for RuntimeServer {
    type SyncStream = ReceiverStream<Result<SyncAck, Status>>;
    type WatchPodsStream = Boxed<pb::WatchPodsResponse>;
    type EnsureImageStream = ReceiverStream<Result<pb::EnsureImageResponse, Status>>;
    type ReadLogsStream = ReceiverStream<Result<pb::ReadLogsResponse, Status>>;
    type ReadNodeLogsStream = ReceiverStream<Result<pb::ReadNodeLogsResponse, Status>>;
    type ExecStream = ReceiverStream<Result<pb::ExecResponse, Status>>;
    type StreamStream = ReceiverStream<Result<pb::StreamResponse, Status>>;

    async fn sync(
        &self,
        request: Request<Streaming<pb::SyncRequest>>,
    ) -> Result<Response<Self::SyncStream>, Status> {
        let desired = self.collector.desired.clone();
        let number = desired.begin();
        let mut messages = request.into_inner();
        let (acks, stream) = mpsc::channel(4);
        keelson_service_kit::spawn("sync stream", async move {
            while let Ok(Some(message)) = messages.message().await {
                let Some(item) = message.item else { continue };
                let ended = match desired.apply_message(number, item) {
                    Ok(Some(epoch)) => acks.send(Ok(SyncAck { epoch })).await.is_err(),
                    Ok(None) => false,
                    Err(status) => {
                        let _ = acks.send(Err(status)).await;
                        true
                    }
                };
                if ended {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn watch_pods(
        &self,
        request: Request<pb::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        let state_only = request.into_inner().state_only;
        let stream = self.observer().hub().subscribe().into_stream(move |i| watch_message(i, state_only));
        Ok(Response::new(Box::pin(stream.filter_map(|m| async move { m.map(Ok) }))))
    }

    async fn get_pod(
        &self,
        request: Request<pb::GetPodRequest>,
    ) -> Result<Response<pb::GetPodResponse>, Status> {
        let pod = self.pod(&request.into_inner().uid).await?;
        Ok(Response::new(pb::GetPodResponse { pod: Some((*pod).clone()) }))
    }

    async fn ensure_image(
        &self,
        request: Request<pb::EnsureImageRequest>,
    ) -> Result<Response<Self::EnsureImageStream>, Status> {
        let (progress, stream) = mpsc::channel(4);
        let images = self.collector.images.clone();
        let request = request.into_inner();
        let span = tracing::info_span!(target: keelson_telemetry::TRACE_TARGET, "ensure image", image = request.image);
        keelson_service_kit::spawn(
            "pull an image",
            tracing::Instrument::instrument(async move { images.ensure(request, progress).await }, span),
        );
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn write_container_files(
        &self,
        request: Request<pb::WriteContainerFilesRequest>,
    ) -> Result<Response<pb::WriteContainerFilesResponse>, Status> {
        let request = request.into_inner();
        let pod: PodRef = request
            .pod
            .clone()
            .ok_or_else(|| error_status(Code::InvalidArgument, "POD_MISSING", "pod is missing"))?;
        let files = self.collector.files.clone();
        let written = tokio::task::spawn_blocking(move || files.write(&pod, &request))
            .await
            .map_err(|e| error_status(Code::Internal, "FILES", e.to_string()))?;
        written.map(Response::new).map_err(|e| file_status(&e))
    }

    async fn read_logs(
        &self,
        request: Request<pb::ReadLogsRequest>,
    ) -> Result<Response<Self::ReadLogsStream>, Status> {
        let request = request.into_inner();
        // The runtime may be down while the log exists: the last observation is sufficient.
        let pod = match self.observer().cached(&request.pod_uid) {
            Some(pod) => pod,
            None => self.pod(&request.pod_uid).await?,
        };
        let source = logs::source_of(&pod, &request)
            .map_err(|text| error_status(Code::FailedPrecondition, "NO_LOG", text))?;
        let (out, stream) = mpsc::channel(4);
        let (files, observer) = (self.collector.files.clone(), self.observer().clone());
        keelson_service_kit::spawn("read a log", logs::stream(files, observer, source, request, out));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn read_node_logs(
        &self,
        request: Request<pb::ReadNodeLogsRequest>,
    ) -> Result<Response<Self::ReadNodeLogsStream>, Status> {
        let stream = self.node_logs.start(request.into_inner()).await.map_err(|e| node_log_status(&e))?;
        Ok(Response::new(stream))
    }

    async fn checkpoint_container(
        &self,
        request: Request<pb::CheckpointContainerRequest>,
    ) -> Result<Response<pb::CheckpointContainerResponse>, Status> {
        let root = &self.collector.files.paths.root_dir;
        let written = checkpoint(&self.collector.cri, root, &request.into_inner()).await;
        let path = written.map_err(|error| checkpoint_status(&error))?;
        Ok(Response::new(pb::CheckpointContainerResponse { path }))
    }

    async fn list_images(
        &self,
        _: Request<pb::ListImagesRequest>,
    ) -> Result<Response<pb::ListImagesResponse>, Status> {
        let images = image_list::list(&self.collector.cri).await.map_err(|status| {
            let text = format!("the container runtime does not list its images: {}", status.message());
            error_status(Code::Unavailable, "RUNTIME_UNAVAILABLE", text)
        })?;
        Ok(Response::new(pb::ListImagesResponse { images }))
    }

    async fn exec(
        &self,
        request: Request<Streaming<pb::ExecRequest>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        let uid = request.extensions().get::<PeerIdentity>().map(|peer| peer.uid);
        let (answers, stream) = mpsc::channel(4);
        let execs = self.execs.clone();
        keelson_service_kit::spawn("exec", async move {
            if let Err(error) = execs.serve(request.into_inner(), uid, &answers).await {
                let _ = answers.send(Err(exec_status(&error))).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn stream(
        &self,
        request: Request<Streaming<pb::StreamRequest>>,
    ) -> Result<Response<Self::StreamStream>, Status> {
        let (pieces, stream) = mpsc::channel(4);
        let execs = self.execs.clone();
        keelson_service_kit::spawn("exec stream", async move {
            if let Err(error) = execs.stream(request.into_inner(), &pieces).await {
                let _ = pieces.send(Err(exec_status(&error))).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn filesystem_stats(
        &self,
        request: Request<pb::FilesystemStatsRequest>,
    ) -> Result<Response<pb::FilesystemStatsResponse>, Status> {
        let stats = self.filesystems.stats(request.into_inner().filesystems_only);
        let unknown = || {
            let text =
                "the container runtime has not reported its image file system yet; see the service's health";
            error_status(Code::Unavailable, "RUNTIME_UNAVAILABLE", text)
        };
        Ok(Response::new(stats.ok_or_else(unknown)?))
    }

    async fn collect_garbage(
        &self,
        request: Request<pb::CollectGarbageRequest>,
    ) -> Result<Response<pb::CollectGarbageResponse>, Status> {
        let request = request.into_inner();
        let (containers_removed, sandboxes_removed) = if request.ended_pods {
            self.collector.reclaim_space().await?
        } else {
            self.collector.collect().await?
        };
        // After the containers, because containers keep their images from being removed.
        let image_collector = &self.collector.image_collector;
        let freed = match (request.unused_images, request.free_image_bytes) {
            (true, _) => image_collector.collect_all().await.map_err(|e| collection_status(&e))?,
            (false, 0) => Freed::default(),
            (false, bytes) => image_collector.free_bytes(bytes).await.map_err(|e| collection_status(&e))?,
        };
        Ok(Response::new(pb::CollectGarbageResponse {
            containers_removed,
            sandboxes_removed,
            images_removed: freed.images,
            image_bytes_freed: freed.bytes,
        }))
    }
}

fn collection_status(error: &ImageGcError) -> Status {
    let (code, reason) = match error {
        ImageGcError::Runtime(_) => (Code::Unavailable, "RUNTIME_UNAVAILABLE"),
        ImageGcError::Disk(_) => (Code::Internal, "DISK"),
        ImageGcError::TooLittleFreed { .. } => (Code::ResourceExhausted, "TOO_LITTLE"),
    };
    error_status(code, reason, chain(error))
}

/// The status of an exec without an exit code; the proto lists the codes and reasons.
fn exec_status(error: &ExecError) -> Status {
    let (code, reason) = match error {
        ExecError::BadRequest(_) | ExecError::Caller(_) => (Code::InvalidArgument, "BAD_REQUEST"),
        ExecError::TooMany => (Code::ResourceExhausted, "TOO_MANY_EXECS"),
        ExecError::NoFreeStream(_) => (Code::ResourceExhausted, "TOO_MANY_STREAMS"),
        ExecError::Target(TargetError::PodNotFound) => (Code::NotFound, "POD_NOT_FOUND"),
        ExecError::Target(TargetError::ContainerNotFound { .. }) => (Code::NotFound, "CONTAINER_NOT_FOUND"),
        ExecError::Unavailable(_) => (Code::Unavailable, "RUNTIME_UNAVAILABLE"),
        ExecError::Refused(status) => match status.code() {
            code @ (Code::NotFound | Code::ResourceExhausted) => (code, "RUNTIME_REFUSED"),
            _ => (Code::Unknown, "RUNTIME_REFUSED"),
        },
        ExecError::Dial(dial) => dial_status(dial),
        ExecError::Setup(setup) => setup_status(setup),
        ExecError::Relay(relay) => match relay {
            RelayError::BadRequest(_) | RelayError::Caller(_) => (Code::InvalidArgument, "BAD_REQUEST"),
            RelayError::Lost { .. } => (Code::Unavailable, "RUNTIME_LOST"),
            RelayError::Failed(_) | RelayError::Unclear(_) => (Code::Unknown, "COMMAND_FAILED"),
        },
    };
    error_status(code, reason, chain(error))
}

const STREAMS_UNAVAILABLE: (Code, &str) = (Code::Unavailable, "RUNTIME_UNAVAILABLE");
const STREAMS_UNUSABLE: (Code, &str) = (Code::FailedPrecondition, "STREAMS_UNUSABLE");

fn dial_status(error: &DialError) -> (Code, &'static str) {
    match error {
        DialError::Connect { .. } | DialError::Broken { .. } => STREAMS_UNAVAILABLE,
        DialError::NoAddress
        | DialError::Tls
        | DialError::NotHttp { .. }
        | DialError::Refused { .. }
        | DialError::OtherProtocol { .. } => STREAMS_UNUSABLE,
    }
}

fn setup_status(error: &SetupError) -> (Code, &'static str) {
    match error {
        SetupError::Read(_) | SetupError::Write(_) | SetupError::Slow => STREAMS_UNAVAILABLE,
        SetupError::Stream(_) | SetupError::Early => STREAMS_UNUSABLE,
    }
}

/// The status of a request for a log of the node; the proto lists the codes and reasons.
fn node_log_status(error: &NodeLogError) -> Status {
    let (code, reason) = match error {
        NodeLogError::NotFound { .. } => (Code::NotFound, "LOG_NOT_FOUND"),
        NodeLogError::Refused { .. } => (Code::PermissionDenied, "LOG_REFUSED"),
        NodeLogError::Range(_) => (Code::OutOfRange, "RANGE"),
        NodeLogError::Empty | NodeLogError::Query(_) => (Code::InvalidArgument, "BAD_REQUEST"),
        NodeLogError::TooMany => (Code::ResourceExhausted, "TOO_MANY_READERS"),
        NodeLogError::Read { .. } | NodeLogError::Lost(_) => (Code::Internal, "READ"),
    };
    error_status(code, reason, chain(error))
}

fn checkpoint_status(error: &CheckpointError) -> Status {
    let (code, reason) = match error {
        CheckpointError::Timeout | CheckpointError::Name(_) => (Code::InvalidArgument, "BAD_REQUEST"),
        CheckpointError::Target(TargetError::PodNotFound) => (Code::NotFound, "POD_NOT_FOUND"),
        CheckpointError::Target(TargetError::ContainerNotFound { .. }) => {
            (Code::NotFound, "CONTAINER_NOT_FOUND")
        }
        CheckpointError::Folder { .. } => (Code::Internal, "FOLDER"),
        CheckpointError::Runtime(_) => (Code::FailedPrecondition, "RUNTIME_REFUSED"),
    };
    error_status(code, reason, chain(error))
}

fn file_status(error: &FileError) -> Status {
    let (code, reason) = match error {
        FileError::Folder { .. } => (Code::FailedPrecondition, "FOLDER"),
        FileError::Write { .. } => (Code::FailedPrecondition, "WRITE"),
        FileError::BadName(_) => (Code::InvalidArgument, "BAD_NAME"),
    };
    error_status(code, reason, chain(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watch_with_state_only_has_no_pods() {
        use pb::watch_pods_response::Item;
        let shown = |item, state_only| watch_message(item, state_only).and_then(|message| message.item);
        let state = || WatchItem::Set(WatchKey::State, WatchValue::State(Box::default()));
        let pod = || WatchItem::Set(WatchKey::Pod("u".into()), WatchValue::Pod(Arc::default()));
        for state_only in [false, true] {
            assert!(matches!(shown(state(), state_only), Some(Item::State(_))));
            assert!(matches!(shown(WatchItem::Synced, state_only), Some(Item::Synced(_))));
            assert!(shown(WatchItem::Gone(WatchKey::State), state_only).is_none());
            assert_eq!(shown(pod(), state_only).is_some(), !state_only);
            assert_eq!(shown(WatchItem::Gone(WatchKey::Pod("u".into())), state_only).is_some(), !state_only);
        }
    }
}
