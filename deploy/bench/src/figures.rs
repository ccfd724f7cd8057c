//! The figures of the benchmark of starts and ends, computed from its samples, and the printing of all figures.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

/// The times of all pods of one run in seconds since its begin.
#[derive(Debug, Clone, PartialEq)]
pub struct Times {
    /// Sorted.
    seconds: Vec<f64>,
}

/// CPU use over two windows of the same length, in percent of one core.
#[derive(Debug, Clone, PartialEq)]
pub struct Idle {
    /// The length of each window.
    pub window: Duration,
    /// The CPU use of each service.
    pub services: BTreeMap<String, f64>,
    /// The CPU use of containerd while the agent runs.
    pub runtime_with: f64,
    /// The CPU use of containerd while the same pods run and the agent is stopped.
    pub runtime_without: f64,
}

/// The samples of a whole benchmark. A list has one entry for each round.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The number of pods.
    pub pods: usize,
    /// The number of rounds.
    pub rounds: usize,
    /// The start times of the agent's pods.
    pub agent: Vec<Times>,
    /// The start times of the floor's pods.
    pub floor: Vec<Times>,
    /// The CPU seconds of each service from before the first manifest until all pods are Ready.
    pub start_cpu: Vec<BTreeMap<String, f64>>,
    /// The seconds from the removal of one manifest until its process is gone.
    pub gone: Vec<f64>,
    /// The seconds from the kill of the whole agent until all pods are Ready again.
    pub recovery: Vec<f64>,
    /// The seconds from the same kill until every container was seen again.
    pub adoption: Vec<f64>,
    /// The memory of each service (PSS).
    pub pss_kib: BTreeMap<String, u64>,
    /// `None` if there were no idle windows.
    pub idle: Option<Idle>,
    /// The MB/s that a flood wrote while the floor's pods started. Empty without a flood.
    pub flood_floor: Vec<f64>,
    /// The MB/s that a flood wrote while the agent's pods started. Empty without a flood.
    pub flood_agent: Vec<f64>,
}

impl Times {
    /// The number of times.
    pub fn len(&self) -> usize {
        self.seconds.len()
    }

    /// Collects times, which may be in any order.
    pub fn new(times: impl Iterator<Item = Duration>) -> Self {
        let mut seconds: Vec<f64> = times.map(|time| time.as_secs_f64()).collect();
        seconds.sort_by(f64::total_cmp);
        Self { seconds }
    }

    /// The smallest time that is not exceeded by `percent` of the pods (nearest rank); 0 without pods.
    pub fn percentile(&self, percent: usize) -> f64 {
        let rank = (self.seconds.len() * percent).div_ceil(100).max(1);
        self.seconds.get(rank - 1).copied().unwrap_or_default()
    }

    /// The time of the last pod.
    pub fn last(&self) -> f64 {
        self.percentile(100)
    }
}

/// The median of `values`; 0 without values.
pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.as_slice() {
        [] => 0.0,
        all if all.len() % 2 == 1 => all[middle],
        all => f64::midpoint(all[middle - 1], all[middle]),
    }
}

/// Rounds to three decimal places, which is more than the repeatable precision.
pub fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn mib(kib: u64) -> f64 {
    // Exact: the KiB of a process fit into the 53 bits of a float.
    kib as f64 / 1024.0
}

impl Idle {
    fn total(&self) -> f64 {
        self.services.values().sum()
    }

    /// The additional CPU use of containerd while the agent runs.
    fn runtime(&self) -> f64 {
        self.runtime_with - self.runtime_without
    }
}

impl Report {
    /// A report without samples.
    pub fn new(pods: usize, rounds: usize) -> Self {
        Self {
            pods,
            rounds,
            agent: Vec::new(),
            floor: Vec::new(),
            start_cpu: Vec::new(),
            gone: Vec::new(),
            recovery: Vec::new(),
            adoption: Vec::new(),
            pss_kib: BTreeMap::new(),
            idle: None,
            flood_floor: Vec::new(),
            flood_agent: Vec::new(),
        }
    }

    fn has_flood(&self) -> bool {
        !self.flood_agent.is_empty()
    }

    fn up(&self) -> f64 {
        median(self.agent.iter().map(Times::last))
    }

    fn floor_up(&self) -> f64 {
        median(self.floor.iter().map(Times::last))
    }

    fn ratio(&self) -> f64 {
        self.up() / self.floor_up()
    }

