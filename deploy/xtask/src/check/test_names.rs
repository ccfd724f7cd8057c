//! A test function's name has at most 80 characters, so that it can be read in a list and searched for.

use std::path::Path;

use super::Finding;
use super::parity::files;
use super::source::Source;

/// The folders with Rust sources.
const FOLDERS: [&str; 6] = ["services", "shared", "proto", "deploy", "tests", "fuzz"];
/// The longest allowed name, in characters.
const MAX_LENGTH: usize = 80;

/// Checks the test functions of the workspace at `root`.
///
/// # Errors
/// A source cannot be read.
pub fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for folder in FOLDERS {
        for (file, text) in files(root, Path::new(folder), &["rs"])? {
            findings.extend(long_names(&Source::with_tests(&file, &text)));
        }
    }
    Ok(findings)
}

/// A finding for each test function of `source` whose name is too long.
fn long_names(source: &Source) -> Vec<Finding> {
    let tests = source.test_functions().into_iter();
    let long = tests.filter(|(_, name)| name.chars().count() > MAX_LENGTH);
    long.map(|(line, name)| {
        let length = name.chars().count();
        let message = format!(
            "the test name {name} has {length} characters, allowed are {MAX_LENGTH}; name only the rule that is tested"
        );
        Finding { file: source.file.clone(), line, message }
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_names_longer_than_80_characters_are_found_with_their_lines() {
        let (allowed, long) = ("a".repeat(80), "b".repeat(81));
        let text = format!(
            "fn {long}() {{}}\n#[test]\nfn {allowed}() {{}}\n#[tokio::test]\n#[ignore]\nasync fn {long}() {{}}\n"
        );
        let findings = long_names(&Source::with_tests(Path::new("x.rs"), &text));
        assert_eq!(findings.iter().map(|finding| finding.line).collect::<Vec<_>>(), [6]);
        assert!(findings[0].message.contains("has 81 characters"), "{}", findings[0]);
    }
}
