use keelson_proto::keelson::events::v1::ListEventsRequest;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_service_kit::{Metrics, Progress};
use keelson_volume_manager_core::csi::paths::DriverName;

use super::*;
use crate::measure::Usage;
use crate::plugins::{Answer, PluginError};

/// Drivers with an answer for each volume, by the name of its folder. One without an answer does not answer.
#[derive(Debug, Default)]
struct FakeDrivers(Mutex<BTreeMap<String, Result<Option<VolumeUsage>, PluginError>>>);

impl MeasureVolumes for FakeDrivers {
    fn measure<'a>(&'a self, volume: &'a MeasuredVolume) -> Answer<'a, Option<VolumeUsage>> {
        let answer = self.0.lock().unwrap().get(&volume.inner_name).cloned();
        Box::pin(async move {
            match answer {
                Some(answer) => answer,
                None => std::future::pending().await,
            }
        })
    }
}

/// The figures of pods whose volumes are measured every second.
struct World {
    drivers: Arc<FakeDrivers>,
    stats: DriverStats,
    hub: WatchHub<String, PodVolumeStatus>,
    metrics: Metrics,
    events: EventRing,
    shutdown: CancellationToken,
}

impl Drop for World {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

impl World {
    fn start(has_health: bool) -> Self {
        let (drivers, metrics, events) =
            (Arc::new(FakeDrivers::default()), Metrics::new(), EventRing::default());
        let durations = MeasurementMetrics::register(&metrics);
        let stats =
            DriverStats::new(Arc::<FakeDrivers>::clone(&drivers), durations, events.clone(), has_health);
        let (hub, shutdown) = (WatchHub::new(), CancellationToken::new());
        let handle = Progress::default().register("statistics");
        tokio::spawn(stats.clone().follow(hub.clone(), Duration::from_secs(1), shutdown.clone(), handle));
        Self { drivers, stats, hub, metrics, events, shutdown }
    }

    fn answer(&self, inner_name: &str, answer: Result<Option<VolumeUsage>, PluginError>) {
        self.drivers.0.lock().unwrap().insert(inner_name.to_owned(), answer);
    }

    /// Publishes that volumes of a CSI driver, and one of another plugin, are mounted for the pod.
    fn mount(&self, uid: &str, names: &[&str]) {
        let mounted = |name: &str, plugin: &str| MountedVolume {
            name: name.to_owned(),
            inner_name: format!("pv-{name}"),
            plugin: plugin.to_owned(),
            claim: format!("claim-{name}"),
            ..MountedVolume::default()
        };
        let mut mounts: Vec<MountedVolume> = names.iter().map(|name| mounted(name, PLUGIN)).collect();
        mounts.push(mounted("other", "kubernetes.io/nfs"));
        let status =
            PodVolumeStatus { pod: pod(uid), phase: Phase::Mounted, mounts, ..PodVolumeStatus::default() };
        self.hub.set(uid.to_owned(), status);
    }

    fn measured(&self, uid: Option<&str>) -> Vec<PodStats> {
        let mut pods = Vec::new();
        self.stats.add_to(&mut pods, uid);
        pods
    }

    async fn events(&self) -> Vec<String> {
        let request = tonic::Request::new(ListEventsRequest::default());
        let events = self.events.list_events(request).await.unwrap().into_inner().events;
        events.into_iter().map(|event| format!("{} {}", event.reason, event.message)).collect()
    }

    /// Waits until these volumes of a pod have figures.
    async fn until_measured(&self, uid: &str, names: &[&str]) -> PodStats {
        loop {
            let pods = self.measured(Some(uid));
            let found = pods.first().map(|pod| pod.volumes.keys().map(String::as_str).collect::<Vec<_>>());
            if found.unwrap_or_default() == names {
                return pods.into_iter().next().unwrap_or_default();
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

fn pod(uid: &str) -> PodRef {
    PodRef { uid: uid.to_owned(), namespace: "ns".to_owned(), name: format!("pod-{uid}") }
}

fn usage(used_bytes: u64, condition: Option<(bool, &str)>) -> VolumeUsage {
    let condition =
        condition.map(|(is_abnormal, message)| Condition { is_abnormal, message: message.to_owned() });
    let usage = Some(Usage { used_bytes, ..Usage::default() });
    VolumeUsage { driver: DriverName::parse("d.io").unwrap(), usage, condition }
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_does_not_answer_holds_up_no_other_volume() {
    let world = World::start(false);
    world.answer("pv-b", Ok(Some(usage(5, None))));
    world.mount("u", &["a", "b"]);
    let stats = world.until_measured("u", &["b"]).await;
    assert_eq!((stats.pod, stats.volumes["b"].claim.as_str()), (pod("u"), "claim-b"));
    let (_, measured) = stats.volumes["b"].measured.unwrap();
    assert_eq!((measured.used_bytes, stats.volumes["b"].abnormal), (5, None));
    world.mount("v", &["b"]);
    world.until_measured("v", &["b"]).await;
    assert_eq!(world.measured(None).len(), 2);
    assert!(world.metrics.text().contains("metric_source=\"d.io\""), "{}", world.metrics.text());
}

#[tokio::test(start_paused = true)]
async fn figures_follow_the_driver_and_the_last_ones_outlive_its_errors() {
    let world = World::start(false);
    world.answer("pv-a", Ok(Some(usage(5, None))));
    world.mount("u", &["a"]);
    world.until_measured("u", &["a"]).await;
    world.answer("pv-a", Err(PluginError::new("busy")));
    let stats = loop {
        let stats = world.until_measured("u", &["a"]).await;
        if !stats.volumes["a"].message.is_empty() {
            break stats;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    assert_eq!(stats.volumes["a"].measured.unwrap().1.used_bytes, 5);
    // The driver is replaced by one that does not measure.
    world.answer("pv-a", Ok(None));
    world.until_measured("u", &[]).await;
    world.answer("pv-a", Ok(Some(usage(6, None))));
    world.until_measured("u", &["a"]).await;
    world.hub.remove(&"u".to_owned());
    world.until_measured("u", &[]).await;
}

#[tokio::test(start_paused = true)]
async fn the_health_is_reported_with_its_gate_and_each_change_is_one_event() {
    for has_health in [false, true] {
        let world = World::start(has_health);
        world.answer("pv-a", Ok(Some(usage(5, Some((true, "the disk is damaged"))))));
        world.mount("u", &["a"]);
        let stats = world.until_measured("u", &["a"]).await;
        assert_eq!(stats.volumes["a"].abnormal, has_health.then_some(true));
        tokio::time::sleep(Duration::from_secs(10)).await;
        let expected = ["VolumeConditionAbnormal Volume a: the disk is damaged"];
        assert_eq!(world.events().await, expected[..usize::from(has_health)]);
        world.answer("pv-a", Ok(Some(usage(5, Some((false, ""))))));
        tokio::time::sleep(Duration::from_secs(3)).await;
        world.answer("pv-a", Ok(Some(usage(5, Some((true, "again"))))));
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(world.events().await.len(), 2 * usize::from(has_health));
    }
}
