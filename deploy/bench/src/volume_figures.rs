//! The figures of the benchmark of volumes.

use std::time::Duration;

use serde_json::json;

use crate::figures::{median, pluralize, render, rounded, row};

/// The start times of two pods, one without and one with a CSI volume.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CsiStart {
    /// The start time of the pod without a CSI volume.
    pub without: Duration,
    /// The start time of the pod with a CSI volume.
    pub with: Duration,
    /// The time of the driver's own calls.
    pub calls: Duration,
}

/// The samples of all rounds. Unless stated otherwise, a list has one entry for each round.
#[derive(Debug, Clone, PartialEq)]
pub struct VolumeFigures {
    /// The number of pods with projected volumes.
    pub pods: usize,
    /// The number of pods with a claim that were removed at once.
    pub claims: usize,
    /// The CPU seconds of volume-manager per projected volume.
    pub projected_cpu: Vec<f64>,
    /// One entry for each pair of pods.
    pub starts: Vec<CsiStart>,
    /// The time until the pods without claims were gone.
    pub plain_gone: Vec<Duration>,
    /// The time until the pods with a claim each were gone.
    pub claims_gone: Vec<Duration>,
    /// The time of the driver's own calls meanwhile.
    pub claims_calls: Vec<Duration>,
}

impl VolumeFigures {
    /// No samples yet.
    pub fn new(pods: usize, claims: usize) -> Self {
        Self {
            pods,
            claims,
            projected_cpu: Vec::new(),
            starts: Vec::new(),
            plain_gone: Vec::new(),
            claims_gone: Vec::new(),
            claims_calls: Vec::new(),
        }
    }

    fn cpu_ms(&self) -> f64 {
        median(self.projected_cpu.iter().copied()) * 1000.0
    }

    fn start_ms(&self, of: impl Fn(&CsiStart) -> Duration) -> f64 {
        median(self.starts.iter().map(|start| of(start).as_secs_f64() * 1000.0))
    }

    /// The additional start time of a pod with a CSI volume, divided by the time of the driver's own calls: the median of the
    /// pairs.
    fn start_ratio(&self) -> f64 {
        median(self.starts.iter().map(|start| {
            (start.with.as_secs_f64() - start.without.as_secs_f64()) / start.calls.as_secs_f64()
        }))
    }

    /// The time until the pods with a claim were gone, divided by the time of the driver's own calls: the median of the rounds.
    fn gone_ratio(&self) -> f64 {
        let rounds = self.claims_gone.iter().zip(&self.claims_calls);
        median(rounds.map(|(gone, calls)| gone.as_secs_f64() / calls.as_secs_f64()))
    }

    /// The figures as one line of JSON.
    pub fn json(&self) -> String {
        json!({
            "n": self.pods,
            "rounds": self.projected_cpu.len(),
            "projected_cpu_ms_per_volume": rounded(self.cpu_ms()),
            "start_ms": rounded(self.start_ms(|start| start.without)),
            "csi_start_ms": rounded(self.start_ms(|start| start.with)),
            "csi_start_calls_ms": rounded(self.start_ms(|start| start.calls)),
            "csi_start_ratio": rounded(self.start_ratio()),
            "claims": self.claims,
            "plain_gone_s": rounded(seconds(&self.plain_gone)),
            "claims_gone_s": rounded(seconds(&self.claims_gone)),
            "claims_gone_calls_s": rounded(seconds(&self.claims_calls)),
            "claims_gone_ratio": rounded(self.gone_ratio()),
        })
        .to_string()
    }

    /// The figures as a table for people.
    pub fn table(&self) -> String {
        let heading = format!(
            "{}, medians of {}",
            pluralize(self.pods, "pod"),
            pluralize(self.projected_cpu.len(), "round")
        );
        let ms = |value: f64| format!("{value:.0} ms");
        let s = |values: &[Duration]| format!("{:.2} s", seconds(values));
        let claims = pluralize(self.claims, "pod");
        render(&[
            [heading, "measured".to_owned(), "target".to_owned()],
            row("CPU of volume-manager per projected volume", format!("{:.2} ms", self.cpu_ms()), "2 ms"),
            row("one pod up, without a CSI volume", ms(self.start_ms(|start| start.without)), ""),
            row("  with a CSI volume", ms(self.start_ms(|start| start.with)), ""),
            row("  the driver's own calls", ms(self.start_ms(|start| start.calls)), ""),
            row("  additional time / the driver's own calls", format!("{:.2}", self.start_ratio()), "1.30"),
            row(&format!("{claims} without a claim, removed at once, until gone"), s(&self.plain_gone), ""),
            row("  with a claim each", s(&self.claims_gone), ""),
            row("  the driver's own calls", s(&self.claims_calls), ""),
            row("  with a claim each / the driver's own calls", format!("{:.2}", self.gone_ratio()), "1.30"),
        ])
    }
}

fn seconds(values: &[Duration]) -> f64 {
    median(values.iter().map(Duration::as_secs_f64))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn figures() -> VolumeFigures {
        let ms = Duration::from_millis;
        let start = |without, with| CsiStart { without: ms(without), with: ms(with), calls: ms(100) };
        VolumeFigures {
            projected_cpu: vec![0.001],
            starts: vec![start(100, 210), start(110, 230), start(120, 500)],
            plain_gone: vec![ms(3000)],
            claims_gone: vec![ms(6000)],
            claims_calls: vec![ms(5000)],
            ..VolumeFigures::new(250, 50)
        }
    }

    #[test]
    fn ratios_are_medians_relative_to_the_drivers_own_calls() {
        let value: Value = serde_json::from_str(&figures().json()).unwrap();
        assert_eq!((&value["csi_start_ratio"], &value["claims_gone_ratio"]), (&json!(1.2), &json!(1.2)));
        assert_eq!((&value["projected_cpu_ms_per_volume"], &value["start_ms"]), (&json!(1.0), &json!(110.0)));
    }

    #[test]
    fn the_table_has_figures_and_targets() {
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let table = figures().table();
        for row in [
            "250 pods, medians of 1 round measured target",
            "CPU of volume-manager per projected volume 1.00 ms 2 ms",
            "additional time / the driver's own calls 1.20 1.30",
            "with a claim each / the driver's own calls 1.20 1.30",
        ] {
            assert!(table.lines().any(|line| words(line) == row), "{row}: {table}");
        }
    }
}
