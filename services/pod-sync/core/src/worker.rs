//! The life of one UID as a state machine (§6.1 to §6.5).
//!
//! [`step`] takes the state, one input and the time, and returns the new state and the work to do. The state is plain data,
//! stored with the pod: a restarted service continues at the first unfinished step with the rest of the grace period.
//!
//! Parity: as the kubelet, except that
//! - a grace of zero stays zero (upstream makes it 1 s, then 2 s): the processes are killed at once;
//! - an orphan keeps the grace that its records carry;
//! - a finished UID that no source has any more is forgotten at once, not at the next housekeeping.

use keelson_kube_model::Pod;
use serde::{Deserialize, Serialize};

use crate::moment::{Moment, SECOND};
use crate::observation::PodObservation;
use crate::reason::Reason;
use crate::termination::{ORPHAN_GRACE_SECONDS, orphan_grace_seconds};

/// The phase of a UID's worker. It only moves forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum WorkerPhase {
    /// The pod should run.
    #[default]
    Sync,
    /// Its processes are being stopped.
    Terminating,
    /// No process is left: volumes and cgroup are removed.
    Terminated,
    /// Nothing is left to do.
    Finished,
}

impl WorkerPhase {
    /// The word used in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sync => "sync",
            Self::Terminating => "terminating",
            Self::Terminated => "terminated",
            Self::Finished => "finished",
        }
    }
}

/// What an eviction, a pre-emption or a shutdown writes into the status.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusPatch {
    /// `status.reason`: `Evicted`, `Preempting`, `Terminated`, ….
    pub reason: String,
    /// `status.message`.
    pub message: String,
    /// Set the condition `DisruptionTarget`.
    pub disruption_target: bool,
    /// Message of that condition; empty: that of the status.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub condition_message: String,
    /// The boot that a shutdown of the machine ends, if that is why the pod ends; else empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub shutdown_of_boot: String,
    /// A drain of the node ends the pod: when it is undone, the pod starts again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub drained: bool,
}

/// The state of one UID's worker: everything that must survive a restart of the service while the pod terminates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerState {
    /// The phase.
    pub phase: WorkerPhase,
    /// The pod has had its first turn. A static pod that waits for its full name has not started.
    pub started: bool,
    /// There is no pod object: the runtime has a pod that no source has sent.
    pub runtime_only: bool,
    /// Why it terminates.
    pub cause: Option<Reason>,
    /// The pod object has a deletion timestamp, or the pod is an orphan.
    pub deleted: bool,
    /// It was evicted, pre-empted or shut down.
    pub evicted: bool,
    /// Its source still has it.
    pub desired: bool,
    /// The same UID was added again while it was terminating.
    pub restart_requested: bool,
    /// The grace period in seconds; `None` until it terminates. It can only shrink.
    pub grace_seconds: Option<i64>,
    /// When the grace period ends, unix nanoseconds.
    pub kill_deadline_unix_nanos: Option<i64>,
    /// When it began to terminate, unix nanoseconds.
    pub terminating_since_unix_nanos: Option<i64>,
    /// Goes into every status from now on.
    pub status_patch: Option<StatusPatch>,
    /// The state was restored from disk and the source has not sent the pod yet. See [`WorkerState::restored`].
    #[serde(skip)]
    pub replay_expected: bool,
}

impl WorkerState {
    /// Restores a state that an earlier process stored. The source will send the pod as if it were new; that first update
    /// does not start a new worker.
    pub fn restored(mut self) -> Self {
        // A pod that was removed from its source, or that no source ever sent, is new when a source sends it.
        self.replay_expected = self.desired && !self.runtime_only;
        self
    }

    /// Whether a drain of the node has ended the pod, and it has not been requested to start again.
    pub fn is_drained(&self) -> bool {
        let drained = self.status_patch.as_ref().is_some_and(|patch| patch.drained);
        drained && self.desired && !self.restart_requested
    }

    /// Whether a shutdown of an earlier boot has ended the pod. In a boot without an id this is not known.
    pub fn is_of_earlier_boot(&self, boot_id: &str) -> bool {
        let of = self.status_patch.as_ref().map_or("", |patch| patch.shutdown_of_boot.as_str());
        !of.is_empty() && !boot_id.is_empty() && of != boot_id
    }
}

/// The kind of an update from a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UpdateKind {
    /// A new UID (ADD).
    Create,
    /// The pod changed, or its deletion was requested (UPDATE, DELETE, RECONCILE).
    Update,
    /// Nothing changed; resync.
    Sync,
}

