//! A span that neither the log nor a trace uses is not created.

use keelson_telemetry::{Options, TRACE_TARGET, init};
use tracing::Level;

/// A target of the agent, to which the level of the log applies.
const OWN: &str = "keelson_service_kit";

#[test]
fn a_span_below_the_level_is_not_made() {
    let options = Options { service: "test", node: "n", format: "text", level: "info", ..Options::default() };
    let telemetry = init(&options).unwrap();
    assert!(tracing::trace_span!("of a dependency").is_disabled());
    assert!(tracing::debug_span!("of a dependency").is_disabled());
    assert!(!tracing::info_span!(target: TRACE_TARGET, "of a trace").is_disabled());
    assert!(tracing::debug_span!(target: TRACE_TARGET, "finer than those").is_disabled());
    assert!(!tracing::enabled!(target: OWN, Level::DEBUG));
    assert!(tracing::enabled!(target: OWN, Level::INFO));
    assert_eq!(telemetry.set_filter("debug").unwrap(), "info");
    assert!(tracing::debug_span!("of a dependency").is_disabled(), "a dependency stays at warn");
    assert!(!tracing::debug_span!(target: OWN, "asked for").is_disabled());
    assert!(tracing::trace_span!(target: OWN, "still not").is_disabled());
}
