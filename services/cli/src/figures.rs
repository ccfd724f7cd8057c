//! What `keelson top` shows: rates between two samples, the order of rows, and figures as `kubectl top` writes them.

use std::cmp::{Ordering, Reverse};
use std::collections::HashMap;

use clap::ValueEnum;

/// What comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sort {
    /// Who uses most CPU
    Cpu,
    /// Who uses most memory
    Memory,
    /// By namespace and name
    Name,
}

/// CPU time at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CpuSample {
    /// Since the process or cgroup began.
    pub(crate) nanos: u64,
    /// Nanoseconds since 1970.
    pub(crate) taken: i64,
}

/// The samples of the last look, by who was looked at.
#[derive(Debug, Default)]
pub(crate) struct Rates(HashMap<String, CpuSample>);

impl Rates {
    /// Nanoseconds of CPU per second since the last look, and remembers this one. `None`: there was no last look, or
    /// the counter began anew meanwhile.
    pub(crate) fn rate(&mut self, who: &str, now: CpuSample) -> Option<u64> {
        let before = self.0.insert(who.to_owned(), now)?;
        let passed = u64::try_from(now.taken.checked_sub(before.taken)?).ok().filter(|passed| *passed > 0)?;
        let used = now.nanos.checked_sub(before.nanos)?;
        u64::try_from(u128::from(used) * 1_000_000_000 / u128::from(passed)).ok()
    }

    /// Forgets all who are not among these.
    pub(crate) fn keep(&mut self, mut known: impl FnMut(&str) -> bool) {
        self.0.retain(|who, _| known(who));
    }
}

/// The order of two rows; those without a figure come last, and of equals the name decides.
pub(crate) fn order<'a>(
    sort: Sort,
    figures: impl Fn(Sort) -> (Option<u64>, Option<u64>),
    names: (&'a str, &'a str),
) -> Ordering {
    let by_figure = match sort {
        Sort::Name => Ordering::Equal,
        sort => {
            let (a, b) = figures(sort);
            Reverse(a).cmp(&Reverse(b))
        }
    };
    by_figure.then_with(|| names.0.cmp(names.1))
}

/// Nanoseconds per second as thousandths of a core: `12m`; what is less than one but not nothing is `1m`, as in
/// `kubectl top`, which rounds up.
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

/// Whole percent of what there is: `<unknown>` when one of both is not known, as in `kubectl top`.
pub(crate) fn percent(part: Option<u64>, whole: Option<u64>) -> String {
    match (part, whole) {
        (Some(part), Some(whole)) if whole > 0 => format!("{}%", u128::from(part) * 100 / u128::from(whole)),
        _ => "<unknown>".into(),
    }
}

/// A screen full of `text`: no more lines than the terminal has, none wider than it; the last one says what is missing.
pub(crate) fn cut(text: &str, width: usize, height: usize) -> Vec<String> {
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
    fn a_rate_is_between_two_looks_of_one_life() {
        let mut rates = Rates::default();
        let mut at = |nanos, seconds: i64| rates.rate("a", CpuSample { nanos, taken: seconds * SECOND });
        assert_eq!(at(5_000_000_000, 0), None, "the first look");
        assert_eq!(at(6_000_000_000, 2), Some(500_000_000));
        assert_eq!(at(6_000_000_000, 2), None, "no time has passed");
        assert_eq!(at(1_000_000, 4), None, "a new process");
        assert_eq!(at(2_000_000, 5), Some(1_000_000));
        assert_eq!(at(u64::MAX, 4), None, "the clock was set back");
        rates.keep(|who| who != "a");
        assert_eq!(rates.rate("a", CpuSample { nanos: u64::MAX, taken: 9 * SECOND }), None, "forgotten");
    }

    #[test]
    fn rows_are_in_the_order_that_was_asked_for() {
        // Name, CPU, memory.
        let rows =
            [("c", Some(5), Some(1)), ("a", Some(5), None), ("b", None, Some(9)), ("d", Some(7), Some(1))];
        let sorted = |sort| {
            let mut rows = rows;
            rows.sort_by(|a, b| {
                let figures = |by| if by == Sort::Cpu { (a.1, b.1) } else { (a.2, b.2) };
                order(sort, figures, (a.0, b.0))
            });
            rows.map(|row| row.0)
        };
        assert_eq!(sorted(Sort::Cpu), ["d", "a", "c", "b"]);
        assert_eq!(sorted(Sort::Memory), ["b", "c", "d", "a"]);
        assert_eq!(sorted(Sort::Name), ["a", "b", "c", "d"]);
    }

    #[test]
    fn figures_are_written_as_kubectl_writes_them() {
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
    fn what_does_not_fit_on_the_screen_is_counted() {
        assert_eq!(cut("abc\nd\n", 2, 2), ["ab", "d"]);
        assert_eq!(cut("a\nb\nc\n", 20, 2), ["a", "… 2 lines more"]);
        assert_eq!(cut("", 20, 2), Vec::<String>::new());
    }
}
