//! Calls of CSI drivers (volumes.md §11.3).
//!
//! A call has the deadline of its operation and the error class of the specification. Only a status that the driver itself
//! has sent counts as its answer: one that was made here, of a broken connection or an unreadable message, leaves open what
//! the driver has done.

mod error;
mod watched;

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use keelson_proto::csi::v1 as pb;
use keelson_proto::csi::v1::node_client::NodeClient;
use keelson_service_kit::{Metrics, PeerChannel, connect_foreign};
use keelson_volume_manager_core::csi::error_class::Code;
use keelson_volume_manager_core::csi::paths::DriverName;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};
use tonic::{Request, Response, Status};

pub(crate) use self::error::{CallError, Failure};
use self::watched::{Answered, WatchedChannel};
use super::silent::SilentVolumes;

/// The time for all calls of one operation on a volume (volumes.md §3.1).
const BUDGET: Duration = Duration::from_secs(120);
/// The calls of one driver that run at a time, measurements aside.
const CONCURRENT_CALLS: usize = 32;
/// The measurements of one driver that run at a time, and as many again of volumes that it has not measured last time.
const CONCURRENT_MEASUREMENTS: usize = 4;
/// The longest message of a driver in bytes: the default of gRPC, which is the kubelet's limit too.
const LONGEST_MESSAGE: usize = 4 << 20;
/// The longest text of a driver's error, in characters.
const LONGEST_ERROR: usize = 2048;
/// Shorter values of secrets are not looked for in the driver's errors: they occur in ordinary words.
const SHORTEST_SECRET: usize = 4;
/// Upper bounds of the histogram buckets, in seconds (volumes.md §13).
const SECONDS: [f64; 13] = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];

/// An operation on a volume: the calls that share one deadline.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operation {
    deadline: Instant,
    is_migrated: bool,
}

impl Operation {
    /// An operation that begins now and has 2 minutes. `is_migrated`: the volume has a legacy source (volumes.md §12).
    pub(crate) fn new(is_migrated: bool) -> Self {
        Self::until(Instant::now() + BUDGET, is_migrated)
    }

    /// An operation with a deadline of its own.
    pub(crate) const fn until(deadline: Instant, is_migrated: bool) -> Self {
        Self { deadline, is_migrated }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    driver_name: String,
    method_name: String,
    grpc_status_code: &'static str,
    migrated: &'static str,
}

/// Durations of calls. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct CsiMetrics(Family<Labels, Histogram, fn() -> Histogram>);

impl CsiMetrics {
    /// Registers the histogram.
    pub(crate) fn register(metrics: &Metrics) -> Self {
        let seconds = Family::new_with_constructor((|| Histogram::new(SECONDS)) as fn() -> Histogram);
        let help = "Seconds that calls of CSI drivers took, by driver, method and gRPC status";
        metrics.register("csi_operations_seconds", help, seconds.clone());
        Self(seconds)
    }
}

/// The client of one driver. Cheap to clone; clones share the connection and the limits.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    driver: DriverName,
    endpoint: Arc<Path>,
    channel: PeerChannel,
    metrics: CsiMetrics,
    calls: Arc<Semaphore>,
    measurements: Arc<Semaphore>,
    silent: Arc<SilentVolumes>,
}

impl Client {
    /// A client of the driver at a socket, which is connected with the first call.
    pub(crate) fn new(driver: DriverName, endpoint: &Path, metrics: CsiMetrics) -> Self {
        Self {
            channel: connect_foreign(&format!("the CSI driver {driver}"), endpoint),
            driver,
            endpoint: endpoint.into(),
            metrics,
            calls: Arc::new(Semaphore::new(CONCURRENT_CALLS)),
            measurements: Arc::new(Semaphore::new(CONCURRENT_MEASUREMENTS)),
            silent: Arc::new(SilentVolumes::new(CONCURRENT_MEASUREMENTS)),
        }
    }

    /// The driver's socket.
    pub(crate) fn endpoint(&self) -> &Path {
        &self.endpoint
    }

