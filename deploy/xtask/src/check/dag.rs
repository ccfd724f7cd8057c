//! The crates that a service may link and the services that it may call (architecture §1 and §2).

use std::path::{Component, Path};

use keelson_config::ServiceName;

use super::Finding;
use super::graph::{Graph, dependency_finding};
use super::source::{Source, sources};

/// The client crates of control planes, and the services that may link them.
const CONTROL_PLANE_CRATES: [&str; 5] = ["kube", "kube-client", "kube-runtime", "k8s-openapi", "etcd-client"];
const CONTROL_PLANE_SERVICES: [&str; 2] = ["pod-config", "node-status"];

/// The client and TLS crates that the command-line tool may link, too (docs/adr/0007-the-command-speaks-to-etcd.md).
const CLI_CRATES: [&str; 3] = ["etcd-client", "rustls", "tokio-rustls"];

/// The TLS crates, and the services that may link them (docs/adr/0006-pod-sync-speaks-tls.md).
const TLS_CRATES: [&str; 2] = ["rustls", "tokio-rustls"];
const TLS_SERVICES: [&str; 4] = ["pod-config", "pod-sync", "node-status", "node-api"];

/// The crates that need protoc to be built. xtask must not link them, because it installs protoc.
const PROTOC_CRATES: [&str; 3] = ["k8s-cri", "keelson-proto", "etcd-client"];

/// Checks the crates that services link and the services that they call.
///
/// # Errors
/// A source cannot be read.
pub fn check(root: &Path, graph: &Graph) -> anyhow::Result<Vec<Finding>> {
    let mut findings = forbidden_links(root, graph);
    for service in ServiceName::ALL {
        let folder = Path::new("services").join(service.as_str());
        for part in ["src", "core/src"] {
            for source in sources(root, &folder.join(part))? {
                findings.extend(forbidden_calls(&source, service));
            }
        }
    }
    Ok(findings)
}

/// The name of the service that `folder` belongs to.
fn service_of(folder: &Path) -> Option<&str> {
    let mut parts = folder.components();
    let (Some(Component::Normal(first)), Some(Component::Normal(second))) = (parts.next(), parts.next())
    else {
        return None;
    };
    if first != "services" { None } else { second.to_str() }
}

/// A finding for each crate that a service links and may not.
fn forbidden_links(root: &Path, graph: &Graph) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (package, folder) in graph.packages_in(root, |folder| service_of(folder).is_some()) {
        let Some(service) = service_of(&folder) else { continue };
        for (dependency, path) in graph.transitive_dependencies(package) {
            let name = dependency.name.as_str();
            let folder = dependency.manifest.parent().and_then(|path| path.strip_prefix(root).ok());
            let other = folder.and_then(service_of).filter(|other| *other != service);
            let allowed = service == "cli" && CLI_CRATES.contains(&name);
            let rule = if allowed {
                continue;
            } else if other.is_some() {
                "a service must not link another service"
            } else if CONTROL_PLANE_CRATES.contains(&name) && !CONTROL_PLANE_SERVICES.contains(&service) {
                "only pod-config and node-status may link clients of control planes"
            } else if TLS_CRATES.contains(&name) && !TLS_SERVICES.contains(&service) {
                "only pod-config, pod-sync, node-status and node-api may link TLS"
            } else {
                continue;
            };
            findings.push(dependency_finding(root, package, &path, rule));
        }
    }
    findings
}

/// A finding for each crate in xtask's dependency tree that needs protoc. Each line of `tree` is `<name> v<version> …`.
pub fn check_bootstrap(tree: &str) -> Vec<Finding> {
    let names = tree.lines().filter_map(|line| line.split(' ').next());
    let forbidden = names.filter(|name| PROTOC_CRATES.contains(name));
    forbidden
        .map(|name| Finding {
            file: "deploy/xtask/Cargo.toml".into(),
            line: 1,
            message: format!(
                "xtask depends on {name}, which needs protoc to be built, but xtask installs protoc; remove the dependency that \
                 this shows: cargo tree --package xtask --invert {name}"
            ),
        })
        .collect()
}

/// A finding for each `.peer(ServiceName::X)` in a source of `service` if it may not call X.
fn forbidden_calls(source: &Source, service: ServiceName) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (offset, _) in source.code.match_indices(".peer(") {
        for name in peers(source.parentheses(offset)) {
            let known = ServiceName::ALL.into_iter().find(|other| format!("{other:?}") == name);
            let message = match known {
                Some(callee) if service.callees().contains(&callee) => continue,
                Some(callee) => {
                    format!("{service} may not call {callee}; the allowed calls are in architecture §2")
                }
                None => format!("there is no service {name}"),
            };
            findings.push(Finding { file: source.file.clone(), line: source.line(offset), message });
        }
    }
    findings
}

/// The variants of `ServiceName` in an argument.
fn peers(argument: &str) -> Vec<&str> {
    let names = argument.split("ServiceName::").skip(1);
    names.map(|text| text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::graph::tests::graph;
    use super::*;

    fn messages(findings: &[Finding]) -> Vec<&str> {
        findings.iter().map(|finding| finding.message.as_str()).collect()
    }

    #[test]
    fn a_forbidden_call_is_found_also_across_lines() {
        let text = "fn f() {\n    context.peer(ServiceName::PodConfig);\n    context.peer(\n        keelson_config::ServiceName::PodSync,\n    );\n}";
        let source = Source::new(Path::new("services/volume-manager/src/lib.rs"), text);
        let findings = forbidden_calls(&source, ServiceName::VolumeManager);
        assert_eq!(
            messages(&findings),
            ["volume-manager may not call pod-sync; the allowed calls are in architecture §2"]
        );
        assert_eq!(findings[0].line, 3);
        assert_eq!(forbidden_calls(&source, ServiceName::NodeApi), []);
    }

    #[test]
    fn links_to_services_control_plane_clients_and_tls_are_found() {
        let graph = graph(&[
            ("a", "/w/services/runtime-shim", &["a-core", "b-core", "helper"], &["c"]),
            ("a-core", "/w/services/runtime-shim/core", &[], &[]),
            ("b-core", "/w/services/node-api/core", &[], &[]),
            ("c", "/w/services/pod-config", &["kube", "rustls"], &[]),
            ("helper", "/w/shared/helper", &["kube", "rustls"], &[]),
            ("kube", "/r/kube", &[], &[]),
            ("rustls", "/r/rustls", &[], &[]),
        ]);
        let findings = forbidden_links(Path::new("/w"), &graph);
        assert_eq!(
            messages(&findings),
            [
                "a → b-core (a service must not link another service)",
                "a → helper → kube (only pod-config and node-status may link clients of control planes)",
                "a → helper → rustls (only pod-config, pod-sync, node-status and node-api may link TLS)",
            ]
        );
    }

    #[test]
    fn a_dependency_of_xtask_on_protoc_is_found() {
        let findings = check_bootstrap("xtask v0.1.0 (/w)\nserde v1.0.0\nk8s-cri v0.11.0\n");
        assert_eq!(findings.len(), 1);
        assert!(findings[0].message.starts_with("xtask depends on k8s-cri"), "{}", findings[0]);
    }
}
