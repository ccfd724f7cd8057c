//! docs/events.md lists the reason of every event that a service records, and each row names files that have its reasons.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::Finding;
use super::source::{Source, sources};

/// The list, relative to the workspace.
const LIST: &str = "docs/events.md";
/// The folder that the paths in the list are relative to.
const SOURCES: &str = "services";
/// The calls that record an event.
const CALLS: [&str; 2] = [".normal(", ".warning("];

/// Compares the list with the sources of the workspace at `root`.
///
/// # Errors
/// The list or a source cannot be read.
pub fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let list = fs::read_to_string(root.join(LIST)).with_context(|| format!("cannot read {LIST}"))?;
    let mut findings = Vec::new();
    let mut known = BTreeSet::new();
    for row in rows(&list) {
        for file in &row.files {
            let text = fs::read_to_string(root.join(SOURCES).join(file)).unwrap_or_default();
            for reason in row.reasons.iter().filter(|reason| !text.contains(&format!("\"{reason}\""))) {
                let message = format!("{SOURCES}/{file} does not have the reason {reason}");
                findings.push(Finding { file: PathBuf::from(LIST), line: row.line, message });
            }
        }
        if row.files.is_empty() {
            let message = format!("the row of {:?} names no file", row.reasons);
            findings.push(Finding { file: PathBuf::from(LIST), line: row.line, message });
        }
        known.extend(row.reasons);
    }
    for source in sources(root, Path::new(SOURCES))? {
        if source.file.components().any(|part| part.as_os_str() == "tests") {
            continue;
        }
        let text = fs::read_to_string(root.join(&source.file))?;
        for (line, reason) in recorded_reasons(&source, &text) {
            if !known.contains(&reason) {
                let message = format!("the reason {reason} is not in {LIST}; add a row for the event");
                findings.push(Finding { file: source.file.clone(), line, message });
            }
        }
    }
    Ok(findings)
}

/// A row of the list.
struct Row {
    line: usize,
    reasons: Vec<String>,
    /// The source files that record the event, relative to [`SOURCES`].
    files: Vec<String>,
}

/// The code spans in a cell of a Markdown table, without their backticks.
fn code_spans(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(ToOwned::to_owned).collect()
}

/// The rows of the list, which have the form `| reasons | type | message | files | differs |`.
fn rows(list: &str) -> impl Iterator<Item = Row> + '_ {
    list.lines().enumerate().filter(|(_, text)| text.starts_with("| `")).map(|(index, text)| {
        let cells: Vec<&str> = text.split('|').collect();
        let cell = |at: usize| code_spans(cells.get(at).copied().unwrap_or_default());
        Row { line: index + 1, reasons: cell(1), files: cell(4) }
    })
}

/// The reasons in the calls that record an event, with their lines, without test code. Only string literals are found. `text`
/// is the unchanged text of `source`.
fn recorded_reasons(source: &Source, text: &str) -> Vec<(usize, String)> {
    let mut reasons = Vec::new();
    for call in CALLS {
        for (at, _) in source.code.match_indices(call) {
            let before = source.code[..at].trim_end();
            let receiver = before.rsplit(|c: char| c.is_whitespace() || c == '(').next().unwrap_or_default();
            if !receiver.contains("events") && !receiver.contains("ring") {
                continue;
            }
            // Blanking changes no offsets, so those of the code are valid in the text.
            let end = at + call.len() + source.parentheses(at).len();
            let literals = text.get(at..end).unwrap_or_default().split('"').skip(1).step_by(2);
            reasons.extend(
                literals.filter(|word| is_reason(word)).map(|word| (source.line(at), word.to_owned())),
            );
        }
    }
    reasons
}

/// Whether a literal has the form of a reason: one word that begins with a capital letter.
fn is_reason(word: &str) -> bool {
    word.len() > 3
        && word.starts_with(|c: char| c.is_ascii_uppercase())
        && word.chars().all(|c| c.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_found_in_event_calls_outside_of_tests() {
        let text = "fn a() {\n    self.events.warning(node, \"Broken\", format!(\"{why}\"));\n    log.warning(\"Other\");\n    ctx.events\n        .normal(\n            object,\n            \"Mended\",\n            \"It was mended\",\n        );\n}\n#[cfg(test)]\nmod tests {\n    fn b() { events.normal(x, \"Tested\", y); }\n}\n";
        let source = Source::new(Path::new("services/x/src/lib.rs"), text);
        let mut reasons: Vec<String> =
            recorded_reasons(&source, text).into_iter().map(|(_, reason)| reason).collect();
        reasons.sort();
        assert_eq!(reasons, ["Broken", "Mended"]);
    }

    #[test]
    fn a_row_has_reasons_and_files() {
        let list = "| reason | type |\n|---|---|\n| `A`, `B` | Normal | `C` happened | `x/src/a.rs` `y/src/b.rs` | |\n";
        let rows: Vec<Row> = rows(list).collect();
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0].line, &*rows[0].reasons), (3, &["A".to_owned(), "B".to_owned()][..]));
        assert_eq!(rows[0].files, ["x/src/a.rs", "y/src/b.rs"]);
    }
}