    pub(super) async fn node_get_info(
        &self,
        operation: &Operation,
    ) -> Result<pb::NodeGetInfoResponse, CallError> {
        let call = Call::new("NodeGetInfo", operation, &self.calls);
        let request = pb::NodeGetInfoRequest {};
        self.send(call, request, |mut node, request| async move { node.node_get_info(request).await }).await
    }

    pub(super) async fn node_get_capabilities(
        &self,
        operation: &Operation,
    ) -> Result<pb::NodeGetCapabilitiesResponse, CallError> {
        let call = Call::new("NodeGetCapabilities", operation, &self.calls);
        let request = pb::NodeGetCapabilitiesRequest {};
        self.send(call, request, |mut node, request| async move { node.node_get_capabilities(request).await })
            .await
    }

    pub(super) async fn node_stage_volume(
        &self,
        operation: &Operation,
        request: pb::NodeStageVolumeRequest,
    ) -> Result<(), CallError> {
        let mut call = Call::new("NodeStageVolume", operation, &self.calls);
        call.hide(request.secrets.values());
        let answer = self
            .send(call, request, |mut node, request| async move { node.node_stage_volume(request).await });
        answer.await.map(drop)
    }

    pub(super) async fn node_unstage_volume(
        &self,
        operation: &Operation,
        request: pb::NodeUnstageVolumeRequest,
    ) -> Result<(), CallError> {
        let call = Call::new("NodeUnstageVolume", operation, &self.calls);
        let answer = self
            .send(call, request, |mut node, request| async move { node.node_unstage_volume(request).await });
        answer.await.map(drop)
    }

    /// `tokens` are part of the request, and no error shows them.
    pub(super) async fn node_publish_volume(
        &self,
        operation: &Operation,
        request: pb::NodePublishVolumeRequest,
        tokens: &[String],
    ) -> Result<(), CallError> {
        let mut call = Call::new("NodePublishVolume", operation, &self.calls);
        call.hide(tokens);
        call.hide(request.secrets.values());
        let answer = self
            .send(call, request, |mut node, request| async move { node.node_publish_volume(request).await });
        answer.await.map(drop)
    }

    pub(super) async fn node_unpublish_volume(
        &self,
        operation: &Operation,
        request: pb::NodeUnpublishVolumeRequest,
    ) -> Result<(), CallError> {
        self.silent.remove(&request.target_path);
        let call = Call::new("NodeUnpublishVolume", operation, &self.calls);
        let answer =
            self.send(
                call,
                request,
                |mut node, request| async move { node.node_unpublish_volume(request).await },
            );
        answer.await.map(drop)
    }

    pub(super) async fn node_get_volume_stats(
        &self,
        operation: &Operation,
        request: pb::NodeGetVolumeStatsRequest,
    ) -> Result<pb::NodeGetVolumeStatsResponse, CallError> {
        let path = request.volume_path.clone();
        let limit = self.silent.limit(&path).unwrap_or(&self.measurements);
        let call = Call::new("NodeGetVolumeStats", operation, limit);
        let result = self
            .send(call, request, |mut node, request| async move { node.node_get_volume_stats(request).await })
            .await;
        match result.as_ref().map_err(|error| &error.failure) {
            Err(Failure::NoAnswer) => self.silent.add(path),
            // It was not asked.
            Err(Failure::Busy) => {}
            Ok(_) | Err(Failure::Status { .. } | Failure::NotReachable(_) | Failure::Invalid(_)) => {
                self.silent.remove(&path);
            }
        }
        result
    }

    pub(super) async fn node_expand_volume(
        &self,
        operation: &Operation,
        request: pb::NodeExpandVolumeRequest,
    ) -> Result<i64, CallError> {
        let mut call = Call::new("NodeExpandVolume", operation, &self.calls);
        call.hide(request.secrets.values());
        let answer = self
            .send(call, request, |mut node, request| async move { node.node_expand_volume(request).await });
        answer.await.map(|answer| answer.capacity_bytes)
    }

