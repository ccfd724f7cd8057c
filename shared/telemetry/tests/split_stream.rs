//! With split streams, errors go to standard error and other lines to standard output, and no line is lost at the end of the
//! process. Each test runs itself again as the process that logs.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs::{self, File};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use keelson_telemetry::{Options, Output, Telemetry, init};

/// Set in the process that logs.
const LOGGING: &str = "KEELSON_TEST_LOGGING";

fn is_logging() -> bool {
    std::env::var_os(LOGGING).is_some()
}

/// Sets up split streams with a buffer that is not written by itself.
fn split() -> Telemetry {
    let output =
        Output { split_stream: true, buffer_bytes: 1 << 20, flush_every: Duration::from_secs(86_400) };
    init(&Options { service: "test", node: "n", level: "split_stream=info", output, ..Options::default() })
        .unwrap()
}

/// Runs a test of this file as the process that logs.
fn run(test: &str, stdout: impl Into<Stdio>, stderr: impl Into<Stdio>) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(LOGGING, "1").stdin(Stdio::null());
    command.stdout(stdout).stderr(stderr).status().unwrap()
}

/// The messages of the log lines of a file, in order.
fn messages(path: &std::path::Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    let message = |line: &str| Some(line.split_once("split_stream.rs:")?.1.split('"').nth(1)?.to_owned());
    text.lines().filter_map(message).collect()
}

/// Runs a test as the process that logs, and returns the messages on its standard output and standard error.
fn streams(test: &str) -> (ExitStatus, Vec<String>, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let (out, err) = (dir.path().join("out"), dir.path().join("err"));
    let status = run(test, File::create(&out).unwrap(), File::create(&err).unwrap());
    (status, messages(&out), messages(&err))
}

#[test]
fn errors_go_to_standard_error_and_other_lines_to_standard_output() {
    if is_logging() {
        let telemetry = split();
        tracing::info!("one");
        tracing::warn!("two");
        tracing::error!("three");
        tracing::info!("four");
        telemetry.shutdown();
        tracing::info!("five");
        // Nothing is dropped, as in a process whose tasks still run.
        std::mem::forget(telemetry);
        return;
    }
    let (status, out, err) = streams("errors_go_to_standard_error_and_other_lines_to_standard_output");
    assert!(status.success());
    assert_eq!(out, ["one", "two", "four", "five"]);
    assert_eq!(err, ["three"]);
}

#[test]
fn lines_before_an_error_are_written_before_it() {
    if is_logging() {
        let _telemetry = split();
        tracing::info!("before");
        tracing::error!("failed");
        tracing::info!("after");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("both");
    let both = File::options().create(true).append(true).open(&path).unwrap();
    let status = run("lines_before_an_error_are_written_before_it", both.try_clone().unwrap(), both);
    assert!(status.success());
    assert_eq!(messages(&path), ["before", "failed", "after"]);
}

#[test]
fn buffered_lines_are_written_after_a_panic() {
    if is_logging() {
        let _telemetry = split();
        tracing::info!("the last line");
        panic!("on purpose");
    }
    let (status, out, _) = streams("buffered_lines_are_written_after_a_panic");
    assert!(!status.success());
    assert_eq!(out, ["the last line"]);
}
