//! The lifecycle of the configuration under this node's key: tried, last known good, or refused.
//!
//! ```text
//!              resolves to the settings in force          the services are healthy
//!  assigned ──────────────────────────────▶ active ◀──────────────────────────┐
//!     │ └──── resolves to other settings ──▶ trial ───────────────────────────┘
//!     │ does not resolve                      │ they are not, or init starts too often
//!     ▼                                       ▼
//!  refused: the last known good stays in force, or the files of the node alone
//! ```
//!
//! [`ConfigurationCheckpoint`] is the whole state, so a restarted init continues where the previous one ended.

use std::collections::BTreeMap;

use keelson_config::{AssignedConfiguration, ConfigurationState, ConfigurationStatus, Revision};
use serde::{Deserialize, Serialize};

use crate::health::ServiceState;

/// The number of starts of init within one trial at which the trial fails.
const FAILING_START: u32 = 3;

/// The state of each service, by name.
pub type ServiceStates = BTreeMap<String, ServiceState>;

/// The checkpoint of the assigned configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConfigurationCheckpoint {
    /// The content that last passed its trial.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_known_good: Option<AssignedConfiguration>,
    /// The content in trial.
    #[serde(skip_serializing_if = "Option::is_none")]
    trial: Option<Trial>,
    /// The content under the key that is not in force.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<AssignmentError>,
}

/// A content in trial.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Trial {
    content: AssignedConfiguration,
    /// Starts of init since the trial began.
    starts: u32,
    /// The states of the services before the trial.
    before: ServiceStates,
}

impl Trial {
    /// The states of the services before the trial.
    pub fn before(&self) -> &ServiceStates {
        &self.before
    }
}

/// A content that was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AssignmentError {
    content: AssignedConfiguration,
    #[serde(rename = "why")]
    error: String,
    /// Whether it failed its trial; then it is not resolved again.
    tried: bool,
}

/// What to do about the content under the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyAction {
    /// Nothing: it is handled already.
    Keep,
    /// The key does not exist: use the files of the node alone.
    Withdraw,
    /// The content is new: resolve it.
    Resolve,
}

/// The result of resolving a content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolution {
    /// It does not resolve; one line per error.
    Failed(String),
    /// It resolves to the configuration in force.
    Unchanged,
    /// It resolves to another configuration; with the current states of the services.
    Changed(ServiceStates),
}

impl ConfigurationCheckpoint {
    /// The content in force; `None`: the files of the node alone.
    pub fn active(&self) -> Option<&AssignedConfiguration> {
        self.trial().map(|trial| &trial.content).or(self.last_known_good.as_ref())
    }

    /// The current trial.
    pub fn trial(&self) -> Option<&Trial> {
        self.trial.as_ref()
    }

    /// Why the content under the key is refused.
    pub fn error(&self) -> Option<&str> {
        self.refused.as_ref().map(|refused| refused.error.as_str())
    }

    /// Records a start of init. A trial fails at the [`FAILING_START`]th start, so that a configuration that ends init, or makes
    /// somebody end it, cannot cause an endless loop. A content that did not resolve is resolved again, since the files may
    /// have changed.
    #[must_use]
    pub fn init_started(mut self) -> Self {
        self.refused.take_if(|refused| !refused.tried);
        let Some(trial) = &mut self.trial else { return self };
        trial.starts = trial.starts.saturating_add(1);
        if trial.starts < FAILING_START {
            return self;
        }
        let why = format!("init was started {} times during the trial", trial.starts);
        self.trial_failed(&why)
    }

    /// What to do about the current content of the key.
    pub fn action_for(&self, assigned: Option<&AssignedConfiguration>) -> KeyAction {
        let Some(assigned) = assigned else {
            return if *self == Self::default() { KeyAction::Keep } else { KeyAction::Withdraw };
        };
        if self.latest() == Some(assigned) { KeyAction::Keep } else { KeyAction::Resolve }
    }

    /// The content of the key when it was last resolved.
    fn latest(&self) -> Option<&AssignedConfiguration> {
        self.refused.as_ref().map(|refused| &refused.content).or_else(|| self.active())
    }

    /// Records that `content` is under the key and how it resolved. The trial of an earlier content continues if the new one
    /// changes nothing, and otherwise ends.
    #[must_use]
    pub fn with_resolution(mut self, content: AssignedConfiguration, resolution: Resolution) -> Self {
        match resolution {
            Resolution::Failed(why) => {
                self.refused = Some(AssignmentError { content, error: why, tried: false })
            }
            Resolution::Unchanged => {
                self.refused = None;
                match &mut self.trial {
                    Some(trial) => trial.content = content,
                    None => self.last_known_good = Some(content),
                }
            }
            Resolution::Changed(now) => {
                self.refused = None;
                let before = self.trial.map_or(now, |trial| trial.before);
                self.trial = Some(Trial { content, starts: 0, before });
            }
        }
        self
    }

    /// Records that the services are healthy with the content in trial.
    #[must_use]
    pub fn trial_passed(mut self) -> Self {
        if let Some(trial) = self.trial.take() {
            self.last_known_good = Some(trial.content);
        }
        self
    }

    /// Records that the services are not healthy with it. A later refusal is kept, since it is about the current content of
    /// the key.
    #[must_use]
    pub fn trial_failed(mut self, why: &str) -> Self {
        if let Some(Trial { content, .. }) = self.trial.take()
            && self.refused.is_none()
        {
            self.refused = Some(AssignmentError { content, error: why.to_owned(), tried: true });
        }
        self
    }

    /// Records that the content in force does not resolve any more, since the files or the release have changed. The content
    /// before it takes its place.
    #[must_use]
    pub fn no_longer_resolves(mut self, why: &str) -> Self {
        if self.trial.is_some() {
            return self.trial_failed(why);
        }
        if let Some(content) = self.last_known_good.take()
            && self.refused.is_none()
        {
            self.refused = Some(AssignmentError { content, error: why.to_owned(), tried: false });
        }
        self
    }

    /// The published status; `None` if the key does not exist.
    pub fn status(&self) -> Option<ConfigurationStatus> {
        let of = |content: &AssignedConfiguration| Revision { revision: content.revision };
        let state = match (&self.refused, &self.trial) {
            (Some(_), _) => ConfigurationState::Refused,
            (None, Some(_)) => ConfigurationState::Trial,
            (None, None) => ConfigurationState::Active,
        };
        Some(ConfigurationStatus {
            assigned: Some(of(self.latest()?)),
            active: self.active().map(of),
            last_known_good: self.last_known_good.as_ref().map(of),
            state,
            error: self.error().map(ToOwned::to_owned),
        })
    }
}

#[cfg(test)]
#[path = "node_configuration_tests.rs"]
mod tests;
