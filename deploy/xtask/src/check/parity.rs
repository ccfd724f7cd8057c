//! The parity ledger: every required section of the specification has a row, every row of a built behaviour names existing tests
//! or the reason for having none, and every anchor of the ledger that sources refer to exists.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::Finding;
use super::graph::Graph;
use super::links::anchors;
use super::source::Source;

/// The ledger, relative to the workspace.
const LEDGER: &str = "docs/parity.md";
/// The folder of its rows, with one file for each area.
const AREAS: &str = "docs/parity";

/// The sections of the specification that must have a row: a letter for the document, then the section's number.
const SECTIONS: &[&str] = &[
    "L1", "L2.1", "L2.2", "L2.3", "L2.5", "L2.6", "L4", "L6.1", "L6.2", "L6.3", "L6.4", "L6.5", "L6.6", "L7",
    "L8.1", "L8.2", "L8.3", "L8.4", "L9.1", "L9.2", "L9.3", "L9.4", "L9.5", "L9.6", "L9.7", "L9.8", "L9.9",
    "L9.10", "L9.11", "L9.12", "L10", "L11", "L12", "L13.1", "L13.2", "L13.3", "L13.4", "L14.1", "L14.2",
    "L14.3", "L14.4", "L14.5", "L14.6", "L15", "L15.1", "L15.3", "L17", "L18", "L19", "L20", "L24", "R1.1",
    "R1.2", "R1.3", "R1.4", "R1.5", "R1.6", "R2.1", "R2.2", "R2.3", "R2.4", "R2.5", "R2.6", "R2.7", "R2.8",
    "R3.1", "R3.2", "R3.3", "R3.4", "R3.5", "R3.6", "R3.7", "R3.8", "R4.1", "R4.2", "R4.3", "R4.4", "R5",
    "R6.1", "R6.2", "R6.3", "R6.4", "R6.5", "R6.7", "R7.2", "R7.3", "R7.4", "R7.5", "R7.6", "R7.7", "R8.1",
    "R8.2", "R8.3", "R8.4", "R8.5", "R9", "R10.1", "R10.2", "R10.3", "R10.4", "R11.1", "R11.2", "R11.3",
    "R11.4", "R12.1", "R12.2", "R12.3", "R12.4", "R12.5", "R12.6", "R12.8", "R13.1", "R13.2", "R13.3",
    "R14.1", "R14.2", "R14.3", "R14.4", "R14.5", "V2", "V3.2", "V3.3", "V3.4", "V3.5", "V3.6", "V3.7",
    "V3.8", "V3.9", "V3.10", "V3.11", "V3.12", "V3.13", "V3.14", "V3.16", "V3.17", "V3.18", "V4", "V5", "V6",
    "V7", "V8.3", "V9.1", "V9.2", "V9.3", "V9.4", "V9.5", "V9.6", "V10.1", "V10.2", "V10.3", "V10.4",
    "V10.5", "V10.6", "V10.7", "V10.8", "V10.9", "V11.1", "V11.2", "V11.3", "V11.4", "V11.5", "V11.6",
    "V11.7", "V12", "V13", "N1.1", "N1.2", "N1.3", "N1.4", "N1.5", "N1.6", "N2.1", "N2.2", "N2.3", "N2.4",
    "N2.5", "N2.7", "N3", "N4.1", "N4.2", "N4.3", "N4.4", "N4.5", "N4.6", "N4.7", "N4.8", "N4.9", "N5",
    "N6.1", "N6.2", "N6.3", "N6.4", "N6.5", "N6.6", "N7", "N8.1", "N8.2", "N8.3", "N8.4", "N8.5", "N8.6",
    "N8.7", "N8.8", "N8.9", "N8.10", "N8.11", "N8.12", "N9.1", "N9.2", "N9.3", "N9.4", "N9.5", "N9.7",
    "N9.8", "N11", "N13", "N14", "N15.1", "N15.2", "N15.4", "N15.5",
];

/// The capabilities that are not built at all. The state of a row that belongs to one of them is `later (…)`; the state of any
/// other missing behaviour is `not yet`.
const CAPABILITIES: &[&str] =
    &["devices", "dynamic resources", "exclusive CPUs", "feature gates", "resize", "user namespaces"];

/// The beginning of a row's tests if it has none. The reason follows.
const NO_TEST: &str = "no test:";

/// The least number of words in a reason.
const REASON_WORDS: usize = 3;

/// The folders that are searched for references to the ledger.
const FOLDERS: [&str; 6] = ["services", "shared", "proto", "deploy", "tests", "docs"];

