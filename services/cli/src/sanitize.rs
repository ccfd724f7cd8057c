//! Makes text from other parties safe for a terminal and its reader.
//!
//! Names, messages and annotations come from pods, servers and manifests. Escape sequences in them could move the cursor,
//! rename the window or forge output; bidirectional controls could change the displayed order of the text.

use std::fmt::Write as _;

/// Whether a character can do more than be displayed: C0 and C1 controls, line and paragraph separators, and characters that
/// change the direction of text (UAX 9).
pub(crate) fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61C}' | '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
}

/// Escapes unsafe characters, except line breaks and tabs. With `colours`, sequences that only change the colour are kept.
pub(crate) fn lines(text: &str, colours: bool) -> String {
    if !text.chars().any(|c| is_unsafe(c) && c != '\n') {
        return text.to_owned();
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let colour = if colours { colour_sequence_length(rest) } else { 0 };
        let (taken, left) = rest.split_at(colour.max(c.len_utf8()));
        match c {
            _ if colour > 0 => out.push_str(taken),
            '\n' | '\t' => out.push(c),
            c if is_unsafe(c) => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
        rest = left;
    }
    out
}

/// The length of the colour sequence (ECMA-48, SGR) at the beginning of a text; 0 without one.
fn colour_sequence_length(text: &str) -> usize {
    let Some(parameters) = text.strip_prefix("\u{1b}[") else { return 0 };
    let length = parameters.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b';').count();
    if parameters.as_bytes().get(length) == Some(&b'm') { length + 3 } else { 0 }
}

/// Escapes unsafe characters in JSON. They can occur only in strings.
pub(crate) fn json(text: String) -> String {
    if !text.chars().any(|c| is_unsafe(c) && c != '\n') {
        return text;
    }
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unsafe(c) && c != '\n' {
            // Writing to a string cannot fail; each of these characters is one UTF-16 unit.
            let _ = write!(out, "\\u{:04x}", u32::from(c));
        } else {
            out.push(c);
        }
    }
    out
}

/// Sanitizes the bytes of a container's log, chunk by chunk.
#[derive(Debug, Default)]
pub(crate) struct LogSanitizer {
    /// The first bytes of a character that continues in the next chunk.
    incomplete: Vec<u8>,
}

impl LogSanitizer {
    /// The sanitized text of the next chunk; bytes that are not UTF-8 become `\x…`.
    pub(crate) fn next(&mut self, chunk: &[u8]) -> Vec<u8> {
        let mut bytes = std::mem::take(&mut self.incomplete);
        bytes.extend_from_slice(chunk);
        let mut out = String::with_capacity(bytes.len());
        let mut rest = bytes.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(&lines(text, false));
                    break;
                }
                Err(error) => {
                    let (good, bad) = rest.split_at(error.valid_up_to());
                    out.push_str(&lines(&String::from_utf8_lossy(good), false));
                    let Some(length) = error.error_len() else {
                        self.incomplete = bad.to_vec();
                        break;
                    };
                    for byte in &bad[..length] {
                        let _ = write!(out, "\\x{byte:02x}");
                    }
                    rest = &bad[length..];
                }
            }
        }
        out.into_bytes()
    }

    /// The rest at the end of the log.
    pub(crate) fn end(self) -> Vec<u8> {
        self.incomplete.iter().flat_map(|byte| format!("\\x{byte:02x}").into_bytes()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Moves the cursor, renames the window, with 7-bit and 8-bit controls, and reverses the text.
    const HOSTILE: &str = "a\u{1b}[2J\u{1b}]0;t\u{7}\u{9b}1A\r\u{202e}b\u{2066}c\u{7f}\u{2028}d";

    #[test]
    fn unsafe_characters_are_escaped_and_others_kept() {
        let text = lines(HOSTILE, true);
        assert!(!text.chars().any(is_unsafe), "{text:?}");
        assert!(text.starts_with("a\\u{1b}[2J\\u{1b}]0;t\\u{7}\\u{9b}1A\\u{d}\\u{202e}b"), "{text}");
        assert_eq!(lines("größer\n\tzwei 日本 👍\n", false), "größer\n\tzwei 日本 👍\n");
    }

    #[test]
    fn only_colour_sequences_are_kept_with_colours() {
        let coloured = "\u{1b}[1;31merror\u{1b}[0m\u{1b}[m\u{1b}[5A\u{1b}[1;31";
        assert_eq!(lines(coloured, true), "\u{1b}[1;31merror\u{1b}[0m\u{1b}[m\\u{1b}[5A\\u{1b}[1;31");
        assert!(!lines(coloured, false).contains('\u{1b}'));
    }

    #[test]
    fn escaped_json_has_the_same_value() {
        let value = serde_json::json!({"a": HOSTILE, "b": ["\u{9b}", "plain"]});
        let text = json(serde_json::to_string_pretty(&value).unwrap());
        assert!(!text.chars().any(|c| is_unsafe(c) && c != '\n'), "{text:?}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }

    #[test]
    fn log_is_sanitized_independent_of_chunk_boundaries() {
        let log = [HOSTILE.as_bytes(), b"\xff\n", "é\u{1b}[31m日本\n".as_bytes(), b"\xe6\x97"].concat();
        let of = |size: usize| {
            let mut bytes = LogSanitizer::default();
            let mut out: Vec<u8> = log.chunks(size).flat_map(|chunk| bytes.next(chunk)).collect();
            out.extend(bytes.end());
            String::from_utf8(out).unwrap()
        };
        let whole = of(log.len());
        assert!(!whole.chars().any(|c| is_unsafe(c) && c != '\n'), "{whole:?}");
        assert!(whole.contains("\\xff\né\\u{1b}[31m日本\n") && whole.ends_with("\\xe6\\x97"), "{whole}");
        for size in 1..9 {
            assert_eq!(of(size), whole, "{size}");
        }
    }
}
