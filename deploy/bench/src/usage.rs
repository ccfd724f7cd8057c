//! CPU time, memory and written bytes of processes, from /proc.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use keelson_testkit::process::ProcessId;

use crate::watch::SeenProcess;

/// The clock ticks per second in /proc (`sysconf(_SC_CLK_TCK)`): 100 on every architecture that we build for.
const TICKS_PER_SECOND: f64 = 100.0;

/// Processes by the names under which their figures are printed.
pub type Named = BTreeMap<String, ProcessId>;

/// The proportional set size of a process in KiB (`Pss` of /proc/PID/smaps_rollup).
pub fn pss_kib(process: ProcessId) -> anyhow::Result<u64> {
    let path = format!("/proc/{}/smaps_rollup", process.pid);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    parse_pss(&text).with_context(|| format!("{path} has no Pss"))
}

fn parse_pss(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// How long to wait until a flood writes at its full rate.
const WARM_UP: Duration = Duration::from_secs(2);

/// Measures the rate at which a process writes.
#[derive(Debug)]
pub struct WriteRate {
    process: ProcessId,
    begun: Instant,
    /// The bytes that it had written at the begin.
    before: u64,
}

impl WriteRate {
    /// Waits until the process writes at its full rate and begins the measurement. `seen` has only that process.
    pub async fn start(seen: &[SeenProcess]) -> anyhow::Result<Self> {
        let process = seen.first().context("the process of the flood was not seen")?.process;
        tokio::time::sleep(WARM_UP).await;
        Ok(Self { process, begun: Instant::now(), before: written(process)? })
    }

    /// The rate since the begin, in millions of bytes per second.
    pub fn megabytes_per_second(self) -> anyhow::Result<f64> {
        let wrote = written(self.process)?.saturating_sub(self.before);
        ensure!(wrote > 0, "the flood has written nothing");
        // Exact: the bytes of a run fit into a float.
        Ok(wrote as f64 / 1e6 / self.begun.elapsed().as_secs_f64())
    }
}

/// The bytes that a process has written so far (`wchar` of proc_pid_io(5)).
fn written(process: ProcessId) -> anyhow::Result<u64> {
    ensure!(process.is_alive(), "the flood has ended");
    let path = format!("/proc/{}/io", process.pid);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    parse_written(&text).with_context(|| format!("{path} has no wchar"))
}

fn parse_written(io: &str) -> Option<u64> {
    io.lines().find_map(|line| line.strip_prefix("wchar:"))?.trim().parse().ok()
}

/// The CPU seconds that each process has used so far, in user and kernel mode.
pub fn cpu_seconds(processes: &Named) -> anyhow::Result<BTreeMap<String, f64>> {
    let of = |(name, process): (&String, &ProcessId)| {
        let path = format!("/proc/{}/stat", process.pid);
        let text = fs::read_to_string(&path).with_context(|| format!("{name} has ended"))?;
        let (ticks, start) = parse_ticks(&text).with_context(|| format!("cannot parse {path}"))?;
        ensure!(start == process.start_time, "{name} has ended");
        // Exact: the ticks of a process fit into a float.
        Ok((name.clone(), ticks as f64 / TICKS_PER_SECOND))
    };
    processes.iter().map(of).collect()
}

/// The CPU seconds that each process has used since `before`.
pub fn since(before: &BTreeMap<String, f64>, now: BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    let used = |(name, seconds): (String, f64)| {
        let earlier = before.get(&name).copied().unwrap_or_default();
        (name, seconds - earlier)
    };
    now.into_iter().map(used).collect()
}

/// utime + stime and the start time (fields 14, 15 and 22 of proc_pid_stat(5)).
fn parse_ticks(stat: &str) -> Option<(u64, u64)> {
    // The name is in parentheses and may contain parentheses and blanks.
    let fields: Vec<&str> = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace().collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    Some((number(14)? + number(15)?, number(22)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_ticks_are_parsed_after_a_name_with_parentheses() {
        let stat = "7 (a ) (b) S 3 7 7 0 -1 0 0 0 0 0 30 12 99 99 20 0 1 0 4242 0 0";
        assert_eq!(parse_ticks(stat), Some((42, 4242)));
        assert_eq!(parse_ticks("7 (x) S 3"), None);
    }

    #[test]
    fn pss_is_read_from_its_own_line() {
        let text = "55 ---p 00:00 0 [rollup]\nRss:  900 kB\nPss:      512 kB\nPss_Dirty: 7 kB\n";
        assert_eq!(parse_pss(text), Some(512));
        assert_eq!(parse_pss("Pss_Dirty: 7 kB\n"), None);
    }

    #[test]
    fn written_bytes_are_wchar_and_not_write_bytes() {
        let io = "rchar: 5\nwchar: 4242\nwrite_bytes: 4096\n";
        assert_eq!(parse_written(io), Some(4242));
        assert_eq!(parse_written("write_bytes: 4096\n"), None);
    }

    #[test]
    fn the_error_for_an_ended_process_has_its_name() {
        let me = ProcessId::of(std::process::id()).unwrap();
        assert!(pss_kib(me).unwrap() > 0);
        assert!(cpu_seconds(&Named::from([("me".to_owned(), me)])).unwrap()["me"] >= 0.0);
        let dead = ProcessId { start_time: me.start_time + 1, ..me };
        let error = cpu_seconds(&Named::from([("init".to_owned(), dead)])).unwrap_err();
        assert_eq!(error.to_string(), "init has ended");
    }
}
