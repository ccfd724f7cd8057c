//! The kubelet's checks of fields that have no effect here yet, and of fields that require a feature gate (node-and-api.md
//! §2.5, §2.6).
//!
//! Supported fields are checked by the modules that read them. A field that is only checked here still counts as unsupported.

mod gated_fields;
mod lists;
mod related;

use keelson_kube_model::{Quantity, parse_go_duration};
use serde_json::Value;

use crate::document::{ConfigError, Document, Reader, Sourced};
use crate::gates::FeatureGates;

pub(crate) use lists::is_suite;

/// Fields with a fixed set of values. An unset field has its default, as in a kubelet.
const CHOICES: &[(&str, &[&str])] = &[
    ("cpuManagerPolicy", &["none", "static"]),
    ("hairpinMode", &["promiscuous-bridge", "hairpin-veth", "none"]),
    ("memoryManagerPolicy", &["None", "Static"]),
    ("memoryReservationPolicy", &["None", "TieredReservation"]),
    ("topologyManagerPolicy", &["none", "best-effort", "restricted", "single-numa-node"]),
    ("topologyManagerScope", &["container", "pod"]),
];
/// Integer fields with their minimum and maximum.
const NUMBERS: &[(&str, i64, i64)] = &[("iptablesDropBit", 0, 31), ("iptablesMasqueradeBit", 0, 31)];
const I32_MAX: i64 = i32::MAX as i64;
/// Boolean fields.
const BOOLEANS: &[&str] = &["cgroupsPerQOS", "enableContentionProfiling", "enableSystemLogQuery", "runOnce"];
/// String fields with any value.
const STRINGS: &[&str] = &["contentType", "podCIDR", "providerID", "volumePluginDir"];
/// Duration fields with any value.
const DURATIONS: &[&str] = &["cpuManagerReconcilePeriod", "streamingConnectionIdleTimeout"];
/// Fields with maps of strings.
const MAPS: &[&str] = &["cpuManagerPolicyOptions", "topologyManagerPolicyOptions"];
/// Checks the remaining fields of a KubeletConfiguration; `gates` are those in force. Reports all errors.
pub(crate) fn check(document: &Document, gates: &FeatureGates, errors: &mut Vec<ConfigError>) {
    let mut reader = Reader::new(document, errors);
    let reader = &mut reader;
    for (path, choices) in CHOICES {
        choice(reader, path, choices);
    }
    for (path, min, max) in NUMBERS {
        let _ = reader.integer(path, *min..=*max);
    }
    for path in BOOLEANS {
        let _ = reader.boolean(path);
    }
    for path in STRINGS {
        let _ = reader.string(path);
    }
    for path in DURATIONS {
        duration(reader, path);
    }
    for path in MAPS {
        let _ = reader.map(path);
    }
    choice(reader, "tlsMinVersion", &["VersionTLS10", "VersionTLS11", "VersionTLS12", "VersionTLS13"]);
    objects(reader);
    lists::check(reader);
    related::check(reader);
    gated_fields::check(reader, gates);
}

/// Checks a string against the allowed values. An empty string means the default in a file and is not allowed in a flag.
fn choice(reader: &mut Reader<'_>, path: &str, choices: &[&str]) {
    let Some(text) = reader.string(path) else { return };
    let is_default = text.value.is_empty() && !text.origin.starts_with("--");
    if !is_default && !choices.contains(&text.value.as_str()) {
        reader.refuse(&text, format!("this must be one of: {}", choices.join(", ")));
    }
}

/// The message for a string that is not a duration.
pub(crate) const NOT_A_DURATION: &str =
    "this is not a duration; write numbers with units, such as 20s or 1m30s";

/// Checks a duration of any length, which may be negative.
fn duration(reader: &mut Reader<'_>, path: &str) {
    let Some(text) = reader.string(path) else { return };
    if signed(&text.value).is_none() {
        reader.refuse(&text, NOT_A_DURATION);
    }
}

/// The nanoseconds of a duration in Go's format.
pub(crate) fn signed(text: &str) -> Option<i128> {
    let (sign, amount) = text.strip_prefix('-').map_or((1, text), |amount| (-1, amount));
    Some(sign * i128::try_from(parse_go_duration(amount)?.as_nanos()).ok()?)
}

/// Checks nested fields.
fn objects(reader: &mut Reader<'_>) {
    if reader.object("userNamespaces") {
        ids_per_pod(reader);
    }
    throttling(reader);
    flush_frequency(reader);
    buffer_sizes(reader);
}

/// `userNamespaces.idsPerPod`: a multiple of the IDs that a container image may use, below 2^32.
fn ids_per_pod(reader: &mut Reader<'_>) {
    const BLOCK: i64 = 65_536;
    let ids = reader.integer("userNamespaces.idsPerPod", 1..=i64::from(u32::MAX));
    if let Some(ids) = ids.filter(|ids| ids.value % BLOCK != 0) {
        reader.refuse(&ids, format!("this must be a multiple of {BLOCK}"));
    }
}

/// `memoryThrottlingFactor`.
fn throttling(reader: &mut Reader<'_>) {
    const FIELD: &str = "memoryThrottlingFactor";
    let Some(value) = reader.peek(FIELD) else { return };
    if value.as_f64().is_none_or(|factor| factor <= 0.0 || factor > 1.0) {
        reader.report(FIELD, value, "this must be a number above 0 and at most 1".to_owned());
    }
}

/// `logging.flushFrequency`: a duration, or nanoseconds. Zero means the default.
fn flush_frequency(reader: &mut Reader<'_>) {
    const FIELD: &str = "logging.flushFrequency";
    let Some(value) = reader.peek(FIELD) else { return };
    let nanos = match value {
        Value::String(text) => signed(text),
        other => other.as_i64().map(i128::from),
    };
    if nanos.is_none_or(|nanos| nanos < 0) {
        let remedy = "this must be a duration above 0 such as 5s, or a number of nanoseconds";
        reader.report(FIELD, value, remedy.to_owned());
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

/// A list entry with its field name for messages.
fn list_entry<'a>(reader: &Reader<'_>, list: &str, index: usize, value: &'a Value) -> Sourced<&'a Value> {
    Sourced { value, origin: reader.origin(list), field: format!("{list}[{index}]") }
}

#[cfg(test)]
mod tests;
