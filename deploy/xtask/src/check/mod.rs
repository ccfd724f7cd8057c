//! `cargo xtask check`: the rules of the architecture that a compiler cannot know.

mod blocking_in_async;
mod citations;
mod dag;
mod events;
mod graph;
mod import_cycles;
mod links;
mod parity;
mod purity;
mod source;
mod transport;

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use crate::{ask_cargo, workspace};
use graph::Graph;

/// A rule that is broken somewhere.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// The file, relative to the workspace.
    pub file: PathBuf,
    /// The line, from 1.
    pub line: usize,
    /// What is wrong and what the rule is.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.message)
    }
}

/// Prints every finding; fails when there is one.
pub fn run() -> anyhow::Result<()> {
    let root = workspace();
    let mut findings = find(&root, &metadata()?)?;
    findings.extend(dag::check_bootstrap(&own_tree()?));
    for finding in &findings {
        println!("{finding}");
    }
    if !findings.is_empty() {
        bail!(
            "{} rules are broken (docs/architecture.md, docs/spec, docs/parity.md, docs/events.md)",
            findings.len()
        );
    }
    println!(
        "The cores are pure, the services call only whom they may, and what docs/parity.md names, what is cited and what is linked is there."
    );
    Ok(())
}

fn find(root: &Path, graph: &Graph) -> anyhow::Result<Vec<Finding>> {
    let mut findings = purity::check(root, graph)?;
    findings.extend(dag::check(root, graph)?);
    findings.extend(transport::check(root)?);
    findings.extend(blocking_in_async::check(root)?);
    findings.extend(parity::check(root, graph)?);
    findings.extend(events::check(root)?);
    findings.extend(citations::check(root)?);
    findings.extend(links::check(root)?);
    findings.extend(import_cycles::check(root)?);
    findings.sort();
    findings.dedup();
    Ok(findings)
}

/// The resolved dependencies, for this platform.
fn metadata() -> anyhow::Result<Graph> {
    let version = ask_cargo(&["--version", "--verbose"])?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).context("cargo tells no host")?;
    let output = ask_cargo(&["metadata", "--format-version", "1", "--locked", "--filter-platform", host])?;
    Graph::parse(output.as_bytes())
}

/// What this program needs when it is built alone, features and all.
fn own_tree() -> anyhow::Result<String> {
    ask_cargo(&["tree", "--locked", "--package", "xtask", "--edges", "normal,build", "--prefix", "none"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_workspace_keeps_its_rules() {
        let findings: Vec<String> =
            find(&workspace(), &metadata().unwrap()).unwrap().iter().map(Finding::to_string).collect();
        assert_eq!(findings, Vec::<String>::new());
        assert_eq!(dag::check_bootstrap(&own_tree().unwrap()), []);
    }
}
