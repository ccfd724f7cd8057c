//! Logs and traces of every Keelson service.
//!
//! Log lines go to standard error as text or JSON. A bounded number of spans of traces is buffered in memory
//! (see [`SpanBuffer`]), and their W3C context is sent with every call. They are exported over OTLP/gRPC only when the
//! configuration names a collector; without one their context says that they are not sampled.

mod span_buffer;

use std::io::IsTerminal as _;
use std::str::FromStr as _;

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

use crate::span_buffer::{BufferLayer, Place};
pub use crate::span_buffer::{BufferedSpan, BufferedTrace, SpanBuffer};

/// The target of the spans that make up a trace, all of level INFO. They are buffered and exported at every log level,
/// and the log does not show them. One with `parent: None` begins a trace; a span that belongs to none is dropped.
pub const TRACE_TARGET: &str = "keelson_trace";

/// What to log and where to send traces.
#[derive(Debug, Clone)]
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

/// Keeps telemetry alive; [`Telemetry::shutdown`] sends what is left.
pub struct Telemetry {
    filter: reload::Handle<Targets, Registry>,
    provider: Option<SdkTracerProvider>,
    spans: SpanBuffer,
    current: std::sync::Mutex<String>,
}

/// Sets up logs and, when configured, traces for this process. Call it inside the tokio runtime.
pub fn init(options: &Options<'_>) -> Result<Telemetry, TelemetryError> {
    let targets = parse_filter(options.level)?;
    let (filter, handle) = reload::Layer::new(targets);
    let provider = options.otlp.map(|(endpoint, rate)| provider(options, endpoint, rate)).transpose()?;
    let traces = provider.as_ref().map(|provider| {
        tracing_opentelemetry::layer()
            .with_tracer(provider.tracer("keelson"))
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_filter(only_traces())
    });
    let builder = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = if options.format == "json" {
        builder.json().flatten_event(true).with_span_list(false).with_current_span(false).boxed()
    } else {
        builder.with_ansi(std::io::stderr().is_terminal()).with_target(false).boxed()
    };
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
        current: std::sync::Mutex::new(options.level.to_owned()),
    })
}

/// No finer level than INFO, so that spans of dependencies below the log level are not even evaluated.
fn only_traces() -> Targets {
    Targets::new().with_target(TRACE_TARGET, tracing::Level::INFO)
}

fn not_traces() -> Targets {
    Targets::new().with_default(tracing::Level::TRACE).with_target(TRACE_TARGET, LevelFilter::OFF)
}

/// The prefix of the targets of all Keelson crates.
const OWN_TARGETS: &str = "keelson";
/// What dependencies log unless the filter names them: at debug, HTTP/2 alone writes several lines for each request.
const DEPENDENCY_LEVEL: LevelFilter = LevelFilter::WARN;

fn parse_filter(text: &str) -> Result<Targets, TelemetryError> {
    let targets = Targets::from_str(text).map_err(|_| TelemetryError::Filter { text: text.to_owned() })?;
    let Some(level) = targets.default_level().filter(|level| *level > DEPENDENCY_LEVEL) else {
        return Ok(targets);
    };
    let names_all_own = targets.iter().any(|(target, _)| target == OWN_TARGETS);
    let targets = targets.with_default(DEPENDENCY_LEVEL);
    Ok(if names_all_own { targets } else { targets.with_target(OWN_TARGETS, level) })
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
    /// Changes the log filter and returns the previous one.
    pub fn set_filter(&self, text: &str) -> Result<String, TelemetryError> {
        let targets = parse_filter(text)?;
        self.filter.reload(targets).map_err(|_| TelemetryError::Twice)?;
        let mut current = self.current.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        Ok(std::mem::replace(&mut current, text.to_owned()))
    }

    /// The buffered spans of this process.
    pub fn spans(&self) -> &SpanBuffer {
        &self.spans
    }

    /// Whether traces are exported.
    pub fn traces(&self) -> bool {
        self.provider.is_some()
    }

    /// Exports the pending spans, bounded by the exporter's own timeout.
    pub fn shutdown(&self) {
        if let Some(provider) = &self.provider {
            let _ = provider.shutdown();
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_level_applies_to_own_targets_and_dependencies_stay_at_warn() {
        use tracing::Level;
        for (text, target, level, enabled) in [
            ("debug", "keelson_pod_sync::turn::worker", Level::DEBUG, true),
            ("debug", "keelson_pod_sync", Level::TRACE, false),
            ("trace", "h2::codec::framed_write", Level::INFO, false),
            ("trace", "h2::codec::framed_write", Level::WARN, true),
            ("error", "h2", Level::WARN, false),
            ("error", "keelson_cli", Level::WARN, false),
            ("debug,h2=trace", "h2::codec", Level::TRACE, true),
            ("debug,h2=trace", "hyper", Level::DEBUG, false),
            ("info,keelson_pod_sync=debug", "keelson_pod_sync", Level::DEBUG, true),
            ("info,keelson_pod_sync=debug", "keelson_init", Level::DEBUG, false),
            ("info,keelson_pod_sync=debug", "keelson_init", Level::INFO, true),
            ("trace,keelson=info", "keelson_init", Level::DEBUG, false),
            ("h2=debug", "keelson_init", Level::ERROR, false),
        ] {
            let filter = parse_filter(text).unwrap();
            assert_eq!(filter.would_enable(target, &level), enabled, "{text}: {target} at {level}");
        }
    }

    #[test]
    fn an_invalid_log_filter_is_refused_with_its_text() {
        let error = parse_filter("info,keelson=loudly").unwrap_err();
        assert!(error.to_string().contains("keelson=loudly"));
    }
}
