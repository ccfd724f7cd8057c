//! What each service may still do after init has started it (capabilities(7)).
//!
//! A service keeps exactly the capabilities of its row: they are its bounding set, and for a service that
//! does not run as root also its ambient set. `no_new_privs` is set for all.

use keelson_config::ServiceName;

/// A capability, with its number in the kernel's interface (linux/capability.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Capability {
    /// Change owners of files.
    Chown = 0,
    /// Pass every permission check of files.
    DacOverride = 1,
    /// Read every file and enter every folder.
    DacReadSearch = 2,
    /// Change modes and times of other users' files.
    Fowner = 3,
    /// Keep set-group-id bits over a change of mode or owner.
    Fsetid = 4,
    /// Signal other users' processes.
    Kill = 5,
    /// Networks, packet filters.
    NetAdmin = 12,
    /// Raw sockets.
    NetRaw = 13,
    /// Read other users' /proc entries.
    SysPtrace = 19,
    /// Mount and much else.
    SysAdmin = 21,
    /// Lower oom scores, raise limits, set quotas.
    SysResource = 24,
    /// Make device nodes.
    Mknod = 27,
    /// Read the kernel's log.
    Syslog = 34,
}

impl Capability {
    /// Its bit in a set of 64.
    pub const fn bit(self) -> u64 {
        1 << self as u8
    }

    /// Its name as capabilities(7) spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Chown => "CAP_CHOWN",
            Self::DacOverride => "CAP_DAC_OVERRIDE",
            Self::DacReadSearch => "CAP_DAC_READ_SEARCH",
            Self::Fowner => "CAP_FOWNER",
            Self::Fsetid => "CAP_FSETID",
            Self::Kill => "CAP_KILL",
            Self::NetAdmin => "CAP_NET_ADMIN",
            Self::NetRaw => "CAP_NET_RAW",
            Self::SysPtrace => "CAP_SYS_PTRACE",
            Self::SysAdmin => "CAP_SYS_ADMIN",
            Self::SysResource => "CAP_SYS_RESOURCE",
            Self::Mknod => "CAP_MKNOD",
            Self::Syslog => "CAP_SYSLOG",
        }
    }
}

use Capability::{
    Chown, DacOverride, DacReadSearch, Fowner, Fsetid, Kill, Mknod, NetAdmin, NetRaw, SysAdmin, SysPtrace,
    SysResource, Syslog,
};

/// pod-config reads manifests in folders of root; nothing else.
const POD_CONFIG: &[Capability] = &[DacReadSearch];

/// runtime-shim writes etc-hosts, termination files, log folders and links whose owners are users of pods,
/// connects to the runtime's socket, and removes what dead containers left. It signals nothing but its own
/// credential plugins, which run as its user and keep the same, and mounts nothing: the runtime does.
const RUNTIME_SHIM: &[Capability] = &[Chown, DacOverride, DacReadSearch, Fowner, Fsetid];

/// volume-manager gives files to a pod's fsGroup (chown, fowner, fsetid keeps the set-group-id bit of its
/// folders), reaches volumes of any owner, mounts (sys_admin), makes block device nodes (mknod) and sets
/// quotas (sys_resource).
const VOLUME_MANAGER: &[Capability] =
    &[Chown, DacOverride, DacReadSearch, Fowner, Fsetid, SysAdmin, SysResource, Mknod];

/// resource-manager writes cgroups that user namespaces own (chown, dac_*), ends what is left in a pod's
/// cgroup (kill), reads pods' processes in /proc (sys_ptrace), lowers oom scores (sys_resource), keeps the
/// iptables hint chains (net_admin; the legacy programs reach the tables by a raw socket, net_raw) and reads oom
/// reports from /dev/kmsg (syslog). It mounts nothing.
const RESOURCE_MANAGER: &[Capability] =
    &[Chown, DacOverride, DacReadSearch, Fowner, Kill, SysPtrace, SysResource, NetAdmin, NetRaw, Syslog];

/// The capabilities that `service` keeps, as far as the machine has them.
pub const fn kept(service: ServiceName) -> &'static [Capability] {
    match service {
        ServiceName::PodConfig => POD_CONFIG,
        ServiceName::RuntimeShim => RUNTIME_SHIM,
        ServiceName::VolumeManager => VOLUME_MANAGER,
        ServiceName::ResourceManager => RESOURCE_MANAGER,
        // They talk to their neighbours and the network on unprivileged ports, and own their state folders.
        // init is not started by init.
        ServiceName::PodSync | ServiceName::NodeStatus | ServiceName::NodeApi | ServiceName::Init => &[],
    }
}

/// The same as a set of bits.
pub fn kept_bits(service: ServiceName) -> u64 {
    kept(service).iter().fold(0, |set, capability| set | capability.bit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_capabilities_is_what_the_readme_promises() {
        let names = |service| kept(service).iter().map(|c| c.name()).collect::<Vec<_>>().join(" ");
        let rows = [
            (ServiceName::PodConfig, "CAP_DAC_READ_SEARCH"),
            (ServiceName::PodSync, ""),
            (ServiceName::NodeStatus, ""),
            (ServiceName::NodeApi, ""),
            (
                ServiceName::RuntimeShim,
                "CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER CAP_FSETID",
            ),
            (
                ServiceName::VolumeManager,
                "CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER CAP_FSETID CAP_SYS_ADMIN \
                 CAP_SYS_RESOURCE CAP_MKNOD",
            ),
            (
                ServiceName::ResourceManager,
                "CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER CAP_KILL CAP_SYS_PTRACE \
                 CAP_SYS_RESOURCE CAP_NET_ADMIN CAP_NET_RAW CAP_SYSLOG",
            ),
        ];
        for (service, expected) in rows {
            assert_eq!(names(service), expected, "{service}");
        }
        assert_eq!(rows.len(), ServiceName::supervised().count());
    }

    #[test]
    fn the_units_of_systemd_keep_the_same() {
        let units = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../deploy/systemd");
        for service in ServiceName::supervised() {
            let unit = std::fs::read_to_string(units.join(format!("keelson-{service}.service"))).unwrap();
            let set = |key: &str| {
                let line = unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
                line.map(|names| names.split_whitespace().collect::<Vec<_>>())
            };
            let names: Vec<&str> = kept(service).iter().map(|capability| capability.name()).collect();
            assert_eq!(set("CapabilityBoundingSet"), Some(names.clone()), "{service}");
            let user = (!service.needs_root()).then(|| format!("keelson-{service}"));
            assert_eq!(set("User"), user.as_deref().map(|user| vec![user]), "{service}");
            // Root has them by itself, another user as ambient ones.
            let ambient = (!service.needs_root() && !names.is_empty()).then_some(names);
            assert_eq!(set("AmbientCapabilities"), ambient, "{service}");
            assert_eq!(set("NoNewPrivileges"), Some(vec!["yes"]), "{service}");
        }
    }

    #[test]
    fn only_volume_manager_may_mount() {
        for service in ServiceName::supervised() {
            let may = kept_bits(service) & SysAdmin.bit() != 0;
            assert_eq!(may, service == ServiceName::VolumeManager, "{service}");
        }
    }

    #[test]
    fn a_service_without_root_keeps_nothing_that_changes_the_machine() {
        for service in ServiceName::supervised().filter(|s| !s.needs_root()) {
            assert_eq!(kept_bits(service) & !DacReadSearch.bit(), 0, "{service}");
        }
    }
}
