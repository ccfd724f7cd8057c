//! One probe worker as a state machine with injected time (§13).
//!
//! [`ProbeState::look`] says whether a probe is due, [`ProbeState::judge`] takes what it came to. The state is plain
//! data and is stored with the pod's record, so a restarted service goes on with the same results and counters.
//!
//! Parity: as the kubelet, except that
//! - a worker looks when its container starts and when the startup probe succeeds, not at the next tick, so a pod is
//!   ready as soon as it may be;
//! - until a container that has just begun succeeds, startup and readiness are probed between the periods as well; a failure of
//!   such an early probe is no event and counts for nothing;
//! - results and counters outlive the service; where the record is lost, the last status stands in for them.

mod results;

use keelson_kube_model::{Container, Probe};
use serde::{Deserialize, Serialize};

use crate::actions::ProbeResult;
use crate::moment::{Moment, SECOND};
use crate::observation::ContainerObservation;

pub use results::{ProbeBook, hints, readiness, started, unready_cause, was};

/// Upstream's default of `periodSeconds`.
const DEFAULT_PERIOD_SECONDS: i64 = 10;
/// Upstream's default of `failureThreshold`.
const DEFAULT_FAILURES: u32 = 3;
/// How long after the first probe of a container there are early ones.
const EARLY_WITHIN: i64 = 30 * SECOND;
/// The wait for the first two early probes, and for those that follow.
const EARLY_FIRST: i64 = SECOND / 4;
const EARLY: i64 = SECOND;
/// An early probe waits for at least so many times as long as the one before it has taken.
const EARLY_SHARE: i64 = 4;
/// Bytes of the last failure that are kept.
const KEPT_TEXT: usize = 512;

/// What a probe decides about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ProbeKind {
    /// Whether the container has started; holds the other two back.
    Startup,
    /// Whether the container is restarted.
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

/// The numbers of one probe, with upstream's defaults for those that are missing or zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeTimes {
    /// Seconds after the container's start before which nothing is probed.
    pub initial_delay_seconds: i64,
    /// Seconds from the beginning of one probe to that of the next.
    pub period_seconds: i64,
    /// Seconds that one probe may take.
    pub timeout_seconds: i64,
    /// Successes in a row that make a success.
    pub success_threshold: u32,
    /// Failures in a row that make a failure.
    pub failure_threshold: u32,
}

impl ProbeTimes {
    /// The numbers of `probe`.
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

/// What the last status said of the same container instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Was {
    /// It was ready.
    pub ready: bool,
    /// It had started.
    pub started: bool,
}

/// What a look depends on.
#[derive(Clone, Copy, Debug)]
pub struct Look<'a> {
    /// The newest record of the container, if it runs.
    pub running: Option<&'a ContainerObservation>,
    /// The container's startup probe has succeeded, or it has none.
    pub started: bool,
    /// What the last status said of it.
    pub was: Was,
    /// The time of the next probe has come.
    pub due: bool,
    /// Where in its first period a container that was found running is probed, 0 to 1: many are found at once.
    pub spread: f64,
    /// Now.
    pub at: &'a Moment,
}

/// What follows from a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Probe now, and look again a period later.
    Probe,
    /// Look again after this many nanoseconds.
    After(i64),
    /// The time that was set stays.
    Keep,
    /// Nothing is due until something changes: another container, or the end of the startup.
    Hold,
}

/// What a judgement changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Judged {
    /// Success or failure turned.
    pub changed: bool,
    /// Counters have moved that are worth keeping over a restart.
    pub keep: bool,
}

