//! Asks drivers again how many volumes the node can have, with the period of their CSIDriver (volumes.md §11.2).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use keelson_service_kit::{CancellationToken, LoopHandle, spawn};
use keelson_volume_manager_core::csi::CsiDriver;
use keelson_volume_manager_core::csi::paths::DriverName;
use tokio::time::{Instant, sleep, timeout};

use super::drivers::Drivers;
use super::registration::CsiRegistration;
use crate::live_objects::LiveObjects;

/// How often a CSIDriver is read: a period that is set, changed or removed takes effect within this time.
const READ_PERIOD: Duration = Duration::from_secs(60);
/// The shortest period, as the API server has it.
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
        let mut last = Instant::now();
        loop {
            let period = self.period(name).await;
            let until_next = period.map_or(READ_PERIOD, |period| period.saturating_sub(last.elapsed()));
            sleep(until_next.min(READ_PERIOD)).await;
            if period.is_none_or(|period| last.elapsed() < period) {
                continue;
            }
            last = Instant::now();
            if let Err(error) = self.registration.refresh(name.as_str()).await {
                tracing::warn!(
                    event = "csi_limit_not_updated",
                    driver = %name,
                    %error,
                    "cannot update how many volumes of a CSI driver the node can have"
                );
            }
        }
    }

    /// The period; `None` if the driver has none, or if it cannot be read now.
    async fn period(&self, name: &DriverName) -> Option<Duration> {
        match self.live.get::<CsiDriver>("CSIDriver", "", name.as_str()).await {
            Ok(driver) => {
                let seconds = driver?.spec.node_allocatable_update_period_seconds?;
                Some(Duration::from_secs(u64::try_from(seconds).ok()?.max(self.shortest_period)))
            }
            Err(error) => {
                tracing::debug!(driver = %name, error, "cannot read a CSIDriver");
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use keelson_plugin_watcher::Plugin;
    use keelson_proto::csi::v1 as pb;
    use keelson_service_kit::{Metrics, Progress};
    use keelson_testkit::fakes::{FakeCsiNode, FakeServer};
    use serde_json::json;
    use tonic::service::Routes;

    use super::*;
    use crate::csi::client::CsiMetrics;
    use crate::csi::fake_api::FakeApi;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_driver_is_asked_again_with_the_period_of_its_csi_driver() {
        let dir = tempfile::tempdir().unwrap();
        let api = FakeApi::start().await;
        let csi_driver =
            json!({"metadata": {"name": "d"}, "spec": {"nodeAllocatableUpdatePeriodSeconds": 1}});
        api.objects.lock().unwrap().csi_driver = Some(csi_driver);
        let node = FakeCsiNode::default();
        let info = |max_volumes_per_node| pb::NodeGetInfoResponse {
            node_id: "id".into(),
            max_volumes_per_node,
            accessible_topology: None,
        };
        node.node_get_info.answer_once(Ok(info(3)));
        node.node_get_info.answer(info(2));
        let endpoint = dir.path().join("d.sock");
        let _server = FakeServer::at(&endpoint, Routes::new(node.server())).await.unwrap();
        let drivers = Drivers::new(CsiMetrics::register(&Metrics::new()), Path::new("/registry"));
        let registration = CsiRegistration::new(drivers.clone(), api.nodes.clone());
        let plugin = Plugin {
            kind: "CSIPlugin".into(),
            name: "d".into(),
            endpoint,
            supported_versions: vec!["1.0.0".into()],
            socket: "/s".into(),
        };
        let limits = Limits {
            shortest_period: 1,
            ..Limits::new(drivers.clone(), registration.clone(), api.live.clone())
        };
        let shutdown = CancellationToken::new();
        let handle = Progress::default().register("limits");
        let following = tokio::spawn(limits.follow(shutdown.clone(), handle));
        registration.handler().register(&plugin).await.unwrap();
        let changes = api.pod_config.mutate.requests();
        changes.until_len(2).await;
        assert_eq!(api.csi_node().unwrap()["spec"]["drivers"][0]["allocatable"]["count"], 2);
        shutdown.cancel();
        following.await.unwrap();
    }
}
