//! Ports of the node that pods ask for.

use keelson_kube_model::{Container, ContainerPort, Pod};

use super::long_running;

/// A port of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HostPort<'a> {
    address: &'a str,
    protocol: &'a str,
    port: i32,
}

impl HostPort<'_> {
    fn every_address(&self) -> bool {
        matches!(self.address, "" | "0.0.0.0" | "::")
    }

    fn clashes(&self, other: &Self) -> bool {
        self.port == other.port
            && self.protocol == other.protocol
            && (self.every_address() || other.every_address() || self.address == other.address)
    }
}

fn of(pod: &Pod) -> impl Iterator<Item = HostPort<'_>> {
    let host_network = pod.is_host_network();
    long_running(pod).flat_map(|container| &container.ports).filter_map(move |port| {
        // On the node's network each port is one of the node's.
        let number = port.host_port.filter(|n| *n != 0).or(host_network.then_some(port.container_port));
        let protocol = if port.protocol.is_empty() { "TCP" } else { &port.protocol };
        number.filter(|n| *n > 0).map(|number| HostPort { address: &port.host_ip, protocol, port: number })
    })
}

/// The ports of the node that a pod holds, each with its `hostPort`.
pub fn held_ports(pod: &Pod) -> Vec<ContainerPort> {
    let one = |held: HostPort<'_>| ContainerPort {
        container_port: held.port,
        host_port: Some(held.port),
        protocol: held.protocol.to_owned(),
        host_ip: held.address.to_owned(),
        ..ContainerPort::default()
    };
    of(pod).map(one).collect()
}

/// A pod of which nothing is known any more but the ports of the node that it holds.
pub fn holder_of(ports: Vec<ContainerPort>) -> Pod {
    let mut pod = Pod::default();
    pod.spec.containers = vec![Container { ports, ..Container::default() }];
    pod
}

/// Whether a port of the pod is held by one of the others.
pub(super) fn conflict<'a>(pod: &Pod, others: impl Iterator<Item = &'a Pod>) -> bool {
    let wanted: Vec<HostPort<'_>> = of(pod).collect();
    if wanted.is_empty() {
        return false;
    }
    others.flat_map(of).any(|held| wanted.iter().any(|port| port.clashes(&held)))
}
