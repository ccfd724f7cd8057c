//! Whether the services are healthy with a configuration in trial.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::health::ServiceState;
use crate::node_configuration::ServiceStates;

/// Ends of one service within a trial that may have another cause.
const ENDS: u32 = 3;

/// A service during a trial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceInTrial {
    /// Its current state.
    pub state: ServiceState,
    /// The message that explains the state.
    pub message: String,
    /// Its restarts since the trial began.
    pub restarts: u32,
}

/// The current result of a trial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrialVerdict {
    /// Undecided.
    Pending,
    /// The services are healthy.
    Passed,
    /// They are not, and why.
    Failed(String),
}

/// Judges the services after `elapsed` of a trial.
///
/// A service that fails for good, or ends repeatedly, fails the trial at once. After `period`, all must be as healthy as they
/// were `before`; they have another `period` for that, since a dependency may be down for a moment.
pub fn judge_trial(
    before: &ServiceStates,
    now: &BTreeMap<String, ServiceInTrial>,
    elapsed: Duration,
    period: Duration,
) -> TrialVerdict {
    let was = |name: &String| before.get(name).copied().unwrap_or(ServiceState::Starting);
    for (name, service) in now {
        if service.state == ServiceState::Failed && was(name) != ServiceState::Failed {
            return TrialVerdict::Failed(format!(
                "{name} failed with this configuration: {}",
                service.message
            ));
        }
        if service.restarts > ENDS {
            return TrialVerdict::Failed(format!(
                "{name} ended {} times with this configuration: {}",
                service.restarts, service.message
            ));
        }
    }
    if elapsed < period {
        return TrialVerdict::Pending;
    }
    let worse: Vec<String> = now
        .iter()
        .filter(|(name, service)| rank(service.state) > allowed(was(name)))
        .map(|(name, service)| format!("{name} is {}: {}", service.state, service.message))
        .collect();
    if worse.is_empty() {
        TrialVerdict::Passed
    } else if elapsed < period.saturating_mul(2) {
        TrialVerdict::Pending
    } else {
        TrialVerdict::Failed(format!(
            "the services are less healthy with this configuration than before: {}",
            worse.join("; ")
        ))
    }
}

/// From healthy (0) to failed (3).
fn rank(state: ServiceState) -> u8 {
    match state {
        ServiceState::Running => 0,
        ServiceState::Degraded => 1,
        ServiceState::Starting | ServiceState::Stuck | ServiceState::BackingOff | ServiceState::Stopped => 2,
        ServiceState::Failed => 3,
    }
}

/// The worst rank allowed for a service with this state before. A service that had not answered yet must answer now.
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
