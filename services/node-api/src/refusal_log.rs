//! Rate-limited log lines for refused requests.
//!
//! Anybody who reaches a port can have any number of requests refused. So each source address may log a few lines, and one more
//! every ten seconds; a second limit covers all addresses together. Suppressed lines are counted, and the next line of the same
//! address reports their number. The metric counts every refusal.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tokio::time::Instant;

use crate::unauthorized_slots::SourceAddress;

/// The burst of lines of one source address.
const SOURCE_BURST: u32 = 5;
/// A source address may log one more line after this time.
const SOURCE_INTERVAL: Duration = Duration::from_secs(10);
/// The burst of lines of all addresses together.
const TOTAL_BURST: u32 = 50;
/// All addresses together may log one more line after this time.
const TOTAL_INTERVAL: Duration = Duration::from_secs(1);
/// Addresses with a budget of their own; all others share one.
const MAX_SOURCES: usize = 256;
/// Bytes of a client's text that a line has at most.
const MAX_TEXT_BYTES: usize = 128;

/// A token bucket of log lines.
#[derive(Debug, Clone, Copy)]
struct Budget {
    lines: u32,
    refilled_at: Instant,
    suppressed: u64,
}

impl Budget {
    fn new(burst: u32, now: Instant) -> Self {
        Self { lines: burst, refilled_at: now, suppressed: 0 }
    }

    /// Adds the lines of the intervals since the last refill.
    fn refill(&mut self, burst: u32, interval: Duration, now: Instant) {
        let intervals = now.saturating_duration_since(self.refilled_at).as_millis() / interval.as_millis();
        let intervals = u32::try_from(intervals).unwrap_or(u32::MAX);
        self.lines = self.lines.saturating_add(intervals).min(burst);
        self.refilled_at += interval.saturating_mul(intervals);
    }
}

#[derive(Debug)]
struct State {
    total: Budget,
    /// `None`: all addresses without a budget of their own.
    sources: BTreeMap<Option<SourceAddress>, Budget>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Code {
    code: u32,
}

/// Counts refused requests and decides which of them are logged.
#[derive(Debug)]
pub(crate) struct RefusalLog {
    state: Mutex<State>,
    refused: Family<Code, Counter>,
}

impl RefusalLog {
    /// Registers the counter `keelson_api_refused_requests_total`.
    pub(crate) fn new(metrics: &keelson_service_kit::Metrics) -> Self {
        let log = Self::unregistered();
        metrics.register(
            "keelson_api_refused_requests",
            "Requests to the kubelet API that failed authentication or authorization, by status code",
            log.refused.clone(),
        );
        log
    }

    /// A log without a registered counter.
    pub(crate) fn unregistered() -> Self {
        let total = Budget::new(TOTAL_BURST, Instant::now());
        Self { state: Mutex::new(State { total, sources: BTreeMap::new() }), refused: Family::default() }
    }

    /// Counts a refusal with this status code. `Some`: log it, with the number of lines suppressed since the last one.
    pub(crate) fn count(&self, source: Option<SourceAddress>, code: u16) -> Option<u64> {
        self.refused.get_or_create(&Code { code: code.into() }).inc();
        self.take_line(source, Instant::now())
    }

    fn take_line(&self, source: Option<SourceAddress>, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { total, sources } = &mut *state;
        total.refill(TOTAL_BURST, TOTAL_INTERVAL, now);
        let mut key = source;
        if !sources.contains_key(&key) && sources.len() >= MAX_SOURCES {
            // A full budget without suppressed lines is the same as a new one.
            sources.retain(|_, budget| {
                budget.refill(SOURCE_BURST, SOURCE_INTERVAL, now);
                budget.lines < SOURCE_BURST || budget.suppressed > 0
            });
            if sources.len() >= MAX_SOURCES {
                key = None;
            }
        }
        let budget = sources.entry(key).or_insert_with(|| Budget::new(SOURCE_BURST, now));
        budget.refill(SOURCE_BURST, SOURCE_INTERVAL, now);
        if budget.lines == 0 || total.lines == 0 {
            budget.suppressed += 1;
            return None;
        }
        budget.lines -= 1;
        total.lines -= 1;
        Some(std::mem::take(&mut budget.suppressed))
    }
}

/// A client's text as it is logged: at most 128 bytes, with control characters escaped.
pub(crate) struct Sanitized<'a>(pub(crate) &'a str);

impl fmt::Display for Sanitized<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_boundary = |end: &usize| self.0.is_char_boundary(*end);
        let end = (0..=MAX_TEXT_BYTES.min(self.0.len())).rev().find(is_boundary).unwrap_or(0);
        let (start, rest) = self.0.split_at(end);
        for char in start.chars() {
            if char.is_control() { write!(f, "{}", char.escape_default())? } else { write!(f, "{char}")? }
        }
        if rest.is_empty() { Ok(()) } else { write!(f, "… ({} bytes)", self.0.len()) }
    }
}

#[cfg(test)]
mod tests {
    use keelson_service_kit::Metrics;

    use super::*;

    fn source(n: u32) -> Option<SourceAddress> {
        Some(SourceAddress::new(std::net::Ipv4Addr::from(0x0A00_0000 + n).into()))
    }

    #[tokio::test(start_paused = true)]
    async fn refusal_log_is_rate_limited_per_source_and_counts_suppressed_lines() {
        let metrics = Metrics::new();
        let log = RefusalLog::new(&metrics);
        let logged: Vec<_> = (0..100).map(|_| log.count(source(1), 401)).collect();
        assert_eq!(logged.iter().flatten().count(), 5);
        assert_eq!(log.count(source(2), 403), Some(0), "another address has a budget of its own");
        tokio::time::advance(SOURCE_INTERVAL).await;
        assert_eq!(log.count(source(1), 401), Some(95));
        assert_eq!(log.count(source(1), 401), None);
        tokio::time::advance(SOURCE_INTERVAL * 100).await;
        assert_eq!((0..100).filter_map(|_| log.count(source(1), 401)).count(), 5);
        let text = metrics.text();
        assert!(text.contains("keelson_api_refused_requests_total{code=\"401\"} 202"), "{text}");
        assert!(text.contains("keelson_api_refused_requests_total{code=\"403\"} 1"), "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn refusal_log_is_rate_limited_over_all_sources() {
        let log = RefusalLog::new(&Metrics::new());
        let logged = (0..10_000).filter_map(|n| log.count(source(n), 401)).count();
        assert_eq!(logged, 50);
        assert!(log.state.lock().unwrap().sources.len() <= MAX_SOURCES + 1);
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!((0..10_000).filter_map(|n| log.count(source(n), 401)).count(), 50);
        assert!(log.state.lock().unwrap().sources.len() <= MAX_SOURCES + 1);
    }

    #[test]
    fn client_text_is_truncated_and_control_characters_are_escaped() {
        assert_eq!(Sanitized("/pods").to_string(), "/pods");
        assert_eq!(Sanitized("/a\u{1b}[2J\n\u{9b}x").to_string(), "/a\\u{1b}[2J\\n\\u{9b}x");
        let long = "é".repeat(40_000);
        let text = Sanitized(&long).to_string();
        assert!(text.len() < 200 && text.ends_with("… (80000 bytes)"), "{text}");
    }
}
