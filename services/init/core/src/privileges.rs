//! The capabilities of each service after init has started it (capabilities(7)).
//!
//! A service keeps exactly the capabilities of its row: they are its bounding set, and for a service that does not run as
//! root also its ambient set. `no_new_privs` is set for all.

use keelson_config::ServiceName;

/// A capability, with its number in the kernel's interface (linux/capability.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Capability {
    /// Change the owners of files.
    Chown = 0,
    /// Bypass the permission checks of files.
    DacOverride = 1,
    /// Read all files and enter all folders.
    DacReadSearch = 2,
    /// Change modes and times of other users' files.
    Fowner = 3,
    /// Keep set-group-id bits when mode or owner changes.
    Fsetid = 4,
    /// Signal other users' processes.
    Kill = 5,
    /// Configure networks and packet filters.
    NetAdmin = 12,
    /// Use raw sockets.
    NetRaw = 13,
    /// Read other users' /proc entries.
    SysPtrace = 19,
    /// Mount, and much else.
    SysAdmin = 21,
    /// Lower oom scores, raise limits, set quotas.
    SysResource = 24,
    /// Create device nodes.
    Mknod = 27,
    /// Read the kernel log.
    Syslog = 34,
}

impl Capability {
    /// Its bit in a 64-bit set.
    pub const fn bit(self) -> u64 {
        1 << self as u8
    }

    /// Its name in capabilities(7).
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

/// pod-config reads manifests in folders of root, nothing else.
const POD_CONFIG: &[Capability] = &[DacReadSearch];

/// runtime-shim writes etc-hosts, termination files, log folders and links that belong to users of pods, connects to the
/// runtime's socket, and removes the leftovers of dead containers. It signals only its own credential plugins, which run as
/// its user, and mounts nothing, since the runtime does.
const RUNTIME_SHIM: &[Capability] = &[Chown, DacOverride, DacReadSearch, Fowner, Fsetid];

/// volume-manager gives files to a pod's fsGroup (chown, fowner; fsetid keeps the set-group-id bit of its folders), reaches
/// volumes of any owner, mounts (sys_admin), creates block device nodes (mknod) and sets quotas (sys_resource).
const VOLUME_MANAGER: &[Capability] =
    &[Chown, DacOverride, DacReadSearch, Fowner, Fsetid, SysAdmin, SysResource, Mknod];

/// resource-manager writes cgroups that user namespaces own (chown, dac_*), kills processes that are left in a pod's cgroup
/// (kill), reads pods' processes in /proc (sys_ptrace), lowers oom scores (sys_resource), maintains the iptables hint chains
/// (net_admin; the legacy programs use a raw socket, net_raw) and reads oom reports from /dev/kmsg (syslog). It mounts
/// nothing.
const RESOURCE_MANAGER: &[Capability] =
    &[Chown, DacOverride, DacReadSearch, Fowner, Kill, SysPtrace, SysResource, NetAdmin, NetRaw, Syslog];

/// The capabilities that `service` keeps, if the machine has them.
pub const fn capabilities_of(service: ServiceName) -> &'static [Capability] {
    match service {
        ServiceName::PodConfig => POD_CONFIG,
        ServiceName::RuntimeShim => RUNTIME_SHIM,
        ServiceName::VolumeManager => VOLUME_MANAGER,
        ServiceName::ResourceManager => RESOURCE_MANAGER,
        // They use other services' sockets and unprivileged ports, and own their state folders. init does not start itself.
        ServiceName::PodSync | ServiceName::NodeStatus | ServiceName::NodeApi | ServiceName::Init => &[],
    }
}

/// The capabilities that `service` keeps, as a bit set.
pub fn capability_bits(service: ServiceName) -> u64 {
    capabilities_of(service).iter().fold(0, |set, capability| set | capability.bit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_of_each_service_match_the_table() {
        let names = |service| capabilities_of(service).iter().map(|c| c.name()).collect::<Vec<_>>().join(" ");
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
    fn systemd_units_have_the_same_capabilities() {
        let units = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../deploy/systemd");
        for service in ServiceName::supervised() {
            let unit = std::fs::read_to_string(units.join(format!("keelson-{service}.service"))).unwrap();
            let set = |key: &str| {
                let line = unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
                line.map(|names| names.split_whitespace().collect::<Vec<_>>())
            };
            let names: Vec<&str> =
                capabilities_of(service).iter().map(|capability| capability.name()).collect();
            assert_eq!(set("CapabilityBoundingSet"), Some(names.clone()), "{service}");
            let user = (!service.needs_root()).then(|| format!("keelson-{service}"));
            assert_eq!(set("User"), user.as_deref().map(|user| vec![user]), "{service}");
            // Root needs no ambient capabilities; another user does.
            let ambient = (!service.needs_root() && !names.is_empty()).then_some(names);
            assert_eq!(set("AmbientCapabilities"), ambient, "{service}");
            assert_eq!(set("NoNewPrivileges"), Some(vec!["yes"]), "{service}");
        }
    }

    #[test]
    fn only_volume_manager_may_mount() {
        for service in ServiceName::supervised() {
            let may = capability_bits(service) & SysAdmin.bit() != 0;
            assert_eq!(may, service == ServiceName::VolumeManager, "{service}");
        }
    }

    #[test]
    fn non_root_services_keep_no_capability_that_changes_the_machine() {
        for service in ServiceName::supervised().filter(|s| !s.needs_root()) {
            assert_eq!(capability_bits(service) & !DacReadSearch.bit(), 0, "{service}");
        }
    }
}
