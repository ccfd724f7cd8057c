//! `cargo xtask check`: the rules of the architecture and of the house style that the compiler does not check.

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
mod test_names;
mod transport;

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use crate::{cargo_stdout, workspace};
use graph::Graph;

/// One violation of a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// The file, relative to the workspace.
    pub file: PathBuf,
    /// The line, counted from 1.
    pub line: usize,
    /// The violation, and the rule or the way to fix it.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.message)
    }
}

/// Runs all checks and prints every finding.
///
/// # Errors
/// There is a finding, or a check cannot run.
pub fn run() -> anyhow::Result<()> {
    let root = workspace();
    let mut findings = find(&root, &dependency_graph()?)?;
    findings.extend(dag::check_bootstrap(&xtask_dependency_tree()?));
    for finding in &findings {
        println!("{finding}");
    }
    if !findings.is_empty() {
        bail!(
            "{} violations of rules; the rules are in docs/architecture.md, docs/parity.md, docs/events.md and CONTRIBUTING.md",
            findings.len()
        );
    }
    println!("All checks passed.");
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
    findings.extend(test_names::check(root)?);
    findings.sort();
    findings.dedup();
    Ok(findings)
}

/// Returns the resolved dependency graph of the workspace for this platform.
fn dependency_graph() -> anyhow::Result<Graph> {
    let version = cargo_stdout(&["--version", "--verbose"])?;
    let host = version
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .context("`cargo --version --verbose` prints no host")?;
    let output = cargo_stdout(&["metadata", "--format-version", "1", "--locked", "--filter-platform", host])?;
    Graph::parse(output.as_bytes())
}

/// Returns the output of `cargo tree` for xtask when it is built alone. Features are those of that build.
fn xtask_dependency_tree() -> anyhow::Result<String> {
    cargo_stdout(&["tree", "--locked", "--package", "xtask", "--edges", "normal,build", "--prefix", "none"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_workspace_has_no_findings() {
        let graph = dependency_graph().unwrap();
        let findings: Vec<String> =
            find(&workspace(), &graph).unwrap().iter().map(Finding::to_string).collect();
        assert_eq!(findings, Vec::<String>::new());
        assert_eq!(dag::check_bootstrap(&xtask_dependency_tree().unwrap()), []);
    }
}
