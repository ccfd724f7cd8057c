//! The calls that make a pod run: sandbox, then containers in order (pod-lifecycle.md §9.7).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1 as cri;
use keelson_kube_model::{Container, ContainerKind};
use keelson_pod_sync_core::actions::{PodActions, SandboxPlan, StartContainer};
use keelson_pod_sync_core::config::{
    AssignedResources, CgroupVersion, ConfigError, ContainerInputs, DnsInputs, FileMount, ImageUser,
    MachineInputs, ResolvConf, SandboxInputs, VolumePath, container_plan, environment, host_names, remedy,
    sandbox_plan,
};
use keelson_pod_sync_core::explain::{Cause, StepName, YOU};
use keelson_pod_sync_core::observation::{PodObservation, SandboxObservation};
use keelson_proto::keelson::resource_manager::v1::Machine;
use keelson_proto::keelson::runtime::v1 as runtime;
use tonic::{Code, Status};
use tracing::Instrument as _;

use permit::{run_with_permit, start_permit};

use crate::effects::clients::{bounded, ok_if_gone};
use crate::effects::convert::{container_config, read_resolv_conf, sandbox_config};
use crate::effects::hooks::Subject;
use crate::effects::images::{ImageError, ImageTask};
use crate::effects::volumes::Mounts;
use crate::effects::{Effects, cluster, config_objects, container_ids, hooks, volumes};
use crate::error::SyncError;
use crate::node::huge_page_sizes;
use crate::publish::StatusFacts;
use crate::publish::objects::{container_object, pod_name, pod_object};
use crate::state::desired_state::pod_ref;
use crate::state::observed::Observed;
use crate::state::pod_state::DesiredPod;
use crate::turn::{Job, stop};

/// Deadline of calls that only write files.
const FILES: Duration = Duration::from_secs(10);

/// What a start works with.
pub struct Start<'a> {
    /// The pods and everything that acts on them.
    pub effects: &'a Arc<Effects>,
    /// The turn.
    pub job: &'a Job,
    /// The pod.
    pub desired: &'a DesiredPod,
    /// The observation that the decision is based on.
    pub observed: &'a Observed,
    /// The mounted volumes.
    pub mounts: Mounts,
    /// The pod's cgroup.
    pub cgroup_parent: String,
}

/// A sandbox that containers can be started in.
struct Sandbox {
    id: String,
    ips: Vec<String>,
    config: cri::PodSandboxConfig,
}

/// Why a start was not completed.
#[derive(Debug)]
pub enum StartError {
    /// The turn was cancelled by something newer. That is no error: no event, no warning, no reason in the status.
    Superseded,
    /// It failed.
    Failed(SyncError),
}

impl From<SyncError> for StartError {
    fn from(error: SyncError) -> Self {
        Self::Failed(error)
    }
}

/// Why one container did not start. Its status shows the reason.
struct ContainerStartError {
    reason: &'static str,
    error: SyncError,
    /// The service that has to act if the pod is not at fault.
    peer: &'static str,
    /// The container, if there is one already.
    id: Option<String>,
}

