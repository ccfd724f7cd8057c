//! The grace periods of a node shutdown (node-and-api.md §2.5, §11).

use keelson_config::PriorityGracePeriod;
use serde_json::Value;

use crate::document::Sourced;
use crate::durations::{NOT_A_DURATION, signed_nanos};
use crate::outcome::Outcome;
use crate::reader::Reader;
use crate::settings::{Files, Settings};

const TOTAL: &str = "shutdownGracePeriod";
const CRITICAL: &str = "shutdownGracePeriodCriticalPods";
const BY_PRIORITY: &str = "shutdownGracePeriodByPodPriority";
const SECOND: i64 = 1_000_000_000;

/// The fields; `None` where the file does not set them, or not validly.
#[derive(Debug)]
pub(crate) struct Shutdown {
    total: Option<Sourced<i64>>,
    critical: Option<Sourced<i64>>,
    by_priority: Option<Sourced<Vec<PriorityGracePeriod>>>,
}

impl Settings for Shutdown {
    fn read(files: &mut Files<'_>) -> Self {
        let reader = &mut files.kubelet;
        let (total, critical) = (grace_period(reader, TOTAL), grace_period(reader, CRITICAL));
        let by_priority = by_priority(reader);
        let nanos = |period: &Option<Sourced<i64>>| period.as_ref().map_or(0, |period| period.value);
        if nanos(&critical) > nanos(&total) {
            let remedy = format!("this is part of {TOTAL} and cannot be longer");
            reader.refuse_if(CRITICAL, |_| true, &remedy);
        }
        if nanos(&total) > 0 || nanos(&critical) > 0 {
            let remedy = format!("this and {TOTAL} exclude each other");
            reader.refuse_if(BY_PRIORITY, is_non_empty, &remedy);
        }
        Self { total, critical, by_priority }
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        out.set_field(self.total, |c, v| c.resources.node_shutdown.total_nanos = v);
        out.set_field(self.critical, |c, v| c.resources.node_shutdown.critical_nanos = v);
        out.set_field(self.by_priority, |c, v| c.resources.node_shutdown.by_priority = v);
    }
}

/// A grace period in nanoseconds.
fn grace_period(reader: &mut Reader<'_>, field: &str) -> Option<Sourced<i64>> {
    let text = reader.string(field)?;
    let nanos = signed_nanos(&text.value).and_then(|nanos| i64::try_from(nanos).ok());
    match nanos {
        None => reader.refuse(&text, NOT_A_DURATION),
        Some(nanos) if nanos != 0 && nanos < SECOND => reader.refuse(&text, "this must be 0, or at least 1s"),
        Some(nanos) => return Some(text.map(|_| nanos)),
    }
    None
}

/// The grace periods by priority; without those that are invalid.
fn by_priority(reader: &mut Reader<'_>) -> Option<Sourced<Vec<PriorityGracePeriod>>> {
    let entries = reader.list(BY_PRIORITY)?;
    let mut periods = Vec::with_capacity(entries.len());
    for (index, entry) in entries.iter().enumerate() {
        match priority_grace_period(entry) {
            Ok(period) => periods.push(period),
            Err(remedy) => {
                let one = reader.list_entry(BY_PRIORITY, index, entry);
                reader.report_entry(&one, remedy);
            }
        }
    }
    let origin = reader.origin(BY_PRIORITY);
    Some(Sourced { value: periods, origin, field: BY_PRIORITY.to_owned() })
}

fn priority_grace_period(entry: &Value) -> Result<PriorityGracePeriod, String> {
    if !entry.is_object() && !entry.is_null() {
        return Err("this must be a map with priority and shutdownGracePeriodSeconds".to_owned());
    }
    let number = |field: &str| match entry.get(field) {
        None | Some(Value::Null) => Some(0),
        Some(value) => value.as_i64(),
    };
    let priority = number("priority").and_then(|priority| i32::try_from(priority).ok());
    match (priority, number("shutdownGracePeriodSeconds")) {
        (Some(priority), Some(seconds)) if seconds >= 0 => Ok(PriorityGracePeriod { priority, seconds }),
        _ => Err("priority and shutdownGracePeriodSeconds must be whole numbers, priority of 32 bits and the other at least 0"
            .to_owned()),
    }
}

fn is_non_empty(value: &Value) -> bool {
    value.as_array().is_some_and(|list| !list.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::inputs::Flags;
    use crate::testing::{assert_refused, host, kubelet, run};

    #[test]
    fn invalid_shutdown_grace_periods_are_refused_with_a_remedy() {
        assert_refused(&[
            (json!({"shutdownGracePeriod": "1"}), "shutdownGracePeriod = \"1\"", "not a duration"),
            (json!({"shutdownGracePeriod": "999ms"}), "shutdownGracePeriod = \"999ms\"", "0, or at least 1s"),
            (json!({"shutdownGracePeriod": "-1s"}), "shutdownGracePeriod = \"-1s\"", "0, or at least 1s"),
            (
                json!({"shutdownGracePeriod": "10s", "shutdownGracePeriodCriticalPods": "11s"}),
                "shutdownGracePeriodCriticalPods = \"11s\"",
                "cannot be longer",
            ),
            (
                json!({
                    "shutdownGracePeriod": "10s",
                    "shutdownGracePeriodByPodPriority": [{"priority": 1, "shutdownGracePeriodSeconds": 5}],
                }),
                "shutdownGracePeriodByPodPriority",
                "exclude each other",
            ),
            (
                json!({"shutdownGracePeriodByPodPriority": [{"priority": 1, "shutdownGracePeriodSeconds": -1}]}),
                "shutdownGracePeriodByPodPriority[0]",
                "at least 0",
            ),
            (
                json!({"shutdownGracePeriodByPodPriority": [5]}),
                "shutdownGracePeriodByPodPriority[0] = 5",
                "this must be a map",
            ),
        ]);
    }

    #[test]
    fn shutdown_grace_periods_are_passed_on_with_their_origin() {
        let fields = json!({"shutdownGracePeriod": "30s", "shutdownGracePeriodCriticalPods": "10.5s"});
        let resolved = run(&Flags::default(), Some(&kubelet(fields)), None, &host()).unwrap();
        let shutdown = resolved.config.resources.node_shutdown;
        assert_eq!((shutdown.total_nanos, shutdown.critical_nanos), (30 * SECOND, 10_500_000_000));
        assert_eq!(shutdown.by_priority, []);
        assert!(resolved.config.provenance.contains_key("resources.nodeShutdown.criticalNanos"));
        assert!(
            resolved.notes.iter().all(|note| !note.text.contains("shutdownGracePeriod")),
            "they have effect"
        );

        let list = json!([
            {"priority": 100, "shutdownGracePeriodSeconds": 10}, {"priority": -5}, {"shutdownGracePeriodSeconds": 2}, null,
        ]);
        let fields = json!({"shutdownGracePeriodByPodPriority": list});
        let resolved = run(&Flags::default(), Some(&kubelet(fields)), None, &host()).unwrap();
        let periods = resolved.config.resources.node_shutdown.by_priority;
        let periods: Vec<_> = periods.iter().map(|period| (period.priority, period.seconds)).collect();
        assert_eq!(periods, [(100, 10), (-5, 0), (0, 2), (0, 0)]);
        let absent = run(&Flags::default(), Some(&kubelet(json!({}))), None, &host()).unwrap();
        assert_eq!(absent.config.resources.node_shutdown, keelson_config::NodeShutdown::default());
    }
}
