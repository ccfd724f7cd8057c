//! Time as an argument.

/// Nanoseconds in one second.
pub const SECOND: i64 = 1_000_000_000;

/// The time of a decision. Pure code has no clock: the caller passes the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// Now, in nanoseconds of the unix epoch.
    pub now_unix_nanos: i64,
    /// When this service started, in nanoseconds of the unix epoch.
    pub agent_started_unix_nanos: i64,
}

/// RFC 3339 text in whole seconds, as every timestamp of a status is written; `None` for 0 and for times outside the
/// calendar.
pub fn status_time(unix_nanos: i64) -> Option<String> {
    if unix_nanos == 0 {
        return None;
    }
    keelson_kube_model::time::format_seconds(unix_nanos.div_euclid(SECOND)).ok()
}

/// A timestamp of a terminated container, as the kubelet writes it: for one that never started it is the epoch, not absent.
pub fn ended_time(unix_nanos: i64) -> Option<String> {
    keelson_kube_model::time::format_seconds(unix_nanos.div_euclid(SECOND)).ok()
}

/// Whole seconds the way Go prints a duration, for texts that people and tools already know: `10s`, `1m20s`, `5m0s`,
/// `1h0m0s`.
pub fn duration_text(seconds: i64) -> String {
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{rest}s"),
        (0, _) => format!("{minutes}m{rest}s"),
        _ => format!("{hours}h{minutes}m{rest}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_formatted_as_in_go() {
        for (seconds, text) in
            [(0, "0s"), (10, "10s"), (80, "1m20s"), (160, "2m40s"), (300, "5m0s"), (3600, "1h0m0s")]
        {
            assert_eq!(duration_text(seconds), text);
        }
    }

    #[test]
    fn a_timestamp_of_zero_is_absent() {
        assert_eq!(status_time(0), None);
        assert_eq!(status_time(1_700_000_000_999_999_999).as_deref(), Some("2023-11-14T22:13:20Z"));
    }
}
