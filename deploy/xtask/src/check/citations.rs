//! Citations of the architecture and of the specification name sections that exist.
//!
//! Citations look like `pod-lifecycle.md §9.2` or `architecture §4`, also with several sections (`volumes.md §1, §13`,
//! `node-and-api.md §8.4 to §8.6`). A citation may be split over two lines of a comment.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::Context as _;

use super::Finding;
use super::parity::files;

/// The name of each document in citations, where `.md` may follow it, and its path.
const DOCUMENTS: [(&str, &str); 5] = [
    ("pod-lifecycle", "docs/spec/pod-lifecycle.md"),
    ("node-and-api", "docs/spec/node-and-api.md"),
    ("runtime-and-resources", "docs/spec/runtime-and-resources.md"),
    ("volumes", "docs/spec/volumes.md"),
    ("architecture", "docs/architecture.md"),
];
/// The folders and the extensions of the files that are searched for citations.
const FOLDERS: [&str; 7] = ["services", "shared", "proto", "deploy", "tests", "docs", "fuzz"];
const EXTENSIONS: [&str; 4] = ["rs", "md", "proto", "toml"];
/// The marks that begin a line of a comment.
const COMMENT_MARKS: [&str; 4] = ["//!", "///", "//", "#"];

/// Checks all citations in the workspace at `root`.
///
/// # Errors
/// A document or a source cannot be read.
pub fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let mut documents = Vec::new();
    for (name, path) in DOCUMENTS {
        let text = fs::read_to_string(root.join(path)).with_context(|| format!("cannot read {path}"))?;
        documents.push(Document { name, path, sections: sections(&text) });
    }
    let mut findings = Vec::new();
    for folder in FOLDERS {
        for (file, text) in files(root, Path::new(folder), &EXTENSIONS)? {
            findings.extend(documents.iter().flat_map(|document| document.unknown_sections(&file, &text)));
        }
    }
    Ok(findings)
}

/// A document that is cited.
struct Document {
    /// Its name in citations.
    name: &'static str,
    /// Relative to the workspace.
    path: &'static str,
    /// The numbers of its headings, such as `9` and `9.2`.
    sections: BTreeSet<String>,
}

/// The numbers at the beginning of the headings of a Markdown text.
fn sections(text: &str) -> BTreeSet<String> {
    let titles = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#'));
    titles.map(|title| number(title.trim_start())).filter(|number| !number.is_empty()).collect()
}

/// The section number at the beginning of a text, such as `9.2`, without a full stop at its end. Empty if there is none.
fn number(text: &str) -> String {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    text[..end].trim_end_matches('.').to_owned()
}

impl Document {
    /// A finding for each citation in `text` of a section that this document does not have.
    fn unknown_sections(&self, file: &Path, text: &str) -> Vec<Finding> {
        let mut findings = Vec::new();
        let (joined, starts) = join_lines(text);
        for (at, _) in joined.match_indices(self.name) {
            let is_longer_name = joined[..at].ends_with(|c: char| c.is_alphanumeric() || "-_".contains(c))
                && self.name != "architecture";
            if is_longer_name {
                continue;
            }
            let line = starts.partition_point(|start| *start <= at);
            for section in cited_sections(&joined[at + self.name.len()..]) {
                if !self.sections.contains(&section) {
                    let message = format!("{} has no section {section}", self.path);
                    findings.push(Finding { file: file.to_owned(), line, message });
                }
            }
        }
        findings
    }
}

/// Joins the lines of a text with blanks, without indentation and comment marks. Also returns the offset of each line in the
/// result.
fn join_lines(text: &str) -> (String, Vec<usize>) {
    let (mut joined, mut starts) = (String::with_capacity(text.len()), Vec::new());
    for line in text.lines() {
        starts.push(joined.len());
        let line = line.trim_start();
        let mark = COMMENT_MARKS.iter().find(|mark| line.starts_with(**mark));
        joined.push_str(mark.map_or(line, |mark| line[mark.len()..].trim_start()));
        joined.push(' ');
    }
    (joined, starts)
}

/// The section numbers that follow the name of a document: `§9.2`, `§1, §13`, `§8.4 to §8.6`, `§1 and §2`.
fn cited_sections(after: &str) -> Vec<String> {
    let mut sections = Vec::new();
    let mut rest =
        after.strip_prefix(".md").unwrap_or(after).trim_start_matches(['`', ')', ']']).trim_start();
    while let Some(after_mark) = rest.strip_prefix('§') {
        let section = number(after_mark);
        // After `§8.` at the end of a sentence, `rest` begins with the full stop.
        rest = after_mark[section.len()..].trim_start();
        sections.push(section);
        let next = [", ", "and ", "to ", "or "].iter().find_map(|separator| {
            let after_separator = rest.strip_prefix(separator)?;
            after_separator.starts_with('§').then_some(after_separator)
        });
        rest = next.unwrap_or("");
    }
    sections
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(name: &'static str) -> Document {
        let text = "# A book\n## 1. First\ntext 3\n### 1.2 Second\n## 13. Last\n";
        Document { name, path: "docs/spec/book.md", sections: sections(text) }
    }

    #[test]
    fn sections_are_the_numbers_of_the_headings() {
        let found: Vec<String> = document("book").sections.into_iter().collect();
        assert_eq!(found, ["1", "1.2", "13"]);
    }

    #[test]
    fn a_citation_of_a_missing_section_is_found_with_its_line() {
        for (text, wrong) in [
            ("/// As in book.md §1.2.\n", &[][..]),
            ("// (book.md §1, §13)", &[]),
            ("// [book.md](spec/book.md) §2", &[(1, "2")]),
            ("x\n/// book.md\n/// §9.1, \"a text\"", &[(2, "9.1")]),
            ("book.md §1 to §3 and §4", &[(1, "3"), (1, "4")]),
            ("book.md §13.", &[]),
            ("book §9 and book §13", &[(1, "9")]),
            ("my-book.md §77", &[]),
            ("a book and a §77 of another one", &[]),
            ("book.md says nothing", &[]),
        ] {
            let found = document("book").unknown_sections(Path::new("x.rs"), text);
            let found: Vec<(usize, String)> = found.into_iter().map(|f| (f.line, f.message)).collect();
            let wrong: Vec<(usize, String)> = wrong
                .iter()
                .map(|(line, section)| (*line, format!("docs/spec/book.md has no section {section}")))
                .collect();
            assert_eq!(found, wrong, "{text}");
        }
    }

    #[test]
    fn the_architecture_is_cited_with_and_without_file_extension() {
        for text in ["architecture §9", "architecture.md §9", "Architecture and more"] {
            let found = document("architecture").unknown_sections(Path::new("x.rs"), text);
            assert_eq!(found.len(), usize::from(text.contains('§')), "{text}");
        }
    }
}
