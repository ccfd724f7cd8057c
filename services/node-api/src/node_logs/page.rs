//! Paths, ranges and listings of `/logs/`, as a Go file server has them.

use std::fmt::Write as _;

use keelson_proto::keelson::runtime::v1::{ByteRange, NodeLogEntry};

/// The beginning of a listing.
pub(super) const LISTING_BEGIN: &str =
    "<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n";
/// The end of a listing.
pub(super) const LISTING_END: &str = "</pre>\n";

/// The bytes of a path of a URL below `/logs/`, without leading slashes; `None` if an escape is invalid or a part is `..`.
pub(super) fn decode_path(raw: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(raw.len());
    let mut rest = raw.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let (digits, tail) = rest.split_at_checked(2)?;
        let digits = std::str::from_utf8(digits).ok().filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = tail;
    }
    let begin = bytes.iter().position(|byte| *byte != b'/').unwrap_or(bytes.len());
    bytes.drain(..begin);
    let is_harmless = !bytes.contains(&0) && bytes.split(|byte| *byte == b'/').all(|part| part != b"..");
    is_harmless.then_some(bytes)
}

/// A `Range` header.
#[derive(Debug, PartialEq)]
pub(super) enum Requested {
    /// No range, or several, which may be ignored (RFC 9110 §14.2).
    Whole,
    Part(ByteRange),
    Invalid,
}

/// Parses a `Range` header.
pub(super) fn parse_range(header: Option<&str>) -> Requested {
    let Some(header) = header else { return Requested::Whole };
    let Some(range) = header.strip_prefix("bytes=") else { return Requested::Invalid };
    if range.contains(',') {
        return Requested::Whole;
    }
    let Some((first, last)) = range.trim().split_once('-') else { return Requested::Invalid };
    let number = |text: &str| {
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| text.parse::<u64>().ok()).flatten()
    };
    match (first.trim(), last.trim()) {
        ("", last) => number(last)
            .map_or(Requested::Invalid, |last| Requested::Part(ByteRange { first: None, last: Some(last) })),
        (first, "") => number(first).map_or(Requested::Invalid, |first| {
            Requested::Part(ByteRange { first: Some(first), last: None })
        }),
        (first, last) => match (number(first), number(last)) {
            (Some(first), Some(last)) if first <= last => {
                Requested::Part(ByteRange { first: Some(first), last: Some(last) })
            }
            _ => Requested::Invalid,
        },
    }
}

/// The lines of a listing, each a link to an entry.
pub(super) fn listing(entries: &[NodeLogEntry]) -> String {
    let mut text = String::new();
    for entry in entries {
        let end = if entry.is_folder { "/" } else { "" };
        let name = String::from_utf8_lossy(&entry.name);
        // Writing to a string does not fail.
        let _ = writeln!(text, "<a href=\"{}{end}\">{}{end}</a>", href(&entry.name), escape_html(&name));
    }
    text
}

/// A name as a relative URL.
fn href(name: &[u8]) -> String {
    // Otherwise the part before the colon would be a scheme.
    let mut url = if name.contains(&b':') { "./".to_owned() } else { String::new() };
    for byte in name {
        if byte.is_ascii_alphanumeric() || b"-_.~$+,:=@".contains(byte) {
            url.push(char::from(*byte));
        } else {
            let _ = write!(url, "%{byte:02X}");
        }
    }
    url
}

fn escape_html(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&#34;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}

/// The media type of a file that begins with `data`: text or bytes, and never anything that a browser runs.
pub(super) fn media_type(data: &[u8]) -> &'static str {
    let is_binary = |byte: &u8| matches!(byte, 0..=8 | 11 | 14..=26 | 28..=31);
    if data.iter().take(512).any(is_binary) {
        "application/octet-stream"
    } else {
        "text/plain; charset=utf-8"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_path_is_decoded_and_no_spelling_of_dot_dot_is_accepted() {
        for (raw, expected) in [
            ("", Some(&b""[..])),
            ("syslog", Some(b"syslog")),
            ("pods/a%20b/", Some(b"pods/a b/")),
            ("//etc/passwd", Some(b"etc/passwd")),
            ("%2Fetc/passwd", Some(b"etc/passwd")),
            ("%ff%FE", Some(b"\xff\xfe")),
            ("a..b/..c/d..", Some(b"a..b/..c/d..")),
            ("%252e%252e/x", Some(b"%2e%2e/x")),
            ("..", None),
            ("../etc/passwd", None),
            ("a/../b", None),
            ("%2e%2e/etc/passwd", None),
            ("%2E./x", None),
            ("a%2f..%2f..%2fetc", None),
            ("a%00b", None),
            ("a%", None),
            ("a%2", None),
            ("a%+1", None),
            ("a%zz", None),
        ] {
            assert_eq!(decode_path(raw).as_deref(), expected, "{raw}");
        }
    }

    #[test]
    fn one_range_is_parsed_and_several_are_ignored() {
        let part = |first, last| Requested::Part(ByteRange { first, last });
        for (header, expected) in [
            (None, Requested::Whole),
            (Some("bytes=0-9"), part(Some(0), Some(9))),
            (Some("bytes=5-"), part(Some(5), None)),
            (Some("bytes=-5"), part(None, Some(5))),
            (Some("bytes= 1 - 2 "), part(Some(1), Some(2))),
            (Some("bytes=0-1,4-5"), Requested::Whole),
            (Some("bytes=9-1"), Requested::Invalid),
            (Some("bytes=-"), Requested::Invalid),
            (Some("bytes=a-b"), Requested::Invalid),
            (Some("bytes=+1-2"), Requested::Invalid),
            (Some("bytes=99999999999999999999-"), Requested::Invalid),
            (Some("lines=1-2"), Requested::Invalid),
        ] {
            assert_eq!(parse_range(header), expected, "{header:?}");
        }
    }

    #[test]
    fn listing_escapes_names_for_html_and_urls() {
        let entry = |name: &[u8], is_folder| NodeLogEntry { name: name.to_vec(), is_folder };
        let entries = [entry(b"<a b>&\"'", false), entry(b"x:y", true), entry(b"?#\xff", false)];
        assert_eq!(
            listing(&entries),
            "<a href=\"%3Ca%20b%3E%26%22%27\">&lt;a b&gt;&amp;&#34;&#39;</a>\n\
             <a href=\"./x:y/\">x:y/</a>\n<a href=\"%3F%23%FF\">?#\u{fffd}</a>\n"
        );
    }

    #[test]
    fn log_file_is_text_or_bytes_and_never_html() {
        for (data, expected) in [
            (&b""[..], "text/plain; charset=utf-8"),
            (b"<html><script>", "text/plain; charset=utf-8"),
            (b"\x1b[31mred\n", "text/plain; charset=utf-8"),
            (b"\x1f\x8b\x08", "application/octet-stream"),
            (b"a\0", "application/octet-stream"),
        ] {
            assert_eq!(media_type(data), expected, "{data:?}");
        }
    }
}
