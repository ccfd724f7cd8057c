//! What a kubelet refuses in fields that nothing here acts on yet, and what only a feature gate allows
//! (node-and-api.md §2.5, §2.6).
//!
//! Fields that are acted on are checked where they are read. Here nothing is taken: a field that is only checked is still told
//! to be not acted on.

mod lists;
mod needs;
mod related;

use keelson_kube_model::{Quantity, parse_go_duration};
use serde_json::Value;

use crate::document::{ConfigProblem, Document, Reader, Sourced};
use crate::gates::FeatureGates;

pub(crate) use lists::is_suite;

/// What is set without one of these is the default where a file has it, as it is for a kubelet.
const CHOICES: &[(&str, &[&str])] = &[
    ("cpuManagerPolicy", &["none", "static"]),
    ("hairpinMode", &["promiscuous-bridge", "hairpin-veth", "none"]),
    ("memoryManagerPolicy", &["None", "Static"]),
    ("memoryReservationPolicy", &["None", "TieredReservation"]),
    ("topologyManagerPolicy", &["none", "best-effort", "restricted", "single-numa-node"]),
    ("topologyManagerScope", &["container", "pod"]),
];
/// Whole numbers with the least and the most that they may be.
const NUMBERS: &[(&str, i64, i64)] = &[("iptablesDropBit", 0, 31), ("iptablesMasqueradeBit", 0, 31)];
const I32_MAX: i64 = i32::MAX as i64;
/// Truths.
const TRUTHS: &[&str] = &["cgroupsPerQOS", "enableContentionProfiling", "enableSystemLogQuery", "runOnce"];
/// Texts that may be anything.
const TEXTS: &[&str] = &["contentType", "podCIDR", "providerID", "volumePluginDir"];
/// Durations that may be anything.
const DURATIONS: &[&str] = &["cpuManagerReconcilePeriod", "streamingConnectionIdleTimeout"];
/// Maps of texts.
const MAPS: &[&str] = &["cpuManagerPolicyOptions", "topologyManagerPolicyOptions"];
/// Checks what is left to check of a KubeletConfiguration; `gates` are those in force. Every problem is told.
pub(crate) fn check(document: &Document, gates: &FeatureGates, problems: &mut Vec<ConfigProblem>) {
    let mut reader = Reader::new(document, problems);
    let reader = &mut reader;
    for (path, words) in CHOICES {
        choice(reader, path, words);
    }
    for (path, least, most) in NUMBERS {
        let _ = reader.integer(path, *least..=*most);
    }
    for path in TRUTHS {
        let _ = reader.boolean(path);
    }
    for path in TEXTS {
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
    needs::check(reader, gates);
}

/// A text that is one of `words`. An empty one is the default in a file, and nothing in a flag.
fn choice(reader: &mut Reader<'_>, path: &str, words: &[&str]) {
    let Some(text) = reader.string(path) else { return };
    let stands_for_default = text.value.is_empty() && !text.origin.starts_with("--");
    if !stands_for_default && !words.contains(&text.value.as_str()) {
        reader.refuse(&text, format!("this must be one of: {}", words.join(", ")));
    }
}

/// What is told of text that is no duration.
pub(crate) const NO_DURATION: &str = "this is no duration; write numbers with units, such as 20s or 1m30s";

/// A duration of any length, below zero too.
fn duration(reader: &mut Reader<'_>, path: &str) {
    let Some(text) = reader.string(path) else { return };
    if signed(&text.value).is_none() {
        reader.refuse(&text, NO_DURATION);
    }
}

/// Nanoseconds of a duration as Go writes it.
pub(crate) fn signed(text: &str) -> Option<i128> {
    let (sign, amount) = text.strip_prefix('-').map_or((1, text), |amount| (-1, amount));
    Some(sign * i128::try_from(parse_go_duration(amount)?.as_nanos()).ok()?)
}

/// What stands in objects.
fn objects(reader: &mut Reader<'_>) {
    if reader.object("userNamespaces") {
        ids_per_pod(reader);
    }
    throttling(reader);
    flush_frequency(reader);
    buffer_sizes(reader);
}

/// `userNamespaces.idsPerPod`: blocks of as many ids as a container image may use, as many as 32 bits have.
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
    let Some(value) = reader.look(FIELD) else { return };
    if value.as_f64().is_none_or(|factor| factor <= 0.0 || factor > 1.0) {
        reader.wrong(FIELD, value, "this must be a number above 0 and at most 1".to_owned());
    }
}

/// `logging.flushFrequency`: a duration, or nanoseconds. Zero is the default.
fn flush_frequency(reader: &mut Reader<'_>) {
    const FIELD: &str = "logging.flushFrequency";
    let Some(value) = reader.look(FIELD) else { return };
    let nanos = match value {
        Value::String(text) => signed(text),
        other => other.as_i64().map(i128::from),
    };
    if nanos.is_none_or(|nanos| nanos < 0) {
        let way_out = "this must be a duration above 0 such as 5s, or as many nanoseconds";
        reader.wrong(FIELD, value, way_out.to_owned());
    }
}

/// `logging.options.*.infoBufferSize`: a quantity of bytes.
fn buffer_sizes(reader: &mut Reader<'_>) {
    for path in ["logging.options.json.infoBufferSize", "logging.options.text.infoBufferSize"] {
        let Some(value) = reader.look(path) else { continue };
        let is_size = value.is_number() || value.as_str().is_some_and(|text| Quantity::parse(text).is_ok());
        if !is_size {
            reader.wrong(path, value, "this must be a quantity such as 1Mi".to_owned());
        }
    }
}

/// One value in a list, with the name that messages give it.
fn one<'a>(reader: &Reader<'_>, list: &str, index: usize, value: &'a Value) -> Sourced<&'a Value> {
    Sourced { value, origin: reader.origin(list), field: format!("{list}[{index}]") }
}

#[cfg(test)]
mod tests;
