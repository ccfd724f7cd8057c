//! The hostname of a pod (§2.2).

use keelson_kube_model::Pod;

use super::ConfigError;

/// Longest hostname, a DNS label.
const MAX_LABEL: usize = 63;
/// Longest hostname that the kernel accepts.
const MAX_KERNEL: usize = 64;

/// The names of a pod's host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostNames {
    /// The short name, for /etc/hosts.
    pub hostname: String,
    /// `<subdomain>.<namespace>.svc.<clusterDomain>`, or empty.
    pub domain: String,
    /// The hostname in the kernel: the short name, or the full one with `setHostnameAsFQDN`.
    pub kernel_name: String,
}

/// Computes the names of a pod.
pub fn host_names(pod: &Pod, cluster_domain: &str) -> Result<HostNames, ConfigError> {
    let spec = &pod.spec;
    if let Some(name) = spec.hostname_override.as_deref().filter(|name| !name.is_empty()) {
        if !is_subdomain(name) {
            return Err(ConfigError::HostnameOverride { name: name.to_owned() });
        }
        let hostname = cut(name);
        return Ok(HostNames { kernel_name: hostname.clone(), hostname, domain: String::new() });
    }
    let hostname = cut(if spec.hostname.is_empty() { &pod.metadata.name } else { &spec.hostname });
    let domain = if spec.subdomain.is_empty() {
        String::new()
    } else {
        format!("{}.{}.svc.{cluster_domain}", spec.subdomain, pod.metadata.namespace)
    };
    let mut kernel_name = hostname.clone();
    if spec.set_hostname_as_fqdn == Some(true) && !domain.is_empty() {
        kernel_name = format!("{hostname}.{domain}");
        if kernel_name.len() > MAX_KERNEL {
            return Err(ConfigError::FqdnTooLong { length: kernel_name.len(), fqdn: kernel_name });
        }
    }
    Ok(HostNames { hostname, domain, kernel_name })
}

fn cut(name: &str) -> String {
    if name.len() <= MAX_LABEL {
        return name.to_owned();
    }
    let cut: String = name.chars().take(MAX_LABEL).collect();
    cut.trim_end_matches(['-', '.']).to_owned()
}

fn is_subdomain(name: &str) -> bool {
    let good = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    name.len() <= 253 && name.split('.').all(good)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn names(spec: Value) -> Result<HostNames, ConfigError> {
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"name": "web-0", "namespace": "shop"}, "spec": spec}))
                .unwrap();
        host_names(&pod, "cluster.local")
    }

    #[test]
    fn the_default_hostname_is_the_pod_name() {
        let got = names(json!({})).unwrap();
        assert_eq!(
            (got.hostname.as_str(), got.domain.as_str(), got.kernel_name.as_str()),
            ("web-0", "", "web-0")
        );
    }

    #[test]
    fn a_long_hostname_is_cut_without_trailing_dashes_and_dots() {
        let long = format!("{}-.{}", "a".repeat(61), "b".repeat(20));
        assert_eq!(names(json!({"hostname": long})).unwrap().hostname, "a".repeat(61));
    }

    #[test]
    fn a_subdomain_gives_a_domain() {
        let got = names(json!({"hostname": "h", "subdomain": "db"})).unwrap();
        assert_eq!(got.domain, "db.shop.svc.cluster.local");
        assert_eq!(got.kernel_name, "h");
    }

    #[test]
    fn set_hostname_as_fqdn_makes_the_fqdn_the_kernel_hostname() {
        let got = names(json!({"hostname": "h", "subdomain": "db", "setHostnameAsFQDN": true})).unwrap();
        assert_eq!(got.kernel_name, "h.db.shop.svc.cluster.local");
        assert_eq!(got.hostname, "h");
    }

    #[test]
    fn an_fqdn_above_64_characters_is_an_error_that_names_it() {
        let spec = json!({"hostname": "h".repeat(50), "subdomain": "db", "setHostnameAsFQDN": true});
        let message = names(spec).unwrap_err().to_string();
        assert!(
            message.contains("is too long (64 characters is the max, 76 characters requested)"),
            "{message}"
        );
        let fits = json!({"hostname": "h".repeat(38), "subdomain": "db", "setHostnameAsFQDN": true});
        assert_eq!(names(fits).unwrap().kernel_name.len(), 64);
    }

    #[test]
    fn hostname_override_wins_and_has_no_domain() {
        let got = names(json!({"hostnameOverride": "x.y", "hostname": "h", "subdomain": "db"})).unwrap();
        assert_eq!((got.hostname.as_str(), got.domain.as_str()), ("x.y", ""));
        let long = format!("{0}.{0}.{0}.{1}", "a".repeat(63), "b".repeat(62));
        for bad in ["Bad_", "-a", "a-", "a..b", "a.-b", "x.", "a.b-", long.as_str()] {
            let refused = names(json!({"hostnameOverride": bad}));
            assert!(matches!(refused, Err(ConfigError::HostnameOverride { .. })), "{bad}");
        }
        assert!(names(json!({"hostnameOverride": &long[1..]})).is_ok());
    }
}
