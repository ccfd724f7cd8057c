//! The gRPC side of pod-sync.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::{Stream, StreamExt as _, stream};
use keelson_pod_sync_core::explain::Step;
use keelson_proto::keelson::common::v1::Synced;
use keelson_proto::keelson::pod_sync::v1 as pb;
use keelson_proto::keelson::pod_sync::v1::pod_sync_server::PodSync;
use keelson_proto::keelson::pod_sync::v1::watch_pods_response::Item;
use keelson_service_kit::WatchItem;
use keelson_service_kit::status::error;
use tonic::{Code, Request, Response, Status};

use crate::effects::Effects;
use crate::inputs::evictions;
use crate::inputs::evictions::Order;
use crate::publish::document::Document;
use crate::state::desired_state::pod_ref;

/// `keelson.pod_sync.v1.PodSync`.
#[derive(Debug, Clone)]
pub struct PodSyncServer {
    /// The pods and everything that acts on them.
    pub effects: Arc<Effects>,
}

type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl PodSyncServer {
    fn find(&self, namespace: &str, name: &str, uid: &str) -> Result<Arc<Document>, Status> {
        let all = self.effects.publisher.documents.snapshot();
        let found = all.into_iter().map(|(_, d)| d).find(|d| {
            let meta = &d.desired.pod.metadata;
            if uid.is_empty() { meta.namespace == namespace && meta.name == name } else { meta.uid == uid }
        });
        found.ok_or_else(|| {
            let what = if uid.is_empty() { format!("{namespace}/{name}") } else { format!("with UID {uid}") };
            error(
                Code::NotFound,
                "POD_UNKNOWN",
                format!("there is no pod {what} on this node; `keelson get pods -A` lists them, `keelson get sources` shows manifests that are refused"),
            )
        })
    }
}

fn step_message(step: Step) -> pb::Step {
    pb::Step {
        name: step.name.as_str().to_owned(),
        state: step.cause.state.as_str().to_owned(),
        subject: step.subject,
        message: step.cause.message,
        owner: step.cause.owner.into_owned(),
        since_unix_nanos: step.since_unix_nanos,
        next_retry_unix_nanos: step.cause.next_retry_unix_nanos,
    }
}

#[tonic::async_trait]
impl PodSync for PodSyncServer {
    type ListPodsStream = Boxed<pb::PodDocument>;
    type WatchPodsStream = Boxed<pb::WatchPodsResponse>;

    async fn list_pods(
        &self,
        _: Request<pb::ListPodsRequest>,
    ) -> Result<Response<Self::ListPodsStream>, Status> {
        let documents = self.effects.publisher.documents.snapshot();
        Ok(Response::new(Box::pin(stream::iter(documents).map(|(_, document)| Ok(document.message())))))
    }

    async fn watch_pods(
        &self,
        _: Request<pb::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        let stream = self.effects.publisher.documents.subscribe().into_stream(|item| {
            let item = match item {
                WatchItem::Set(_, document) => Item::Pod(document.message()),
                WatchItem::Gone(uid) => Item::GoneUid(uid),
                WatchItem::Synced => Item::Synced(Synced {}),
            };
            Ok(pb::WatchPodsResponse { item: Some(item) })
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn explain_pod(
        &self,
        request: Request<pb::ExplainPodRequest>,
    ) -> Result<Response<pb::ExplainPodResponse>, Status> {
        let request = request.into_inner();
        let document = self.find(&request.namespace, &request.name, &request.uid)?;
        let pod = &document.desired.pod;
        let at = self.effects.registry.moment();
        let explained = self.effects.registry.with(&pod.metadata.uid, |state| state.steps.explain(&at));
        let (steps, mut summary) = explained.unwrap_or_default();
        let status = &document.status;
        if status.phase == "Failed" && !status.reason.is_empty() {
            // A pod that has ended waits for nothing; the summary says why it has ended.
            summary = format!("{summary} It has failed, {}: {}", status.reason, status.message.trim_end());
        }
        Ok(Response::new(pb::ExplainPodResponse {
            pod: Some(pod_ref(pod)),
            phase: document.status.phase.clone(),
            steps: steps.into_iter().map(step_message).collect(),
            summary,
        }))
    }

    async fn evict_pod(
        &self,
        request: Request<pb::EvictPodRequest>,
    ) -> Result<Response<pb::EvictPodResponse>, Status> {
        let request = request.into_inner();
        let document = self.find(&request.namespace, &request.name, &request.uid)?;
        let meta = &document.desired.pod.metadata;
        if request.grace_period_seconds.is_some_and(|seconds| seconds < 0) {
            let text = "grace_period_seconds is negative; leave it out for the pod's own grace";
            return Err(error(Code::InvalidArgument, "GRACE_NEGATIVE", text));
        }
        let order = Order::by_hand(request.message, request.grace_period_seconds);
        if evictions::evict_by_hand(&self.effects, &meta.uid, &order) {
            return Ok(Response::new(pb::EvictPodResponse {}));
        }
        let text =
            format!("the pod {}/{} has already ended and nothing of it runs", meta.namespace, meta.name);
        Err(error(Code::FailedPrecondition, "POD_HAS_ENDED", text))
    }

    async fn retry_pod(
        &self,
        request: Request<pb::RetryPodRequest>,
    ) -> Result<Response<pb::RetryPodResponse>, Status> {
        let request = request.into_inner();
        let document = self.find(&request.namespace, &request.name, "")?;
        self.effects.registry.retry(&document.desired.pod.metadata.uid);
        Ok(Response::new(pb::RetryPodResponse {}))
    }
}
