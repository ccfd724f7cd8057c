//! Rust sources as the checks search them: without comments, string contents and, if wanted, test code.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// A source file in which comments, literals and `#[cfg(test)]` items are replaced by blanks. Lines and offsets do not change.
#[derive(Debug)]
pub struct Source {
    /// The path, relative to the workspace.
    pub file: PathBuf,
    /// The remaining code.
    pub code: String,
}

impl Source {
    /// The source with the content `text` and the path `file`.
    pub fn new(file: &Path, text: &str) -> Self {
        let code = blank_test_items(&blank_literals(text));
        Self { file: file.to_owned(), code }
    }

    /// Like [`Self::new`], but test code is kept.
    pub fn with_tests(file: &Path, text: &str) -> Self {
        Self { file: file.to_owned(), code: blank_literals(text) }
    }

    /// The line of a byte offset, counted from 1.
    pub fn line(&self, offset: usize) -> usize {
        self.code.as_bytes().iter().take(offset).filter(|byte| **byte == b'\n').count() + 1
    }

    /// The offsets at which the code has `path` (such as `std::fs` or `Server::builder`), but not as a part of a longer name.
    pub fn find(&self, path: &str) -> Vec<usize> {
        let is_name = |c: char| c.is_alphanumeric() || c == '_';
        let found = self.code.match_indices(path).map(|(at, _)| at);
        found
            .filter(|at| {
                let before = self.code[..*at].chars().next_back();
                let after = self.code[at + path.len()..].chars().next();
                let open_end = path.ends_with(|c| !is_name(c));
                !before.is_some_and(is_name) && (open_end || !after.is_some_and(is_name))
            })
            .collect()
    }

    /// The functions that are marked as tests: line and name.
    pub fn test_functions(&self) -> Vec<(usize, String)> {
        let mut tests = Vec::new();
        let mut is_marked = false;
        for (index, line) in self.code.lines().map(str::trim_start).enumerate() {
            is_marked |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
            let Some(rest) = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ") else {
                continue;
            };
            if std::mem::take(&mut is_marked) {
                let is_name = |c: char| c.is_alphanumeric() || c == '_';
                tests.push((index + 1, rest.split(|c| !is_name(c)).next().unwrap_or_default().to_owned()));
            }
        }
        tests
    }

    /// The text inside the first pair of parentheses that opens at or after `offset`.
    pub fn parentheses(&self, offset: usize) -> &str {
        let Some(open) = self.code[offset..].find('(').map(|at| offset + at) else { return "" };
        &self.code[open + 1..matching(&self.code, open).unwrap_or(self.code.len())]
    }
}

/// The offset of the parenthesis or brace that closes the one at `open`.
pub fn matching(code: &str, open: usize) -> Option<usize> {
    let (opening, closing) = if code[open..].starts_with('(') { ('(', ')') } else { ('{', '}') };
    let mut depth = 0_usize;
    for (at, c) in code[open..].char_indices() {
        if c == opening {
            depth += 1;
        } else if c == closing {
            depth -= 1;
            if depth == 0 {
                return Some(open + at);
            }
        }
    }
    None
}

/// Every `.rs` file below `root`/`folder`; none if the folder does not exist.
pub fn sources(root: &Path, folder: &Path) -> anyhow::Result<Vec<Source>> {
    let mut open = vec![root.join(folder)];
    let mut found = Vec::new();
    while let Some(folder) = open.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text =
                    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
                found.push(Source::new(path.strip_prefix(root).unwrap_or(&path), &text));
            }
        }
    }
    found.sort_by(|one, other| one.file.cmp(&other.file));
    Ok(found)
}

/// Replaces comments and literals by blanks.
fn blank_literals(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let end = at + token_length(bytes, at);
        if end - at == 1 {
            out.push(bytes[at]);
        } else {
            out.extend(bytes[at..end].iter().map(|byte| if *byte == b'\n' { b'\n' } else { b' ' }));
        }
        at = end;
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// The length in bytes of the comment or literal at `at`, or 1 if there is none.
fn token_length(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    let starts_name = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    match rest {
        [b'/', b'/', ..] => rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len()),
        [b'/', b'*', ..] => block_comment_length(rest),
        [b'"', ..] => string_length(rest),
        [b'r', b'"' | b'#', ..] if !starts_name => raw_string_length(rest, 1),
        [b'b', b'r', b'"' | b'#', ..] if !starts_name => raw_string_length(rest, 2),
        [b'\'', ..] => char_length(rest),
        _ => 1,
    }
}

