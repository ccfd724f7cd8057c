//! The resolved dependency graph of `cargo metadata`.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::Deserialize;

use super::Finding;

/// The packages and their normal dependencies, without build and dev dependencies.
#[derive(Debug, Default)]
pub struct Graph {
    packages: BTreeMap<String, Package>,
}

/// A package of the graph.
#[derive(Debug, Default)]
pub struct Package {
    /// The package's name.
    pub name: String,
    /// The path of its Cargo.toml.
    pub manifest: PathBuf,
    /// The ids of its normal dependencies.
    dependencies: Vec<String>,
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
    /// Parses the output of `cargo metadata --format-version 1`.
    pub fn parse(json: &[u8]) -> anyhow::Result<Self> {
        let metadata: Metadata =
            serde_json::from_slice(json).context("cannot parse the output of `cargo metadata`")?;
        let mut graph = Self::default();
        for package in metadata.packages {
            let MetadataPackage { id, name, manifest_path } = package;
            graph.packages.insert(id, Package { name, manifest: manifest_path, dependencies: Vec::new() });
        }
        for node in metadata.resolve.nodes {
            let is_normal = |d: &Dependency| d.dep_kinds.iter().any(|kind| kind.kind.is_none());
            let dependencies = node.deps.iter().filter(|d| is_normal(d)).map(|d| d.pkg.clone()).collect();
            graph.packages.entry(node.id).or_default().dependencies = dependencies;
        }
        Ok(graph)
    }

    /// The packages whose folder `wanted` accepts, with that folder relative to `root`. Packages outside `root` are skipped.
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

    /// The direct and indirect dependencies of `package`. Each comes with the shortest path to it: the names of the packages
    /// from `package` to the dependency.
    pub fn transitive_dependencies<'a>(&'a self, package: &'a Package) -> Vec<(&'a Package, Vec<&'a str>)> {
        let mut paths: BTreeMap<&str, Vec<&'a str>> = BTreeMap::new();
        let mut open: VecDeque<(&'a Package, Vec<&'a str>)> =
            VecDeque::from([(package, vec![package.name.as_str()])]);
        while let Some((from, path)) = open.pop_front() {
            for id in &from.dependencies {
                let Some(to) = self.packages.get(id).filter(|_| !paths.contains_key(id.as_str())) else {
                    continue;
                };
                let mut longer = path.clone();
                longer.push(&to.name);
                paths.insert(id, longer.clone());
                open.push_back((to, longer));
            }
        }
        paths.into_iter().filter_map(|(id, path)| Some((self.packages.get(id)?, path))).collect()
    }
}

/// A finding for a forbidden dependency, at the line of `package`'s manifest that leads to it. `path` has the names of the
/// packages from `package` to the dependency.
pub fn dependency_finding(root: &Path, package: &Package, path: &[&str], rule: &str) -> Finding {
    let text = fs::read_to_string(&package.manifest).unwrap_or_default();
    let direct = path.get(1).copied().unwrap_or_default();
    let is_entry = |line: &str| {
        let rest = line.trim_start().strip_prefix(direct);
        rest.is_some_and(|rest| rest.starts_with(['.', ' ', '=']))
    };
    let line = text.lines().position(is_entry).map_or(1, |at| at + 1);
    let file = package.manifest.strip_prefix(root).unwrap_or(&package.manifest).to_owned();
    Finding { file, line, message: format!("{} ({rule})", path.join(" → ")) }
}

#[cfg(test)]
pub mod tests {
    use serde_json::json;

    use super::*;

    /// A graph of packages, each with its name, folder, normal dependencies and dev dependencies. Folders of the workspace are
    /// below `/w`, others below `/r`.
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
    fn transitive_dependencies_have_their_paths_and_no_dev_dependencies() {
        let graph = graph(&[
            ("a", "/w/a", &["b"], &["d"]),
            ("b", "/w/b", &["c", "a"], &[]),
            ("c", "/r/c", &[], &[]),
            ("d", "/r/d", &[], &[]),
        ]);
        let (a, folder) =
            graph.packages_in(Path::new("/w"), |folder| folder == Path::new("a")).next().unwrap();
        assert_eq!(folder, Path::new("a"));
        let paths: Vec<String> =
            graph.transitive_dependencies(a).iter().map(|(_, path)| path.join(">")).collect();
        assert_eq!(paths, ["a>b>a", "a>b", "a>b>c"]);
    }
}