/// Makes the sandbox if the decision asks for one, and starts the containers that it names.
///
/// # Errors
/// The first error. Containers that do not depend on the failed one are started nevertheless. A cancelled turn ends at the next wait.
pub async fn start_containers(
    start: &Start<'_>,
    actions: &PodActions,
    mut images: BTreeMap<String, ImageTask>,
) -> Result<(), StartError> {
    if actions.create_sandbox.is_none() && actions.start.is_empty() {
        return Ok(());
    }
    let mut permit = Some(start_permit(start).await?);
    let making = Box::pin(sandbox(start, actions.create_sandbox.as_ref()));
    let sandbox = run_with_permit(&mut permit, making).await?;
    let mut first_error: Option<SyncError> = None;
    for action in &actions.start {
        let Some((kind, container)) = start.desired.pod.container(&action.name) else { continue };
        let Some(task) = images.remove(&action.name) else { continue };
        if !task.is_finished() {
            // Other pods start while this one waits for its image.
            tokio::task::yield_now().await;
            permit.take();
        }
        let image = match outcome(start, task).await? {
            Ok(image) => image,
            Err(error) => {
                let error = report_image_error(start, container, kind, error);
                first_error = first_error.or(Some(error));
                if kind == ContainerKind::Init {
                    break;
                }
                continue;
            }
        };
        if permit.is_none() {
            permit = Some(start_permit(start).await?);
        }
        start.effects.publisher.metrics.container_starts(kind);
        start.effects.registry.with(&start.job.uid, |e| e.first_start.container_started());
        let starting = Box::pin(start_one(start, &sandbox, action, container, kind, &image));
        let mut started = run_with_permit(&mut permit, starting).await;
        if let Ok(id) = &started
            && container.lifecycle.as_ref().is_some_and(|l| l.post_start.is_some())
        {
            // Other pods start while this hook runs.
            permit.take();
            started = match post_start(start, container, kind, id).await {
                Err(StartError::Failed(error)) => {
                    let peer = "runtime-shim";
                    Err(ContainerStartError {
                        reason: "PostStartHookError",
                        error,
                        peer,
                        id: Some(id.clone()),
                    })
                }
                Err(superseded) => return Err(superseded),
                Ok(()) => started,
            };
        }
        match started {
            Ok(_) => {
                start.effects.registry.with(&start.job.uid, |e| e.start_errors.remove(&action.name));
            }
            Err(failed) => {
                let error = report_container_error(start, container, kind, failed);
                first_error = first_error.or(Some(error));
                if kind == ContainerKind::Init {
                    break;
                }
            }
        }
    }
    drop(permit);
    match first_error {
        None => Ok(()),
        Some(error) => {
            start.effects.publisher.publish(
                &start.job.uid,
                &StatusFacts { waiting: &actions.waiting, ..StatusFacts::default() },
            );
            Err(error.into())
        }
    }
}

async fn outcome(
    start: &Start<'_>,
    task: ImageTask,
) -> Result<Result<runtime::ImageDone, ImageError>, StartError> {
    // Cancel-safe: dropping the task aborts it.
    tokio::select! {
        () = start.job.cancel.cancelled() => Err(StartError::Superseded),
        outcome = task.outcome() => Ok(outcome),
    }
}

fn note(start: &Start<'_>, step: StepName, subject: &str, cause: Cause) {
    start.effects.registry.set_step(&start.job.uid, step, subject, cause);
}

/// The existing sandbox of the pod, or a new one.
async fn sandbox(start: &Start<'_>, plan: Option<&SandboxPlan>) -> Result<Sandbox, SyncError> {
    // An existing sandbox has its handler already.
    let runtime_handler = match plan {
        Some(_) => cluster::runtime_handler(start.effects, &start.desired.pod)
            .await
            .map_err(|error| report_sandbox_error_of(start, error, "pod-config"))?,
        None => String::new(),
    };
    let attempt =
        plan.map_or_else(|| start.observed.newest_sandbox().map_or(0, |s| s.attempt), |p| p.attempt);
    let node_dns = node_dns(start).await;
    let config = match sandbox_request(start, attempt, &node_dns) {
        Ok(config) => config,
        Err(text) => return Err(report_sandbox_error(start, SyncError::new(text))),
    };
    let Some(plan) = plan else {
        let ready = start.observed.ready_sandbox().ok_or_else(|| SyncError::new("the sandbox is gone"))?;
        let id = ready.id.as_str().to_owned();
        return Ok(Sandbox { id, ips: start.observed.pod_ips(), config });
    };
    note(start, StepName::Sandbox, "", Cause::working("runtime-shim", "the runtime is making the sandbox"));
    start.effects.publisher.metrics.pod_starts();
    let request = cri::RunPodSandboxRequest { config: Some(config.clone()), runtime_handler };
    let made = start
        .effects
        .clients
        .cri()
        .run_pod_sandbox(bounded(request, start.effects.clients.cri_timeout * 2))
        .await;
    let id = match made {
        Ok(response) => response.into_inner().pod_sandbox_id,
        Err(status) => {
            let mut error = SyncError::from_status("Failed to create pod sandbox", &status);
            if let Some(remedy) = remedy(&error.message) {
                error.message = format!("{}: {remedy}", error.message);
            }
            if !error.peer_unavailable {
                start.effects.publisher.metrics.pod_failed();
            }
            return Err(report_sandbox_error(start, error));
        }
    };
    let made = read_sandbox(start, &id, plan.attempt).await.map_err(|status| {
        let error = SyncError::from_status("Unable to get pod sandbox status", &status);
        if !error.peer_unavailable {
            start.effects.context.events.warning(
                pod_object(&start.desired.pod),
                "FailedPodSandBoxStatus",
                error.message.clone(),
            );
        }
        report_sandbox_error(start, error)
    })?;
    let ips = record_sandbox(start, made);
    note(start, StepName::Sandbox, "", Cause::done("runtime-shim"));
    tracing::debug!(pod = pod_name(&start.desired.pod), id, attempt = plan.attempt, reason = %plan.reason, "made a sandbox");
    Ok(Sandbox { id, ips, config })
}

