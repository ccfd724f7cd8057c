//! The content of a pod's `/etc/hosts` (runtime-and-resources.md §3.5).

/// The first part of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base<'a> {
    /// The pod uses the host's network: the content of the node's own file.
    HostNetwork(&'a str),
    /// The pod has its own network.
    PodNetwork {
        /// The pod's addresses.
        ips: &'a [String],
        /// The pod's host name.
        hostname: &'a str,
        /// The domain of the pod's fully qualified name; empty if it has none.
        domain: &'a str,
    },
}

/// An entry of the pod's `hostAliases`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alias<'a> {
    /// The address.
    pub ip: &'a str,
    /// The names of the address.
    pub hostnames: &'a [String],
}

/// The content of the file.
pub fn content(base: &Base<'_>, aliases: &[Alias<'_>]) -> String {
    let mut text = match base {
        Base::HostNetwork(own) => format!("# Kubernetes-managed hosts file (host network).\n{own}"),
        Base::PodNetwork { ips, hostname, domain } => pod_network(ips, hostname, domain),
    };
    if !aliases.is_empty() {
        text.push_str("\n# Entries added by HostAliases.\n");
        for alias in aliases {
            text.push_str(&format!("{}\t{}\n", alias.ip, alias.hostnames.join("\t")));
        }
    }
    text
}

fn pod_network(ips: &[String], hostname: &str, domain: &str) -> String {
    let mut text = String::from(
        "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n\
         fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n",
    );
    for ip in ips {
        if domain.is_empty() {
            text.push_str(&format!("{ip}\t{hostname}\n"));
        } else {
            text.push_str(&format!("{ip}\t{hostname}.{domain}\t{hostname}\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: &str = "# Kubernetes-managed hosts file.\n\
        127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n\
        fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n";

    #[test]
    fn etc_hosts_has_the_pods_addresses_and_its_aliases() {
        let ips = ["10.0.0.2".to_owned(), "fd00::2".to_owned()];
        let base = |domain| Base::PodNetwork { ips: &ips, hostname: "web", domain };
        assert_eq!(content(&base(""), &[]), format!("{LOCAL}10.0.0.2\tweb\nfd00::2\tweb\n"));
        let qualified = "10.0.0.2\tweb.sub.example\tweb\nfd00::2\tweb.sub.example\tweb\n";
        assert_eq!(content(&base("sub.example"), &[]), format!("{LOCAL}{qualified}"));
        let names = ["a".to_owned(), "b".to_owned()];
        let aliases = [Alias { ip: "10.0.0.9", hostnames: &names }];
        let text = content(&base(""), &aliases);
        assert!(
            text.ends_with("fd00::2\tweb\n\n# Entries added by HostAliases.\n10.0.0.9\ta\tb\n"),
            "{text}"
        );
    }

    #[test]
    fn etc_hosts_of_a_host_network_pod_begins_with_the_nodes_file() {
        let names = ["a".to_owned()];
        let aliases = [Alias { ip: "10.0.0.9", hostnames: &names }];
        assert_eq!(
            content(&Base::HostNetwork("127.0.0.1\tnode\n"), &aliases),
            "# Kubernetes-managed hosts file (host network).\n127.0.0.1\tnode\n\
             \n# Entries added by HostAliases.\n10.0.0.9\ta\n"
        );
    }
}
