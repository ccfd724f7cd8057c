//! What the documentation tells people to type is a command line that there is.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser as _;

use crate::args::{self, Cli};

/// What stands for the command in a line of a shell.
const NAMES: [&str; 2] = ["keelson", "$K"];

/// The README of the project, the pages beside it, and those of services and of what is deployed.
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

/// The words of the first command of a line; what a shell would put in place of a variable is `http://h:1`.
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
fn every_command_of_the_documentation_is_understood() {
    let mut found = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for line in text.lines() {
            let line = line.trim_start().trim_start_matches("$ ");
            let Some((name, rest)) = line.split_once(' ') else { continue };
            // A sentence that begins with the name goes on without a command of ours.
            if !NAMES.contains(&name) || !rest.starts_with(|c: char| c.is_ascii_lowercase()) {
                continue;
            }
            let line = words(rest).into_iter().map(Into::into);
            let line = args::split_type_and_name(std::iter::once("keelson".into()).chain(line).collect());
            let complete = Cli::try_parse_from(line).map(|cli| cli.global.etcd.complete(|_| None));
            match complete {
                Ok(Ok(_)) => found += 1,
                Ok(Err(failure)) => panic!("{}: {rest}: {failure}", page.display()),
                Err(error) => panic!("{}: {rest}: {error}", page.display()),
            }
        }
    }
    assert!(found >= 30, "only {found} commands were found");
}

#[test]
fn a_line_of_a_shell_is_one_command() {
    for (line, expected) in [
        ("get pods -A   # all of them", vec!["get", "pods", "-A"]),
        ("get secret key --etcd $E > key.yaml", vec!["get", "secret", "key", "--etcd", "http://h:1"]),
        ("exec web -- sh -c 'echo a; echo b' | cat", vec!["exec", "web", "--", "sh", "-c", "echo a; echo b"]),
        ("get pods; $K get node", vec!["get", "pods"]),
    ] {
        assert_eq!(words(line), expected, "{line}");
    }
}
