//! Checks of the fields for logs and metrics.

use keelson_kube_model::Quantity;
use serde_json::Value;

use crate::durations::signed_nanos;
use crate::reader::Reader;

/// The only release whose hidden metrics can still be enabled: the one before 1.36.
const HIDDEN_METRICS: &str = "1.35";
const I32_MAX: i64 = i32::MAX as i64;

pub(super) fn check(reader: &mut Reader<'_>) {
    flush_frequency(reader);
    options(reader);
    buffer_sizes(reader);
    vmodule(reader);
    hidden_metrics(reader);
}

/// `logging.flushFrequency`: a duration, or nanoseconds. Zero means the default.
fn flush_frequency(reader: &mut Reader<'_>) {
    const FIELD: &str = "logging.flushFrequency";
    let Some(value) = reader.peek(FIELD) else { return };
    let nanos = match value {
        Value::String(text) => signed_nanos(text),
        other => other.as_i64().map(i128::from),
    };
    if nanos.is_none_or(|nanos| nanos < 0) {
        let remedy = "this must be a duration above 0 such as 5s, or a number of nanoseconds";
        reader.report(FIELD, value, remedy.to_owned());
    }
}

/// `logging.options` and the options of each format: maps.
fn options(reader: &mut Reader<'_>) {
    for path in ["logging.options", "logging.options.json", "logging.options.text"] {
        reader.object(path);
    }
}

/// `logging.options.*.infoBufferSize`: a quantity of bytes.
fn buffer_sizes(reader: &mut Reader<'_>) {
    for path in ["logging.options.json.infoBufferSize", "logging.options.text.infoBufferSize"] {
        let Some(value) = reader.peek(path) else { continue };
        let is_size = value.is_number() || value.as_str().is_some_and(|text| Quantity::parse(text).is_ok());
        if !is_size {
            reader.report(path, value, "this must be a quantity such as 1Mi".to_owned());
        }
    }
}

fn vmodule(reader: &mut Reader<'_>) {
    const FIELD: &str = "logging.vmodule";
    reader.check_entries(FIELD, |entry| {
        let pattern = entry.get("filePattern").and_then(Value::as_str).unwrap_or_default();
        let verbosity = entry.get("verbosity").map_or(Some(0), Value::as_i64);
        if pattern.is_empty() || pattern.contains(['=', ',']) {
            return Err("filePattern must be text without '=' and ','".to_owned());
        }
        match verbosity {
            Some(0..=I32_MAX) => Ok(()),
            _ => Err(format!("verbosity must be a whole number from 0 to {}", I32_MAX)),
        }
    });
    let is_json = reader.peek("logging.format").is_some_and(|format| format == "json");
    let entries = reader.peek(FIELD).filter(|list| list.as_array().is_some_and(|list| !list.is_empty()));
    if let Some(value) = entries.filter(|_| is_json) {
        reader.report(
            FIELD,
            value,
            "this applies to text only; remove it if logging.format is json".to_owned(),
        );
    }
}

fn hidden_metrics(reader: &mut Reader<'_>) {
    let Some(text) = reader.string("showHiddenMetricsForVersion") else { return };
    if !["", HIDDEN_METRICS].contains(&text.value.as_str()) {
        reader.refuse(&text, format!("this must be the previous release, {HIDDEN_METRICS}, or empty"));
    }
}
