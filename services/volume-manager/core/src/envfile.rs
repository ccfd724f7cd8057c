//! Environment files, whose keys `fileKeyRef` refers to (runtime-and-resources.md §3.4): `NAME='value'` entries in
//! single quotes, which may span lines, and `#` comments. Values have no escapes.

/// A syntax error in an environment file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct EnvFileError {
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong and how to fix it. Never contains the line's content.
    pub message: &'static str,
}

/// The value of `key` in an environment file with this text; `None` if it has no such key. Of two entries with one
/// key the first one counts; the text after it is not parsed.
pub fn value_of(text: &str, key: &str) -> Result<Option<String>, EnvFileError> {
    let mut rest = text;
    let mut line = 1;
    while !rest.is_empty() {
        let here = rest.trim_start_matches([' ', '\t']);
        let end = here.find('\n').unwrap_or(here.len());
        let first = here[..end].trim_end_matches('\r');
        if first.trim().is_empty() || first.starts_with('#') {
            rest = after_line(here, end);
            line += 1;
            continue;
        }
        let error = |message| EnvFileError { line, message };
        let (name, assigned) = first.split_once('=').ok_or(error("no '=' found; write NAME='value'"))?;
        if name.is_empty() || name.contains([' ', '\t']) {
            return Err(error("there must be a name right before the '='"));
        }
        if assigned.is_empty() || assigned.starts_with([' ', '\t']) {
            // As in a shell, the value is empty.
            if name == key {
                return Ok(Some(String::new()));
            }
            rest = after_line(here, end);
            line += 1;
            continue;
        }
        if !assigned.starts_with('\'') {
            return Err(error("the value must be in single quotes"));
        }
        let quoted = &here[name.len() + 2..];
        let close = quoted.find('\'').ok_or(error("the quote is not closed"))?;
        let (value, tail) = (&quoted[..close], &quoted[close + 1..]);
        line += value.matches('\n').count();
        let end = tail.find('\n').unwrap_or(tail.len());
        let remark = tail[..end].trim();
        if !(remark.is_empty() || remark.starts_with('#') && tail.starts_with([' ', '\t'])) {
            let message = "after the closing quote there may only be a comment";
            return Err(EnvFileError { line, message });
        }
        if name == key {
            return Ok(Some(value.to_owned()));
        }
        rest = after_line(tail, end);
        line += 1;
    }
    Ok(None)
}

/// The text after the line that ends at `end`.
fn after_line(text: &str, end: usize) -> &str {
    text.get(end + 1..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn env_file_values_are_quoted_and_taken_without_escapes() {
        let text = "# a comment\n\nA='1'\n  B='two words' # said so\nC='first\n# no comment\nlast'\nD=''\nE=\nF= 'x'\n\
                    A='later'\nG='$(A) \\n \"q\"'";
        for (key, value) in [
            ("A", Some("1")),
            ("B", Some("two words")),
            ("C", Some("first\n# no comment\nlast")),
            ("D", Some("")),
            ("E", Some("")),
            ("F", Some("")),
            ("G", Some("$(A) \\n \"q\"")),
            ("H", None),
            ("# no comment", None),
        ] {
            assert_eq!(value_of(text, key), Ok(value.map(str::to_owned)), "{key}");
        }
        assert_eq!(value_of("", "A"), Ok(None));
        assert_eq!(value_of("A='1'\r\nB='2'\r\n", "B"), Ok(Some("2".to_owned())));
    }

    #[test]
    fn env_file_syntax_errors_give_the_line_number_but_not_its_content() {
        for (text, line, part) in [
            ("A", 1, "no '='"),
            ("# a comment\nsecret", 2, "no '='"),
            ("E=\nF= 'x'\nsecret", 3, "no '='"),
            ("X='a\nb'\nsecret", 3, "no '='"),
            ("A =1", 1, "name"),
            ("='1'", 1, "name"),
            ("X='1'\nA=secret", 2, "single quotes"),
            ("A=\"secret\"", 1, "single quotes"),
            ("A='secret", 1, "not closed"),
            ("A='1\n2'secret", 2, "comment"),
            ("A='1'#secret", 1, "comment"),
        ] {
            let error = value_of(text, "A").unwrap_err();
            assert_eq!(error.line, line, "{text:?}");
            let shown = error.to_string();
            assert!(shown.contains(part) && !shown.contains("secret"), "{text:?}: {shown}");
        }
    }

    #[test]
    fn env_file_lines_after_the_key_are_not_parsed() {
        assert_eq!(value_of("A='1'\nbroken", "A"), Ok(Some("1".to_owned())));
        assert!(value_of("A='1'\nbroken", "B").is_err());
    }

    #[test]
    fn env_file_parser_never_panics_and_reads_back_a_written_value() {
        let reached = &Reached::default();
        let junk = prop_oneof!["\\PC{0,40}", "A?=?[A'=# \\n]{0,8}", "A='[a\\n]{0,3}'?[ #a]{0,3}"];
        let value = prop_oneof!["[^']{0,20}", "[a#= \\n]{0,20}"];
        proptest!(ProptestConfig::with_cases(2048), |(junk in junk, value in value)| {
            let found = value_of(&junk, "A");
            prop_assert_eq!(value_of(&format!("X='1'\nA='{value}'\n"), "A"), Ok(Some(value.clone())));
            let error = |part: &str| found.as_ref().is_err_and(|error| error.message.contains(part));
            reached.case([
                ("a value that spans lines", value.contains('\n')),
                ("a value of one line", !value.contains('\n')),
                ("junk: a value", matches!(found, Ok(Some(_)))),
                ("junk: no such key", found == Ok(None)),
                ("junk: no '='", error("no '='")),
                ("junk: no name", error("name right before")),
                ("junk: not quoted", error("in single quotes")),
                ("junk: not closed", error("not closed")),
                ("junk: more after the quote", error("closing quote")),
            ]);
        });
        // The rarest: "junk: no such key", in one case of 20.
        reached.assert_each();
    }
}
