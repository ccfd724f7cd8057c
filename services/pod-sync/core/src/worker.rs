//! The life of one UID as a state machine (§6.1 to §6.5).
//!
//! [`step`] takes the state, one thing that happened and the moment, and says what the state becomes and what to do.
//! The state is plain data: stored while a pod terminates, it lets a restarted service go on at the first unfinished
//! step with the grace that is left.
//!
//! Parity: as the kubelet, except that
//! - a grace of zero stays zero (upstream makes it 1 s, then 2 s): the processes are killed at once;
//! - an orphan keeps the grace that its records carry;
//! - a finished UID that nobody wants any more is forgotten at once, not at the next housekeeping.

use keelson_kube_model::Pod;
use serde::{Deserialize, Serialize};

use crate::moment::{Moment, SECOND};
use crate::observation::PodObservation;
use crate::reason::Reason;
use crate::termination::{ORPHAN_GRACE_SECONDS, orphan_grace_seconds};

/// Where a UID stands. It only ever moves forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum WorkerPhase {
    /// The pod is to run.
    #[default]
    Sync,
    /// Its processes are being ended.
    Terminating,
    /// No process is left: volumes and cgroup go.
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
}

/// One UID's worker. Everything that must outlive the service while the pod terminates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerState {
    /// Where it stands.
    pub phase: WorkerPhase,
    /// Some sync function has been begun. A static pod that waits for its name has not started.
    pub started: bool,
    /// No pod object is known: the runtime holds something that no source named.
    pub runtime_only: bool,
    /// Why it ends.
    pub cause: Option<Reason>,
    /// The pod object has a deletion timestamp, or the pod is an orphan.
    pub deleted: bool,
    /// It was evicted, pre-empted or shut down.
    pub evicted: bool,
    /// Its source still names it.
    pub desired: bool,
    /// The same UID was added anew while it was ending.
    pub restart_requested: bool,
    /// Seconds granted; `None` until it is terminating. It can only shrink.
    pub grace_seconds: Option<i64>,
    /// When the grace is used up, unix nanoseconds.
    pub kill_deadline_unix_nanos: Option<i64>,
    /// When it began to terminate, unix nanoseconds.
    pub terminating_since_unix_nanos: Option<i64>,
    /// To be put into each status from now on.
    pub status_patch: Option<StatusPatch>,
    /// The state was read back from disk and the source has not yet named the pod again. See
    /// [`WorkerState::read_back`].
    #[serde(skip)]
    pub replay_expected: bool,
}

impl WorkerState {
    /// A state that was stored by an earlier run of the service. The source will name the pod as if it were new;
    /// that first time it is no request to begin anew.
    pub fn read_back(mut self) -> Self {
        // A pod that its source had dropped, or that no source ever named, is new when it is named again.
        self.replay_expected = self.desired && !self.runtime_only;
        self
    }
}

/// How a source speaks of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UpdateKind {
    /// A new UID (ADD).
    Create,
    /// The pod changed, or somebody asked for its deletion (UPDATE, DELETE, RECONCILE).
    Update,
    /// Nothing changed: look again.
    Sync,
}

/// One thing that happened to a UID.
#[derive(Clone, Debug)]
pub enum Input<'a> {
    /// The source names the pod.
    Update {
        /// How.
        kind: UpdateKind,
        /// The pod as it is now.
        pod: &'a Pod,
        /// What the runtime holds of it, if that was read already.
        observed: Option<&'a PodObservation>,
    },
    /// The source no longer names the pod (REMOVE), and all sources are ready.
    Removed {
        /// The last pod object seen, if any.
        pod: Option<&'a Pod>,
    },
    /// Eviction, pre-emption or shutdown.
    Killed {
        /// The pod.
        pod: &'a Pod,
        /// Seconds to use instead of the pod's own, if less.
        grace_seconds: Option<i64>,
        /// What goes into the status.
        patch: Option<StatusPatch>,
    },
    /// The runtime holds a UID that no source names, and all sources are ready.
    ObservedOrphan {
        /// What it holds.
        observed: &'a PodObservation,
    },
    /// Permission to start was given (always for API pods, by [`crate::ordering`] for static ones).
    Started,
    /// A sync function came back.
    Outcome {
        /// With what.
        outcome: SyncOutcome,
        /// The pod it worked on, if one is known.
        pod: Option<&'a Pod>,
    },
}

/// What a sync function came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncOutcome {
    /// Done as far as it goes now.
    Done,
    /// The pod has had its run: phase Succeeded or Failed, or nothing of it will ever start again.
    Terminal,
    /// It failed and is tried again.
    Failed,
    /// It was cancelled because something newer came.
    Cancelled,
}

