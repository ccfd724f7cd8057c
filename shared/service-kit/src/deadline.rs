use std::time::Duration;

use tokio::time::Instant;
use tonic::metadata::MetadataMap;

/// Part of the caller's deadline that is reserved for the response, so that the caller gets the reason and not a timeout,
/// also on a busy machine.
const ANSWER_SLACK: Duration = Duration::from_millis(500);
/// The deadline for callers that set none.
const DAY: Duration = Duration::from_secs(86_400);

/// When a call has to be answered: the caller's deadline (`grpc-timeout`) less the time for the response, at most a day
/// from now.
pub fn answer_by(metadata: &MetadataMap) -> Instant {
    Instant::now() + time_to_answer(metadata)
}

fn time_to_answer(metadata: &MetadataMap) -> Duration {
    let given = metadata.get("grpc-timeout").and_then(|value| parse_timeout(value.to_str().ok()?));
    given.map_or(DAY, |d| d.saturating_sub(ANSWER_SLACK.min(d / 4)).min(DAY))
}

/// The `grpc-timeout` header: up to eight digits and a unit.
pub(crate) fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let amount: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(amount.saturating_mul(3600))),
        "M" => Some(Duration::from_secs(amount.saturating_mul(60))),
        "S" => Some(Duration::from_secs(amount)),
        "m" => Some(Duration::from_millis(amount)),
        "u" => Some(Duration::from_micros(amount)),
        "n" => Some(Duration::from_nanos(amount)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_units_of_grpc_timeout_are_understood() {
        assert_eq!(parse_timeout("250m"), Some(Duration::from_millis(250)));
        assert_eq!(parse_timeout("2M"), Some(Duration::from_secs(120)));
        assert_eq!(parse_timeout(""), None);
        assert_eq!(parse_timeout("5x"), None);
    }

    #[test]
    fn an_answer_leaves_before_the_callers_deadline_and_within_a_day() {
        let left = |timeout: Option<&str>| {
            let mut metadata = MetadataMap::new();
            if let Some(timeout) = timeout {
                metadata.insert("grpc-timeout", timeout.parse().unwrap());
            }
            time_to_answer(&metadata)
        };
        assert_eq!(left(Some("10S")), Duration::from_millis(9500));
        assert_eq!(left(Some("100m")), Duration::from_millis(75));
        for without in [None, Some("99999999H"), Some("soon")] {
            assert_eq!(left(without), DAY, "{without:?}");
        }
    }
}
