//! The spans of pods' starts, buffered in memory: they show which step took how long.
//!
//! A span is added when it ends, to the trace that it belongs to; a span without a trace is dropped. The buffer is
//! bounded three ways: spans of a trace (the first and the last ones are kept), traces, and spans altogether (the least
//! recently used traces are dropped). It is not persisted.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt::{self, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Span, Subscriber};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::{LookupSpan, Registry};

/// Spans kept of the beginning of a trace, and the same number of its end.
const SPANS_AT_EITHER_END: usize = 32;
/// Traces.
const TRACES: usize = 256;
/// Spans of all traces together, 64 bytes each and their details.
const SPANS: usize = 3072;
/// Maximum number of interned span names, such as those of methods.
const NAMES: usize = 256;
/// Bytes of a detail.
const DETAIL: usize = 128;

/// A span that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferedSpan {
    /// Its id in the trace, never 0.
    pub id: u64,
    /// The span that it is a part of, also in another process; 0 for the first one of a trace.
    pub parent: u64,
    /// What was done.
    pub name: &'static str,
    /// `key=value` pairs with blanks between them.
    pub detail: Option<Box<str>>,
    /// When it began, nanoseconds since 1970.
    pub start_unix_nanos: i64,
    /// How long it took.
    pub duration_nanos: u64,
}

/// A trace in the buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferedTrace {
    /// Its W3C id.
    pub id: u128,
    /// UID of its pod; empty when no span of this process has named it.
    pub pod_uid: String,
    /// Its spans in the order in which they ended.
    pub spans: Vec<BufferedSpan>,
    /// Number of dropped spans between the first and the last ones.
    pub left_out: u32,
}

/// The buffered spans of this process. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct SpanBuffer(Arc<Mutex<Buffer>>);

#[derive(Debug, Default)]
struct Buffer {
    traces: HashMap<u128, TraceSpans>,
    spans: usize,
    /// Counts all spans ever added; gives the order in which traces were last used.
    clock: u64,
    names: HashSet<&'static str>,
}

#[derive(Debug, Default)]
struct TraceSpans {
    pod_uid: Option<Box<str>>,
    first: Vec<BufferedSpan>,
    last: VecDeque<BufferedSpan>,
    left_out: u32,
    touched: u64,
}

impl TraceSpans {
    fn len(&self) -> usize {
        self.first.len() + self.last.len()
    }

    /// Adds a span. Returns whether the number of spans has grown.
    fn take(&mut self, span: BufferedSpan) -> bool {
        if self.first.len() < SPANS_AT_EITHER_END {
            if self.first.len() == self.first.capacity() {
                // Most traces are short: doubling would keep room that nobody needs.
                self.first.reserve_exact(4);
            }
            self.first.push(span);
            return true;
        }
        let full = self.last.len() == SPANS_AT_EITHER_END;
        if full {
            self.last.pop_front();
            self.left_out = self.left_out.saturating_add(1);
        }
        self.last.push_back(span);
        !full
    }
}

impl Buffer {
    fn put(&mut self, trace: u128, pod_uid: Option<Box<str>>, span: BufferedSpan) {
        self.clock += 1;
        let held = self.traces.entry(trace).or_default();
        held.touched = self.clock;
        held.pod_uid = held.pod_uid.take().or(pod_uid);
        self.spans += usize::from(held.take(span));
        while self.traces.len() > TRACES || self.spans > SPANS {
            let oldest = self.traces.iter().min_by_key(|(_, held)| held.touched).map(|(id, _)| *id);
            let Some(gone) = oldest.and_then(|id| self.traces.remove(&id)) else { return };
            self.spans -= gone.len();
        }
    }

    fn name(&mut self, text: &str) -> &'static str {
        if let Some(known) = self.names.get(text) {
            return known;
        }
        if self.names.len() == NAMES {
            return "rpc";
        }
        let name: &'static str = Box::leak(text.into());
        self.names.insert(name);
        name
    }
}

impl SpanBuffer {
    fn lock(&self) -> MutexGuard<'_, Buffer> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The traces with these ids, and those of the pod with this UID unless it is empty.
    pub fn traces(&self, ids: &[u128], pod_uid: &str) -> Vec<BufferedTrace> {
        let buffer_state = self.lock();
        let of_pod = |held: &TraceSpans| !pod_uid.is_empty() && held.pod_uid.as_deref() == Some(pod_uid);
        let wanted = buffer_state.traces.iter().filter(|(id, held)| ids.contains(id) || of_pod(held));
        wanted
            .map(|(id, held)| BufferedTrace {
                id: *id,
                pod_uid: held.pod_uid.as_deref().unwrap_or_default().to_owned(),
                spans: held.first.iter().chain(&held.last).cloned().collect(),
                left_out: held.left_out,
            })
            .collect()
    }
}

