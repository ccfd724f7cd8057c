//! Only shared/service-kit builds gRPC servers and channels, so that all have the same limits, checks and traces
//! (architecture §3).

use std::path::Path;

use super::Finding;
use super::source::{Source, sources};

/// The folders that are checked.
const FOLDERS: [&str; 3] = ["services", "shared", "proto/src"];

/// Whether `file` may build transports: service-kit itself, the etcd client, the test kit and tests.
fn is_exempt(file: &Path) -> bool {
    file.starts_with("shared/service-kit")
        || file.starts_with("shared/etcd")
        || file.starts_with("shared/testkit")
        || file.components().any(|part| part.as_os_str() == "tests" || part.as_os_str() == "benches")
}

/// The paths that build a server or a channel.
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

/// Checks all sources that are not exempt.
///
/// # Errors
/// A source cannot be read.
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

/// A finding for each place that builds a server or a channel.
fn bare_transports(source: &Source) -> Vec<Finding> {
    let paths = FORBIDDEN_PATHS.iter().flat_map(|path| source.find(path).into_iter().map(|at| (at, *path)));
    // The `connect` of a generated client builds a channel, too.
    let connects = source.code.match_indices("Client::connect(").map(|(at, _)| (at, "Client::connect"));
    paths
        .chain(connects)
        .map(|(offset, path)| Finding {
            file: source.file.clone(),
            line: source.line(offset),
            message: format!("{path} outside shared/service-kit; use the server or the peer of that crate"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_that_builds_servers_or_channels_is_found() {
        let text = "use tonic::transport::{Channel, Server};\nlet s = Server::builder();\nlet c = Channel::from_static(x);\nlet d = RuntimeServiceClient::connect(x);\nlet e = tonic::transport::Endpoint::try_from(x);";
        let source = Source::new(Path::new("services/x/src/lib.rs"), text);
        let mut lines: Vec<usize> = bare_transports(&source).iter().map(|finding| finding.line).collect();
        lines.sort_unstable();
        lines.dedup();
        assert_eq!(lines, [2, 3, 4, 5]);
    }

    #[test]
    fn a_channel_in_a_type_or_a_comment_is_allowed() {
        let text = "struct X { client: RuntimeServiceClient<Channel> }\n// Server::builder()\n";
        assert_eq!(bare_transports(&Source::new(Path::new("x.rs"), text)), []);
    }

    #[test]
    fn service_kit_and_tests_are_exempt() {
        assert!(is_exempt(Path::new("shared/service-kit/src/server.rs")));
        assert!(is_exempt(Path::new("services/pod-sync/tests/unix.rs")));
        assert!(!is_exempt(Path::new("services/pod-sync/src/tester.rs")));
    }
}
