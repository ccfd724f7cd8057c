//! The configuration assigned to this node under its key in etcd: the files that the services exchange about it.
//!
//! pod-config writes the value of the key as [`AssignedConfiguration`], init decides whether to use it and writes
//! [`ConfigurationStatus`], and node-status reports that.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{Paths, ServiceName};

/// How a configuration under this node's key is put on trial.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeConfiguration {
    /// Milliseconds after which the services must be as healthy as before; after the same time again the trial fails.
    pub trial_period_ms: u64,
}

impl Default for NodeConfiguration {
    fn default() -> Self {
        Self { trial_period_ms: 60_000 }
    }
}

/// The value of the key, as pod-config writes it for init.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssignedConfiguration {
    /// The revision of the key's last change.
    pub revision: i64,
    /// A KubeletConfiguration, YAML or JSON; empty when the value cannot be used.
    pub text: String,
    /// Why the value cannot be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl AssignedConfiguration {
    /// Maximum size of the value in bytes.
    pub const MAX_BYTES: usize = 1 << 20;

    /// The value of the key at `revision`. A value that is too long or not UTF-8 is recorded as a problem.
    pub fn new(revision: i64, value: Vec<u8>) -> Self {
        let problem = |problem: String| Self { revision, text: String::new(), problem: Some(problem) };
        if value.len() > Self::MAX_BYTES {
            let most = Self::MAX_BYTES;
            return problem(format!("it has {} bytes, and at most {most} are taken", value.len()));
        }
        match String::from_utf8(value) {
            Ok(text) => Self { revision, text, problem: None },
            Err(error) => problem(format!("it is no text of UTF-8: {}", error.utf8_error())),
        }
    }

    /// Its name in messages and in the provenance.
    pub fn name(&self) -> String {
        format!("etcd config@{}", self.revision)
    }
}

/// A revision of the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revision {
    /// The revision of etcd.
    pub revision: i64,
}

/// The state of the assigned configuration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConfigurationState {
    /// The key does not exist.
    #[default]
    None,
    /// It is in effect.
    Active,
    /// It is in effect on trial, until it is known whether the services stay healthy.
    Trial,
    /// It is not in effect; `error` says why.
    Refused,
}

impl ConfigurationState {
    /// The word in the status.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Active => "active",
            Self::Trial => "trial",
            Self::Refused => "refused",
        }
    }
}

/// The status that init reports, also on a node without an assigned configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigurationStatus {
    /// The revision under the key; absent: the status applies to any value of the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assigned: Option<Revision>,
    /// The revision in effect; absent: only the node's own files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active: Option<Revision>,
    /// The last revision that passed its trial; absent: only the node's own files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_known_good: Option<Revision>,
    /// The state of the assigned configuration.
    pub state: ConfigurationState,
    /// Why it was refused, a line for each reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl ConfigurationStatus {
    /// The status of a node that does not accept any configuration from its key, with the reason `why`.
    pub fn refusing_all(why: String) -> Self {
        Self { state: ConfigurationState::Refused, error: Some(why), ..Self::default() }
    }

    /// Whether the node refuses any value of the key.
    pub fn refuses_all(&self) -> bool {
        self.state == ConfigurationState::Refused && self.assigned.is_none()
    }
}

impl fmt::Display for ConfigurationStatus {
    /// `active@12`, or `refused@13: …` with the first line of the reason.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.state.as_str())?;
        if let Some(assigned) = self.assigned {
            write!(f, "@{}", assigned.revision)?;
        }
        match self.error.as_deref().and_then(|error| error.lines().next()) {
            Some(line) => write!(f, ": {line}"),
            None => Ok(()),
        }
    }
}

impl Paths {
    /// The file with the value of this node's key; absent when the key does not exist. See [`AssignedConfiguration`].
    pub fn assigned_configuration(&self) -> PathBuf {
        self.state(ServiceName::PodConfig).join("node-configuration.json")
    }

    /// The file with its status; absent when the key does not exist. See [`ConfigurationStatus`].
    pub fn configuration_status(&self) -> PathBuf {
        self.run_dir.join("node-configuration.json")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oversized_or_non_utf8_node_configuration_is_a_problem() {
        let of = |value: Vec<u8>| AssignedConfiguration::new(7, value);
        let longest = of(vec![b' '; AssignedConfiguration::MAX_BYTES]);
        assert_eq!((longest.text.len(), longest.problem), (1 << 20, None));
        let long = of(vec![b' '; AssignedConfiguration::MAX_BYTES + 1]);
        assert_eq!(long.problem.unwrap(), "it has 1048577 bytes, and at most 1048576 are taken");
        let binary = of(vec![b'a', 0xff]);
        assert!(binary.text.is_empty());
        assert!(binary.problem.unwrap().contains("no text of UTF-8"));
        assert_eq!(of(Vec::new()).name(), "etcd config@7");
    }

    #[test]
    fn a_status_is_shown_in_one_line() {
        let revision = |revision| Some(Revision { revision });
        let mut status = ConfigurationStatus {
            assigned: revision(12),
            active: revision(12),
            state: ConfigurationState::Trial,
            ..ConfigurationStatus::default()
        };
        assert_eq!(status.to_string(), "trial@12");
        status.state = ConfigurationState::Refused;
        status.error = Some("one\ntwo".into());
        assert_eq!(status.to_string(), "refused@12: one");
        let json = serde_json::to_value(&status).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "assigned": {"revision": 12}, "active": {"revision": 12}, "state": "refused", "error": "one\ntwo",
            })
        );
        assert_eq!(serde_json::from_value::<ConfigurationStatus>(json).unwrap(), status);
        assert_eq!(ConfigurationStatus::default().to_string(), "none");
        assert!(!status.refuses_all() && !ConfigurationStatus::default().refuses_all());
        let all = ConfigurationStatus::refusing_all("no init".into());
        assert!(all.refuses_all());
        assert_eq!(
            serde_json::to_value(&all).unwrap(),
            serde_json::json!({"state": "refused", "error": "no init"})
        );
    }
}
