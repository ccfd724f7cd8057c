//! The kubelet's gauges of pods and their workers (pod-lifecycle.md §19), counted when somebody asks.

use std::fmt;
use std::sync::{Arc, Weak};

use keelson_pod_sync_core::census::{Census, Counted};
use keelson_pod_sync_core::worker::WorkerPhase;
use keelson_service_kit::Metrics as Registry;
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};

use crate::agent::{Agent, Entry};

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
    Working,
    Ephemeral,
}

/// One family of gauges.
#[derive(Debug)]
struct Gauges {
    // The agent holds the registry that this is part of.
    agent: Weak<Agent>,
    what: What,
}

impl EncodeMetric for Gauges {
    fn encode(&self, encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        let census = self.agent.upgrade().map(|agent| census(&agent)).unwrap_or_default();
        match self.what {
            What::Desired => by_source(census.desired(), encoder),
            What::Active => by_source(census.active(), encoder),
            What::Ephemeral => ConstGauge::new(census.ephemeral()).encode(encoder),
            What::Working => {
                let family: Family<OfWorker, Gauge> = Family::default();
                for (labels, count) in census.working() {
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

fn census(agent: &Agent) -> Census {
    let mut census = Census::default();
    agent.each(|entry| {
        if !awaits_its_source(entry) {
            census.add(&counted(entry));
        }
    });
    census
}

/// It was read back from an earlier process, and no source has said whether it is to go on.
fn awaits_its_source(entry: &Entry) -> bool {
    entry.restored && entry.state.phase == WorkerPhase::Sync
}

fn counted(entry: &Entry) -> Counted<'_> {
    let pod = entry.wanted.as_ref().map(|wanted| &wanted.pod);
    let terminal = entry.status.phase().is_terminal() || pod.is_some_and(|p| p.status.phase().is_terminal());
    let ephemeral = pod.map_or(0, |pod| pod.spec.ephemeral_containers.len());
    Counted { state: &entry.state, is_static: pod.map(|pod| pod.is_static()), terminal, ephemeral }
}

/// Shows the gauges of an agent.
pub fn register(agent: &Arc<Agent>, registry: &Registry) {
    for (name, help, what) in [
        ("kubelet_desired_pods", "Pods that a source names", What::Desired),
        ("kubelet_active_pods", "Pods that a source names and that have not ended", What::Active),
        ("kubelet_working_pods", "Pods by how far they have come and who knows them", What::Working),
        (
            "kubelet_managed_ephemeral_containers",
            "Ephemeral containers of pods that have not been ended",
            What::Ephemeral,
        ),
    ] {
        registry.register(name, help, Gauges { agent: Arc::downgrade(agent), what });
    }
}
