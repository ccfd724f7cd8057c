//! Checks that the command lines in the documentation are valid.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser as _;

use crate::args::{self, Cli};

/// How the documentation writes the command.
const NAMES: [&str; 2] = ["keelson", "$K"];

/// The project's README, the pages in docs, and the READMEs of services and deployments.
fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let below = |folder: &str| -> Vec<PathBuf> {
        let entries = fs::read_dir(root.join(folder)).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    };
    let readmes = ["services", "deploy"].into_iter().flat_map(below).map(|folder| folder.join("README.md"));
    let mut pages = vec![root.join("README.md")];
    pages.extend(below("docs").into_iter().filter(|path| path.extension().is_some_and(|end| end == "md")));
    pages.extend(readmes.filter(|page| page.exists()));
    pages
}

/// The words of the first command of a line; variables are replaced by `http://h:1`.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for c in line.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, ' ') => words.extend(word.take()),
            (None, '#') if word.is_none() => break,
            (None, ';' | '|' | '>' | '&') => break,
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    let plain = |word: String| if word.starts_with('$') { "http://h:1".to_owned() } else { word };
    words.into_iter().map(plain).collect()
}

#[test]
fn every_command_line_in_the_documentation_parses() {
    let mut found = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for line in text.lines() {
            let line = line.trim_start().trim_start_matches("$ ");
            let Some((name, rest)) = line.split_once(' ') else { continue };
            // Skip a sentence that begins with the name.
            if !NAMES.contains(&name) || !rest.starts_with(|c: char| c.is_ascii_lowercase()) {
                continue;
            }
            let line = words(rest).into_iter().map(Into::into);
            let line = args::split_type_and_name(std::iter::once("keelson".into()).chain(line).collect());
            let complete = Cli::try_parse_from(line).map(|cli| cli.global.etcd.complete(|_| None));
            match complete {
                Ok(Ok(_)) => found += 1,
                Ok(Err(error)) => panic!("{}: {rest}: {error}", page.display()),
                Err(error) => panic!("{}: {rest}: {error}", page.display()),
            }
        }
    }
    assert!(found >= 30, "only {found} commands were found");
}

#[test]
fn shell_lines_are_split_into_words_of_the_first_command() {
    for (line, expected) in [
        ("get pods -A   # all of them", vec!["get", "pods", "-A"]),
        ("get secret key --etcd $E > key.yaml", vec!["get", "secret", "key", "--etcd", "http://h:1"]),
        ("exec web -- sh -c 'echo a; echo b' | cat", vec!["exec", "web", "--", "sh", "-c", "echo a; echo b"]),
        ("get pods; $K get node", vec!["get", "pods"]),
    ] {
        assert_eq!(words(line), expected, "{line}");
    }
}
