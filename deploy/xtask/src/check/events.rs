//! The list of events: every reason that a source tells is in docs/events.md, and every row's place tells its reason.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::Finding;
use super::source::{Source, sources};

/// The list, relative to the workspace.
const LIST: &str = "docs/events.md";
/// Where places of the list begin.
const PLACES: &str = "services";
/// The calls that record an event.
const CALLS: [&str; 2] = [".normal(", ".warning("];

/// Checks the list of the workspace at `root`.
///
/// # Errors
/// The list or a source cannot be read.
pub fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let list = fs::read_to_string(root.join(LIST)).with_context(|| format!("cannot read {LIST}"))?;
    let mut findings = Vec::new();
    let mut known = BTreeSet::new();
    for row in rows(&list) {
        for place in &row.places {
            let text = fs::read_to_string(root.join(PLACES).join(place)).unwrap_or_default();
            for reason in row.reasons.iter().filter(|reason| !text.contains(&format!("\"{reason}\""))) {
                let message = format!("{reason} is not told in {PLACES}/{place}");
                findings.push(Finding { file: PathBuf::from(LIST), line: row.line, message });
            }
        }
        if row.places.is_empty() {
            let message = format!("{:?} has no place", row.reasons);
            findings.push(Finding { file: PathBuf::from(LIST), line: row.line, message });
        }
        known.extend(row.reasons);
    }
    for source in sources(root, Path::new(PLACES))? {
        if source.file.components().any(|part| part.as_os_str() == "tests") {
            continue;
        }
        let text = fs::read_to_string(root.join(&source.file))?;
        for (line, reason) in told(&source, &text) {
            if !known.contains(&reason) {
                let message = format!("the event {reason} is not in {LIST}");
                findings.push(Finding { file: source.file.clone(), line, message });
            }
        }
    }
    Ok(findings)
}

struct Row {
    line: usize,
    reasons: Vec<String>,
    places: Vec<String>,
}

/// What stands between backticks.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(ToOwned::to_owned).collect()
}

/// The rows `| reasons | type | message | places | differs |`.
fn rows(list: &str) -> impl Iterator<Item = Row> + '_ {
    list.lines().enumerate().filter(|(_, text)| text.starts_with("| `")).map(|(index, text)| {
        let cells: Vec<&str> = text.split('|').collect();
        let cell = |at: usize| quoted(cells.get(at).copied().unwrap_or_default());
        Row { line: index + 1, reasons: cell(1), places: cell(4) }
    })
}

/// The reasons that stand as literals in calls that record an event, with their lines; not those of tests.
fn told(source: &Source, text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for call in CALLS {
        for (at, _) in source.code.match_indices(call) {
            let before = source.code[..at].trim_end();
            let receiver = before.rsplit(|c: char| c.is_whitespace() || c == '(').next().unwrap_or_default();
            if !receiver.contains("events") && !receiver.contains("ring") {
                continue;
            }
            // Blanked code has the offsets of the text.
            let end = at + call.len() + source.bracket(at).len();
            let literals = text.get(at..end).unwrap_or_default().split('"').skip(1).step_by(2);
            found.extend(
                literals.filter(|word| is_reason(word)).map(|word| (source.line(at), word.to_owned())),
            );
        }
    }
    found
}

/// One word that begins with a capital letter.
fn is_reason(word: &str) -> bool {
    word.len() > 3
        && word.starts_with(|c: char| c.is_ascii_uppercase())
        && word.chars().all(|c| c.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_of_calls_are_found_and_those_of_tests_and_of_other_calls_are_not() {
        let text = "fn a() {\n    self.events.warning(node, \"Broken\", format!(\"{why}\"));\n    log.warning(\"Other\");\n    ctx.events\n        .normal(\n            object,\n            \"Mended\",\n            \"It was mended\",\n        );\n}\n#[cfg(test)]\nmod tests {\n    fn b() { events.normal(x, \"Tested\", y); }\n}\n";
        let source = Source::new(Path::new("services/x/src/lib.rs"), text);
        let mut reasons: Vec<String> = told(&source, text).into_iter().map(|(_, reason)| reason).collect();
        reasons.sort();
        assert_eq!(reasons, ["Broken", "Mended"]);
    }

    #[test]
    fn rows_have_reasons_and_places() {
        let list = "| reason | type |\n|---|---|\n| `A`, `B` | Normal | `C` happened | `x/src/a.rs` `y/src/b.rs` | |\n";
        let rows: Vec<Row> = rows(list).collect();
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0].line, &*rows[0].reasons), (3, &["A".to_owned(), "B".to_owned()][..]));
        assert_eq!(rows[0].places, ["x/src/a.rs", "y/src/b.rs"]);
    }
}
