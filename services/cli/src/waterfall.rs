//! The spans of a pod's start as a waterfall: selects the spans of the last start, nests them and draws them.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use keelson_proto::keelson::admin::v1::Span;

use crate::table::printable;

/// The suffix of spans that start a container.
const START_CONTAINER: &str = "/StartContainer";
/// The name of spans that report the pod's status to the control plane.
const REPORT_STATUS: &str = "report pod status";
/// Minimum width of the bars in columns.
const MIN_BAR_COLUMNS: usize = 20;
/// Width of the bars in columns where the terminal's width is unknown.
const DEFAULT_BAR_COLUMNS: usize = 40;
/// Maximum width of a span's name in columns.
const MAX_NAME_COLUMNS: usize = 56;

/// A span and the service that recorded it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ServiceSpan {
    pub(crate) service: String,
    pub(crate) span: Span,
}

impl ServiceSpan {
    pub(crate) fn start(&self) -> i64 {
        self.span.start_unix_nanos
    }

    pub(crate) fn end(&self) -> i64 {
        self.start().saturating_add(i64::try_from(self.span.duration_nanos).unwrap_or(i64::MAX))
    }

    /// Whether a container was started in this span.
    pub(crate) fn is_start(&self) -> bool {
        self.span.name.ends_with(START_CONTAINER)
    }

    /// Whether the pod was reported as ready in this span.
    fn reports_ready(&self) -> bool {
        self.span.name == REPORT_STATUS && self.span.detail.split(' ').any(|pair| pair == "ready=true")
    }

    /// The name, of a call only its method, and the detail.
    fn title(&self) -> String {
        let name = self.span.name.rsplit('/').next().unwrap_or_default();
        let blank = if self.span.detail.is_empty() { "" } else { " " };
        printable(&format!("{name}{blank}{}", self.span.detail))
    }
}

/// The last start of a pod.
#[derive(Debug, PartialEq)]
pub(crate) struct LastStart {
    /// Its spans, each after its parent, with the nesting depth.
    pub(crate) rows: Vec<(usize, ServiceSpan)>,
    /// Start of the first span, nanoseconds since 1970.
    pub(crate) begin: i64,
    /// End of the last span, nanoseconds since 1970.
    pub(crate) end: i64,
    /// Whether the pod was ready at the end.
    pub(crate) ready: bool,
    /// Number of spans of the trace that do not belong to this start.
    pub(crate) others: usize,
}

/// Selects the spans of a pod's last start from its trace: those after the previous report of readiness,
/// up to the next such report. Without a started container it is the whole trace. `None`: no spans.
pub(crate) fn last_start(mut steps: Vec<ServiceSpan>) -> Option<LastStart> {
    steps.sort_by_key(|step| (step.start(), std::cmp::Reverse(step.end())));
    let total = steps.len();
    let mut ready = steps.iter().any(ServiceSpan::reports_ready);
    if let Some(last) = steps.iter().rposition(ServiceSpan::is_start) {
        let from = steps[..last].iter().rposition(ServiceSpan::reports_ready).map_or(0, |at| at + 1);
        let until = steps[last..].iter().position(ServiceSpan::reports_ready);
        ready = until.is_some();
        steps.truncate(until.map_or(total, |at| last + at + 1));
        steps.drain(..from);
    }
    let begin = steps.first()?.start();
    let end = steps.iter().map(ServiceSpan::end).max()?;
    let others = total - steps.len();
    Some(LastStart { rows: nested(steps), begin, end, ready, others })
}

/// Sorts each span after its parent, with its depth. A span that begins after the end of its parent follows from it:
/// it gets the depth of the parent.
fn nested(steps: Vec<ServiceSpan>) -> Vec<(usize, ServiceSpan)> {
    let known: HashMap<&str, usize> =
        steps.iter().enumerate().map(|(at, step)| (step.span.span_id.as_str(), at)).collect();
    // Only earlier spans count as parents, so that ids that form a cycle cannot lose spans.
    let parent = |at: usize| {
        let above = *known.get(steps[at].span.parent_span_id.as_str())?;
        (above < at).then_some(above)
    };
    let mut children: BTreeMap<Option<usize>, Vec<usize>> = BTreeMap::new();
    for at in 0..steps.len() {
        // A span that follows from another is its sibling.
        let mut above = parent(at);
        while let Some(ended) = above.filter(|above| steps[*above].end() < steps[at].start()) {
            above = parent(ended);
        }
        children.entry(above).or_default().push(at);
    }
    let mut order = Vec::with_capacity(steps.len());
    let mut open: Vec<(usize, usize)> =
        children.remove(&None).unwrap_or_default().into_iter().rev().map(|at| (0, at)).collect();
    while let Some((depth, at)) = open.pop() {
        order.push((depth, at));
        open.extend(
            children.remove(&Some(at)).unwrap_or_default().into_iter().rev().map(|child| (depth + 1, child)),
        );
    }
    let mut steps: Vec<Option<ServiceSpan>> = steps.into_iter().map(Some).collect();
    order.into_iter().filter_map(|(depth, at)| Some((depth, steps[at].take()?))).collect()
}

