//! Fields that exclude each other or depend on each other.

use serde_json::Value;

use super::signed;
use crate::document::Reader;

/// The only release whose hidden metrics can still be enabled: the one before 1.36.
const HIDDEN_METRICS: &str = "1.35";
const SECOND: i128 = 1_000_000_000;

pub(super) fn check(reader: &mut Reader<'_>) {
    run_once(reader);
    hidden_metrics(reader);
    shutdown(reader);
    log_query(reader);
    cgroups_per_qos(reader);
    reserved_cpus(reader);
}

/// The kubelet has removed this mode; the field is read to refuse it.
fn run_once(reader: &mut Reader<'_>) {
    let remedy = "Runonce mode has been deprecated and should not be set; remove this field";
    refuse_if(reader, "runOnce", |value| *value == Value::Bool(true), remedy);
}

fn hidden_metrics(reader: &mut Reader<'_>) {
    let Some(text) = reader.string("showHiddenMetricsForVersion") else { return };
    if !["", HIDDEN_METRICS].contains(&text.value.as_str()) {
        reader.refuse(&text, format!("this must be the previous release, {HIDDEN_METRICS}, or empty"));
    }
}

/// The grace periods of a node shutdown: for critical pods or by priority.
fn shutdown(reader: &mut Reader<'_>) {
    const TOTAL: &str = "shutdownGracePeriod";
    const CRITICAL: &str = "shutdownGracePeriodCriticalPods";
    let period = |reader: &mut Reader<'_>, path| {
        let text = reader.string(path)?;
        let nanos = signed(&text.value);
        match nanos {
            None => {
                reader
                    .refuse(&text, "this is not a duration; write numbers with units, such as 20s or 1m30s");
            }
            Some(nanos) if nanos != 0 && nanos < SECOND => {
                reader.refuse(&text, "this must be 0, or at least 1s");
            }
            Some(_) => {}
        }
        nanos.map(|nanos| text.map(|_| nanos))
    };
    let (total, critical) = (period(reader, TOTAL), period(reader, CRITICAL));
    let nanos = |period: &Option<crate::document::Sourced<i128>>| period.as_ref().map_or(0, |p| p.value);
    if nanos(&critical) > nanos(&total) {
        let remedy = format!("this is part of {TOTAL} and cannot be longer");
        refuse_if(reader, CRITICAL, |_| true, &remedy);
    }
    if nanos(&total) > 0 || nanos(&critical) > 0 {
        let remedy = format!("this and {TOTAL} exclude each other");
        refuse_if(reader, "shutdownGracePeriodByPodPriority", is_non_empty, &remedy);
    }
}

fn log_query(reader: &mut Reader<'_>) {
    if reader.peek("enableSystemLogHandler") == Some(&Value::Bool(false)) {
        let remedy = "this requires enableSystemLogHandler: true";
        refuse_if(reader, "enableSystemLogQuery", |value| *value == Value::Bool(true), remedy);
    }
}

/// Enforcement requires cgroups; by default the limits of pods are enforced.
fn cgroups_per_qos(reader: &mut Reader<'_>) {
    let enforced = match reader.peek("enforceNodeAllocatable") {
        None => true,
        Some(Value::Array(values)) => values.iter().any(|value| value != "none" && value != ""),
        Some(_) => false,
    };
    if enforced {
        let remedy = "this must be true unless enforceNodeAllocatable is none";
        refuse_if(reader, "cgroupsPerQOS", |value| *value == Value::Bool(false), remedy);
    }
}

/// Reserved CPUs replace the CPU shares of these cgroups.
fn reserved_cpus(reader: &mut Reader<'_>) {
    let named = |path| reader.peek(path).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    if named("systemReservedCgroup") || named("kubeReservedCgroup") {
        let remedy = "this field excludes systemReservedCgroup and kubeReservedCgroup";
        let is_set = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
        refuse_if(reader, "reservedSystemCPUs", is_set, remedy);
    }
}

fn is_non_empty(value: &Value) -> bool {
    value.as_array().is_some_and(|list| !list.is_empty())
}

fn refuse_if(reader: &mut Reader<'_>, path: &str, is_wrong: impl Fn(&Value) -> bool, remedy: &str) {
    if let Some(value) = reader.peek(path).filter(|value| is_wrong(value)) {
        reader.report(path, value, remedy.to_owned());
    }
}
