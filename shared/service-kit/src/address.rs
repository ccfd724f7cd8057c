//! The address of the interface that the default route leaves by.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// Addresses that no machine has (RFC 5737, RFC 3849): the route to them is the default route.
const NOWHERE: [(IpAddr, IpAddr); 2] = [
    (IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1))),
    (IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1))),
];

/// The source address that the kernel picks for the default route, IPv4 first; `None` without such a route.
///
/// A datagram socket is connected and asked for its own name; nothing is sent (connect(2), ip(7)).
pub fn default_route_address() -> Option<IpAddr> {
    NOWHERE.into_iter().find_map(|(any, nowhere)| {
        let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
        socket.connect(SocketAddr::new(nowhere, 9)).ok()?;
        let address = socket.local_addr().ok()?.ip();
        (!address.is_unspecified() && !address.is_loopback()).then_some(address)
    })
}
