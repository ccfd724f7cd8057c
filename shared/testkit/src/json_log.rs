//! The log of an agent: its JSON format, and the lines of an event.

use anyhow::{Context as _, ensure};
use serde_json::Value;

/// The beginning of 2020, in milliseconds since 1970.
const MILLIS_OF_2020: f64 = 1_577_836_800_000.0;
const LEVELS: [&str; 5] = ["ERROR", "WARN", "INFO", "DEBUG", "TRACE"];

/// The lines of a log of the format `json`, which is klog's: each is an object with `ts` (milliseconds since 1970), `caller`
/// (`folder/file.rs:1`), `msg`, and `v` unless it is an error; and with a `level` and a `logger` of our own.
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
    let time = value["ts"].as_f64().context("it has no ts")?;
    ensure!(time > MILLIS_OF_2020, "{time} are no milliseconds since 1970");
    let caller = text("caller").context("it has no caller")?;
    let line = caller.rsplit_once(".rs:").map(|(_, line)| line.parse::<u32>());
    ensure!(matches!(line, Some(Ok(_))), "{caller:?} is no line of a file");
    let level = text("level").context("it has no level")?;
    ensure!(LEVELS.contains(&level), "{level:?} is no level");
    ensure!(text("msg").is_some(), "it has no msg");
    ensure!(text("logger").is_some(), "it has no logger");
    ensure!(value["v"].is_u64() != (level == "ERROR"), "v is for all lines but errors");
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"ts":1767323045678.123,"caller":"src/a.rs:42","msg":"a \"b\"\n","v":0,"level":"WARN","logger":"x","n":1}"#;

    #[test]
    fn each_line_is_an_object_with_the_fields_of_klog() {
        let lines = json_lines(&format!("{GOOD}\n{GOOD}\n")).unwrap();
        assert_eq!(lines.iter().map(|line| line["n"].as_i64()).collect::<Vec<_>>(), [Some(1); 2]);
        assert!(json_lines(&GOOD.replace(".123", "")).is_ok());
        assert!(json_lines(&GOOD.replace("\"v\":0,", "").replace("WARN", "ERROR")).is_ok());
        assert!(json_lines("").unwrap().is_empty());
    }

    #[test]
    fn lines_of_an_event_are_found_in_both_formats() {
        let text =
            r#"W0102 03:04:05.678901       1 a.rs:42] "bad manifest" event="manifest_error" source="file""#;
        let json = r#"{"level":"WARN","msg":"bad manifest","event":"manifest_error","source":"file"}"#;
        let other = r#"I0102 03:04:05.678901       1 a.rs:42] "manifest_error" event="manifest_error_fixed""#;
        let log = format!("{text}\n{other}\n{json}\n");
        assert_eq!(lines_with_event(&log, "manifest_error"), [text, json]);
    }

    #[test]
    fn an_invalid_log_line_is_reported_with_its_missing_field() {
        for (given, instead, lacks) in [
            (GOOD, "thread 'main' panicked", "expected"),
            (GOOD, "[1]", "no object"),
            (GOOD, "", "EOF"),
            ("ts", "time", "no ts"),
            ("1767323045678.123", "\"2026\"", "no ts"),
            ("1767323045678.123", "1767323045.678", "no milliseconds"),
            ("caller", "file", "no caller"),
            (".rs:42", ".rs", "no line"),
            ("level", "lvl", "no level"),
            ("WARN", "warning", "no level"),
            ("WARN", "ERROR", "v is for"),
            ("\"v\":0,", "", "v is for"),
            ("msg", "text", "no msg"),
            ("logger", "from", "no logger"),
        ] {
            let bad = GOOD.replace(given, instead);
            let error = format!("{:#}", json_lines(&format!("{GOOD}\n{bad}\n{GOOD}\n")).unwrap_err());
            assert!(error.contains(lacks) && error.contains(&format!("{bad:?}")), "{error}");
        }
    }
}