/// The position of a span in its trace: the content of a `traceparent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) trace: u128,
    pub(crate) span: u64,
    /// It is exported.
    pub(crate) sampled: bool,
}

impl Place {
    /// Reads `00-<32 digits>-<16 digits>-<2 digits>` (W3C Trace Context, §3.2); later versions may append more.
    pub(crate) fn parse(traceparent: &str) -> Option<Self> {
        let mut parts = traceparent.split('-');
        let mut hex = |digits: usize| {
            let part = parts.next().filter(|part| part.len() == digits)?;
            part.bytes().all(|b| b.is_ascii_hexdigit()).then_some(part)
        };
        hex(2).filter(|version| *version != "ff")?;
        let trace = u128::from_str_radix(hex(32)?, 16).ok()?;
        let span = u64::from_str_radix(hex(16)?, 16).ok()?;
        let flags = u8::from_str_radix(hex(2)?, 16).ok()?;
        (trace != 0 && span != 0).then_some(Self { trace, span, sampled: flags & 1 == 1 })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace, self.span, u8::from(self.sampled))
    }
}

/// A span that has not ended.
#[derive(Debug)]
struct Open {
    /// 0: it belongs to no trace.
    trace: u128,
    id: u64,
    parent: u64,
    sampled: bool,
    name: &'static str,
    detail: Option<Box<str>>,
    pod_uid: Option<Box<str>>,
    start_unix_nanos: i64,
    began: Instant,
}

/// Calls `look` with the open span, if its subscriber has a [`BufferLayer`].
fn with_open<T>(span: &Span, look: impl FnOnce(&mut Open) -> T) -> Option<T> {
    span.with_subscriber(|(id, dispatch)| {
        let known = dispatch.downcast_ref::<Registry>()?.span(id)?;
        let mut extensions = known.extensions_mut();
        extensions.get_mut::<Open>().map(look)
    })?
}

/// The position of the span in its trace; `None` when it belongs to no trace.
pub(crate) fn place(span: &Span) -> Option<Place> {
    let place = |open: &mut Open| Place { trace: open.trace, span: open.id, sampled: open.sampled };
    with_open(span, place).filter(|place| place.trace != 0)
}

/// Makes the span a child of a span in another process.
pub(crate) fn set_parent(span: &Span, parent: Place) {
    with_open(span, |open| {
        (open.trace, open.parent, open.sampled) = (parent.trace, parent.span, parent.sampled);
    });
}

/// Gives the span the ids under which it is exported.
pub(crate) fn adopt(span: &Span, exported: Place) {
    with_open(span, |open| {
        (open.trace, open.id, open.sampled) = (exported.trace, exported.span, exported.sampled);
    });
}

/// The layer that creates and buffers the spans.
#[derive(Debug)]
pub(crate) struct BufferLayer(pub(crate) SpanBuffer);

impl<S> Layer<S> for BufferLayer
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let above = if attributes.is_contextual() {
            context.lookup_current()
        } else {
            attributes.parent().and_then(|id| context.span(id))
        };
        let above =
            above.and_then(|span| span.extensions().get::<Open>().map(|o| (o.trace, o.id, o.sampled)));
        // A span with explicitly no parent begins a trace.
        let begins = if attributes.is_root() { fastrand::u128(1..) } else { 0 };
        let (trace, parent, sampled) = above.unwrap_or((begins, 0, false));
        let open = Open {
            trace,
            id: fastrand::u64(1..),
            parent,
            sampled,
            name: fields
                .name
                .as_deref()
                .map_or(attributes.metadata().name(), |text| self.0.lock().name(text)),
            detail: (!fields.detail.is_empty()).then(|| fields.detail.into_boxed_str()),
            pod_uid: fields.pod_uid,
            start_unix_nanos: now_unix_nanos(),
            began: Instant::now(),
        };
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(open);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(open) = context.span(&id).and_then(|span| span.extensions_mut().remove::<Open>()) else {
            return;
        };
        if open.trace == 0 {
            return;
        }
        let span = BufferedSpan {
            id: open.id,
            parent: open.parent,
            name: open.name,
            detail: open.detail,
            start_unix_nanos: open.start_unix_nanos,
            duration_nanos: u64::try_from(open.began.elapsed().as_nanos()).unwrap_or(u64::MAX),
        };
        self.0.lock().put(open.trace, open.pod_uid, span);
    }
}

