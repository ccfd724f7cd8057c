//! Converts the core's plans to CRI messages and the host's resolv.conf to the core's type.

use std::fs;

use k8s_cri::v1 as cri;
use keelson_kube_model::SeLinuxOptions;
use keelson_pod_sync_core::config::{
    ContainerSecurity, ContainerSpec, DnsSpec, LinuxResources, MountSpec, NamespaceMode, Namespaces,
    PortMapping, Propagation, Protocol, ResolvConf, SandboxSecurity, SandboxSpec, SecurityProfile,
    UserNamespace,
};

use crate::effects::create_container::ContainerRequest;

/// The node's resolv.conf; an empty path or an unreadable file gives an empty one, with a warning.
pub fn read_resolv_conf(path: &str) -> ResolvConf {
    if path.is_empty() {
        return ResolvConf::default();
    }
    let parsed =
        fs::read_to_string(path).map_err(|e| e.to_string()).and_then(|text| ResolvConf::parse(&text));
    parsed.unwrap_or_else(|error| {
        tracing::warn!(
            path,
            error,
            "cannot read the node's resolv.conf (resolvConf); pods get no DNS from it"
        );
        ResolvConf::default()
    })
}

/// The CRI message for a sandbox.
pub fn sandbox_config(spec: SandboxSpec) -> cri::PodSandboxConfig {
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: spec.name,
            uid: spec.uid,
            namespace: spec.namespace,
            attempt: spec.attempt,
        }),
        hostname: spec.hostname,
        log_directory: spec.log_directory,
        dns_config: Some(dns(spec.dns)),
        port_mappings: spec.port_mappings.into_iter().map(port).collect(),
        labels: spec.labels.into_iter().collect(),
        annotations: spec.annotations.into_iter().collect(),
        linux: Some(cri::LinuxPodSandboxConfig {
            cgroup_parent: spec.cgroup_parent,
            security_context: Some(sandbox_security(spec.security)),
            sysctls: spec.sysctls.into_iter().collect(),
            overhead: spec.overhead.map(resources),
            resources: Some(resources(spec.resources)),
        }),
        ..cri::PodSandboxConfig::default()
    }
}

/// The CRI message for a container.
pub fn container_request(spec: ContainerSpec) -> ContainerRequest {
    let sub_paths = spec.mounts.iter().map(|mount| mount.image_sub_path.clone()).enumerate();
    let image_sub_paths = sub_paths.filter(|(_, path)| !path.is_empty()).collect();
    ContainerRequest { config: container_config(spec), image_sub_paths }
}

fn container_config(spec: ContainerSpec) -> cri::ContainerConfig {
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: spec.name, attempt: spec.attempt }),
        image: Some(cri::ImageSpec {
            image: spec.image_ref,
            user_specified_image: spec.user_specified_image,
            ..cri::ImageSpec::default()
        }),
        command: spec.command,
        args: spec.args,
        working_dir: spec.working_dir,
        envs: spec.envs.into_iter().map(|(key, value)| cri::KeyValue { key, value }).collect(),
        mounts: spec.mounts.into_iter().map(mount).collect(),
        devices: spec
            .devices
            .into_iter()
            .map(|d| cri::Device {
                container_path: d.container_path,
                host_path: d.host_path,
                permissions: d.permissions,
            })
            .collect(),
        labels: spec.labels.into_iter().collect(),
        annotations: spec.annotations.into_iter().collect(),
        log_path: spec.log_path,
        stdin: spec.stdin,
        stdin_once: spec.stdin_once,
        tty: spec.tty,
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(resources(spec.resources)),
            security_context: Some(container_security(spec.security)),
        }),
        cdi_devices: spec.cdi_devices.into_iter().map(|name| cri::CdiDevice { name }).collect(),
        ..cri::ContainerConfig::default()
    }
}

fn dns(spec: DnsSpec) -> cri::DnsConfig {
    cri::DnsConfig { servers: spec.servers, searches: spec.searches, options: spec.options }
}

