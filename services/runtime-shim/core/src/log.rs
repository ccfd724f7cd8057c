//! The lines of container logs (runtime-and-resources.md §7.4): `<RFC 3339 time> <stdout|stderr> <tags> <content>\n` of CRI,
//! and `{"log":"<content>\n","stream":"<stdout|stderr>","time":"<RFC 3339 time>"}` of Docker's json-file driver.

use std::borrow::Cow;

use serde::Deserialize;

/// Bytes of a time up to its second: `2026-01-02T03:04:05`.
const SECOND: usize = 19;

/// One line of a log file. A line of neither format is content as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine<'a> {
    /// As the runtime wrote it; empty when the line has no such field.
    pub timestamp: &'a [u8],
    /// `stdout`, `stderr` or empty.
    pub stream: &'a [u8],
    /// No newline belongs to the content: the runtime has split a longer line here.
    pub partial: bool,
    /// What the container wrote, without the newline.
    pub content: Cow<'a, [u8]>,
}

/// Takes a line of a log file apart; `line` has no trailing newline.
pub fn parse(line: &[u8]) -> LogLine<'_> {
    let whole = || LogLine { timestamp: b"", stream: b"", partial: false, content: Cow::Borrowed(line) };
    // What a container writes may look like the other format; the first byte of a time is a digit.
    docker(line).or_else(|| cri(line)).unwrap_or_else(whole)
}

fn is_stream(name: &[u8]) -> bool {
    name == b"stdout" || name == b"stderr"
}

fn cri(line: &[u8]) -> Option<LogLine<'_>> {
    let (timestamp, rest) = split(line)?;
    let (stream, rest) = split(rest).filter(|(stream, _)| is_stream(stream))?;
    // A container that writes an empty line leaves nothing after the tags.
    let (tags, content) = split(rest).unwrap_or((rest, b""));
    let first = tags.split(|b| *b == b':').next().unwrap_or(tags);
    Some(LogLine { timestamp, stream, partial: first == b"P", content: Cow::Borrowed(content) })
}

/// A line of Docker's; other members, as `attrs`, say nothing here. Time and stream are plain words, never escaped.
#[derive(Deserialize)]
struct DockerLine<'a> {
    #[serde(borrow)]
    log: Cow<'a, str>,
    stream: &'a str,
    time: &'a str,
}

/// Docker writes a line that it has split as pieces without a newline at their ends, and one where the line ends.
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

/// Where the last `lines` lines of a file begin, given its end: how many bytes before the end of `tail`.
/// `None`: `tail` holds fewer lines, so more of the file has to be looked at.
pub fn tail_start(tail: &[u8], lines: usize) -> Option<usize> {
    if lines == 0 {
        return Some(tail.len());
    }
    let mut left = lines;
    line_start_from_end(tail.strip_suffix(b"\n").unwrap_or(tail), &mut left)
}

/// Counts the newlines of `block` from its end down from `left`; where the line begins that follows the last
/// one. `None`: the count goes on in the block before.
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

/// Appends to `out` what a reader is shown of a line. `continued` says that the line before was partial: its
/// continuation gets no timestamp.
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

/// Appends a time with nine digits of its second, as runtimes leave out zeros at the end; another text as it is.
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

/// A time up to its second, the at most nine digits of its fraction, and its zone; `None`: it is none that a runtime
/// writes.
fn split_time(text: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (second, rest) = text.split_at(text.len().min(SECOND));
    let fraction = rest.strip_prefix(b".").unwrap_or_default();
    let digits = fraction.iter().take_while(|b| b.is_ascii_digit()).count();
    let zone = if digits == 0 { rest } else { &fraction[digits..] };
    let is_zone = zone == b"Z" || (zone.len() == 6 && (zone[0] == b'+' || zone[0] == b'-'));
    // A time without its hyphens and colons has other places.
    let is_second = second.len() == SECOND && second[10] == b'T' && second[16] == b':';
    (is_second && digits <= 9 && is_zone).then(|| (second, &fraction[..digits], zone))
}

/// The end of a log as a termination message: at most `max_lines` lines and `max_bytes` bytes of content.
pub fn termination_tail(file: &[u8], max_lines: usize, max_bytes: usize) -> String {
    let start = tail_start(file, max_lines).unwrap_or(0);
    let mut out = Vec::new();
    for line in file[start..].split_inclusive(|b| *b == b'\n') {
        render(&parse(line.strip_suffix(b"\n").unwrap_or(line)), false, false, &mut out);
    }
    // A line of Docker's may say that there are newlines in it, though Docker itself writes none.
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
    fn a_line_of_the_format_is_taken_apart() {
        let line = parse(b"2026-01-02T03:04:05.000000006Z stderr P some words");
        assert_eq!(line.timestamp, b"2026-01-02T03:04:05.000000006Z");
        assert_eq!(line.stream, b"stderr");
        assert!(line.partial);
        assert_eq!(&*line.content, b"some words");
    }

    #[test]
    fn an_empty_line_of_a_container_has_no_content() {
        let line = parse(b"2026-01-02T03:04:05Z stdout F ");
        assert_eq!(&*line.content, b"");
        assert!(!line.partial);
    }

    #[test]
    fn anything_else_is_content() {
        assert_eq!(&*parse(b"no log line").content, b"no log line");
        assert_eq!(&*parse(b"").content, b"");
    }

    #[test]
    fn a_line_of_docker_is_taken_apart() {
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
    fn what_only_looks_like_a_line_of_docker_is_content() {
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
        // What a container logs in this form is its own.
        let own = r#"{"log":"x\n","stream":"stdout","time":"2026-01-02T03:04:05Z"}"#;
        let written = format!("2026-01-02T03:04:05Z stdout F {own}");
        assert_eq!(&*parse(written.as_bytes()).content, own.as_bytes());
    }

    #[test]
    fn pieces_of_docker_are_one_line_with_one_timestamp() {
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
    fn a_partial_line_and_its_continuation_are_one_line_with_one_timestamp() {
        let mut out = Vec::new();
        render(&parse(b"T stdout P ab"), true, false, &mut out);
        render(&parse(b"T stdout F cd"), true, true, &mut out);
        assert_eq!(out, b"T abcd\n");
    }

    #[test]
    fn times_are_shown_with_nine_digits_of_the_second() {
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
    fn the_tail_begins_after_the_newline_before_it() {
        let file = b"a\nb\nc\n";
        assert_eq!(tail_start(file, 1), Some(4));
        assert_eq!(tail_start(file, 2), Some(2));
        assert_eq!(tail_start(file, 3), None);
        assert_eq!(tail_start(file, 0), Some(6));
        assert_eq!(tail_start(b"a\nb", 1), Some(2));
    }

    #[test]
    fn a_termination_message_is_cut_from_the_front() {
        let file = b"T stdout F one\nT stdout F two\n";
        assert_eq!(termination_tail(file, 1, 100), "two\n");
        assert_eq!(termination_tail(file, 80, 3), "wo\n");
    }

    const LINE: &[u8] = b"2026-01-02T03:04:05.5Z stderr P:x some\nwords\n";

    /// Bytes, and a line of the format with a hole and a graft.
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
    fn no_bytes_make_it_panic() {
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
                ("as many lines as were asked for", n > 0 && tail.is_some()),
                ("fewer lines", tail.is_none()),
            ]);
        });
        // The rarest: "as many lines as were asked for", in one case of 8.
        reached.assert_each();
    }
}