async fn read_sandbox(start: &Start<'_>, id: &str, attempt: u32) -> Result<SandboxObservation, Status> {
    let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: false };
    let answer = start.effects.clients.cri().pod_sandbox_status(bounded(request, FILES)).await?.into_inner();
    let status = answer.status.unwrap_or_default();
    let network = status.network.unwrap_or_default();
    let addresses = std::iter::once(network.ip).chain(network.additional_ips.into_iter().map(|ip| ip.ip));
    Ok(SandboxObservation {
        id: id.into(),
        attempt,
        ready: true,
        created_unix_nanos: status.created_at,
        ips: addresses.filter(|ip| !ip.is_empty()).collect(),
        host_network: start.desired.pod.is_host_network(),
    })
}

/// Adds the sandbox that was just made to the observation, so that the status shows it at once.
fn record_sandbox(start: &Start<'_>, sandbox: SandboxObservation) -> Vec<String> {
    let mut known: PodObservation = (**start.observed).clone();
    known.sandboxes.insert(0, sandbox);
    // Only the status uses this: the next decision is based on a fresh read.
    let ips = known.pod_ips();
    start.effects.registry.with(&start.job.uid, |state| state.observed = Arc::new(known));
    start
        .effects
        .publisher
        .publish(&start.job.uid, &StatusFacts { sandbox_made: Some(true), ..StatusFacts::default() });
    ips
}

fn report_sandbox_error(start: &Start<'_>, error: SyncError) -> SyncError {
    report_sandbox_error_of(start, error, "runtime-shim")
}

/// `peer` has to act while it is unavailable. An answer is about the pod or the node.
fn report_sandbox_error_of(start: &Start<'_>, error: SyncError, peer: &'static str) -> SyncError {
    let owner = if error.peer_unavailable { peer } else { YOU };
    let cause = Cause::failed("FailedCreatePodSandBox", &error.message, owner);
    note(start, StepName::Sandbox, "", cause);
    // An unavailable service is no event of the pod.
    if error.peer_unavailable {
        return error;
    }
    start.effects.context.events.warning(
        pod_object(&start.desired.pod),
        "FailedCreatePodSandBox",
        error.message.clone(),
    );
    error
}

fn machine_inputs<'a>(
    start: &'a Start<'_>,
    machine: &'a Machine,
    hugepage_sizes: &'a [String],
) -> MachineInputs<'a> {
    let config = &start.effects.context.config.resources;
    let v1 = machine.cgroup_version == "v1";
    MachineInputs {
        cpu_cfs_quota: config.cpu_cfs_quota,
        cpu_cfs_period_us: config.cpu_cfs_period_us,
        memory_bytes: machine.capacity.get("memory").copied().unwrap_or(0),
        cgroup: if v1 { CgroupVersion::V1 } else { CgroupVersion::V2 },
        swap_accounting: machine.swap_accounting,
        limited_swap: start.effects.context.config.pods.limited_swap,
        swap_bytes: machine.swap_bytes,
        single_process_oom_kill: start.effects.context.config.pods.single_process_oom_kill.unwrap_or(v1),
        hugepage_sizes,
    }
}

/// The present content of the node's resolv.conf, which a DHCP client may rewrite at any time.
async fn node_dns(start: &Start<'_>) -> ResolvConf {
    let path = start.effects.context.config.runtime.resolv_conf.clone();
    tokio::task::spawn_blocking(move || read_resolv_conf(&path)).await.unwrap_or_default()
}

fn sandbox_request(
    start: &Start<'_>,
    attempt: u32,
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
            machine: machine_inputs(start, &machine, &sizes),
            exclusive_cpus: false,
            volume_groups: &[],
            users: None,
        },
    );
    let plan = plan.map_err(|e| e.to_string())?;
    for warning in &plan.warnings {
        let object = pod_object(&start.desired.pod);
        start.effects.context.events.warning(object, warning.reason, warning.message.clone());
    }
    Ok(sandbox_config(plan))
}

