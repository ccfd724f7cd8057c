//! Host ports.

use keelson_kube_model::{Container, ContainerPort, Pod};

use super::long_running;

/// A host port.
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
        // On the host network each port is a host port.
        let number = port.host_port.filter(|n| *n != 0).or(host_network.then_some(port.container_port));
        let protocol = if port.protocol.is_empty() { "TCP" } else { &port.protocol };
        number.filter(|n| *n > 0).map(|number| HostPort { address: &port.host_ip, protocol, port: number })
    })
}

/// The host ports that a pod uses, each with its `hostPort`.
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

/// A placeholder for a pod of which only the host ports are still known.
pub fn placeholder_pod(ports: Vec<ContainerPort>) -> Pod {
    let mut pod = Pod::default();
    pod.spec.containers = vec![Container { ports, ..Container::default() }];
    pod
}

/// Whether one of the others uses a host port of the pod.
pub(super) fn conflict<'a>(pod: &Pod, others: impl Iterator<Item = &'a Pod>) -> bool {
    let requested: Vec<HostPort<'_>> = of(pod).collect();
    if requested.is_empty() {
        return false;
    }
    others.flat_map(of).any(|held| requested.iter().any(|port| port.clashes(&held)))
}
