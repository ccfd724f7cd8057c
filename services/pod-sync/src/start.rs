//! The calls that make a pod run: sandbox, then containers in order (pod-lifecycle.md §9.7).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1 as cri;
use keelson_kube_model::node_ext::host_ips;
use keelson_kube_model::{Container, ContainerKind, Quantity};
use keelson_pod_sync_core::actions::{PodActions, SandboxPlan, StartContainer};
use keelson_pod_sync_core::config::{
    CgroupVersion, ConfigError, ContainerInputs, DnsInputs, FileMount, Given, ImageUser, MachineInputs,
    ResolvConf, SandboxInputs, VolumePath, container_plan, environment, host_names, sandbox_plan, way_out,
};
use keelson_pod_sync_core::explain::{Cause, StepName, YOU};
use keelson_pod_sync_core::observation::{PodObservation, SandboxObservation};
use keelson_proto::keelson::resource_manager::v1::Machine;
use keelson_proto::keelson::runtime::v1 as runtime;
use keelson_service_kit::default_route_address;
use tonic::{Code, Status};
use tracing::Instrument as _;

use crate::agent::{Agent, Wanted, object_of};
use crate::clients::bounded;
use crate::cluster;
use crate::convert::{container_config, read_resolv_conf, sandbox_config};
use crate::desires::pod_ref;
use crate::hooks::{self, Subject};
use crate::identity;
use crate::images::{ImageTask, ImageTrouble};
use crate::observed::Observed;
use crate::stop::gone_is_done;
use crate::sync::{Mounts, container_object};
use crate::volumes::prepare;
use crate::worker::{Facts, Job, Trouble, name_of, note_wait, publish};
use permit::{gate, keep_for_a_while};

/// Deadline of the calls that only write files.
const FILES: Duration = Duration::from_secs(10);

/// What a start works with.
pub struct Start<'a> {
    /// The agent.
    pub agent: &'a Arc<Agent>,
    /// The turn.
    pub job: &'a Job,
    /// The pod.
    pub wanted: &'a Wanted,
    /// The observation that the decision was made from.
    pub observed: &'a Observed,
    /// Volumes.
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

/// Why a start was not carried through.
#[derive(Debug)]
pub enum Unfinished {
    /// Something newer has come: nobody's trouble, so there is no event, no warning and no reason in the status.
    Superseded,
    /// Something is in the way.
    Trouble(Trouble),
}

impl From<Trouble> for Unfinished {
    fn from(trouble: Trouble) -> Self {
        Self::Trouble(trouble)
    }
}

/// Why one container did not start; its waiting reason stands in the status.
struct StartTrouble {
    reason: &'static str,
    trouble: Trouble,
    /// Who has to act when it is no fault of the pod.
    neighbour: &'static str,
    /// The container, if there is one already.
    id: Option<String>,
}

/// Makes the sandbox if one is due, and starts the containers of the decision.
///
/// # Errors
/// The first trouble; containers that do not depend on the one in trouble are started all the same. A turn that
/// has been cancelled ends at the next wait.
pub async fn start_containers(
    start: &Start<'_>,
    actions: &PodActions,
    mut images: BTreeMap<String, ImageTask>,
) -> Result<(), Unfinished> {
    if actions.create_sandbox.is_none() && actions.start.is_empty() {
        return Ok(());
    }
    let mut permit = Some(gate(start).await?);
    let making = Box::pin(sandbox(start, actions.create_sandbox.as_ref()));
    let sandbox = keep_for_a_while(&mut permit, making).await?;
    let mut first_trouble: Option<Trouble> = None;
    for action in &actions.start {
        let Some((kind, container)) = start.wanted.pod.container(&action.name) else { continue };
        let Some(task) = images.remove(&action.name) else { continue };
        if !task.is_finished() {
            // Others start while this one waits for its image.
            tokio::task::yield_now().await;
            permit.take();
        }
        let image = match outcome(start, task).await? {
            Ok(image) => image,
            Err(trouble) => {
                let trouble = image_trouble(start, container, kind, trouble);
                first_trouble = first_trouble.or(Some(trouble));
                if kind == ContainerKind::Init {
                    break;
                }
                continue;
            }
        };
        if permit.is_none() {
            permit = Some(gate(start).await?);
        }
        start.agent.metrics.container_starts(kind);
        start.agent.with(&start.job.uid, |e| e.start.container_begins());
        let starting = Box::pin(start_one(start, &sandbox, action, container, kind, &image));
        let mut started = keep_for_a_while(&mut permit, starting).await;
        if let Ok(id) = &started
            && container.lifecycle.as_ref().is_some_and(|l| l.post_start.is_some())
        {
            // Other pods start while the hook of this one runs.
            permit.take();
            started = match post_start(start, container, kind, id).await {
                Err(Unfinished::Trouble(trouble)) => {
                    let neighbour = "runtime-shim";
                    Err(StartTrouble {
                        reason: "PostStartHookError",
                        trouble,
                        neighbour,
                        id: Some(id.clone()),
                    })
                }
                Err(superseded) => return Err(superseded),
                Ok(()) => started,
            };
        }
        match started {
            Ok(_) => {
                start.agent.with(&start.job.uid, |e| e.reasons.remove(&action.name));
            }
            Err(failed) => {
                let trouble = container_trouble(start, container, kind, failed);
                first_trouble = first_trouble.or(Some(trouble));
                if kind == ContainerKind::Init {
                    break;
                }
            }
        }
    }
    drop(permit);
    match first_trouble {
        None => Ok(()),
        Some(trouble) => {
            publish(start.agent, &start.job.uid, &Facts { waiting: &actions.waiting, ..Facts::default() });
            Err(trouble.into())
        }
    }
}