/// What a worker has to carry out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Make the pod run (§8.1).
    Sync,
    /// End its processes (§8.2), until the deadline with hooks and SIGTERM, after it with SIGKILL.
    Terminate {
        /// When the grace is used up, unix nanoseconds.
        kill_deadline_unix_nanos: i64,
    },
    /// End processes whose spec nobody knows (§8.3): no hooks, no status.
    TerminateOrphan {
        /// When the grace is used up, unix nanoseconds.
        kill_deadline_unix_nanos: i64,
    },
    /// Unmount, remove the cgroup, write the final status (§8.4).
    Clean,
}

/// The answer of [`step`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transition {
    /// The state from now on.
    pub state: WorkerState,
    /// What to carry out next; `None` when nothing is to be begun because of this input.
    pub work: Option<Work>,
    /// Cancel what is being carried out: it has become wrong or too slow.
    pub cancel_running: bool,
    /// The pod no longer runs: signal whoever waited for its end.
    pub ended: bool,
    /// Drop the worker.
    pub forget: bool,
    /// After dropping it begin a new one for the same UID.
    pub begin_anew: bool,
}

/// Decides what one event does to one UID. `None` is a UID without a worker.
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
                return still(next, false);
            }
            update(&mut next, first, pod, *observed, at);
        }
        Input::Removed { .. } | Input::Started if first => return still(next, true),
        Input::Removed { pod } => {
            next.desired = false;
            next.restart_requested = false;
            next.deleted |= pod.is_some_and(Pod::is_deleting);
            end(&mut next, Reason::PodRemoved, *pod, None, at);
        }
        Input::Killed { pod, grace_seconds, patch } => {
            next.evicted = true;
            next.desired |= first;
            next.started |= !pod.starts_in_turn();
            if next.phase < WorkerPhase::Terminated && patch.is_some() {
                next.status_patch.clone_from(patch);
            }
            end(&mut next, Reason::PodEvicted, Some(pod), *grace_seconds, at);
        }
        // Whoever has a pod object is ended by its source, never because of what the runtime shows.
        Input::ObservedOrphan { .. } if !first => return still(next, false),
        Input::ObservedOrphan { observed } => {
            (next.runtime_only, next.started, next.deleted) = (true, true, true);
            end(&mut next, Reason::OrphanedPod, None, Some(orphan_grace_seconds(observed)), at);
        }
        Input::Started => next.started = true,
        Input::Outcome { outcome, pod } => return after(next, *outcome, *pod, at),
    }
    conclude(state, next)
}

/// A source names the pod.
fn update(next: &mut WorkerState, first: bool, pod: &Pod, observed: Option<&PodObservation>, at: &Moment) {
    next.desired = true;
    next.deleted |= pod.is_deleting();
    let seen = observed.is_some_and(|o| !o.sandboxes.is_empty() || !o.containers.is_empty());
    next.started |= !pod.starts_in_turn() || seen;
    let terminal = pod.status.phase().is_terminal();
    let idle = observed.is_some_and(|o| !o.anything_running() && !o.any_sandbox_ready());
    if first && terminal && idle {
        next.started = true;
        next.phase = WorkerPhase::Terminated;
        next.cause = Some(Reason::PodTerminal);
        next.terminating_since_unix_nanos = Some(at.now_unix_nanos);
    } else if pod.is_deleting() {
        end(next, Reason::PodDeleted, Some(pod), None, at);
    } else if terminal {
        end(next, Reason::PodTerminal, Some(pod), None, at);
    } else if next.phase == WorkerPhase::Terminating {
        shrink(next, Some(pod), None, at);
    }
}

/// The grace in seconds (§6.2). It starts from the current value and can only shrink: to that of the deletion, to the
/// override; when nobody asked and none is set yet, it is the spec's. Without a pod object: 1.
pub fn grace_seconds(current: Option<i64>, pod: Option<&Pod>, override_seconds: Option<i64>) -> i64 {
    let deletion = pod.and_then(|pod| pod.metadata.deletion_grace_period_seconds);
    let least = [current, deletion, override_seconds].into_iter().flatten().min();
    let spec = || pod.and_then(|pod| pod.spec.termination_grace_period_seconds);
    least.or_else(spec).unwrap_or(ORPHAN_GRACE_SECONDS).max(0)
}

/// Begins to end the pod, or shortens the grace when that has begun already.
fn end(next: &mut WorkerState, cause: Reason, pod: Option<&Pod>, override_seconds: Option<i64>, at: &Moment) {
    match next.phase {
        WorkerPhase::Sync => {
            next.phase = WorkerPhase::Terminating;
            next.cause = Some(cause);
            next.terminating_since_unix_nanos = Some(at.now_unix_nanos);
            shrink(next, pod, override_seconds, at);
        }
        WorkerPhase::Terminating => shrink(next, pod, override_seconds, at),
        WorkerPhase::Terminated | WorkerPhase::Finished => {}
    }
}