fn port(port: PortMapping) -> cri::PortMapping {
    let protocol = match port.protocol {
        Protocol::Tcp => cri::Protocol::Tcp,
        Protocol::Udp => cri::Protocol::Udp,
        Protocol::Sctp => cri::Protocol::Sctp,
    };
    cri::PortMapping {
        protocol: protocol as i32,
        container_port: port.container_port,
        host_port: port.host_port,
        host_ip: port.host_ip,
    }
}

/// The resources of a container or sandbox.
pub fn resources(spec: LinuxResources) -> cri::LinuxContainerResources {
    cri::LinuxContainerResources {
        cpu_period: spec.cpu_period,
        cpu_quota: spec.cpu_quota,
        cpu_shares: spec.cpu_shares,
        memory_limit_in_bytes: spec.memory_limit_in_bytes,
        oom_score_adj: spec.oom_score_adj,
        cpuset_cpus: spec.cpuset_cpus,
        cpuset_mems: spec.cpuset_mems,
        hugepage_limits: spec
            .hugepage_limits
            .into_iter()
            .map(|(page_size, limit)| cri::HugepageLimit { page_size, limit })
            .collect(),
        unified: spec.unified.into_iter().collect(),
        memory_swap_limit_in_bytes: spec.memory_swap_limit_in_bytes,
    }
}

fn mount(spec: MountSpec) -> cri::Mount {
    let propagation = match spec.propagation {
        Propagation::Private => cri::MountPropagation::PropagationPrivate,
        Propagation::HostToContainer => cri::MountPropagation::PropagationHostToContainer,
        Propagation::Bidirectional => cri::MountPropagation::PropagationBidirectional,
    };
    let ids = spec.users.map(id_mappings).unwrap_or_default();
    cri::Mount {
        container_path: spec.container_path,
        host_path: spec.host_path,
        readonly: spec.readonly,
        selinux_relabel: spec.selinux_relabel,
        propagation: propagation as i32,
        uid_mappings: ids.clone(),
        gid_mappings: ids,
        recursive_read_only: spec.recursive_read_only,
        image: spec.image.map(|image| cri::ImageSpec {
            image: image.reference,
            annotations: image.annotations.into_iter().collect(),
            user_specified_image: image.user_specified_image,
            runtime_handler: image.runtime_handler,
        }),
    }
}

fn id_mappings(users: UserNamespace) -> Vec<cri::IdMapping> {
    vec![cri::IdMapping { host_id: users.host_id, container_id: 0, length: users.length }]
}

fn namespaces(spec: Namespaces) -> cri::NamespaceOption {
    let mode = |mode| match mode {
        NamespaceMode::Pod => cri::NamespaceMode::Pod as i32,
        NamespaceMode::Container => cri::NamespaceMode::Container as i32,
        NamespaceMode::Node => cri::NamespaceMode::Node as i32,
        NamespaceMode::Target => cri::NamespaceMode::Target as i32,
    };
    let users = match spec.users {
        Some(users) => cri::UserNamespace {
            mode: cri::NamespaceMode::Pod as i32,
            uids: id_mappings(users),
            gids: id_mappings(users),
        },
        None => cri::UserNamespace { mode: cri::NamespaceMode::Node as i32, ..cri::UserNamespace::default() },
    };
    cri::NamespaceOption {
        network: mode(spec.network),
        pid: mode(spec.pid),
        ipc: mode(spec.ipc),
        target_id: spec.target_id,
        userns_options: Some(users),
    }
}