    /// The CPU milliseconds per pod of `service`, or of all services for `None`, while the pods start.
    fn start_cpu_ms(&self, service: Option<&str>) -> f64 {
        let of_round = |round: &BTreeMap<String, f64>| match service {
            Some(name) => round.get(name).copied().unwrap_or_default(),
            None => round.values().sum(),
        };
        // Exact: the number of pods fits into a float.
        median(self.start_cpu.iter().map(of_round)) * 1000.0 / self.pods as f64
    }

    /// [`Self::start_cpu_ms`] of each service.
    fn start_cpu_ms_each(&self) -> BTreeMap<String, f64> {
        let names = self.start_cpu.first().into_iter().flat_map(BTreeMap::keys);
        names.map(|name| (name.clone(), self.start_cpu_ms(Some(name)))).collect()
    }

    fn pss_total(&self) -> f64 {
        mib(self.pss_kib.values().sum())
    }

    /// The figures as one line of JSON.
    pub fn json(&self) -> String {
        let ms = |times: &[Times], percent| {
            rounded(median(times.iter().map(|times| times.percentile(percent))) * 1000.0)
        };
        let middle = |values: &[f64]| rounded(median(values.iter().copied()));
        // With a flood, nothing is measured at rest.
        let at_rest = |value: f64| (!self.has_flood()).then_some(value);
        let each = |times: &[Times]| times.iter().map(|times| rounded(times.last())).collect::<Vec<_>>();
        let pss = self.pss_kib.iter().map(|(name, kib)| (name.clone(), json!(rounded(mib(*kib)))));
        let start_cpu = self.start_cpu_ms_each().into_iter().map(|(name, ms)| (name, json!(rounded(ms))));
        let cpu = self.idle.as_ref().map(|idle| {
            let services = idle.services.iter();
            services.map(|(name, percent)| (name.clone(), json!(rounded(*percent)))).collect::<Value>()
        });
        let idle = |figure: fn(&Idle) -> f64| self.idle.as_ref().map(|idle| rounded(figure(idle)));
        json!({
            "n": self.pods,
            "rounds": self.rounds,
            "ratio_up": rounded(self.ratio()),
            "up_s": rounded(self.up()),
            "floor_s": rounded(self.floor_up()),
            "up_s_each": each(&self.agent),
            "floor_s_each": each(&self.floor),
            "ready_p50_ms": ms(&self.agent, 50),
            "ready_p99_ms": ms(&self.agent, 99),
            "floor_p50_ms": ms(&self.floor, 50),
            "start_cpu_ms_per_pod_total": rounded(self.start_cpu_ms(None)),
            "start_cpu_ms_per_pod": start_cpu.collect::<Value>(),
            "gone_s": middle(&self.gone),
            "recovery_s": at_rest(middle(&self.recovery)),
            "adopted_s": at_rest(middle(&self.adoption)),
            "pss_mib_total": at_rest(rounded(self.pss_total())),
            "pss_mib": pss.collect::<Value>(),
            "flood_mb_s": self.has_flood().then(|| middle(&self.flood_agent)),
            "floor_flood_mb_s": self.has_flood().then(|| middle(&self.flood_floor)),
            "idle_seconds": self.idle.as_ref().map(|idle| idle.window.as_secs()),
            "idle_cpu_pct_total": idle(Idle::total),
            "idle_cpu_pct": cpu,
            "runtime_idle_cpu_pct": idle(Idle::runtime),
        })
        .to_string()
    }

