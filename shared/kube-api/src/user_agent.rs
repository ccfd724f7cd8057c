//! The user agent of a service's requests to the API server.

use keelson_config::ServiceName;

/// The user agent of a service: that of a kubelet of the node's version, since audit tools look for it, followed by the
/// service's name (node-and-api.md §5).
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
    fn user_agent_begins_with_kubelet_and_ends_with_the_service() {
        let agent = user_agent(ServiceName::PodConfig, KUBELET_VERSION);
        let (kubelet, own) = agent.split_once(") ").unwrap();
        assert!(kubelet.starts_with("kubelet/v1.36.2 (linux/"), "{agent}");
        assert_eq!(own, concat!("keelson-pod-config/", env!("CARGO_PKG_VERSION")));
        assert!(!kubelet.contains('+') && http::HeaderValue::from_str(&agent).is_ok());
    }
}
