//! The starts of a pod: how far the first one has come, and which containers could not be started.

use std::collections::BTreeMap;

use keelson_pod_sync_core::measure::FirstStart;

/// What is recorded of a pod's starts. It is not in the worker: the tasks of probes publish statuses
/// too. Each status shows the errors, and one of them is the first that shows the pod running. Each stored record contains the
/// errors and the first start.
#[derive(Debug, Default)]
pub struct StartRecord {
    /// By container, why its last start failed: waiting reason and message.
    pub errors: BTreeMap<String, (String, String)>,
    /// How far its first start has come, for metrics.
    pub first: FirstStart,
    /// When image pulls for its first start began and ended, unix nanoseconds.
    pub pulls: Vec<(i64, i64)>,
}

impl StartRecord {
    /// An image pull began and ended at these unix nanoseconds. Only those of the first start are recorded.
    pub fn record_pull(&mut self, begun: i64, ended: i64) {
        if !self.first.is_over() {
            self.pulls.push((begun, ended));
        }
    }
}
