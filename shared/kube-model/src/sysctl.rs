//! Names of kernel parameters (sysctls) in pods and in the configuration.

/// The namespace that a kernel parameter belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SysctlNamespace {
    /// System V IPC and POSIX message queues.
    Ipc,
    /// Network.
    Net,
}

/// The name with dots between its parts. It may be written with slashes too, and then a dot is part of a name:
/// `net/ipv4/conf/eth0.1` means `net.ipv4.conf.eth0/1` (sysctl.d(5)).
pub fn dotted(name: &str) -> String {
    let slashes = name.find(['.', '/']).is_some_and(|at| name.as_bytes()[at] == b'/');
    if !slashes {
        return name.to_owned();
    }
    let swap = |c| match c {
        '/' => '.',
        '.' => '/',
        other => other,
    };
    name.chars().map(swap).collect()
}

/// The namespace of a parameter; `None` when it is global or unknown.
pub fn namespace_of(name: &str) -> Option<SysctlNamespace> {
    let ipc = ["kernel.shm", "kernel.msg", "fs.mqueue."];
    if name == "kernel.sem" || ipc.iter().any(|prefix| name.starts_with(prefix)) {
        return Some(SysctlNamespace::Ipc);
    }
    name.starts_with("net.").then_some(SysctlNamespace::Net)
}

/// Whether a name, or a prefix with a trailing `*`, can be allowed for pods (`allowedUnsafeSysctls`): everything it matches
/// belongs to a namespace of the pod.
pub fn is_namespaced(pattern: &str) -> bool {
    namespace_of(&dotted(pattern.strip_suffix('*').unwrap_or(pattern))).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sysctl_names_accept_dots_or_slashes_as_separators() {
        for (written, name) in [
            ("kernel.msgmax", "kernel.msgmax"),
            ("kernel/msgmax", "kernel.msgmax"),
            ("net/ipv4/conf/eth0.1/forwarding", "net.ipv4.conf.eth0/1.forwarding"),
            ("net.ipv4.conf.eth0/1.forwarding", "net.ipv4.conf.eth0/1.forwarding"),
            ("plain", "plain"),
        ] {
            assert_eq!(dotted(written), name);
        }
    }

    #[test]
    fn only_namespaced_sysctls_can_be_allowed() {
        for (pattern, good) in [
            ("net.core.somaxconn", true),
            ("net.*", true),
            ("kernel.shm*", true),
            ("kernel/msgmax", true),
            ("fs.mqueue.*", true),
            ("kernel.sem", true),
            ("kernel.sema", false),
            ("kernel.*", false),
            ("*", false),
            ("vm.swappiness", false),
        ] {
            assert_eq!(is_namespaced(pattern), good, "{pattern}");
        }
    }
}