/// Formats nanoseconds: `0.3ms`, `412.0ms`, `12.41s`, `3m20s`.
pub(crate) fn time(nanos: i64) -> String {
    let ms = nanos as f64 / 1e6;
    if ms < 1000.0 {
        format!("{ms:.1}ms")
    } else if ms < 120_000.0 {
        format!("{:.2}s", ms / 1000.0)
    } else {
        crate::human::age(nanos)
    }
}

/// First column and width of a bar on a scale of `columns`; the width is at least one.
fn bar(from: i64, until: i64, whole: i64, columns: usize) -> (usize, usize) {
    let whole = whole.max(1) as f64;
    let column = |nanos: i64| (nanos.max(0) as f64 / whole * columns as f64).min(columns as f64);
    let first = (column(from).floor() as usize).min(columns.saturating_sub(1));
    let behind = (column(until).ceil() as usize).clamp(first + 1, columns.max(first + 1));
    (first, behind - first)
}

/// Draws a start: a line per span with its service, name, offset, duration and bar. `width` is the terminal's.
pub(crate) fn draw(start: &LastStart, width: Option<usize>) -> String {
    let mut lines: Vec<[String; 4]> = vec![["SERVICE".into(), "SPAN".into(), "OFFSET".into(), "TIME".into()]];
    for (depth, step) in &start.rows {
        let title: String = format!("{}{}", "  ".repeat(*depth), step.title());
        let title = if title.chars().count() > MAX_NAME_COLUMNS {
            title.chars().take(MAX_NAME_COLUMNS - 1).chain(['…']).collect()
        } else {
            title
        };
        let took = i64::try_from(step.span.duration_nanos).unwrap_or(i64::MAX);
        lines.push([step.service.clone(), title, time(step.start() - start.begin), time(took)]);
    }
    let widest = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let [service, title, offset, took] = [0, 1, 2, 3].map(widest);
    let before = service + title + offset + took + 4 * 2;
    let columns = width
        .map_or(DEFAULT_BAR_COLUMNS, |width| width.saturating_sub(before + 1))
        .clamp(MIN_BAR_COLUMNS, 100);
    let mut text = String::new();
    for (at, line) in lines.iter().enumerate() {
        let [a, b, c, d] = line;
        let bar = match at.checked_sub(1) {
            None => String::new(),
            Some(row) => {
                let step = &start.rows[row].1;
                let (first, wide) = bar(
                    step.start() - start.begin,
                    step.end() - start.begin,
                    start.end - start.begin,
                    columns,
                );
                format!("{}{}", " ".repeat(first), "█".repeat(wide))
            }
        };
        let line = format!("{a:<service$}  {b:<title$}  {c:>offset$}  {d:>took$}  {bar}");
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: i64 = 1_000_000;

    fn step(service: &str, id: &str, parent: &str, name: &str, start_ms: i64, took_ms: u64) -> ServiceSpan {
        let span = Span {
            span_id: id.into(),
            parent_span_id: parent.into(),
            name: name.into(),
            detail: String::new(),
            start_unix_nanos: start_ms * MS,
            duration_nanos: took_ms * 1_000_000,
        };
        ServiceSpan { service: service.into(), span }
    }

    fn report(id: &str, ready: bool, start_ms: i64) -> ServiceSpan {
        let mut step = step("node-status", id, "seen", REPORT_STATUS, start_ms, 1);
        step.span.detail = format!("phase=Running ready={ready}");
        step
    }

    fn one_start(at: i64, tag: &str) -> Vec<ServiceSpan> {
        let id = |name: &str| format!("{name}{tag}");
        vec![
            step(
                "runtime-shim",
                &id("run"),
                &id("sync"),
                "runtime.v1.RuntimeService/RunPodSandbox",
                at + 4,
                60,
            ),
            step("volume-manager", &id("wait"), &id("mount"), "wait for volumes", at + 3, 1),
            step(
                "volume-manager",
                &id("mount"),
                &id("sync"),
                "keelson.volume_manager.v1.VolumeManager/MountPod",
                at + 2,
                1,
            ),
            step(
                "runtime-shim",
                &id("start"),
                &id("sync"),
                "runtime.v1.RuntimeService/StartContainer",
                at + 70,
                20,
            ),
            step("pod-sync", &id("sync"), "seen", "sync pod", at + 1, 99),
        ]
    }

    fn ids(start: &LastStart) -> Vec<(usize, &str)> {
        start.rows.iter().map(|(depth, step)| (*depth, step.span.span_id.as_str())).collect()
    }

    #[test]
    fn child_spans_are_nested_and_following_spans_are_siblings() {
        let mut steps = one_start(0, "");
        steps.push(step("pod-config", "seen", "", "pod seen", 0, 1));
        steps.push(report("ready", true, 110));
        let start = last_start(steps).unwrap();
        let wanted =
            [(0, "seen"), (1, "sync"), (2, "mount"), (3, "wait"), (2, "run"), (2, "start"), (0, "ready")];
        assert_eq!(ids(&start), wanted);
        assert_eq!((start.begin, start.end, start.ready, start.others), (0, 111 * MS, true, 0));
    }

    #[test]
    fn last_start_lies_between_two_ready_reports() {
        let mut steps = vec![step("pod-config", "seen", "", "pod seen", 0, 0)];
        steps.extend(one_start(0, "1"));
        steps.extend([report("r1", true, 120), report("r2", false, 9000)]);
        steps.extend(one_start(9100, "2"));
        steps.extend([report("r3", false, 9150), report("r4", true, 9300), report("r5", false, 20_000)]);
        let start = last_start(steps).unwrap();
        assert_eq!((start.begin, start.end, start.ready), (9000 * MS, 9301 * MS, true));
        assert_eq!(start.others, 1 + 5 + 1 + 1);
        assert_eq!(ids(&start)[..2], [(0, "r2"), (0, "sync2")]);
    }

    #[test]
    fn without_a_ready_report_all_spans_are_shown() {
        let mut steps = one_start(0, "1");
        steps.extend(one_start(5000, "2"));
        let start = last_start(steps).unwrap();
        assert_eq!((start.rows.len(), start.ready, start.others), (10, false, 0));
        let start = last_start(vec![report("r1", true, 5)]).unwrap();
        assert_eq!((start.rows.len(), start.ready), (1, true));
        assert_eq!(last_start(Vec::new()), None);
    }

    #[test]
    fn spans_with_cyclic_parents_are_shown_once() {
        let start = last_start(vec![step("a", "x", "y", "1", 0, 5), step("a", "y", "x", "2", 1, 2)]).unwrap();
        assert_eq!(ids(&start), [(0, "x"), (1, "y")]);
    }

    #[test]
    fn bar_covers_the_time_of_its_span() {
        for (from, until, whole, wanted) in [
            (0, 100, 100, (0, 10)),
            (0, 0, 100, (0, 1)),
            (100, 100, 100, (9, 1)),
            (50, 100, 100, (5, 5)),
            (45, 55, 100, (4, 2)),
            (99, 100, 100, (9, 1)),
            (0, 0, 0, (0, 1)),
            (-5, 200, 100, (0, 10)),
        ] {
            assert_eq!(bar(from, until, whole, 10), wanted, "{from} {until}");
        }
    }

    #[test]
    fn durations_are_rounded_by_magnitude() {
        for (nanos, text) in [
            (0, "0.0ms"),
            (340_000, "0.3ms"),
            (412 * MS, "412.0ms"),
            (12_412 * MS, "12.41s"),
            (200_000 * MS, "3m20s"),
        ] {
            assert_eq!(time(nanos), text);
        }
    }

    #[test]
    fn waterfall_fits_the_width_of_the_terminal() {
        let mut steps = one_start(0, "");
        steps[0].span.detail = "container=a\u{1b}".into();
        let start = last_start(steps).unwrap();
        let text = draw(&start, Some(80));
        let lines: Vec<&str> = text.lines().collect();
        let line = |a: &str, b: &str, c: &str, d: &str| format!("{a:<14}  {b:<33}  {c:>6}  {d:>6}");
        assert_eq!(lines[0], line("SERVICE", "SPAN", "OFFSET", "TIME"));
        let whole = "█".repeat(20);
        assert_eq!(lines[1], format!("{}  {whole}", line("pod-sync", "sync pod", "0.0ms", "99.0ms")));
        assert!(lines.iter().any(|line| line.contains("  RunPodSandbox container=a\\u{1b}")), "{text}");
        assert!(draw(&start, None).lines().all(|line| line.chars().count() <= 120));
    }
}
