//! What nobody looks at costs nothing: it is not even made.

use keelson_telemetry::{Options, TRACE_TARGET, init};
use tracing::Level;

#[test]
fn a_span_below_the_level_is_not_made() {
    let options = Options { service: "test", node: "n", format: "text", level: "info", otlp: None };
    let telemetry = init(&options).unwrap();
    assert!(tracing::trace_span!("of a dependency").is_disabled());
    assert!(tracing::debug_span!("of a dependency").is_disabled());
    assert!(!tracing::info_span!(target: TRACE_TARGET, "of a trace").is_disabled());
    assert!(tracing::debug_span!(target: TRACE_TARGET, "finer than those").is_disabled());
    assert!(!tracing::enabled!(Level::DEBUG));
    assert!(tracing::enabled!(Level::INFO));
    assert_eq!(telemetry.set_filter("debug").unwrap(), "info");
    assert!(!tracing::debug_span!("asked for").is_disabled());
    assert!(tracing::trace_span!("still not").is_disabled());
}
