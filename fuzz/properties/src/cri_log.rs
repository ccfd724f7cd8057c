//! Log lines in the formats of CRI and of Docker. The bytes are read three times: as one line, as a file, and as what a
//! container has written, which a runtime then writes into a log in either format.

use jiff::Timestamp;
use keelson_runtime_shim_core::log;
use serde_json::{Value, json};

use crate::Met;

/// Bytes of a rendered time: `2026-01-02T03:04:05.000000000` and a zone.
const WIDTHS: [usize; 2] = [30, 35];

/// Checks `bytes` as a log.
///
/// # Panics
/// Something does not hold.
pub fn check(bytes: &[u8]) -> Met {
    let line = bytes.split(|b| *b == b'\n').next().unwrap_or_default();
    let met = no_byte_is_lost(line);
    tails_agree(bytes);
    messages_are_short(bytes);
    pieces_become_one(bytes);
    pieces_of_docker_become_one(bytes);
    met
}

fn no_byte_is_lost(line: &[u8]) -> Met {
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
        return Met::Refused;
    }
    let head = [parsed.timestamp, b" ", parsed.stream, b" "].concat();
    match line.strip_prefix(head.as_slice()) {
        Some(rest) => {
            let tags =
                rest.strip_suffix(&*parsed.content).unwrap_or_else(|| panic!("{line:?} is {parsed:?}"));
            let tags = tags.strip_suffix(b" ").unwrap_or(tags);
            assert!(!tags.contains(&b' '), "{line:?} is {parsed:?}");
            let says_partial = tags == b"P" || tags.starts_with(b"P:");
            assert_eq!(parsed.partial, says_partial, "{line:?} is {parsed:?}");
        }
        None => is_of_docker(line, &parsed),
    }
    if !parsed.timestamp.is_empty() {
        the_moment_stays(parsed.timestamp, &timed[..timed.len() - shown.len() - 1]);
    }
    Met::Good
}

/// A line of Docker's says what was read of it, and nothing of what it says in `log` is missing.
fn is_of_docker(line: &[u8], parsed: &log::LogLine<'_>) {
    // What cannot be read here, as a number that is too large, is in a member that nobody looks at.
    let Ok(json) = serde_json::from_slice::<Value>(line) else { return };
    let member = |name: &str| json[name].as_str().map(str::as_bytes);
    assert_eq!(member("time"), Some(parsed.timestamp), "{line:?} is {parsed:?}");
    assert_eq!(member("stream"), Some(parsed.stream), "{line:?} is {parsed:?}");
    let newline: &[u8] = if parsed.partial { b"" } else { b"\n" };
    let written = [&*parsed.content, newline].concat();
    assert_eq!(member("log"), Some(written.as_slice()), "{line:?} is {parsed:?}");
    assert_eq!(parsed.partial, !written.ends_with(b"\n"), "{line:?} is {parsed:?}");
}

/// What is shown of a time is the same moment with a fixed width; anything else is shown as it is.
fn the_moment_stays(written: &[u8], shown: &[u8]) {
    if written == shown {
        return;
    }
    assert!(WIDTHS.contains(&shown.len()), "{written:?} became {shown:?}");
    let moment = |text: &[u8]| std::str::from_utf8(text).ok().and_then(|t| t.parse::<Timestamp>().ok());
    assert_eq!(moment(written), moment(shown), "{written:?} became {shown:?}");
}

/// Where the last lines of a file begin is the same however it is looked at.
fn tails_agree(file: &[u8]) {
    let body = file.strip_suffix(b"\n").unwrap_or(file);
    let newlines: Vec<usize> = (0..body.len()).filter(|i| body[*i] == b'\n').collect();
    assert_eq!(log::tail_start(file, 0), Some(file.len()));
    for lines in [1, 2, 3, 7, newlines.len(), newlines.len() + 1] {
        if lines > 0 {
            let expected = newlines.len().checked_sub(lines).map(|first| newlines[first] + 1);
            assert_eq!(log::tail_start(file, lines), expected, "the last {lines} lines of {file:?}");
            assert_eq!(by_blocks(body, lines, 5), expected, "the last {lines} lines of {file:?} by blocks");
        }
    }
}

/// As the reader of a large file looks for its tail: a block at a time, from the end.
fn by_blocks(body: &[u8], lines: usize, size: usize) -> Option<usize> {
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

/// A termination message has at most so many lines and bytes (a byte that is no text is shown as three).
fn messages_are_short(file: &[u8]) {
    for (lines, bytes) in [(1, 4), (2, 16), (80, 2048)] {
        let message = log::termination_tail(file, lines, bytes);
        assert!(message.len() <= 3 * bytes, "{} bytes of {file:?}", message.len());
        assert!(message.bytes().filter(|b| *b == b'\n').count() <= lines, "{message:?} of {file:?}");
    }
}

/// A runtime writes lines in pieces of limited length; put together they are what the container wrote.
fn pieces_become_one(bytes: &[u8]) {
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
    is_shown_as_written(&file, written, size);
}

/// The same of Docker, which writes text only.
fn pieces_of_docker_become_one(bytes: &[u8]) {
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
    is_shown_as_written(&file, written.as_bytes(), size);
}

fn is_shown_as_written(file: &[u8], written: &[u8], size: usize) {
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
