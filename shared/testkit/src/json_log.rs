//! The log of an agent: its JSON format, and the lines of an event.

use anyhow::{Context as _, ensure};
use serde_json::Value;

const LEVELS: [&str; 5] = ["ERROR", "WARN", "INFO", "DEBUG", "TRACE"];

/// The lines of a log of the format `json`: each is an object with a `timestamp` (RFC 3339, UTC), a `level`, a
/// `message` and a `target`.
///
/// # Errors
/// Names the first line that is none, and what it lacks.
pub fn json_lines(log: &str) -> anyhow::Result<Vec<Value>> {
    log.lines().map(|line| json_line(line).with_context(|| format!("the line {line:?}"))).collect()
}

/// The lines of a log, text or JSON, whose field `event` has this value.
pub fn lines_with_event<'a>(log: &'a str, event: &str) -> Vec<&'a str> {
    let (text, json) = (format!("event=\"{event}\""), format!("\"event\":\"{event}\""));
    log.lines().filter(|line| line.contains(&text) || line.contains(&json)).collect()
}

fn json_line(line: &str) -> anyhow::Result<Value> {
    let value: Value = serde_json::from_str(line)?;
    ensure!(value.is_object(), "it is no object");
    let text = |field: &str| value[field].as_str().filter(|text| !text.is_empty());
    let time = text("timestamp").context("it has no timestamp")?;
    ensure!(is_utc(time), "{time:?} is no time in UTC");
    let level = text("level").context("it has no level")?;
    ensure!(LEVELS.contains(&level), "{level:?} is no level");
    ensure!(text("message").is_some(), "it has no message");
    ensure!(text("target").is_some(), "it has no target");
    Ok(value)
}

/// Whether a text is like `2026-01-02T03:04:05.678Z`.
fn is_utc(time: &str) -> bool {
    let shape: String = time.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    let fraction = shape.strip_prefix("0000-00-00T00:00:00").and_then(|rest| rest.strip_suffix('Z'));
    fraction.is_some_and(|rest| {
        rest.is_empty()
            || rest
                .strip_prefix('.')
                .is_some_and(|digits| digits.starts_with('0') && digits.trim_matches('0').is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str =
        r#"{"timestamp":"2026-01-02T03:04:05.678Z","level":"WARN","message":"a \"b\"\n","target":"x","n":1}"#;

    #[test]
    fn each_line_is_an_object_with_the_four_fields() {
        let lines = json_lines(&format!("{GOOD}\n{GOOD}\n")).unwrap();
        assert_eq!(lines.iter().map(|line| line["n"].as_i64()).collect::<Vec<_>>(), [Some(1); 2]);
        assert!(json_lines(&GOOD.replace(".678", "")).is_ok());
        assert!(json_lines("").unwrap().is_empty());
    }

    #[test]
    fn lines_of_an_event_are_found_in_both_formats() {
        let text = r#"2026-01-02T03:04:05Z  WARN bad manifest event="manifest_error" source="file""#;
        let json = r#"{"level":"WARN","message":"bad manifest","event":"manifest_error","source":"file"}"#;
        let other = r#"2026-01-02T03:04:05Z  INFO manifest_error event="manifest_error_fixed""#;
        let log = format!("{text}\n{other}\n{json}\n");
        assert_eq!(lines_with_event(&log, "manifest_error"), [text, json]);
    }

    #[test]
    fn an_invalid_log_line_is_reported_with_its_missing_field() {
        for (given, instead, lacks) in [
            (GOOD, "thread 'main' panicked", "expected"),
            (GOOD, "[1]", "no object"),
            (GOOD, "", "EOF"),
            ("timestamp", "time", "no timestamp"),
            (".678Z", ".678", "no time"),
            (".678Z", ".Z", "no time"),
            (".678Z", "+01:00", "no time"),
            ("2026-", "26-", "no time"),
            ("level", "lvl", "no level"),
            ("WARN", "warning", "no level"),
            ("message", "text", "no message"),
            ("target", "from", "no target"),
        ] {
            let bad = GOOD.replace(given, instead);
            let error = format!("{:#}", json_lines(&format!("{GOOD}\n{bad}\n{GOOD}\n")).unwrap_err());
            assert!(error.contains(lacks) && error.contains(&format!("{bad:?}")), "{error}");
        }
    }
}
