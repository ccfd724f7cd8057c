//! Measures volumes in the background, each pod with its own period, so that a stats request does not access any volume
//! (volumes.md §13).

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_service_kit::status::chain;
use keelson_service_kit::{CancellationToken, LoopHandle, Metrics, WatchHub, WatchItem, now_unix_nanos};
use keelson_volume_manager_core::desire::PodRef;
use keelson_volume_manager_core::measurement::{MeasureSchedule, MeasureSpec, Method};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::measure::{MeasureError, Usage, by_file_system, by_walk};
use crate::metrics::MeasurementMetrics;
use crate::mounter::Mounter;
use crate::view::{Phase, PodVolumeStatus};

/// The number of pods that are measured at the same time.
const MAX_CONCURRENT: usize = 2;
/// A measurement that takes longer is slow and frees its slot for another pod.
const SLOW_AFTER: Duration = Duration::from_secs(10);
/// With this many slow measurements no new one starts, because each of them occupies a thread.
const MAX_SLOW: usize = 8;

/// The deadline of a volume of a plugin. It is shorter, so that a server that does not answer makes no measurement slow.
const FOREIGN_DEADLINE: Duration = Duration::from_secs(3);

/// The stats of one volume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct VolumeStats {
    pub(crate) measure: MeasureSpec,
    /// Name of the claim in the pod's namespace; empty without one.
    pub(crate) claim: String,
    /// The time of the last successful measurement in unix nanoseconds, and its result.
    pub(crate) measured: Option<(i64, Usage)>,
    /// Why there is no newer result; empty if the last measurement succeeded.
    pub(crate) message: String,
    /// The volume is damaged, as its CSI driver reports it.
    pub(crate) abnormal: Option<bool>,
}

/// The stats of one pod's volumes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PodStats {
    pub(crate) pod: PodRef,
    pub(crate) volumes: BTreeMap<String, VolumeStats>,
}

/// The latest stats of every pod. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Stats {
    pods: Arc<Mutex<BTreeMap<String, PodStats>>>,
    durations: MeasurementMetrics,
    /// Measures the volumes of plugins.
    mounter: Mounter,
}

/// A volume to measure.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Target {
    name: String,
    path: PathBuf,
    measure: MeasureSpec,
    claim: String,
    /// A plugin provides it, so its filesystem may hang.
    is_foreign: bool,
}

/// A pod to measure.
#[derive(Debug)]
struct Pod {
    targets: Vec<Target>,
    /// Set when the pod's volumes are torn down.
    stop: Arc<AtomicBool>,
}

impl Stats {
    /// Creates an empty set of stats, and registers the duration of measurements with `metrics`.
    pub(crate) fn new(metrics: &Metrics, mounter: &Mounter) -> Self {
        let mounter = mounter.clone().with_patience(FOREIGN_DEADLINE);
        Self { pods: Arc::default(), durations: MeasurementMetrics::register(metrics), mounter }
    }