/// One input to the state machine of a UID.
#[derive(Clone, Debug)]
pub enum Input<'a> {
    /// The source has sent the pod.
    Update {
        /// The kind.
        kind: UpdateKind,
        /// The pod as it is now.
        pod: &'a Pod,
        /// What the runtime has of it, if that was read already.
        observed: Option<&'a PodObservation>,
    },
    /// The source no longer has the pod (REMOVE), and all sources are ready.
    Removed {
        /// The last pod object seen, if any.
        pod: Option<&'a Pod>,
    },
    /// Eviction, pre-emption or shutdown.
    Killed {
        /// The pod.
        pod: &'a Pod,
        /// A grace period in seconds that replaces the pod's own if it is shorter.
        grace_seconds: Option<i64>,
        /// What to write into the status.
        patch: Option<StatusPatch>,
    },
    /// The runtime has a UID that no source has, and all sources are ready.
    ObservedOrphan {
        /// What the runtime has of it.
        observed: &'a PodObservation,
    },
    /// Permission to start was given (always for API pods, by [`crate::ordering`] for static ones).
    Started,
    /// A turn has ended.
    Outcome {
        /// How it ended.
        outcome: SyncOutcome,
        /// The pod it worked on, if one is known.
        pod: Option<&'a Pod>,
    },
}

/// The outcome of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncOutcome {
    /// Done, as far as possible now.
    Done,
    /// The pod has completed: phase Succeeded or Failed, or none of its containers will start again.
    Terminal,
    /// It failed and is retried.
    Failed,
    /// It was cancelled because something newer came.
    Cancelled,
}

/// The work of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Make the pod run (§8.1).
    Sync,
    /// Stop its processes (§8.2), with hooks and SIGTERM until the deadline, with SIGKILL after it.
    Terminate {
        /// When the grace period ends, unix nanoseconds.
        kill_deadline_unix_nanos: i64,
    },
    /// Stop the processes of an orphan, which has no spec (§8.3): no hooks, no status.
    TerminateOrphan {
        /// When the grace period ends, unix nanoseconds.
        kill_deadline_unix_nanos: i64,
    },
    /// Unmount, remove the cgroup, write the final status (§8.4).
    Clean,
}

/// The result of [`step`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transition {
    /// The new state.
    pub state: WorkerState,
    /// The next work; `None` if this input starts none.
    pub work: Option<Work>,
    /// Cancel the work in progress: it is obsolete or too slow.
    pub cancel_running: bool,
    /// The pod no longer runs: wake those that wait for its end.
    pub ended: bool,
    /// Drop the worker.
    pub forget: bool,
    /// After dropping it start a new one for the same UID.
    pub start_new_worker: bool,
}

/// Applies one input to one UID. The state `None` is a UID without a worker.
pub fn step(state: Option<&WorkerState>, input: &Input<'_>, at: &Moment) -> Transition {
    let first = state.is_none();
    let mut next = state.cloned().unwrap_or_default();
    match input {
        Input::Update { kind, pod, observed } => {
            let replay = std::mem::take(&mut next.replay_expected);
            let anew = *kind == UpdateKind::Create && !replay && !pod.is_deleting();
            if !first && anew && next.phase != WorkerPhase::Sync {
                next.restart_requested = true;
                next.desired = true;
                return no_work(next, false);
            }
            update(&mut next, first, pod, *observed, at);
        }
        Input::Removed { .. } | Input::Started if first => return no_work(next, true),
        Input::Removed { pod } => {
            next.desired = false;
            next.restart_requested = false;
            next.deleted |= pod.is_some_and(Pod::is_deleting);
            begin_termination(&mut next, Reason::PodRemoved, *pod, None, at);
        }
        Input::Killed { pod, grace_seconds, patch } => {
            next.evicted = true;
            next.desired |= first;
            next.started |= !pod.starts_in_turn();
            if next.phase < WorkerPhase::Terminated && patch.is_some() {
                next.status_patch.clone_from(patch);
            }
            begin_termination(&mut next, Reason::PodEvicted, Some(pod), *grace_seconds, at);
        }
        // A pod with a pod object is terminated by its source, never because of what the runtime has.
        Input::ObservedOrphan { .. } if !first => return no_work(next, false),
        Input::ObservedOrphan { observed } => {
            (next.runtime_only, next.started, next.deleted) = (true, true, true);
            begin_termination(&mut next, Reason::OrphanedPod, None, Some(orphan_grace_seconds(observed)), at);
        }
        Input::Started => next.started = true,
        Input::Outcome { outcome, pod } => return after_outcome(next, *outcome, *pod, at),
    }
    transition(state, next)
}