/// Checks the ledger of the workspace at `root` and the references to it.
///
/// # Errors
/// The ledger is missing, or a file cannot be read.
pub fn check(root: &Path, graph: &Graph) -> anyhow::Result<Vec<Finding>> {
    let index = fs::read_to_string(root.join(LEDGER)).with_context(|| format!("cannot read {LEDGER}"))?;
    let mut ledger = files(root, Path::new(AREAS), &["md"])?;
    ledger.push((LEDGER.into(), index));
    let tests = Tests::of_workspace(root, graph)?;
    let mut findings = check_ledger(&ledger, &tests, SECTIONS);
    let anchors: BTreeMap<PathBuf, BTreeSet<String>> =
        ledger.iter().map(|(file, text)| (file.clone(), anchors(text))).collect();
    for folder in FOLDERS {
        for (file, text) in files(root, Path::new(folder), &["rs", "md", "proto", "toml", "sh", "yaml"])? {
            for (target, anchors) in &anchors {
                findings.extend(dangling_references(&file, &text, target, anchors));
            }
        }
    }
    Ok(findings)
}

/// The names of the tests in each file of each package.
#[derive(Debug, Default)]
struct Tests(BTreeMap<String, Vec<(PathBuf, BTreeSet<String>)>>);

impl Tests {
    fn of_workspace(root: &Path, graph: &Graph) -> anyhow::Result<Self> {
        let mut tests = Self::default();
        for (package, folder) in graph.packages_in(root, |_| true) {
            for part in ["src", "tests"] {
                for (file, text) in files(root, &folder.join(part), &["rs"])? {
                    let within = file.strip_prefix(&folder).unwrap_or(&file).to_owned();
                    tests.add(&package.name, within, &text);
                }
            }
        }
        Ok(tests)
    }

    fn add(&mut self, package: &str, file: PathBuf, text: &str) {
        let tests = Source::with_tests(&file, text).test_functions();
        let names = tests.into_iter().map(|(_, name)| name).collect();
        let short = package.strip_prefix("keelson-").unwrap_or(package);
        self.0.entry(short.to_owned()).or_default().push((file, names));
    }

    /// Returns an error message if `reference` does not name an existing test. A reference is `package::module::test` with any
    /// part of the module's path, or `tests/file::test` for a test of the whole agent.
    fn reference_error(&self, reference: &str) -> Option<String> {
        let whole_agent = reference.strip_prefix("tests/").map(|rest| format!("tests::{rest}"));
        let path = whole_agent.as_deref().unwrap_or(reference);
        let parts: Vec<&str> = path.split("::").collect();
        let [package, modules @ .., test] = parts.as_slice() else {
            return Some(format!("{reference:?} does not have the form package::module::test"));
        };
        let Some(files) = self.0.get(*package) else {
            return Some(format!("{reference:?}: there is no package {package}"));
        };
        let known = |(_, names): &&(PathBuf, BTreeSet<String>)| names.contains(*test);
        let found: Vec<_> = files.iter().filter(known).collect();
        if found.is_empty() {
            return Some(format!("{reference:?}: {package} has no test {test}"));
        }
        if found.iter().any(|(file, _)| modules.iter().all(|module| is_on_path(file, module))) {
            return None;
        }
        let (file, _) = found[0];
        Some(format!("{reference:?}: the test is in {} of {package}", file.display()))
    }
}

/// Whether the file itself or a folder of its path has the module's name.
fn is_on_path(file: &Path, module: &str) -> bool {
    let stem = file.file_stem().is_some_and(|stem| stem == module);
    stem || file.components().any(|part| part.as_os_str() == module)
}

/// Selects a text field of a row.
type Field = fn(&mut Row) -> &mut String;

/// One row of the ledger.
#[derive(Debug, Default)]
struct Row {
    line: usize,
    sections: String,
    behaviour: String,
    state: String,
    test: String,
}

/// Parses the rows of a ledger file. A row is a list item that begins with its sections in bold; its state and its tests are
/// items of the nested list.
fn rows(text: &str) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    let mut part: Option<Field> = None;
    for (index, line) in text.lines().enumerate() {
        if let Some((sections, behaviour)) = line.strip_prefix("- **").and_then(|rest| rest.split_once("**"))
        {
            rows.push(Row { line: index + 1, sections: sections.to_owned(), ..Row::default() });
            part = Some(|row| &mut row.behaviour);
            append(rows.last_mut(), part, behaviour.trim());
        } else if let Some(item) = line.strip_prefix("  - ").filter(|_| part.is_some()) {
            let (field, words): (Field, String) = if let Some(tests) = item.strip_prefix("Tests:") {
                (|row| &mut row.test, tests.trim().to_owned())
            } else if let Some(reason) = item.strip_prefix("No test:") {
                (|row| &mut row.test, format!("{NO_TEST}{reason}"))
            } else {
                // Removes the asterisks of the italics around the state.
                (|row| &mut row.state, item.replacen('*', "", 2))
            };
            part = Some(field);
            append(rows.last_mut(), part, &words);
        } else if line.starts_with("  ") {
            append(rows.last_mut(), part, line.trim());
        } else {
            part = None;
        }
    }
    rows
}

