//! Fields that do not go together.

use serde_json::Value;

use super::signed;
use crate::document::Reader;

/// The only release whose metrics may still be shown: the one before 1.36.
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

/// The mode went with its code; the field is read so that it can be refused.
fn run_once(reader: &mut Reader<'_>) {
    let way_out = "Runonce mode has been deprecated and should not be set; leave this out";
    refuse_if(reader, "runOnce", |value| *value == Value::Bool(true), way_out);
}

fn hidden_metrics(reader: &mut Reader<'_>) {
    let Some(text) = reader.string("showHiddenMetricsForVersion") else { return };
    if !["", HIDDEN_METRICS].contains(&text.value.as_str()) {
        reader.refuse(&text, format!("this must be the release before, {HIDDEN_METRICS}, or nothing"));
    }
}

/// The time for pods when the machine goes down: by their kind or by their priority.
fn shutdown(reader: &mut Reader<'_>) {
    const TOTAL: &str = "shutdownGracePeriod";
    const CRITICAL: &str = "shutdownGracePeriodCriticalPods";
    let period = |reader: &mut Reader<'_>, path| {
        let text = reader.string(path)?;
        let nanos = signed(&text.value);
        match nanos {
            None => {
                reader.refuse(&text, "this is no duration; write numbers with units, such as 20s or 1m30s");
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
        let way_out = format!("this is a part of {TOTAL} and cannot be longer");
        refuse_if(reader, CRITICAL, |_| true, &way_out);
    }
    if nanos(&total) > 0 || nanos(&critical) > 0 {
        let way_out = format!("this and {TOTAL} exclude each other");
        refuse_if(reader, "shutdownGracePeriodByPodPriority", is_long, &way_out);
    }
}

fn log_query(reader: &mut Reader<'_>) {
    if reader.look("enableSystemLogHandler") == Some(&Value::Bool(false)) {
        let way_out = "this needs enableSystemLogHandler: true";
        refuse_if(reader, "enableSystemLogQuery", |value| *value == Value::Bool(true), way_out);
    }
}

/// What is enforced is so by cgroups; by default the pods' are.
fn cgroups_per_qos(reader: &mut Reader<'_>) {
    let enforced = match reader.look("enforceNodeAllocatable") {
        None => true,
        Some(Value::Array(words)) => words.iter().any(|word| word != "none" && word != ""),
        Some(_) => false,
    };
    if enforced {
        let way_out = "this must be true when enforceNodeAllocatable names something; write none there";
        refuse_if(reader, "cgroupsPerQOS", |value| *value == Value::Bool(false), way_out);
    }
}

/// CPUs that are named leave no share of a cgroup to bind.
fn reserved_cpus(reader: &mut Reader<'_>) {
    let named = |path| reader.look(path).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    if named("systemReservedCgroup") || named("kubeReservedCgroup") {
        let way_out = "this excludes systemReservedCgroup and kubeReservedCgroup";
        let is_set = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
        refuse_if(reader, "reservedSystemCPUs", is_set, way_out);
    }
}

fn is_long(value: &Value) -> bool {
    value.as_array().is_some_and(|list| !list.is_empty())
}

fn refuse_if(reader: &mut Reader<'_>, path: &str, is_wrong: impl Fn(&Value) -> bool, way_out: &str) {
    if let Some(value) = reader.look(path).filter(|value| is_wrong(value)) {
        reader.wrong(path, value, way_out.to_owned());
    }
}
