//! The loops that renew the lease, and that drain events and save the state.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use keelson_config::{ControlPlane, ServiceName};
use keelson_node_status_core::{Cursor, Page};
use keelson_proto::keelson::events::v1 as pb;
use keelson_proto::keelson::events::v1::events_client::EventsClient;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, LoopHandle, Peer, StateFile};
use prometheus_client::metrics::counter::Counter;
use tokio::sync::{oneshot, watch};
use tonic::{Request, Status};

use crate::checkpoint::Checkpoint;
use crate::metrics::LastRenewal;
use crate::writer::ControlPlaneWriter;

/// The pause before a failed renewal is retried; doubled each time (node-and-api.md §10).
const RENEW_RETRY: Duration = Duration::from_millis(200);
/// The longest such pause.
const RENEW_RETRY_MAX: Duration = Duration::from_secs(7);

/// Timeout of one read of a ring.
const DEADLINE: Duration = Duration::from_secs(2);

/// An event ring: another service's, or our own.
enum Ring {
    Peer(Peer),
    Own(Context),
}

pub(crate) struct Drain {
    ctx: Context,
    writer: Arc<dyn ControlPlaneWriter>,
    checkpoint: Arc<watch::Sender<Checkpoint>>,
    rings: Vec<(&'static str, Ring)>,
    drained: Counter,
    lost: Counter,
}

/// Renews the lease until the shutdown: four times within its duration, as the kubelet does, and at least every ten seconds.
/// Sends to `tried` after the first try.
pub(crate) async fn renew(
    ctx: Context,
    writer: Arc<dyn ControlPlaneWriter>,
    last_renewal: LastRenewal,
    tried: oneshot::Sender<()>,
) {
    let mut tried = Some(tried);
    let handle = ctx.progress.register("lease");
    let period = renewal_interval(&ctx.config.control_plane);
    let mut retry = RENEW_RETRY;
    loop {
        // Cancel-safe: a renewal whose answer is lost is a renewal all the same.
        let lease = tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            lease = handle.while_at(writer.renew_lease()) => lease,
        };
        let pause = if lease.is_ok() {
            last_renewal.record();
            retry = RENEW_RETRY;
            period
        } else {
            let pause = retry.min(period);
            retry = (retry * 2).min(RENEW_RETRY_MAX);
            pause
        };
        ctx.progress.condition("node lease", lease.map_err(|error| error.to_string()));
        if let Some(tried) = tried.take() {
            // At the shutdown the receiver may be gone.
            let _ = tried.send(());
        }
        // Cancel-safe: neither arm holds anything.
        tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            // Jitter, so that nodes that started together do not stay in step (node-and-api.md §10).
            () = tokio::time::sleep(pause.mul_f32(1.0 + fastrand::f32() * 0.04)) => {}
        }
    }
}

fn renewal_interval(control_plane: &ControlPlane) -> Duration {
    match control_plane {
        ControlPlane::None => LoopHandle::HEARTBEAT,
        ControlPlane::Etcd(etcd) => {
            (Duration::from_secs(etcd.lease_seconds.into()) / 4).min(LoopHandle::HEARTBEAT)
        }
        ControlPlane::Kubernetes(api) => {
            (Duration::from_secs(api.lease_seconds.into()) / 4).min(LoopHandle::HEARTBEAT)
        }
    }
}

/// Drains events every ten seconds until the shutdown. Events may be written only under the lease, so the first turn waits for
/// `lease_tried`. `stored` is the content of the file.
pub(crate) async fn run(
    ctx: Context,
    drain: Drain,
    file: StateFile<Checkpoint>,
    mut stored: Checkpoint,
    lease_tried: oneshot::Receiver<()>,
) {
    let handle = ctx.progress.register("report");
    // Cancel-safe: neither arm holds anything.
    tokio::select! {
        () = ctx.shutdown.cancelled() => return,
        _ = lease_tried => {}
    }
    loop {
        // Cancel-safe: events whose write is cut off are written again under the same names.
        tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            () = handle.while_at(drain.drain_once()) => {}
        }
        let checkpoint = drain.checkpoint.borrow().clone();
        if checkpoint != stored {
            let result = file.store(checkpoint.clone()).await;
            ctx.progress.condition("saved state", result.as_ref().map_err(|e| chain(e)).copied());
            if result.is_ok() {
                stored = checkpoint;
            }
        }
        // Cancel-safe: neither arm holds anything.
        tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
        }
    }
}

impl Drain {
    pub(crate) fn new(
        ctx: &Context,
        writer: Arc<dyn ControlPlaneWriter>,
        checkpoint: Arc<watch::Sender<Checkpoint>>,
    ) -> Self {
        let (drained, lost) = (Counter::default(), Counter::default());
        let name = "keelson_node_status_events_drained";
        ctx.metrics.register(name, "Events read from the services", drained.clone());
        let name = "keelson_node_status_events_lost";
        ctx.metrics.register(name, "Events overwritten before they could be read", lost.clone());
        let peers = ctx.service.callees().iter().map(|name| (name.as_str(), Ring::Peer(ctx.peer(*name))));
        let own = (ServiceName::NodeStatus.as_str(), Ring::Own(ctx.clone()));
        let rings = peers.chain([own]).collect();
        Self { ctx: ctx.clone(), writer, checkpoint, rings, drained, lost }
    }

