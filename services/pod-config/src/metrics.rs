//! The metrics of the sources.

use keelson_service_kit::Metrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SourceLabel {
    source: String,
}

/// Pods per source, and manifest errors.
#[derive(Debug, Clone)]
pub struct SourceMetrics {
    pods: Family<SourceLabel, Gauge>,
    errors: Gauge,
}

impl SourceMetrics {
    /// Registers the metrics.
    pub fn register(metrics: &Metrics) -> Self {
        let own = Self { pods: Family::default(), errors: Gauge::default() };
        metrics.register("keelson_pod_config_pods", "Desired pods by source", own.pods.clone());
        metrics.register(
            "keelson_pod_config_manifest_problems",
            "Manifests, or documents in them, that are rejected",
            own.errors.clone(),
        );
        own
    }

    /// Updates the metrics after a change of `source`; `errors` counts the errors of all sources.
    pub fn set(&self, source: &str, pods: usize, errors: usize) {
        let label = SourceLabel { source: source.to_owned() };
        self.pods.get_or_create(&label).set(i64::try_from(pods).unwrap_or(i64::MAX));
        self.errors.set(i64::try_from(errors).unwrap_or(i64::MAX));
    }
}
