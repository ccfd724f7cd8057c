//! Has CSI drivers measure their volumes in the background (volumes.md §11.7, §13).
//!
//! Each volume of a pod has a task of its own, so that a driver that does not answer holds up the figures of no other volume. A
//! driver that cannot measure leaves its volumes without figures.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_service_kit::{
    CancellationToken, EventRing, LoopHandle, ObjectRef, WatchHub, WatchItem, now_unix_nanos, spawn,
};
use keelson_volume_manager_core::csi::paths::PLUGIN;
use keelson_volume_manager_core::desire::PodRef;
use keelson_volume_manager_core::operations::PodUid;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::metrics::MeasurementMetrics;
use crate::plugins::csi::{Condition, MeasureVolumes, MeasuredVolume, VolumeUsage};
use crate::stats::{PodStats, VolumeStats};
use crate::view::{MountedVolume, Phase, PodVolumeStatus};

/// A volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Target {
    pod: PodRef,
    /// `spec.volumes[].name`.
    name: String,
    /// Name of the claim in the pod's namespace; empty without one.
    claim: String,
    measured: MeasuredVolume,
}

impl Target {
    fn new(pod: &PodRef, mounted: &MountedVolume) -> Self {
        let measured = MeasuredVolume {
            pod: PodUid::from(pod.uid.as_str()),
            inner_name: mounted.inner_name.clone(),
            is_block: mounted.is_block_device,
        };
        Self { pod: pod.clone(), name: mounted.name.clone(), claim: mounted.claim.clone(), measured }
    }
}

/// The task of a volume. It ends when this is dropped.
#[derive(Debug)]
struct Measuring {
    target: Target,
    task: AbortHandle,
}

impl Drop for Measuring {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The tasks of a pod's volumes, by `spec.volumes[].name`.
type PodTasks = BTreeMap<String, Measuring>;

/// The figures of the volumes of CSI drivers. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct DriverStats {
    drivers: Arc<dyn MeasureVolumes>,
    pods: Arc<Mutex<BTreeMap<String, PodStats>>>,
    durations: MeasurementMetrics,
    events: EventRing,
    /// Whether the health of volumes is reported (gate `CSIVolumeHealth`).
    has_health: bool,
}

impl DriverStats {
    /// Figures of volumes that `drivers` measures.
    pub(crate) fn new(
        drivers: Arc<dyn MeasureVolumes>,
        durations: MeasurementMetrics,
        events: EventRing,
        has_health: bool,
    ) -> Self {
        Self { drivers, pods: Arc::default(), durations, events, has_health }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, PodStats>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the figures of all pods, or of the one with this UID, to `pods`.
    pub(crate) fn add_to(&self, pods: &mut Vec<PodStats>, uid: Option<&str>) {
        let all = self.lock();
        for (_, stats) in all.iter().filter(|(known, _)| uid.is_none_or(|uid| uid == *known)) {
            let measured = stats.volumes.iter().filter(|(_, volume)| volume.measured.is_some());
            let measured: BTreeMap<_, _> =
                measured.map(|(name, volume)| (name.clone(), volume.clone())).collect();
            if measured.is_empty() {
                continue;
            }
            match pods.iter_mut().find(|pod| pod.pod.uid == stats.pod.uid) {
                Some(pod) => pod.volumes.extend(measured),
                None => pods.push(PodStats { pod: stats.pod.clone(), volumes: measured }),
            }
        }
    }

    /// Has the mounted volumes that `hub` reports measured, each at a period of its own, until `shutdown`.
    pub(crate) async fn follow(
        self,
        hub: WatchHub<String, PodVolumeStatus>,
        period: Duration,
        shutdown: CancellationToken,
        handle: LoopHandle,
    ) {
        let mut changes = hub.subscribe();
        let mut tasks: BTreeMap<String, PodTasks> = BTreeMap::new();
        loop {
            handle.tick();
            // Cancel-safe: `next` takes nothing unless it returns.
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
                item = changes.next() => match item {
                    WatchItem::Set(uid, status) => self.update_pod(&mut tasks, uid, &status, period),
                    WatchItem::Gone(uid) => self.stop_pod(&mut tasks, &uid),
                    WatchItem::Synced => {}
                },
            }
        }
    }

