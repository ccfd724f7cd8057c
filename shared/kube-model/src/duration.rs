//! Durations in Go's format, as in configuration and responses: `20s`, `1m30s`, `1.5h`.

use std::time::Duration;

/// Nanoseconds of a unit of `time.ParseDuration`.
fn unit_nanos(unit: &str) -> Option<i128> {
    Some(match unit {
        "ns" => 1,
        // Both the micro sign and the Greek letter, as in Go.
        "us" | "\u{b5}s" | "\u{3bc}s" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return None,
    })
}

/// Parses a Go duration; `None` when it is invalid, negative, or does not fit 64 bits of nanoseconds.
///
/// Negative durations are legal in Go, but no field of ours has a meaning for them.
pub fn parse_go_duration(text: &str) -> Option<Duration> {
    let text = text.strip_prefix('+').unwrap_or(text);
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text;
    let mut nanos: i128 = 0;
    while !rest.is_empty() {
        let number_end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at(number_end);
        let unit_end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_end);
        nanos = nanos.checked_add(part(number, unit_nanos(unit)?)?)?;
        rest = tail;
    }
    if text.is_empty() || nanos > i128::from(i64::MAX) {
        return None;
    }
    u64::try_from(nanos).ok().map(Duration::from_nanos)
}

/// `number` (digits with at most one point) times `unit` nanoseconds, what is finer cut off.
fn part(number: &str, unit: i128) -> Option<i128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') || whole.len() > 20 {
        return None;
    }
    let whole: i128 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let mut nanos = whole.checked_mul(unit)?;
    let mut scale = unit;
    for digit in fraction.bytes() {
        scale /= 10;
        nanos += i128::from(digit - b'0') * scale;
    }
    Some(nanos)
}

/// A duration as Go prints it: `1h0m0s`, `1m30s`, `1.5s`, `100ms`, `0s`.
pub fn format_go_duration(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    if nanos == 0 {
        return "0s".to_owned();
    }
    for (unit, name) in [(1_000, "ns"), (1_000_000, "\u{b5}s"), (1_000_000_000, "ms")] {
        if nanos < unit {
            return format!("{}{name}", decimal(nanos, unit / 1000));
        }
    }
    let seconds = decimal(nanos % 60_000_000_000, 1_000_000_000);
    match (duration.as_secs() / 3600, duration.as_secs() / 60 % 60) {
        (0, 0) => format!("{seconds}s"),
        (0, minutes) => format!("{minutes}m{seconds}s"),
        (hours, minutes) => format!("{hours}h{minutes}m{seconds}s"),
    }
}

