//! The grace periods of a node shutdown. They have no effect here yet and are only checked (node-and-api.md §2.5).

use serde_json::Value;

use crate::document::Sourced;
use crate::durations::{NOT_A_DURATION, signed_nanos};
use crate::outcome::Outcome;
use crate::reader::Reader;
use crate::settings::{Files, Settings};

const SECOND: i128 = 1_000_000_000;

/// No field has an effect yet.
#[derive(Debug)]
pub(crate) struct Shutdown;

impl Settings for Shutdown {
    fn read(_files: &mut Files<'_>) -> Self {
        Self
    }

    fn check(kubelet: &mut Reader<'_>) {
        by_priority(kubelet);
        shutdown(kubelet);
    }

    fn resolve(self, _out: &mut Outcome<'_>) {}
}

fn by_priority(reader: &mut Reader<'_>) {
    reader.check_entries("shutdownGracePeriodByPodPriority", |entry| {
        if !entry.is_object() && !entry.is_null() {
            return Err("this must be a map with priority and shutdownGracePeriodSeconds".to_owned());
        }
        let number = |field: &str| entry.get(field).map_or(Some(0), Value::as_i64);
        match (number("priority"), number("shutdownGracePeriodSeconds")) {
            (Some(_), Some(seconds)) if seconds >= 0 => Ok(()),
            _ => Err("priority and shutdownGracePeriodSeconds must be whole numbers, the latter at least 0"
                .to_owned()),
        }
    });
}

/// The grace periods of a node shutdown: for critical pods or by priority.
fn shutdown(reader: &mut Reader<'_>) {
    const TOTAL: &str = "shutdownGracePeriod";
    const CRITICAL: &str = "shutdownGracePeriodCriticalPods";
    let period = |reader: &mut Reader<'_>, path| {
        let text = reader.string(path)?;
        let nanos = signed_nanos(&text.value);
        match nanos {
            None => {
                reader.refuse(&text, NOT_A_DURATION);
            }
            Some(nanos) if nanos != 0 && nanos < SECOND => {
                reader.refuse(&text, "this must be 0, or at least 1s");
            }
            Some(_) => {}
        }
        nanos.map(|nanos| text.map(|_| nanos))
    };
    let (total, critical) = (period(reader, TOTAL), period(reader, CRITICAL));
    let nanos = |period: &Option<Sourced<i128>>| period.as_ref().map_or(0, |p| p.value);
    if nanos(&critical) > nanos(&total) {
        let remedy = format!("this is part of {TOTAL} and cannot be longer");
        reader.refuse_if(CRITICAL, |_| true, &remedy);
    }
    if nanos(&total) > 0 || nanos(&critical) > 0 {
        let remedy = format!("this and {TOTAL} exclude each other");
        reader.refuse_if("shutdownGracePeriodByPodPriority", is_non_empty, &remedy);
    }
}

fn is_non_empty(value: &Value) -> bool {
    value.as_array().is_some_and(|list| !list.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::testing::assert_refused;

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
}