    /// The durations of measurements.
    pub(crate) fn durations(&self) -> MeasurementMetrics {
        self.durations.clone()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, PodStats>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stats of all pods, or of the one with this UID, without volumes that have not been measured yet.
    pub(crate) fn measured(&self, uid: Option<&str>) -> Vec<PodStats> {
        let all = self.lock();
        let wanted = all.iter().filter(|(known, _)| uid.is_none_or(|uid| uid == *known));
        let measured = wanted.map(|(_, pod)| {
            let mut pod = pod.clone();
            pod.volumes.retain(|_, stats| stats.measured.is_some());
            pod
        });
        measured.filter(|pod| !pod.volumes.is_empty()).collect()
    }

    fn add_pod(&self, pod: &PodRef, targets: &[Target]) {
        let mut all = self.lock();
        let entry = all.entry(pod.uid.clone()).or_default();
        entry.pod = pod.clone();
        entry.volumes.retain(|name, _| targets.iter().any(|target| target.name == *name));
        for target in targets {
            let stats = entry.volumes.entry(target.name.clone()).or_default();
            stats.measure = target.measure;
            stats.claim.clone_from(&target.claim);
        }
    }

    fn remove_pod(&self, uid: &str) {
        self.lock().remove(uid);
    }

    /// Stores a result, unless its volume was removed meanwhile.
    fn store_result(&self, uid: &str, volume: &str, outcome: Result<Usage, MeasureError>) {
        let mut all = self.lock();
        let Some(stats) = all.get_mut(uid).and_then(|pod| pod.volumes.get_mut(volume)) else { return };
        match outcome {
            Ok(usage) => {
                stats.measured = Some((now_unix_nanos(), usage));
                stats.message.clear();
            }
            Err(MeasureError::Cancelled) => {}
            Err(error) => {
                stats.message = chain(&error);
                drop(all);
                tracing::debug!(uid, volume, error = chain(&error), "cannot measure the volume");
            }
        }
    }

    /// Notes in the stats of every volume of a pod that the measurement is slow.
    fn note_slow(&self, uid: &str) {
        let text = format!("measuring the pod's volumes takes longer than {} s", SLOW_AFTER.as_secs());
        tracing::warn!(uid, "{text}");
        for stats in self.lock().get_mut(uid).into_iter().flat_map(|pod| pod.volumes.values_mut()) {
            stats.message.clone_from(&text);
        }
    }

    /// Measures the mounted volumes that `hub` reports, once per `period` and pod, until `shutdown`.
    pub(crate) async fn follow(
        self,
        hub: WatchHub<String, PodVolumeStatus>,
        period: Duration,
        shutdown: CancellationToken,
        handle: LoopHandle,
    ) {
        let mut changes = hub.subscribe();
        let started = Instant::now();
        let mut schedule = MeasureSchedule::new(period, MAX_CONCURRENT, SLOW_AFTER, MAX_SLOW);
        let mut pods: BTreeMap<String, Pod> = BTreeMap::new();
        let mut running: JoinSet<String> = JoinSet::new();
        loop {
            handle.tick();
            let now = started.elapsed();
            for uid in schedule.mark_slow(now) {
                self.note_slow(&uid);
            }
            for uid in schedule.start_due(now) {
                let Some(pod) = pods.get(&uid) else { continue };
                let (stats, targets, stop) = (self.clone(), pod.targets.clone(), Arc::clone(&pod.stop));
                running.spawn(async move { stats.measure(uid, &targets, &stop).await });
            }
            let heartbeat = started.elapsed() + LoopHandle::HEARTBEAT;
            let wake = started + schedule.next_wake().unwrap_or(heartbeat).min(heartbeat);
            // Cancel-safe: `next` and `join_next` take nothing unless they return; the other futures have no state.
            tokio::select! {
                () = shutdown.cancelled() => break,
                item = changes.next() => match item {
                    WatchItem::Set(uid, status) => self.update_pod(&mut pods, &mut schedule, uid, &status, started.elapsed()),
                    WatchItem::Gone(uid) => self.stop_pod(&mut pods, &mut schedule, &uid),
                    WatchItem::Synced => {}
                },
                Some(done) = running.join_next() => if let Ok(uid) = done {
                    schedule.finished(&uid, started.elapsed(), fastrand::f64());
                },
                () = tokio::time::sleep_until(wake) => {}
            }
        }
        for pod in pods.values() {
            pod.stop.store(true, Ordering::Relaxed);
        }
        // Measurements that hang are abandoned.
        running.abort_all();
    }

    fn update_pod(
        &self,
        pods: &mut BTreeMap<String, Pod>,
        schedule: &mut MeasureSchedule,
        uid: String,
        status: &PodVolumeStatus,
        now: Duration,
    ) {
        let measured = status.mounts.iter().filter(|mounted| mounted.measure.method != Method::None);
        let mut targets: Vec<Target> = measured
            .map(|mounted| Target {
                name: mounted.name.clone(),
                path: PathBuf::from(&mounted.host_path),
                measure: mounted.measure,
                claim: mounted.claim.clone(),
                is_foreign: mounted.is_foreign(),
            })
            .collect();
        // Fast measurements come first.
        targets.sort_by_key(|target| target.measure.method == Method::Walk);
        match status.phase {
            Phase::Mounted if !targets.is_empty() => {
                self.add_pod(&status.pod, &targets);
                schedule.add(&uid, targets.iter().any(|target| target.measure.limited), now);
                let pod =
                    pods.entry(uid).or_insert_with(|| Pod { targets: Vec::new(), stop: Arc::default() });
                pod.targets = targets;
            }
            Phase::Mounted | Phase::Unmounting | Phase::Unmounted => self.stop_pod(pods, schedule, &uid),
            // Volumes that were mounted before still are.
            Phase::Unknown | Phase::Pending | Phase::Failed => {}
        }
    }

    fn stop_pod(&self, pods: &mut BTreeMap<String, Pod>, schedule: &mut MeasureSchedule, uid: &str) {
        if let Some(pod) = pods.remove(uid) {
            pod.stop.store(true, Ordering::Relaxed);
            schedule.remove(uid);
        }
        self.remove_pod(uid);
    }

    /// Measures the volumes of a pod one after the other, and stores each result at once.
    async fn measure(&self, uid: String, targets: &[Target], stop: &Arc<AtomicBool>) -> String {
        for target in targets {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let started = Instant::now();
            let outcome = self.measure_volume(target, stop).await;
            if !stop.load(Ordering::Relaxed) {
                self.durations.ended(target.measure.method, started.elapsed());
                self.store_result(&uid, &target.name, outcome);
            }
        }
        uid
    }

    /// Measures a volume of this service on a thread, and one of a plugin in a process that is abandoned at its deadline.
    async fn measure_volume(&self, target: &Target, stop: &Arc<AtomicBool>) -> Result<Usage, MeasureError> {
        if target.is_foreign {
            return self.mounter.measure(&target.path).await.map_err(MeasureError::Helper);
        }
        let (path, method, stop) = (target.path.clone(), target.measure.method, Arc::clone(stop));
        let work = move || match method {
            Method::FileSystem => by_file_system(&path),
            Method::Walk | Method::None => by_walk(&path, &stop),
        };
        let measured = tokio::task::spawn_blocking(work).await;
        let ended =
            |error| MeasureError::Io { operation: "measure the volume", source: io::Error::other(error) };
        measured.map_err(ended).flatten()
    }
}

#[cfg(test)]
mod tests {
    use keelson_testkit::FuseServer;