/// Applies an update from a source.
fn update(next: &mut WorkerState, first: bool, pod: &Pod, observed: Option<&PodObservation>, at: &Moment) {
    next.desired = true;
    next.deleted |= pod.is_deleting();
    let in_runtime = observed.is_some_and(|o| !o.sandboxes.is_empty() || !o.containers.is_empty());
    next.started |= !pod.starts_in_turn() || in_runtime;
    let terminal = pod.status.phase().is_terminal();
    let idle = observed.is_some_and(|o| !o.anything_running() && !o.any_sandbox_ready());
    if first && terminal && idle {
        next.started = true;
        next.phase = WorkerPhase::Terminated;
        next.cause = Some(Reason::PodTerminal);
        next.terminating_since_unix_nanos = Some(at.now_unix_nanos);
    } else if pod.is_deleting() {
        begin_termination(next, Reason::PodDeleted, Some(pod), None, at);
    } else if terminal {
        begin_termination(next, Reason::PodTerminal, Some(pod), None, at);
    } else if next.phase == WorkerPhase::Terminating {
        shrink_grace(next, Some(pod), None, at);
    }
}

/// The grace period in seconds (§6.2): the least of the current one, that of the deletion and the override; if there is none
/// of them, that of the spec. Without a pod object: 1.
pub fn grace_seconds(current: Option<i64>, pod: Option<&Pod>, override_seconds: Option<i64>) -> i64 {
    let deletion = pod.and_then(|pod| pod.metadata.deletion_grace_period_seconds);
    let least = [current, deletion, override_seconds].into_iter().flatten().min();
    let spec = || pod.and_then(|pod| pod.spec.termination_grace_period_seconds);
    least.or_else(spec).unwrap_or(ORPHAN_GRACE_SECONDS).max(0)
}

/// Begins the termination of the pod, or shortens the grace period of one that has begun.
fn begin_termination(
    next: &mut WorkerState,
    cause: Reason,
    pod: Option<&Pod>,
    override_seconds: Option<i64>,
    at: &Moment,
) {
    match next.phase {
        WorkerPhase::Sync => {
            next.phase = WorkerPhase::Terminating;
            next.cause = Some(cause);
            next.terminating_since_unix_nanos = Some(at.now_unix_nanos);
            shrink_grace(next, pod, override_seconds, at);
        }
        WorkerPhase::Terminating => shrink_grace(next, pod, override_seconds, at),
        WorkerPhase::Terminated | WorkerPhase::Finished => {}
    }
}

fn shrink_grace(next: &mut WorkerState, pod: Option<&Pod>, override_seconds: Option<i64>, at: &Moment) {
    let seconds = grace_seconds(next.grace_seconds, pod, override_seconds);
    if next.grace_seconds.is_none_or(|current| seconds < current) {
        next.grace_seconds = Some(seconds);
        let deadline = at.now_unix_nanos.saturating_add(seconds.saturating_mul(SECOND));
        let earlier = next.kill_deadline_unix_nanos.map_or(deadline, |current| current.min(deadline));
        next.kill_deadline_unix_nanos = Some(earlier);
    }
}

/// The rest of the grace period in seconds, rounded up; 0 when the deadline has passed or none is set.
pub fn grace_left_seconds(state: &WorkerState, at: &Moment) -> i64 {
    let left = state.kill_deadline_unix_nanos.unwrap_or(0).saturating_sub(at.now_unix_nanos);
    let seconds = if left <= 0 { 0 } else { (left + SECOND - 1) / SECOND };
    // More than the whole grace period can be left only if the clock was set back.
    state.grace_seconds.map_or(seconds, |grace| seconds.min(grace))
}

/// The work that the current state requires.
pub fn current_work(state: &WorkerState) -> Option<Work> {
    let kill_deadline_unix_nanos = state.kill_deadline_unix_nanos.unwrap_or(0);
    match state.phase {
        WorkerPhase::Sync => Some(Work::Sync),
        WorkerPhase::Terminating if state.runtime_only => {
            Some(Work::TerminateOrphan { kill_deadline_unix_nanos })
        }
        WorkerPhase::Terminating => Some(Work::Terminate { kill_deadline_unix_nanos }),
        WorkerPhase::Terminated => Some(Work::Clean),
        WorkerPhase::Finished => None,
    }
}

fn transition(before: Option<&WorkerState>, mut next: WorkerState) -> Transition {
    let was = before.map(|state| state.phase);
    if !next.started && next.phase == WorkerPhase::Terminating {
        next.phase = WorkerPhase::Finished;
    }
    if next.phase == WorkerPhase::Finished {
        return finished(next, was != Some(WorkerPhase::Finished));
    }
    let began_to_end = was == Some(WorkerPhase::Sync) && next.phase > WorkerPhase::Sync;
    let shortened = was == Some(WorkerPhase::Terminating)
        && before.is_some_and(|old| old.kill_deadline_unix_nanos != next.kill_deadline_unix_nanos);
    Transition {
        work: current_work(&next),
        cancel_running: began_to_end || shortened,
        ended: was.is_none() && next.phase == WorkerPhase::Terminated,
        forget: false,
        start_new_worker: false,
        state: next,
    }
}

