//! Log lines in the formats of CRI and Docker. The bytes are used in three ways: as one line, as a log file, and as the output of
//! a container, for which the log of a runtime is generated in both formats.

use jiff::Timestamp;
use keelson_runtime_shim_core::log;
use serde_json::{Value, json};

use crate::Outcome;

/// The lengths in bytes of a rendered time: `2026-01-02T03:04:05.000000000` and a zone.
const WIDTHS: [usize; 2] = [30, 35];

/// Checks `bytes` as a line, as a log file and as the output of a container.
///
/// # Panics
/// A property is violated.
pub fn check(bytes: &[u8]) -> Outcome {
    let line = bytes.split(|b| *b == b'\n').next().unwrap_or_default();
    let outcome = assert_no_byte_is_lost(line);
    assert_tails_agree(bytes);
    assert_termination_messages_are_limited(bytes);
    assert_cri_pieces_form_lines(bytes);
    assert_docker_pieces_form_lines(bytes);
    outcome
}

fn assert_no_byte_is_lost(line: &[u8]) -> Outcome {
    let parsed = log::parse(line);
    let mut shown = Vec::new();
    log::render(&parsed, false, false, &mut shown);
    let newline: &[u8] = if parsed.partial { b"" } else { b"\n" };
    assert_eq!(shown, [&*parsed.content, newline].concat(), "{line:?}");
    let mut continued = Vec::new();
    log::render(&parsed, true, true, &mut continued);
    assert_eq!(continued, shown, "{line:?}");
    let mut timed = Vec::new();
    log::render(&parsed, true, false, &mut timed);
    assert!(timed.ends_with(&shown), "{line:?} became {timed:?}");
    if parsed.stream.is_empty() {
        assert!(
            parsed.timestamp.is_empty() && !parsed.partial && *parsed.content == *line,
            "{line:?} is {parsed:?}"
        );
        assert_eq!(timed, shown, "{line:?}");
        return Outcome::Rejected;
    }
    let head = [parsed.timestamp, b" ", parsed.stream, b" "].concat();
    match line.strip_prefix(head.as_slice()) {
        Some(rest) => {
            let tags =
                rest.strip_suffix(&*parsed.content).unwrap_or_else(|| panic!("{line:?} is {parsed:?}"));
            let tags = tags.strip_suffix(b" ").unwrap_or(tags);
            assert!(!tags.contains(&b' '), "{line:?} is {parsed:?}");
            let is_tagged_partial = tags == b"P" || tags.starts_with(b"P:");
            assert_eq!(parsed.partial, is_tagged_partial, "{line:?} is {parsed:?}");
        }
        None => assert_docker_fields_match(line, &parsed),
    }
    if !parsed.timestamp.is_empty() {
        assert_same_time(parsed.timestamp, &timed[..timed.len() - shown.len() - 1]);
    }
    Outcome::Accepted
}

/// Compares a parsed line of Docker with the members of its JSON object.
fn assert_docker_fields_match(line: &[u8], parsed: &log::LogLine<'_>) {
    // serde_json rejects some lines that the parser accepts, such as one with a huge number in another member.
    let Ok(json) = serde_json::from_slice::<Value>(line) else { return };
    let member = |name: &str| json[name].as_str().map(str::as_bytes);
    assert_eq!(member("time"), Some(parsed.timestamp), "{line:?} is {parsed:?}");
    assert_eq!(member("stream"), Some(parsed.stream), "{line:?} is {parsed:?}");
    let newline: &[u8] = if parsed.partial { b"" } else { b"\n" };
    let written = [&*parsed.content, newline].concat();
    assert_eq!(member("log"), Some(written.as_slice()), "{line:?} is {parsed:?}");
    assert_eq!(parsed.partial, !written.ends_with(b"\n"), "{line:?} is {parsed:?}");
}

/// Asserts that a time is shown as the same time in a fixed width, and any other text unchanged.
fn assert_same_time(written: &[u8], shown: &[u8]) {
    if written == shown {
        return;
    }
    assert!(WIDTHS.contains(&shown.len()), "{written:?} became {shown:?}");
    let moment = |text: &[u8]| std::str::from_utf8(text).ok().and_then(|t| t.parse::<Timestamp>().ok());
    assert_eq!(moment(written), moment(shown), "{written:?} became {shown:?}");
}