/// Where one worker stands with one container instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeState {
    /// The instance that all of this is about; empty before the first one.
    pub container_id: String,
    /// The result that counts.
    pub result: ProbeResult,
    /// The last outcome, and how often in a row it came.
    streak: Option<(bool, u32)>,
    /// Nothing is probed until there is another instance.
    held: bool,
    /// Why the last probe failed; empty after a success.
    pub failure: String,
    /// Who keeps the next probe waiting for its turn; empty while it does not wait, or not for long.
    #[serde(skip)]
    pub crowded: String,
    /// When the next probe is due, unix nanoseconds; 0 when that is not known.
    #[serde(skip)]
    pub next_unix_nanos: i64,
    /// The startup probe has not succeeded yet.
    #[serde(skip)]
    awaits_start: bool,
    /// This process has had its first look at the instance.
    #[serde(skip)]
    spread_done: bool,
    /// When there are no early probes any more, unix nanoseconds; 0 before the first probe.
    #[serde(skip)]
    early_until_unix_nanos: i64,
    /// How many early probes there were.
    #[serde(skip)]
    early: u32,
    /// The next probe is an early one.
    #[serde(skip)]
    is_next_early: bool,
}

impl ProbeState {
    /// The state of a worker that has seen no container yet.
    pub fn new(kind: ProbeKind) -> Self {
        Self::begin(kind, "", Was::default())
    }

    /// Begins with an instance (§13.2, "new container ID"), from what the last status said of it.
    fn begin(kind: ProbeKind, id: &str, was: Was) -> Self {
        let result = initial(kind, was);
        Self {
            container_id: id.to_owned(),
            result,
            streak: None,
            held: kind == ProbeKind::Startup && result == ProbeResult::Success,
            failure: String::new(),
            crowded: String::new(),
            next_unix_nanos: 0,
            awaits_start: false,
            spread_done: false,
            early_until_unix_nanos: 0,
            early: 0,
            is_next_early: false,
        }
    }

    /// Whether a probe is due (§13.2).
    pub fn look(&mut self, kind: ProbeKind, times: &ProbeTimes, look: &Look<'_>) -> Next {
        let Some(record) = look.running else {
            self.next_unix_nanos = 0;
            return Next::Hold;
        };
        let mut due = look.due;
        if self.container_id != record.id.as_str() {
            *self = Self::begin(kind, record.id.as_str(), look.was);
            due = true;
        }
        if self.held {
            return Next::Hold;
        }
        if kind != ProbeKind::Startup && !look.started {
            self.awaits_start = true;
            return Next::Hold;
        }
        due |= std::mem::take(&mut self.awaits_start);
        if let Some(wait) = initial_wait(times, record, look.at) {
            return self.after(wait, look.at);
        }
        if self.early_until_unix_nanos == 0 {
            // One that was found running is no younger than it is.
            let begun = if record.started_unix_nanos < look.at.agent_started_unix_nanos {
                record.started_unix_nanos.saturating_add(times.initial_delay_seconds.saturating_mul(SECOND))
            } else {
                look.at.now_unix_nanos
            };
            self.early_until_unix_nanos = begun.saturating_add(EARLY_WITHIN);
        }
        if !std::mem::replace(&mut self.spread_done, true)
            && !self.may_be_early(kind, look.at)
            && let Some(wait) = first_wait(times, record, look)
        {
            return self.after(wait, look.at);
        }
        if due { Next::Probe } else { Next::Keep }
    }

    /// Whether a container that has just begun is still awaited.
    fn may_be_early(&self, kind: ProbeKind, at: &Moment) -> bool {
        let awaited = match kind {
            ProbeKind::Startup => self.result == ProbeResult::Unknown,
            // Once it was ready, or succeeds and has to do so several times, the period counts.
            ProbeKind::Readiness => {
                self.result == ProbeResult::Failure && self.streak.is_none_or(|(success, _)| !success)
            }
            ProbeKind::Liveness => false,
        };
        awaited && at.now_unix_nanos < self.early_until_unix_nanos
    }

