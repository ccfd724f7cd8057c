//! Behaviour of the node while its control plane does not answer.

use serde::{Deserialize, Serialize};

/// What may start after a reboot while the control plane does not answer (architecture §5). Within a boot everything
/// continues in any case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Offline {
    /// Which pods.
    pub start_after_reboot: StartAfterReboot,
    /// Milliseconds since the last contact with the control plane after which no pod starts; 0: no limit.
    pub max_age_ms: u64,
}

impl Default for Offline {
    fn default() -> Self {
        // From a Friday evening to a Monday morning, with some hours to spare.
        Self { start_after_reboot: StartAfterReboot::Stateless, max_age_ms: 72 * 3_600_000 }
    }
}

/// Which pods start after a reboot although the control plane does not answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StartAfterReboot {
    /// None of them.
    Never,
    /// Those without a claim to a volume that no StatefulSet owns.
    #[default]
    Stateless,
    /// All of them.
    All,
}

impl StartAfterReboot {
    /// The words of the configuration.
    pub const WORDS: [&str; 3] = ["never", "stateless", "all"];

    /// Reads one of [`StartAfterReboot::WORDS`].
    pub fn parse(word: &str) -> Option<Self> {
        match word {
            "never" => Some(Self::Never),
            "stateless" => Some(Self::Stateless),
            "all" => Some(Self::All),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read_and_written_as_it_is() {
        for word in StartAfterReboot::WORDS {
            let read = StartAfterReboot::parse(word).unwrap();
            assert_eq!(serde_json::to_value(read).unwrap(), word);
        }
        assert_eq!(StartAfterReboot::parse("Never"), None);
    }
}