    /// Reads the new events of every ring. A service that does not answer keeps its events for later.
    async fn drain_once(&self) {
        let pages = self.rings.iter().map(|(service, ring)| {
            let cursor = self.checkpoint.borrow().cursors.get(*service).cloned().unwrap_or_default();
            async move { (*service, ring.list(&cursor).await, cursor) }
        });
        for (service, page, cursor) in join_all(pages).await {
            match page {
                Ok(page) => self.write_page(service, &page, &cursor).await,
                Err(status) => tracing::debug!(
                    service,
                    error = status.message(),
                    "the events of a service could not be read"
                ),
            }
        }
    }

    async fn write_page(&self, service: &'static str, page: &pb::ListEventsResponse, cursor: &Cursor) {
        let update = cursor.advance(&Page {
            ring_id: &page.ring_id,
            last_sequence: page.last_sequence,
            lost: page.lost,
        });
        if update.next == *cursor {
            return;
        }
        if update.restarted {
            tracing::debug!(service, "the service has restarted, so its event ring is a new one");
        }
        if !page.events.is_empty()
            && let Err(error) = self.writer.write_events(service, &page.events).await
        {
            self.ctx.progress.condition("events", Err(error.to_string()));
            return;
        }
        self.ctx.progress.condition("events", Ok(()));
        self.drained.inc_by(page.events.len() as u64);
        self.lost.inc_by(update.lost);
        self.checkpoint.send_modify(|checkpoint| {
            checkpoint.cursors.insert(service.to_owned(), update.next);
        });
    }
}

impl Ring {
    async fn list(&self, cursor: &Cursor) -> Result<pb::ListEventsResponse, Status> {
        let message =
            pb::ListEventsRequest { ring_id: cursor.ring_id.clone(), after_sequence: cursor.sequence };
        let mut request = Request::new(message);
        let response = match self {
            Self::Own(ctx) => ctx.events.list_events(request).await?,
            Self::Peer(peer) => {
                request.set_timeout(DEADLINE);
                EventsClient::new(peer.channel()).list_events(request).await?
            }
        };
        Ok(response.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use keelson_config::{Config, Etcd};
    use keelson_node_status_core::{NodeReport, PodUpdate};
    use tokio::time::Instant;

    use super::*;
    use crate::metrics;
    use crate::writer::{GonePods, ReportState, WriteError};

    /// A control plane whose first `times` renewals fail; it records when each was tried.
    struct Failing {
        times: usize,
        tried: Mutex<Vec<Instant>>,
    }

    #[tonic::async_trait]
    impl ControlPlaneWriter for Failing {
        fn control_plane(&self) -> &'static str {
            "failing"
        }

        async fn renew_lease(&self) -> Result<(), WriteError> {
            let mut tried = self.tried.lock().unwrap();
            tried.push(Instant::now());
            let failed = || WriteError::Unreachable { what: "the lease".into(), message: "m".into() };
            if tried.len() > self.times { Ok(()) } else { Err(failed()) }
        }

        async fn write_node(&self, _: &NodeReport) -> Result<(), WriteError> {
            Ok(())
        }

        async fn write_pod(&self, _: PodUpdate) -> Result<(), WriteError> {
            Ok(())
        }

        async fn drop_pods(&self, _: GonePods) {}

        async fn write_events(&self, _: &str, _: &[pb::Event]) -> Result<(), WriteError> {
            Ok(())
        }

        fn state(&self) -> ReportState {
            ReportState::default()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn lease_renewal_back_off_doubles_from_200_ms_to_seven_seconds() {
        let expected = [200, 400, 800, 1600, 3200, 6400, 7000, 7000, 10_000].map(Duration::from_millis);
        let failing = Arc::new(Failing { times: expected.len() - 1, tried: Mutex::default() });
        let ctx = Context::detached(ServiceName::NodeStatus, Config::default());
        let writer: Arc<dyn ControlPlaneWriter> = failing.clone();
        let last_renewal = metrics::register(&ctx.metrics, &writer);
        let (tried, _lease_tried) = oneshot::channel();
        let task = tokio::spawn(renew(ctx.clone(), writer, last_renewal, tried));
        tokio::time::sleep(expected.iter().sum::<Duration>() + Duration::from_secs(5)).await;
        ctx.shutdown.cancel();
        task.await.unwrap();
        let tried = failing.tried.lock().unwrap().clone();
        let pauses: Vec<Duration> = tried.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(pauses.len(), expected.len(), "{pauses:?}");
        for (pause, expected) in pauses.into_iter().zip(expected) {
            // Up to 4 % later, and timers have a resolution of a millisecond.
            let latest = expected.mul_f32(1.04) + Duration::from_millis(2);
            assert!(pause >= expected && pause <= latest, "{pause:?} and not {expected:?}");
        }
    }

    #[test]
    fn a_lease_is_renewed_every_quarter_of_its_duration_or_ten_seconds() {
        for (lease_seconds, millis) in [(1, 250), (10, 2500), (40, 10_000), (3600, 10_000)] {
            let settings = Etcd { lease_seconds, ..Etcd::plain(Vec::new()) };
            assert_eq!(renewal_interval(&ControlPlane::Etcd(settings)), Duration::from_millis(millis));
        }
        assert_eq!(renewal_interval(&ControlPlane::None), Duration::from_secs(10));
    }
}
