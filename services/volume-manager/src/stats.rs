//! Measures volumes in the background, one pod at a time in rounds of its own, so that a question about them
//! touches no volume (volumes.md §13).

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_service_kit::status::chain;
use keelson_service_kit::{CancellationToken, LoopHandle, Metrics, WatchHub, WatchItem, now_unix_nanos};
use keelson_volume_manager_core::desire::PodRef;
use keelson_volume_manager_core::figures::{Means, Measure, Rounds};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::measure::{MeasureError, Usage, by_file_system, by_walk};
use crate::metrics::Measurements;
use crate::view::{Phase, Report};

/// Pods that are measured at the same time.
const AT_ONCE: usize = 2;
/// A measurement that takes longer gives its place to another pod's.
const PATIENCE: Duration = Duration::from_secs(10);
/// With so many that have lost patience and not ended nothing new is begun: each of them holds a thread.
const MOST_SLOW: usize = 8;

/// What is known of one volume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Figures {
    pub(crate) measure: Measure,
    /// When it was measured, unix nanoseconds, and what came of it.
    pub(crate) measured: Option<(i64, Usage)>,
    /// Why there is nothing newer; empty when the last measurement succeeded.
    pub(crate) message: String,
}

/// What is known of the volumes of one pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PodFigures {
    pub(crate) pod: PodRef,
    pub(crate) volumes: BTreeMap<String, Figures>,
}

/// The figures of every pod, as last measured. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Stats {
    pods: Arc<Mutex<BTreeMap<String, PodFigures>>>,
    took: Measurements,
}

/// A volume to measure.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Target {
    name: String,
    path: PathBuf,
    measure: Measure,
}

/// A pod to measure.
#[derive(Debug)]
struct Pod {
    targets: Vec<Target>,
    /// Set when the pod's volumes go.
    stop: Arc<AtomicBool>,
}

