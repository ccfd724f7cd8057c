//! Who may link and who may call whom (architecture §1 and §2).

use std::path::{Component, Path};

use keelson_config::ServiceName;

use super::Finding;
use super::graph::{Graph, dependency_finding};
use super::source::{Source, sources};

/// The clients of control planes, and who may link them.
const CONTROL_PLANE_CRATES: [&str; 5] = ["kube", "kube-client", "kube-runtime", "k8s-openapi", "etcd-client"];
const CONTROL_PLANE_SERVICES: [&str; 2] = ["pod-config", "node-status"];

/// What of both the person's command may link, too (docs/adr/0007-the-command-speaks-to-etcd.md).
const OF_THE_COMMAND: [&str; 3] = ["etcd-client", "rustls", "tokio-rustls"];

/// TLS, and who may link it (docs/adr/0006-pod-sync-speaks-tls.md).
const TLS_CRATES: [&str; 2] = ["rustls", "tokio-rustls"];
const TLS_SERVICES: [&str; 4] = ["pod-config", "pod-sync", "node-status", "node-api"];

/// Crates that need protoc when they are built, which xtask must do without.
const PROTOC_CRATES: [&str; 3] = ["k8s-cri", "keelson-proto", "etcd-client"];

/// Checks what services link and whom they call.
pub fn check(root: &Path, graph: &Graph) -> anyhow::Result<Vec<Finding>> {
    let mut findings = linked(root, graph);
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

/// The service whose folder `folder` is or is in.
fn service_of(folder: &Path) -> Option<&str> {
    let mut parts = folder.components();
    let (Some(Component::Normal(first)), Some(Component::Normal(second))) = (parts.next(), parts.next())
    else {
        return None;
    };
    if first != "services" { None } else { second.to_str() }
}

fn linked(root: &Path, graph: &Graph) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (package, folder) in graph.packages_in(root, |folder| service_of(folder).is_some()) {
        let Some(service) = service_of(&folder) else { continue };
        for (needed, way) in graph.closure(package) {
            let name = needed.name.as_str();
            let home = needed.manifest.parent().and_then(|path| path.strip_prefix(root).ok());
            let other = home.and_then(service_of).filter(|other| *other != service);
            let allowed = service == "cli" && OF_THE_COMMAND.contains(&name);
            let rule = if allowed {
                continue;
            } else if other.is_some() {
                "a service links no other service"
            } else if CONTROL_PLANE_CRATES.contains(&name) && !CONTROL_PLANE_SERVICES.contains(&service) {
                "only pod-config and node-status link clients of control planes"
            } else if TLS_CRATES.contains(&name) && !TLS_SERVICES.contains(&service) {
                "only pod-config, pod-sync, node-status and node-api link TLS"
            } else {
                continue;
            };
            findings.push(dependency_finding(root, package, &way, rule));
        }
    }
    findings
}

/// Findings in `tree`, what xtask alone needs to be built: lines of `<name> v<version> …`.
pub fn check_bootstrap(tree: &str) -> Vec<Finding> {
    let names = tree.lines().filter_map(|line| line.split(' ').next());
    let forbidden = names.filter(|name| PROTOC_CRATES.contains(name));
    forbidden
        .map(|name| Finding {
            file: "deploy/xtask/Cargo.toml".into(),
            line: 1,
            message: format!(
                "xtask needs {name}, but it installs protoc, so it must be built without; \
                 see: cargo tree --package xtask --invert {name}"
            ),
        })
        .collect()
}

/// Each `.peer(ServiceName::X)` where `service` may not call X.
fn forbidden_calls(source: &Source, service: ServiceName) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (offset, _) in source.code.match_indices(".peer(") {
        for name in peers(source.bracket(offset)) {
            let known = ServiceName::ALL.into_iter().find(|other| format!("{other:?}") == name);
            let message = match known {
                Some(callee) if service.callees().contains(&callee) => continue,
                Some(callee) => format!("{service} may not call {callee}: no arrow goes back"),
                None => format!("there is no service {name}"),
            };
            findings.push(Finding { file: source.file.clone(), line: source.line(offset), message });
        }
    }
    findings
}

/// The names behind `ServiceName::`.
fn peers(argument: &str) -> Vec<&str> {
    let behind = argument.split("ServiceName::").skip(1);
    behind.map(|text| text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::graph::tests::graph;
    use super::*;

    fn messages(findings: &[Finding]) -> Vec<&str> {
        findings.iter().map(|finding| finding.message.as_str()).collect()
    }

    #[test]
    fn an_arrow_back_is_found_also_over_lines() {
        let text = "fn f() {\n    context.peer(ServiceName::PodConfig);\n    context.peer(\n        keelson_config::ServiceName::PodSync,\n    );\n}";
        let source = Source::new(Path::new("services/volume-manager/src/lib.rs"), text);
        let findings = forbidden_calls(&source, ServiceName::VolumeManager);
        assert_eq!(messages(&findings), ["volume-manager may not call pod-sync: no arrow goes back"]);
        assert_eq!(findings[0].line, 3);
        assert_eq!(forbidden_calls(&source, ServiceName::NodeApi), []);
    }

    #[test]
    fn a_service_that_links_another_or_a_control_plane_is_found() {
        let graph = graph(&[
            ("a", "/w/services/runtime-shim", &["a-core", "b-core", "helper"], &["c"]),
            ("a-core", "/w/services/runtime-shim/core", &[], &[]),
            ("b-core", "/w/services/node-api/core", &[], &[]),
            ("c", "/w/services/pod-config", &["kube", "rustls"], &[]),
            ("helper", "/w/shared/helper", &["kube", "rustls"], &[]),
            ("kube", "/r/kube", &[], &[]),
            ("rustls", "/r/rustls", &[], &[]),
        ]);
        let findings = linked(Path::new("/w"), &graph);
        assert_eq!(
            messages(&findings),
            [
                "a → b-core (a service links no other service)",
                "a → helper → kube (only pod-config and node-status link clients of control planes)",
                "a → helper → rustls (only pod-config, pod-sync, node-status and node-api link TLS)",
            ]
        );
    }

    #[test]
    fn an_xtask_that_needs_protoc_is_found() {
        let findings = check_bootstrap("xtask v0.1.0 (/w)\nserde v1.0.0\nk8s-cri v0.11.0\n");
        assert_eq!(findings.len(), 1);
        assert!(findings[0].message.starts_with("xtask needs k8s-cri"), "{}", findings[0]);
    }
}
