//! The gRPC side of runtime-shim.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::{Stream, StreamExt as _};
use keelson_proto::keelson::common::v1::{PodRef, SyncAck, Synced};
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::runtime_server::Runtime;
use keelson_service_kit::WatchItem;
use keelson_service_kit::status::{chain, error};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::collect::Collector;
use crate::files::FileError;
use crate::logs;
use crate::observe::{Observer, WatchKey, WatchValue};
use crate::unused::{CollectionError, Freed};

/// `keelson.runtime.v1.Runtime`.
#[derive(Debug, Clone)]
pub struct RuntimeServer {
    /// Everything it works with.
    pub collector: Collector,
}

type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl RuntimeServer {
    fn observer(&self) -> &Observer {
        &self.collector.observer
    }

    async fn pod(&self, uid: &str) -> Result<Arc<pb::RuntimePod>, Status> {
        self.observer().read(uid).await.map_err(|status| {
            error(
                Code::Unavailable,
                "RUNTIME_UNAVAILABLE",
                format!("cannot read pod {uid} from the container runtime: {}", status.message()),
            )
        })
    }
}

fn watch_message(item: WatchItem<WatchKey, WatchValue>) -> Option<pb::WatchPodsResponse> {
    use pb::watch_pods_response::Item;
    let item = match item {
        WatchItem::Set(_, WatchValue::State(state)) => Item::State(*state),
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

    async fn sync(
        &self,
        request: Request<Streaming<pb::SyncRequest>>,
    ) -> Result<Response<Self::SyncStream>, Status> {
        let desires = self.collector.desires.clone();
        let number = desires.begin();
        let mut messages = request.into_inner();
        let (acks, stream) = mpsc::channel(4);
        tokio::spawn(async move {
            while let Ok(Some(message)) = messages.message().await {
                let Some(item) = message.item else { continue };
                let ended = match desires.take(number, item) {
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
        _: Request<pb::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        let stream = self.observer().hub().subscribe().into_stream(watch_message);
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
        tokio::spawn(tracing::Instrument::instrument(
            async move { images.ensure(request, progress).await },
            span,
        ));
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
            .ok_or_else(|| error(Code::InvalidArgument, "POD_MISSING", "pod is missing"))?;
        let files = self.collector.files.clone();
        let written = tokio::task::spawn_blocking(move || files.write(&pod, &request))
            .await
            .map_err(|e| error(Code::Internal, "FILES", e.to_string()))?;
        written.map(Response::new).map_err(|e| file_status(&e))
    }

    async fn read_logs(
        &self,
        request: Request<pb::ReadLogsRequest>,
    ) -> Result<Response<Self::ReadLogsStream>, Status> {
        let request = request.into_inner();
        // The runtime may be away while the log is there: what was observed last will do.
        let pod = match self.observer().cached(&request.pod_uid) {
            Some(pod) => pod,
            None => self.pod(&request.pod_uid).await?,
        };
        let source = logs::source_of(&pod, &request)
            .map_err(|text| error(Code::FailedPrecondition, "NO_LOG", text))?;
        let (out, stream) = mpsc::channel(4);
        let (files, observer) = (self.collector.files.clone(), self.observer().clone());
        tokio::spawn(logs::stream(files, observer, source, request, out));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn collect_garbage(
        &self,
        request: Request<pb::CollectGarbageRequest>,
    ) -> Result<Response<pb::CollectGarbageResponse>, Status> {
        let (containers_removed, sandboxes_removed) = self.collector.collect().await?;
        // After the containers, which hold their images.
        let freed = if request.into_inner().unused_images {
            self.collector.unused.collect_all().await.map_err(|e| collection_status(&e))?
        } else {
            Freed::default()
        };
        Ok(Response::new(pb::CollectGarbageResponse {
            containers_removed,
            sandboxes_removed,
            images_removed: freed.images,
            image_bytes_freed: freed.bytes,
        }))
    }
}

fn collection_status(failure: &CollectionError) -> Status {
    let (code, reason) = match failure {
        CollectionError::Runtime(_) => (Code::Unavailable, "RUNTIME_UNAVAILABLE"),
        CollectionError::Disk(_) => (Code::Internal, "DISK"),
        CollectionError::TooLittle { .. } => (Code::ResourceExhausted, "TOO_LITTLE"),
    };
    error(code, reason, chain(failure))
}

fn file_status(failure: &FileError) -> Status {
    let (code, reason) = match failure {
        FileError::Folder { .. } => (Code::FailedPrecondition, "FOLDER"),
        FileError::Write { .. } => (Code::FailedPrecondition, "WRITE"),
        FileError::BadName(_) => (Code::InvalidArgument, "BAD_NAME"),
    };
    error(code, reason, chain(failure))
}
