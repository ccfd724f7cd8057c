//! One stack below every server and above every client: nobody else builds one (architecture §3).

use std::path::Path;

use super::Finding;
use super::source::{Source, sources};

/// Where sources are looked at.
const FOLDERS: [&str; 3] = ["services", "shared", "proto/src"];

/// The stack itself, the world outside the agent, and tests.
fn is_exempt(file: &Path) -> bool {
    file.starts_with("shared/service-kit")
        || file.starts_with("shared/etcd")
        || file.starts_with("shared/testkit")
        || file.components().any(|part| part.as_os_str() == "tests" || part.as_os_str() == "benches")
}

/// What makes a bare server or channel.
const FORBIDDEN_PATHS: [&str; 9] = [
    "transport::Server",
    "Server::builder",
    "transport::Endpoint",
    "Endpoint::from",
    "Endpoint::try_from",
    "Endpoint::new",
    "Channel::from_shared",
    "Channel::from_static",
    "Channel::builder",
];

/// Checks all sources but the exempt ones.
pub fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for folder in FOLDERS {
        for source in sources(root, Path::new(folder))? {
            if !is_exempt(&source.file) {
                findings.extend(bare_transports(&source));
            }
        }
    }
    Ok(findings)
}

fn bare_transports(source: &Source) -> Vec<Finding> {
    let paths = FORBIDDEN_PATHS.iter().flat_map(|path| source.find(path).into_iter().map(|at| (at, *path)));
    // A generated client's own `connect` makes a bare channel, too.
    let connects = source.code.match_indices("Client::connect(").map(|(at, _)| (at, "Client::connect"));
    paths
        .chain(connects)
        .map(|(offset, path)| Finding {
            file: source.file.clone(),
            line: source.line(offset),
            message: format!("{path} outside shared/service-kit; use its server or peer"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_servers_and_channels_are_found() {
        let text = "use tonic::transport::{Channel, Server};\nlet s = Server::builder();\nlet c = Channel::from_static(x);\nlet d = RuntimeServiceClient::connect(x);\nlet e = tonic::transport::Endpoint::try_from(x);";
        let source = Source::new(Path::new("services/x/src/lib.rs"), text);
        let mut lines: Vec<usize> = bare_transports(&source).iter().map(|finding| finding.line).collect();
        lines.sort_unstable();
        lines.dedup();
        assert_eq!(lines, [2, 3, 4, 5]);
    }

    #[test]
    fn a_channel_that_is_only_named_is_none() {
        let text = "struct X { client: RuntimeServiceClient<Channel> }\n// Server::builder()\n";
        assert_eq!(bare_transports(&Source::new(Path::new("x.rs"), text)), []);
    }

    #[test]
    fn the_stack_and_tests_are_exempt() {
        assert!(is_exempt(Path::new("shared/service-kit/src/server.rs")));
        assert!(is_exempt(Path::new("services/pod-sync/tests/unix.rs")));
        assert!(!is_exempt(Path::new("services/pod-sync/src/tester.rs")));
    }
}