    /// The figures as a table for people, each with its target.
    pub fn table(&self) -> String {
        let ms = |times: &[Times], percent| {
            format!("{:.0} ms", median(times.iter().map(|times| times.percentile(percent))) * 1000.0)
        };
        let seconds = |values: &[f64]| format!("{:.3} s", median(values.iter().copied()));
        let target = Targets::of(self.pods);
        let heading =
            format!("{}, medians of {}", pluralize(self.pods, "pod"), pluralize(self.rounds, "round"));
        let mut rows = vec![
            [heading, "measured".to_owned(), "target".to_owned()],
            row("up: manifests in place to the last process", format!("{:.3} s", self.up()), ""),
            row("  half of the pods", ms(&self.agent, 50), ""),
            row("  99 % of the pods", ms(&self.agent, 99), ""),
            row("floor: the same requests directly to containerd", format!("{:.3} s", self.floor_up()), ""),
            row("  half of the pods", ms(&self.floor, 50), ""),
            row("up / floor", format!("{:.3}", self.ratio()), target.ratio),
            row("CPU of all services per started pod", format!("{:.1} ms", self.start_cpu_ms(None)), ""),
            row("gone: one manifest removed to its process gone", seconds(&self.gone), target.gone),
        ];
        if self.has_flood() {
            let rate = |values: &[f64]| format!("{:.0} MB/s", median(values.iter().copied()));
            rows.push(row("a container wrote its log meanwhile", rate(&self.flood_agent), ""));
            rows.push(row("  while the floor was measured", rate(&self.flood_floor), ""));
            return render(&rows);
        }
        rows.extend([
            row("whole agent killed to all Ready again", seconds(&self.recovery), target.recovery),
            row("  every container seen again", seconds(&self.adoption), ""),
            row("memory of all services (PSS)", format!("{:.1} MiB", self.pss_total()), target.memory),
        ]);
        for (name, kib) in &self.pss_kib {
            rows.push(row(&format!("  {name}"), format!("{:.1} MiB", mib(*kib)), ""));
        }
        if let Some(idle) = &self.idle {
            rows.push(row("idle CPU of all services, of one core", percent(idle.total()), target.cpu));
            for (name, used) in &idle.services {
                rows.push(row(&format!("  {name}"), percent(*used), ""));
            }
            let cost = "idle CPU that the agent costs containerd";
            rows.push(row(cost, percent(idle.runtime()), target.runtime_cpu));
        }
        render(&rows)
    }
}

