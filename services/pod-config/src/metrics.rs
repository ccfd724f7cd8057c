//! The figures of the sources.

use keelson_service_kit::Metrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SourceLabel {
    source: String,
}

/// Pods per source and refused manifests.
#[derive(Debug, Clone)]
pub struct SourceMetrics {
    pods: Family<SourceLabel, Gauge>,
    problems: Gauge,
}

impl SourceMetrics {
    /// Registers the figures.
    pub fn register(metrics: &Metrics) -> Self {
        let own = Self { pods: Family::default(), problems: Gauge::default() };
        metrics.register("keelson_pod_config_pods", "Desired pods by source", own.pods.clone());
        metrics.register(
            "keelson_pod_config_manifest_problems",
            "Manifests, or documents of them, that are not used as they stand",
            own.problems.clone(),
        );
        own
    }

    /// Takes the figures after a change of one source; `problems` counts those of all sources.
    pub fn set(&self, source: &str, pods: usize, problems: usize) {
        let label = SourceLabel { source: source.to_owned() };
        self.pods.get_or_create(&label).set(i64::try_from(pods).unwrap_or(i64::MAX));
        self.problems.set(i64::try_from(problems).unwrap_or(i64::MAX));
    }
}
