//! Modules of a crate form layers: no module imports itself, directly or through others (docs/architecture.md §9).
//!
//! The check looks at modules with a file of their own. A private child module counts as a part of its parent. Test code is
//! ignored. [`KNOWN`] lists the crates that still have cycles with the number of modules in them; the number may only go down.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::Finding;
use super::source::{Source, sources};

/// The folders with crates.
const FOLDERS: [&str; 4] = ["services", "shared", "deploy", "tests"];

/// Crates with import cycles and the number of modules in them.
const KNOWN: [(&str, usize); 0] = [];

/// Checks the modules of every crate.
///
/// # Errors
/// A source cannot be read.
pub fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let mut crates: BTreeMap<String, Vec<Source>> = BTreeMap::new();
    for folder in FOLDERS {
        for source in sources(root, Path::new(folder))? {
            if let Some(folder) = crate_of(&source.file) {
                crates.entry(folder).or_default().push(source);
            }
        }
    }
    let known: BTreeMap<&str, usize> = KNOWN.into_iter().collect();
    let mut findings = Vec::new();
    for (folder, sources) in &crates {
        let modules = Modules::of(folder, sources);
        findings.extend(compare_with_known(
            folder,
            &modules.cycles(),
            known.get(folder.as_str()).copied().unwrap_or(0),
        ));
    }
    for (folder, _) in KNOWN.iter().filter(|(folder, _)| !crates.contains_key(*folder)) {
        findings.push(finding(folder, format!("the crate {folder} does not exist; remove it from KNOWN")));
    }
    Ok(findings)
}

/// The folder of the crate that a source file belongs to; `None` for tests and for files outside `src`.
fn crate_of(file: &Path) -> Option<String> {
    let (folder, module) = file.to_str()?.rsplit_once("/src/")?;
    let name = module.rsplit('/').next()?;
    let is_test =
        module.split('/').any(|part| part == "tests") || name == "tests.rs" || name.ends_with("_tests.rs");
    (!is_test).then(|| folder.to_owned())
}

fn finding(folder: &str, message: String) -> Finding {
    Finding { file: Path::new(folder).join("src"), line: 1, message }
}

/// A finding if the number of modules in cycles differs from the number in [`KNOWN`], `allowed`.
fn compare_with_known(folder: &str, cycles: &[BTreeSet<String>], allowed: usize) -> Option<Finding> {
    let count: usize = cycles.iter().map(BTreeSet::len).sum();
    if count > allowed {
        let names: Vec<String> =
            cycles.iter().map(|cycle| Vec::from_iter(cycle.clone()).join(", ")).collect();
        let names = names.join("; ");
        return Some(finding(
            folder,
            format!("{count} modules are in import cycles, allowed are {allowed}: {names}"),
        ));
    }
    (count < allowed).then(|| {
        finding(folder, format!("only {count} modules are in import cycles; lower KNOWN from {allowed}"))
    })
}

/// The modules of one crate, each with the modules that it imports.
#[derive(Debug, Default)]
struct Modules {
    imports: BTreeMap<String, BTreeSet<String>>,
}

impl Modules {
    fn of(folder: &str, sources: &[Source]) -> Self {
        let named: Vec<(Vec<String>, &Source)> =
            sources.iter().map(|source| (path_of(folder, &source.file), source)).collect();
        let private: BTreeSet<Vec<String>> =
            named.iter().flat_map(|(path, source)| private_children(path, &source.code)).collect();
        let files: BTreeSet<Vec<String>> = named.iter().map(|(path, _)| path.clone()).collect();
        let node = |path: &[String]| node_of(path, &files, &private);
        let mut modules = Self::default();
        for (path, source) in &named {
            let Some(from) = node(path) else { continue };
            let imports = modules.imports.entry(from.clone()).or_default();
            for imported in paths_in(&source.code, path) {
                if let Some(to) = node(&imported).filter(|to| *to != from) {
                    imports.insert(to);
                }
            }
        }
        modules
    }

    /// The import cycles: sets of modules that reach each other through imports.
    fn cycles(&self) -> Vec<BTreeSet<String>> {
        let reach: BTreeMap<&String, BTreeSet<&String>> =
            self.imports.keys().map(|module| (module, self.reachable(module))).collect();
        let mut cycles: BTreeSet<BTreeSet<String>> = BTreeSet::new();
        for (module, reached) in &reach {
            if reached.contains(module) {
                let mutual =
                    reached.iter().filter(|other| reach.get(*other).is_some_and(|r| r.contains(module)));
                cycles.insert(mutual.map(|other| (*other).clone()).collect());
            }
        }
        cycles.into_iter().collect()
    }

    /// The modules that `from` imports directly or through others.
    fn reachable(&self, from: &String) -> BTreeSet<&String> {
        let mut reached = BTreeSet::new();
        let mut open: Vec<&String> = self.imports.get(from).into_iter().flatten().collect();
        while let Some(module) = open.pop() {
            if reached.insert(module) {
                open.extend(self.imports.get(module).into_iter().flatten());
            }
        }
        reached
    }
}

