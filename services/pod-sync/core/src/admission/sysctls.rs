//! Which kernel parameters a pod may set.

use keelson_kube_model::Pod;
use keelson_kube_model::sysctl::{SysctlNamespace as Namespace, dotted, namespace_of};

use super::{Denial, NodeFacts};

/// Major and minor number of a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelVersion(pub u32, pub u32);

impl KernelVersion {
    /// Parses the release of uname(2), such as `6.1.0-18-amd64`.
    pub fn parse(release: &str) -> Self {
        let number = |text: Option<&str>| {
            let digits =
                text.unwrap_or_default().chars().take_while(char::is_ascii_digit).collect::<String>();
            digits.parse().unwrap_or(0)
        };
        let mut parts = release.split('.');
        Self(number(parts.next()), number(parts.next()))
    }
}

/// The safe sysctls, which do not affect anything outside of the pod, with the kernel version they are safe from.
const SAFE: [(&str, KernelVersion); 12] = [
    ("kernel.shm_rmid_forced", KernelVersion(0, 0)),
    ("net.ipv4.ip_local_port_range", KernelVersion(0, 0)),
    ("net.ipv4.tcp_syncookies", KernelVersion(0, 0)),
    ("net.ipv4.ping_group_range", KernelVersion(0, 0)),
    ("net.ipv4.ip_unprivileged_port_start", KernelVersion(0, 0)),
    ("net.ipv4.ip_local_reserved_ports", KernelVersion(3, 16)),
    ("net.ipv4.tcp_keepalive_time", KernelVersion(4, 5)),
    ("net.ipv4.tcp_keepalive_intvl", KernelVersion(4, 5)),
    ("net.ipv4.tcp_keepalive_probes", KernelVersion(4, 5)),
    ("net.ipv4.tcp_fin_timeout", KernelVersion(4, 6)),
    ("net.ipv4.tcp_rmem", KernelVersion(4, 15)),
    ("net.ipv4.tcp_wmem", KernelVersion(4, 15)),
];

fn allowed(name: &str, facts: &NodeFacts<'_>) -> bool {
    let safe = SAFE.iter().any(|(safe, since)| *safe == name && facts.kernel >= *since);
    safe || facts.unsafe_sysctls.iter().any(|pattern| {
        let pattern = dotted(pattern);
        match pattern.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => name == pattern,
        }
    })
}

pub(super) fn check(pod: &Pod, facts: &NodeFacts<'_>) -> Option<Denial> {
    let context = pod.spec.security_context.as_ref()?;
    context.sysctls.iter().find_map(|sysctl| {
        let name = dotted(&sysctl.name);
        let hosts = match namespace_of(&name) {
            Some(Namespace::Ipc) if pod.spec.host_ipc == Some(true) => Some("ipc"),
            Some(Namespace::Net) if pod.is_host_network() => Some("net"),
            _ => None,
        };
        let why = match hosts {
            _ if !allowed(&name, facts) => "not allowlisted".to_owned(),
            Some(namespace) => format!("not allowed with host {namespace} enabled"),
            None => return None,
        };
        Some(Denial::new("SysctlForbidden", format!("forbidden sysctl: \"{}\" {why}", sysctl.name)))
    })
}