async fn start_one(
    start: &Start<'_>,
    sandbox: &Sandbox,
    action: &StartContainer,
    container: &Container,
    kind: ContainerKind,
    image: &runtime::ImageDone,
) -> Result<String, ContainerStartError> {
    let fail = |reason| move |error| ContainerStartError { reason, error, peer: "runtime-shim", id: None };
    note(
        start,
        StepName::Container,
        &action.name,
        Cause::working("runtime-shim", "the runtime is starting the container"),
    );
    let files = write_files(start, sandbox, action, container).await.map_err(|s| {
        fail("CreateContainerConfigError")(SyncError::from_status("cannot write the container's files", &s))
    })?;
    let attempt = if action.attempt_from_logs {
        action.attempt.max(files.next_attempt_by_logs)
    } else {
        action.attempt
    };
    let of = |peer| move |error| ContainerStartError { peer, ..fail("CreateContainerConfigError")(error) };
    let services = cluster::service_env(start.effects, start.desired).await.map_err(of("pod-config"))?;
    let config = container_request(start, sandbox, container, attempt, image, (&files, &services))
        .await
        .map_err(of("volume-manager"))?;
    if let Some((key, finished)) = &action.backoff {
        start.effects.registry.backoff().advance(key, *finished, &start.effects.registry.moment());
    }
    let (cri, timeout) = (start.effects.clients.cri(), start.effects.clients.cri_timeout);
    if let Some(id) = &action.replaces {
        remove_unstarted(start, id.as_str()).await.map_err(fail("CreateContainerError"))?;
    }
    let events = &start.effects.context.events;
    let object = container_object(&start.desired.pod, kind, &action.name);
    let pulled =
        start.effects.registry.with(&start.job.uid, |e| e.pulled.remove(&action.name)).unwrap_or_default();
    if !image.message.is_empty() && !pulled {
        events.normal(object.clone(), "Pulled", image.message.clone());
    }
    let request = cri::CreateContainerRequest {
        pod_sandbox_id: sandbox.id.clone(),
        config: Some(config),
        sandbox_config: Some(sandbox.config.clone()),
    };
    let created = cri.clone().create_container(bounded(request, timeout)).await;
    let id = created
        .map_err(|s| fail("CreateContainerError")(SyncError::from_status("cannot create the container", &s)))?
        .into_inner()
        .container_id;
    container_ids::refuse_created(start.effects, &id).await.map_err(fail("CreateContainerConfigError"))?;
    events.normal(object.clone(), "Created", "Container created");
    let request = cri::StartContainerRequest { container_id: id.clone() };
    cri.clone().start_container(bounded(request, timeout)).await.map_err(|s| {
        let error = SyncError::from_status("cannot start the container", &s);
        ContainerStartError { id: Some(id.clone()), ..fail("RunContainerError")(error) }
    })?;
    events.normal(object.clone(), "Started", "Container started");
    tracing::info!(pod = pod_name(&start.desired.pod), container = action.name, id, attempt, reason = %action.reason, "started a container");
    note(start, StepName::Container, &action.name, Cause::done("runtime-shim"));
    Ok(id)
}

/// Removes a container that was created and not started. Its state is read once more, since a removal would stop a running container, and a
/// start whose answer was lost may have been carried out.
async fn remove_unstarted(start: &Start<'_>, id: &str) -> Result<(), SyncError> {
    const FAILED: &str = "cannot remove the container that was not started";
    let (cri, timeout) = (start.effects.clients.cri(), start.effects.clients.cri_timeout);
    let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose: false };
    let state = match cri.clone().container_status(bounded(request, timeout)).await {
        Ok(answer) => answer.into_inner().status.map(|status| status.state()),
        Err(status) if status.code() == Code::NotFound => return Ok(()),
        Err(status) => return Err(SyncError::from_status(FAILED, &status)),
    };
    if state != Some(cri::ContainerState::ContainerCreated) {
        start.effects.registry.with(&start.job.uid, |state| {
            state.freshness.invalidate();
            state.wake.notify_one();
        });
        return Err(SyncError {
            peer_unavailable: true,
            ..SyncError::new(format!("{FAILED}: it has started meanwhile"))
        });
    }
    let request = cri::RemoveContainerRequest { container_id: id.to_owned() };
    let removed = ok_if_gone(cri.clone().remove_container(bounded(request, timeout)).await);
    removed.map_err(|status| SyncError::from_status(FAILED, &status))?;
    Ok(())
}