async fn outcome(
    start: &Start<'_>,
    task: ImageTask,
) -> Result<Result<runtime::ImageDone, ImageTrouble>, Unfinished> {
    // Cancel-safe: dropping the task gives the image up.
    tokio::select! {
        () = start.job.cancel.cancelled() => Err(Unfinished::Superseded),
        outcome = task.outcome() => Ok(outcome),
    }
}

fn note(start: &Start<'_>, step: StepName, subject: &str, cause: Cause) {
    note_wait(start.agent, &start.job.uid, step, subject, cause);
}

/// The existing sandbox of the pod, or a new one.
async fn sandbox(start: &Start<'_>, plan: Option<&SandboxPlan>) -> Result<Sandbox, Trouble> {
    // A sandbox that is there has its handler.
    let runtime_handler = match plan {
        Some(_) => cluster::runtime_handler(start.agent, &start.wanted.pod)
            .await
            .map_err(|trouble| sandbox_trouble_of(start, trouble, "pod-config"))?,
        None => String::new(),
    };
    let attempt =
        plan.map_or_else(|| start.observed.newest_sandbox().map_or(0, |s| s.attempt), |p| p.attempt);
    let node_dns = node_dns(start).await;
    let config = match sandbox_request(start, attempt, &node_dns) {
        Ok(config) => config,
        Err(text) => return Err(sandbox_trouble(start, Trouble::fault(text))),
    };
    let Some(plan) = plan else {
        let ready = start.observed.ready_sandbox().ok_or_else(|| Trouble::fault("the sandbox is gone"))?;
        let id = ready.id.as_str().to_owned();
        return Ok(Sandbox { id, ips: start.observed.pod_ips(), config });
    };
    note(start, StepName::Sandbox, "", Cause::working("runtime-shim", "the runtime makes the sandbox"));
    start.agent.metrics.pod_starts();
    let request = cri::RunPodSandboxRequest { config: Some(config.clone()), runtime_handler };
    let made = start
        .agent
        .clients
        .cri()
        .run_pod_sandbox(bounded(request, start.agent.clients.cri_timeout * 2))
        .await;
    let id = match made {
        Ok(response) => response.into_inner().pod_sandbox_id,
        Err(status) => {
            let mut trouble = Trouble::call("Failed to create pod sandbox", &status);
            if let Some(way_out) = way_out(&trouble.message) {
                trouble.message = format!("{}: {way_out}", trouble.message);
            }
            if !trouble.neighbour {
                start.agent.metrics.pod_failed();
            }
            return Err(sandbox_trouble(start, trouble));
        }
    };
    let seen = look_at_sandbox(start, &id, plan.attempt).await.map_err(|status| {
        let trouble = Trouble::call("Unable to get pod sandbox status", &status);
        if !trouble.neighbour {
            start.agent.context.events.warning(
                object_of(&start.wanted.pod),
                "FailedPodSandBoxStatus",
                trouble.message.clone(),
            );
        }
        sandbox_trouble(start, trouble)
    })?;
    let ips = show_sandbox(start, seen);
    note(start, StepName::Sandbox, "", Cause::done("runtime-shim"));
    tracing::debug!(pod = name_of(&start.wanted.pod), id, attempt = plan.attempt, reason = %plan.reason, "made a sandbox");
    Ok(Sandbox { id, ips, config })
}

