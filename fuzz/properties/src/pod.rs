//! Pods as somebody may write them, field by field: what validation lets through can be asked of a container runtime.
//!
//! The bytes are choices: each takes one value of a short list for one field, and the first of each list, which is what a byte
//! of 0 and the end of the bytes stand for, is a good one or none at all.

mod choices;

use std::collections::BTreeMap;

use keelson_kube_model::{Container, ContainerKind, Pod, ResourceList};
use keelson_pod_config_core::parse_file;
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_sync_core::config::{
    AssignedResources, CgroupVersion, ConfigError, ContainerInputs, ContainerSpec, DnsInputs, EnvSources,
    FileLookup, ImageUser, MachineInputs, NodeInputs, ObjectLookup, PodInputs, ResolvConf, ResolvedImage,
    RuntimeFeatures, SandboxInputs, SandboxSpec, SecuritySettings, UserNamespace, VolumeInputs, VolumePath,
    container_plan, environment, sandbox_plan, subpaths,
};
use keelson_pod_sync_core::runtime_version::ImageVolumeSupport;

use crate::Met;
use crate::pod::choices::Choices;

/// Where the manifest is said to be.
const PATH: &str = "/manifests/fuzz.json";
/// The largest id that a validated pod may name.
const MAX_ID: i64 = i32::MAX as i64;
/// The longest name of a host that the kernel takes.
const MAX_HOST_NAME: usize = 64;

/// Makes a pod of the choices in `bytes`, has it validated, and asks for everything that a good one needs.
///
/// # Panics
/// A pod that was validated cannot be asked for because of what is written in it.
pub fn check(bytes: &[u8]) -> Met {
    let manifest = choices::pod(&mut Choices::new(bytes)).to_string();
    match parse_file(manifest.as_bytes(), PATH, &StaticRules::standalone("node")) {
        Ok(content) => {
            for pod in &content.pods {
                let typed = serde_json::from_slice(&pod.json).expect("a validated pod is a Pod");
                can_be_asked_for(&typed);
            }
            Met::Good
        }
        Err(errors) => {
            assert!(!errors.is_empty(), "refused for nothing: {manifest}");
            for error in errors {
                assert!(!error.field.is_empty() && !error.message.is_empty(), "{error:?} of {manifest}");
            }
            Met::Refused
        }
    }
}

/// The addresses of the node.
const NODE_IPS: [&str; 1] = ["192.168.0.1"];

/// Whether all that a validated pod asks of a runtime is well formed.
///
/// # Panics
/// It is not.
pub(crate) fn can_be_asked_for(pod: &Pod) {
    let resolv_conf = ResolvConf::parse("nameserver 10.0.0.2\nsearch example.org\n").expect("it is good");
    let cluster_dns = ["10.96.0.10".to_owned()];
    let node_ips = NODE_IPS.map(str::to_owned);
    let users = Some(UserNamespace { host_id: 65_536, length: 65_536 });
    let sandbox = SandboxInputs {
        cgroup_parent: "/kubepods/podu",
        pod_logs_dir: "/var/log/pods",
        dns: DnsInputs {
            cluster_dns: &cluster_dns,
            cluster_domain: "",
            resolv_conf: Some(&resolv_conf),
            node_ips: &node_ips,
        },
        machine: machine(),
        users,
        ..SandboxInputs::default()
    };
    match sandbox_plan(pod, &sandbox) {
        Ok(spec) => sandbox_is_well_formed(&spec),
        Err(error) => assert!(may_be(&error, pod), "{error} of {pod:?}"),
    }
    for (kind, container) in pod.containers() {
        container_can_be_asked_for(pod, kind, container, users);
    }
}

fn machine() -> MachineInputs<'static> {
    MachineInputs {
        cpu_cfs_quota: true,
        cpu_cfs_period_us: 100_000,
        memory_bytes: 8 << 30,
        cgroup: CgroupVersion::V2,
        swap_accounting: true,
        ..MachineInputs::default()
    }
}

/// Whether the request for one container is well formed.
fn container_can_be_asked_for(
    pod: &Pod,
    kind: ContainerKind,
    container: &Container,
    users: Option<UserNamespace>,
) {
    let node_ips = NODE_IPS.map(str::to_owned);
    let path = |name: &str| VolumePath {
        host_path: format!("/volumes/{name}"),
        read_only: false,
        block_device: false,
    };
    let volumes: BTreeMap<_, _> = pod.spec.volumes.iter().map(|v| (v.name.clone(), path(&v.name))).collect();
    let images = pod.spec.volumes.iter().filter(|volume| volume.image.is_some());
    let images = images.map(|volume| (volume.name.clone(), "sha256:2".to_owned())).collect();
    let mut inputs = ContainerInputs {
        attempt: 0,
        target_id: None,
        image: ResolvedImage { reference: "sha256:1", user: ImageUser { uid: Some(1000), username: "" } },
        pod: PodInputs {
            ips: &["10.0.0.2".to_owned()],
            volume_groups: &[],
            users: users.filter(|_| pod.spec.host_users == Some(false)),
        },
        node: NodeInputs { name: "node", ips: &node_ips, allocatable: &ResourceList::default() },
        env: EnvSources { objects: &EveryObject, files: &EveryObject, services: &BTreeMap::new() },
        volumes: VolumeInputs {
            paths: &volumes,
            subpaths: &BTreeMap::new(),
            images: &images,
            runtime_handler: "",
            files: &[],
        },
        machine: machine(),
        security: SecuritySettings {
            seccomp_default: false,
            seccomp_dir: "/var/lib/kubelet/seccomp",
            masked_paths: &[],
            selinux: true,
        },
        runtime: RuntimeFeatures {
            recursive_read_only: true,
            image_volumes: ImageVolumeSupport::SubPaths,
            ..RuntimeFeatures::default()
        },
        assigned: &AssignedResources::default(),
    };
    let named = format!("{kind:?} {container:?}");
    let envs = match environment(pod, container, &inputs) {
        Ok(envs) => envs,
        Err(error) => return assert!(may_be(&error, pod), "{error} of {named}"),
    };
    let prepared = match subpaths(pod, container, &envs) {
        Ok(prepared) => prepared,
        Err(error) => return assert!(may_be(&error, pod), "{error} of {named}"),
    };
    let prepared =
        prepared.into_iter().map(|sub| (sub.index, format!("/volumes/{}/{}", sub.volume, sub.path)));
    let prepared: BTreeMap<_, _> = prepared.collect();
    inputs.volumes.subpaths = &prepared;
    match container_plan(pod, container, &inputs) {
        Ok(spec) => container_is_well_formed(&spec, container, kind),
        Err(error) => assert!(may_be(&error, pod), "{error} of {named}"),
    }
}

