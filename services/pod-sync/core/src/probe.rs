//! One probe worker as a state machine with injected time (§13).
//!
//! [`ProbeState::next_probe`] decides whether a probe is due, [`ProbeState::record_outcome`] takes its outcome. The state is
//! plain data and is stored with the pod's record, so a restarted service continues with the same results and counters.
//!
//! Parity: as the kubelet, except that
//! - a worker probes when its container starts and when the startup probe succeeds, not at the next tick, so a pod becomes
//!   ready as early as possible;
//! - until a container that has just started succeeds, startup and readiness probes also run between the periods; such an
//!   early probe that fails is not counted and records no event;
//! - results and counters survive a restart of the service; if the record is lost, the last status is used instead.

mod results;

use keelson_kube_model::{Container, Probe};
use serde::{Deserialize, Serialize};

use crate::actions::ProbeResult;
use crate::moment::{Moment, SECOND};
use crate::observation::ContainerObservation;

pub use results::{ProbeStates, hints, previous_status, readiness, started, unready_cause};

/// Upstream's default of `periodSeconds`.
const DEFAULT_PERIOD_SECONDS: i64 = 10;
/// Upstream's default of `failureThreshold`.
const DEFAULT_FAILURES: u32 = 3;
/// How long after the first probe of a container early probes run, in nanoseconds.
const EARLY_WINDOW: i64 = 30 * SECOND;
/// The wait before each of the first two early probes, and before each later one, in nanoseconds.
const FIRST_EARLY_WAIT: i64 = SECOND / 4;
const EARLY_WAIT: i64 = SECOND;
/// An early probe waits at least this many times the duration of the previous probe.
const EARLY_MIN_FACTOR: i64 = 4;
/// The most bytes of the last error that are kept.
const MAX_FAILURE_BYTES: usize = 512;

/// The kind of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ProbeKind {
    /// Whether the container has started; the other two wait for it.
    Startup,
    /// Whether the container must be restarted.
    Liveness,
    /// Whether the container is ready.
    Readiness,
}

impl ProbeKind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Startup, Self::Liveness, Self::Readiness];

    /// The word in events.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
        }
    }

    /// The probe of this kind, if the container has one.
    pub fn of(self, container: &Container) -> Option<&Probe> {
        match self {
            Self::Startup => container.startup_probe.as_deref(),
            Self::Liveness => container.liveness_probe.as_deref(),
            Self::Readiness => container.readiness_probe.as_deref(),
        }
    }
}

/// Timing and thresholds of one probe, with upstream's defaults for fields that are missing or zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeTimes {
    /// Seconds after the container's start before which nothing is probed.
    pub initial_delay_seconds: i64,
    /// Seconds from the start of one probe to the start of the next.
    pub period_seconds: i64,
    /// Seconds that one probe may take.
    pub timeout_seconds: i64,
    /// Consecutive successes for the result Success.
    pub success_threshold: u32,
    /// Consecutive failures for the result Failure.
    pub failure_threshold: u32,
}

impl ProbeTimes {
    /// From the spec of a probe.
    pub fn of(probe: &Probe) -> Self {
        let seconds = |field: Option<i32>, default| field.filter(|n| *n > 0).map_or(default, i64::from);
        let times = |field: Option<i32>, default| {
            field.and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0).unwrap_or(default)
        };
        Self {
            initial_delay_seconds: seconds(probe.initial_delay_seconds, 0),
            period_seconds: seconds(probe.period_seconds, DEFAULT_PERIOD_SECONDS),
            timeout_seconds: seconds(probe.timeout_seconds, 1),
            success_threshold: times(probe.success_threshold, 1),
            failure_threshold: times(probe.failure_threshold, DEFAULT_FAILURES),
        }
    }

    /// The period in nanoseconds.
    pub fn period_nanos(&self) -> i64 {
        self.period_seconds.saturating_mul(SECOND)
    }
}

/// Readiness of the same container instance in the last status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PreviousStatus {
    /// It was ready.
    pub ready: bool,
    /// It had started.
    pub started: bool,
}

/// What [`ProbeState::next_probe`] decides from.
#[derive(Clone, Copy, Debug)]
pub struct ProbeInputs<'a> {
    /// The newest record of the container, if it runs.
    pub running: Option<&'a ContainerObservation>,
    /// The container's startup probe has succeeded, or it has none.
    pub started: bool,
    /// Its readiness in the last status.
    pub previous: PreviousStatus,
    /// The time of the next probe has come.
    pub due: bool,
    /// When in its first period a container that was found running is probed, 0 to 1, so that many do not run at once.
    pub spread: f64,
    /// Now.
    pub at: &'a Moment,
}