    /// How long after a probe, which took `took_nanos`, an early one follows; none where the next one comes at its time,
    /// `regular_unix_nanos`.
    pub fn plan_early(
        &mut self,
        kind: ProbeKind,
        took_nanos: i64,
        regular_unix_nanos: i64,
        at: &Moment,
    ) -> Option<i64> {
        self.is_next_early = false;
        if self.held || self.container_id.is_empty() || !self.may_be_early(kind, at) {
            return None;
        }
        let wait = if self.early < 2 { EARLY_FIRST } else { EARLY };
        let wait = wait.max(took_nanos.saturating_mul(EARLY_SHARE));
        if at.now_unix_nanos.saturating_add(wait) >= regular_unix_nanos {
            return None;
        }
        self.early += 1;
        self.is_next_early = true;
        self.next_unix_nanos = at.now_unix_nanos.saturating_add(wait);
        Some(wait)
    }

    /// Whether the probe that is due now is an early one; the one after it is not, unless it is planned so.
    pub fn take_early(&mut self) -> bool {
        std::mem::take(&mut self.is_next_early)
    }

    fn after(&mut self, wait: i64, at: &Moment) -> Next {
        self.next_unix_nanos = at.now_unix_nanos.saturating_add(wait);
        Next::After(wait)
    }

    /// Takes the outcome of a probe of the instance `id` (§13.2): `text` says why it failed. An outcome for another
    /// instance says nothing about this one.
    pub fn judge(
        &mut self,
        kind: ProbeKind,
        times: &ProbeTimes,
        id: &str,
        success: bool,
        text: &str,
    ) -> Judged {
        if self.container_id != id || self.held {
            return Judged::default();
        }
        self.failure = if success { String::new() } else { cut(text, KEPT_TEXT).to_owned() };
        let run = match self.streak {
            Some((last, run)) if last == success => run.saturating_add(1),
            _ => 1,
        };
        self.streak = Some((success, run));
        let threshold = if success { times.success_threshold } else { times.failure_threshold };
        let result = if success { ProbeResult::Success } else { ProbeResult::Failure };
        if run < threshold {
            return Judged { changed: false, keep: result != self.result };
        }
        let changed = std::mem::replace(&mut self.result, result) != result;
        if success {
            self.early_until_unix_nanos = i64::MIN;
        }
        if kind == ProbeKind::Startup || (kind == ProbeKind::Liveness && !success) {
            (self.held, self.streak, self.next_unix_nanos) = (true, None, 0);
        }
        Judged { changed, keep: changed }
    }

    /// The probe could not be made, or was an early one and failed: that counts as nothing, and is remembered for people.
    pub fn errored(&mut self, id: &str, text: &str) {
        if self.container_id == id {
            cut(text, KEPT_TEXT).clone_into(&mut self.failure);
        }
    }

    /// Failures in a row.
    pub fn failures(&self) -> u32 {
        self.streak.filter(|(success, _)| !success).map_or(0, |(_, run)| run)
    }
}

/// The result before the first probe; what the last status said of the same instance stands.
fn initial(kind: ProbeKind, was: Was) -> ProbeResult {
    match kind {
        ProbeKind::Liveness => ProbeResult::Success,
        ProbeKind::Readiness if was.ready => ProbeResult::Success,
        ProbeKind::Readiness => ProbeResult::Failure,
        ProbeKind::Startup if was.started => ProbeResult::Success,
        ProbeKind::Startup => ProbeResult::Unknown,
    }
}

/// What is left of `initialDelaySeconds`: never more than the whole of it, also where the clock was set back.
fn initial_wait(times: &ProbeTimes, record: &ContainerObservation, at: &Moment) -> Option<i64> {
    let delay = times.initial_delay_seconds.saturating_mul(SECOND);
    let age = at.now_unix_nanos.saturating_sub(record.started_unix_nanos).max(0);
    Some(delay.saturating_sub(age)).filter(|left| *left > 0)
}

/// What a container waits that ran before this process did, while the process is younger than a period (§13.1).
fn first_wait(times: &ProbeTimes, record: &ContainerObservation, look: &Look<'_>) -> Option<i64> {
    let started = look.at.agent_started_unix_nanos;
    let young = look.at.now_unix_nanos.saturating_sub(started) < times.period_nanos();
    let wait = (times.period_nanos() as f64 * look.spread.clamp(0.0, 1.0)) as i64;
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
