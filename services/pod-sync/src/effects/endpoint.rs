//! Where the handlers of probes and hooks connect to.

use keelson_config::Config;
use keelson_kube_model::{Container, HttpGetAction, IntOrString, Pod};

use crate::node::{NodeState, has_cluster};
use crate::state::pod_state::PodState;

/// The address that probes and hooks of a pod connect to: its own, or for a pod on the host network that of the node in its cluster, and
/// loopback without one.
pub fn pod_address(node: &NodeState, config: &Config, state: &PodState, pod: &Pod) -> String {
    let observed = &state.runtime.observed;
    if let Some(own) = observed.pod_ips().into_iter().next() {
        return own;
    }
    let of_node = || node.addresses().into_iter().next().filter(|_| has_cluster(config));
    match (pod.is_host_network(), state.published.status.pod_ip.as_str()) {
        (true, "") => of_node().unwrap_or_else(|| "127.0.0.1".to_owned()),
        (true, known) => known.to_owned(),
        (false, _) => String::new(),
    }
}

/// Whether the handler asks for TLS.
pub fn is_https(action: &HttpGetAction) -> bool {
    action.scheme.eq_ignore_ascii_case("https")
}

/// The text for a pod without an address.
pub fn no_address() -> String {
    "the pod has no address yet".to_owned()
}

/// Host and port of a handler: its own host, else the address of the pod.
///
/// # Errors
/// The host or the port is missing; the text names it.
pub fn endpoint<'a>(
    host: &'a str,
    address: &'a str,
    port: &IntOrString,
    container: &Container,
) -> Result<(&'a str, u16), String> {
    let host = if host.is_empty() { address } else { host };
    if host.is_empty() {
        return Err(no_address());
    }
    let number = match port {
        IntOrString::Int(number) => Some(*number),
        IntOrString::Str(name) => {
            let named = container.ports.iter().find(|p| p.name == *name).map(|p| p.container_port);
            named.or_else(|| name.parse().ok())
        }
    };
    let number = number.and_then(|n| u16::try_from(n).ok()).filter(|n| *n > 0);
    number
        .map(|port| (host, port))
        .ok_or_else(|| format!("the container {} has no port {:?}", container.name, port.to_string()))
}
