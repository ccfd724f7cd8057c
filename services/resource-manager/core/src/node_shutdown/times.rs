//! The state file of a graceful shutdown, `<root>/graceful_node_shutdown_state`, in the kubelet's format
//! (node-and-api.md §11).

use keelson_kube_model::time::{TimeError, format_nanos, parse_nanos};
use serde_json::Value;
use thiserror::Error;

/// The name of the state file in the root directory.
pub const FILE_NAME: &str = "graceful_node_shutdown_state";
/// The permissions of the state file.
pub const FILE_MODE: u32 = 0o644;
/// The text of a moment that is not set: Go's zero time.
const UNSET: &str = "0001-01-01T00:00:00Z";
const NANOS_PER_SECOND: i128 = 1_000_000_000;

/// When pods were last ended for a shutdown, in nanoseconds since 1970. It outlasts the reboot, and is shown as the metrics
/// `kubelet_graceful_shutdown_start_time_seconds` and `…_end_time_seconds`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShutdownTimes {
    /// When it began; none before the first shutdown.
    pub start: Option<i128>,
    /// When the last group had ended; none while it is under way, and when it was interrupted.
    pub end: Option<i128>,
}

/// A state file that cannot be read or written.
#[derive(Debug, Error)]
pub enum TimesError {
    /// It is not JSON.
    #[error("it is not valid JSON")]
    Json(#[source] serde_json::Error),
    /// It is JSON, but not an object.
    #[error("it is not a JSON object")]
    NotAnObject,
    /// A field is no text.
    #[error("{field} is not a text")]
    NotText {
        /// The field.
        field: &'static str,
    },
    /// A field is not a moment as Go writes it.
    #[error("{field} is not a timestamp such as 2006-01-02T15:04:05Z: {text:?}")]
    NotATimestamp {
        /// The field.
        field: &'static str,
        /// Its value.
        text: String,
    },
    /// A moment is out of the range of the format.
    #[error("{field} cannot be written")]
    Range {
        /// The field.
        field: &'static str,
        /// The reason.
        #[source]
        source: TimeError,
    },
}

impl ShutdownTimes {
    /// Reads the content of a state file. As in Go, a missing field and `null` are not set, and other fields are ignored.
    ///
    /// # Errors
    /// The content is not such a file; the next shutdown replaces it.
    pub fn parse(content: &[u8]) -> Result<Self, TimesError> {
        let value: Value = serde_json::from_slice(content).map_err(TimesError::Json)?;
        match value {
            Value::Null => Ok(Self::default()),
            Value::Object(fields) => {
                let moment = |field| moment(field, fields.get(field));
                Ok(Self { start: moment("startTime")?, end: moment("endTime")? })
            }
            Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                Err(TimesError::NotAnObject)
            }
        }
    }