async fn look_at_sandbox(start: &Start<'_>, id: &str, attempt: u32) -> Result<SandboxObservation, Status> {
    let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: false };
    let answer = start.agent.clients.cri().pod_sandbox_status(bounded(request, FILES)).await?.into_inner();
    let status = answer.status.unwrap_or_default();
    let network = status.network.unwrap_or_default();
    let addresses = std::iter::once(network.ip).chain(network.additional_ips.into_iter().map(|ip| ip.ip));
    Ok(SandboxObservation {
        id: id.into(),
        attempt,
        ready: true,
        created_unix_nanos: status.created_at,
        ips: addresses.filter(|ip| !ip.is_empty()).collect(),
        host_network: start.wanted.pod.is_host_network(),
    })
}

/// The sandbox that has just been made becomes part of what is known, and the status says so at once.
fn show_sandbox(start: &Start<'_>, seen: SandboxObservation) -> Vec<String> {
    let mut known: PodObservation = (**start.observed).clone();
    known.sandboxes.insert(0, seen);
    // Only the status looks at this; the next decision is made from a fresh read, which is newer than this.
    let ips = known.pod_ips();
    start.agent.with(&start.job.uid, |entry| entry.observed = Arc::new(known));
    publish(start.agent, &start.job.uid, &Facts { sandbox_made: Some(true), ..Facts::default() });
    ips
}

fn sandbox_trouble(start: &Start<'_>, trouble: Trouble) -> Trouble {
    sandbox_trouble_of(start, trouble, "runtime-shim")
}

/// `neighbour` has to act while it is away; what it answers is about the pod or the node, however it words it.
fn sandbox_trouble_of(start: &Start<'_>, trouble: Trouble, neighbour: &'static str) -> Trouble {
    let owner = if trouble.neighbour { neighbour } else { YOU };
    let cause = Cause::failed("FailedCreatePodSandBox", &trouble.message, owner);
    note(start, StepName::Sandbox, "", cause);
    // That a service is away is nothing that happened to the pod.
    if trouble.neighbour {
        return trouble;
    }
    start.agent.context.events.warning(
        object_of(&start.wanted.pod),
        "FailedCreatePodSandBox",
        trouble.message.clone(),
    );
    trouble
}

/// The sizes of huge pages that the machine knows, such as `2Mi`.
fn hugepage_sizes(machine: &Machine) -> Vec<String> {
    machine
        .capacity
        .keys()
        .filter_map(|name| name.strip_prefix("hugepages-"))
        .map(ToOwned::to_owned)
        .collect()
}

fn machine_inputs<'a>(
    start: &'a Start<'_>,
    machine: &'a Machine,
    hugepage_sizes: &'a [String],
) -> MachineInputs<'a> {
    let config = &start.agent.context.config.resources;
    let v1 = machine.cgroup_version == "v1";
    MachineInputs {
        cpu_cfs_quota: config.cpu_cfs_quota,
        cpu_cfs_period_us: config.cpu_cfs_period_us,
        memory_bytes: machine.capacity.get("memory").copied().unwrap_or(0),
        cgroup: if v1 { CgroupVersion::V1 } else { CgroupVersion::V2 },
        swap_accounting: machine.swap_accounting,
        limited_swap: start.agent.context.config.pods.limited_swap,
        swap_bytes: machine.swap_bytes,
        single_process_oom_kill: start.agent.context.config.pods.single_process_oom_kill.unwrap_or(v1),
        hugepage_sizes,
    }
}

/// The node's file as it is now: who renews an address lease writes it anew.
async fn node_dns(start: &Start<'_>) -> ResolvConf {
    let path = start.agent.context.config.runtime.resolv_conf.clone();
    tokio::task::spawn_blocking(move || read_resolv_conf(&path)).await.unwrap_or_default()
}

