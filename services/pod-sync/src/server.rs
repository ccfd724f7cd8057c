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

use crate::agent::Agent;
use crate::desires::pod_ref;
use crate::documents::Document;
use crate::evictions::{self, Order};

/// `keelson.pod_sync.v1.PodSync`.
#[derive(Debug, Clone)]
pub struct PodSyncServer {
    /// The agent.
    pub agent: Arc<Agent>,
}

type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl PodSyncServer {
    fn find(&self, namespace: &str, name: &str, uid: &str) -> Result<Arc<Document>, Status> {
        let all = self.agent.documents.snapshot();
        let found = all.into_iter().map(|(_, d)| d).find(|d| {
            let meta = &d.wanted.pod.metadata;
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
        let documents = self.agent.documents.snapshot();
        Ok(Response::new(Box::pin(stream::iter(documents).map(|(_, document)| Ok(document.message())))))
    }

    async fn watch_pods(
        &self,
        _: Request<pb::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        let stream = self.agent.documents.subscribe().into_stream(|item| {
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
        let pod = &document.wanted.pod;
        let at = self.agent.moment();
        let told = self.agent.with(&pod.metadata.uid, |entry| entry.ledger.explain(&at));
        let (steps, mut summary) = told.unwrap_or_default();
        let status = &document.status;
        if status.phase == "Failed" && !status.reason.is_empty() {
            // What has ended waits for nothing, but somebody may wonder why it has.
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
        let meta = &document.wanted.pod.metadata;
        if request.grace_period_seconds.is_some_and(|seconds| seconds < 0) {
            let text = "grace_period_seconds is negative; leave it out for the pod's own grace";
            return Err(error(Code::InvalidArgument, "GRACE_NEGATIVE", text));
        }
        let order = Order::by_hand(request.message, request.grace_period_seconds);
        if evictions::evict_by_hand(&self.agent, &meta.uid, &order) {
            return Ok(Response::new(pb::EvictPodResponse {}));
        }
        let text = format!("the pod {}/{} has ended already, nothing of it runs", meta.namespace, meta.name);
        Err(error(Code::FailedPrecondition, "POD_HAS_ENDED", text))
    }

    async fn retry_pod(
        &self,
        request: Request<pb::RetryPodRequest>,
    ) -> Result<Response<pb::RetryPodResponse>, Status> {
        let request = request.into_inner();
        let document = self.find(&request.namespace, &request.name, "")?;
        self.agent.retry(&document.wanted.pod.metadata.uid);
        Ok(Response::new(pb::RetryPodResponse {}))
    }
}
