//! Relative links in Markdown files point to files, folders and headings that exist.
//!
//! The check reads inline links and images (`[text](path#anchor)`) and definitions (`[label]: path`), but no code. A path that
//! begins with `/` is relative to the workspace. Anchors are checked only if the target is a Markdown file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::Context as _;

use super::Finding;

/// The folders that are not searched.
const SKIPPED: [&str; 2] = [".git", "target"];

/// Checks the links of all Markdown files below `root`.
///
/// # Errors
/// A folder or a document cannot be read.
pub fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let documents = documents(root)?;
    let known = documents.iter().map(|(file, text)| (file.clone(), anchors(text))).collect();
    let exists = |path: &Path| root.join(path).exists();
    Ok(documents.iter().flat_map(|(file, text)| dangling(file, text, &known, &exists)).collect())
}

/// The paths, relative to `root`, and the texts of all Markdown files.
fn documents(root: &Path) -> anyhow::Result<Vec<(PathBuf, String)>> {
    let mut open = vec![root.to_owned()];
    let mut found = Vec::new();
    while let Some(folder) = open.pop() {
        let cannot_read = || format!("cannot read {}", folder.display());
        for entry in fs::read_dir(&folder).with_context(cannot_read)? {
            let entry = entry.with_context(cannot_read)?;
            let (path, kind) = (entry.path(), entry.file_type().with_context(cannot_read)?);
            if kind.is_dir() {
                if !SKIPPED.iter().any(|name| entry.file_name() == *name) {
                    open.push(path);
                }
            } else if kind.is_file() && is_markdown(&path) {
                let text =
                    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
                found.push((path.strip_prefix(root).unwrap_or(&path).to_owned(), text));
            }
        }
    }
    found.sort();
    Ok(found)
}

fn is_markdown(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "md")
}

/// The anchors of a text: those of its headings and those in `<a id="…">`. The anchor of a repeated heading gets a number.
pub(super) fn anchors(text: &str) -> BTreeSet<String> {
    let mut counts = BTreeMap::new();
    let mut anchors = BTreeSet::new();
    for line in without_fences(text).lines() {
        let title = line.trim_start_matches('#');
        if title.len() < line.len() && title.starts_with(' ') {
            let slug = slug(title.trim());
            let earlier: &mut usize = counts.entry(slug.clone()).or_default();
            anchors.insert(if *earlier == 0 { slug } else { format!("{slug}-{earlier}") });
            *earlier += 1;
        }
    }
    let explicit =
        text.split("<a id=\"").skip(1).filter_map(|rest| rest.split('"').next().map(str::to_owned));
    anchors.extend(explicit);
    anchors
}

/// The anchor of a heading.
fn slug(title: &str) -> String {
    let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.flat_map(|c| if c == ' ' { '-' } else { c }.to_lowercase()).collect()
}

/// A finding for each link in `text` whose target does not exist. `text` is the content of `file`, and `anchors` has those of
/// every Markdown file.
fn dangling(
    file: &Path,
    text: &str,
    anchors: &BTreeMap<PathBuf, BTreeSet<String>>,
    exists: &dyn Fn(&Path) -> bool,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (line, link) in links(text).into_iter().filter(|(_, link)| !has_scheme(link)) {
        let mut find = |message: String| findings.push(Finding { file: file.to_owned(), line, message });
        let (path, anchor) =
            link.split_once('#').map_or((link.as_str(), None), |(path, anchor)| (path, Some(anchor)));
        let Some(target) = resolve(file, path) else {
            find(format!("the link {link:?} points out of the workspace"));
            continue;
        };
        match (anchor, anchors.get(&target)) {
            _ if !exists(&target) => {
                find(format!("the target of the link {link:?} does not exist: {}", target.display()))
            }
            (Some(anchor), Some(known)) if !known.contains(anchor) => {
                find(format!("{} has no anchor {anchor:?}", target.display()));
            }
            _ => {}
        }
    }
    findings
}