fn sandbox_request(
    start: &Start<'_>,
    attempt: u32,
    node_dns: &ResolvConf,
) -> Result<cri::PodSandboxConfig, String> {
    let config = &start.agent.context.config;
    let machine = start.agent.machine.borrow().clone();
    let sizes = hugepage_sizes(&machine);
    let plan = sandbox_plan(
        &start.wanted.pod,
        &SandboxInputs {
            attempt,
            cgroup_parent: &start.cgroup_parent,
            pod_logs_dir: &config.paths.pod_logs_dir.to_string_lossy(),
            dns: DnsInputs {
                cluster_dns: &config.runtime.cluster_dns,
                cluster_domain: &config.runtime.cluster_domain,
                resolv_conf: (!config.runtime.resolv_conf.is_empty()).then_some(node_dns),
                node_ips: &node_ips(start.agent),
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
        let object = object_of(&start.wanted.pod);
        start.agent.context.events.warning(object, warning.reason, warning.message.clone());
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
) -> Result<String, StartTrouble> {
    let fail = |reason| move |trouble| StartTrouble { reason, trouble, neighbour: "runtime-shim", id: None };
    note(
        start,
        StepName::Container,
        &action.name,
        Cause::working("runtime-shim", "the runtime starts the container"),
    );
    let files = write_files(start, sandbox, action, container).await.map_err(|s| {
        fail("CreateContainerConfigError")(Trouble::call("cannot write the container's files", &s))
    })?;
    let attempt = if action.attempt_from_logs {
        action.attempt.max(files.next_attempt_by_logs)
    } else {
        action.attempt
    };
    let of =
        |neighbour| move |trouble| StartTrouble { neighbour, ..fail("CreateContainerConfigError")(trouble) };
    let services = cluster::service_env(start.agent, start.wanted).await.map_err(of("pod-config"))?;
    let config = container_request(start, sandbox, container, attempt, image, (&files, &services))
        .await
        .map_err(of("volume-manager"))?;
    if let Some((key, finished)) = &action.backoff {
        start.agent.backoff().advance(key, *finished, &start.agent.moment());
    }
    let (cri, timeout) = (start.agent.clients.cri(), start.agent.clients.cri_timeout);
    if let Some(id) = &action.replaces {
        remove_unstarted(start, id.as_str()).await.map_err(fail("CreateContainerError"))?;
    }
    let events = &start.agent.context.events;
    let object = container_object(&start.wanted.pod, kind, &action.name);
    let pulled = start.agent.with(&start.job.uid, |e| e.pulled.remove(&action.name)).unwrap_or_default();
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
        .map_err(|s| fail("CreateContainerError")(Trouble::call("cannot create the container", &s)))?
        .into_inner()
        .container_id;
    identity::refuse_created(start.agent, &id).await.map_err(fail("CreateContainerConfigError"))?;
    events.normal(object.clone(), "Created", "Container created");
    let request = cri::StartContainerRequest { container_id: id.clone() };
    cri.clone().start_container(bounded(request, timeout)).await.map_err(|s| {
        let trouble = Trouble::call("cannot start the container", &s);
        StartTrouble { id: Some(id.clone()), ..fail("RunContainerError")(trouble) }
    })?;
    events.normal(object.clone(), "Started", "Container started");
    tracing::info!(pod = name_of(&start.wanted.pod), container = action.name, id, attempt, reason = %action.reason, "started");
    note(start, StepName::Container, &action.name, Cause::done("runtime-shim"));
    Ok(id)
}

/// Removes a container that was made and not started. A removal would end one that runs, and a start whose answer was lost may
/// have been carried out since it was looked at, so it is looked at once more.
async fn remove_unstarted(start: &Start<'_>, id: &str) -> Result<(), Trouble> {
    const FAILED: &str = "cannot remove the container that was not started";
    let (cri, timeout) = (start.agent.clients.cri(), start.agent.clients.cri_timeout);
    let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose: false };
    let state = match cri.clone().container_status(bounded(request, timeout)).await {
        Ok(answer) => answer.into_inner().status.map(|status| status.state()),
        Err(status) if status.code() == Code::NotFound => return Ok(()),
        Err(status) => return Err(Trouble::call(FAILED, &status)),
    };
    if state != Some(cri::ContainerState::ContainerCreated) {
        start.agent.with(&start.job.uid, |entry| {
            entry.freshness.ask();
            entry.wake.notify_one();
        });
        return Err(Trouble {
            neighbour: true,
            ..Trouble::fault(format!("{FAILED}: it has begun meanwhile"))
        });
    }
    let request = cri::RemoveContainerRequest { container_id: id.to_owned() };
    let removed = gone_is_done(cri.clone().remove_container(bounded(request, timeout)).await);
    removed.map_err(|status| Trouble::call(FAILED, &status))?;
    Ok(())
}

async fn write_files(
    start: &Start<'_>,
    sandbox: &Sandbox,
    action: &StartContainer,
    container: &Container,
) -> Result<runtime::WriteContainerFilesResponse, Status> {
    let pod = &start.wanted.pod;
    let own_hosts = container.volume_mounts.iter().any(|m| m.mount_path == "/etc/hosts");
    let known = pod.is_host_network() || !sandbox.ips.is_empty();
    let request = runtime::WriteContainerFilesRequest {
        pod: Some(pod_ref(pod)),
        container: action.name.clone(),
        attempt: action.attempt,
        termination_message_path: container.termination_message_path.clone(),
        etc_hosts: (!own_hosts && known).then(|| etc_hosts(start, sandbox)),
    };
    let mut client = start.agent.clients.runtime();
    client.write_container_files(bounded(request, FILES)).await.map(tonic::Response::into_inner)
}

fn etc_hosts(start: &Start<'_>, sandbox: &Sandbox) -> runtime::EtcHosts {
    let pod = &start.wanted.pod;
    let names = host_names(pod, &start.agent.context.config.runtime.cluster_domain).unwrap_or_default();
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
) -> Result<cri::ContainerConfig, Trouble> {
    if let Some(why) =
        container.lifecycle.as_ref().and_then(|l| l.post_start.as_ref()).and_then(hooks::impossible)
    {
        return Err(Trouble::fault(format!("lifecycle.postStart.{why}")));
    }
    let config = &start.agent.context.config;
    let machine = start.agent.machine.borrow().clone();
    let (agent, pod) = (start.agent, &start.wanted.pod);
    let objects = crate::objects::fetch(agent, pod, container).await.map_err(Trouble::fault)?;
    let env_files = prepare::files(agent, pod, container).await?;
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
    let allocatable =
        machine.allocatable.iter().map(|(name, amount)| (name.clone(), quantity(name, *amount)));
    let (allocatable, given) = (allocatable.collect(), Given::default());
    let sizes = hugepage_sizes(&machine);
    let seccomp_dir = config.paths.root_dir.join("seccomp").to_string_lossy().into_owned();
    let inputs = ContainerInputs {
        attempt,
        image_ref: &image.image_ref,
        image_user: ImageUser { uid: image.uid, username: &image.username },
        volumes: &volumes,
        subpaths: &BTreeMap::new(),
        files: &files,
        pod_ips: &sandbox.ips,
        node_ips: &node_ips(agent),
        node_name: &config.node_name,
        allocatable: &allocatable,
        objects: &objects,
        env_files: &env_files,
        services,
        machine: machine_inputs(start, &machine, &sizes),
        given: &given,
        seccomp_default: config.pods.seccomp_default,
        seccomp_dir: &seccomp_dir,
        masked_paths: &start.agent.host.masked_paths,
        volume_groups: &[],
        target_id,
        recursive_read_only: start.agent.runtime.borrow().recursive_read_only,
        image_volumes: false,
        selinux: agent.host.selinux,
        users: None,
    };
    let fault = |e: ConfigError| Trouble::fault(e.to_string());
    let env = environment(pod, container, &inputs).map_err(fault)?;
    let parts = prepare::parts(agent, pod, container, &env).await?;
    let inputs = ContainerInputs { subpaths: &parts, ..inputs };
    let plan = container_plan(pod, container, &inputs).map_err(fault)?;
    identity::refuse_planned(agent, &plan)?;
    Ok(container_config(plan))
}

/// The container whose processes an ephemeral container sees; `None`: those of its own.
fn target<'a>(observed: &'a PodObservation, container: &Container) -> Result<Option<&'a str>, Trouble> {
    let Some(name) = container.target_container_name.as_deref().filter(|name| !name.is_empty()) else {
        return Ok(None);
    };
    let target = observed.current(name).ok_or_else(|| {
        Trouble::fault(format!("targetContainerName: the pod has no container {name} yet to look into"))
    })?;
    Ok(Some(target.id.as_str()))
}