/// What a probe worker does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextProbe {
    /// Probe now, and check again a period later.
    Probe,
    /// Check again after this many nanoseconds.
    After(i64),
    /// Keep the time that was set before.
    Keep,
    /// Nothing is due until another container instance runs or the startup probe succeeds.
    Hold,
}

/// What an outcome changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutcomeChange {
    /// The result changed.
    pub changed: bool,
    /// The state should be stored for a restart.
    pub keep: bool,
}

/// The state of one probe worker for one container instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeState {
    /// The container instance; empty before the first one.
    pub container_id: String,
    /// The current result.
    pub result: ProbeResult,
    /// The last outcome, and how many times in a row.
    streak: Option<(bool, u32)>,
    /// The result is final for this instance: no more probes until another one runs.
    #[serde(rename = "held")]
    settled: bool,
    /// Why the last probe failed; empty after a success.
    pub failure: String,
    /// Why the next probe has waited long for its turn; empty otherwise.
    #[serde(skip)]
    pub turn_wait: String,
    /// When the next probe is due, unix nanoseconds; 0 if not known.
    #[serde(skip)]
    pub next_unix_nanos: i64,
    /// The startup probe has not succeeded yet.
    #[serde(skip)]
    waits_for_startup: bool,
    /// This process has applied [`ProbeInputs::spread`] to the instance.
    #[serde(skip)]
    spread_done: bool,
    /// When early probes end, unix nanoseconds; 0 before the first probe.
    #[serde(skip)]
    early_until_unix_nanos: i64,
    /// The number of early probes so far.
    #[serde(skip)]
    early: u32,
    /// The next probe is an early one.
    #[serde(skip)]
    is_next_early: bool,
}

impl ProbeState {
    /// The state before the first container instance.
    pub fn new(kind: ProbeKind) -> Self {
        Self::begin(kind, "", PreviousStatus::default())
    }

    /// The state for a new instance (§13.2, "new container ID"), from its readiness in the last status.
    fn begin(kind: ProbeKind, id: &str, previous: PreviousStatus) -> Self {
        let result = initial(kind, previous);
        Self {
            container_id: id.to_owned(),
            result,
            streak: None,
            settled: kind == ProbeKind::Startup && result == ProbeResult::Success,
            failure: String::new(),
            turn_wait: String::new(),
            next_unix_nanos: 0,
            waits_for_startup: false,
            spread_done: false,
            early_until_unix_nanos: 0,
            early: 0,
            is_next_early: false,
        }
    }

    /// Decides whether a probe is due (§13.2).
    pub fn next_probe(&mut self, kind: ProbeKind, times: &ProbeTimes, inputs: &ProbeInputs<'_>) -> NextProbe {
        let Some(record) = inputs.running else {
            self.next_unix_nanos = 0;
            return NextProbe::Hold;
        };
        let mut due = inputs.due;
        if self.container_id != record.id.as_str() {
            *self = Self::begin(kind, record.id.as_str(), inputs.previous);
            due = true;
        }
        if self.settled {
            return NextProbe::Hold;
        }
        if kind != ProbeKind::Startup && !inputs.started {
            self.waits_for_startup = true;
            return NextProbe::Hold;
        }
        due |= std::mem::take(&mut self.waits_for_startup);
        if let Some(wait) = initial_wait(times, record, inputs.at) {
            return self.after(wait, inputs.at);
        }
        if self.early_until_unix_nanos == 0 {
            // The window of a container that was found running begins when the container started.
            let window_start = if record.started_unix_nanos < inputs.at.agent_started_unix_nanos {
                record.started_unix_nanos.saturating_add(times.initial_delay_seconds.saturating_mul(SECOND))
            } else {
                inputs.at.now_unix_nanos
            };
            self.early_until_unix_nanos = window_start.saturating_add(EARLY_WINDOW);
        }
        if !std::mem::replace(&mut self.spread_done, true)
            && !self.may_be_early(kind, inputs.at)
            && let Some(wait) = first_wait(times, record, inputs)
        {
            return self.after(wait, inputs.at);
        }
        if due { NextProbe::Probe } else { NextProbe::Keep }
    }

    /// Whether a recently started container may have early probes.
    fn may_be_early(&self, kind: ProbeKind, at: &Moment) -> bool {
        let awaited = match kind {
            ProbeKind::Startup => self.result == ProbeResult::Unknown,
            // Not once it was ready, nor while it has to succeed several times: then the period applies.
            ProbeKind::Readiness => {
                self.result == ProbeResult::Failure && self.streak.is_none_or(|(success, _)| !success)
            }
            ProbeKind::Liveness => false,
        };
        awaited && at.now_unix_nanos < self.early_until_unix_nanos
    }