/// Whether an error is about what there is, and not about what is written in the pod.
fn may_be(error: &ConfigError, pod: &Pod) -> bool {
    match error {
        // No API server looks whether the container is there.
        ConfigError::Resource { container, .. } => pod.container(container).is_none(),
        // Only the image says who would run, and only the environment what an expression becomes.
        ConfigError::NonRoot { .. } | ConfigError::SubPath { .. } => true,
        // Only the claim says whether a volume is a block device.
        ConfigError::VolumeDevice { .. } => true,
        ConfigError::FqdnTooLong { .. }
        | ConfigError::ObjectMissing { .. }
        | ConfigError::ObjectUnreadable { .. }
        | ConfigError::KeyMissing { .. }
        | ConfigError::FileKeyMissing { .. }
        | ConfigError::FileUnreadable { .. } => true,
        // Everything that these ask for is there.
        ConfigError::UserNamespaces
        | ConfigError::VolumeMissing { .. }
        | ConfigError::SubPathNotPrepared { .. }
        | ConfigError::RecursiveReadOnly { .. }
        | ConfigError::ImageVolume { .. } => false,
        // These are about the form alone.
        ConfigError::HostnameOverride { .. }
        | ConfigError::FieldPath { .. }
        | ConfigError::Divisor { .. }
        | ConfigError::Unsafe { .. } => false,
    }
}

/// Has every object, with every key.
struct EveryObject;

/// The keys that pods name here.
const KEYS: [&str; 3] = ["key", "a.b", "K_1"];

impl ObjectLookup for EveryObject {
    fn config_map(&self, _: &str) -> Result<Option<BTreeMap<String, String>>, String> {
        Ok(Some(KEYS.map(|key| (key.to_owned(), "value".to_owned())).into()))
    }

    fn secret(&self, name: &str) -> Result<Option<BTreeMap<String, String>>, String> {
        self.config_map(name)
    }
}

impl FileLookup for EveryObject {
    fn key(&self, _: &str, _: &str, _: &str) -> Result<Option<String>, String> {
        Ok(Some("value".to_owned()))
    }
}

/// A word that stands in a line of a file, such as resolv.conf or /etc/hosts.
fn is_word(text: &str) -> bool {
    !text.is_empty() && !text.contains(|c: char| c.is_whitespace() || c.is_control())
}

fn sandbox_is_well_formed(spec: &SandboxSpec) {
    let dns = &spec.dns;
    for word in dns.servers.iter().chain(&dns.searches).chain(&dns.options) {
        assert!(is_word(word), "{word:?} in {dns:?}");
    }
    assert!(
        spec.hostname.len() <= MAX_HOST_NAME && (spec.hostname.is_empty() || is_word(&spec.hostname)),
        "{spec:?}"
    );
    for port in &spec.port_mappings {
        assert!(
            (1..=65_535).contains(&port.container_port) && (0..=65_535).contains(&port.host_port),
            "{port:?}"
        );
        assert!(port.host_ip.is_empty() || port.host_ip.parse::<std::net::IpAddr>().is_ok(), "{port:?}");
    }
    for name in spec.sysctls.keys() {
        assert!(is_word(name) && !name.contains('/') && !name.contains(".."), "{name:?}");
    }
    assert!(!spec.log_directory.contains("/../"), "{}", spec.log_directory);
    let security = &spec.security;
    for id in [security.run_as_user, security.run_as_group]
        .into_iter()
        .flatten()
        .chain(security.supplemental_groups.iter().copied())
    {
        assert!((0..=MAX_ID).contains(&id), "{security:?}");
    }
}

fn container_is_well_formed(spec: &ContainerSpec, container: &Container, kind: ContainerKind) {
    assert!(is_word(&spec.name) && !spec.name.contains('/'), "{kind:?} {:?}", spec.name);
    for (name, _) in &spec.envs {
        assert!(!name.is_empty() && !name.contains(['=', '\0']), "{name:?} of {container:?}");
    }
    let mut places = std::collections::BTreeSet::new();
    for mount in &spec.mounts {
        assert!(!mount.container_path.is_empty(), "{mount:?}");
        assert!(places.insert(mount.container_path.clone()), "two mounts at {:?}", mount.container_path);
        assert!(mount.image.is_some() || !mount.host_path.split('/').any(|part| part == ".."), "{mount:?}");
        assert!(!mount.recursive_read_only || mount.readonly, "{mount:?}");
    }
    let limits = &spec.resources;
    assert!(
        limits.cpu_quota >= 0 && limits.memory_limit_in_bytes >= 0 && limits.cpu_shares >= 0,
        "{limits:?}"
    );
    for id in [spec.security.run_as_user, spec.security.run_as_group].into_iter().flatten() {
        assert!((0..=MAX_ID).contains(&id), "{:?}", spec.security);
    }
}
