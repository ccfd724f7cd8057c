//! The requests for sandbox and container, from the facts that the other services and the configuration give.

use std::collections::BTreeMap;

use k8s_cri::v1 as cri;
use keelson_kube_model::Container;
use keelson_pod_sync_core::config::{
    AssignedResources, ConfigError, ContainerInputs, DnsInputs, EnvSources, FileMount, ImageUser, NodeInputs,
    PodInputs, ResolvConf, ResolvedImage, SandboxInputs, UserNamespace, VolumeInputs, VolumePath,
    container_plan, environment, sandbox_plan,
};
use keelson_pod_sync_core::observation::PodObservation;
use keelson_proto::keelson::runtime::v1 as runtime;

use super::Start;
use crate::effects::convert::{container_request, read_resolv_conf, sandbox_config};
use crate::effects::create_container::ContainerRequest;
use crate::effects::volumes::Mounts;
use crate::effects::{config_objects, container_ids, hooks, volumes};
use crate::error::SyncError;
use crate::node::huge_page_sizes;
use crate::publish::objects::pod_object;
use crate::turn::node_inputs::{machine_inputs, runtime_features, security_settings};

/// The present content of the node's resolv.conf, which a DHCP client may rewrite at any time.
pub(super) async fn node_dns(start: &Start<'_>) -> ResolvConf {
    let path = start.effects.context.config.runtime.resolv_conf.clone();
    tokio::task::spawn_blocking(move || read_resolv_conf(&path)).await.unwrap_or_default()
}

/// The request for a sandbox; `users`: the IDs of its user namespace, if the runtime supports that.
pub(super) fn sandbox_request(
    start: &Start<'_>,
    (attempt, users): (u32, Option<UserNamespace>),
    node_dns: &ResolvConf,
) -> Result<cri::PodSandboxConfig, String> {
    let config = &start.effects.context.config;
    let machine = start.effects.registry.node.machine.borrow().clone();
    let sizes = huge_page_sizes(&machine);
    let plan = sandbox_plan(
        &start.desired.pod,
        &SandboxInputs {
            attempt,
            cgroup_parent: &start.cgroup_parent,
            pod_logs_dir: &config.paths.pod_logs_dir.to_string_lossy(),
            dns: DnsInputs {
                cluster_dns: &config.runtime.cluster_dns,
                cluster_domain: &config.runtime.cluster_domain,
                resolv_conf: (!config.runtime.resolv_conf.is_empty()).then_some(node_dns),
                node_ips: &start.effects.registry.node.addresses(),
            },
            runtime_handler: "",
            machine: machine_inputs(start.effects, &machine, &sizes),
            exclusive_cpus: false,
            volume_groups: &volume_groups(&start.mounts),
            users,
        },
    );
    let plan = plan.map_err(|e| e.to_string())?;
    for warning in &plan.warnings {
        let object = pod_object(&start.desired.pod);
        start.effects.context.events.warning(object, warning.reason, warning.message.clone());
    }
    Ok(sandbox_config(plan))
}

/// What is known of a container when its request is made.
pub(super) struct Prepared<'a> {
    pub(super) container: &'a Container,
    pub(super) attempt: u32,
    pub(super) image: &'a runtime::ImageDone,
    /// The runtime's references of the images of its volumes, by name of the volume.
    pub(super) volume_images: &'a BTreeMap<String, String>,
    /// The pod's runtime handler if volumes are images, else empty.
    pub(super) runtime_handler: String,
    /// Addresses of the pod, primary first.
    pub(super) pod_ips: &'a [String],
    /// Files that runtime-shim has written for the container.
    pub(super) files: Vec<FileMount>,
    /// Service variables of the pod.
    pub(super) services: BTreeMap<String, String>,
}

/// The request for a container.
pub(super) async fn plan_container(
    start: &Start<'_>,
    prepared: &Prepared<'_>,
) -> Result<ContainerRequest, SyncError> {
    let container = prepared.container;
    let post_start = container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.post_start.as_ref());
    if let Some(why) = post_start.and_then(hooks::impossible) {
        return Err(SyncError::new(format!("lifecycle.postStart.{why}")));
    }
    let (effects, pod) = (start.effects, &start.desired.pod);
    let (config, node) = (&effects.context.config, &effects.registry.node);
    let (machine, runtime) = (node.machine.borrow().clone(), node.runtime.borrow().clone());
    let sizes = huge_page_sizes(&machine);
    let objects = config_objects::fetch(effects, pod, container).await.map_err(SyncError::new)?;
    let env_files = volumes::read_files(effects, pod, container).await?;
    let target_id = target(start.observed, container)?;
    let (paths, groups) = (volume_paths(&start.mounts), volume_groups(&start.mounts));
    let (node_ips, allocatable) = (node.addresses(), node.allocatable());
    let assigned = AssignedResources::default();
    let seccomp_dir = config.paths.root_dir.join("seccomp").to_string_lossy().into_owned();
    let image = prepared.image;
    let inputs = ContainerInputs {
        attempt: prepared.attempt,
        target_id,
        image: ResolvedImage {
            reference: &image.image_ref,
            user: ImageUser { uid: image.uid, username: &image.username },
        },
        pod: PodInputs { ips: prepared.pod_ips, volume_groups: &groups, users: start.mounts.user_namespace },
        node: NodeInputs { name: &config.node_name, ips: &node_ips, allocatable: &allocatable },
        env: EnvSources { objects: &objects, files: &env_files, services: &prepared.services },
        volumes: VolumeInputs {
            paths: &paths,
            subpaths: &BTreeMap::new(),
            images: prepared.volume_images,
            runtime_handler: &prepared.runtime_handler,
            files: &prepared.files,
        },
        machine: machine_inputs(effects, &machine, &sizes),
        security: security_settings(effects, &seccomp_dir),
        runtime: runtime_features(&runtime),
        assigned: &assigned,
    };
    let fault = |e: ConfigError| SyncError::new(e.to_string());
    let env = environment(pod, container, &inputs).map_err(fault)?;
    let subpaths = volumes::prepare_subpaths(effects, pod, container, &env).await?;
    let volumes = VolumeInputs { subpaths: &subpaths, ..inputs.volumes };
    let plan = container_plan(pod, container, &ContainerInputs { volumes, ..inputs }).map_err(fault)?;
    container_ids::refuse_planned(effects, &plan)?;
    Ok(container_request(plan))
}

fn volume_paths(mounts: &Mounts) -> BTreeMap<String, VolumePath> {
    let path = |v: &keelson_proto::keelson::volume_manager::v1::VolumeMount| VolumePath {
        host_path: v.host_path.clone(),
        read_only: v.read_only,
        block_device: v.block_device,
        selinux_relabel: v.selinux_relabel,
    };
    mounts.volumes.values().map(|v| (v.name.clone(), path(v))).collect()
}

/// The groups by which the pod may use its mounted volumes, in the order of their names (volumes.md §3.4 step 8).
fn volume_groups(mounts: &Mounts) -> Vec<i64> {
    mounts.volumes.values().filter_map(|volume| volume.supplemental_group).collect()
}

/// The container whose processes an ephemeral container sees; `None`: only its own.
fn target<'a>(observed: &'a PodObservation, container: &Container) -> Result<Option<&'a str>, SyncError> {
    let Some(name) = container.target_container_name.as_deref().filter(|name| !name.is_empty()) else {
        return Ok(None);
    };
    let target = observed.current(name).ok_or_else(|| {
        SyncError::new(format!("targetContainerName: the pod has no container {name} yet to look into"))
    })?;
    Ok(Some(target.id.as_str()))
}