/// `amount` divided by `unit`, a power of ten, without zeros at its end.
fn decimal(amount: u128, unit: u128) -> String {
    let (whole, rest) = (amount / unit, amount % unit);
    if rest == 0 {
        return whole.to_string();
    }
    let digits = unit.ilog10() as usize;
    let fraction = format!("{rest:0digits$}");
    format!("{whole}.{}", fraction.trim_end_matches('0'))
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn durations_are_read_as_go_writes_them() {
        for (text, millis) in [
            ("0", 0),
            ("20s", 20_000),
            ("1m30s", 90_000),
            ("1h", 3_600_000),
            ("1.5h", 5_400_000),
            ("100ms", 100),
            (".5s", 500),
            ("+2s", 2_000),
            ("1h1m1s1ms", 3_661_001),
            ("0s", 0),
            ("12h", 43_200_000),
            ("6h0m0s", 21_600_000),
            ("+1m30s", 90_000),
            ("2000\u{b5}s", 2),
            ("2000\u{3bc}s", 2),
        ] {
            assert_eq!(parse_go_duration(text), Some(Duration::from_millis(millis)), "{text}");
        }
        assert_eq!(parse_go_duration("3us"), Some(Duration::from_micros(3)));
        assert_eq!(parse_go_duration("7ns"), Some(Duration::from_nanos(7)));
    }

    #[test]
    fn invalid_durations_are_refused() {
        for text in [
            "",
            "+",
            "20",
            "s",
            "1x",
            "1d",
            "-1s",
            "-1m",
            "1.2.3s",
            "1..5s",
            ".s",
            "1 s",
            "99999999999999999999999h",
            "9999999999h",
            "9999999h",
        ] {
            assert_eq!(parse_go_duration(text), None, "{text:?}");
        }
    }

    #[test]
    fn the_longest_duration_of_go_is_read_and_a_nanosecond_more_is_refused() {
        assert_eq!(
            parse_go_duration("9223372036854775807ns"),
            Some(Duration::from_nanos(i64::MAX.unsigned_abs()))
        );
        assert_eq!(parse_go_duration("9223372036854775808ns"), None);
        assert_eq!(parse_go_duration("9223372036854775809ns"), None);
    }

    #[test]
    fn a_number_of_twenty_digits_is_read_and_a_longer_one_refused() {
        assert_eq!(parse_go_duration(&format!("{}1s", "0".repeat(19))), Some(Duration::from_secs(1)));
        assert_eq!(parse_go_duration(&format!("{}1s", "0".repeat(20))), None);
        assert_eq!(parse_go_duration(&format!("{}1s", "0".repeat(21))), None);
    }

    #[test]
    fn a_whole_unit_is_written_in_that_unit() {
        for (nanos, text) in [
            (999, "999ns"),
            (1_000, "1\u{b5}s"),
            (999_999, "999.999\u{b5}s"),
            (1_000_000, "1ms"),
            (1_000_000_000, "1s"),
            (60_000_000_000, "1m0s"),
            (3_600_000_000_000, "1h0m0s"),
        ] {
            assert_eq!(format_go_duration(Duration::from_nanos(nanos)), text);
        }
    }

    #[test]
    fn any_duration_text_is_parsed_or_refused_without_panic() {
        let reached = &Reached::default();
        // A random text is hardly ever a duration.
        let text = prop_oneof![
            ".{0,24}",
            "[+]?([0-9]{1,2}([.][0-9]{1,2})?(h|m|s|ms|us|µs|ns|x)){1,3}",
            "[+]?0{0,2}[.]?0{0,2}(h|s|us)?"
        ];
        proptest!(ProptestConfig::with_cases(1024), |(text in text)| {
            let parsed = parse_go_duration(&text);
            reached.case([
                ("no time", parsed == Some(Duration::ZERO)),
                ("some time", parsed.is_some_and(|time| time > Duration::ZERO)),
                ("no duration", parsed.is_none()),
            ]);
        });
        // The rarest: "no time", in one case of 6.
        reached.assert_each();
    }

    #[test]
    fn hours_minutes_and_seconds_add_up() {
        let reached = &Reached::default();
        let hours = prop_oneof![Just(0), 1u64..1000];
        let sixtieths = || prop_oneof![Just(0), 1u64..60];
        proptest!(ProptestConfig::with_cases(512), |(h in hours, m in sixtieths(), s in sixtieths())| {
            let parsed = parse_go_duration(&format!("{h}h{m}m{s}s"));
            prop_assert_eq!(parsed, Some(Duration::from_secs(h * 3600 + m * 60 + s)));
            reached.case([
                ("no part counts", h + m + s == 0),
                ("each part counts", h * m * s > 0),
                ("hours alone", h > 0 && m + s == 0),
            ]);
        });
        // The rarest: "each part counts", in one case of 9.
        reached.assert_each();
    }

    #[test]
    fn durations_are_printed_as_go_prints_them() {
        for (text, printed) in [
            ("0", "0s"),
            ("1ns", "1ns"),
            ("1500ns", "1.5\u{b5}s"),
            ("100ms", "100ms"),
            ("1500ms", "1.5s"),
            ("20s", "20s"),
            ("90s", "1m30s"),
            ("2m", "2m0s"),
            ("4h", "4h0m0s"),
            ("1h1ms", "1h0m0.001s"),
        ] {
            let duration = parse_go_duration(text).unwrap();
            assert_eq!(format_go_duration(duration), printed);
            assert_eq!(parse_go_duration(printed), Some(duration));
        }
    }
}
