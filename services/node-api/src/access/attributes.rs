//! Authorization attributes of a request: the subresource of the node and the verb (node-and-api.md §7).

use axum::http::Method;

/// The resource of every path of the kubelet API.
pub(crate) const RESOURCE: &str = "nodes";

/// Path prefixes and their subresources, of which one has to be allowed.
const SUBRESOURCES: [(&str, &[&str]); 10] = [
    ("/stats", &["stats"]),
    ("/metrics", &["metrics"]),
    ("/logs", &["log"]),
    ("/checkpoint", &["checkpoint"]),
    ("/statusz", &["statusz"]),
    ("/flagz", &["configz"]),
    ("/pods", &["pods", PROXY]),
    ("/runningpods", &["pods", PROXY]),
    ("/healthz", &["healthz", PROXY]),
    ("/configz", &["configz", PROXY]),
];

/// The subresource of all other paths, among them those into containers.
const PROXY: &str = "proxy";

/// The subresources of a path, in the order in which they are tried; access to one of them is enough.
pub(crate) fn subresources(path: &str) -> &'static [&'static str] {
    let is_below =
        |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    SUBRESOURCES.iter().find(|(root, _)| is_below(root)).map_or(&[PROXY], |(_, subresources)| subresources)
}

/// The paths into containers.
const INTO_CONTAINERS: [&str; 4] = ["/exec/", "/attach/", "/portForward/", "/run/"];

/// The verb of a request. A kubelet derives it from the method alone, so a user with read access gets into containers through a
/// WebSocket, which begins with `GET` (§16); with `strict` all paths into containers require `create`.
pub(crate) fn verb(method: &Method, path: &str, strict: bool) -> &'static str {
    if strict && INTO_CONTAINERS.iter().any(|root| path.starts_with(root)) {
        return "create";
    }
    verb_of_method(method)
}

/// The verb of a method; empty where Kubernetes has none.
fn verb_of_method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "get",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_map_to_node_subresources_and_unknown_paths_to_proxy() {
        for (path, expected) in [
            ("/stats", &["stats"][..]),
            ("/stats/summary", &["stats"]),
            ("/metrics", &["metrics"]),
            ("/metrics/", &["metrics"]),
            ("/metrics/cadvisor", &["metrics"]),
            ("/logs/", &["log"]),
            ("/checkpoint/ns/pod/c", &["checkpoint"]),
            ("/statusz", &["statusz"]),
            ("/flagz", &["configz"]),
            ("/pods", &["pods", "proxy"]),
            ("/pods/", &["pods", "proxy"]),
            ("/stats/summary/", &["stats"]),
            ("/configz/", &["configz", "proxy"]),
            ("/runningpods/", &["pods", "proxy"]),
            ("/healthz/ping", &["healthz", "proxy"]),
            ("/configz", &["configz", "proxy"]),
            ("/exec/ns/pod/c", &["proxy"]),
            ("/run/ns/pod/c", &["proxy"]),
            ("/attach/ns/pod/c", &["proxy"]),
            ("/portForward/ns/pod", &["proxy"]),
            ("/containerLogs/ns/pod/c", &["proxy"]),
            ("/logs", &["log"]),
            ("/logs/pods/x", &["log"]),
            ("/debug/flags/v", &["proxy"]),
            ("/debug/pprof/heap", &["proxy"]),
            ("/metricsx", &["proxy"]),
            ("//metrics", &["proxy"]),
            ("/METRICS", &["proxy"]),
            ("/metric%73", &["proxy"]),
            ("/", &["proxy"]),
            ("", &["proxy"]),
        ] {
            assert_eq!(subresources(path), expected, "{path}");
        }
    }

    #[test]
    fn http_methods_map_to_kubernetes_verbs() {
        for (method, expected) in [
            ("GET", "get"),
            ("POST", "create"),
            ("PUT", "update"),
            ("PATCH", "patch"),
            ("DELETE", "delete"),
            ("HEAD", ""),
            ("OPTIONS", ""),
            ("BREW", ""),
        ] {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            for strict in [false, true] {
                assert_eq!(verb(&method, "/metrics", strict), expected, "{method}");
            }
            assert_eq!(verb(&method, "/exec/ns/pod/c", false), expected, "{method}");
        }
    }

    #[test]
    fn strict_verbs_require_create_for_every_path_into_a_container() {
        for (path, expected) in [
            ("/exec/ns/pod/c", "create"),
            ("/exec/ns/pod/uid/c", "create"),
            ("/attach/ns/pod/c", "create"),
            ("/portForward/ns/pod", "create"),
            ("/run/ns/pod/c", "create"),
            ("/containerLogs/ns/pod/c", "get"),
            ("/runningpods/", "get"),
            ("/execute/ns", "get"),
            ("/pods", "get"),
            ("/", "get"),
        ] {
            assert_eq!(verb(&Method::GET, path, true), expected, "{path}");
            assert_eq!(verb(&Method::GET, path, false), "get", "{path}");
        }
    }
}
