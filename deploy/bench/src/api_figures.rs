//! Figures of changes at a real API server.

use std::time::Duration;

use serde_json::json;

use crate::figures::{Times, counted, render, rounded, row};

/// How long pods took to end that were all deleted through the API at once.
#[derive(Debug, Clone, PartialEq)]
pub struct Deletions {
    /// How many.
    pub pods: usize,
    /// One for each round.
    pub times: Vec<Duration>,
    /// The same for pods of no node.
    pub floor: Vec<Duration>,
}

impl Deletions {
    fn medians(&self) -> (f64, f64) {
        let median = |times: &[Duration]| Times::new(times.iter().copied()).percentile(50);
        (median(&self.times), median(&self.floor))
    }

    /// One line.
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

    /// For a person.
    pub fn table(&self) -> String {
        let (deleted, floor) = self.medians();
        let heading = format!("{}, {}", counted(self.pods, "pod"), counted(self.times.len(), "round"));
        render(&[
            [heading, "measured".to_owned(), "target".to_owned()],
            row("deleted through the API until all are gone there", format!("{deleted:.2} s"), ""),
            row("  the server alone, of pods that no node has", format!("{floor:.2} s"), ""),
        ])
    }
}

/// How long edits of ConfigMaps took to the files of pods.
#[derive(Debug, Clone, PartialEq)]
pub struct Edits {
    /// Pods, each with a ConfigMap of its own.
    pub pods: usize,
    /// One for each edit.
    pub times: Times,
}

impl Edits {
    fn milliseconds(&self, percent: usize) -> f64 {
        rounded(self.times.percentile(percent) * 1000.0)
    }

    /// One line.
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

    /// For a person.
    pub fn table(&self) -> String {
        let heading = format!("{}, {}", counted(self.pods, "pod"), counted(self.times.len(), "edit"));
        let ms = |percent| format!("{:.0} ms", self.milliseconds(percent));
        render(&[
            [heading, "measured".to_owned(), "target".to_owned()],
            row("edit at the API server to the file: half of them", ms(50), ""),
            row("  99 %", ms(99), "1000 ms"),
            row("  the longest", ms(100), ""),
        ])
    }
}