/// Appends words to a field of a row, with a blank between them and the text before.
fn append(row: Option<&mut Row>, part: Option<Field>, words: &str) {
    let (Some(row), Some(part)) = (row, part) else { return };
    let text = part(row);
    if !text.is_empty() {
        text.push(' ');
    }
    text.push_str(words);
}

/// Checks the rows of all ledger files, and that each of `sections` has a row.
fn check_ledger(ledger: &[(PathBuf, String)], tests: &Tests, sections: &[&str]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut covered = BTreeSet::new();
    for (file, text) in ledger {
        for row in rows(text) {
            let finding = |message| Finding { file: file.clone(), line: row.line, message };
            covered.extend(row.sections.split(',').map(|section| section.trim().to_owned()));
            if row.sections.is_empty() || row.behaviour.is_empty() {
                findings.push(finding("the row names no section or no behaviour".to_owned()));
            }
            findings.extend(check_state(&row.state, &row.test).into_iter().map(finding));
            let errors = code_spans(&row.test).into_iter().filter_map(|name| tests.reference_error(name));
            findings.extend(errors.map(finding));
        }
    }
    for section in sections.iter().filter(|section| !covered.contains(**section)) {
        let message = format!("section {section} has no row");
        findings.push(Finding { file: LEDGER.into(), line: 1, message });
    }
    findings
}

/// The error messages for a row with this state and these tests.
fn check_state(state: &str, test: &str) -> Vec<String> {
    let mut errors = Vec::new();
    let states = ["same", "different", "not yet", "later"];
    let Some(word) = states.into_iter().find(|word| state.starts_with(word)) else {
        return vec![format!("the state of a row is one of: {}; this one is {state:?}", states.join(", "))];
    };
    if word == "later" {
        let named = state.strip_prefix("later (").and_then(|rest| rest.split_once(')')).map(|(name, _)| name);
        return match named {
            Some(name) if CAPABILITIES.contains(&name) => errors,
            _ => vec![format!("\"later\" needs in parentheses one of: {}", CAPABILITIES.join(", "))],
        };
    }
    if word != "same" && words(&state[word.len()..]) < REASON_WORDS {
        errors.push(format!("{word:?} needs a reason of at least {REASON_WORDS} words"));
    }
    let excused = test.strip_prefix(NO_TEST).is_some_and(|reason| words(reason) >= REASON_WORDS);
    if word != "not yet" && code_spans(test).is_empty() && !excused {
        errors.push(format!(
            "{word:?} needs a test, or \"No test:\" with a reason of at least {REASON_WORDS} words"
        ));
    }
    errors
}

/// The number of words in a text.
fn words(text: &str) -> usize {
    text.split_whitespace().filter(|word| word.chars().any(char::is_alphanumeric)).count()
}

/// The code spans in a text, without their backticks.
fn code_spans(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// A finding for each reference in `text` to an anchor that the ledger file `target` does not have. `text` is the content of
/// `file`.
fn dangling_references(file: &Path, text: &str, target: &Path, anchors: &BTreeSet<String>) -> Vec<Finding> {
    let mark = format!("{}#", target.display());
    let mut findings = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for rest in line.split(&mark).skip(1) {
            let anchor: String =
                rest.chars().take_while(|c| c.is_alphanumeric() || "-_".contains(*c)).collect();
            if !anchors.contains(&anchor) {
                let message = format!("{} has no anchor {anchor:?}", target.display());
                findings.push(Finding { file: file.to_owned(), line: index + 1, message });
            }
        }
    }
    findings
}

