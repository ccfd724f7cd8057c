//! Pods that are built field by field: the container runtime requests for a valid pod are well formed.
//!
//! The bytes are choices. Each byte selects the value of one field from a short list. The first value of each list is valid or
//! leaves the field out; a byte of 0 selects it, and so does the end of the bytes.

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

use crate::Outcome;
use crate::pod::choices::Choices;

/// The path of the manifest in errors.
const PATH: &str = "/manifests/fuzz.json";
/// The largest user or group id in a valid pod.
const MAX_ID: i64 = i32::MAX as i64;
/// The length of the longest host name that the kernel accepts.
const MAX_HOST_NAME: usize = 64;

/// Builds a pod from the choices in `bytes` and validates it. For a valid pod, builds and checks all requests to a container
/// runtime.
///
/// # Panics
/// The requests for a valid pod fail because of a value in the pod, or are not well formed, or an error has no field.
pub fn check(bytes: &[u8]) -> Outcome {
    let manifest = choices::pod(&mut Choices::new(bytes)).to_string();
    match parse_file(manifest.as_bytes(), PATH, &StaticRules::standalone("node")) {
        Ok(content) => {
            for pod in &content.pods {
                let typed = serde_json::from_slice(&pod.json).expect("a validated pod is a Pod");
                assert_requests_are_well_formed(&typed);
            }
            Outcome::Accepted
        }
        Err(errors) => {
            assert!(!errors.is_empty(), "rejected without an error: {manifest}");
            for error in errors {
                assert!(!error.field.is_empty() && !error.message.is_empty(), "{error:?} of {manifest}");
            }
            Outcome::Rejected
        }
    }
}

/// The addresses of the node.
const NODE_IPS: [&str; 1] = ["192.168.0.1"];

/// Asserts that all requests to a container runtime for a valid pod are well formed.
///
/// # Panics
/// One is not.
pub(crate) fn assert_requests_are_well_formed(pod: &Pod) {
    let resolv_conf = ResolvConf::parse("nameserver 10.0.0.2\nsearch example.org\n")
        .expect("the text is a valid resolv.conf");
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
        Ok(spec) => assert_sandbox_is_well_formed(&spec),
        Err(error) => assert!(is_allowed(&error, pod), "{error} of {pod:?}"),
    }
    for (kind, container) in pod.containers() {
        assert_container_request_is_well_formed(pod, kind, container, users);
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

/// Asserts that the request for one container is well formed.
fn assert_container_request_is_well_formed(
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
        selinux_relabel: false,
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
    let described = format!("{kind:?} {container:?}");
    let envs = match environment(pod, container, &inputs) {
        Ok(envs) => envs,
        Err(error) => return assert!(is_allowed(&error, pod), "{error} of {described}"),
    };
    let prepared = match subpaths(pod, container, &envs) {
        Ok(prepared) => prepared,
        Err(error) => return assert!(is_allowed(&error, pod), "{error} of {described}"),
    };
    let prepared =
        prepared.into_iter().map(|sub| (sub.index, format!("/volumes/{}/{}", sub.volume, sub.path)));
    let prepared: BTreeMap<_, _> = prepared.collect();
    inputs.volumes.subpaths = &prepared;
    match container_plan(pod, container, &inputs) {
        Ok(spec) => assert_container_is_well_formed(&spec, container, kind),
        Err(error) => assert!(is_allowed(&error, pod), "{error} of {described}"),
    }
}

/// Whether an error may occur for a valid pod: it depends on the environment and not only on the values in the pod.
fn is_allowed(error: &ConfigError, pod: &Pod) -> bool {
    match error {
        // API servers do not validate that the container exists.
        ConfigError::Resource { container, .. } => pod.container(container).is_none(),
        // The user depends on the image, and the value of an expression on the environment variables.
        ConfigError::NonRoot { .. } | ConfigError::SubPath { .. } => true,
        // The claim determines whether a volume is a block device.
        ConfigError::VolumeDevice { .. } => true,
        ConfigError::FqdnTooLong { .. }
        | ConfigError::ObjectMissing { .. }
        | ConfigError::ObjectUnreadable { .. }
        | ConfigError::KeyMissing { .. }
        | ConfigError::FileKeyMissing { .. }
        | ConfigError::FileUnreadable { .. } => true,
        // These need something that exists here.
        ConfigError::UserNamespaces
        | ConfigError::VolumeMissing { .. }
        | ConfigError::SubPathNotPrepared { .. }
        | ConfigError::RecursiveReadOnly { .. }
        | ConfigError::ImageVolume { .. } => false,
        // These depend only on the values in the pod.
        ConfigError::HostnameOverride { .. }
        | ConfigError::FieldPath { .. }
        | ConfigError::Divisor { .. }
        | ConfigError::Unsafe { .. } => false,
    }
}

/// A lookup in which every object exists and has all of [`KEYS`].
struct EveryObject;

/// The valid keys in the choices.
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

/// Whether a text is a single word in a line of a file such as resolv.conf or /etc/hosts.
fn is_word(text: &str) -> bool {
    !text.is_empty() && !text.contains(|c: char| c.is_whitespace() || c.is_control())
}

fn assert_sandbox_is_well_formed(spec: &SandboxSpec) {
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

fn assert_container_is_well_formed(spec: &ContainerSpec, container: &Container, kind: ContainerKind) {
    assert!(is_word(&spec.name) && !spec.name.contains('/'), "{kind:?} {:?}", spec.name);
    for (name, _) in &spec.envs {
        assert!(!name.is_empty() && !name.contains(['=', '\0']), "{name:?} of {container:?}");
    }
    let mut mount_points = std::collections::BTreeSet::new();
    for mount in &spec.mounts {
        assert!(!mount.container_path.is_empty(), "{mount:?}");
        assert!(
            mount_points.insert(mount.container_path.clone()),
            "two mounts at {:?}",
            mount.container_path
        );
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
