//! The figures of the benchmarks with a real API server: deletions and edits.

use std::time::Duration;

use serde_json::json;

use crate::figures::{Times, pluralize, render, rounded, row};

/// The times until all pods that were deleted at once at an API server are gone. A list has one entry for each round.
#[derive(Debug, Clone, PartialEq)]
pub struct Deletions {
    /// The number of pods.
    pub pods: usize,
    /// The times of pods on the agent's node.
    pub times: Vec<Duration>,
    /// The times of pods without a node.
    pub floor: Vec<Duration>,
}

impl Deletions {
    fn medians(&self) -> (f64, f64) {
        let median = |times: &[Duration]| Times::new(times.iter().copied()).percentile(50);
        (median(&self.times), median(&self.floor))
    }

    /// The figures as one line of JSON.
    pub fn json(&self) -> String {
        let (deleted, floor) = self.medians();
        json!({
            "n": self.pods,
            "rounds": self.times.len(),
            "deleted_s": rounded(deleted),
            "floor_deleted_s": rounded(floor),
        })
        .to_string()
    }

    /// The figures as a table for people.
    pub fn table(&self) -> String {
        let (deleted, floor) = self.medians();
        let heading = format!("{}, {}", pluralize(self.pods, "pod"), pluralize(self.times.len(), "round"));
        render(&[
            [heading, "measured".to_owned(), "target".to_owned()],
            row("deleted at the API server until all are gone there", format!("{deleted:.2} s"), ""),
            row("  the server alone, with pods without a node", format!("{floor:.2} s"), ""),
        ])
    }
}

/// The times from edits of ConfigMaps to the files of pods.
#[derive(Debug, Clone, PartialEq)]
pub struct Edits {
    /// The number of pods, each with its own ConfigMap.
    pub pods: usize,
    /// One time for each edit.
    pub times: Times,
}

impl Edits {
    fn milliseconds(&self, percent: usize) -> f64 {
        rounded(self.times.percentile(percent) * 1000.0)
    }

    /// The figures as one line of JSON.
    pub fn json(&self) -> String {
        json!({
            "n": self.pods,
            "edits": self.times.len(),
            "edit_p50_ms": self.milliseconds(50),
            "edit_p99_ms": self.milliseconds(99),
            "edit_max_ms": self.milliseconds(100),
        })
        .to_string()
    }

    /// The figures as a table for people.
    pub fn table(&self) -> String {
        let heading = format!("{}, {}", pluralize(self.pods, "pod"), pluralize(self.times.len(), "edit"));
        let ms = |percent| format!("{:.0} ms", self.milliseconds(percent));
        render(&[
            [heading, "measured".to_owned(), "target".to_owned()],
            row("edit at the API server to the file: half of them", ms(50), ""),
            row("  99 %", ms(99), "1000 ms"),
            row("  the longest", ms(100), ""),
        ])
    }
}