fn now_unix_nanos() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
}

/// The fields of a span that are buffered.
#[derive(Debug, Default)]
struct Fields {
    name: Option<String>,
    pod_uid: Option<Box<str>>,
    detail: String,
}

impl Fields {
    fn detail(&mut self, name: &str, value: fmt::Arguments<'_>) {
        let begun = self.detail.len();
        let blank = if begun == 0 { "" } else { " " };
        // Writing to a string cannot fail.
        let _ = write!(self.detail, "{blank}{name}={value}");
        if self.detail.len() > DETAIL {
            let end = (0..=DETAIL).rev().find(|at| self.detail.is_char_boundary(*at)).unwrap_or(0);
            self.detail.truncate(end);
        }
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "otel.name" => self.name = Some(value.to_owned()),
            "uid" | "k8s.pod.uid" => self.pod_uid = Some(value.into()),
            name @ ("container" | "image" | "source" | "phase" | "result") => {
                self.detail(name, format_args!("{value}"));
            }
            _ => {}
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.detail(field.name(), format_args!("{value}"));
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(id: u64) -> BufferedSpan {
        let (name, detail) = ("s", None);
        BufferedSpan { id, parent: 0, name, detail, start_unix_nanos: 0, duration_nanos: 1 }
    }

    #[test]
    fn a_traceparent_is_read_as_it_is_written_and_a_broken_one_is_none() {
        let place = Place { trace: 0xabc, span: 0x12, sampled: true };
        assert_eq!(Place::parse(&place.to_string()), Some(place));
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
        assert_eq!(Place::parse(good).unwrap().to_string(), good);
        for broken in [
            "",
            "00",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b716920333-01",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ] {
            assert_eq!(Place::parse(broken), None, "{broken}");
        }
    }

    #[test]
    fn a_long_trace_keeps_its_first_and_last_spans() {
        let buffer = SpanBuffer::default();
        for id in 1..=100 {
            buffer.lock().put(7, (id == 5).then(|| "u1".into()), span(id));
        }
        let traces = buffer.traces(&[], "u1");
        let ids: Vec<u64> = traces[0].spans.iter().map(|s| s.id).collect();
        assert_eq!(ids, (1..=32).chain(69..=100).collect::<Vec<_>>());
        assert_eq!((traces[0].left_out, traces.len()), (36, 1));
        assert_eq!(buffer.traces(&[7], ""), traces);
        assert_eq!(buffer.traces(&[8], "u2"), []);
    }

    #[test]
    fn least_recently_used_traces_are_dropped() {
        let buffer = SpanBuffer::default();
        for id in 1..=TRACES as u128 {
            buffer.lock().put(id, None, span(1));
        }
        buffer.lock().put(1, None, span(2));
        buffer.lock().put(1000, None, span(1));
        assert_eq!(buffer.traces(&[2], ""), [], "it was the oldest");
        assert_eq!(buffer.traces(&[1, 3, 1000], "").len(), 3);
        let buffer = SpanBuffer::default();
        for id in 1..=100 {
            (0..40).for_each(|n| buffer.lock().put(id, None, span(n + 1)));
        }
        let buffer_state = buffer.lock();
        assert_eq!(buffer_state.spans, buffer_state.traces.values().map(TraceSpans::len).sum::<usize>());
        assert!(buffer_state.spans <= SPANS && buffer_state.spans > SPANS - 80, "{}", buffer_state.spans);
        assert!(std::mem::size_of::<BufferedSpan>() <= 64);
    }

    #[test]
    fn span_names_are_interned_up_to_a_limit() {
        let mut buffer_state = Buffer::default();
        let first = buffer_state.name("a/B");
        assert!(std::ptr::eq(first, buffer_state.name("a/B")));
        for n in 0..NAMES {
            buffer_state.name(&format!("{n}"));
        }
        assert_eq!((buffer_state.names.len(), buffer_state.name("one more")), (NAMES, "rpc"));
    }

    #[test]
    fn span_details_are_truncated() {
        let mut fields = Fields::default();
        fields.detail("image", format_args!("{}", "ä".repeat(200)));
        fields.detail("ready", format_args!("true"));
        assert!(fields.detail.len() <= DETAIL && fields.detail.starts_with("image=ä"));
    }
}