/// The node's addresses as its pods see them: of those of its object the ones that a status shows, else those of
/// `--node-ip`, else the one that its default route leaves by.
pub(crate) fn node_ips(agent: &Agent) -> Vec<String> {
    let node = agent.node.borrow();
    let addresses = node.as_ref().map(|node| node.status.addresses.as_slice()).unwrap_or_default();
    let told: Vec<String> = host_ips(addresses).iter().map(ToString::to_string).collect();
    if !told.is_empty() {
        return told;
    }
    let config = &agent.context.config;
    let given = config.node_status.node_ips.iter().filter(|ip| !ip.is_unspecified());
    let given: Vec<String> = given.map(ToString::to_string).collect();
    if !given.is_empty() {
        return given;
    }
    let name = config.node_name.parse().ok();
    name.or_else(default_route_address).map(|address| address.to_string()).into_iter().collect()
}

/// An amount as resource-manager counts it: cores in thousandths, everything else in whole units.
pub(crate) fn quantity(name: &str, amount: i64) -> Quantity {
    if name == "cpu" {
        Quantity::from_milli(amount)
    } else {
        Quantity::from_bytes(u64::try_from(amount).unwrap_or(0))
    }
}

async fn post_start(
    start: &Start<'_>,
    container: &Container,
    kind: ContainerKind,
    id: &str,
) -> Result<(), Unfinished> {
    let Some(hook) = container.lifecycle.as_ref().and_then(|l| l.post_start.as_ref()) else { return Ok(()) };
    // Bounded, so that a hook that hangs cannot hold the pod's worker for ever.
    let bound = start.agent.clients.cri_timeout;
    let subject = Subject { pod: &start.wanted.pod, container, id };
    let span = tracing::info_span!(
        target: keelson_telemetry::TRACE_TARGET, "postStart hook", container = container.name);
    let hook = tokio::time::timeout(bound, hooks::run(start.agent, &subject, hook, bound)).instrument(span);
    // Cancel-safe: whoever ends the pod stops the container, and the hook with it.
    let outcome = tokio::select! {
        () = start.job.cancel.cancelled() => return Err(Unfinished::Superseded),
        outcome = hook => outcome,
    };
    let text = match outcome {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(text)) => text,
        Err(_) => format!("no end within {} s", bound.as_secs()),
    };
    let pod = &start.wanted.pod;
    let object = container_object(pod, kind, &container.name);
    // What a hook has said is nobody else's business (pod-lifecycle.md §9.10); it stands in the container's status.
    start.agent.context.events.warning(object, "FailedPostStartHook", "PostStartHook failed");
    let (name, grace) = (container.name.as_str(), pod.termination_grace());
    crate::stop::stop_container_with_hooks(
        start.agent,
        start.job,
        pod,
        id,
        name,
        grace,
        "FailedPostStartHook",
    )
    .await?;
    Err(Trouble::fault(format!("PostStartHook failed: {text}")).into())
}

