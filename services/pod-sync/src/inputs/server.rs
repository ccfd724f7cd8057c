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
use crate::publish::document::{Document, SentPods};
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
        Ok(Response::new(Box::pin(
            stream::iter(documents).map(|(_, document)| Ok(document.complete_message())),
        )))
    }

    async fn watch_pods(
        &self,
        request: Request<pb::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        let separate_status = request.into_inner().separate_status;
        let mut sent = SentPods::default();
        let stream = self.effects.publisher.documents.subscribe().into_stream(move |item| {
            let item = match item {
                WatchItem::Set(_, document) if separate_status => Item::Pod(sent.message(&document)),
                WatchItem::Set(_, document) => Item::Pod(document.complete_message()),
                WatchItem::Gone(uid) => {
                    sent.forget(&uid);
                    Item::GoneUid(uid)
                }
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
        let explained = self.effects.registry.explain(&pod.metadata.uid);
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

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use keelson_config::{Config, ServiceName};
    use keelson_pod_sync_core::worker::UpdateKind;
    use keelson_service_kit::Context;

    use super::*;
    use crate::state::pod_state::DesiredPod;

    fn desired(revision: u64) -> Arc<DesiredPod> {
        let json = serde_json::json!({
            "metadata": {"name": "web", "namespace": "default", "uid": "u", "generation": revision},
            "spec": {"containers": [{"name": "main", "image": "i:1"}]},
        });
        Arc::new(DesiredPod {
            raw: Bytes::from(json.to_string()),
            pod: Arc::new(serde_json::from_value(json).unwrap()),
            source: "file".into(),
            traceparent: String::new(),
            revision,
            added_unix_nanos: 0,
        })
    }

    async fn next(stream: &mut Boxed<pb::WatchPodsResponse>) -> pb::PodDocument {
        match stream.next().await.unwrap().unwrap().item {
            Some(Item::Pod(document)) => document,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn watch_pods_with_separate_status_sends_the_pod_once_per_revision_and_stream() {
        let effects = Effects::new(Context::detached(ServiceName::PodSync, Config::default()), None);
        let send = |revision| {
            effects.registry.set_desired(&desired(revision), UpdateKind::Update, None);
            effects.publisher.publish_first("u");
        };
        send(1);
        let server = PodSyncServer { effects: Arc::clone(&effects) };
        let watch = async |separate_status| {
            let request = Request::new(pb::WatchPodsRequest { separate_status });
            server.watch_pods(request).await.unwrap().into_inner()
        };
        let (mut separate, mut complete) = (watch(true).await, watch(false).await);
        let first = next(&mut separate).await;
        assert_eq!((first.pod_json, first.pod_revision), (desired(1).raw.clone(), 1));
        assert!(!first.status_json.is_empty());
        let whole = next(&mut complete).await;
        assert!(whole.pod_json.len() > desired(1).raw.len() && whole.status_json.is_empty(), "{whole:?}");

        effects.publisher.republish("u");
        let status = next(&mut separate).await;
        assert!(status.pod_json.is_empty() && status.pod_revision == 1, "{status:?}");
        assert_eq!(next(&mut complete).await.pod_json, whole.pod_json);
        send(2);
        assert_eq!(next(&mut separate).await.pod_json, desired(2).raw);
        assert_eq!(next(&mut watch(true).await).await.pod_json, desired(2).raw, "a new stream");
    }
}
