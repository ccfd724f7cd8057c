//! The line formats of container logs (runtime-and-resources.md §7.4): CRI's `<RFC 3339 time> <stdout|stderr> <tags>
//! <content>\n`, and `{"log":"<content>\n","stream":"<stdout|stderr>","time":"<RFC 3339 time>"}` of Docker's json-file
//! driver.

use std::borrow::Cow;

use serde::Deserialize;

/// Length in bytes of a time up to its second: `2026-01-02T03:04:05`.
const SECOND: usize = 19;

/// One line of a log file. The whole of a line in neither format is content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine<'a> {
    /// The time as the runtime wrote it; empty if the line has none.
    pub timestamp: &'a [u8],
    /// `stdout`, `stderr` or empty.
    pub stream: &'a [u8],
    /// The runtime has split a longer line here: the content does not end with a newline.
    pub partial: bool,
    /// The container's output, without the newline.
    pub content: Cow<'a, [u8]>,
}

/// Parses a line of a log file; `line` has no trailing newline.
pub fn parse(line: &[u8]) -> LogLine<'_> {
    let whole = || LogLine { timestamp: b"", stream: b"", partial: false, content: Cow::Borrowed(line) };
    // Content of a CRI line may look like Docker's format, but a CRI line starts with a digit.
    docker(line).or_else(|| cri(line)).unwrap_or_else(whole)
}

fn is_stream(name: &[u8]) -> bool {
    name == b"stdout" || name == b"stderr"
}

fn cri(line: &[u8]) -> Option<LogLine<'_>> {
    let (timestamp, rest) = split(line)?;
    let (stream, rest) = split(rest).filter(|(stream, _)| is_stream(stream))?;
    // An empty line of the container has nothing after the tags.
    let (tags, content) = split(rest).unwrap_or((rest, b""));
    let first = tags.split(|b| *b == b':').next().unwrap_or(tags);
    Some(LogLine { timestamp, stream, partial: first == b"P", content: Cow::Borrowed(content) })
}

/// A line in Docker's format; other members, such as `attrs`, are ignored. Time and stream are never escaped.
#[derive(Deserialize)]
struct DockerLine<'a> {
    #[serde(borrow)]
    log: Cow<'a, str>,
    stream: &'a str,
    time: &'a str,
}

/// Parses a line in Docker's format. Docker splits a long line into pieces; only the last piece ends with a newline.
fn docker(line: &[u8]) -> Option<LogLine<'_>> {
    if line.first() != Some(&b'{') {
        return None;
    }
    let DockerLine { log, stream, time } = serde_json::from_slice(line).ok()?;
    if !is_stream(stream.as_bytes()) || split_time(time.as_bytes()).is_none() {
        return None;
    }
    let partial = !log.ends_with('\n');
    let content = match log {
        Cow::Borrowed(text) => Cow::Borrowed(text.strip_suffix('\n').unwrap_or(text).as_bytes()),
        Cow::Owned(mut text) => {
            text.truncate(text.len() - usize::from(!partial));
            Cow::Owned(text.into_bytes())
        }
    };
    Some(LogLine { timestamp: time.as_bytes(), stream: stream.as_bytes(), partial, content })
}

fn split(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = text.iter().position(|b| *b == b' ')?;
    Some((&text[..at], &text[at + 1..]))
}

/// The offset in `tail`, the end of a file, at which the last `lines` lines begin. `None` if `tail` holds fewer lines,
/// so that more of the file has to be read.
pub fn tail_start(tail: &[u8], lines: usize) -> Option<usize> {
    if lines == 0 {
        return Some(tail.len());
    }
    let mut left = lines;
    line_start_from_end(tail.strip_suffix(b"\n").unwrap_or(tail), &mut left)
}

