//! Accessors of a Node.

use std::net::IpAddr;

use crate::types::NodeAddress;

/// The addresses of a node that its pods show as `hostIPs`: the first one, and the first of the other family
/// (pod-lifecycle.md §14.1). An API server accepts at most one of each family, while a cloud node may have several.
///
/// `InternalIP` precedes `ExternalIP`; other types and invalid addresses are ignored.
pub fn host_ips(addresses: &[NodeAddress]) -> Vec<IpAddr> {
    let of = |type_: &'static str| addresses.iter().filter(move |address| address.type_ == type_);
    let all =
        of("InternalIP").chain(of("ExternalIP")).filter_map(|address| address.address.parse::<IpAddr>().ok());
    let all: Vec<IpAddr> = all.collect();
    let Some(first) = all.first() else { return Vec::new() };
    let second = all.iter().find(|ip| ip.is_ipv4() != first.is_ipv4());
    [Some(first), second].into_iter().flatten().copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_ips_are_the_first_internal_ip_and_the_first_of_the_other_family() {
        for (addresses, expected) in [
            ("in:10.0.0.1 in:10.0.0.2 in:fd00::1 in:fd00::2", "10.0.0.1 fd00::1"),
            ("in:fd00::1 in:10.0.0.1", "fd00::1 10.0.0.1"),
            ("out:192.0.2.7 in:10.0.0.1 in:10.0.0.2", "10.0.0.1"),
            ("out:192.0.2.7 out:192.0.2.8", "192.0.2.7"),
            ("out:fd00::7 out:192.0.2.7 in:10.0.0.1", "10.0.0.1 fd00::7"),
            ("in:none in:FD00:0::1", "fd00::1"),
            ("name:n", ""),
            ("", ""),
        ] {
            let given: Vec<NodeAddress> = addresses.split_whitespace().map(address).collect();
            let found: Vec<String> = host_ips(&given).iter().map(ToString::to_string).collect();
            assert_eq!(found.join(" "), expected, "{addresses}");
        }
    }

    /// `TYPE:ADDRESS`, with types in short.
    fn address(text: &str) -> NodeAddress {
        let (type_, address) = text.split_once(':').unwrap();
        let type_ = match type_ {
            "in" => "InternalIP",
            "out" => "ExternalIP",
            _ => "Hostname",
        };
        NodeAddress { type_: type_.to_owned(), address: address.to_owned() }
    }
}