async fn write_files(
    start: &Start<'_>,
    sandbox: &Sandbox,
    action: &StartContainer,
    container: &Container,
) -> Result<runtime::WriteContainerFilesResponse, Status> {
    let pod = &start.desired.pod;
    let own_hosts = container.volume_mounts.iter().any(|m| m.mount_path == "/etc/hosts");
    let known = pod.is_host_network() || !sandbox.ips.is_empty();
    let request = runtime::WriteContainerFilesRequest {
        pod: Some(pod_ref(pod)),
        container: action.name.clone(),
        attempt: action.attempt,
        termination_message_path: container.termination_message_path.clone(),
        etc_hosts: (!own_hosts && known).then(|| etc_hosts(start, sandbox)),
    };
    let mut client = start.effects.clients.runtime();
    client.write_container_files(bounded(request, FILES)).await.map(tonic::Response::into_inner)
}

fn etc_hosts(start: &Start<'_>, sandbox: &Sandbox) -> runtime::EtcHosts {
    let pod = &start.desired.pod;
    let names = host_names(pod, &start.effects.context.config.runtime.cluster_domain).unwrap_or_default();
    let alias = |a: &keelson_kube_model::HostAlias| runtime::HostAlias {
        ip: a.ip.clone(),
        hostnames: a.hostnames.clone(),
    };
    runtime::EtcHosts {
        host_network: pod.is_host_network(),
        pod_ips: sandbox.ips.clone(),
        hostname: names.hostname,
        domain: names.domain,
        aliases: pod.spec.host_aliases.iter().map(alias).collect(),
    }
}

async fn container_request(
    start: &Start<'_>,
    sandbox: &Sandbox,
    container: &Container,
    attempt: u32,
    image: &runtime::ImageDone,
    (files, services): (&runtime::WriteContainerFilesResponse, &BTreeMap<String, String>),
) -> Result<cri::ContainerConfig, SyncError> {
    if let Some(why) =
        container.lifecycle.as_ref().and_then(|l| l.post_start.as_ref()).and_then(hooks::impossible)
    {
        return Err(SyncError::new(format!("lifecycle.postStart.{why}")));
    }
    let config = &start.effects.context.config;
    let machine = start.effects.registry.node.machine.borrow().clone();
    let (effects, pod) = (start.effects, &start.desired.pod);
    let objects = config_objects::fetch(effects, pod, container).await.map_err(SyncError::new)?;
    let env_files = volumes::read_files(effects, pod, container).await?;
    let target_id = target(start.observed, container)?;
    let volumes: BTreeMap<String, VolumePath> = start
        .mounts
        .values()
        .map(|v| (v.name.clone(), VolumePath { host_path: v.host_path.clone(), read_only: v.read_only }))
        .collect();
    let files: Vec<FileMount> = files
        .mounts
        .iter()
        .map(|m| FileMount {
            container_path: m.container_path.clone(),
            host_path: m.host_path.clone(),
            read_only: m.read_only,
        })
        .collect();
    let (allocatable, assigned) = (effects.registry.node.allocatable(), AssignedResources::default());
    let sizes = huge_page_sizes(&machine);
    let seccomp_dir = config.paths.root_dir.join("seccomp").to_string_lossy().into_owned();
    let inputs = ContainerInputs {
        attempt,
        image_ref: &image.image_ref,
        image_user: ImageUser { uid: image.uid, username: &image.username },
        volumes: &volumes,
        subpaths: &BTreeMap::new(),
        files: &files,
        pod_ips: &sandbox.ips,
        node_ips: &effects.registry.node.addresses(),
        node_name: &config.node_name,
        allocatable: &allocatable,
        objects: &objects,
        env_files: &env_files,
        services,
        machine: machine_inputs(start, &machine, &sizes),
        assigned: &assigned,
        seccomp_default: config.pods.seccomp_default,
        seccomp_dir: &seccomp_dir,
        masked_paths: &start.effects.registry.node.host.masked_paths,
        volume_groups: &[],
        target_id,
        recursive_read_only: start.effects.registry.node.runtime.borrow().recursive_read_only,
        image_volumes: false,
        selinux: effects.registry.node.host.selinux,
        users: None,
    };
    let fault = |e: ConfigError| SyncError::new(e.to_string());
    let env = environment(pod, container, &inputs).map_err(fault)?;
    let subpaths = volumes::prepare_subpaths(effects, pod, container, &env).await?;
    let inputs = ContainerInputs { subpaths: &subpaths, ..inputs };
    let plan = container_plan(pod, container, &inputs).map_err(fault)?;
    container_ids::refuse_planned(effects, &plan)?;
    Ok(container_config(plan))
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

async fn post_start(
    start: &Start<'_>,
    container: &Container,
    kind: ContainerKind,
    id: &str,
) -> Result<(), StartError> {
    let Some(hook) = container.lifecycle.as_ref().and_then(|l| l.post_start.as_ref()) else { return Ok(()) };
    // Bounded, so that a hook that hangs does not block the pod's worker for ever.
    let bound = start.effects.clients.cri_timeout;
    let subject = Subject { pod: &start.desired.pod, container, id };
    let span = tracing::info_span!(
        target: keelson_telemetry::TRACE_TARGET, "postStart hook", container = container.name);
    let hook = tokio::time::timeout(bound, hooks::run(start.effects, &subject, hook, bound)).instrument(span);
    // Cancel-safe: the end of the pod stops the container and its hook.
    let outcome = tokio::select! {
        () = start.job.cancel.cancelled() => return Err(StartError::Superseded),
        outcome = hook => outcome,
    };
    let text = match outcome {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(text)) => text,
        Err(_) => format!("it did not end within {} s", bound.as_secs()),
    };
    let pod = &start.desired.pod;
    let object = container_object(pod, kind, &container.name);
    // The event does not contain the hook's output (pod-lifecycle.md §9.10); the container's status does.
    start.effects.context.events.warning(object, "FailedPostStartHook", "PostStartHook failed");
    let (name, grace) = (container.name.as_str(), pod.termination_grace());
    stop::stop_container_with_hooks(start.effects, start.job, pod, id, name, grace, "FailedPostStartHook")
        .await?;
    Err(SyncError::new(format!("PostStartHook failed: {text}")).into())
}

