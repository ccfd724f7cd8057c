//! RFC 3339 text of the API from and to numbers. There is no `now` here: callers bring the moment.

use jiff::Timestamp;
use thiserror::Error;

/// A timestamp that cannot be read or written.
#[derive(Debug, Error)]
pub enum TimeError {
    /// The text is no RFC 3339 timestamp.
    #[error("{text:?} is not an RFC 3339 timestamp")]
    Parse {
        /// The text as given.
        text: String,
        /// What the parser found.
        #[source]
        source: jiff::Error,
    },
    /// The number lies outside the years -9999 to 9999.
    #[error("{value} {unit} since the epoch is out of range")]
    Range {
        /// The number as given.
        value: i128,
        /// `seconds` or `nanoseconds`.
        unit: &'static str,
        /// What the calendar found.
        #[source]
        source: jiff::Error,
    },
}

/// Formats seconds since the epoch as `metav1.Time` does: UTC, `Z`, no fraction.
pub fn format_seconds(seconds: i64) -> Result<String, TimeError> {
    let at = Timestamp::from_second(seconds).map_err(|source| TimeError::Range {
        value: i128::from(seconds),
        unit: "seconds",
        source,
    })?;
    Ok(format!("{at:.0}"))
}

/// Formats nanoseconds since the epoch with as many digits of fraction as needed (annotation
/// `kubernetes.io/config.seen`, log lines), UTC with `Z`.
pub fn format_nanos(nanos: i128) -> Result<String, TimeError> {
    let at = Timestamp::from_nanosecond(nanos).map_err(|source| TimeError::Range {
        value: nanos,
        unit: "nanoseconds",
        source,
    })?;
    Ok(at.to_string())
}

/// Formats nanoseconds since the epoch with exactly six digits of fraction, as `metav1.MicroTime` does.
pub fn format_micros(nanos: i128) -> Result<String, TimeError> {
    let at = Timestamp::from_nanosecond(nanos).map_err(|source| TimeError::Range {
        value: nanos,
        unit: "nanoseconds",
        source,
    })?;
    Ok(format!("{at:.6}"))
}

/// Parses an RFC 3339 timestamp with any offset into nanoseconds since the epoch.
pub fn parse_nanos(text: &str) -> Result<i128, TimeError> {
    let at: Timestamp = text.parse().map_err(|source| TimeError::Parse { text: text.to_owned(), source })?;
    Ok(at.as_nanosecond())
}

/// Parses an RFC 3339 timestamp with any offset into whole seconds since the epoch, cut towards the past.
pub fn parse_seconds(text: &str) -> Result<i64, TimeError> {
    let nanos = parse_nanos(text)?;
    Ok(nanos.div_euclid(1_000_000_000) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_carry_no_fraction() {
        assert_eq!(format_seconds(0).unwrap(), "1970-01-01T00:00:00Z");
        assert_eq!(format_seconds(1_700_000_000).unwrap(), "2023-11-14T22:13:20Z");
    }

    #[test]
    fn nanos_and_micros_carry_theirs() {
        assert_eq!(format_nanos(1_700_000_000_000_000_001).unwrap(), "2023-11-14T22:13:20.000000001Z");
        assert_eq!(format_micros(1_700_000_000_000_000_000).unwrap(), "2023-11-14T22:13:20.000000Z");
    }

    #[test]
    fn offsets_are_understood() {
        assert_eq!(parse_seconds("2023-11-14T23:13:20+01:00").unwrap(), 1_700_000_000);
        assert_eq!(parse_nanos("2023-11-14T22:13:20.5Z").unwrap(), 1_700_000_000_500_000_000);
    }

    #[test]
    fn errors_name_the_text() {
        let error = parse_seconds("yesterday").unwrap_err();
        assert!(error.to_string().contains("yesterday"));
    }
}
