//! Which volumes have figures, and when they are measured (volumes.md §1, §13).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::desire::{Medium, Source};

/// How the use of a volume is found out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Means {
    /// Not at all: it has no figures.
    #[default]
    None,
    /// From its file system, which is its own.
    FileSystem,
    /// By adding up its files.
    Walk,
}

/// What is measured of a volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Measure {
    /// How.
    pub means: Means,
    /// It counts into the pod's `ephemeral-storage` (volumes.md §3.3): an emptyDir on disk, a configMap.
    pub local_ephemeral: bool,
    /// `emptyDir.sizeLimit` in bytes.
    pub size_limit: Option<u64>,
    /// It counts towards a limit, which is to act soon after it is exceeded.
    pub limited: bool,
}

/// What is measured of a volume with this source in a pod whose local storage is limited or not.
pub fn measure(source: &Source, storage_limited: bool) -> Measure {
    let base = Measure { limited: storage_limited, ..Measure::default() };
    match source {
        Source::EmptyDir { medium, size_limit } => {
            let on_disk = *medium == Medium::Disk;
            Measure {
                means: if on_disk { Means::Walk } else { Means::FileSystem },
                local_ephemeral: on_disk,
                size_limit: *size_limit,
                limited: size_limit.is_some() || (on_disk && storage_limited),
            }
        }
        Source::Files(files) if files.kind.in_memory() => {
            Measure { means: Means::FileSystem, ..Measure::default() }
        }
        Source::Files(_) => Measure { means: Means::Walk, local_ephemeral: true, ..base },
        Source::HostPath { .. } | Source::Unsupported(_) => Measure::default(),
    }
}

/// How long after a measurement a pod with a limit is measured again at the soonest: within the ten seconds in which limits are
/// looked at.
const LIMITED: Duration = Duration::from_secs(5);
/// Of the time, measurements of a pod with a limit take at most one part in so many.
const SHARE: u32 = 10;

/// When each pod is measured. A moment is the time since the service began.
///
/// Each pod has its own round, stretched at random, so that the rounds of many pods drift apart. At most so many
/// are measured at once; one that takes too long gives its place away, and its pod is not measured again before it
/// has ended. A pod with a limit has rounds of [`LIMITED`], or longer ones where measuring it takes long.
#[derive(Debug)]
pub struct Rounds {
    period: Duration,
    at_once: usize,
    patience: Duration,
    /// Measurements that have given their place away; with so many nothing new is begun.
    most_slow: usize,
    pods: BTreeMap<String, Round>,
    /// Of these, the ones with a limit.
    limited: BTreeSet<String>,
    /// Measurements of pods that are gone.
    left: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Round {
    Due(Duration),
    Since(Duration),
    Slow,
}

impl Rounds {
    /// Rounds of `period`, with `at_once` measurements at the same time, each of which may keep its place for
    /// `patience`; `most_slow` that have not kept to it hold everything up.
    pub fn new(period: Duration, at_once: usize, patience: Duration, most_slow: usize) -> Self {
        Self {
            period,
            at_once,
            patience,
            most_slow,
            pods: BTreeMap::new(),
            limited: BTreeSet::new(),
            left: 0,
        }
    }

    /// A pod with something to measure: it is due at once. For one that is known nothing changes but whether it has a limit.
    pub fn name(&mut self, uid: &str, limited: bool, now: Duration) {
        if limited {
            self.limited.insert(uid.to_owned());
        } else {
            self.limited.remove(uid);
        }
        if !self.pods.contains_key(uid) {
            self.pods.insert(uid.to_owned(), Round::Due(now));
        }
    }

    /// A pod that is measured no longer.
    pub fn forget(&mut self, uid: &str) {
        self.limited.remove(uid);
        if matches!(self.pods.remove(uid), Some(Round::Since(_) | Round::Slow)) {
            self.left += 1;
        }
    }

