//! Which volumes are measured, how, and when (volumes.md §1, §13).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::desire::{Medium, Source};

/// How the usage of a volume is measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Method {
    /// Not at all: the volume has no stats.
    #[default]
    None,
    /// From the statistics of its file system, which belongs to the volume alone.
    FileSystem,
    /// By a walk that sums up its files.
    Walk,
}

/// How a volume is measured and what its usage counts towards.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MeasureSpec {
    /// How the usage is measured.
    pub method: Method,
    /// The volume counts towards the pod's `ephemeral-storage` (volumes.md §3.3): an emptyDir on disk or a configMap.
    pub local_ephemeral: bool,
    /// `emptyDir.sizeLimit` in bytes.
    pub size_limit: Option<u64>,
    /// The volume counts towards a limit, which must be enforced soon after it is exceeded.
    pub limited: bool,
}

/// How a volume with this source is measured; `storage_limited` if the pod's local storage is limited.
pub fn measure_spec(source: &Source, storage_limited: bool) -> MeasureSpec {
    let base = MeasureSpec { limited: storage_limited, ..MeasureSpec::default() };
    match source {
        Source::EmptyDir { medium, size_limit } => {
            let on_disk = *medium == Medium::Disk;
            MeasureSpec {
                method: if on_disk { Method::Walk } else { Method::FileSystem },
                local_ephemeral: on_disk,
                size_limit: *size_limit,
                limited: size_limit.is_some() || (on_disk && storage_limited),
            }
        }
        Source::Files(files) if files.kind.in_memory() => {
            MeasureSpec { method: Method::FileSystem, ..MeasureSpec::default() }
        }
        Source::Files(_) => MeasureSpec { method: Method::Walk, local_ephemeral: true, ..base },
        Source::HostPath { .. } | Source::Claim { .. } | Source::Plugin { .. } | Source::Unsupported(_) => {
            MeasureSpec::default()
        }
    }
}

/// The shortest period of a pod with a limit: less than the ten seconds in which limits are checked.
const LIMITED_PERIOD: Duration = Duration::from_secs(5);
/// The period of a pod with a limit is at least this many times the duration of its measurement.
const PERIOD_FACTOR: u32 = 10;

/// Decides when each pod is measured. Times count from the start of the service.
///
/// Each pod has its own period with a random jitter, so that the measurements of many pods drift apart. The number of
/// concurrent measurements is limited. A slow measurement frees its slot, and its pod is not measured again before it
/// has ended. A pod with a limit has a period of [`LIMITED_PERIOD`], or a longer one if measuring it takes long.
#[derive(Debug)]
pub struct MeasureSchedule {
    period: Duration,
    max_concurrent: usize,
    slow_after: Duration,
    /// With this many slow measurements no new one starts.
    max_slow: usize,
    pods: BTreeMap<String, PodState>,
    /// UIDs of the pods with a limit.
    limited: BTreeSet<String>,
    /// Running measurements of pods that are gone.
    orphaned: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PodState {
    Due(Duration),
    Running(Duration),
    Slow,
}

impl MeasureSchedule {
    /// Creates a schedule: one measurement per pod and `period`, at most `max_concurrent` concurrent ones. A measurement that
    /// takes `slow_after` is slow and frees its slot; with `max_slow` slow ones no new one starts.
    pub fn new(period: Duration, max_concurrent: usize, slow_after: Duration, max_slow: usize) -> Self {
        Self {
            period,
            max_concurrent,
            slow_after,
            max_slow,
            pods: BTreeMap::new(),
            limited: BTreeSet::new(),
            orphaned: 0,
        }
    }

    /// Adds a pod, due at once. For a pod that is already known, only updates whether it has a limit.
    pub fn add(&mut self, uid: &str, limited: bool, now: Duration) {
        if limited {
            self.limited.insert(uid.to_owned());
        } else {
            self.limited.remove(uid);
        }
        if !self.pods.contains_key(uid) {
            self.pods.insert(uid.to_owned(), PodState::Due(now));
        }
    }

    /// Removes a pod.
    pub fn remove(&mut self, uid: &str) {
        self.limited.remove(uid);
        if matches!(self.pods.remove(uid), Some(PodState::Running(_) | PodState::Slow)) {
            self.orphaned += 1;
        }
    }