fn block_comment_length(rest: &[u8]) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < rest.len() {
        match rest[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] if depth == 1 => return at + 2,
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    rest.len()
}

fn string_length(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

fn raw_string_length(rest: &[u8], prefix: usize) -> usize {
    let hashes = rest[prefix..].iter().take_while(|byte| **byte == b'#').count();
    if rest.get(prefix + hashes) != Some(&b'"') {
        // `r#name` is an identifier.
        return 1;
    }
    let mut end = vec![b'"'];
    end.resize(hashes + 1, b'#');
    let body = prefix + hashes + 1;
    rest[body..]
        .windows(end.len())
        .position(|part| part == end)
        .map_or(rest.len(), |at| body + at + end.len())
}

/// The length in bytes of a character literal, or 1 for a lifetime.
fn char_length(rest: &[u8]) -> usize {
    match rest {
        [_, b'\\', ..] => rest.iter().skip(3).position(|byte| *byte == b'\'').map_or(1, |at| at + 4),
        _ => {
            let close = rest.iter().skip(1).take(5).position(|byte| *byte == b'\'');
            // A character literal has exactly one character between the quotes, with at most four bytes.
            let one = |at: usize| std::str::from_utf8(&rest[1..=at]).is_ok_and(|s| s.chars().count() == 1);
            close.filter(|at| one(*at)).map_or(1, |at| at + 2)
        }
    }
}

/// Replaces each item with `#[cfg(test)]` by blanks, up to its closing brace or its semicolon.
fn blank_test_items(code: &str) -> String {
    const MARK: &str = "#[cfg(test)]";
    let mut out = code.as_bytes().to_vec();
    let mut from = 0;
    while let Some(start) = code[from..].find(MARK).map(|at| from + at) {
        let mut depth = 0_usize;
        let mut end = code.len();
        for (at, c) in code[start + MARK.len()..].char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth <= 1 => end = start + MARK.len() + at + 1,
                '}' => depth -= 1,
                ';' if depth == 0 => end = start + MARK.len() + at + 1,
                _ => {}
            }
            if end < code.len() {
                break;
            }
        }
        for byte in out[start..end].iter_mut().filter(|byte| **byte != b'\n') {
            *byte = b' ';
        }
        from = end;
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        Source::new(Path::new("x.rs"), text).code
    }

    #[test]
    fn comments_and_literals_become_blanks_and_lines_keep_their_numbers() {
        let text = "a // std::fs\nb /* x /* y */ std::net */ c\nd(\"std::env \\\" x\", r#\"std::fs\"#, '\"', b\"x\") e";
        let code = code(text);
        assert!(!code.contains("std"), "{code}");
        assert_eq!(code.lines().count(), 3);
        for name in ["a ", "b ", " c", "d(", " e"] {
            assert!(code.contains(name), "{name} in {code}");
        }
    }

    #[test]
    fn a_lifetime_is_not_the_start_of_a_character_literal() {
        let code = code("fn f<'a>(x: &'a str, c: char) { if c == '\\'' || c == 'ä' { g() } }");
        assert!(code.contains("&'a str") && code.contains("g()"), "{code}");
    }

    #[test]
    fn test_items_become_blanks_and_code_after_them_is_kept() {
        let code = code(
            "use a;\n#[cfg(test)]\nmod tests { fn f() { std::fs::x() } }\nfn g() {}\n#[cfg(test)]\nuse std::fs;\nfn h() {}",
        );
        assert!(!code.contains("std::fs"), "{code}");
        assert!(code.contains("fn g()") && code.contains("fn h()"), "{code}");
    }

    #[test]
    fn a_path_is_not_found_in_longer_names() {
        let source = Source::new(Path::new("x.rs"), "use std::fs;\nstd::fsx;\nmystd::fs;\nstd::fs::read()");
        let lines: Vec<usize> = source.find("std::fs").into_iter().map(|at| source.line(at)).collect();
        assert_eq!(lines, [1, 4]);
    }

    #[test]
    fn nested_parentheses_belong_to_the_text_inside() {
        let source = Source::new(Path::new("x.rs"), "x.peer( f(1), g() ).y()");
        assert_eq!(source.parentheses(1).trim(), "f(1), g()");
    }
}
