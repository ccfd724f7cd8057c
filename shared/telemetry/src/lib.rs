//! Logs and traces of every Keelson service.
//!
//! Log lines are written in klog's text or JSON format (`line`), to standard error or split into two streams (`output`). A bounded
//! number of spans of traces is buffered in memory (see [`SpanBuffer`]), and their W3C context is sent with every call. They are exported over OTLP/gRPC only when the
//! configuration names a collector; without one their context says that they are not sampled.

mod line;
mod output;
mod span_buffer;
mod verbosity;

use std::sync::{Mutex, MutexGuard, PoisonError};

use opentelemetry::Context;
use opentelemetry::trace::{
    SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState, TracerProvider as _,
};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
use tracing::Span;
use tracing::level_filters::LevelFilter;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::filter::{FilterExt as _, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{Layer as _, Registry, reload};

pub use crate::line::UNSTRUCTURED_TARGET;
pub use crate::output::Output;
use crate::output::{Buffer, Lines};
use crate::span_buffer::{BufferLayer, Place};
pub use crate::span_buffer::{BufferedSpan, BufferedTrace, SpanBuffer};
pub use crate::verbosity::FileVerbosity;
use crate::verbosity::LineFilter;

/// The target of the spans that make up a trace, all of level INFO. They are buffered and exported at every log level,
/// and the log does not show them. One with `parent: None` begins a trace; a span that belongs to none is dropped.
pub const TRACE_TARGET: &str = "keelson_trace";

/// What to log and where to send traces.
#[derive(Debug, Clone, Default)]
pub struct Options<'a> {
    /// Name of the service, `service.name` of its traces.
    pub service: &'a str,
    /// Name of the node, `k8s.node.name` of its traces.
    pub node: &'a str,
    /// `text` or `json`.
    pub format: &'a str,
    /// A level or a filter such as `info,keelson_pod_sync=debug`. A level without a target applies to the crates of Keelson; dependencies
    /// such as `h2` and `hyper` log at most warnings and errors unless the filter names them.
    pub level: &'a str,
    /// Files of Keelson with a higher verbosity (`vmodule`).
    pub files: &'a [FileVerbosity],
    /// Where lines go.
    pub output: Output,
    /// The collector's endpoint and samples per million; absent: no traces.
    pub otlp: Option<(&'a str, u32)>,
}

/// Why telemetry could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The filter does not parse.
    #[error("log level {text:?} is not a level (error, warn, info, debug, trace) or a list of target=level")]
    Filter {
        /// The text.
        text: String,
    },
    /// The collector's endpoint is not usable.
    #[error("cannot export traces to {endpoint}; tracing.endpoint must be http://host:port")]
    Exporter {
        /// The endpoint.
        endpoint: String,
        /// The cause.
        source: opentelemetry_otlp::ExporterBuildError,
    },
    /// A subscriber is set already.
    #[error("telemetry was set up twice")]
    Twice,
}

/// Keeps telemetry alive; [`Telemetry::shutdown`] sends what is left. Buffered lines are also written when it is dropped.
pub struct Telemetry {
    filter: reload::Handle<LineFilter, Registry>,
    provider: Option<SdkTracerProvider>,
    spans: SpanBuffer,
    current: Mutex<Current>,
    buffer: Option<Buffer>,
}

impl std::fmt::Debug for Telemetry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Telemetry")
    }
}

/// The filter in effect.
struct Current {
    levels: String,
    files: Vec<FileVerbosity>,
}

/// Sets up logs and, when configured, traces for this process. Call it inside the tokio runtime.
pub fn init(options: &Options<'_>) -> Result<Telemetry, TelemetryError> {
    let (filter, handle) = reload::Layer::new(LineFilter::new(options.level, options.files)?);
    let provider = options.otlp.map(|(endpoint, rate)| provider(options, endpoint, rate)).transpose()?;
    let traces = provider.as_ref().map(|provider| {
        tracing_opentelemetry::layer()
            .with_tracer(provider.tracer("keelson"))
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_filter(only_traces())
    });
    let lines = Lines::new(options.format, options.output);
    let buffer = lines.buffer();
    // One filter instead of nested ones, and never an absent layer as `None`: otherwise each call of each dependency
    // creates and drops a span that no layer uses.
    let lines = lines.with_filter(filter.and(not_traces()));
    let spans = SpanBuffer::default();
    // Below the exporting layer: a span is buffered while its ids are known.
    let registry = tracing_subscriber::registry()
        .with(lines)
        .with(BufferLayer(spans.clone()).with_filter(only_traces()));
    match traces {
        Some(traces) => registry.with(traces).try_init(),
        None => registry.try_init(),
    }
    .map_err(|_| TelemetryError::Twice)?;
    Ok(Telemetry {
        filter: handle,
        provider,
        spans,
        current: Mutex::new(Current { levels: options.level.to_owned(), files: options.files.to_vec() }),
        buffer,
    })
}