    /// The pods whose measurement has just lost its patience.
    pub fn slow(&mut self, now: Duration) -> Vec<String> {
        let mut slow = Vec::new();
        for (uid, round) in &mut self.pods {
            if matches!(round, Round::Since(since) if now >= *since + self.patience) {
                *round = Round::Slow;
                slow.push(uid.clone());
            }
        }
        slow
    }

    /// Begins what is due and has a place, the longest due first: the pods to measure now.
    pub fn begin(&mut self, now: Duration) -> Vec<String> {
        let running = self.pods.values().filter(|r| matches!(r, Round::Since(_))).count();
        let slow = self.left + self.pods.values().filter(|r| matches!(r, Round::Slow)).count();
        if slow >= self.most_slow {
            return Vec::new();
        }
        let mut due: Vec<(Duration, String)> = self
            .pods
            .iter()
            .filter_map(|(uid, round)| match round {
                Round::Due(at) if *at <= now => Some((*at, uid.clone())),
                _ => None,
            })
            .collect();
        due.sort();
        due.truncate(self.at_once.saturating_sub(running));
        for (_, uid) in &due {
            self.pods.insert(uid.clone(), Round::Since(now));
        }
        due.into_iter().map(|(_, uid)| uid).collect()
    }

    /// A measurement has ended; the next is due after the period, longer by `stretch` (0 to 1) of it.
    pub fn done(&mut self, uid: &str, now: Duration, stretch: f64) {
        let usual = self.period.mul_f64(1.0 + stretch.clamp(0.0, 1.0));
        let is_limited = self.limited.contains(uid);
        match self.pods.get_mut(uid) {
            Some(round @ Round::Since(_)) if is_limited => {
                let took = match round {
                    Round::Since(since) => now.saturating_sub(*since),
                    Round::Due(_) | Round::Slow => Duration::ZERO,
                };
                *round = Round::Due(now + LIMITED.max(took * SHARE).min(usual));
            }
            Some(round @ (Round::Since(_) | Round::Slow)) => *round = Round::Due(now + usual),
            // The pod went while it was measured, and may have come back.
            Some(Round::Due(_)) | None => self.left = self.left.saturating_sub(1),
        }
    }

