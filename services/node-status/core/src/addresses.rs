//! The addresses of a Node (node-and-api.md §9.2).

use std::net::IpAddr;

use keelson_kube_model::NodeAddress;

/// The inputs for the addresses of a Node.
#[derive(Debug, Clone, Copy, Default)]
pub struct AddressInputs<'a> {
    /// `--node-ip`: none, one, or one of each family.
    pub node_ips: &'a [IpAddr],
    /// A cloud controller manages the addresses.
    pub external_cloud: bool,
    /// The address of the default route's interface, in the preferred family if there is one.
    pub default_address: Option<IpAddr>,
}

/// The annotation that passes `--node-ip` to a cloud controller.
pub const PROVIDED_NODE_IP: &str = "alpha.kubernetes.io/provided-node-ip";

impl AddressInputs<'_> {
    /// The value of [`PROVIDED_NODE_IP`]; `None` without a cloud controller.
    pub fn provided(&self) -> Option<String> {
        let list: Vec<String> = self.node_ips.iter().map(ToString::to_string).collect();
        (self.external_cloud && !list.is_empty()).then(|| list.join(","))
    }

    /// The addresses of the node `node_name`: one InternalIP if there is one, or the given ones of each family, and then the
    /// Hostname.
    ///
    /// Parity: the node's name is not looked up; a name that is an address is that address.
    pub fn addresses(&self, node_name: &str) -> Vec<NodeAddress> {
        let address = |type_: &str, address: String| NodeAddress { type_: type_.into(), address };
        let internal = self.internal(node_name).into_iter().map(|ip| address("InternalIP", ip.to_string()));
        internal.chain([address("Hostname", node_name.to_owned())]).collect()
    }

    fn internal(&self, node_name: &str) -> Vec<IpAddr> {
        let specified: Vec<IpAddr> = self.node_ips.iter().copied().filter(usable).collect();
        if !specified.is_empty() {
            return specified;
        }
        if self.external_cloud && self.node_ips.is_empty() {
            return Vec::new();
        }
        let name = node_name.parse().ok().filter(usable);
        name.or_else(|| self.default_address.filter(usable)).into_iter().collect()
    }

    /// Why the first unusable address of `--node-ip` cannot be this node's; `is_local` is whether an interface has an address.
    pub fn unusable(&self, is_local: impl Fn(&IpAddr) -> bool) -> Option<String> {
        // An unspecified address only selects the preferred family.
        let specified = self.node_ips.iter().filter(|ip| !ip.is_unspecified());
        let mut reasons = specified.filter_map(|ip| match ip {
            _ if ip.is_loopback() => Some(format!("nodeIP can't be loopback address: {ip}")),
            _ if ip.is_multicast() => Some(format!("nodeIP can't be a multicast address: {ip}")),
            _ if !usable(ip) => Some(format!("nodeIP can't be a link-local unicast address: {ip}")),
            _ if !is_local(ip) => {
                Some(format!("node IP: \"{ip}\" not found in the host's network interfaces"))
            }
            _ => None,
        });
        reasons.next()
    }
}

/// Whether an address can be a node's: not loopback, multicast, link-local or unspecified.
pub fn usable(ip: &IpAddr) -> bool {
    let link_local = match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !(ip.is_loopback() || ip.is_multicast() || ip.is_unspecified() || link_local)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn internal(
        node_ips: &[&str],
        external_cloud: bool,
        default_address: Option<&str>,
        name: &str,
    ) -> String {
        let node_ips = ips(node_ips);
        let default_address = default_address.map(|text| text.parse().unwrap());
        let inputs = AddressInputs { node_ips: &node_ips, external_cloud, default_address };
        let found = inputs.addresses(name);
        assert_eq!(
            found.last().map(|last| (last.type_.as_str(), last.address.as_str())),
            Some(("Hostname", name))
        );
        let internal = found.iter().filter(|address| address.type_ == "InternalIP");
        internal.map(|address| address.address.as_str()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn node_ip_addresses_keep_their_order_and_precede_all_others() {
        let default = Some("192.168.7.2");
        for (given, expected) in [
            (&["10.0.0.1"][..], "10.0.0.1"),
            (&["fd00::1", "10.0.0.1"], "fd00::1 10.0.0.1"),
            (&["10.0.0.1", "fd00::1"], "10.0.0.1 fd00::1"),
            (&["::"], "192.168.7.2"),
            (&[], "192.168.7.2"),
        ] {
            assert_eq!(internal(given, false, default, "edge-1"), expected, "{given:?}");
        }
        assert_eq!(internal(&["10.0.0.1"], false, default, "10.0.0.9"), "10.0.0.1");
        assert_eq!(internal(&[], false, default, "10.0.0.9"), "10.0.0.9");
    }

    #[test]
    fn an_external_cloud_gets_provided_node_ip_and_decides_without_it() {
        let default = Some("192.168.7.2");
        assert_eq!(internal(&[], true, default, "edge-1"), "");
        assert_eq!(internal(&["0.0.0.0"], true, default, "edge-1"), "192.168.7.2");
        assert_eq!(internal(&["10.0.0.1"], true, default, "edge-1"), "10.0.0.1");
        let both = ips(&["10.0.0.1", "fd00::1"]);
        let provided = |node_ips, external_cloud| {
            AddressInputs { node_ips, external_cloud, default_address: None }.provided()
        };
        assert_eq!(provided(&both, true).as_deref(), Some("10.0.0.1,fd00::1"));
        assert_eq!(provided(&both, false), None);
        assert_eq!(provided(&[], true), None);
    }

    #[test]
    fn an_unusable_node_ip_is_reported_with_its_reason() {
        for (given, words) in [
            ("127.0.0.1", "nodeIP can't be loopback address: 127.0.0.1"),
            ("224.0.0.1", "nodeIP can't be a multicast address: 224.0.0.1"),
            ("fe80::1", "nodeIP can't be a link-local unicast address: fe80::1"),
            ("10.9.9.9", "node IP: \"10.9.9.9\" not found in the host's network interfaces"),
        ] {
            let given = ips(&["10.0.0.1", given]);
            let inputs = AddressInputs { node_ips: &given, ..AddressInputs::default() };
            assert_eq!(inputs.unusable(|ip| ip.to_string() == "10.0.0.1").as_deref(), Some(words));
        }
        let fine = ips(&["::"]);
        assert_eq!(AddressInputs { node_ips: &fine, ..AddressInputs::default() }.unusable(|_| false), None);
    }
}
