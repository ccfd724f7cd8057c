//! Figures of volumes.

use std::time::Duration;

use serde_json::json;

use crate::figures::{counted, median, render, rounded, row};

/// How long two pods took to start, one without and one with a CSI volume.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CsiStart {
    /// Without.
    pub without: Duration,
    /// With.
    pub with: Duration,
    /// What the driver's own calls took.
    pub calls: Duration,
}

/// What volumes cost.
#[derive(Debug, Clone, PartialEq)]
pub struct VolumeFigures {
    /// Pods with projected volumes.
    pub pods: usize,
    /// Pods with a claim that were removed at once.
    pub claims: usize,
    /// CPU seconds of volume-manager for each projected volume; one for each round.
    pub projected_cpu: Vec<f64>,
    /// One for each pair of pods.
    pub starts: Vec<CsiStart>,
    /// How long the pods took to go without claims; one for each round.
    pub plain_gone: Vec<Duration>,
    /// The same with a claim each.
    pub claims_gone: Vec<Duration>,
    /// What the driver's own calls took meanwhile.
    pub claims_calls: Vec<Duration>,
}

impl VolumeFigures {
    /// Nothing measured yet.
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

    /// How much later a pod with a CSI volume starts, over the driver's own calls: the median of the pairs.
    fn start_ratio(&self) -> f64 {
        median(self.starts.iter().map(|start| {
            (start.with.as_secs_f64() - start.without.as_secs_f64()) / start.calls.as_secs_f64()
        }))
    }

    fn gone_ratio(&self) -> f64 {
        let rounds = self.claims_gone.iter().zip(&self.claims_calls);
        median(rounds.map(|(gone, calls)| gone.as_secs_f64() / calls.as_secs_f64()))
    }

    /// One line.
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

    /// For a person.
    pub fn table(&self) -> String {
        let heading = format!(
            "{}, medians of {}",
            counted(self.pods, "pod"),
            counted(self.projected_cpu.len(), "round")
        );
        let ms = |value: f64| format!("{value:.0} ms");
        let s = |values: &[Duration]| format!("{:.2} s", seconds(values));
        let claims = counted(self.claims, "pod");
        render(&[
            [heading, "measured".to_owned(), "target".to_owned()],
            row("CPU of volume-manager per projected volume", format!("{:.2} ms", self.cpu_ms()), "2 ms"),
            row("one pod up, without a CSI volume", ms(self.start_ms(|start| start.without)), ""),
            row("  with a CSI volume", ms(self.start_ms(|start| start.with)), ""),
            row("  the driver's own calls", ms(self.start_ms(|start| start.calls)), ""),
            row("  later by / the driver's own calls", format!("{:.2}", self.start_ratio()), "1.30"),
            row(&format!("{claims} without a claim removed at once until gone"), s(&self.plain_gone), ""),
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
    fn ratios_are_medians_over_the_drivers_own_calls() {
        let value: Value = serde_json::from_str(&figures().json()).unwrap();
        assert_eq!((&value["csi_start_ratio"], &value["claims_gone_ratio"]), (&json!(1.2), &json!(1.2)));
        assert_eq!((&value["projected_cpu_ms_per_volume"], &value["start_ms"]), (&json!(1.0), &json!(110.0)));
    }

    #[test]
    fn the_table_has_targets_beside_the_figures() {
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let table = figures().table();
        for row in [
            "250 pods, medians of 1 round measured target",
            "CPU of volume-manager per projected volume 1.00 ms 2 ms",
            "later by / the driver's own calls 1.20 1.30",
            "with a claim each / the driver's own calls 1.20 1.30",
        ] {
            assert!(table.lines().any(|line| words(line) == row), "{row}: {table}");
        }
    }
}