/// The paths, relative to `root`, and the texts of the files below `root`/`folder` with one of these extensions. Empty if the
/// folder does not exist.
pub(super) fn files(
    root: &Path,
    folder: &Path,
    extensions: &[&str],
) -> anyhow::Result<Vec<(PathBuf, String)>> {
    let mut open = vec![root.join(folder)];
    let mut found = Vec::new();
    while let Some(folder) = open.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for path in entries.flatten().map(|entry| entry.path()) {
            let extension = path.extension().and_then(|extension| extension.to_str());
            if path.is_dir() {
                open.push(path);
            } else if extension.is_some_and(|extension| extensions.contains(&extension)) {
                let text =
                    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
                found.push((path.strip_prefix(root).unwrap_or(&path).to_owned(), text));
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some_tests() -> Tests {
        let mut tests = Tests::default();
        let text = "// fn not_this() {}\n#[test]\nfn plain() {}\nfn helper() {}\n#[tokio::test(start_paused = true)]\n#[ignore]\nasync fn later() {}\nconst X: &str = \"#[test]\";\nfn helper_too() {}";
        tests.add("keelson-pod-sync-core", "src/actions/tests.rs".into(), text);
        tests.add("keelson-tests", "tests/one_pod.rs".into(), "#[test]\nfn whole() {}");
        tests
    }

    fn messages(ledger: &str, sections: &[&str]) -> Vec<String> {
        let ledger = [("docs/parity/x.md".into(), ledger.to_owned())];
        check_ledger(&ledger, &some_tests(), sections).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn valid_rows_have_no_findings() {
        let ledger = "- **L1** a\n  - *same*\n  - Tests: `pod-sync-core::actions::plain`,\n    `pod-sync-core::later`\n\
                      - **L2.1, L2.2** b\n  - *different*: it is\n    better so\n  - Tests: `tests/one_pod::whole`\n\
                      - **L4** c\n  - *same*\n  - No test: shown by the benchmark\n\
                      - **L5** d\n  - *not yet*: nobody has built it\n\
                      - **L5** e\n  - *later (resize)*\n\
                      - **L5** f\n  - *later (devices)*: the rest is there\n  - Tests: `pod-sync-core::later`";
        assert_eq!(messages(ledger, &["L1", "L2.2", "L5"]), Vec::<String>::new());
    }

    #[test]
    fn a_reference_to_a_missing_test_is_found() {
        for (name, part) in [
            ("pod-sync-core::gone", "has no test gone"),
            ("pod-sync-core::helper", "has no test helper"),
            ("pod-sync-core::helper_too", "has no test helper_too"),
            ("pod-sync-core::not_this", "has no test not_this"),
            ("pod-sync-core::worker::plain", "is in src/actions/tests.rs"),
            ("tests/killed::whole", "is in tests/one_pod.rs"),
            ("nobody::plain", "no package nobody"),
            ("plain", "does not have the form package::module::test"),
        ] {
            let found = messages(&format!("- **L1** a\n  - *same*\n  - Tests: `{name}`"), &[]);
            assert!(found.len() == 1 && found[0].contains(part), "{name}: {found:?}");
        }
    }

    #[test]
    fn a_row_without_a_state_a_test_or_a_reason_is_found() {
        for (row, part) in [
            ("- **L1** a\n  - *same*", "needs a test"),
            ("- **L1** a\n  - *same*\n  - No test: because", "needs a test"),
            ("- **L1** a\n  - *different*: is better so", "needs a test"),
            ("- **L1** a\n  - *different*\n  - Tests: `pod-sync-core::plain`", "needs a reason"),
            ("- **L1** a\n  - *not yet*", "needs a reason"),
            ("- **L1** a\n  - *later*", "needs in parentheses"),
            ("- **L1** a\n  - *later (some day)*", "needs in parentheses"),
            ("- **L1** a\n  - *perhaps* it is so", "the state of a row is one of"),
            ("- **L1**\n  - *same*\n  - Tests: `pod-sync-core::plain`", "no behaviour"),
            ("- **L1** a", "the state of a row is one of"),
        ] {
            let found = messages(row, &[]);
            assert!(found.len() == 1 && found[0].contains(part), "{row}: {found:?}");
        }
    }

    #[test]
    fn a_section_without_a_row_is_found() {
        assert_eq!(messages("", &["L1"]), ["section L1 has no row"]);
        assert_eq!(messages("- **L10** a\n  - *not yet*: it will be built", &["L1"]).len(), 1);
    }

    #[test]
    fn lists_without_bold_sections_are_not_rows() {
        let text = "- *same*: as it is\n- other\n  - *same*\n\n- **L1** x\n  y\n  - *same*\n\n  z\n";
        let rows = rows(text);
        assert_eq!(rows.len(), 1);
        let row = &rows[0];
        assert_eq!((row.line, row.behaviour.as_str(), row.state.as_str()), (5, "x y", "same"));
    }

    #[test]
    fn a_reference_to_a_missing_anchor_of_the_ledger_is_found() {
        let titles = anchors("# Title\n## Pod actions (§9)\n<a id=\"by-hand\"></a>\n#no heading");
        assert_eq!(titles, ["by-hand", "pod-actions-9", "title"].map(str::to_owned).into());
        let target = Path::new("docs/parity/x.md");
        let text = format!("// see {0}#title\n// and `{0}#gone`, {0}#by-hand.", target.display());
        let found = dangling_references(Path::new("x.rs"), &text, target, &titles);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].line, found[0].message.contains("\"gone\"")), (2, true));
    }
}
