//! Durations as Go writes them: `20s`, `1m30s`, `1.5h`.

use std::time::Duration;

/// Parses the text of a Go duration; `None` when it is none, is negative, or does not fit 64 bits of nanoseconds.
pub fn parse_go_duration(text: &str) -> Option<Duration> {
    let text = text.strip_prefix('+').unwrap_or(text);
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let (mut rest, mut seconds) = (text, 0.0);
    while !rest.is_empty() {
        let (number, tail) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit() && c != '.')?);
        let end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        seconds += number.parse::<f64>().ok()? * unit_seconds(unit)?;
        rest = tail;
    }
    let duration = Duration::try_from_secs_f64(seconds).ok()?;
    (!text.is_empty() && i64::try_from(duration.as_nanos()).is_ok()).then_some(duration)
}

fn unit_seconds(unit: &str) -> Option<f64> {
    Some(match unit {
        "ns" => 1e-9,
        // Both the micro sign and the Greek letter, as in Go.
        "us" | "\u{b5}s" | "\u{3bc}s" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_writes_them() {
        for (text, milliseconds) in [
            ("0", Some(0)),
            ("0s", Some(0)),
            ("12h", Some(43_200_000)),
            ("6h0m0s", Some(21_600_000)),
            ("+1m30s", Some(90_000)),
            ("1.5h", Some(5_400_000)),
            (".5s", Some(500)),
            ("100ms", Some(100)),
            ("2000\u{b5}s", Some(2)),
            ("", None),
            ("+", None),
            ("5", None),
            ("s", None),
            (".s", None),
            ("1..5s", None),
            ("1d", None),
            ("-1m", None),
            ("9999999h", None),
        ] {
            assert_eq!(parse_go_duration(text), milliseconds.map(Duration::from_millis), "{text:?}");
        }
    }
}
