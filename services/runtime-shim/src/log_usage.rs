//! `kubelet_container_log_filesystem_used_bytes`: disk usage of container logs (runtime-and-resources.md §14.5,
//! node-and-api.md §15.1).

use std::fmt;

use keelson_service_kit::Metrics;
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use crate::filesystem::Filesystems;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    uid: String,
    namespace: String,
    pod: String,
    container: String,
}

/// Encodes the statistics that were collected last. A scrape never walks a folder; the first scrape after a while finds
/// no statistics.
#[derive(Debug)]
struct LogUsageMetric(Filesystems);

impl EncodeMetric for LogUsageMetric {
    fn encode(&self, encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        let used: Family<Labels, Gauge> = Family::default();
        for log in self.0.logs().iter() {
            let labels = Labels {
                uid: log.pod.uid.clone(),
                namespace: log.pod.namespace.clone(),
                pod: log.pod.name.clone(),
                container: log.container.clone(),
            };
            used.get_or_create(&labels).set(i64::try_from(log.bytes).unwrap_or(i64::MAX));
        }
        used.encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }
}

/// Registers the metric, which shows what `filesystems` has collected.
pub(crate) fn register(filesystems: &Filesystems, metrics: &Metrics) {
    let help = "Bytes that the log of a container takes on its file system, including rotated files";
    metrics.register(
        "kubelet_container_log_filesystem_used_bytes",
        help,
        LogUsageMetric(filesystems.clone()),
    );
}

#[cfg(test)]
mod tests {
    use k8s_cri::v1::ContainerState::{ContainerExited, ContainerRunning};

    use super::*;
    use crate::tests::fake_runtime::FakeRuntime;

    #[tokio::test]
    async fn log_usage_metric_is_per_container_name_and_needs_no_runtime_call() {
        let fake = FakeRuntime::start().await;
        fake.sandbox("s-u", "u", true);
        for (id, name, state) in [
            ("new", "main", ContainerRunning),
            ("old", "main", ContainerExited),
            ("mute", "mute", ContainerRunning),
        ] {
            fake.container(id, "u", state);
            fake.set_container_name(id, name);
        }
        let folder = fake.dir.path().join("logs/default_u_u/main");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("0.log"), vec![b'x'; 8_192]).unwrap();
        std::fs::write(folder.join("0.log.20260102-030405"), vec![b'y'; 8_192]).unwrap();
        for id in ["new", "old"] {
            fake.set_log_path(id, &folder.join("0.log"));
        }
        fake.observer.read("u").await.unwrap();
        let filesystems = Filesystems::new(fake.cri.clone(), fake.observer.clone(), fake.files.clone());
        let metrics = Metrics::new();
        register(&filesystems, &metrics);
        let shown = || -> Vec<String> {
            let text = metrics.text();
            let name = "kubelet_container_log_filesystem_used_bytes{";
            text.lines().filter_map(|line| line.strip_prefix(name)).map(ToOwned::to_owned).collect()
        };
        filesystems.collect().await;
        assert!(shown().is_empty(), "no statistics were requested before");
        filesystems.collect().await;
        let [line] = shown().try_into().unwrap();
        let used =
            line.strip_prefix("uid=\"u\",namespace=\"default\",pod=\"u\",container=\"main\"} ").expect(&line);
        assert!((16_384..1 << 20).contains(&used.parse::<u64>().unwrap()), "{line}");
        assert!(fake.runtime.list_container_stats.requests().is_empty());
        assert!(
            filesystems.stats(false).unwrap().pods.is_empty(),
            "without layers they are only for this metric"
        );
        // If layers are requested too, logs and layers are measured together.
        filesystems.collect().await;
        assert_eq!((shown(), fake.runtime.list_container_stats.requests().len()), (vec![line], 1));
        assert_eq!(filesystems.stats(false).unwrap().pods.len(), 1);
    }
}
