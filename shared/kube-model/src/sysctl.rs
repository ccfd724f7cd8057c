//! Names of kernel parameters, as pods and the configuration write them.

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

/// The namespace of a parameter; `None` for one that is the machine's, or that nobody knows.
pub fn namespace_of(name: &str) -> Option<SysctlNamespace> {
    let ipc = ["kernel.shm", "kernel.msg", "fs.mqueue."];
    if name == "kernel.sem" || ipc.iter().any(|prefix| name.starts_with(prefix)) {
        return Some(SysctlNamespace::Ipc);
    }
    name.starts_with("net.").then_some(SysctlNamespace::Net)
}

/// Whether a name, or a beginning of names with a trailing `*`, can be allowed to pods (`allowedUnsafeSysctls`): all
/// that it means belongs to a namespace that a pod has of its own.
pub fn is_namespaced(pattern: &str) -> bool {
    namespace_of(&dotted(pattern.strip_suffix('*').unwrap_or(pattern))).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slashes_and_dots_mean_the_same_and_in_a_name_with_slashes_a_dot_is_part_of_it() {
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
    fn only_what_belongs_to_a_namespace_can_be_allowed() {
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