    /// Sends one call, and measures it.
    async fn send<Q, A, F>(
        &self,
        call: Call<'_>,
        message: Q,
        send: impl FnOnce(NodeClient<WatchedChannel>, Request<Q>) -> F,
    ) -> Result<A, CallError>
    where
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let start = Instant::now();
        let result = self.send_within(&call, message, send).await.map_err(|failure| CallError {
            driver: self.driver.clone(),
            method: call.method,
            endpoint: Arc::clone(&self.endpoint),
            failure,
        });
        let labels = Labels {
            driver_name: self.driver.to_string(),
            method_name: format!("/csi.v1.Node/{}", call.method),
            grpc_status_code: result.as_ref().map_or_else(CallError::label, |_| Code::Ok.as_str()),
            migrated: if call.operation.is_migrated { "true" } else { "false" },
        };
        self.metrics.0.get_or_create(&labels).observe(start.elapsed().as_secs_f64());
        result
    }

    async fn send_within<Q, A, F>(
        &self,
        call: &Call<'_>,
        message: Q,
        send: impl FnOnce(NodeClient<WatchedChannel>, Request<Q>) -> F,
    ) -> Result<A, Failure>
    where
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let deadline = call.operation.deadline;
        // The semaphore is never closed.
        let Ok(Ok(_permit)) = timeout_at(deadline, call.limit.acquire()).await else {
            return Err(Failure::Busy);
        };
        if Instant::now() >= deadline {
            return Err(Failure::NoAnswer);
        }
        let answered = Answered::default();
        let channel = WatchedChannel { inner: self.channel.clone(), answered: answered.clone() };
        let client = NodeClient::new(channel).max_decoding_message_size(LONGEST_MESSAGE);
        let mut request = Request::new(message);
        request.set_timeout(deadline.saturating_duration_since(Instant::now()));
        match timeout_at(deadline, send(client, request)).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            // The timers of the transport and of the driver have the same deadline and may be faster than this one.
            Ok(Err(status))
                if Instant::now() + TIMER_STEP >= deadline
                    && (answered.code().is_none() || is_out_of_time(status.code())) =>
            {
                Err(Failure::NoAnswer)
            }
            Ok(Err(status)) => Err(call.failure(&status, answered.code())),
            Err(_) => Err(Failure::NoAnswer),
        }
    }
}

/// Whether a driver ends a call with this code when the deadline that came with the call has passed.
const fn is_out_of_time(code: tonic::Code) -> bool {
    matches!(code, tonic::Code::Cancelled | tonic::Code::DeadlineExceeded)
}

/// How much earlier than its deadline a timer may fire.
const TIMER_STEP: Duration = Duration::from_millis(10);

/// A call to make.
struct Call<'a> {
    method: &'static str,
    operation: &'a Operation,
    limit: &'a Semaphore,
    /// Values that no message may contain.
    secrets: Vec<String>,
}

impl<'a> Call<'a> {
    const fn new(method: &'static str, operation: &'a Operation, limit: &'a Semaphore) -> Self {
        Self { method, operation, limit, secrets: Vec::new() }
    }

    fn hide<'s>(&mut self, secrets: impl IntoIterator<Item = &'s String>) {
        self.secrets.extend(secrets.into_iter().filter(|value| value.len() >= SHORTEST_SECRET).cloned());
        // A secret may contain another one.
        self.secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
    }

    /// What an error means. `answered` is the status that the driver has sent.
    fn failure(&self, status: &Status, answered: Option<i32>) -> Failure {
        let message = self.redacted(status.message());
        match (answered.map(Code::from_number), status.code()) {
            (Some(code), _) if code != Code::Ok => Failure::Status { code, message },
            (_, tonic::Code::Unavailable) => Failure::NotReachable(message),
            (_, tonic::Code::DeadlineExceeded) => Failure::NoAnswer,
            (Some(_) | None, _) if keelson_service_kit::status::is_unanswered(status) => {
                Failure::NotReachable(message)
            }
            (Some(_) | None, _) => Failure::Invalid(message),
        }
    }

    /// The message without secrets, then cut: what is cut first may end within a secret.
    fn redacted(&self, message: &str) -> String {
        let mut text = message.to_owned();
        for secret in &self.secrets {
            text = text.replace(secret, "***stripped***");
        }
        if let Some((end, _)) = text.char_indices().nth(LONGEST_ERROR) {
            text.truncate(end);
            text.push('…');
        }
        text
    }
}

#[cfg(test)]
mod tests;