    use super::*;
    use crate::mounter::testing::TestFolder;

    fn target(name: &str, path: &std::path::Path, method: Method) -> Target {
        let measure = MeasureSpec { method, ..MeasureSpec::default() };
        let is_foreign = method == Method::FileSystem;
        Target { name: name.into(), path: path.to_owned(), measure, claim: String::new(), is_foreign }
    }

    fn stats(folder: &TestFolder) -> Stats {
        let mut stats = Stats::new(&Metrics::new(), &folder.mounter());
        stats.mounter = folder.mounter().with_patience(Duration::from_secs(1));
        stats
    }

    fn message(stats: &Stats, volume: &str) -> String {
        stats.lock()["u"].volumes[volume].message.clone()
    }

    #[tokio::test]
    async fn a_hanging_server_is_measured_once_at_a_time_and_delays_no_other_volume() {
        let folder = TestFolder::new();
        let (hanging, healthy) = (folder.folder("hanging"), folder.tmpfs("healthy"));
        let server = FuseServer::over(&hanging).unwrap();
        let stats = stats(&folder);
        let targets = [
            target("hanging", &hanging, Method::FileSystem),
            target("healthy", &healthy, Method::FileSystem),
            target("own", folder.path(), Method::Walk),
        ];
        stats.add_pod(&PodRef { uid: "u".into(), ..PodRef::default() }, &targets);
        server.hang();
        stats.measure("u".into(), &targets, &Arc::default()).await;
        let names = || stats.measured(None)[0].volumes.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(), ["healthy", "own"]);
        let text = message(&stats, "hanging");
        assert!(text.contains(&format!("cannot measure the file system at {}", hanging.display())), "{text}");
        // The process hangs in the kernel, where no signal ends it.
        stats.measure("u".into(), &targets, &Arc::default()).await;
        assert_eq!(server.hanging().len(), 1);
        let text = message(&stats, "hanging");
        assert!(text.contains("has not ended for"), "{text}");
        server.answer();
        let measured = async {
            while names().len() < 3 {
                stats.measure("u".into(), &targets, &Arc::default()).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), measured).await.unwrap();
        assert_eq!(message(&stats, "hanging"), "");
    }
}
