//! What becomes of the configuration under this node's key: tried, kept as last known good, or refused.
//!
//! ```text
//!              resolves to what is in force             the services do well
//!  assigned ──────────────────────────────▶ active ◀──────────────────────────┐
//!     │ └──── resolves to something else ─▶ trial ────────────────────────────┘
//!     │ does not resolve                      │ they do not, or init starts too often
//!     ▼                                       ▼
//!  refused: the last known good goes on, or the files of the node alone
//! ```
//!
//! [`Kept`] is all that is remembered, so a start of init goes on where the one before it ended.

use std::collections::BTreeMap;

use keelson_config::{AssignedConfiguration, ConfigurationState, ConfigurationStatus, Revision};
use serde::{Deserialize, Serialize};

use crate::health::ServiceState;

/// The start of init within one trial that is one too many.
const STARTS: u32 = 3;

/// How the services were, by name.
pub type Wellness = BTreeMap<String, ServiceState>;

/// What init remembers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Kept {
    /// What was in force without trouble.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_known_good: Option<AssignedConfiguration>,
    /// What is tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    trial: Option<Trial>,
    /// What is not in force although it stands under the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<Refused>,
}

/// A content that is tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Trial {
    content: AssignedConfiguration,
    /// Starts of init since it began.
    starts: u32,
    /// How the services were before it.
    before: Wellness,
}

impl Trial {
    /// How the services were before it.
    pub fn before(&self) -> &Wellness {
        &self.before
    }
}

/// A content that is not in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Refused {
    content: AssignedConfiguration,
    why: String,
    /// It was tried; another look at it would say nothing new.
    tried: bool,
}

/// What is to be done about what stands under the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// All is done already.
    Nothing,
    /// Nothing stands there any more: the files of the node alone.
    Withdraw,
    /// It is new, and to be resolved.
    Judge,
}

/// What a content resolves to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Judgement {
    /// Nothing; a line for each reason.
    Refused(String),
    /// The configuration that is in force.
    Same,
    /// Another one. How the services are now.
    Other(Wellness),
}

impl Kept {
    /// The content in force; `None`: the files of the node alone.
    pub fn active(&self) -> Option<&AssignedConfiguration> {
        self.trial().map(|trial| &trial.content).or(self.last_known_good.as_ref())
    }

    /// The trial that goes on.
    pub fn trial(&self) -> Option<&Trial> {
        self.trial.as_ref()
    }

    /// Why what stands under the key is refused.
    pub fn refusal(&self) -> Option<&str> {
        self.refused.as_ref().map(|refused| refused.why.as_str())
    }

    /// init has started. One trial lasts over [`STARTS`] - 1 starts: with what ends init, or has somebody end it, no node
    /// is to go round in circles. What was refused for its text is looked at again, since the files may have changed.
    #[must_use]
    pub fn started(mut self) -> Self {
        self.refused.take_if(|refused| !refused.tried);
        let Some(trial) = &mut self.trial else { return self };
        trial.starts = trial.starts.saturating_add(1);
        if trial.starts < STARTS {
            return self;
        }
        let why = format!("init was started {} times while it was tried", trial.starts);
        self.failed(&why)
    }

    /// What is to be done about what stands under the key now.
    pub fn step(&self, assigned: Option<&AssignedConfiguration>) -> Step {
        let Some(assigned) = assigned else {
            return if *self == Self::default() { Step::Nothing } else { Step::Withdraw };
        };
        if self.latest() == Some(assigned) { Step::Nothing } else { Step::Judge }
    }

    /// What stood under the key when it was last looked at.
    fn latest(&self) -> Option<&AssignedConfiguration> {
        self.refused.as_ref().map(|refused| &refused.content).or_else(|| self.active())
    }

    /// `content` stands under the key and was resolved. A trial of an earlier one goes on where the later one changes
    /// nothing, and ends where it does.
    #[must_use]
    pub fn judged(mut self, content: AssignedConfiguration, judgement: Judgement) -> Self {
        match judgement {
            Judgement::Refused(why) => self.refused = Some(Refused { content, why, tried: false }),
            Judgement::Same => {
                self.refused = None;
                match &mut self.trial {
                    Some(trial) => trial.content = content,
                    None => self.last_known_good = Some(content),
                }
            }
            Judgement::Other(now) => {
                self.refused = None;
                let before = self.trial.map_or(now, |trial| trial.before);
                self.trial = Some(Trial { content, starts: 0, before });
            }
        }
        self
    }

    /// The services do well with what is tried.
    #[must_use]
    pub fn passed(mut self) -> Self {
        if let Some(trial) = self.trial.take() {
            self.last_known_good = Some(trial.content);
        }
        self
    }

    /// The services do not. A later refusal stays: it is of what stands under the key.
    #[must_use]
    pub fn failed(mut self, why: &str) -> Self {
        if let Some(Trial { content, .. }) = self.trial.take()
            && self.refused.is_none()
        {
            self.refused = Some(Refused { content, why: why.to_owned(), tried: true });
        }
        self
    }

    /// What is in force does not resolve any more: the files have changed, or the release. What was in force before it
    /// takes its place.
    #[must_use]
    pub fn unfit(mut self, why: &str) -> Self {
        if self.trial.is_some() {
            return self.failed(why);
        }
        if let Some(content) = self.last_known_good.take()
            && self.refused.is_none()
        {
            self.refused = Some(Refused { content, why: why.to_owned(), tried: false });
        }
        self
    }

    /// What others are told; `None` when nothing stands under the key.
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
            error: self.refusal().map(ToOwned::to_owned),
        })
    }
}

#[cfg(test)]
#[path = "node_configuration_tests.rs"]
mod tests;