    /// Marks measurements that have become slow and returns their pods.
    pub fn mark_slow(&mut self, now: Duration) -> Vec<String> {
        let mut slow = Vec::new();
        for (uid, state) in &mut self.pods {
            if matches!(state, PodState::Running(since) if now >= *since + self.slow_after) {
                *state = PodState::Slow;
                slow.push(uid.clone());
            }
        }
        slow
    }

    /// Starts due measurements as far as there are free slots, the longest due first. Returns the pods to measure now.
    pub fn start_due(&mut self, now: Duration) -> Vec<String> {
        let running = self.pods.values().filter(|r| matches!(r, PodState::Running(_))).count();
        let slow = self.orphaned + self.pods.values().filter(|r| matches!(r, PodState::Slow)).count();
        if slow >= self.max_slow {
            return Vec::new();
        }
        let mut due: Vec<(Duration, String)> = self
            .pods
            .iter()
            .filter_map(|(uid, state)| match state {
                PodState::Due(at) if *at <= now => Some((*at, uid.clone())),
                _ => None,
            })
            .collect();
        due.sort();
        due.truncate(self.max_concurrent.saturating_sub(running));
        for (_, uid) in &due {
            self.pods.insert(uid.clone(), PodState::Running(now));
        }
        due.into_iter().map(|(_, uid)| uid).collect()
    }

    /// Records the end of a measurement. The next one is due after the period plus the fraction `jitter` (0 to 1) of it.
    pub fn finished(&mut self, uid: &str, now: Duration, jitter: f64) {
        let usual = self.period.mul_f64(1.0 + jitter.clamp(0.0, 1.0));
        let is_limited = self.limited.contains(uid);
        match self.pods.get_mut(uid) {
            Some(state @ PodState::Running(_)) if is_limited => {
                let took = match state {
                    PodState::Running(since) => now.saturating_sub(*since),
                    PodState::Due(_) | PodState::Slow => Duration::ZERO,
                };
                *state = PodState::Due(now + LIMITED_PERIOD.max(took * PERIOD_FACTOR).min(usual));
            }
            Some(state @ (PodState::Running(_) | PodState::Slow)) => *state = PodState::Due(now + usual),
            // The pod was removed while it was measured, and may have been added again.
            Some(PodState::Due(_)) | None => self.orphaned = self.orphaned.saturating_sub(1),
        }
    }