fn report_image_error(
    start: &Start<'_>,
    container: &Container,
    kind: ContainerKind,
    error: ImageError,
) -> SyncError {
    if !error.peer_unavailable {
        record_start_error(start, container, &error.reason, &error.message);
        let object = container_object(&start.desired.pod, kind, &container.name);
        start.effects.context.events.warning(object, "Failed", format!("Error: {}", error.reason));
    }
    note(
        start,
        StepName::Container,
        &container.name,
        Cause::waiting("Image", "waits for its image", "runtime-shim"),
    );
    let retry = (error.retry_unix_nanos > 0).then_some(error.retry_unix_nanos);
    let retry = retry.or_else(|| {
        (!error.peer_unavailable).then(|| keelson_service_kit::now_unix_nanos() + 10_000_000_000)
    });
    SyncError { message: error.message, retry_unix_nanos: retry, peer_unavailable: error.peer_unavailable }
}

fn report_container_error(
    start: &Start<'_>,
    container: &Container,
    kind: ContainerKind,
    failed: ContainerStartError,
) -> SyncError {
    let ContainerStartError { reason, error, peer, id } = failed;
    // An unavailable service is no failure of the container: no reason in its status, no event.
    if !error.peer_unavailable {
        start.effects.publisher.metrics.container_failed(kind, reason);
        record_start_error(start, container, reason, &error.message);
        let object = container_object(&start.desired.pod, kind, &container.name);
        let text = with_name(&error.message, id.as_deref(), &container.name);
        start.effects.context.events.warning(object, "Failed", format!("Error: {text}"));
    }
    let owner = if error.peer_unavailable { peer } else { YOU };
    let cause = Cause::failed(reason, &error.message, owner);
    note(start, StepName::Container, &container.name, cause);
    error
}

/// A text for an event, with the container's name in place of its id, so that repeated events have the same text.
pub(crate) fn with_name(text: &str, id: Option<&str>, name: &str) -> String {
    id.filter(|id| !id.is_empty()).map_or_else(|| text.to_owned(), |id| text.replace(id, name))
}

/// Keeps the reason in the container's status until a start succeeds.
fn record_start_error(start: &Start<'_>, container: &Container, reason: &str, message: &str) {
    let value = (reason.to_owned(), message.to_owned());
    start
        .effects
        .registry
        .with(&start.job.uid, |state| state.start_errors.insert(container.name.clone(), value));
}

mod permit;
#[cfg(test)]
mod tests;