fn image_trouble(
    start: &Start<'_>,
    container: &Container,
    kind: ContainerKind,
    trouble: ImageTrouble,
) -> Trouble {
    if !trouble.neighbour {
        remember(start, container, &trouble.reason, &trouble.message);
        let object = container_object(&start.wanted.pod, kind, &container.name);
        start.agent.context.events.warning(object, "Failed", format!("Error: {}", trouble.reason));
    }
    note(
        start,
        StepName::Container,
        &container.name,
        Cause::waiting("Image", "waits for its image", "runtime-shim"),
    );
    let retry = (trouble.retry_unix_nanos > 0).then_some(trouble.retry_unix_nanos);
    let retry = retry
        .or_else(|| (!trouble.neighbour).then(|| keelson_service_kit::now_unix_nanos() + 10_000_000_000));
    Trouble { message: trouble.message, retry_unix_nanos: retry, neighbour: trouble.neighbour }
}

fn container_trouble(
    start: &Start<'_>,
    container: &Container,
    kind: ContainerKind,
    failed: StartTrouble,
) -> Trouble {
    let StartTrouble { reason, trouble, neighbour, id } = failed;
    // That a service is away is no failure of the container: there is no reason in its status, and no event.
    if !trouble.neighbour {
        start.agent.metrics.container_failed(kind, reason);
        remember(start, container, reason, &trouble.message);
        let object = container_object(&start.wanted.pod, kind, &container.name);
        let text = named(&trouble.message, id.as_deref(), &container.name);
        start.agent.context.events.warning(object, "Failed", format!("Error: {text}"));
    }
    let owner = if trouble.neighbour { neighbour } else { YOU };
    let cause = Cause::failed(reason, &trouble.message, owner);
    note(start, StepName::Container, &container.name, cause);
    trouble
}

/// A text for an event, with the container's name in place of its id: events of the same kind then have the same text.
pub(crate) fn named(text: &str, id: Option<&str>, name: &str) -> String {
    id.filter(|id| !id.is_empty()).map_or_else(|| text.to_owned(), |id| text.replace(id, name))
}

/// The reason stands in the container's status until a start succeeds.
fn remember(start: &Start<'_>, container: &Container, reason: &str, message: &str) {
    let value = (reason.to_owned(), message.to_owned());
    start.agent.with(&start.job.uid, |entry| entry.reasons.insert(container.name.clone(), value));
}

mod permit;
#[cfg(test)]
mod tests;
