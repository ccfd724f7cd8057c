//! The address of the interface of the default route.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// Addresses that no machine has (RFC 5737, RFC 3849): the route to them is the default route.
const NOWHERE: [(IpAddr, IpAddr); 2] = [
    (IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1))),
    (IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1))),
];

/// The source address that the kernel picks for the default route, IPv4 first; `None` without such a route.
pub fn default_route_address() -> Option<IpAddr> {
    preferred_route_address(false)
}

/// The source address that the kernel picks for the default route, of the preferred family first; `None` without such a route.
///
/// Connects a datagram socket and reads its local address; sends nothing (connect(2), ip(7)).
pub fn preferred_route_address(prefers_v6: bool) -> Option<IpAddr> {
    let mut families = NOWHERE;
    if prefers_v6 {
        families.reverse();
    }
    families.into_iter().find_map(|(any, nowhere)| {
        let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
        socket.connect(SocketAddr::new(nowhere, 9)).ok()?;
        let address = socket.local_addr().ok()?.ip();
        (!address.is_unspecified() && !address.is_loopback()).then_some(address)
    })
}

/// Whether an interface of this network namespace has the address. Any other address cannot be bound (bind(2),
/// EADDRNOTAVAIL), unless the kernel allows it (`net.ipv4.ip_nonlocal_bind`).
pub fn is_local_address(ip: &IpAddr) -> bool {
    UdpSocket::bind(SocketAddr::new(*ip, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_local_where_an_interface_has_it() {
        assert!(is_local_address(&IpAddr::V4(Ipv4Addr::LOCALHOST)));
        // Of a network for documents (RFC 5737).
        assert!(!is_local_address(&IpAddr::V4(Ipv4Addr::new(198, 51, 100, 7))));
        let own = default_route_address();
        assert!(own.is_none_or(|own| is_local_address(&own)), "{own:?}");
    }
}
