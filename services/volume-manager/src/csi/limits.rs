//! Asks drivers again how many volumes the node can have: with the period of their CSIDriver, and when one says that the node
//! has no room (volumes.md §3.14, §11.2).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use keelson_service_kit::{CancellationToken, LoopHandle, spawn};
use keelson_volume_manager_core::csi::CsiDriver;
use keelson_volume_manager_core::csi::paths::DriverName;
use tokio::time::{Instant, sleep, timeout};

use super::drivers::{Counts, Drivers};
use super::registration::CsiRegistration;
use crate::live_objects::LiveObjects;

/// How often a CSIDriver is read: a period that is set, changed or removed takes effect within this time.
const READ_PERIOD: Duration = Duration::from_secs(60);
/// The shortest period, as the API server has it. A driver that has no room is asked as often at most.
const SHORTEST_PERIOD: u64 = 10;

/// Keeps the limits of the registered drivers up to date. Each driver has a task of its own.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    drivers: Drivers,
    registration: CsiRegistration,
    live: LiveObjects,
    shortest_period: u64,
}

impl Limits {
    /// The limits of the drivers that register with `registration`.
    pub(crate) const fn new(drivers: Drivers, registration: CsiRegistration, live: LiveObjects) -> Self {
        Self { drivers, registration, live, shortest_period: SHORTEST_PERIOD }
    }

    /// Follows the registered drivers until `shutdown`.
    pub(crate) async fn follow(self, shutdown: CancellationToken, handle: LoopHandle) {
        let mut registered = self.drivers.subscribe();
        let mut tasks: BTreeMap<DriverName, CancellationToken> = BTreeMap::new();
        loop {
            handle.tick();
            let names: BTreeSet<DriverName> = registered.borrow_and_update().keys().cloned().collect();
            tasks.retain(|name, stop| {
                let stays = names.contains(name);
                if !stays {
                    stop.cancel();
                }
                stays
            });
            for name in names {
                if !tasks.contains_key(&name) {
                    // Ends with the service, too.
                    let stop = shutdown.child_token();
                    tasks.insert(name.clone(), stop.clone());
                    spawn("limit of a CSI driver", self.clone().follow_driver(name, stop));
                }
            }
            // Cancel-safe: a change stays marked until it is read.
            tokio::select! {
                _ = timeout(LoopHandle::HEARTBEAT, registered.changed()) => {}
                () = shutdown.cancelled() => return,
            }
        }
    }

    async fn follow_driver(self, name: DriverName, stop: CancellationToken) {
        // Cancel-safe: a change of the CSINode that is cut off is made again by the next registration.
        tokio::select! {
            () = self.refresh(&name) => {}
            () = stop.cancelled() => {}
        }
    }

    async fn refresh(&self, name: &DriverName) {
        let mut exhaustions = self.drivers.exhaustions();
        let mut seen = exhausted(&exhaustions.borrow(), name);
        let mut period = None;
        let mut last = Instant::now();
        let mut is_exhausted = false;
        loop {
            match self.period(name).await {
                Ok(read) => period = read,
                Err(error) => tracing::debug!(driver = %name, error, "cannot read a CSIDriver"),
            }
            if period.is_some_and(|period| is_exhausted || last.elapsed() >= period) {
                last = Instant::now();
                self.ask(name).await;
            }
            let until_next = period.map_or(READ_PERIOD, |period| period.saturating_sub(last.elapsed()));
            // Cancel-safe: what is not noticed here is noticed in the next round. The counts are there as long as this task.
            is_exhausted = tokio::select! {
                () = sleep(until_next.min(READ_PERIOD)) => false,
                Ok(_) = exhaustions.wait_for(|counts| exhausted(counts, name) > seen) => true,
            };
            if is_exhausted {
                sleep(Duration::from_secs(self.shortest_period).saturating_sub(last.elapsed())).await;
                seen = exhausted(&exhaustions.borrow(), name);
            }
        }
    }

    async fn ask(&self, name: &DriverName) {
        if let Err(error) = self.registration.refresh(name.as_str()).await {
            tracing::warn!(
                event = "csi_limit_not_updated",
                driver = %name,
                %error,
                "cannot update how many volumes of a CSI driver the node can have"
            );
        }
    }

    /// The period; `None` if the driver has none.
    async fn period(&self, name: &DriverName) -> Result<Option<Duration>, String> {
        let driver = self.live.get::<CsiDriver>("CSIDriver", "", name.as_str()).await?;
        let seconds = driver.and_then(|driver| driver.spec.node_allocatable_update_period_seconds);
        let seconds = seconds.and_then(|seconds| u64::try_from(seconds).ok());
        Ok(seconds.map(|seconds| Duration::from_secs(seconds.max(self.shortest_period))))
    }
}