/// The target, relative to the workspace, of the link `path` in `file`; `None` if it is outside the workspace.
fn resolve(file: &Path, path: &str) -> Option<PathBuf> {
    if path.is_empty() {
        return Some(file.to_owned());
    }
    let from = if path.starts_with('/') { Path::new("") } else { file.parent()? };
    let mut target = PathBuf::new();
    for part in from.join(path.trim_start_matches('/')).components() {
        match part {
            Component::Normal(name) => target.push(name),
            Component::ParentDir => {
                if !target.pop() {
                    return None;
                }
            }
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    Some(target)
}

/// Whether a link is a URL such as `https://…` or `mailto:…`.
fn has_scheme(link: &str) -> bool {
    link.split_once(':').is_some_and(|(scheme, _)| {
        scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
    })
}

/// The targets of all links in a text, with their lines counted from 1.
fn links(text: &str) -> Vec<(usize, String)> {
    let text = without_code_spans(&without_fences(text));
    let mut links = Vec::new();
    for (at, mark) in text.match_indices("](") {
        let rest = text[at + mark.len()..].trim_start();
        links.push((text[..at].matches('\n').count() + 1, target(rest).to_owned()));
    }
    for (index, line) in text.lines().enumerate() {
        let definition = line.trim_start().strip_prefix('[').and_then(|rest| rest.split_once("]:"));
        // Skip footnotes and text that begins with a link.
        if let Some((_, rest)) =
            definition.filter(|(label, _)| !label.starts_with('^') && !label.contains(']'))
        {
            let target = rest.split_whitespace().next().unwrap_or_default();
            links.push((index + 1, target.trim_matches(['<', '>']).to_owned()));
        }
    }
    links
}

/// The target of a link, up to a blank or the closing parenthesis. `rest` is the text after `](`.
fn target(rest: &str) -> &str {
    if let Some(rest) = rest.strip_prefix('<') {
        return rest.split('>').next().unwrap_or(rest);
    }
    let mut depth = 0_usize;
    let end = rest.find(|c: char| {
        match c {
            '(' => depth += 1,
            ')' if depth == 0 => return true,
            ')' => depth -= 1,
            _ => {}
        }
        c.is_whitespace()
    });
    &rest[..end.unwrap_or(rest.len())]
}

/// Returns the text with every line of fenced code blocks replaced by an empty line.
fn without_fences(text: &str) -> String {
    let mut fence: Option<&str> = None;
    let mut left = String::with_capacity(text.len());
    for line in text.lines() {
        let mark = line.trim_start();
        let length = mark.find(|c| !mark.starts_with(c)).unwrap_or(mark.len());
        // With further backticks in the same line, it is a code span and not a fence.
        let is_span = mark.starts_with('`') && mark[length..].contains('`');
        let is_fence = length >= 3 && mark.starts_with(['`', '~']) && !is_span;
        match fence {
            Some(open) if is_fence && mark.starts_with(open) && mark[length..].trim().is_empty() => {
                fence = None;
            }
            None if is_fence => fence = Some(&mark[..length]),
            None => left.push_str(line),
            Some(_) => {}
        }
        left.push('\n');
    }
    left
}

/// Returns the text with code spans replaced by blanks. A span ends with as many backticks as it begins with, in the same
/// paragraph.
fn without_code_spans(text: &str) -> String {
    let mut left = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('`') {
        left.push_str(&rest[..at]);
        rest = &rest[at..];
        let length = leading_backticks(rest);
        let end = span_end(&rest[length..], length).map_or(length, |end| length + end);
        left.extend(rest[..end].chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        rest = &rest[end..];
    }
    left.push_str(rest);
    left
}

/// The number of backticks that a text begins with.
fn leading_backticks(text: &str) -> usize {
    text.len() - text.trim_start_matches('`').len()
}

/// The offset after the last backtick of a code span that `length` backticks opened; `None` if it is not closed in its paragraph.
fn span_end(text: &str, length: usize) -> Option<usize> {
    let paragraph = text.split("\n\n").next().unwrap_or(text);
    let mut at = 0;
    while let Some(next) = paragraph[at..].find('`') {
        at += next;
        let found = leading_backticks(&paragraph[at..]);
        at += found;
        if found == length {
            return Some(at);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The findings in `text` as the content of the file `from`, in a workspace with three documents, a source and a folder.
    fn found(from: &str, text: &str) -> Vec<(usize, String)> {
        let page = "# Title\n## Pod actions (§9)\n";
        let known = ["README.md", "docs/a.md", "docs/more/b.md"].map(|file| (file.into(), anchors(page)));
        let exists = |path: &Path| {
            ["README.md", "docs/a.md", "docs/more/b.md", "src/lib.rs", "docs"]
                .iter()
                .any(|f| path == Path::new(f))
        };
        let found = dangling(Path::new(from), text, &known.into(), &exists);
        found.into_iter().map(|finding| (finding.line, finding.message)).collect()
    }

    #[test]
    fn headings_and_a_elements_have_anchors_and_code_has_none() {
        let text = "# Title\n## Pod actions (§9)\n<a id=\"by-hand\"></a>\n#no heading\n```sh\n# code\n```\n\
                    ### `keelson get` and_Über\n# Title\n~~~\n```\n# code\n~~~\n# Title\n";
        let expected = ["by-hand", "keelson-get-and_über", "pod-actions-9", "title", "title-1", "title-2"];
        assert_eq!(anchors(text), expected.map(str::to_owned).into());
    }

    #[test]
    fn links_to_existing_files_folders_and_headings_have_no_findings() {
        for (from, text) in [
            ("README.md", "[a](docs/a.md) [b](docs/a.md#title), ![c](src/lib.rs) [d](docs) [e](./docs/)"),
            (
                "README.md",
                "[`a`](docs/a.md#pod-actions-9 \"a title\") [b](<docs/a.md>)\n[label]: docs/a.md\n",
            ),
            ("README.md", "[over\ntwo lines](docs/a.md) [lines](src/lib.rs#L7) [a](#title)"),
            ("docs/more/b.md", "[a](../a.md#title) [b](../../src/lib.rs) [c](/src/lib.rs)"),
            ("docs/a.md", "[a](https://example.org/x#y) [b](mailto:a@example.org)"),
            ("docs/a.md", "`[a](gone.md)` ``[a](gone.md) ` `` and\n```\n[a](gone.md)\n```\n`x[a]\n(b)`"),
            ("docs/a.md", "```[a](gone.md)``` and\n[a](/docs/a.md) and [b]: c\n"),
            ("docs/a.md", "[^1]: a footnote, [1]: and [text] (in parentheses)"),
        ] {
            assert_eq!(found(from, text), [], "{text}");
        }
    }

    #[test]
    fn links_to_missing_files_and_anchors_are_found_with_their_lines() {
        let no_file =
            |link: &str, path: &str| format!("the target of the link {link:?} does not exist: {path}");
        for (from, text, line, message) in [
            ("docs/more/b.md", "\n[a](../src/lib.rs)", 2, no_file("../src/lib.rs", "docs/src/lib.rs")),
            ("README.md", "```\ncode\n```\n[a](gone.md#title)", 4, no_file("gone.md#title", "gone.md")),
            ("README.md", "![a](docs/(x).svg)", 1, no_file("docs/(x).svg", "docs/(x).svg")),
            ("README.md", "a ` b\n\n[a](gone.md) ` c", 3, no_file("gone.md", "gone.md")),
            ("README.md", "x\n[label]: <gone.md>\n", 2, no_file("gone.md", "gone.md")),
            ("README.md", "[a](docs/a.md#gone)", 1, "docs/a.md has no anchor \"gone\"".to_owned()),
            (
                "docs/more/b.md",
                "[a](../a.md#title)\n[b](../a.md#gone)",
                2,
                "docs/a.md has no anchor \"gone\"".to_owned(),
            ),
            ("docs/a.md", "[a](#title) [b](#gone)", 1, "docs/a.md has no anchor \"gone\"".to_owned()),
            (
                "docs/a.md",
                "[a](../../a.md)",
                1,
                "the link \"../../a.md\" points out of the workspace".to_owned(),
            ),
        ] {
            assert_eq!(found(from, text), [(line, message)], "{text}");
        }
    }

    #[test]
    fn a_link_between_ledger_files_to_a_missing_anchor_is_found() {
        let titles = anchors("# Title\n");
        let known = ["docs/parity.md", "docs/parity/x.md"].map(|file| (file.into(), titles.clone())).into();
        for (from, links) in [
            ("docs/parity.md", "[a](parity/x.md#title) [b](parity/x.md#nowhere)"),
            ("docs/parity/y.md", "[a](x.md#title) [b](x.md#nowhere) [c](../api/z.md#nowhere)"),
            ("docs/parity/x.md", "[a](#title) [b](#nowhere)"),
        ] {
            assert_eq!(dangling(Path::new(from), links, &known, &|_| true).len(), 1, "{links}");
        }
    }

    #[test]
    fn documents_are_searched_in_all_folders_except_git_and_target() {
        let dir = keelson_testkit::Scratch::new().unwrap();
        for folder in [".git", ".github", "target/doc", "docs/more"] {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
            fs::write(dir.path().join(folder).join("x.md"), "[a](gone.md)").unwrap();
        }
        fs::write(dir.path().join("docs/x.txt"), "[a](gone.md)").unwrap();
        let findings = check(dir.path()).unwrap();
        let files: Vec<&Path> = findings.iter().map(|finding| finding.file.as_path()).collect();
        assert_eq!(files, [Path::new(".github/x.md"), Path::new("docs/more/x.md")]);
    }
}
