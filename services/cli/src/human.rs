//! Human-readable durations, sizes and times.

use std::time::Duration;

/// Nanoseconds in a second, for times on the wire.
pub(crate) const SECOND: i64 = 1_000_000_000;

/// An age in at most two units, in the format of `kubectl`: `5s`, `3m20s`, `47h`, `5d3h`, `2y40d`.
pub(crate) fn age(nanos: i64) -> String {
    let seconds = nanos.div_euclid(SECOND);
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let two = |a: i64, unit_a: char, b: i64, unit_b: char| {
        if b == 0 { format!("{a}{unit_a}") } else { format!("{a}{unit_a}{b}{unit_b}") }
    };
    if seconds < -1 {
        "<invalid>".into()
    } else if seconds < 120 {
        format!("{}s", seconds.max(0))
    } else if minutes < 10 {
        two(minutes, 'm', seconds % 60, 's')
    } else if minutes < 180 {
        format!("{minutes}m")
    } else if hours < 8 {
        two(hours, 'h', minutes % 60, 'm')
    } else if hours < 48 {
        format!("{hours}h")
    } else if days < 8 {
        two(days, 'd', hours % 24, 'h')
    } else if days < 2 * 365 {
        format!("{days}d")
    } else if days < 8 * 365 {
        two(days / 365, 'y', days % 365, 'd')
    } else {
        format!("{}y", days / 365)
    }
}

/// The age of `then`; `<unknown>` when it is 0.
pub(crate) fn since(then: i64, now: i64) -> String {
    if then == 0 { "<unknown>".into() } else { age(now - then) }
}

/// The time until `then`: `in 12s`, `now`, or empty for 0.
pub(crate) fn until(then: i64, now: i64) -> String {
    if then == 0 {
        String::new()
    } else if then <= now {
        "now".into()
    } else {
        // Round up, to avoid "in 0s".
        format!("in {}", age((then - now + SECOND - 1) / SECOND * SECOND))
    }
}

/// RFC 3339 of a time on the wire, in UTC and whole seconds; `None` for 0.
pub(crate) fn rfc3339(nanos: i64) -> Option<String> {
    if nanos == 0 {
        return None;
    }
    keelson_kube_model::time::format_seconds(nanos.div_euclid(SECOND)).ok()
}

/// An RFC 3339 time as nanoseconds since 1970; 0 when it is absent or invalid.
pub(crate) fn nanos_of(text: Option<&str>) -> i64 {
    text.and_then(|t| keelson_kube_model::time::parse_nanos(t).ok())
        .and_then(|n| i64::try_from(n).ok())
        .unwrap_or(0)
}

/// KiB as MiB with one digit.
pub(crate) fn mebibytes(kib: u64) -> String {
    format!("{}.{}Mi", kib / 1024, kib % 1024 * 10 / 1024)
}

/// Parses a duration: `500ms`, `5s`, `1m30s`, `2h`, or plain seconds.
///
/// # Errors
/// A message that names the accepted formats.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let invalid = || format!("{text:?} is not a duration; write for example 500ms, 5s, 1m30s or 2h");
    if let Ok(seconds) = text.parse::<u64>() {
        return Ok(Duration::from_secs(seconds));
    }
    let mut rest = text;
    let mut total = 0u64;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(invalid)?;
        let amount: u64 = rest[..digits].parse().map_err(|_| invalid())?;
        rest = &rest[digits..];
        let unit_end = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let unit = match &rest[..unit_end] {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(invalid()),
        };
        total = amount.checked_mul(unit).and_then(|ms| total.checked_add(ms)).ok_or_else(invalid)?;
        rest = &rest[unit_end..];
    }
    if text.is_empty() { Err(invalid()) } else { Ok(Duration::from_millis(total)) }
}

/// Parses a refresh interval like [`parse_duration`], at least 100 ms.
///
/// # Errors
/// As [`parse_duration`]; or the interval is too short.
pub(crate) fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = parse_duration(text)?;
    if interval < Duration::from_millis(100) {
        Err("the shortest interval is 100ms".into())
    } else {
        Ok(interval)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_at_most_two_units() {
        let cases = [
            (0, "0s"),
            (-1, "0s"),
            (-5, "<invalid>"),
            (119, "119s"),
            (120, "2m"),
            (200, "3m20s"),
            (600, "10m"),
            (179 * 60 + 59, "179m"),
            (3 * 3600, "3h"),
            (3 * 3600 + 300, "3h5m"),
            (47 * 3600, "47h"),
            (48 * 3600, "2d"),
            (5 * 86_400 + 3 * 3600, "5d3h"),
            (8 * 86_400, "8d"),
            (729 * 86_400, "729d"),
            (770 * 86_400, "2y40d"),
            (3650 * 86_400, "10y"),
        ];
        for (seconds, text) in cases {
            assert_eq!(age(seconds * SECOND), text, "{seconds}");
        }
    }

    #[test]
    fn time_until_a_retry_is_rounded_up() {
        assert_eq!(until(0, 5), "");
        assert_eq!(until(4, 5), "now");
        assert_eq!(until(SECOND + 1, 0), "in 2s");
    }

    #[test]
    fn durations_are_parsed_with_units() {
        let ms = |text| parse_duration(text).map(|d| d.as_millis());
        assert_eq!(ms("5"), Ok(5000));
        assert_eq!(ms("500ms"), Ok(500));
        assert_eq!(ms("1m30s"), Ok(90_000));
        assert_eq!(ms("2h"), Ok(7_200_000));
        for wrong in ["", "s", "5x", "1m30", "-5s", "99999999999999999999s"] {
            assert!(parse_duration(wrong).unwrap_err().contains("is not a duration"), "{wrong}");
        }
        assert_eq!(parse_interval("100ms"), Ok(Duration::from_millis(100)));
        assert!(parse_interval("99ms").is_err() && parse_interval("x").is_err());
    }

    #[test]
    fn sizes_are_shown_in_mebibytes() {
        assert_eq!(mebibytes(0), "0.0Mi");
        assert_eq!(mebibytes(5427), "5.2Mi");
    }
}