fn no_work(state: WorkerState, forget: bool) -> Transition {
    Transition { state, work: None, cancel_running: false, ended: false, forget, start_new_worker: false }
}

fn finished(state: WorkerState, ended: bool) -> Transition {
    let forget = state.restart_requested || !state.desired;
    let start_new_worker = state.restart_requested && state.desired;
    Transition { state, work: None, cancel_running: false, ended, forget, start_new_worker }
}

/// Applies the outcome of a turn.
fn after_outcome(mut next: WorkerState, outcome: SyncOutcome, pod: Option<&Pod>, at: &Moment) -> Transition {
    let was = next.phase;
    match (was, outcome) {
        (_, SyncOutcome::Failed | SyncOutcome::Cancelled)
        | (WorkerPhase::Sync, SyncOutcome::Done)
        | (WorkerPhase::Finished, _) => {}
        (WorkerPhase::Sync, SyncOutcome::Terminal) => {
            begin_termination(&mut next, Reason::PodTerminal, pod, None, at)
        }
        (WorkerPhase::Terminating, SyncOutcome::Done | SyncOutcome::Terminal) => {
            next.phase = if next.runtime_only { WorkerPhase::Finished } else { WorkerPhase::Terminated };
        }
        (WorkerPhase::Terminated, SyncOutcome::Done | SyncOutcome::Terminal) => {
            next.phase = WorkerPhase::Finished;
        }
    }
    let ended = was == WorkerPhase::Terminating && next.phase > was;
    if next.phase == WorkerPhase::Finished {
        return finished(next, ended);
    }
    let work = if next.phase == was { None } else { current_work(&next) };
    Transition { state: next, work, cancel_running: false, ended, forget: false, start_new_worker: false }
}

/// Queries about a UID; the state `None` is a UID without a worker (§6.5). `seen_all` says that the workers have been
/// reconciled with the sources once: before that, nothing is known about a UID without a worker.
pub mod queries {
    use super::{WorkerPhase, WorkerState};

    /// Its processes have ended.
    pub fn known_terminated(state: Option<&WorkerState>) -> bool {
        state.is_some_and(|state| state.phase >= WorkerPhase::Terminated)
    }

    /// Its processes may still run.
    pub fn could_run(state: Option<&WorkerState>, seen_all: bool) -> bool {
        state.map_or(!seen_all, |state| state.phase < WorkerPhase::Terminated)
    }

    /// Its worker has finished.
    pub fn should_be_finished(state: Option<&WorkerState>, seen_all: bool) -> bool {
        state.map_or(seen_all, |state| state.phase == WorkerPhase::Finished)
    }

    /// It terminates or has terminated.
    pub fn termination_requested(state: Option<&WorkerState>) -> bool {
        state.is_some_and(|state| state.phase >= WorkerPhase::Terminating)
    }

    /// Its cgroup and sandboxes may be removed.
    pub fn runtime_should_be_removed(state: Option<&WorkerState>, seen_all: bool) -> bool {
        state.map_or(seen_all, |state| state.phase >= WorkerPhase::Terminated)
    }

    /// Its dead containers and logs may be removed.
    pub fn content_should_be_removed(state: Option<&WorkerState>, seen_all: bool) -> bool {
        state.map_or(seen_all, |state| {
            state.evicted || (state.deleted || !state.desired) && state.phase >= WorkerPhase::Terminated
        })
    }
}

/// When the next turn is due after the result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextAttempt {
    /// No error: resync after the sync frequency.
    Resync,
    /// Something failed.
    Failed,
    /// The network of the runtime is not ready.
    NetworkNotReady,
    /// The earliest time at which a container's back-off ends or a call is retried, unix nanoseconds.
    Until(i64),
}

/// Retry after an error, nanoseconds.
pub const RETRY_NANOS: i64 = 10 * SECOND;

/// When the worker's next turn is due if nothing wakes it before, unix nanoseconds. `random` is uniform in 0 to 1: delays
/// are spread over `[d, 1.5 d)`.
///
/// Parity: as §1, except that a known time is kept exactly instead of being clamped to the sync frequency and
/// spread, so that a container does not wait up to 90 s longer than its back-off.
pub fn next_run_unix_nanos(next: NextAttempt, sync_frequency_nanos: i64, random: f64, at: &Moment) -> i64 {
    let spread = |nanos: i64| nanos + (nanos as f64 * 0.5 * random.clamp(0.0, 0.999_999)) as i64;
    let delay = match next {
        NextAttempt::Resync => spread(sync_frequency_nanos),
        NextAttempt::Failed => spread(RETRY_NANOS.min(sync_frequency_nanos)),
        NextAttempt::NetworkNotReady => spread(SECOND),
        NextAttempt::Until(moment) => (moment - at.now_unix_nanos).max(0),
    };
    at.now_unix_nanos.saturating_add(delay)
}

#[cfg(test)]
mod tests;