/// How often the node had no room for another volume of the driver.
fn exhausted(counts: &Counts, name: &DriverName) -> u64 {
    counts.get(name).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use keelson_plugin_watcher::Plugin;
    use keelson_proto::csi::v1 as pb;
    use keelson_proto::keelson::pod_config::v1::GetLiveRequest as LiveRequest;
    use keelson_service_kit::{Metrics, Progress};
    use keelson_testkit::fakes::{FakeCsiNode, FakeServer};
    use serde_json::json;
    use tonic::service::Routes;

    use super::*;
    use crate::csi::client::CsiMetrics;
    use crate::csi::fake_api::FakeApi;

    /// A driver that the API server knows, and the task that asks it.
    struct World {
        _dir: tempfile::TempDir,
        api: FakeApi,
        node: FakeCsiNode,
        drivers: Drivers,
        shutdown: CancellationToken,
        following: tokio::task::JoinHandle<()>,
        _server: FakeServer,
    }

    impl World {
        /// A driver that gives 3 volumes once and then 2, with the spec of its CSIDriver.
        async fn start(spec: serde_json::Value) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let api = FakeApi::start().await;
            api.objects.lock().unwrap().csi_driver = Some(json!({"metadata": {"name": "d"}, "spec": spec}));
            let node = FakeCsiNode::default();
            let info = |max_volumes_per_node| pb::NodeGetInfoResponse {
                node_id: "id".into(),
                max_volumes_per_node,
                accessible_topology: None,
            };
            node.node_get_info.answer_once(Ok(info(3)));
            node.node_get_info.answer(info(2));
            let endpoint = dir.path().join("d.sock");
            let server = FakeServer::at(&endpoint, Routes::new(node.server())).await.unwrap();
            let drivers = Drivers::new(CsiMetrics::register(&Metrics::new()), Path::new("/registry"));
            let registration = CsiRegistration::new(drivers.clone(), api.nodes.clone());
            let limits = Limits {
                shortest_period: 1,
                ..Limits::new(drivers.clone(), registration.clone(), api.live.clone())
            };
            let shutdown = CancellationToken::new();
            let handle = Progress::default().register("limits");
            let following = tokio::spawn(limits.follow(shutdown.clone(), handle));
            let plugin = Plugin {
                kind: "CSIPlugin".into(),
                name: "d".into(),
                endpoint,
                supported_versions: vec!["1.0.0".into()],
                socket: "/s".into(),
            };
            registration.handler().register(&plugin).await.unwrap();
            Self { _dir: dir, api, node, drivers, shutdown, following, _server: server }
        }

        fn limit(&self) -> serde_json::Value {
            self.api.csi_node().unwrap()["spec"]["drivers"][0]["allocatable"]["count"].clone()
        }

        async fn end(self) {
            self.shutdown.cancel();
            self.following.await.unwrap();
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_driver_is_asked_again_with_the_period_of_its_csi_driver() {
        let world = World::start(json!({"nodeAllocatableUpdatePeriodSeconds": 1})).await;
        world.api.pod_config.mutate.answered().until_len(2).await;
        assert_eq!(world.limit(), 2);
        world.end().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_driver_without_room_is_asked_at_once_if_its_csi_driver_has_a_period() {
        let world = World::start(json!({"nodeAllocatableUpdatePeriodSeconds": 3600})).await;
        // Until the task reads the CSIDriver, it does not follow the counts.
        world
            .api
            .pod_config
            .get_live
            .requests()
            .until(|all| all.iter().any(|one| one.kind == "CSIDriver"))
            .await;
        world.drivers.note_exhausted(&DriverName::parse("d").unwrap());
        world.api.pod_config.mutate.answered().until_len(2).await;
        assert_eq!(world.limit(), 2);
        world.end().await;

        let world = World::start(json!({})).await;
        let reads = |all: &[_]| all.iter().filter(|one: &&LiveRequest| one.kind == "CSIDriver").count();
        for round in 1..=3 {
            world.api.pod_config.get_live.requests().until(|all| reads(all) == round).await;
            world.drivers.note_exhausted(&DriverName::parse("d").unwrap());
        }
        assert_eq!(world.node.node_get_info.requests().len(), 1, "without a period it is not asked");
        world.end().await;
    }
}
