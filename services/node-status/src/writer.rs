//! The write side of a control plane (architecture §6).

use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;

use keelson_node_status_core::{NodeReport, PodUpdate};
use keelson_proto::keelson::events::v1::Event;
use keelson_service_kit::Metrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

/// Writes the reports of a node to its control plane. Each implementation bounds its own calls and queues.
#[tonic::async_trait]
pub trait ControlPlaneWriter: Send + Sync + 'static {
    /// `none`, `kubernetes` or `etcd`.
    fn control_plane(&self) -> &'static str;

    /// Renews the node's lease.
    async fn renew_lease(&self) -> Result<(), WriteError>;

    /// Writes the Node.
    async fn write_node(&self, report: &NodeReport) -> Result<(), WriteError>;

    /// Whether it writes pods of this source themselves, and not only their status.
    fn writes_pods_of(&self, _source: &str) -> bool {
        false
    }

    /// Writes a pod's status; a finished pod may be deleted.
    async fn write_pod(&self, pod: PodUpdate) -> Result<(), WriteError>;

    /// Drops pods about which nothing more is reported.
    async fn drop_pods(&self, gone: GonePods);

    /// Writes events of the named service, oldest first.
    async fn write_events(&self, service: &str, events: &[Event]) -> Result<(), WriteError>;

    /// The state of the report queue.
    fn state(&self) -> ReportState;
}

/// Pods that are not on this node any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GonePods {
    /// The one with this UID.
    One(String),
    /// All except these.
    AllBut(BTreeSet<String>),
}

/// The state of the report queue.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ReportState {
    /// Writes that wait.
    pub queued: u32,
    /// Age of the oldest of them, in milliseconds.
    pub oldest_age_ms: u64,
    /// How long writes have waited for rate limits and for `Retry-After` of the control plane, in total.
    pub throttled_seconds: f64,
}

/// Why something could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// There was no answer; it is retried.
    #[error("the control plane is unreachable, so {what} will be written again: {message}")]
    Unreachable {
        /// What was to be written.
        what: String,
        /// The error of the connection.
        message: String,
    },
    /// It was refused, and would be refused again.
    #[error("the control plane refuses {what}: {message}")]
    Refused {
        /// What was to be written.
        what: String,
        /// The message of the control plane.
        message: String,
    },
}

/// Without a control plane: accepts everything, counts it and discards it.
#[derive(Debug)]
pub struct NoControlPlane {
    reports: Family<KindLabels, Counter<u64, AtomicU64>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabels {
    kind: &'static str,
}

impl NoControlPlane {
    /// Counts into `keelson_node_status_reports_total{kind}`.
    pub fn new(metrics: &Metrics) -> Self {
        let reports = Family::default();
        metrics.register(
            "keelson_node_status_reports",
            "What was handed to the control plane, by kind",
            reports.clone(),
        );
        Self { reports }
    }

    /// How many writes of a kind (`lease`, `node`, `pod` or `event`) were accepted.
    pub fn taken(&self, kind: &'static str) -> u64 {
        self.reports.get_or_create(&KindLabels { kind }).get()
    }

    fn count(&self, kind: &'static str, number: usize) {
        self.reports.get_or_create(&KindLabels { kind }).inc_by(number as u64);
    }
}

#[tonic::async_trait]
impl ControlPlaneWriter for NoControlPlane {
    fn control_plane(&self) -> &'static str {
        "none"
    }

    async fn renew_lease(&self) -> Result<(), WriteError> {
        self.count("lease", 1);
        Ok(())
    }

    async fn write_node(&self, _: &NodeReport) -> Result<(), WriteError> {
        self.count("node", 1);
        Ok(())
    }

    async fn write_pod(&self, _: PodUpdate) -> Result<(), WriteError> {
        self.count("pod", 1);
        Ok(())
    }

    async fn drop_pods(&self, _: GonePods) {}

    async fn write_events(&self, _: &str, events: &[Event]) -> Result<(), WriteError> {
        self.count("event", events.len());
        Ok(())
    }

    fn state(&self) -> ReportState {
        ReportState::default()
    }
}