/// The path of a file's module from the crate's root. The path of the root itself is empty.
fn path_of(folder: &str, file: &Path) -> Vec<String> {
    let inside = file.strip_prefix(Path::new(folder).join("src")).unwrap_or(file).with_extension("");
    let mut path: Vec<String> = inside.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    let is_root = path.len() == 1 && matches!(path[0].as_str(), "lib" | "main");
    if is_root || path.last().is_some_and(|last| last == "mod") {
        path.pop();
    }
    path
}

/// The paths of the private modules that the module at `path` declares.
fn private_children(path: &[String], code: &str) -> Vec<Vec<String>> {
    // A private module of the root is visible in the whole crate.
    if path.is_empty() {
        return Vec::new();
    }
    let lines = code.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
    lines.map(|name| path.iter().cloned().chain([name.to_owned()]).collect()).collect()
}

/// The module that the item at `path` belongs to: the longest prefix with a file, or its parent if that module is private.
fn node_of(
    path: &[String],
    files: &BTreeSet<Vec<String>>,
    private: &BTreeSet<Vec<String>>,
) -> Option<String> {
    let mut length = (1..=path.len()).rev().find(|length| files.contains(&path[..*length]))?;
    while private.contains(&path[..length]) {
        length -= 1;
    }
    (length > 0).then(|| path[..length].join("::"))
}

/// All paths in `code` that begin with `crate`, `super` or `self`, as paths from the crate's root. `at` is the path of the module
/// that has the code.
fn paths_in(code: &str, at: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for keyword in ["crate", "super", "self"] {
        for (offset, _) in code.match_indices(&format!("{keyword}::")) {
            let before = code[..offset].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | ':' | '$')) {
                continue;
            }
            let mut base = if keyword == "crate" { Vec::new() } else { at.to_vec() };
            if keyword == "super" {
                base.pop();
            }
            expand(&code[offset + keyword.len() + 2..], base, &mut found);
        }
    }
    found
}

/// Adds to `found` the paths in `rest`, which are relative to `base`. A group in braces adds one path for each item.
fn expand(rest: &str, mut base: Vec<String>, found: &mut Vec<Vec<String>>) {
    let mut rest = rest.trim_start();
    loop {
        if let Some(group) = rest.strip_prefix('{') {
            for item in items(group) {
                expand(item, base.clone(), found);
            }
            return;
        }
        let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        match &rest[..length] {
            "" => {}
            "super" => drop(base.pop()),
            "self" => {}
            name => base.push(name.to_owned()),
        }
        match rest[length..].strip_prefix("::") {
            Some(next) => rest = next,
            None => break,
        }
    }
    found.push(base);
}

/// The items of a group in braces. `group` begins after the opening brace.
fn items(group: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0_usize, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                found.push(&group[start..at]);
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(&group[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    found.into_iter().map(str::trim).filter(|item| !item.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cycles(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let source = |(file, text): &(&str, &str)| Source::new(&Path::new("services/x/src").join(file), text);
        let sources: Vec<Source> = files.iter().map(source).collect();
        let modules = Modules::of("services/x", &sources);
        modules.cycles().into_iter().map(|cycle| cycle.into_iter().collect()).collect()
    }

    #[test]
    fn an_import_cycle_of_several_modules_is_found() {
        let files = [
            ("lib.rs", "pub mod a; pub mod b; pub mod c; pub mod d;"),
            ("a.rs", "use crate::{b::B, d};"),
            ("b.rs", "fn f() { crate::c::g() }"),
            ("c.rs", "use super::a::{self, A};"),
            ("d.rs", "use std::fmt;"),
        ];
        assert_eq!(cycles(&files), [["a", "b", "c"]]);
    }

    #[test]
    fn imports_in_test_code_do_not_close_a_cycle() {
        let files =
            [("a.rs", "use crate::b::B;"), ("b.rs", "struct B;\n#[cfg(test)]\nmod tests { use crate::a; }")];
        assert_eq!(cycles(&files), Vec::<Vec<String>>::new());
    }

    #[test]
    fn a_private_child_module_is_part_of_its_parent_and_a_public_one_is_not() {
        let files = [("a.rs", "mod b;\nuse b::B;"), ("a/b.rs", "use super::A;")];
        assert_eq!(cycles(&files), Vec::<Vec<String>>::new());
        let files = [("a.rs", "pub mod b;\nuse self::b::B;"), ("a/b.rs", "use super::A;")];
        assert_eq!(cycles(&files), [["a", "a::b"]]);
    }

    #[test]
    fn the_number_of_modules_in_cycles_may_only_go_down() {
        let cycle = [BTreeSet::from(["a".to_owned(), "b".to_owned()])];
        assert_eq!(compare_with_known("x", &cycle, 2), None);
        assert!(compare_with_known("x", &cycle, 1).unwrap().message.contains("a, b"));
        assert!(compare_with_known("x", &cycle, 3).unwrap().message.contains("lower KNOWN from 3"));
    }
}