/// Asserts that all ways to find the beginning of the last lines of a file agree.
fn assert_tails_agree(file: &[u8]) {
    let body = file.strip_suffix(b"\n").unwrap_or(file);
    let newlines: Vec<usize> = (0..body.len()).filter(|i| body[*i] == b'\n').collect();
    assert_eq!(log::tail_start(file, 0), Some(file.len()));
    for lines in [1, 2, 3, 7, newlines.len(), newlines.len() + 1] {
        if lines > 0 {
            let expected = newlines.len().checked_sub(lines).map(|first| newlines[first] + 1);
            assert_eq!(log::tail_start(file, lines), expected, "the last {lines} lines of {file:?}");
            assert_eq!(
                tail_start_by_blocks(body, lines, 5),
                expected,
                "the last {lines} lines of {file:?} by blocks"
            );
        }
    }
}

/// Finds the beginning of the last lines in blocks from the end, as the reader of a large file does.
fn tail_start_by_blocks(body: &[u8], lines: usize, size: usize) -> Option<usize> {
    let (mut left, mut end) = (lines, body.len());
    while end > 0 {
        let start = end.saturating_sub(size);
        if let Some(offset) = log::line_start_from_end(&body[start..end], &mut left) {
            return Some(start + offset);
        }
        end = start;
    }
    None
}

/// Asserts that a termination message respects its limits of lines and bytes. An invalid byte becomes three bytes of UTF-8.
fn assert_termination_messages_are_limited(file: &[u8]) {
    for (lines, bytes) in [(1, 4), (2, 16), (80, 2048)] {
        let message = log::termination_tail(file, lines, bytes);
        assert!(message.len() <= 3 * bytes, "{} bytes of {file:?}", message.len());
        assert!(message.bytes().filter(|b| *b == b'\n').count() <= lines, "{message:?} of {file:?}");
    }
}

/// Asserts that the pieces in which a CRI runtime writes long lines are shown as the output of the container.
fn assert_cri_pieces_form_lines(bytes: &[u8]) {
    let Some((seed, written)) = bytes.split_first() else { return };
    let size = usize::from(seed % 16) + 1;
    let mut file = Vec::new();
    let mut lines = written.split(|b| *b == b'\n').peekable();
    while let Some(line) = lines.next() {
        let last = lines.peek().is_none();
        if last && line.is_empty() {
            break;
        }
        let pieces: Vec<&[u8]> = if line.is_empty() { vec![line] } else { line.chunks(size).collect() };
        for (index, piece) in pieces.iter().enumerate() {
            let tag: &[u8] = if index + 1 < pieces.len() || last { b"P" } else { b"F" };
            file.extend([b"2026-01-02T03:04:05.6Z stdout ", tag, b" ", piece, b"\n"].concat());
        }
    }
    assert_shown_as_written(&file, written, size);
}

/// The same for Docker, which writes valid UTF-8 only.
fn assert_docker_pieces_form_lines(bytes: &[u8]) {
    let Some((seed, written)) = bytes.split_first() else { return };
    let written = String::from_utf8_lossy(written);
    let size = usize::from(seed % 16) + 1;
    let mut file = Vec::new();
    for line in written.split_inclusive('\n') {
        let characters: Vec<char> = line.chars().collect();
        for piece in characters.chunks(size) {
            let piece: String = piece.iter().collect();
            let entry = json!({"log": piece, "stream": "stdout", "time": "2026-01-02T03:04:05.6Z"});
            file.extend(entry.to_string().into_bytes());
            file.push(b'\n');
        }
    }
    assert_shown_as_written(&file, written.as_bytes(), size);
}

fn assert_shown_as_written(file: &[u8], written: &[u8], size: usize) {
    let (mut shown, mut timed, mut continued) = (Vec::new(), Vec::new(), false);
    for line in file.split_inclusive(|b| *b == b'\n') {
        let line = log::parse(line.strip_suffix(b"\n").unwrap_or(line));
        log::render(&line, false, continued, &mut shown);
        log::render(&line, true, continued, &mut timed);
        continued = line.partial;
    }
    assert_eq!(shown, written, "in pieces of {size}");
    let stamp = b"2026-01-02T03:04:05.600000000Z ";
    let expected: Vec<u8> =
        written.split_inclusive(|b| *b == b'\n').flat_map(|line| [stamp.as_slice(), line].concat()).collect();
    assert_eq!(timed, expected, "in pieces of {size}, with times");
}