    /// The content of the state file, byte for byte as a kubelet writes it that runs in UTC.
    ///
    /// # Errors
    /// A moment outside the years that the format can express.
    pub fn to_json(self) -> Result<String, TimesError> {
        let text = |field, moment: Option<i128>| match moment {
            None => Ok(UNSET.to_owned()),
            Some(nanos) => format_nanos(nanos).map_err(|source| TimesError::Range { field, source }),
        };
        let (start, end) = (text("startTime", self.start)?, text("endTime", self.end)?);
        Ok(format!(r#"{{"startTime":"{start}","endTime":"{end}"}}"#))
    }

    /// Start and end in whole seconds since 1970 for the metrics; 0 when not set.
    pub fn seconds(self) -> (i64, i64) {
        let seconds = |moment: Option<i128>| {
            let seconds = moment.unwrap_or(0).div_euclid(NANOS_PER_SECOND);
            i64::try_from(seconds).unwrap_or(if seconds < 0 { i64::MIN } else { i64::MAX })
        };
        (seconds(self.start), seconds(self.end))
    }

    /// Whether pods began to be ended since the boot at `boot_unix_nanos`, and this was not completed: the agent was
    /// restarted meanwhile. After a reboot such a file only shows that the time did not suffice.
    pub fn is_unfinished(self, boot_unix_nanos: i128) -> bool {
        self.end.is_none() && self.start.is_some_and(|start| start >= boot_unix_nanos)
    }
}

fn moment(field: &'static str, value: Option<&Value>) -> Result<Option<i128>, TimesError> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text == UNSET => Ok(None),
        Some(Value::String(text)) => {
            let error = || TimesError::NotATimestamp { field, text: text.clone() };
            let nanos = has_gos_form(text).then(|| parse_nanos(text).ok()).flatten();
            nanos.map(Some).ok_or_else(error)
        }
        Some(Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => {
            Err(TimesError::NotText { field })
        }
    }
}

/// Whether the text has the form of RFC 3339 that Go accepts: `T` and `Z` in upper case, all digits, and a colon in the
/// offset. Whether the numbers are a date is for the parser.
fn has_gos_form(text: &str) -> bool {
    const DATE_TIME: &str = "0000-00-00T00:00:00";
    const OFFSET: &str = "+00:00";
    let is_like = |text: &str, pattern: &str| {
        text.len() == pattern.len()
            && text.bytes().zip(pattern.bytes()).all(|(byte, expected)| match expected {
                b'0' => byte.is_ascii_digit(),
                b'+' => matches!(byte, b'+' | b'-'),
                _ => byte == expected,
            })
    };
    let Some((date_time, rest)) = text.split_at_checked(DATE_TIME.len()) else { return false };
    let zone = match rest.strip_prefix('.') {
        None => rest,
        Some(fraction) => {
            let zone = fraction.trim_start_matches(|c: char| c.is_ascii_digit());
            if zone.len() == fraction.len() {
                return false;
            }
            zone
        }
    };
    is_like(date_time, DATE_TIME) && (zone == "Z" || is_like(zone, OFFSET))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const START: i128 = 1_767_225_602_123_456_789;

    #[test]
    fn the_state_file_is_written_byte_for_byte_as_the_kubelet_does() {
        for (start, end, expected) in [
            (None, None, r#"{"startTime":"0001-01-01T00:00:00Z","endTime":"0001-01-01T00:00:00Z"}"#),
            (
                Some(START),
                None,
                r#"{"startTime":"2026-01-01T00:00:02.123456789Z","endTime":"0001-01-01T00:00:00Z"}"#,
            ),
            (
                Some(START - 456_789),
                Some(START - 123_456_789 + 30 * NANOS_PER_SECOND),
                r#"{"startTime":"2026-01-01T00:00:02.123Z","endTime":"2026-01-01T00:00:32Z"}"#,
            ),
        ] {
            let times = ShutdownTimes { start, end };
            assert_eq!(times.to_json().unwrap(), expected);
            assert_eq!(ShutdownTimes::parse(expected.as_bytes()).unwrap(), times);
        }
        assert!(ShutdownTimes { start: Some(i128::MAX), end: None }.to_json().is_err());
    }

    #[test]
    fn a_state_file_of_a_kubelet_in_any_time_zone_is_read() {
        for content in [
            r#"{"startTime":"2026-01-01T01:00:02.123456789+01:00","endTime":"0001-01-01T00:00:00Z"}"#,
            r#"{"startTime":"2025-12-31T18:30:02.123456789-05:30","endTime":null}"#,
            r#"{"startTime":"2026-01-01T00:00:02.123456789Z","later":[1]}"#,
        ] {
            let times = ShutdownTimes::parse(content.as_bytes()).unwrap();
            assert_eq!(times, ShutdownTimes { start: Some(START), end: None }, "{content}");
        }
        for content in ["{}", "null", r#"{"startTime":null}"#] {
            assert_eq!(ShutdownTimes::parse(content.as_bytes()).unwrap(), ShutdownTimes::default());
        }
    }

    #[test]
    fn a_state_file_that_go_does_not_accept_is_refused() {
        for (content, error) in [
            ("", "it is not valid JSON"),
            ("{", "it is not valid JSON"),
            ("{} x", "it is not valid JSON"),
            ("[]", "it is not a JSON object"),
            ("7", "it is not a JSON object"),
            (r#"{"startTime":7}"#, "startTime is not a text"),
            (r#"{"endTime":{}}"#, "endTime is not a text"),
        ] {
            assert_eq!(ShutdownTimes::parse(content.as_bytes()).unwrap_err().to_string(), error, "{content}");
        }
        for text in [
            "",
            "now",
            "2026-01-01",
            "2026-01-01 00:00:02Z",
            "2026-01-01t00:00:02z",
            "2026-01-01T00:00:02",
            "2026-01-01T00:00:02.Z",
            "2026-01-01T00:00:02+0100",
            "2026-01-01T00:00:02+01:00[Europe/Berlin]",
            "2026-02-30T00:00:02Z",
            "2026-01-01T00:00:0äZ",
        ] {
            let content = format!(r#"{{"endTime":"{text}"}}"#);
            let error = ShutdownTimes::parse(content.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with("endTime is not a timestamp"), "{text}: {error}");
        }
    }

    #[test]
    fn metrics_show_whole_seconds_and_zero_for_what_is_not_set() {
        let times = ShutdownTimes { start: Some(START), end: None };
        assert_eq!(times.seconds(), (1_767_225_602, 0));
        assert_eq!(ShutdownTimes { end: Some(START + NANOS_PER_SECOND), ..times }.seconds().1, 1_767_225_603);
    }

    #[test]
    fn a_shutdown_is_unfinished_only_within_the_same_boot() {
        let times = ShutdownTimes { start: Some(START), end: None };
        for (times, boot, unfinished) in [
            (times, START - 1, true),
            (times, START, true),
            (times, START + 1, false),
            (ShutdownTimes { end: Some(START), ..times }, START - 1, false),
            (ShutdownTimes::default(), i128::MIN, false),
        ] {
            assert_eq!(times.is_unfinished(boot), unfinished, "{times:?} {boot}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            start in prop::option::of(0i128..4_000_000_000_000_000_000),
            end in prop::option::of(0i128..4_000_000_000_000_000_000),
        ) {
            let times = ShutdownTimes { start, end };
            let content = times.to_json().unwrap();
            prop_assert_eq!(ShutdownTimes::parse(content.as_bytes()).unwrap(), times);
        }
    }
}