    /// When to look again, if nothing happens before.
    pub fn next(&self) -> Option<Duration> {
        let running = self.pods.values().filter(|r| matches!(r, Round::Since(_))).count();
        let moments = self.pods.values().filter_map(|round| match round {
            // With every place taken the end of a measurement is waited for.
            Round::Due(at) => (running < self.at_once).then_some(*at),
            Round::Since(since) => Some(*since + self.patience),
            Round::Slow => None,
        });
        moments.min()
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

    fn rounds() -> Rounds {
        Rounds::new(MINUTE, 2, at(10), 2)
    }

    fn files(kind: FilesKind) -> Source {
        Source::Files(Files { kind, sources: Vec::new(), default_mode: None, nested: Vec::new() })
    }

    #[test]
    fn what_lies_on_disk_is_added_up_and_counts_as_the_pods_own_storage() {
        let empty = |medium| Source::EmptyDir { medium, size_limit: Some(7) };
        let host = Source::HostPath { path: "/x".into(), kind: String::new() };
        for (source, means, local_ephemeral, size_limit) in [
            (empty(Medium::Disk), Means::Walk, true, Some(7)),
            (empty(Medium::Memory), Means::FileSystem, false, Some(7)),
            (empty(Medium::HugePages("-2Mi".into())), Means::FileSystem, false, Some(7)),
            (files(FilesKind::ConfigMap), Means::Walk, true, None),
            (files(FilesKind::Secret), Means::FileSystem, false, None),
            (files(FilesKind::Projected), Means::FileSystem, false, None),
            (host, Means::None, false, None),
            (Source::Unsupported("nfs".into()), Means::None, false, None),
        ] {
            let wanted = Measure { means, local_ephemeral, size_limit, limited: size_limit.is_some() };
            assert_eq!(measure(&source, false), wanted, "{source:?}");
            // A limit of the pod is one of what lies on the node's disk.
            let limited = wanted.limited || wanted.local_ephemeral;
            assert_eq!(measure(&source, true), Measure { limited, ..wanted }, "{source:?}");
        }
    }

    #[test]
    fn a_new_pod_is_measured_at_once_and_again_after_a_stretched_period() {
        let mut rounds = rounds();
        assert_eq!(rounds.next(), None);
        rounds.name("a", false, at(5));
        assert_eq!(rounds.next(), Some(at(5)));
        assert_eq!(rounds.begin(at(5)), ["a"]);
        rounds.name("a", false, at(6));
        assert!(rounds.begin(at(6)).is_empty(), "it is being measured");
        rounds.done("a", at(7), 0.5);
        assert_eq!(rounds.next(), Some(at(7 + 90)));
        assert!(rounds.begin(at(96)).is_empty());
        assert_eq!(rounds.begin(at(97)), ["a"]);
    }

    #[test]
    fn a_pod_with_a_limit_is_measured_again_soon_unless_measuring_it_takes_long() {
        let mut rounds = rounds();
        rounds.name("a", true, at(0));
        rounds.begin(at(0));
        rounds.done("a", at(0), 1.0);
        assert_eq!(rounds.next(), Some(at(5)));
        rounds.begin(at(5));
        rounds.done("a", at(8), 1.0);
        assert_eq!(rounds.next(), Some(at(8 + 30)), "a tenth of the time");
        rounds.begin(at(38));
        rounds.done("a", at(47), 0.0);
        assert_eq!(rounds.next(), Some(at(47 + 60)), "no less often than the others");
        rounds.name("a", false, at(50));
        rounds.begin(at(107));
        rounds.done("a", at(107), 0.5);
        assert_eq!(rounds.next(), Some(at(107 + 90)));
    }

    #[test]
    fn so_many_at_once_and_the_longest_due_first() {
        let mut rounds = rounds();
        for (uid, since) in [("a", 3), ("b", 1), ("c", 2)] {
            rounds.name(uid, false, at(since));
        }
        assert_eq!(rounds.begin(at(4)), ["b", "c"]);
        assert!(rounds.begin(at(4)).is_empty());
        assert_eq!(rounds.next(), Some(at(14)), "until one has ended or has lost its patience");
        rounds.done("b", at(5), 0.0);
        assert_eq!(rounds.begin(at(5)), ["a"]);
    }

    #[test]
    fn what_takes_too_long_gives_its_place_away_and_is_not_begun_twice() {
        let mut rounds = rounds();
        for uid in ["a", "b", "c"] {
            rounds.name(uid, false, at(0));
        }
        assert_eq!(rounds.begin(at(0)), ["a", "b"]);
        assert!(rounds.slow(at(9)).is_empty());
        rounds.done("b", at(9), 1.0);
        assert_eq!(rounds.slow(at(10)), ["a"]);
        assert!(rounds.slow(at(11)).is_empty(), "it is told once");
        assert_eq!(rounds.begin(at(500)), ["c", "b"]);
        rounds.done("a", at(500), 0.0);
        assert_eq!(rounds.begin(at(560)), Vec::<String>::new(), "both places are taken");
        rounds.done("c", at(560), 0.0);
        assert_eq!(rounds.begin(at(560)), ["a"]);
    }

    #[test]
    fn too_many_slow_ones_hold_everything_up_until_one_ends_also_when_their_pods_are_gone() {
        let mut rounds = rounds();
        for uid in ["a", "b", "c"] {
            rounds.name(uid, false, at(0));
        }
        rounds.begin(at(0));
        assert_eq!(rounds.slow(at(10)), ["a", "b"]);
        assert!(rounds.begin(at(10)).is_empty());
        rounds.forget("a");
        assert!(rounds.begin(at(10)).is_empty(), "its measurement still runs");
        rounds.done("a", at(11), 0.0);
        assert_eq!(rounds.begin(at(11)), ["c"]);
        rounds.forget("c");
        rounds.done("c", at(12), 0.0);
        rounds.done("b", at(12), 0.0);
        assert_eq!(rounds.next(), Some(at(72)));
    }
}