/// No finer level than INFO, so that spans of dependencies below the log level are not even evaluated.
fn only_traces() -> Targets {
    Targets::new().with_target(TRACE_TARGET, tracing::Level::INFO)
}

fn not_traces() -> Targets {
    Targets::new().with_default(tracing::Level::TRACE).with_target(TRACE_TARGET, LevelFilter::OFF)
}

fn provider(options: &Options<'_>, endpoint: &str, rate: u32) -> Result<SdkTracerProvider, TelemetryError> {
    let exporter = SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .build()
        .map_err(|source| TelemetryError::Exporter { endpoint: endpoint.to_owned(), source })?;
    let resource = Resource::builder()
        .with_service_name(format!("keelson-{}", options.service))
        .with_attribute(opentelemetry::KeyValue::new("k8s.node.name", options.node.to_owned()))
        .build();
    let ratio = f64::from(rate) / 1_000_000.0;
    Ok(SdkTracerProvider::builder()
        .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(ratio))))
        .with_resource(resource)
        .with_batch_exporter(exporter)
        .build())
}

impl Telemetry {
    /// Changes the levels of the log filter and returns the previous ones. The verbosity of single files stays.
    pub fn set_filter(&self, text: &str) -> Result<String, TelemetryError> {
        let mut current = self.current();
        self.reload(text, &current.files)?;
        Ok(std::mem::replace(&mut current.levels, text.to_owned()))
    }

    /// Changes the verbosity of single files (`vmodule`). The levels stay.
    pub fn set_files(&self, files: &[FileVerbosity]) -> Result<(), TelemetryError> {
        let mut current = self.current();
        self.reload(&current.levels, files)?;
        files.clone_into(&mut current.files);
        Ok(())
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reload(&self, levels: &str, files: &[FileVerbosity]) -> Result<(), TelemetryError> {
        self.filter.reload(LineFilter::new(levels, files)?).map_err(|_| TelemetryError::Twice)
    }

    /// The buffered spans of this process.
    pub fn spans(&self) -> &SpanBuffer {
        &self.spans
    }

    /// Whether traces are exported.
    pub fn traces(&self) -> bool {
        self.provider.is_some()
    }

    /// Writes buffered lines, and from now on each line at once.
    pub fn close_log(&self) {
        self.buffer.iter().for_each(Buffer::close);
    }

    /// Writes buffered lines and from now on each line at once, and exports the pending spans, bounded by the exporter's own
    /// timeout.
    pub fn shutdown(&self) {
        self.close_log();
        if let Some(provider) = &self.provider {
            let _ = provider.shutdown();
        }
    }
}

impl Drop for Telemetry {
    /// A panic may end the process without [`Telemetry::shutdown`].
    fn drop(&mut self) {
        self.close_log();
    }
}

/// The W3C `traceparent` of the current span, when it belongs to a trace.
pub fn current_traceparent() -> Option<String> {
    traceparent_of(&Span::current())
}

/// The W3C `traceparent` of `span`, when it belongs to a trace; sampled when it is exported.
pub fn traceparent_of(span: &Span) -> Option<String> {
    if span.is_disabled() {
        return None;
    }
    exported(span).or_else(|| span_buffer::place(span)).map(|place| place.to_string())
}

/// Makes `span` a child of the remote span that `traceparent` names; an empty or broken value changes
/// nothing.
pub fn set_parent(span: &Span, traceparent: &str) {
    if span.is_disabled() {
        return;
    }
    let Some(parent) = Place::parse(traceparent) else { return };
    span_buffer::set_parent(span, parent);
    let context = SpanContext::new(
        TraceId::from(parent.trace),
        SpanId::from(parent.span),
        TraceFlags::new(u8::from(parent.sampled)),
        true,
        TraceState::NONE,
    );
    if span.set_parent(Context::new().with_remote_span_context(context)).is_ok() {
        exported(span);
    }
}

/// The position of the span in the exported trace, which the buffer uses from now on too; `None` when nothing is exported.
fn exported(span: &Span) -> Option<Place> {
    let context = span.context();
    let exported = context.span().span_context().clone();
    if !exported.is_valid() {
        return None;
    }
    let place = Place {
        trace: u128::from_be_bytes(exported.trace_id().to_bytes()),
        span: u64::from_be_bytes(exported.span_id().to_bytes()),
        sampled: exported.is_sampled(),
    };
    span_buffer::adopt(span, place);
    Some(place)
}
