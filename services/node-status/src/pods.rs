//! The loop that reports pods.

use std::sync::Arc;

use keelson_config::ServiceName;
use keelson_node_status_core::{Deletion, PodDocument, ReportedPods, ReportedStatus, Termination};
use keelson_proto::keelson::pod_sync::v1 as pb;
use keelson_proto::keelson::pod_sync::v1::pod_sync_client::PodSyncClient;
use keelson_proto::keelson::pod_sync::v1::watch_pods_response::Item;
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, LoopHandle, Signal, follow};
use tokio::sync::mpsc;
use tracing::{Instrument as _, Span};

use crate::writer::{ControlPlaneWriter, GonePods};

/// Follows pod-sync until the shutdown and hands each changed status to the writer.
pub(crate) async fn run(ctx: Context, writer: Arc<dyn ControlPlaneWriter>) {
    let handle = ctx.progress.register("pods");
    let peer = ctx.peer(ServiceName::PodSync);
    let mut reporter = PodReporter { writer, reported: ReportedPods::default() };
    // One signal at a time: a slow control plane slows the stream, and pod-sync keeps the latest document of each pod.
    let (signals, mut next) = mpsc::channel(1);
    let name = peer.name().to_owned();
    let open = move || {
        let mut client = PodSyncClient::new(peer.channel());
        async move { client.watch_pods(pb::WatchPodsRequest { separate_status: true }).await }
    };
    let on = move |signal: Signal<pb::WatchPodsResponse>| {
        let signals = signals.clone();
        async move {
            let _ = signals.send(signal).await;
        }
    };
    let stream = follow(&name, &ctx.progress, &ctx.shutdown, open, on);
    tokio::pin!(stream);
    loop {
        handle.tick();
        // Cancel-safe: `stream` is pinned outside, a signal is taken only when it is returned.
        tokio::select! {
            () = &mut stream => return,
            Some(signal) = next.recv() => reporter.take(signal).await,
            () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
        }
    }
}

struct PodReporter {
    writer: Arc<dyn ControlPlaneWriter>,
    reported: ReportedPods,
}

impl PodReporter {
    async fn take(&mut self, signal: Signal<pb::WatchPodsResponse>) {
        match signal {
            Signal::Opened => self.reported.begin_replay(),
            Signal::Lost(_) => {}
            Signal::Message(message) => match message.item {
                Some(Item::Pod(document)) => self.report(document).await,
                Some(Item::GoneUid(uid)) => {
                    self.reported.forget(&uid);
                    self.writer.drop_pods(GonePods::One(uid)).await;
                }
                Some(Item::Synced(_)) => {
                    self.reported.end_replay();
                    self.writer.drop_pods(GonePods::AllBut(self.reported.uids())).await;
                }
                None => {}
            },
        }
    }

    async fn report(&mut self, message: pb::PodDocument) {
        let with_json = self.writer.writes_pods_of(&message.source);
        let update = match self.reported.observe(&document(&message), with_json) {
            Ok(Some(update)) => update,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(uid = message.uid, error = chain(&error), "cannot report a pod");
                return;
            }
        };
        let report = Arc::clone(&update.report);
        let span = if update.urgent { span_of(&message, &report.status) } else { Span::none() };
        if let Err(error) = self.writer.write_pod(update).instrument(span).await {
            tracing::warn!(
                pod = report.name.name,
                uid = report.uid,
                error = chain(&error),
                "pod status not reported"
            );
            self.reported.repeat(&report.uid);
        }
    }
}

/// The document in a message of pod-sync.
fn document(message: &pb::PodDocument) -> PodDocument<'_> {
    let deletion = Deletion {
        unix_seconds: message.deletion_unix_seconds,
        grace_seconds: message.deletion_grace_seconds,
    };
    PodDocument {
        uid: &message.uid,
        namespace: &message.namespace,
        name: &message.name,
        source: &message.source,
        pod_json: &message.pod_json,
        status_json: &message.status_json,
        pod_revision: message.pod_revision,
        deletion: (deletion != Deletion::default()).then_some(deletion),
        termination: Termination { stopped: message.stopped, finished: message.finished },
    }
}

/// The span of the report in the pod's trace; none if the pod has no trace.
fn span_of(document: &pb::PodDocument, status: &ReportedStatus) -> Span {
    if document.traceparent.is_empty() {
        return Span::none();
    }
    let span = tracing::info_span!(
        target: keelson_telemetry::TRACE_TARGET,
        "report pod status",
        pod = document.name,
        namespace = document.namespace,
        uid = document.uid,
        phase = &*status.phase,
        ready = status.ready,
    );
    keelson_telemetry::set_parent(&span, &document.traceparent);
    span
}