/// Counts `left` down by one for each newline of `block`, from its end. Returns the offset behind the newline that
/// brings it to 0; `None` if the search has to continue in the previous block.
pub fn line_start_from_end(block: &[u8], left: &mut usize) -> Option<usize> {
    for (i, byte) in block.iter().enumerate().rev() {
        if *byte == b'\n' {
            *left -= 1;
            if *left == 0 {
                return Some(i + 1);
            }
        }
    }
    None
}

/// Appends a line to `out` as a reader gets it. `continued` says that the previous line was partial: its continuation
/// gets no timestamp.
pub fn render(line: &LogLine<'_>, timestamps: bool, continued: bool, out: &mut Vec<u8>) {
    if timestamps && !continued && !line.timestamp.is_empty() {
        fixed_width(line.timestamp, out);
        out.push(b' ');
    }
    out.extend_from_slice(&line.content);
    if !line.partial {
        out.push(b'\n');
    }
}

/// Appends a time with nine fractional digits, because runtimes omit trailing zeros; any other text is appended as is.
fn fixed_width(timestamp: &[u8], out: &mut Vec<u8>) {
    let Some((second, fraction, zone)) = split_time(timestamp) else {
        out.extend_from_slice(timestamp);
        return;
    };
    out.extend_from_slice(second);
    out.push(b'.');
    out.extend_from_slice(fraction);
    out.extend(std::iter::repeat_n(b'0', 9 - fraction.len()));
    out.extend_from_slice(zone);
}

/// Splits a time into the part up to its second, the fractional digits (at most nine) and the zone; `None` if it is not
/// in the format that runtimes write.
fn split_time(text: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (second, rest) = text.split_at(text.len().min(SECOND));
    let fraction = rest.strip_prefix(b".").unwrap_or_default();
    let digits = fraction.iter().take_while(|b| b.is_ascii_digit()).count();
    let zone = if digits == 0 { rest } else { &fraction[digits..] };
    let is_zone = zone == b"Z" || (zone.len() == 6 && (zone[0] == b'+' || zone[0] == b'-'));
    // A time without hyphens and colons has its parts at other offsets.
    let is_second = second.len() == SECOND && second[10] == b'T' && second[16] == b':';
    (is_second && digits <= 9 && is_zone).then(|| (second, &fraction[..digits], zone))
}

