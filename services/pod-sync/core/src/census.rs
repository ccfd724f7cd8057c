//! Counts of pods and workers (§7, steps 11 and 15, and §19).
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

/// One UID to count.
#[derive(Clone, Copy, Debug)]
pub struct CountedPod<'a> {
    /// The state of its worker.
    pub state: &'a WorkerState,
    /// Whether its pod is static; `None` if only the runtime has it.
    pub is_static: Option<bool>,
    /// Its status, here or at its source, has a final phase.
    pub terminal: bool,
    /// The number of ephemeral containers in its spec.
    pub ephemeral: usize,
}

/// Labels of a gauge of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerLabels {
    /// `sync`, `terminating`, `terminated`.
    pub lifecycle: &'static str,
    /// `desired`, `orphan`, `runtime_only`.
    pub config: &'static str,
    /// Empty, `true`, `unknown`.
    pub is_static: &'static str,
}

/// The counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    desired: [i64; 2],
    active: [i64; 2],
    workers: [[i64; CONFIGS.len()]; LIFECYCLES.len()],
    ephemeral: i64,
}

impl Census {
    /// Counts one UID.
    pub fn add(&mut self, pod: &CountedPod<'_>) {
        let state = pod.state;
        let of = usize::from(pod.is_static == Some(true));
        self.desired[of] += i64::from(state.desired);
        self.active[of] += i64::from(is_active(pod));
        let row = match state.phase {
            WorkerPhase::Sync => 0,
            WorkerPhase::Terminating => 1,
            WorkerPhase::Terminated | WorkerPhase::Finished => 2,
        };
        let column = match (pod.is_static, state.desired) {
            (None, _) => 4,
            (Some(_), true) => of,
            (Some(_), false) => 2 + of,
        };
        self.workers[row][column] += 1;
        if row < 2 {
            self.ephemeral += i64::try_from(pod.ephemeral).unwrap_or(i64::MAX);
        }
    }

    /// Ephemeral containers of pods that have not terminated.
    pub fn ephemeral(&self) -> i64 {
        self.ephemeral
    }

    /// Pods that a source has, by the label `static`.
    pub fn desired(&self) -> [(&'static str, i64); 2] {
        by_source(self.desired)
    }

    /// Those of them that use resources of the node, by the label `static`.
    pub fn active(&self) -> [(&'static str, i64); 2] {
        by_source(self.active)
    }

    /// Workers by every combination of labels, including those with a count of 0.
    pub fn workers(&self) -> impl Iterator<Item = (WorkerLabels, i64)> {
        let rows = LIFECYCLES.into_iter().zip(self.workers);
        rows.flat_map(|(lifecycle, row)| {
            CONFIGS.into_iter().zip(row).map(move |((config, is_static), count)| {
                (WorkerLabels { lifecycle, config, is_static }, count)
            })
        })
    }
}

fn by_source([api, static_]: [i64; 2]) -> [(&'static str, i64); 2] {
    [(static_label(false), api), (static_label(true), static_)]
}

/// A source has the pod, and it is neither terminated nor in a final phase, unless it is still terminating (§6.5).
fn is_active(pod: &CountedPod<'_>) -> bool {
    pod.state.desired
        && match pod.state.phase {
            WorkerPhase::Sync => !pod.terminal,
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
        let mut found = census.workers().filter(|(_, count)| *count == 1).map(|(labels, _)| labels);
        let labels = found.next().unwrap();
        assert_eq!(found.next(), None);
        (labels.lifecycle, labels.config, labels.is_static)
    }

    #[test]
    fn each_worker_is_counted_under_one_label_set() {
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
            census.add(&CountedPod { state: &of(phase, desired), is_static, terminal: false, ephemeral: 0 });
            assert_eq!(cell(&census), expected, "{phase:?} {desired} {is_static:?}");
        }
        let labels: Vec<_> = Census::default().workers().collect();
        assert_eq!(labels.len(), 15);
        assert!(labels.iter().all(|(_, count)| *count == 0));
    }

    #[test]
    fn a_pod_is_active_until_it_has_terminated() {
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
                census.add(&CountedPod {
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
