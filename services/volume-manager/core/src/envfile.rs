//! Files with variables, of which `fileKeyRef` names one (runtime-and-resources.md §3.4): `NAME='value'` lines in
//! single quotes, which may span lines, and `#` comments. A value stands as it is, without escapes.

/// A file that cannot be read as one of variables.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct EnvFileError {
    /// Counted from 1.
    pub line: usize,
    /// What is wrong there, and how it should be. Never the content.
    pub problem: &'static str,
}

/// The value that `key` has in a file of this text; none when it has no such key. Of two lines with one key the
/// first counts; what comes after it is not looked at.
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
        let fault = |problem| EnvFileError { line, problem };
        let (name, assigned) = first.split_once('=').ok_or(fault("it has no '='; write NAME='value'"))?;
        if name.is_empty() || name.contains([' ', '\t']) {
            return Err(fault("there must be a name right before the '='"));
        }
        if assigned.is_empty() || assigned.starts_with([' ', '\t']) {
            // As in a shell: nothing is assigned.
            if name == key {
                return Ok(Some(String::new()));
            }
            rest = after_line(here, end);
            line += 1;
            continue;
        }
        if !assigned.starts_with('\'') {
            return Err(fault("the value must be in single quotes"));
        }
        let quoted = &here[name.len() + 2..];
        let close = quoted.find('\'').ok_or(fault("the quote is not closed"))?;
        let (value, tail) = (&quoted[..close], &quoted[close + 1..]);
        line += value.matches('\n').count();
        let end = tail.find('\n').unwrap_or(tail.len());
        let remark = tail[..end].trim();
        if !(remark.is_empty() || remark.starts_with('#') && tail.starts_with([' ', '\t'])) {
            let problem = "after the closing quote there may only be a comment";
            return Err(EnvFileError { line, problem });
        }
        if name == key {
            return Ok(Some(value.to_owned()));
        }
        rest = after_line(tail, end);
        line += 1;
    }
    Ok(None)
}

/// What follows the line that ends at `end`.
fn after_line(text: &str, end: usize) -> &str {
    text.get(end + 1..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_key_has_its_quoted_value_as_it_stands() {
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
    fn what_is_no_such_line_is_an_error_with_its_number_and_without_its_content() {
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
    fn what_comes_after_the_key_is_not_looked_at() {
        assert_eq!(value_of("A='1'\nbroken", "A"), Ok(Some("1".to_owned())));
        assert!(value_of("A='1'\nbroken", "B").is_err());
    }

    #[test]
    fn no_text_makes_it_panic_and_a_written_value_is_read() {
        let reached = &Reached::default();
        let junk = prop_oneof!["\\PC{0,40}", "A?=?[A'=# \\n]{0,8}", "A='[a\\n]{0,3}'?[ #a]{0,3}"];
        let value = prop_oneof!["[^']{0,20}", "[a#= \\n]{0,20}"];
        proptest!(ProptestConfig::with_cases(2048), |(junk in junk, value in value)| {
            let found = value_of(&junk, "A");
            prop_assert_eq!(value_of(&format!("X='1'\nA='{value}'\n"), "A"), Ok(Some(value.clone())));
            let fault = |part: &str| found.as_ref().is_err_and(|error| error.problem.contains(part));
            reached.case([
                ("a value that spans lines", value.contains('\n')),
                ("a value of one line", !value.contains('\n')),
                ("junk: a value", matches!(found, Ok(Some(_)))),
                ("junk: no such key", found == Ok(None)),
                ("junk: no '='", fault("no '='")),
                ("junk: no name", fault("name right before")),
                ("junk: not quoted", fault("in single quotes")),
                ("junk: not closed", fault("not closed")),
                ("junk: more after the quote", fault("closing quote")),
            ]);
        });
        // The rarest: "junk: no such key", in one case of 20.
        reached.assert_each();
    }
}
