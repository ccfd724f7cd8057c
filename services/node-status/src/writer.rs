//! The write side of a control plane (architecture §6).

use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;

use bytes::Bytes;
use keelson_kube_model::Node;
use keelson_node_status_core::Ended;
use keelson_proto::keelson::events::v1::Event;
use keelson_service_kit::Metrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

/// Writes what a node tells its control plane. Each implementation bounds its own calls and queues.
#[tonic::async_trait]
pub trait ControlPlaneWriter: Send + Sync + 'static {
    /// `none`, `kubernetes` or `etcd`.
    fn control_plane(&self) -> &'static str;

    /// The node lives.
    async fn renew_lease(&self) -> Result<(), WriteError>;

    /// The Node as it is now.
    async fn write_node(&self, node: &Node) -> Result<(), WriteError>;

    /// A pod's status as it is now; a finished one may be deleted.
    async fn write_pod(&self, pod: &PodReport) -> Result<(), WriteError>;

    /// Pods of which nothing more is to be told.
    async fn drop_pods(&self, gone: GonePods);

    /// Events that the named service recorded, oldest first.
    async fn write_events(&self, service: &str, events: &[Event]) -> Result<(), WriteError>;

    /// What waits to be written.
    fn state(&self) -> ReportState;
}

/// A pod to report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodReport {
    /// UID as pod-sync knows it.
    pub uid: String,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// The Pod with its status, as JSON.
    pub pod_json: Bytes,
    /// Where the pod comes from: `file`, `api`…
    pub source: String,
    /// Phase or readiness has changed: goes before other statuses.
    pub turned: bool,
    /// How far it has come to its end.
    pub ended: Ended,
}

/// Pods that are not on this node any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GonePods {
    /// The one with this UID.
    One(String),
    /// Every other one than these.
    AllBut(BTreeSet<String>),
}

/// What waits to be written.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ReportState {
    /// Writes that wait.
    pub queued: u32,
    /// Age of the oldest of them, in milliseconds.
    pub oldest_age_ms: u64,
    /// How long the control plane has asked us to wait, all told.
    pub throttled_seconds: f64,
}

/// Why something could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// There was no answer; it is tried again.
    #[error("the control plane is not reachable, {what} will be written again: {message}")]
    Unreachable {
        /// What was to be written.
        what: String,
        /// What the connection said.
        message: String,
    },
    /// It was refused, and would be again.
    #[error("the control plane refuses {what}: {message}")]
    Refused {
        /// What was to be written.
        what: String,
        /// The control plane's words.
        message: String,
    },
}

/// Standalone: takes everything, counts it and keeps nothing.
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

    /// How many writes of a kind (`lease`, `node`, `pod` or `event`) were taken.
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

    async fn write_node(&self, _: &Node) -> Result<(), WriteError> {
        self.count("node", 1);
        Ok(())
    }

    async fn write_pod(&self, _: &PodReport) -> Result<(), WriteError> {
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