    /// Plans an early probe after one that took `took_nanos`. Returns its delay in nanoseconds; `None` if the next probe is
    /// the regular one at `regular_unix_nanos`.
    pub fn plan_early(
        &mut self,
        kind: ProbeKind,
        took_nanos: i64,
        regular_unix_nanos: i64,
        at: &Moment,
    ) -> Option<i64> {
        self.is_next_early = false;
        if self.settled || self.container_id.is_empty() || !self.may_be_early(kind, at) {
            return None;
        }
        let wait = if self.early < 2 { FIRST_EARLY_WAIT } else { EARLY_WAIT };
        let wait = wait.max(took_nanos.saturating_mul(EARLY_MIN_FACTOR));
        if at.now_unix_nanos.saturating_add(wait) >= regular_unix_nanos {
            return None;
        }
        self.early += 1;
        self.is_next_early = true;
        self.next_unix_nanos = at.now_unix_nanos.saturating_add(wait);
        Some(wait)
    }

    /// Whether the probe that is due now is an early one. Resets the mark, so the next one is regular unless planned.
    pub fn take_early(&mut self) -> bool {
        std::mem::take(&mut self.is_next_early)
    }

    fn after(&mut self, wait: i64, at: &Moment) -> NextProbe {
        self.next_unix_nanos = at.now_unix_nanos.saturating_add(wait);
        NextProbe::After(wait)
    }

    /// Records the outcome of a probe of the instance `id` (§13.2); `text` says why it failed. An outcome of another
    /// instance is ignored.
    pub fn record_outcome(
        &mut self,
        kind: ProbeKind,
        times: &ProbeTimes,
        id: &str,
        success: bool,
        text: &str,
    ) -> OutcomeChange {
        if self.container_id != id || self.settled {
            return OutcomeChange::default();
        }
        self.failure = if success { String::new() } else { cut(text, MAX_FAILURE_BYTES).to_owned() };
        let run = match self.streak {
            Some((last, run)) if last == success => run.saturating_add(1),
            _ => 1,
        };
        self.streak = Some((success, run));
        let threshold = if success { times.success_threshold } else { times.failure_threshold };
        let result = if success { ProbeResult::Success } else { ProbeResult::Failure };
        if run < threshold {
            return OutcomeChange { changed: false, keep: result != self.result };
        }
        let changed = std::mem::replace(&mut self.result, result) != result;
        if success {
            self.early_until_unix_nanos = i64::MIN;
        }
        if kind == ProbeKind::Startup || (kind == ProbeKind::Liveness && !success) {
            (self.settled, self.streak, self.next_unix_nanos) = (true, None, 0);
        }
        OutcomeChange { changed, keep: changed }
    }

    /// Records why a probe could not run, or why an early probe failed. It does not count, and is shown to people.
    pub fn record_error(&mut self, id: &str, text: &str) {
        if self.container_id == id {
            cut(text, MAX_FAILURE_BYTES).clone_into(&mut self.failure);
        }
    }

    /// Consecutive failures.
    pub fn failures(&self) -> u32 {
        self.streak.filter(|(success, _)| !success).map_or(0, |(_, run)| run)
    }
}

/// The result before the first probe, from the last status of the same instance.
fn initial(kind: ProbeKind, previous: PreviousStatus) -> ProbeResult {
    match kind {
        ProbeKind::Liveness => ProbeResult::Success,
        ProbeKind::Readiness if previous.ready => ProbeResult::Success,
        ProbeKind::Readiness => ProbeResult::Failure,
        ProbeKind::Startup if previous.started => ProbeResult::Success,
        ProbeKind::Startup => ProbeResult::Unknown,
    }
}

/// The rest of `initialDelaySeconds` in nanoseconds: never more than all of it, even if the clock was set back.
fn initial_wait(times: &ProbeTimes, record: &ContainerObservation, at: &Moment) -> Option<i64> {
    let delay = times.initial_delay_seconds.saturating_mul(SECOND);
    let age = at.now_unix_nanos.saturating_sub(record.started_unix_nanos).max(0);
    Some(delay.saturating_sub(age)).filter(|left| *left > 0)
}

/// The wait before the first probe of a container that ran before this process, while the process is younger than a period
/// (§13.1).
fn first_wait(times: &ProbeTimes, record: &ContainerObservation, inputs: &ProbeInputs<'_>) -> Option<i64> {
    let started = inputs.at.agent_started_unix_nanos;
    let young = inputs.at.now_unix_nanos.saturating_sub(started) < times.period_nanos();
    let wait = (times.period_nanos() as f64 * inputs.spread.clamp(0.0, 1.0)) as i64;
    (record.started_unix_nanos < started && young && wait > 0).then_some(wait)
}

/// At most `bytes` of a text, cut between characters.
pub fn cut(text: &str, bytes: usize) -> &str {
    let mut end = bytes.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests;
