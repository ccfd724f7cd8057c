//! The resolved dependency graph of `cargo metadata`.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::Deserialize;

use super::Finding;

/// Packages and whom they need to be compiled: normal dependencies, no build and no dev ones.
#[derive(Debug, Default)]
pub struct Graph {
    packages: BTreeMap<String, Package>,
}

/// A package of the graph.
#[derive(Debug, Default)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its Cargo.toml.
    pub manifest: PathBuf,
    /// The ids of its normal dependencies.
    needs: Vec<String>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<MetadataPackage>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct MetadataPackage {
    id: String,
    name: String,
    manifest_path: PathBuf,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Deserialize)]
struct DependencyKind {
    /// Absent for a normal dependency.
    kind: Option<String>,
}

impl Graph {
    /// Reads the output of `cargo metadata --format-version 1`.
    pub fn parse(json: &[u8]) -> anyhow::Result<Self> {
        let metadata: Metadata =
            serde_json::from_slice(json).context("cargo metadata printed something else")?;
        let mut graph = Self::default();
        for package in metadata.packages {
            let MetadataPackage { id, name, manifest_path } = package;
            graph.packages.insert(id, Package { name, manifest: manifest_path, needs: Vec::new() });
        }
        for node in metadata.resolve.nodes {
            let normal = |d: &Dependency| d.dep_kinds.iter().any(|kind| kind.kind.is_none());
            let needs = node.deps.iter().filter(|d| normal(d)).map(|d| d.pkg.clone()).collect();
            graph.packages.entry(node.id).or_default().needs = needs;
        }
        Ok(graph)
    }

    /// The packages whose manifest is directly in a folder that `wanted` accepts (relative to `root`).
    pub fn packages_in<'a>(
        &'a self,
        root: &'a Path,
        wanted: impl Fn(&Path) -> bool + 'a,
    ) -> impl Iterator<Item = (&'a Package, PathBuf)> {
        self.packages.values().filter_map(move |package| {
            let folder = package.manifest.parent()?.strip_prefix(root).ok()?;
            wanted(folder).then(|| (package, folder.to_owned()))
        })
    }

    /// All that `package` needs, each with the shortest way to it: its own name first.
    pub fn closure<'a>(&'a self, package: &'a Package) -> Vec<(&'a Package, Vec<&'a str>)> {
        let mut ways: BTreeMap<&str, Vec<&'a str>> = BTreeMap::new();
        let mut open: VecDeque<(&'a Package, Vec<&'a str>)> =
            VecDeque::from([(package, vec![package.name.as_str()])]);
        while let Some((from, way)) = open.pop_front() {
            for id in &from.needs {
                let Some(to) = self.packages.get(id).filter(|_| !ways.contains_key(id.as_str())) else {
                    continue;
                };
                let mut longer = way.clone();
                longer.push(&to.name);
                ways.insert(id, longer.clone());
                open.push_back((to, longer));
            }
        }
        ways.into_iter().filter_map(|(id, way)| Some((self.packages.get(id)?, way))).collect()
    }
}

/// A finding in the manifest of the first package of `way`, at the line of the second.
pub fn dependency_finding(root: &Path, package: &Package, way: &[&str], rule: &str) -> Finding {
    let text = fs::read_to_string(&package.manifest).unwrap_or_default();
    let direct = way.get(1).copied().unwrap_or_default();
    let names = |line: &str| {
        let rest = line.trim_start().strip_prefix(direct);
        rest.is_some_and(|rest| rest.starts_with(['.', ' ', '=']))
    };
    let line = text.lines().position(names).map_or(1, |at| at + 1);
    let file = package.manifest.strip_prefix(root).unwrap_or(&package.manifest).to_owned();
    Finding { file, line, message: format!("{} ({rule})", way.join(" → ")) }
}

#[cfg(test)]
pub mod tests {
    use serde_json::json;

    use super::*;

    /// A graph of (name, folder, normal dependencies, dev dependencies) below `/w`; others are in `/r`.
    pub fn graph(packages: &[(&str, &str, &[&str], &[&str])]) -> Graph {
        let all = packages.iter().map(|(name, folder, _, _)| {
            json!({"id": name, "name": name, "manifest_path": format!("{folder}/Cargo.toml")})
        });
        let nodes = packages.iter().map(|(name, _, normal, dev)| {
            let of =
                |kind: serde_json::Value| move |d: &&str| json!({"pkg": d, "dep_kinds": [{"kind": kind}]});
            let normal = normal.iter().map(of(serde_json::Value::Null));
            let deps: Vec<_> = normal.chain(dev.iter().map(of("dev".into()))).collect();
            json!({"id": name, "deps": deps})
        });
        let metadata = json!({
            "packages": all.collect::<Vec<_>>(),
            "resolve": {"nodes": nodes.collect::<Vec<_>>()},
        });
        Graph::parse(metadata.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn the_closure_has_the_way_and_no_dev_dependencies() {
        let graph = graph(&[
            ("a", "/w/a", &["b"], &["d"]),
            ("b", "/w/b", &["c", "a"], &[]),
            ("c", "/r/c", &[], &[]),
            ("d", "/r/d", &[], &[]),
        ]);
        let (a, folder) =
            graph.packages_in(Path::new("/w"), |folder| folder == Path::new("a")).next().unwrap();
        assert_eq!(folder, Path::new("a"));
        let ways: Vec<String> = graph.closure(a).iter().map(|(_, way)| way.join(">")).collect();
        assert_eq!(ways, ["a>b>a", "a>b", "a>b>c"]);
    }
}
