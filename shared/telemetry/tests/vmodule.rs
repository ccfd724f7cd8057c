//! The verbosity of a file adds its lines, and a change of the levels leaves it in effect.

use keelson_telemetry::{FileVerbosity, Options, init};
use tracing::Level;

const OWN: &str = "keelson_service_kit";

#[test]
fn vmodule_adds_lines_of_matching_own_files_and_survives_a_change_of_levels() {
    let files = [FileVerbosity { pattern: "vmod*".into(), verbosity: 4 }];
    let options = Options { service: "test", node: "n", level: "info", files: &files, ..Options::default() };
    let telemetry = init(&options).unwrap();
    assert!(tracing::enabled!(target: OWN, Level::DEBUG), "this file matches");
    assert!(!tracing::enabled!(target: OWN, Level::TRACE), "4 has no steps");
    assert!(!tracing::enabled!(target: "h2", Level::DEBUG), "a dependency stays at warn");
    assert_eq!(telemetry.set_filter("error").unwrap(), "info");
    assert!(tracing::enabled!(target: OWN, Level::DEBUG));
    telemetry.set_files(&[FileVerbosity { pattern: "other".into(), verbosity: 6 }]).unwrap();
    assert!(!tracing::enabled!(target: OWN, Level::INFO), "the levels are those set last");
    telemetry.set_files(&[]).unwrap();
    assert_eq!(telemetry.set_filter("info").unwrap(), "error");
    assert!(tracing::enabled!(target: OWN, Level::INFO));
    assert!(!tracing::enabled!(target: OWN, Level::DEBUG));
}
