//! Core crates are pure: no async runtime, no clock, no random numbers, no files or network (docs/architecture.md §9).

use std::path::Path;

use super::Finding;
use super::graph::{Graph, dependency_finding};
use super::source::{Source, sources};

/// The crates that do I/O, read clocks or generate random numbers.
const FORBIDDEN_CRATES: [&str; 38] = [
    "async-std",
    "axum",
    "chrono",
    "crossbeam-channel",
    "etcd-client",
    "fastrand",
    "getrandom",
    "h2",
    "hyper",
    "hyper-util",
    "inotify",
    "k8s-cri",
    "keelson-files",
    "keelson-proto",
    "keelson-service-kit",
    "keelson-telemetry",
    "kube",
    "libc",
    "mio",
    "nix",
    "notify",
    "parking_lot",
    "procfs",
    "quanta",
    "rand",
    "rand_core",
    "redb",
    "reqwest",
    "rustix",
    "smol",
    "socket2",
    "tempfile",
    "time",
    "tokio",
    "tokio-stream",
    "tokio-util",
    "tonic",
    "tower",
];

/// The paths of the standard library and of time crates that do I/O or read clocks. Of `std::net`, address types are allowed;
/// sockets and lookups are not.
const FORBIDDEN_PATHS: [&str; 13] = [
    "SystemTime::now",
    "Instant::now",
    "Timestamp::now",
    "Zoned::now",
    "std::env",
    "std::fs",
    "std::process",
    "std::thread",
    "TcpListener",
    "TcpStream",
    "UdpSocket",
    "ToSocketAddrs",
    "to_socket_addrs",
];

/// Checks the core crate of each service and the shared pure crates.
///
/// # Errors
/// A source cannot be read.
pub fn check(root: &Path, graph: &Graph) -> anyhow::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for (package, folder) in graph.packages_in(root, is_pure) {
        let rule = format!("{} must be pure", package.name);
        for (dependency, path) in graph.transitive_dependencies(package) {
            if FORBIDDEN_CRATES.contains(&dependency.name.as_str()) {
                findings.push(dependency_finding(root, package, &path, &rule));
            }
        }
        for source in sources(root, &folder.join("src"))? {
            findings.extend(impure_lines(&source));
        }
    }
    Ok(findings)
}

/// Whether the crate in `folder` must be pure.
fn is_pure(folder: &Path) -> bool {
    let core = folder.starts_with("services") && folder.ends_with("core");
    core || ["shared/kube-model", "shared/desired-set", "shared/mountinfo", "shared/yaml"]
        .map(Path::new)
        .contains(&folder)
}

/// A finding for each use of a forbidden path.
fn impure_lines(source: &Source) -> Vec<Finding> {
    let finding = |offset: usize, path: &str| Finding {
        file: source.file.clone(),
        line: source.line(offset),
        message: format!("{path} in a pure crate; take the value as an argument"),
    };
    let mut findings = Vec::new();
    for path in FORBIDDEN_PATHS {
        findings.extend(source.find(path).into_iter().map(|offset| finding(offset, path)));
    }
    // `use std::{fs, collections::BTreeMap}` does not contain the text `std::fs`.
    for start in source.find("std::{") {
        let inside = group(&source.code[start + "std::{".len()..]);
        let names =
            inside.split([',', '{', '}']).map(|name| name.split("::").next().unwrap_or_default().trim());
        for name in names {
            let path = format!("std::{name}");
            if FORBIDDEN_PATHS.contains(&path.as_str()) {
                findings.push(finding(start, &path));
            }
        }
    }
    findings
}

/// The content of a group in braces. `text` begins after the opening brace.
fn group(text: &str) -> &str {
    let mut depth = 1_usize;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => return &text[..at],
            '}' => depth -= 1,
            _ => {}
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::graph::tests::graph;
    use super::*;

    #[test]
    fn an_indirect_dependency_of_a_core_on_tokio_is_found() {
        let graph = graph(&[
            ("x-core", "/w/services/x/core", &["helper"], &["proptest"]),
            ("helper", "/r/helper", &["tokio"], &[]),
            ("tokio", "/r/tokio", &[], &[]),
            ("proptest", "/r/proptest", &["rand"], &[]),
            ("rand", "/r/rand", &[], &[]),
            ("x", "/w/services/x", &["tokio", "x-core"], &[]),
        ]);
        let findings = check(Path::new("/w"), &graph).unwrap();
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert_eq!(findings[0].file, Path::new("services/x/core/Cargo.toml"));
        assert!(findings[0].message.contains("x-core → helper → tokio"), "{}", findings[0]);
    }

    #[test]
    fn uses_of_clocks_and_files_are_found_with_their_lines() {
        let text = "use std::collections::BTreeMap;\n\nfn now() { std::time::Instant::now(); }\nuse std::{\n    fs::File,\n    fmt,\n};\n// std::env\n#[cfg(test)]\nmod tests { use std::fs; }\n";
        let source = Source::new(Path::new("core/src/lib.rs"), text);
        let lines: Vec<String> = impure_lines(&source).iter().map(Finding::to_string).collect();
        assert_eq!(
            lines,
            [
                "core/src/lib.rs:3: Instant::now in a pure crate; take the value as an argument",
                "core/src/lib.rs:4: std::fs in a pure crate; take the value as an argument",
            ]
        );
    }

    #[test]
    fn a_pure_source_has_no_findings() {
        let source =
            Source::new(Path::new("x.rs"), "use std::{collections::{BTreeMap, btree_map}, time::Duration};");
        assert_eq!(impure_lines(&source), []);
    }
}