fn shrink(next: &mut WorkerState, pod: Option<&Pod>, override_seconds: Option<i64>, at: &Moment) {
    let seconds = grace_seconds(next.grace_seconds, pod, override_seconds);
    if next.grace_seconds.is_none_or(|current| seconds < current) {
        next.grace_seconds = Some(seconds);
        let deadline = at.now_unix_nanos.saturating_add(seconds.saturating_mul(SECOND));
        let earlier = next.kill_deadline_unix_nanos.map_or(deadline, |current| current.min(deadline));
        next.kill_deadline_unix_nanos = Some(earlier);
    }
}

/// Seconds of grace that are left, rounded up; 0 when the deadline has passed or none is set.
pub fn grace_left_seconds(state: &WorkerState, at: &Moment) -> i64 {
    let left = state.kill_deadline_unix_nanos.unwrap_or(0).saturating_sub(at.now_unix_nanos);
    let seconds = if left <= 0 { 0 } else { (left + SECOND - 1) / SECOND };
    // More than the whole grace is left only where the clock was set back.
    state.grace_seconds.map_or(seconds, |grace| seconds.min(grace))
}

/// What the state as it is now asks for.
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

fn conclude(before: Option<&WorkerState>, mut next: WorkerState) -> Transition {
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
        begin_anew: false,
        state: next,
    }
}

fn still(state: WorkerState, forget: bool) -> Transition {
    Transition { state, work: None, cancel_running: false, ended: false, forget, begin_anew: false }
}

fn finished(state: WorkerState, ended: bool) -> Transition {
    let forget = state.restart_requested || !state.desired;
    let begin_anew = state.restart_requested && state.desired;
    Transition { state, work: None, cancel_running: false, ended, forget, begin_anew }
}

/// A sync function came back.
fn after(mut next: WorkerState, outcome: SyncOutcome, pod: Option<&Pod>, at: &Moment) -> Transition {
    let was = next.phase;
    match (was, outcome) {
        (_, SyncOutcome::Failed | SyncOutcome::Cancelled)
        | (WorkerPhase::Sync, SyncOutcome::Done)
        | (WorkerPhase::Finished, _) => {}
        (WorkerPhase::Sync, SyncOutcome::Terminal) => end(&mut next, Reason::PodTerminal, pod, None, at),
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
    Transition { state: next, work, cancel_running: false, ended, forget: false, begin_anew: false }
}

/// What other parts ask about a UID; `None` is one without a worker (§6.5). `seen_all` says that the workers have
/// been reconciled with the sources once: before that, an unknown UID may be anything.
pub mod ask {
    use super::{WorkerPhase, WorkerState};

    /// Its processes have ended.
    pub fn known_terminated(state: Option<&WorkerState>) -> bool {
        state.is_some_and(|state| state.phase >= WorkerPhase::Terminated)
    }

    /// Processes of it may run.
    pub fn could_run(state: Option<&WorkerState>, seen_all: bool) -> bool {
        state.map_or(!seen_all, |state| state.phase < WorkerPhase::Terminated)
    }

    /// Everything of it is done.
    pub fn should_be_finished(state: Option<&WorkerState>, seen_all: bool) -> bool {
        state.map_or(seen_all, |state| state.phase == WorkerPhase::Finished)
    }

    /// It is to end or has ended.
    pub fn termination_requested(state: Option<&WorkerState>) -> bool {
        state.is_some_and(|state| state.phase >= WorkerPhase::Terminating)
    }

    /// Its cgroup and sandboxes may go.
    pub fn runtime_should_be_removed(state: Option<&WorkerState>, seen_all: bool) -> bool {
        state.map_or(seen_all, |state| state.phase >= WorkerPhase::Terminated)
    }

    /// Its dead containers and logs may go.
    pub fn content_should_be_removed(state: Option<&WorkerState>, seen_all: bool) -> bool {
        state.map_or(seen_all, |state| {
            state.evicted || (state.deleted || !state.desired) && state.phase >= WorkerPhase::Terminated
        })
    }
}

/// How a sync function's result bears on the next attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextAttempt {
    /// All is well: look again after the sync frequency.
    Resync,
    /// Something failed.
    Failed,
    /// The network of the runtime is not ready.
    NetworkNotReady,
    /// The earliest moment at which a container's back-off or a callee's retry is due, unix nanoseconds.
    Until(i64),
}

/// Retry after an error, nanoseconds.
pub const RETRY_NANOS: i64 = 10 * SECOND;

/// When the worker runs again if nothing happens before, unix nanoseconds. `random` is uniform in 0 to 1: delays are
/// spread over `[d, 1.5 d)`.
///
/// Parity: as §1, except that a known moment is kept exactly instead of being clamped to the sync frequency and
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
