//! Limits how many probes run at the same time.

use std::sync::Arc;
use std::time::Duration;

use keelson_service_kit::{Fairness, Turns};

/// The most exec probes at the same time, of all pods.
const EXEC_PROBES: usize = 16;
/// The most network probes at the same time, of all pods.
const NETWORK_PROBES: usize = 64;
/// A pod that runs more probes than one that waits loses one after 1 s. If all run the same number, each keeps its turn for 5 s.
const FAIRNESS: Fairness = Fairness { patience: Duration::from_secs(1), kept: Duration::from_secs(5) };

/// Limits how many probes run at the same time, of all pods.
#[derive(Debug)]
pub struct ProbeTurns {
    /// Exec probes.
    pub exec: Arc<Turns>,
    /// Network probes.
    pub network: Arc<Turns>,
}

impl Default for ProbeTurns {
    fn default() -> Self {
        Self { exec: Turns::new(EXEC_PROBES, FAIRNESS), network: Turns::new(NETWORK_PROBES, FAIRNESS) }
    }
}