    fn update_pod(
        &self,
        tasks: &mut BTreeMap<String, PodTasks>,
        uid: String,
        status: &PodVolumeStatus,
        period: Duration,
    ) {
        let of_drivers = status.mounts.iter().filter(|mounted| mounted.plugin == PLUGIN);
        let targets: BTreeMap<String, Target> =
            of_drivers.map(|mounted| (mounted.name.clone(), Target::new(&status.pod, mounted))).collect();
        match status.phase {
            Phase::Mounted if !targets.is_empty() => {}
            Phase::Mounted | Phase::Unmounting | Phase::Unmounted => return self.stop_pod(tasks, &uid),
            // Volumes that were mounted before still are.
            Phase::Unknown | Phase::Pending | Phase::Failed => return,
        }
        let running = tasks.entry(uid.clone()).or_default();
        running.retain(|name, measuring| targets.get(name) == Some(&measuring.target));
        let mut pods = self.lock();
        let stats = pods.entry(uid).or_default();
        stats.pod = status.pod.clone();
        stats.volumes.retain(|name, _| targets.contains_key(name));
        drop(pods);
        for (name, target) in targets {
            running.entry(name).or_insert_with(|| {
                let work = self.clone().measure_repeatedly(target.clone(), period);
                Measuring { target, task: spawn("measurement of a CSI volume", work).abort_handle() }
            });
        }
    }

    fn stop_pod(&self, tasks: &mut BTreeMap<String, PodTasks>, uid: &str) {
        tasks.remove(uid);
        self.lock().remove(uid);
    }

    async fn measure_repeatedly(self, target: Target, period: Duration) {
        let mut reported = None;
        loop {
            let condition = self.measure(&target).await;
            if condition.is_some() {
                self.report(&target, &mut reported, condition);
            }
            tokio::time::sleep(period.mul_f64(1.0 + fastrand::f64())).await;
        }
    }

    /// Measures a volume once, and stores the result. Its health, if its driver reports it.
    async fn measure(&self, target: &Target) -> Option<Condition> {
        let started = Instant::now();
        let result = self.drivers.measure(&target.measured).await;
        let mut pods = self.lock();
        // The pod may have been stopped meanwhile.
        let volumes = &mut pods.get_mut(&target.pod.uid)?.volumes;
        match result {
            Ok(Some(VolumeUsage { driver, usage, condition })) => {
                let condition = condition.filter(|_| self.has_health);
                let stats = VolumeStats {
                    claim: target.claim.clone(),
                    measured: Some((now_unix_nanos(), usage.unwrap_or_default())),
                    abnormal: condition.as_ref().map(|condition| condition.is_abnormal),
                    ..VolumeStats::default()
                };
                volumes.insert(target.name.clone(), stats);
                drop(pods);
                self.durations.driver_ended(driver.to_string(), started.elapsed());
                condition
            }
            Ok(None) => {
                volumes.remove(&target.name);
                None
            }
            Err(error) => {
                volumes.entry(target.name.clone()).or_default().message = error.to_string();
                drop(pods);
                let (uid, volume) = (&target.pod.uid, &target.name);
                tracing::debug!(uid, volume, %error, "a CSI driver has not measured a volume");
                None
            }
        }
    }

    /// Records that a volume is damaged, once for each change.
    fn report(&self, target: &Target, reported: &mut Option<Condition>, condition: Option<Condition>) {
        let is_new = *reported != condition;
        reported.clone_from(&condition);
        if let Some(condition) = condition.filter(|condition| is_new && condition.is_abnormal) {
            let pod = ObjectRef::pod(&target.pod.namespace, &target.pod.name, &target.pod.uid);
            let text = format!("Volume {}: {}", target.name, condition.message);
            self.events.warning(pod, "VolumeConditionAbnormal", text);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod tests;
