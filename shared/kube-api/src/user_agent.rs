//! How services name themselves to the API server.

use keelson_config::ServiceName;

/// The user agent of a service's calls: that of a kubelet, since audit tools look for it, of the version that the node shows, and
/// behind that which service it is (node-and-api.md §5).
pub fn user_agent(service: ServiceName, kubelet_version: &str) -> String {
    let version = kubelet_version.split('+').next().unwrap_or_default();
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        other => other,
    };
    format!("kubelet/{version} (linux/{arch}) {}/{}", service.binary(), env!("CARGO_PKG_VERSION"))
}

#[cfg(test)]
mod tests {
    use keelson_config::KUBELET_VERSION;

    use super::*;

    #[test]
    fn it_begins_like_that_of_a_kubelet_and_ends_with_the_service() {
        let agent = user_agent(ServiceName::PodConfig, KUBELET_VERSION);
        let (kubelet, own) = agent.split_once(") ").unwrap();
        assert!(kubelet.starts_with("kubelet/v1.36.2 (linux/"), "{agent}");
        assert_eq!(own, concat!("keelson-pod-config/", env!("CARGO_PKG_VERSION")));
        assert!(!kubelet.contains('+') && http::HeaderValue::from_str(&agent).is_ok());
    }
}