/// A count with a noun in singular or plural: "1 pod", "2 pods".
pub fn pluralize(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

fn percent(value: f64) -> String {
    format!("{value:.2} %")
}

/// A row of a table: name, measured value, target.
pub fn row(name: &str, measured: String, target: &str) -> [String; 3] {
    [name.to_owned(), measured, target.to_owned()]
}

/// The targets of the figures; empty where there is none for this number of pods.
struct Targets {
    ratio: &'static str,
    gone: &'static str,
    recovery: &'static str,
    memory: &'static str,
    cpu: &'static str,
    runtime_cpu: &'static str,
}

impl Targets {
    fn of(pods: usize) -> Self {
        let (memory, cpu) = match pods {
            0..=50 => ("48 MiB", "0.5 %"),
            51..=110 => ("52 MiB", "1 %"),
            111..=250 => ("64 MiB", "2 %"),
            _ => ("", ""),
        };
        let few = pods <= 50;
        Self {
            ratio: if pods == 1 { "1.20" } else { "1.10" },
            gone: if few { "0.3 s" } else { "" },
            recovery: if few { "0.8 s" } else { "" },
            memory,
            cpu,
            runtime_cpu: if pods <= 110 { "0.3 %" } else { "" },
        }
    }
}

/// Formats a table: names are aligned left, figures right. The first row is the heading, with a line below it.
pub fn render(rows: &[[String; 3]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let (first, second, third) = (width(0), width(1), width(2));
    let mut text = String::new();
    for (at, [name, measured, target]) in rows.iter().enumerate() {
        let line = format!("{name:<first$}   {measured:>second$}   {target:>third$}");
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}", line.trim_end());
        if at == 0 {
            let _ = writeln!(text, "{}", "-".repeat(first + second + third + 6));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(milliseconds: &[u64]) -> Times {
        Times::new(milliseconds.iter().map(|ms| Duration::from_millis(*ms)))
    }

    fn report() -> Report {
        Report {
            agent: vec![times(&[110, 220]), times(&[100, 330]), times(&[120, 210])],
            floor: vec![times(&[100, 200]), times(&[90, 190]), times(&[110, 500])],
            start_cpu: [0.020, 0.030, 0.060]
                .map(|seconds| BTreeMap::from([("init".to_owned(), 0.002), ("pod-sync".to_owned(), seconds)]))
                .into(),
            gone: vec![0.2, 0.3, 0.25],
            recovery: vec![0.5],
            adoption: vec![0.6],
            pss_kib: BTreeMap::from([("init".to_owned(), 2048), ("pod-sync".to_owned(), 5120)]),
            idle: Some(Idle {
                window: Duration::from_secs(120),
                services: BTreeMap::from([("init".to_owned(), 0.1), ("pod-sync".to_owned(), 0.2345)]),
                runtime_with: 0.9,
                runtime_without: 0.5,
            }),
            ..Report::new(2, 3)
        }
    }

    #[test]
    fn percentiles_are_measured_times_by_nearest_rank() {
        let ten = times(&[10, 9, 8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!([1, 50, 51, 99, 100].map(|p| ten.percentile(p)), [0.001, 0.005, 0.006, 0.01, 0.01]);
        assert_eq!(times(&[7]).percentile(50), 0.007);
        assert_eq!(times(&[]).last(), 0.0);
    }

    #[test]
    fn the_median_of_an_even_number_of_values_is_the_mean_of_the_middle_two() {
        let of = |values: &[f64]| median(values.iter().copied());
        assert_eq!(of(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(of(&[4.0, 1.0, 2.0, 8.0]), 3.0);
        assert_eq!(of(&[]), 0.0);
    }

    #[test]
    fn the_json_is_one_line_with_medians_over_the_rounds() {
        let text = report().json();
        assert!(!text.contains('\n'));
        let value: Value = serde_json::from_str(&text).unwrap();
        let expected = json!({
            "n": 2,
            "rounds": 3,
            "ratio_up": 1.1,
            "up_s": 0.22,
            "floor_s": 0.2,
            "up_s_each": [0.22, 0.33, 0.21],
            "floor_s_each": [0.2, 0.19, 0.5],
            "ready_p50_ms": 110.0,
            "ready_p99_ms": 220.0,
            "floor_p50_ms": 100.0,
            "start_cpu_ms_per_pod_total": 16.0,
            "start_cpu_ms_per_pod": {"init": 1.0, "pod-sync": 15.0},
            "gone_s": 0.25,
            "recovery_s": 0.5,
            "adopted_s": 0.6,
            "pss_mib_total": 7.0,
            "pss_mib": {"init": 2.0, "pod-sync": 5.0},
            "flood_mb_s": null,
            "floor_flood_mb_s": null,
            "idle_seconds": 120,
            "idle_cpu_pct_total": 0.335,
            "idle_cpu_pct": {"init": 0.1, "pod-sync": 0.235},
            "runtime_idle_cpu_pct": 0.4,
        });
        assert_eq!(value, expected);
    }

    #[test]
    fn a_noun_with_count_one_is_singular() {
        assert_eq!([pluralize(1, "pod"), pluralize(2, "pod")], ["1 pod", "2 pods"]);
    }

    #[test]
    fn figures_of_skipped_idle_windows_are_null() {
        let value: Value = serde_json::from_str(&Report { idle: None, ..report() }.json()).unwrap();
        for name in ["idle_seconds", "idle_cpu_pct_total", "idle_cpu_pct", "runtime_idle_cpu_pct"] {
            assert_eq!(value.get(name), Some(&Value::Null), "{name}");
        }
        assert!(!Report { idle: None, ..report() }.table().contains("idle CPU"));
    }

    #[test]
    fn figures_with_a_flood_have_its_write_rates_and_nothing_at_rest() {
        let flooded = Report { flood_floor: vec![30.0, 50.0], flood_agent: vec![35.0], ..report() };
        let table = flooded.table();
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        for row in ["a container wrote its log meanwhile 35 MB/s", "while the floor was measured 40 MB/s"] {
            assert!(table.lines().any(|line| words(line) == row), "{row}: {table}");
        }
        assert!(!table.contains("memory") && !table.contains("killed"), "{table}");
        let value: Value = serde_json::from_str(&flooded.json()).unwrap();
        assert_eq!((&value["flood_mb_s"], &value["floor_flood_mb_s"]), (&json!(35.0), &json!(40.0)));
        for name in ["recovery_s", "adopted_s", "pss_mib_total"] {
            assert_eq!(value[name], Value::Null, "{name}");
        }
    }

    #[test]
    fn the_columns_of_the_table_are_aligned() {
        let expected = "\
2 pods, medians of 3 rounds                       measured   target
-------------------------------------------------------------------
up: manifests in place to the last process         0.220 s
  half of the pods                                  110 ms
  99 % of the pods                                  220 ms
floor: the same requests directly to containerd    0.200 s
  half of the pods                                  100 ms
up / floor                                           1.100     1.10
CPU of all services per started pod                16.0 ms
gone: one manifest removed to its process gone     0.250 s    0.3 s
whole agent killed to all Ready again              0.500 s    0.8 s
  every container seen again                       0.600 s
memory of all services (PSS)                       7.0 MiB   48 MiB
  init                                             2.0 MiB
  pod-sync                                         5.0 MiB
idle CPU of all services, of one core               0.33 %    0.5 %
  init                                              0.10 %
  pod-sync                                          0.23 %
idle CPU that the agent costs containerd            0.40 %    0.3 %
";
        assert_eq!(report().table(), expected);
    }
}
