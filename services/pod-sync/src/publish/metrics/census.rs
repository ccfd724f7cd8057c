//! The kubelet's gauges of pods and their workers (pod-lifecycle.md §19), computed at each scrape.

use std::fmt;
use std::sync::{Arc, Weak};

use keelson_pod_sync_core::census::{Census, CountedPod};
use keelson_pod_sync_core::worker::WorkerPhase;
use keelson_service_kit::Metrics as Registry;
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};

use crate::state::pod_state::PodState;
use crate::state::registry::PodRegistry;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Origin {
    r#static: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfWorker {
    lifecycle: &'static str,
    config: &'static str,
    r#static: &'static str,
}

#[derive(Debug, Clone, Copy)]
enum What {
    Desired,
    Active,
    Workers,
    Ephemeral,
}

/// One family of gauges.
#[derive(Debug)]
struct Gauges {
    // Weak: the registry of pods holds the context that these gauges are registered in.
    pods: Weak<PodRegistry>,
    what: What,
}

impl EncodeMetric for Gauges {
    fn encode(&self, encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        let census = self.pods.upgrade().map(|pods| census(&pods)).unwrap_or_default();
        match self.what {
            What::Desired => by_source(census.desired(), encoder),
            What::Active => by_source(census.active(), encoder),
            What::Ephemeral => ConstGauge::new(census.ephemeral()).encode(encoder),
            What::Workers => {
                let family: Family<OfWorker, Gauge> = Family::default();
                for (labels, count) in census.workers() {
                    let (lifecycle, config) = (labels.lifecycle, labels.config);
                    let labels = OfWorker { lifecycle, config, r#static: labels.is_static };
                    family.get_or_create(&labels).set(count);
                }
                family.encode(encoder)
            }
        }
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }
}

fn by_source(counts: [(&'static str, i64); 2], encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
    let family: Family<Origin, Gauge> = Family::default();
    for (r#static, count) in counts {
        family.get_or_create(&Origin { r#static }).set(count);
    }
    family.encode(encoder)
}

fn census(registry: &PodRegistry) -> Census {
    let mut census = Census::default();
    registry.for_each(|state| {
        // A restored pod counts when its source has sent it, or when it ends.
        if !state.awaits_source() || state.worker.phase != WorkerPhase::Sync {
            census.add(&counted(state));
        }
    });
    census
}

fn counted(state: &PodState) -> CountedPod<'_> {
    let pod = state.desired.as_ref().map(|desired| &desired.pod);
    let terminal =
        state.published.status.phase().is_terminal() || pod.is_some_and(|p| p.status.phase().is_terminal());
    let ephemeral = pod.map_or(0, |pod| pod.spec.ephemeral_containers.len());
    CountedPod { state: &state.worker, is_static: pod.map(|pod| pod.is_static()), terminal, ephemeral }
}

/// Registers the gauges.
pub fn register(pods: &Arc<PodRegistry>, metrics: &Registry) {
    for (name, help, what) in [
        ("kubelet_desired_pods", "Pods that a source names", What::Desired),
        ("kubelet_active_pods", "Pods that a source names and that have not ended", What::Active),
        ("kubelet_working_pods", "Pods by how far they have come and who knows them", What::Workers),
        (
            "kubelet_managed_ephemeral_containers",
            "Ephemeral containers of pods that have not been ended",
            What::Ephemeral,
        ),
    ] {
        metrics.register(name, help, Gauges { pods: Arc::downgrade(pods), what });
    }
}
