//! How many pods there are and how far their workers have come (§7, steps 11 and 15, and §19).
//!
//! Parity: as the kubelet's gauges.

use crate::worker::{WorkerPhase, WorkerState};

/// Values of the label `lifecycle`, in the order of the rows.
const LIFECYCLES: [&str; 3] = ["sync", "terminating", "terminated"];
/// Values of the labels `config` and `static`, in the order of the columns.
const CONFIGS: [(&str, &str); 5] =
    [("desired", ""), ("desired", "true"), ("orphan", ""), ("orphan", "true"), ("runtime_only", "unknown")];

/// The value of the label `static`.
pub fn static_label(is_static: bool) -> &'static str {
    if is_static { "true" } else { "" }
}

/// One UID, as it is counted.
#[derive(Clone, Copy, Debug)]
pub struct Counted<'a> {
    /// Where its worker stands.
    pub state: &'a WorkerState,
    /// Whether its pod is static; `None` where only the runtime knows it.
    pub is_static: Option<bool>,
    /// Its status, here or in its source, has a final phase.
    pub terminal: bool,
    /// How many ephemeral containers it names.
    pub ephemeral: usize,
}

/// Labels of a gauge of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Working {
    /// `sync`, `terminating`, `terminated`.
    pub lifecycle: &'static str,
    /// `desired`, `orphan`, `runtime_only`.
    pub config: &'static str,
    /// Empty, `true`, `unknown`.
    pub is_static: &'static str,
}

/// The numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    desired: [i64; 2],
    active: [i64; 2],
    working: [[i64; CONFIGS.len()]; LIFECYCLES.len()],
    ephemeral: i64,
}

impl Census {
    /// Counts one UID.
    pub fn add(&mut self, one: &Counted<'_>) {
        let state = one.state;
        let of = usize::from(one.is_static == Some(true));
        self.desired[of] += i64::from(state.desired);
        self.active[of] += i64::from(is_active(one));
        let row = match state.phase {
            WorkerPhase::Sync => 0,
            WorkerPhase::Terminating => 1,
            WorkerPhase::Terminated | WorkerPhase::Finished => 2,
        };
        let column = match (one.is_static, state.desired) {
            (None, _) => 4,
            (Some(_), true) => of,
            (Some(_), false) => 2 + of,
        };
        self.working[row][column] += 1;
        if row < 2 {
            self.ephemeral += i64::try_from(one.ephemeral).unwrap_or(i64::MAX);
        }
    }

    /// Ephemeral containers of pods that have not been ended.
    pub fn ephemeral(&self) -> i64 {
        self.ephemeral
    }

    /// Pods that a source names, by the label `static`.
    pub fn desired(&self) -> [(&'static str, i64); 2] {
        by_source(self.desired)
    }

    /// Those of them that take room on the node, by the label `static`.
    pub fn active(&self) -> [(&'static str, i64); 2] {
        by_source(self.active)
    }

    /// Workers by all combinations of labels, also of those that there are none of.
    pub fn working(&self) -> impl Iterator<Item = (Working, i64)> {
        let rows = LIFECYCLES.into_iter().zip(self.working);
        rows.flat_map(|(lifecycle, row)| {
            CONFIGS
                .into_iter()
                .zip(row)
                .map(move |((config, is_static), count)| (Working { lifecycle, config, is_static }, count))
        })
    }
}

fn by_source([api, static_]: [i64; 2]) -> [(&'static str, i64); 2] {
    [(static_label(false), api), (static_label(true), static_)]
}

/// Named by a source, and neither known to have ended nor of a final phase, unless it is still being ended (§6.5).
fn is_active(one: &Counted<'_>) -> bool {
    one.state.desired
        && match one.state.phase {
            WorkerPhase::Sync => !one.terminal,
            WorkerPhase::Terminating => true,
            WorkerPhase::Terminated | WorkerPhase::Finished => false,
        }
}

#[cfg(test)]
mod tests {
    use super::*;
    use WorkerPhase::{Finished, Sync, Terminated, Terminating};

    fn of(phase: WorkerPhase, desired: bool) -> WorkerState {
        WorkerState { phase, desired, ..WorkerState::default() }
    }

    /// The labels of the only worker of a census.
    fn cell(census: &Census) -> (&'static str, &'static str, &'static str) {
        let mut found = census.working().filter(|(_, count)| *count == 1).map(|(labels, _)| labels);
        let labels = found.next().unwrap();
        assert_eq!(found.next(), None);
        (labels.lifecycle, labels.config, labels.is_static)
    }

    #[test]
    fn each_worker_stands_in_one_place() {
        for (phase, desired, is_static, expected) in [
            (Sync, true, Some(true), ("sync", "desired", "true")),
            (Sync, true, Some(false), ("sync", "desired", "")),
            (Terminating, true, Some(true), ("terminating", "desired", "true")),
            (Terminating, false, Some(true), ("terminating", "orphan", "true")),
            (Terminated, false, Some(false), ("terminated", "orphan", "")),
            (Terminating, false, None, ("terminating", "runtime_only", "unknown")),
            (Finished, true, Some(true), ("terminated", "desired", "true")),
        ] {
            let mut census = Census::default();
            census.add(&Counted { state: &of(phase, desired), is_static, terminal: false, ephemeral: 0 });
            assert_eq!(cell(&census), expected, "{phase:?} {desired} {is_static:?}");
        }
        let labels: Vec<_> = Census::default().working().collect();
        assert_eq!(labels.len(), 15);
        assert!(labels.iter().all(|(_, count)| *count == 0));
    }

    #[test]
    fn a_pod_is_active_until_it_is_known_to_have_ended() {
        for (phase, desired, terminal, active) in [
            (Sync, true, false, 1),
            (Sync, true, true, 0),
            (Terminating, true, true, 1),
            (Terminated, true, true, 0),
            (Finished, true, false, 0),
            (Sync, false, false, 0),
            (Terminating, false, false, 0),
        ] {
            for is_static in [false, true] {
                let mut census = Census::default();
                census.add(&Counted {
                    state: &of(phase, desired),
                    is_static: Some(is_static),
                    terminal,
                    ephemeral: 0,
                });
                let (label, other) = (static_label(is_static), static_label(!is_static));
                let count =
                    |of: [(&str, i64); 2], label| of.into_iter().find(|(l, _)| *l == label).unwrap().1;
                let counted =
                    [census.desired(), census.active()].map(|of| (count(of, label), count(of, other)));
                let expected = [(i64::from(desired), 0), (active, 0)];
                assert_eq!(counted, expected, "{phase:?} {desired} {terminal}");
            }
        }
    }
}