fn selinux(options: SeLinuxOptions) -> cri::SeLinuxOption {
    cri::SeLinuxOption { user: options.user, role: options.role, r#type: options.type_, level: options.level }
}

fn profile(profile: &SecurityProfile) -> cri::SecurityProfile {
    use cri::security_profile::ProfileType;
    let (kind, localhost_ref) = match profile {
        SecurityProfile::RuntimeDefault => (ProfileType::RuntimeDefault, String::new()),
        SecurityProfile::Unconfined => (ProfileType::Unconfined, String::new()),
        SecurityProfile::Localhost(path) => (ProfileType::Localhost, path.clone()),
    };
    cri::SecurityProfile { profile_type: kind as i32, localhost_ref }
}

fn groups_policy(strict: bool) -> i32 {
    if strict {
        cri::SupplementalGroupsPolicy::Strict as i32
    } else {
        cri::SupplementalGroupsPolicy::Merge as i32
    }
}

fn int64(value: Option<i64>) -> Option<cri::Int64Value> {
    value.map(|value| cri::Int64Value { value })
}

fn sandbox_security(spec: SandboxSecurity) -> cri::LinuxSandboxSecurityContext {
    cri::LinuxSandboxSecurityContext {
        namespace_options: Some(namespaces(spec.namespaces)),
        selinux_options: spec.selinux.map(selinux),
        run_as_user: int64(spec.run_as_user),
        run_as_group: int64(spec.run_as_group),
        supplemental_groups: spec.supplemental_groups,
        supplemental_groups_policy: groups_policy(spec.strict_groups),
        privileged: spec.privileged,
        // The sandbox's own process is always confined (runtime-and-resources.md §2.5).
        seccomp: Some(profile(&SecurityProfile::RuntimeDefault)),
        ..cri::LinuxSandboxSecurityContext::default()
    }
}

#[allow(deprecated)] // Older runtimes read only the text form of the AppArmor profile.
fn container_security(spec: ContainerSecurity) -> cri::LinuxContainerSecurityContext {
    cri::LinuxContainerSecurityContext {
        capabilities: Some(cri::Capability {
            add_capabilities: spec.capabilities_add,
            drop_capabilities: spec.capabilities_drop,
            ..cri::Capability::default()
        }),
        privileged: spec.privileged,
        namespace_options: Some(namespaces(spec.namespaces)),
        selinux_options: spec.selinux.map(selinux),
        run_as_user: int64(spec.run_as_user),
        run_as_group: int64(spec.run_as_group),
        run_as_username: spec.run_as_username,
        readonly_rootfs: spec.readonly_rootfs,
        supplemental_groups: spec.supplemental_groups,
        supplemental_groups_policy: groups_policy(spec.strict_groups),
        apparmor: spec.apparmor.as_ref().map(profile),
        apparmor_profile: spec.apparmor.as_ref().map(SecurityProfile::apparmor_text).unwrap_or_default(),
        no_new_privs: spec.no_new_privs,
        masked_paths: spec.masked_paths,
        readonly_paths: spec.readonly_paths,
        seccomp: Some(profile(&spec.seccomp)),
        ..cri::LinuxContainerSecurityContext::default()
    }
}

#[cfg(test)]
mod tests {
    use keelson_pod_sync_core::config::ImageMount;

    use super::*;

    #[test]
    fn a_mount_of_an_image_has_its_subpath_by_its_index() {
        let image = ImageMount {
            reference: "sha256:1".into(),
            user_specified_image: "data:1".into(),
            runtime_handler: "kata".into(),
            annotations: [("a".to_owned(), "b".to_owned())].into(),
        };
        let of_image = |path: &str| MountSpec {
            image: Some(image.clone()),
            image_sub_path: path.into(),
            readonly: true,
            ..MountSpec::default()
        };
        let of_host = MountSpec { host_path: "/volumes/data".into(), ..MountSpec::default() };
        let spec =
            ContainerSpec { mounts: vec![of_host, of_image("d"), of_image("")], ..ContainerSpec::default() };
        let request = container_request(spec);
        assert_eq!(request.image_sub_paths, [(1, "d".to_owned())].into());
        assert_eq!(request.image_mounts(), 2);
        let mount = &request.config.mounts[1];
        let expected = cri::ImageSpec {
            image: "sha256:1".into(),
            annotations: [("a".to_owned(), "b".to_owned())].into(),
            user_specified_image: "data:1".into(),
            runtime_handler: "kata".into(),
        };
        assert_eq!(mount.image, Some(expected));
        assert!(mount.readonly && mount.host_path.is_empty());
        assert_eq!(request.config.mounts[0].image, None);
    }
}
