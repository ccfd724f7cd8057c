//! Whether the services do well with a configuration that is tried.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::health::ServiceState;
use crate::node_configuration::Wellness;

/// Ends of one service within a trial that may have another cause.
const ENDS: u32 = 3;

/// A service while a configuration is tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tried {
    /// How it is.
    pub state: ServiceState,
    /// What it says of that.
    pub message: String,
    /// How often it was started again since the trial began.
    pub restarts: u32,
}

/// What is known at a moment of a trial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrialVerdict {
    /// Nothing yet.
    GoesOn,
    /// The services do well.
    Passed,
    /// They do not, and why.
    Failed(String),
}

/// Judges the services after `elapsed` of a trial.
///
/// One that fails for good, or ends again and again, ends the trial at once. After `period` all must be as well as they
/// were `before`; for another `period` it is waited for that, since what they depend on may be away for a moment.
pub fn judge_trial(
    before: &Wellness,
    now: &BTreeMap<String, Tried>,
    elapsed: Duration,
    period: Duration,
) -> TrialVerdict {
    let was = |name: &String| before.get(name).copied().unwrap_or(ServiceState::Starting);
    for (name, service) in now {
        if service.state == ServiceState::Failed && was(name) != ServiceState::Failed {
            return TrialVerdict::Failed(format!("{name} has failed with it: {}", service.message));
        }
        if service.restarts > ENDS {
            return TrialVerdict::Failed(format!(
                "{name} has ended {} times with it: {}",
                service.restarts, service.message
            ));
        }
    }
    if elapsed < period {
        return TrialVerdict::GoesOn;
    }
    let worse: Vec<String> = now
        .iter()
        .filter(|(name, service)| rank(service.state) > allowed(was(name)))
        .map(|(name, service)| format!("{name} is {}: {}", service.state, service.message))
        .collect();
    if worse.is_empty() {
        TrialVerdict::Passed
    } else if elapsed < period.saturating_mul(2) {
        TrialVerdict::GoesOn
    } else {
        TrialVerdict::Failed(format!("the services are not as well with it as before: {}", worse.join("; ")))
    }
}

/// From well to ended.
fn rank(state: ServiceState) -> u8 {
    match state {
        ServiceState::Running => 0,
        ServiceState::Degraded => 1,
        ServiceState::Starting | ServiceState::Stuck | ServiceState::BackingOff | ServiceState::Stopped => 2,
        ServiceState::Failed => 3,
    }
}

/// The worst rank of a service that was so before. One that had not answered has shown nothing of how it is: it must.
fn allowed(before: ServiceState) -> u8 {
    match before {
        ServiceState::Running => 0,
        ServiceState::Failed => 3,
        _ => 1,
    }
}

#[cfg(test)]
#[path = "trial_tests.rs"]
mod tests;
