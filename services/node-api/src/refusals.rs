//! What is told of requests that are refused: not more than a log can take, whoever sends how many.
//!
//! Anybody who reaches a port can be refused as often as they like. So each source of requests has a few lines, and gets one more every
//! ten seconds; all sources together have some more. What was left out is counted and told with the next line of its source, and the
//! metric counts every one.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tokio::time::Instant;

use crate::strangers::Source;

/// Lines that a source has at once.
const LINES: u32 = 5;
/// One more after this.
const EACH: Duration = Duration::from_secs(10);
/// Lines that all sources have at once.
const ALL_LINES: u32 = 50;
/// One more of all after this.
const ALL_EACH: Duration = Duration::from_secs(1);
/// How many sources are told apart; the others share their lines.
const SOURCES: usize = 256;
/// Bytes of a text of the client's that a line carries.
const TEXT: usize = 128;

/// Lines that may still be written.
#[derive(Debug, Clone, Copy)]
struct Budget {
    left: u32,
    at: Instant,
    left_out: u64,
}

impl Budget {
    fn new(lines: u32, now: Instant) -> Self {
        Self { left: lines, at: now, left_out: 0 }
    }

    /// Gives what has come meanwhile.
    fn refill(&mut self, lines: u32, each: Duration, now: Instant) {
        let periods = now.saturating_duration_since(self.at).as_millis() / each.as_millis();
        let periods = u32::try_from(periods).unwrap_or(u32::MAX);
        self.left = self.left.saturating_add(periods).min(lines);
        self.at += each.saturating_mul(periods);
    }
}

#[derive(Debug)]
struct State {
    all: Budget,
    /// `None`: those that are not told apart.
    sources: BTreeMap<Option<Source>, Budget>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Code {
    code: u32,
}

/// The refusals of this process.
#[derive(Debug)]
pub(crate) struct Refusals {
    state: Mutex<State>,
    counted: Family<Code, Counter>,
}

impl Refusals {
    /// None so far; counted in `keelson_api_refused_requests_total`.
    pub(crate) fn new(metrics: &keelson_service_kit::Metrics) -> Self {
        let own = Self::uncounted();
        metrics.register(
            "keelson_api_refused_requests",
            "Requests to the kubelet API that were refused for who has sent them, by status code",
            own.counted.clone(),
        );
        own
    }

    /// None so far, and in no metric.
    pub(crate) fn uncounted() -> Self {
        let all = Budget::new(ALL_LINES, Instant::now());
        Self { state: Mutex::new(State { all, sources: BTreeMap::new() }), counted: Family::default() }
    }

    /// Counts a refusal of `source` with this code. Whether it may be told, and how many were not since the last that was.
    pub(crate) fn count(&self, source: Option<Source>, code: u16) -> Option<u64> {
        self.counted.get_or_create(&Code { code: code.into() }).inc();
        self.may_tell(source, Instant::now())
    }

    fn may_tell(&self, source: Option<Source>, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { all, sources } = &mut *state;
        all.refill(ALL_LINES, ALL_EACH, now);
        let mut key = source;
        if !sources.contains_key(&key) && sources.len() >= SOURCES {
            // Those that have all their lines again have nothing that is worth to be remembered.
            sources.retain(|_, budget| {
                budget.refill(LINES, EACH, now);
                budget.left < LINES || budget.left_out > 0
            });
            if sources.len() >= SOURCES {
                key = None;
            }
        }
        let own = sources.entry(key).or_insert_with(|| Budget::new(LINES, now));
        own.refill(LINES, EACH, now);
        if own.left == 0 || all.left == 0 {
            own.left_out += 1;
            return None;
        }
        own.left -= 1;
        all.left -= 1;
        Some(std::mem::take(&mut own.left_out))
    }
}

/// A text of the client's as a line carries it: not longer than 128 bytes, and without what moves a terminal's cursor.
pub(crate) struct Cut<'a>(pub(crate) &'a str);

impl fmt::Display for Cut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = |end: &usize| self.0.is_char_boundary(*end);
        let end = (0..=TEXT.min(self.0.len())).rev().find(whole).unwrap_or(0);
        let (shown, rest) = self.0.split_at(end);
        for char in shown.chars() {
            if char.is_control() { write!(f, "{}", char.escape_default())? } else { write!(f, "{char}")? }
        }
        if rest.is_empty() { Ok(()) } else { write!(f, "… ({} bytes)", self.0.len()) }
    }
}

#[cfg(test)]
mod tests {
    use keelson_service_kit::Metrics;

    use super::*;

    fn source(n: u32) -> Option<Source> {
        Some(Source::of(std::net::Ipv4Addr::from(0x0A00_0000 + n).into()))
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_has_a_few_lines_and_each_ten_seconds_one_that_says_what_was_left_out() {
        let metrics = Metrics::new();
        let refusals = Refusals::new(&metrics);
        let told: Vec<_> = (0..100).map(|_| refusals.count(source(1), 401)).collect();
        assert_eq!(told.iter().flatten().count(), 5);
        assert_eq!(refusals.count(source(2), 403), Some(0), "another one has lines of its own");
        tokio::time::advance(EACH).await;
        assert_eq!(refusals.count(source(1), 401), Some(95));
        assert_eq!(refusals.count(source(1), 401), None);
        tokio::time::advance(EACH * 100).await;
        assert_eq!((0..100).filter_map(|_| refusals.count(source(1), 401)).count(), 5);
        let text = metrics.text();
        assert!(text.contains("keelson_api_refused_requests_total{code=\"401\"} 202"), "{text}");
        assert!(text.contains("keelson_api_refused_requests_total{code=\"403\"} 1"), "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn all_sources_together_have_some_lines_and_few_are_remembered() {
        let refusals = Refusals::new(&Metrics::new());
        let told = (0..10_000).filter_map(|n| refusals.count(source(n), 401)).count();
        assert_eq!(told, 50);
        assert!(refusals.state.lock().unwrap().sources.len() <= SOURCES + 1);
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!((0..10_000).filter_map(|n| refusals.count(source(n), 401)).count(), 50);
        assert!(refusals.state.lock().unwrap().sources.len() <= SOURCES + 1);
    }

    #[test]
    fn what_a_client_says_is_cut_and_moves_no_cursor() {
        assert_eq!(Cut("/pods").to_string(), "/pods");
        assert_eq!(Cut("/a\u{1b}[2J\n\u{9b}x").to_string(), "/a\\u{1b}[2J\\n\\u{9b}x");
        let long = "é".repeat(40_000);
        let cut = Cut(&long).to_string();
        assert!(cut.len() < 200 && cut.ends_with("… (80000 bytes)"), "{cut}");
    }
}
