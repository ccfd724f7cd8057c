//! What a request is to the authorizer: which part of the node it asks for, and what it does with it (node-and-api.md §7).

use axum::http::Method;

/// The resource that every path of the kubelet API is a part of.
pub(crate) const RESOURCE: &str = "nodes";

/// Paths, each with all below it, and the subresources that one of has to be allowed.
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

/// What every other path is, those into containers among them.
const PROXY: &str = "proxy";

/// The subresources of a path, in the order in which they are tried; to be allowed one of them is enough.
pub(crate) fn subresources(path: &str) -> &'static [&'static str] {
    let is_below =
        |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    SUBRESOURCES.iter().find(|(root, _)| is_below(root)).map_or(&[PROXY], |(_, subresources)| subresources)
}

/// The paths into containers. Who upgrades a connection to a WebSocket does it with `GET`.
const INTO_CONTAINERS: [&str; 4] = ["/exec/", "/attach/", "/portForward/", "/run/"];

/// What has to be allowed for a request. A kubelet goes by the method alone, so that who may only read a node gets into its
/// containers by a WebSocket (§16); `strict`: whatever the method, it takes `create` to get into one.
pub(crate) fn verb(method: &Method, path: &str, strict: bool) -> &'static str {
    if strict && INTO_CONTAINERS.iter().any(|root| path.starts_with(root)) {
        return "create";
    }
    verb_of(method)
}

/// What a method does; empty for one that Kubernetes has no verb for.
fn verb_of(method: &Method) -> &'static str {
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
    fn a_path_is_its_own_subresource_with_all_below_it_and_any_other_is_the_proxy() {
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
    fn a_method_is_a_verb_where_kubernetes_has_one() {
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
    fn strictly_whatever_gets_into_a_container_is_a_creation() {
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
