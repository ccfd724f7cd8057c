//! The CRI log line format: `<RFC 3339 time> <stdout|stderr> <tags> <content>\n`
//! (runtime-and-resources.md §7.4).

/// Bytes of a time up to its second: `2026-01-02T03:04:05`.
const SECOND: usize = 19;

/// One line of a log file. A line that is not of the format is content as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogLine<'a> {
    /// As the runtime wrote it; empty when the line has no such field.
    pub timestamp: &'a [u8],
    /// `stdout`, `stderr` or empty.
    pub stream: &'a [u8],
    /// No newline belongs to the content: the runtime has split a longer line here.
    pub partial: bool,
    /// What the container wrote, without the newline.
    pub content: &'a [u8],
}

/// Takes a line of a log file apart; `line` has no trailing newline.
pub fn parse(line: &[u8]) -> LogLine<'_> {
    let whole = LogLine { timestamp: b"", stream: b"", partial: false, content: line };
    let Some((timestamp, rest)) = split(line) else { return whole };
    let Some((stream, rest)) = split(rest) else { return whole };
    if stream != b"stdout" && stream != b"stderr" {
        return whole;
    }
    // A container that writes an empty line leaves nothing after the tags.
    let (tags, content) = split(rest).unwrap_or((rest, b""));
    let first = tags.split(|b| *b == b':').next().unwrap_or(tags);
    LogLine { timestamp, stream, partial: first == b"P", content }
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
    out.extend_from_slice(line.content);
    if !line.partial {
        out.push(b'\n');
    }
}

/// Appends a time with nine digits of its second, as runtimes leave out zeros at the end; another text as it is.
fn fixed_width(timestamp: &[u8], out: &mut Vec<u8>) {
    let (second, rest) = timestamp.split_at(timestamp.len().min(SECOND));
    let fraction = rest.strip_prefix(b".").unwrap_or_default();
    let digits = fraction.iter().take_while(|b| b.is_ascii_digit()).count();
    let zone = if digits == 0 { rest } else { &fraction[digits..] };
    let is_zone = zone == b"Z" || (zone.len() == 6 && (zone[0] == b'+' || zone[0] == b'-'));
    // A time without its hyphens and colons is none that a runtime writes, and has other places.
    let is_second = second.len() == SECOND && second[10] == b'T' && second[16] == b':';
    if !is_second || digits > 9 || !is_zone {
        out.extend_from_slice(timestamp);
        return;
    }
    out.extend_from_slice(second);
    out.push(b'.');
    out.extend_from_slice(&fraction[..digits]);
    out.extend(std::iter::repeat_n(b'0', 9 - digits));
    out.extend_from_slice(zone);
}

/// The end of a log as a termination message: at most `max_lines` lines and `max_bytes` bytes of content.
pub fn termination_tail(file: &[u8], max_lines: usize, max_bytes: usize) -> String {
    let start = tail_start(file, max_lines).unwrap_or(0);
    let mut out = Vec::new();
    for line in file[start..].split_inclusive(|b| *b == b'\n') {
        render(&parse(line.strip_suffix(b"\n").unwrap_or(line)), false, false, &mut out);
    }
    let cut = out.len().saturating_sub(max_bytes);
    String::from_utf8_lossy(&out[cut..]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_format_is_taken_apart() {
        let line = parse(b"2026-01-02T03:04:05.000000006Z stderr P some words");
        assert_eq!(line.timestamp, b"2026-01-02T03:04:05.000000006Z");
        assert_eq!(line.stream, b"stderr");
        assert!(line.partial);
        assert_eq!(line.content, b"some words");
    }

    #[test]
    fn an_empty_line_of_a_container_has_no_content() {
        let line = parse(b"2026-01-02T03:04:05Z stdout F ");
        assert_eq!(line.content, b"");
        assert!(!line.partial);
    }

    #[test]
    fn anything_else_is_content() {
        assert_eq!(parse(b"no log line").content, b"no log line");
        assert_eq!(parse(b"").content, b"");
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

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200), n in 0usize..5) {
            let line = parse(&bytes);
            let mut out = Vec::new();
            render(&line, true, false, &mut out);
            let _ = tail_start(&bytes, n);
        }
    }
}