    /// When to check for due and slow measurements next, unless something changes before.
    pub fn next_wake(&self) -> Option<Duration> {
        let running = self.pods.values().filter(|r| matches!(r, PodState::Running(_))).count();
        let times = self.pods.values().filter_map(|state| match state {
            // Without a free slot, the end of a measurement is the next event.
            PodState::Due(at) => (running < self.max_concurrent).then_some(*at),
            PodState::Running(since) => Some(*since + self.slow_after),
            PodState::Slow => None,
        });
        times.min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::{Files, FilesKind};

    const MINUTE: Duration = Duration::from_secs(60);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn schedule() -> MeasureSchedule {
        MeasureSchedule::new(MINUTE, 2, at(10), 2)
    }

    fn files(kind: FilesKind) -> Source {
        Source::Files(Files { kind, sources: Vec::new(), default_mode: None, nested: Vec::new() })
    }

    #[test]
    fn volumes_on_disk_are_walked_and_count_as_local_ephemeral_storage() {
        let empty = |medium| Source::EmptyDir { medium, size_limit: Some(7) };
        let host = Source::HostPath { path: "/x".into(), kind: String::new() };
        for (source, method, local_ephemeral, size_limit) in [
            (empty(Medium::Disk), Method::Walk, true, Some(7)),
            (empty(Medium::Memory), Method::FileSystem, false, Some(7)),
            (empty(Medium::HugePages("-2Mi".into())), Method::FileSystem, false, Some(7)),
            (files(FilesKind::ConfigMap), Method::Walk, true, None),
            (files(FilesKind::Secret), Method::FileSystem, false, None),
            (files(FilesKind::Projected), Method::FileSystem, false, None),
            (host, Method::None, false, None),
            (Source::Unsupported("nfs".into()), Method::None, false, None),
        ] {
            let wanted = MeasureSpec { method, local_ephemeral, size_limit, limited: size_limit.is_some() };
            assert_eq!(measure_spec(&source, false), wanted, "{source:?}");
            // A limit of the pod applies to volumes on the node's disk.
            let limited = wanted.limited || wanted.local_ephemeral;
            assert_eq!(measure_spec(&source, true), MeasureSpec { limited, ..wanted }, "{source:?}");
        }
    }

    #[test]
    fn a_new_pod_is_measured_at_once_and_again_after_the_jittered_period() {
        let mut schedule = schedule();
        assert_eq!(schedule.next_wake(), None);
        schedule.add("a", false, at(5));
        assert_eq!(schedule.next_wake(), Some(at(5)));
        assert_eq!(schedule.start_due(at(5)), ["a"]);
        schedule.add("a", false, at(6));
        assert!(schedule.start_due(at(6)).is_empty(), "it is being measured");
        schedule.finished("a", at(7), 0.5);
        assert_eq!(schedule.next_wake(), Some(at(7 + 90)));
        assert!(schedule.start_due(at(96)).is_empty());
        assert_eq!(schedule.start_due(at(97)), ["a"]);
    }

    #[test]
    fn a_pod_with_a_limit_is_measured_sooner_unless_measuring_is_slow() {
        let mut schedule = schedule();
        schedule.add("a", true, at(0));
        schedule.start_due(at(0));
        schedule.finished("a", at(0), 1.0);
        assert_eq!(schedule.next_wake(), Some(at(5)));
        schedule.start_due(at(5));
        schedule.finished("a", at(8), 1.0);
        assert_eq!(schedule.next_wake(), Some(at(8 + 30)), "a tenth of the time");
        schedule.start_due(at(38));
        schedule.finished("a", at(47), 0.0);
        assert_eq!(schedule.next_wake(), Some(at(47 + 60)), "no less often than the others");
        schedule.add("a", false, at(50));
        schedule.start_due(at(107));
        schedule.finished("a", at(107), 0.5);
        assert_eq!(schedule.next_wake(), Some(at(107 + 90)));
    }

    #[test]
    fn concurrent_measurements_are_limited_and_the_longest_due_start_first() {
        let mut schedule = schedule();
        for (uid, since) in [("a", 3), ("b", 1), ("c", 2)] {
            schedule.add(uid, false, at(since));
        }
        assert_eq!(schedule.start_due(at(4)), ["b", "c"]);
        assert!(schedule.start_due(at(4)).is_empty());
        assert_eq!(schedule.next_wake(), Some(at(14)), "until one has ended or is slow");
        schedule.finished("b", at(5), 0.0);
        assert_eq!(schedule.start_due(at(5)), ["a"]);
    }

    #[test]
    fn a_slow_measurement_frees_its_slot_and_is_not_started_twice() {
        let mut schedule = schedule();
        for uid in ["a", "b", "c"] {
            schedule.add(uid, false, at(0));
        }
        assert_eq!(schedule.start_due(at(0)), ["a", "b"]);
        assert!(schedule.mark_slow(at(9)).is_empty());
        schedule.finished("b", at(9), 1.0);
        assert_eq!(schedule.mark_slow(at(10)), ["a"]);
        assert!(schedule.mark_slow(at(11)).is_empty(), "it is reported once");
        assert_eq!(schedule.start_due(at(500)), ["c", "b"]);
        schedule.finished("a", at(500), 0.0);
        assert_eq!(schedule.start_due(at(560)), Vec::<String>::new(), "both places are taken");
        schedule.finished("c", at(560), 0.0);
        assert_eq!(schedule.start_due(at(560)), ["a"]);
    }

    #[test]
    fn too_many_slow_measurements_block_new_ones_even_after_their_pods_are_gone() {
        let mut schedule = schedule();
        for uid in ["a", "b", "c"] {
            schedule.add(uid, false, at(0));
        }
        schedule.start_due(at(0));
        assert_eq!(schedule.mark_slow(at(10)), ["a", "b"]);
        assert!(schedule.start_due(at(10)).is_empty());
        schedule.remove("a");
        assert!(schedule.start_due(at(10)).is_empty(), "its measurement still runs");
        schedule.finished("a", at(11), 0.0);
        assert_eq!(schedule.start_due(at(11)), ["c"]);
        schedule.remove("c");
        schedule.finished("c", at(12), 0.0);
        schedule.finished("b", at(12), 0.0);
        assert_eq!(schedule.next_wake(), Some(at(72)));
    }
}
