//! The values of `keelson top`: CPU rates between two samples, the order of rows, and the formats of `kubectl top`.

use std::cmp::{Ordering, Reverse};
use std::collections::HashMap;

use clap::ValueEnum;

/// The column to sort by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sort {
    /// By CPU, highest first
    Cpu,
    /// By memory, highest first
    Memory,
    /// By namespace and name
    Name,
}

/// The CPU time used up to a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CpuSample {
    /// CPU nanoseconds since the start of the process or cgroup.
    pub(crate) nanos: u64,
    /// Nanoseconds since 1970.
    pub(crate) taken: i64,
}

/// The previous sample of each row, by its key.
#[derive(Debug, Default)]
pub(crate) struct CpuRates(HashMap<String, CpuSample>);

impl CpuRates {
    /// Nanoseconds of CPU per second since the previous sample; stores this one. `None`: there is no previous sample,
    /// or the counter was reset.
    pub(crate) fn rate(&mut self, key: &str, now: CpuSample) -> Option<u64> {
        let before = self.0.insert(key.to_owned(), now)?;
        let passed = u64::try_from(now.taken.checked_sub(before.taken)?).ok().filter(|passed| *passed > 0)?;
        let used = now.nanos.checked_sub(before.nanos)?;
        u64::try_from(u128::from(used) * 1_000_000_000 / u128::from(passed)).ok()
    }

    /// Removes the samples of all other keys.
    pub(crate) fn retain(&mut self, mut is_known: impl FnMut(&str) -> bool) {
        self.0.retain(|key, _| is_known(key));
    }
}

/// Compares two rows; rows without a value come last, and equal ones are sorted by name.
pub(crate) fn order<'a>(
    sort: Sort,
    values: impl Fn(Sort) -> (Option<u64>, Option<u64>),
    names: (&'a str, &'a str),
) -> Ordering {
    let by_value = match sort {
        Sort::Name => Ordering::Equal,
        sort => {
            let (a, b) = values(sort);
            Reverse(a).cmp(&Reverse(b))
        }
    };
    by_value.then_with(|| names.0.cmp(names.1))
}

/// Nanoseconds per second as millicores, rounded up as in
/// `kubectl top`: `12m`.
pub(crate) fn cores(nanos_per_second: Option<u64>) -> String {
    nanos_per_second.map_or_else(|| "-".into(), |nanos| format!("{}m", nanos.div_ceil(1_000_000)))
}

/// Nanoseconds per second in percent of one core, with one digit.
pub(crate) fn percent_of_core(nanos_per_second: Option<u64>) -> String {
    nanos_per_second.map_or_else(|| "-".into(), |nanos| format!("{:.1}%", nanos as f64 / 1e7))
}

/// Whole mebibytes: `12Mi`.
pub(crate) fn mebibytes(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "-".into(), |bytes| format!("{}Mi", bytes / (1024 * 1024)))
}

/// Whole percent; `<unknown>` when either value is unknown, as in `kubectl top`.
pub(crate) fn percent(part: Option<u64>, whole: Option<u64>) -> String {
    match (part, whole) {
        (Some(part), Some(whole)) if whole > 0 => format!("{}%", u128::from(part) * 100 / u128::from(whole)),
        _ => "<unknown>".into(),
    }
}

/// Cuts `text` to the size of the terminal; a last line counts the lines that are left out.
pub(crate) fn fit_to_screen(text: &str, width: usize, height: usize) -> Vec<String> {
    let narrow = |line: &str| line.chars().take(width).collect::<String>();
    let lines: Vec<&str> = text.lines().collect();
    if lines.len() <= height {
        return lines.into_iter().map(narrow).collect();
    }
    let shown = height.saturating_sub(1);
    let more = format!("… {} lines more", lines.len() - shown);
    lines[..shown].iter().map(|line| narrow(line)).chain([narrow(&more)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000_000;

    #[test]
    fn cpu_rate_needs_two_samples_of_one_process() {
        let mut rates = CpuRates::default();
        let mut at = |nanos, seconds: i64| rates.rate("a", CpuSample { nanos, taken: seconds * SECOND });
        assert_eq!(at(5_000_000_000, 0), None, "the first sample");
        assert_eq!(at(6_000_000_000, 2), Some(500_000_000));
        assert_eq!(at(6_000_000_000, 2), None, "no time has passed");
        assert_eq!(at(1_000_000, 4), None, "a new process");
        assert_eq!(at(2_000_000, 5), Some(1_000_000));
        assert_eq!(at(u64::MAX, 4), None, "the clock was set back");
        rates.retain(|key| key != "a");
        assert_eq!(rates.rate("a", CpuSample { nanos: u64::MAX, taken: 9 * SECOND }), None, "forgotten");
    }

    #[test]
    fn rows_are_sorted_by_the_chosen_column() {
        // Name, CPU, memory.
        let rows =
            [("c", Some(5), Some(1)), ("a", Some(5), None), ("b", None, Some(9)), ("d", Some(7), Some(1))];
        let sorted = |sort| {
            let mut rows = rows;
            rows.sort_by(|a, b| {
                let values = |by| if by == Sort::Cpu { (a.1, b.1) } else { (a.2, b.2) };
                order(sort, values, (a.0, b.0))
            });
            rows.map(|row| row.0)
        };
        assert_eq!(sorted(Sort::Cpu), ["d", "a", "c", "b"]);
        assert_eq!(sorted(Sort::Memory), ["b", "c", "d", "a"]);
        assert_eq!(sorted(Sort::Name), ["a", "b", "c", "d"]);
    }

    #[test]
    fn cpu_and_memory_have_the_format_of_kubectl_top() {
        let cpu: Vec<String> =
            [None, Some(0), Some(1), Some(1_000_000), Some(1_000_001), Some(2_000_000_000)].map(cores).into();
        assert_eq!(cpu, ["-", "0m", "1m", "1m", "2m", "2000m"]);
        assert_eq!([None, Some(123_456_789)].map(percent_of_core), ["-", "12.3%"]);
        assert_eq!(
            [None, Some(0), Some(3 << 20), Some((4 << 20) - 1)].map(mebibytes),
            ["-", "0Mi", "3Mi", "3Mi"]
        );
        assert_eq!(percent(Some(1), Some(3)), "33%");
        assert_eq!(
            [percent(None, Some(3)), percent(Some(1), None), percent(Some(1), Some(0))],
            ["<unknown>"; 3]
        );
    }

    #[test]
    fn lines_beyond_the_screen_are_counted() {
        assert_eq!(fit_to_screen("abc\nd\n", 2, 2), ["ab", "d"]);
        assert_eq!(fit_to_screen("a\nb\nc\n", 20, 2), ["a", "… 2 lines more"]);
        assert_eq!(fit_to_screen("", 20, 2), Vec::<String>::new());
    }
}
