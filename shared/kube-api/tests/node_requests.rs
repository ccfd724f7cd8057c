//! Checks that docs/node-requests.md lists every source that makes requests, with every resource that it requests.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use keelson_kube_api::Resource;

fn plural(constant: &str) -> &'static str {
    let resource = match constant {
        "POD" => Resource::POD,
        "NODE" => Resource::NODE,
        "SECRET" => Resource::SECRET,
        "CONFIG_MAP" => Resource::CONFIG_MAP,
        "SERVICE" => Resource::SERVICE,
        "SERVICE_ACCOUNT" => Resource::SERVICE_ACCOUNT,
        "EVENT" => Resource::EVENT,
        "LEASE" => Resource::LEASE,
        "CERTIFICATE_SIGNING_REQUEST" => Resource::CERTIFICATE_SIGNING_REQUEST,
        "RUNTIME_CLASS" => Resource::RUNTIME_CLASS,
        other => panic!("add Resource::{other} to this test and to docs/node-requests.md"),
    };
    resource.plural
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

/// The resources in the code of a file, without its tests.
fn resources(text: &str) -> BTreeSet<String> {
    let code = text.split("\nmod tests {").next().unwrap_or_default();
    let constants = code
        .split("Resource::")
        .skip(1)
        .map(|rest| rest.split(|c: char| !c.is_ascii_uppercase() && c != '_').next().unwrap_or_default());
    let named = constants.filter(|name| name.len() > 1).map(|name| plural(name).to_owned());
    let own = code.split("plural: \"").skip(1).filter_map(|rest| rest.split('"').next()).map(str::to_owned);
    named.chain(own).collect()
}

#[test]
fn every_request_in_the_sources_is_documented_and_no_other() {
    let root = root();
    let mut requested = BTreeSet::new();
    for service in fs::read_dir(root.join("services")).unwrap() {
        let folder = service.unwrap().path().join("src");
        let mut files = Vec::new();
        if folder.is_dir() {
            sources(&folder, &mut files);
        }
        for file in files {
            let name = file.file_name().unwrap().to_str().unwrap();
            let text = fs::read_to_string(&file).unwrap();
            if name.ends_with("tests.rs") || name.starts_with("fake") || !text.contains("keelson_kube_api") {
                continue;
            }
            let path = file.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
            requested.extend(resources(&text).into_iter().map(|resource| (path.clone(), resource)));
        }
    }
    let page = fs::read_to_string(root.join("docs/node-requests.md")).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| services/"));
    let listed: BTreeSet<(String, String)> = rows
        .map(|row| {
            let mut cells = row.trim_matches('|').split('|').map(str::trim);
            let (source, resource) = (cells.next().unwrap(), cells.next().unwrap());
            (source.to_owned(), resource.split('/').next().unwrap().to_owned())
        })
        .collect();
    assert!(listed.len() > 10);
    assert_eq!(requested, listed);
}
