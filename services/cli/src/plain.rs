//! Text of others made fit for a terminal and for who reads it.
//!
//! A pod, a server and a manifest choose names, messages and annotations. With escape sequences in them they could move the cursor,
//! name the window or write what the person has not seen; with bidirectional controls they could show another order than there is.

use std::fmt::Write as _;

/// Whether a character does something other than stand there: C0 and C1 controls, line and paragraph separators, and what changes
/// the direction of text (UAX 9).
pub(crate) fn acts(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61C}' | '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
}

/// A text of several lines, of which some parts may be another's. With `colours` the sequences stay that change the colour alone.
pub(crate) fn lines(text: &str, colours: bool) -> String {
    if !text.chars().any(|c| acts(c) && c != '\n') {
        return text.to_owned();
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let colour = if colours { colour_of(rest) } else { 0 };
        let (taken, left) = rest.split_at(colour.max(c.len_utf8()));
        match c {
            _ if colour > 0 => out.push_str(taken),
            '\n' | '\t' => out.push(c),
            c if acts(c) => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
        rest = left;
    }
    out
}

/// The length of the sequence at the beginning of a text that changes the colour (ECMA-48, SGR); 0: there is none.
fn colour_of(text: &str) -> usize {
    let Some(parameters) = text.strip_prefix("\u{1b}[") else { return 0 };
    let length = parameters.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b';').count();
    if parameters.as_bytes().get(length) == Some(&b'm') { length + 3 } else { 0 }
}

/// JSON with such characters as escapes: they stand in strings alone.
pub(crate) fn json(text: String) -> String {
    if !text.chars().any(|c| acts(c) && c != '\n') {
        return text;
    }
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if acts(c) && c != '\n' {
            // Writing to a string cannot fail; none of them needs two units.
            let _ = write!(out, "\\u{:04x}", u32::from(c));
        } else {
            out.push(c);
        }
    }
    out
}

/// Bytes of a container's log, piece by piece.
#[derive(Debug, Default)]
pub(crate) struct Bytes {
    /// The beginning of a character whose end is in the next piece.
    begun: Vec<u8>,
}

impl Bytes {
    /// What to write for the next piece; what is no UTF-8 is written as `\x…`.
    pub(crate) fn next(&mut self, piece: &[u8]) -> Vec<u8> {
        let mut bytes = std::mem::take(&mut self.begun);
        bytes.extend_from_slice(piece);
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
                        self.begun = bad.to_vec();
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

    /// What is left at the end.
    pub(crate) fn end(self) -> Vec<u8> {
        self.begun.iter().flat_map(|byte| format!("\\x{byte:02x}").into_bytes()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Moves the cursor, names the window, in one character and in two, and turns the text around.
    const HOSTILE: &str = "a\u{1b}[2J\u{1b}]0;t\u{7}\u{9b}1A\r\u{202e}b\u{2066}c\u{7f}\u{2028}d";

    #[test]
    fn what_acts_is_spelled_out_and_the_rest_stays() {
        let text = lines(HOSTILE, true);
        assert!(!text.chars().any(acts), "{text:?}");
        assert!(text.starts_with("a\\u{1b}[2J\\u{1b}]0;t\\u{7}\\u{9b}1A\\u{d}\\u{202e}b"), "{text}");
        assert_eq!(lines("größer\n\tzwei 日本 👍\n", false), "größer\n\tzwei 日本 👍\n");
    }

    #[test]
    fn colours_stay_where_there_are_any_and_nothing_else_does() {
        let coloured = "\u{1b}[1;31merror\u{1b}[0m\u{1b}[m\u{1b}[5A\u{1b}[1;31";
        assert_eq!(lines(coloured, true), "\u{1b}[1;31merror\u{1b}[0m\u{1b}[m\\u{1b}[5A\\u{1b}[1;31");
        assert!(!lines(coloured, false).contains('\u{1b}'));
    }

    #[test]
    fn json_says_the_same_with_escapes() {
        let value = serde_json::json!({"a": HOSTILE, "b": ["\u{9b}", "plain"]});
        let text = json(serde_json::to_string_pretty(&value).unwrap());
        assert!(!text.chars().any(|c| acts(c) && c != '\n'), "{text:?}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }

    #[test]
    fn a_log_is_fit_however_it_is_cut() {
        let log = [HOSTILE.as_bytes(), b"\xff\n", "é\u{1b}[31m日本\n".as_bytes(), b"\xe6\x97"].concat();
        let of = |size: usize| {
            let mut bytes = Bytes::default();
            let mut out: Vec<u8> = log.chunks(size).flat_map(|piece| bytes.next(piece)).collect();
            out.extend(bytes.end());
            String::from_utf8(out).unwrap()
        };
        let whole = of(log.len());
        assert!(!whole.chars().any(|c| acts(c) && c != '\n'), "{whole:?}");
        assert!(whole.contains("\\xff\né\\u{1b}[31m日本\n") && whole.ends_with("\\xe6\\x97"), "{whole}");
        for size in 1..9 {
            assert_eq!(of(size), whole, "{size}");
        }
    }
}
