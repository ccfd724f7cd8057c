//! The kubelet's metrics of running pods and containers, and the registration of all metrics of an observer
//! (node-and-api.md §15.4).

use std::fmt;

use keelson_proto::keelson::runtime::v1 as pb;
use keelson_service_kit::Metrics;
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};

use crate::observe::Observer;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ContainerState {
    container_state: &'static str,
}

/// Encodes the number of running pods, counted on each scrape from the published pods.
#[derive(Debug)]
struct Pods(Observer);

#[derive(Debug)]
struct Containers(Observer);

impl EncodeMetric for Pods {
    fn encode(&self, encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        let running = self.0.all().iter().filter(|pod| pod.sandboxes.iter().any(|s| s.ready)).count();
        ConstGauge::new(i64::try_from(running).unwrap_or(i64::MAX)).encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }
}

impl EncodeMetric for Containers {
    fn encode(&self, encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        let counts: Family<ContainerState, Gauge> = Family::default();
        for container in self.0.all().iter().flat_map(|pod| &pod.containers) {
            let container_state = match container.state() {
                pb::ContainerState::Created => "created",
                pb::ContainerState::Running => "running",
                pb::ContainerState::Exited => "exited",
                pb::ContainerState::Unknown | pb::ContainerState::Unspecified => "unknown",
            };
            counts.get_or_create(&ContainerState { container_state }).inc();
        }
        counts.encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }
}

/// Registers the metrics of an observer's pods and reads.
pub(crate) fn register(observer: &Observer, metrics: &Metrics) {
    observer.reads().register(metrics);
    let help = "Pods with a sandbox that is ready";
    metrics.register("kubelet_running_pods", help, Pods(observer.clone()));
    let help = "Containers that the runtime has, by state";
    metrics.register("kubelet_running_containers", help, Containers(observer.clone()));
}

#[cfg(test)]
mod tests {
    use k8s_cri::v1 as cri;

    use super::*;
    use crate::tests::fake_runtime::{FakeRuntime, refusal};

    #[tokio::test]
    async fn metrics_show_running_pods_and_relist_durations() {
        let fake = FakeRuntime::start().await;
        let metrics = Metrics::new();
        register(&fake.observer, &metrics);
        fake.sandbox("s-a", "a", true);
        fake.sandbox("s-b", "b", false);
        fake.container("c-a", "a", cri::ContainerState::ContainerRunning);
        fake.container("c-b", "b", cri::ContainerState::ContainerExited);
        fake.observer.relist().await.unwrap();
        fake.container("c-c", "a", cri::ContainerState::ContainerRunning);
        fake.observer.read("a").await.unwrap();
        let text = metrics.text();
        for line in [
            "kubelet_running_pods 1",
            "kubelet_running_containers{container_state=\"running\"} 2",
            "kubelet_running_containers{container_state=\"exited\"} 1",
            "kubelet_pleg_relist_duration_seconds_count 1",
            "kubelet_pleg_relist_interval_seconds_count 0",
            "kubelet_pleg_pod_relist_duration_seconds_count 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        let seen = |text: &str| -> i64 {
            let line = text.lines().find_map(|l| l.strip_prefix("kubelet_pleg_last_seen_seconds ")).unwrap();
            line.parse().unwrap()
        };
        let before = seen(&text);
        assert!(before > 1_700_000_000, "{text}");
        // A failed relist has a duration as well, but does not update the time of the last one.
        fake.observer.reads().last_seen.set(7);
        fake.runtime.list_containers.answer_once(Err(refusal(tonic::Code::Unavailable)));
        fake.observer.relist().await.unwrap_err();
        let text = metrics.text();
        assert_eq!(seen(&text), 7);
        assert!(text.contains("kubelet_pleg_relist_duration_seconds_count 2"), "{text}");
        assert!(text.contains("kubelet_pleg_relist_interval_seconds_count 1"), "{text}");
    }
}