/// The end of a log, for a termination message: at most `max_lines` lines and `max_bytes` bytes of content.
pub fn termination_tail(file: &[u8], max_lines: usize, max_bytes: usize) -> String {
    let start = tail_start(file, max_lines).unwrap_or(0);
    let mut out = Vec::new();
    for line in file[start..].split_inclusive(|b| *b == b'\n') {
        render(&parse(line.strip_suffix(b"\n").unwrap_or(line)), false, false, &mut out);
    }
    // A line in Docker's format may contain further newlines, although Docker itself does not write them.
    let lines = tail_start(&out, max_lines).unwrap_or(0);
    let cut = out.len().saturating_sub(max_bytes).max(lines);
    String::from_utf8_lossy(&out[cut..]).into_owned()
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn cri_log_line_is_parsed() {
        let line = parse(b"2026-01-02T03:04:05.000000006Z stderr P some words");
        assert_eq!(line.timestamp, b"2026-01-02T03:04:05.000000006Z");
        assert_eq!(line.stream, b"stderr");
        assert!(line.partial);
        assert_eq!(&*line.content, b"some words");
    }

    #[test]
    fn empty_log_line_has_no_content() {
        let line = parse(b"2026-01-02T03:04:05Z stdout F ");
        assert_eq!(&*line.content, b"");
        assert!(!line.partial);
    }

    #[test]
    fn line_in_no_known_format_is_content() {
        assert_eq!(&*parse(b"no log line").content, b"no log line");
        assert_eq!(&*parse(b"").content, b"");
    }

    #[test]
    fn docker_log_line_is_parsed() {
        let members =
            |log: &str| format!(r#"{{"log":"{log}","stream":"stderr","time":"2026-01-02T03:04:05.6Z"}}"#);
        for (log, content, partial) in [
            (r"some words\n", "some words", false),
            (r"half a li", "half a li", true),
            (r"\n", "", false),
            ("", "", true),
            (r"two\n\n", "two\n", false),
            (r"say stdout P half\n", "say stdout P half", false),
            (r#"\u003ca \"b\"\u003e\tc\\n\n"#, "<a \"b\">\tc\\n", false),
            (r"\u00e4ä \ud83d\ude00\r\n", "ää 😀\r", false),
        ] {
            let text = members(log);
            let line = parse(text.as_bytes());
            assert_eq!(std::str::from_utf8(&line.content).unwrap(), content, "{text}");
            assert_eq!(line.partial, partial, "{text}");
            assert_eq!(
                (line.timestamp, line.stream),
                (&b"2026-01-02T03:04:05.6Z"[..], &b"stderr"[..]),
                "{text}"
            );
        }
        let other =
            r#" { "time":"2026-01-02T03:04:05+01:00", "attrs":{"tag":"t"},"stream":"stdout", "log":"x\n" } "#;
        assert_eq!(&*parse(other.trim_start().as_bytes()).content, b"x");
    }

    #[test]
    fn invalid_docker_log_line_is_content() {
        for text in [
            r#"{"log":"x\n","stream":"stdout"}"#,
            r#"{"stream":"stdout","time":"2026-01-02T03:04:05Z"}"#,
            r#"{"log":"x\n","stream":"stdin","time":"2026-01-02T03:04:05Z"}"#,
            r#"{"log":"x\n","stream":"stdout","time":"yesterday"}"#,
            r#"{"log":1,"stream":"stdout","time":"2026-01-02T03:04:05Z"}"#,
            r#"{"log":"x\n","stream":"stdout","time":"2026-01-02T03:04:05Z"} and more"#,
            r#"{"log":"x\n","stream":"stdout","time":"2026-01-02T03:04:05Z""#,
            r#"{"log":"\ud800\n","stream":"stdout","time":"2026-01-02T03:04:05Z"}"#,
            r#"["log"]"#,
            "{}",
            "{",
        ] {
            let line = parse(text.as_bytes());
            assert_eq!(&*line.content, text.as_bytes());
            assert!(line.timestamp.is_empty() && line.stream.is_empty() && !line.partial, "{text}");
        }
        // Content in Docker's format within a CRI line stays content.
        let own = r#"{"log":"x\n","stream":"stdout","time":"2026-01-02T03:04:05Z"}"#;
        let written = format!("2026-01-02T03:04:05Z stdout F {own}");
        assert_eq!(&*parse(written.as_bytes()).content, own.as_bytes());
    }

    #[test]
    fn pieces_of_a_docker_log_line_get_one_timestamp() {
        let line = |log: &str, second: u8| {
            format!(
                "{{\"log\":\"{log}\",\"stream\":\"stdout\",\"time\":\"2026-01-02T03:04:0{second}.5Z\"}}\n"
            )
        };
        let file = [line("one\\n", 1), line("tw", 2), line("o\\n", 3), line("three\\n", 4)].concat();
        let (mut out, mut continued) = (Vec::new(), false);
        for line in file.lines().map(|line| parse(line.as_bytes())) {
            render(&line, true, continued, &mut out);
            continued = line.partial;
        }
        let shown = "2026-01-02T03:04:01.500000000Z one\n2026-01-02T03:04:02.500000000Z two\n\
                     2026-01-02T03:04:04.500000000Z three\n";
        assert_eq!(String::from_utf8(out).unwrap(), shown);
        assert_eq!(termination_tail(file.as_bytes(), 3, 100), "two\nthree\n");
        assert_eq!(termination_tail(line("a\\nb\\n", 1).as_bytes(), 1, 100), "b\n");
    }

    #[test]
    fn partial_log_line_and_its_continuation_get_one_timestamp() {
        let mut out = Vec::new();
        render(&parse(b"T stdout P ab"), true, false, &mut out);
        render(&parse(b"T stdout F cd"), true, true, &mut out);
        assert_eq!(out, b"T abcd\n");
    }

    #[test]
    fn timestamps_are_shown_with_nine_fractional_digits() {
        for (written, shown) in [
            ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05.000000000Z"),
            ("2026-01-02T03:04:05.12Z", "2026-01-02T03:04:05.120000000Z"),
            ("2026-01-02T03:04:05.123456789+02:00", "2026-01-02T03:04:05.123456789+02:00"),
            ("2026-01-02T03:04:05-05:30", "2026-01-02T03:04:05.000000000-05:30"),
            ("2026-01-02T03:04:05.5+05:30", "2026-01-02T03:04:05.500000000+05:30"),
            ("2026-01-02T03:04:05.5x05:30", "2026-01-02T03:04:05.5x05:30"),
            ("2026-01-02T03:04:05.Z", "2026-01-02T03:04:05.Z"),
            ("2026-01-02T03:04:05.1234567890Z", "2026-01-02T03:04:05.1234567890Z"),
            ("2026-01-02T03:04:05", "2026-01-02T03:04:05"),
            ("20260102T030405.123Z", "20260102T030405.123Z"),
            ("T", "T"),
        ] {
            let mut out = Vec::new();
            render(&parse(format!("{written} stdout F x").as_bytes()), true, false, &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), format!("{shown} x\n"));
        }
    }

    #[test]
    fn tail_starts_after_the_previous_newline() {
        let file = b"a\nb\nc\n";
        assert_eq!(tail_start(file, 1), Some(4));
        assert_eq!(tail_start(file, 2), Some(2));
        assert_eq!(tail_start(file, 3), None);
        assert_eq!(tail_start(file, 0), Some(6));
        assert_eq!(tail_start(b"a\nb", 1), Some(2));
    }

    #[test]
    fn termination_message_from_the_log_keeps_its_end() {
        let file = b"T stdout F one\nT stdout F two\n";
        assert_eq!(termination_tail(file, 1, 100), "two\n");
        assert_eq!(termination_tail(file, 80, 3), "wo\n");
    }

    const LINE: &[u8] = b"2026-01-02T03:04:05.5Z stderr P:x some\nwords\n";

    /// Random bytes, or a CRI line with some bytes replaced.
    fn any_bytes() -> impl Strategy<Value = Vec<u8>> {
        let graft = proptest::collection::vec(any::<u8>(), 0..4);
        let grafted = (0..LINE.len(), 0usize..4, graft).prop_map(|(at, cut, graft)| {
            let mut bytes = LINE.to_vec();
            bytes.splice(at..(at + cut).min(LINE.len()), graft);
            bytes
        });
        prop_oneof![proptest::collection::vec(any::<u8>(), 0..200), grafted]
    }

    #[test]
    fn parsing_arbitrary_log_bytes_never_panics() {
        let reached = &Reached::default();
        proptest!(ProptestConfig::with_cases(1024), |(bytes in any_bytes(), n in 0usize..5)| {
            let line = parse(&bytes);
            let mut out = Vec::new();
            render(&line, true, false, &mut out);
            let tail = tail_start(&bytes, n);
            reached.case([
                ("content as a whole", line.timestamp.is_empty()),
                ("a line of the format", !line.timestamp.is_empty()),
                ("a partial line", line.partial),
                ("a time with nine digits", out.starts_with(b"2026-01-02T03:04:05.500000000Z ")),
                ("another time", !line.timestamp.is_empty() && out.starts_with(line.timestamp)),
                ("as many lines as requested", n > 0 && tail.is_some()),
                ("fewer lines", tail.is_none()),
            ]);
        });
        // The rarest: "as many lines as requested", in one case of 8.
        reached.assert_each();
    }
}