impl Stats {
    /// Without any figures yet; how long measurements take is registered with `metrics`.
    pub(crate) fn new(metrics: &Metrics) -> Self {
        Self { pods: Arc::default(), took: Measurements::register(metrics) }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, PodFigures>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pods that have been measured, or the one with this UID, without volumes that have not been.
    pub(crate) fn known(&self, uid: Option<&str>) -> Vec<PodFigures> {
        let all = self.lock();
        let wanted = all.iter().filter(|(known, _)| uid.is_none_or(|uid| uid == *known));
        let measured = wanted.map(|(_, pod)| {
            let mut pod = pod.clone();
            pod.volumes.retain(|_, figures| figures.measured.is_some());
            pod
        });
        measured.filter(|pod| !pod.volumes.is_empty()).collect()
    }

    fn name(&self, pod: &PodRef, targets: &[Target]) {
        let mut all = self.lock();
        let entry = all.entry(pod.uid.clone()).or_default();
        entry.pod = pod.clone();
        entry.volumes.retain(|name, _| targets.iter().any(|target| target.name == *name));
        for target in targets {
            entry.volumes.entry(target.name.clone()).or_default().measure = target.measure;
        }
    }

    fn forget(&self, uid: &str) {
        self.lock().remove(uid);
    }

    /// Takes a measurement, unless its volume has gone meanwhile.
    fn take(&self, uid: &str, volume: &str, outcome: Result<Usage, MeasureError>) {
        let mut all = self.lock();
        let Some(figures) = all.get_mut(uid).and_then(|pod| pod.volumes.get_mut(volume)) else { return };
        match outcome {
            Ok(usage) => {
                figures.measured = Some((now_unix_nanos(), usage));
                figures.message.clear();
            }
            Err(MeasureError::Stopped) => {}
            Err(error) => {
                figures.message = chain(&error);
                drop(all);
                tracing::debug!(uid, volume, error = chain(&error), "the volume cannot be measured");
            }
        }
    }

    /// Says of every volume of a pod that its measurement takes long.
    fn slow(&self, uid: &str) {
        let text = format!("its measurement takes longer than {} s", PATIENCE.as_secs());
        tracing::warn!(uid, "the volumes of the pod are measured, and that takes longer than usual");
        for figures in self.lock().get_mut(uid).into_iter().flat_map(|pod| pod.volumes.values_mut()) {
            figures.message.clone_from(&text);
        }
    }

    /// Measures what `hub` tells of, once per `period` and pod, until `shutdown`.
    pub(crate) async fn follow(
        self,
        hub: WatchHub<String, Report>,
        period: Duration,
        shutdown: CancellationToken,
        handle: LoopHandle,
    ) {
        let mut changes = hub.subscribe();
        let begun = Instant::now();
        let mut rounds = Rounds::new(period, AT_ONCE, PATIENCE, MOST_SLOW);
        let mut pods: BTreeMap<String, Pod> = BTreeMap::new();
        let mut running: JoinSet<String> = JoinSet::new();
        loop {
            handle.tick();
            let now = begun.elapsed();
            for uid in rounds.slow(now) {
                self.slow(&uid);
            }
            for uid in rounds.begin(now) {
                let Some(pod) = pods.get(&uid) else { continue };
                let (stats, targets, stop) = (self.clone(), pod.targets.clone(), Arc::clone(&pod.stop));
                running.spawn_blocking(move || stats.measure(uid, &targets, &stop));
            }
            let beat = begun.elapsed() + LoopHandle::HEARTBEAT;
            let wake = begun + rounds.next().unwrap_or(beat).min(beat);
            // Cancel-safe: `next` and `join_next` take nothing unless they return; the others hold nothing.
            tokio::select! {
                () = shutdown.cancelled() => break,
                item = changes.next() => match item {
                    WatchItem::Set(uid, report) => self.heard(&mut pods, &mut rounds, uid, &report, begun.elapsed()),
                    WatchItem::Gone(uid) => self.gone(&mut pods, &mut rounds, &uid),
                    WatchItem::Synced => {}
                },
                Some(done) = running.join_next() => if let Ok(uid) = done {
                    rounds.done(&uid, begun.elapsed(), fastrand::f64());
                },
                () = tokio::time::sleep_until(wake) => {}
            }
        }
        for pod in pods.values() {
            pod.stop.store(true, Ordering::Relaxed);
        }
        // What hangs is left to hang.
        running.detach_all();
    }

    fn heard(
        &self,
        pods: &mut BTreeMap<String, Pod>,
        rounds: &mut Rounds,
        uid: String,
        report: &Report,
        now: Duration,
    ) {
        let measured = report.mounts.iter().filter(|mounted| mounted.measure.means != Means::None);
        let mut targets: Vec<Target> = measured
            .map(|mounted| Target {
                name: mounted.name.clone(),
                path: PathBuf::from(&mounted.host_path),
                measure: mounted.measure,
            })
            .collect();
        // What answers at once comes first.
        targets.sort_by_key(|target| target.measure.means == Means::Walk);
        match report.phase {
            Phase::Mounted if !targets.is_empty() => {
                self.name(&report.pod, &targets);
                rounds.name(&uid, targets.iter().any(|target| target.measure.limited), now);
                let pod =
                    pods.entry(uid).or_insert_with(|| Pod { targets: Vec::new(), stop: Arc::default() });
                pod.targets = targets;
            }
            Phase::Mounted | Phase::Unmounting | Phase::Unmounted => self.gone(pods, rounds, &uid),
            // What was mounted before still is.
            Phase::Unknown | Phase::Pending | Phase::Failed => {}
        }
    }

    fn gone(&self, pods: &mut BTreeMap<String, Pod>, rounds: &mut Rounds, uid: &str) {
        if let Some(pod) = pods.remove(uid) {
            pod.stop.store(true, Ordering::Relaxed);
            rounds.forget(uid);
        }
        self.forget(uid);
    }

    /// Measures the volumes of a pod one after the other; each figure can be seen as soon as it is there.
    fn measure(&self, uid: String, targets: &[Target], stop: &AtomicBool) -> String {
        for target in targets {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let begun = Instant::now();
            let outcome = match target.measure.means {
                Means::None => continue,
                Means::FileSystem => by_file_system(&target.path),
                Means::Walk => by_walk(&target.path, stop),
            };
            if !stop.load(Ordering::Relaxed) {
                self.took.ended(target.measure.means, begun.elapsed());
                self.take(&uid, &target.name, outcome);
            }
        }
        uid
    }
}
