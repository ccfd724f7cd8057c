//! Durations in Go's format.

use std::time::Duration;

use keelson_kube_model::parse_go_duration;
use serde_json::Value;

/// The upper limit of most durations.
pub(crate) const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// The message for a string that is not a duration.
pub(crate) const NOT_A_DURATION: &str =
    "this is not a duration; write numbers with units, such as 20s or 1m30s";

/// The whole milliseconds of a duration.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The nanoseconds of a duration that may be negative.
pub(crate) fn signed_nanos(text: &str) -> Option<i128> {
    let (sign, amount) = text.strip_prefix('-').map_or((1, text), |amount| (-1, amount));
    Some(sign * i128::try_from(parse_go_duration(amount)?.as_nanos()).ok()?)
}

/// Whether the value is a zero duration or the number zero.
pub(crate) fn is_zero(value: &Value) -> bool {
    value.as_i64() == Some(0)
        || value.as_str().and_then(parse_go_duration).is_some_and(|duration| duration.is_zero())
}
