//! The start of one container: files, request, create, start, postStart hook.

use k8s_cri::v1 as cri;
use keelson_kube_model::HostAlias;
use keelson_pod_sync_core::allocation::Allocation;
use keelson_pod_sync_core::config::{FileMount, host_names};
use keelson_pod_sync_core::explain::{Cause, StepName};
use keelson_proto::keelson::runtime::v1 as runtime;
use tonic::{Code, Status};
use tracing::Instrument as _;

use super::errors::ContainerStartError;
use super::request::{Prepared, plan_container};
use super::sandbox::Sandbox;
use super::{FILES, Start, StartError, Starting, note};
use crate::effects::clients::{bounded, ok_if_gone};
use crate::effects::create_container::{self, ContainerRequest};
use crate::effects::hooks::Subject;
use crate::effects::images::MountedImages;
use crate::effects::{cluster, container_ids, hooks};
use crate::error::SyncError;
use crate::publish::objects::{container_object, pod_name, pod_object};
use crate::state::desired_state::pod_ref;
use crate::turn::stop;

/// The waiting reason of a container whose request cannot be made.
const CONFIG_ERROR: &str = "CreateContainerConfigError";
/// The waiting reason of a container that the runtime cannot create.
const CREATE_ERROR: &str = "CreateContainerError";

/// The begin of the runtime's message when it cannot mount an image volume (runtime-and-resources.md §1.3).
const IMAGE_MOUNT_FAILED: &str = "ImageVolumeMountFailed";

/// The images that a container starts with.
pub(super) struct PresentImages {
    /// Its own.
    pub(super) own: runtime::ImageDone,
    /// Those of its volumes.
    pub(super) volumes: MountedImages,
}

/// Creates and starts a container. Returns its id.
pub(super) async fn start(
    start: &Start<'_>,
    sandbox: &Sandbox,
    starting: Starting<'_>,
    images: &PresentImages,
) -> Result<String, ContainerStartError> {
    let action = starting.action;
    let working = Cause::working("runtime-shim", "the runtime is starting the container");
    note(start, StepName::Container, &action.name, working);
    let prepared = prepare(start, sandbox, starting, images).await?;
    let request = plan_container(start, &prepared)
        .await
        .map_err(|error| ContainerStartError::of(CONFIG_ERROR, "volume-manager", error))?;
    if let Some((key, finished)) = &action.backoff {
        start.effects.registry.backoff().advance(key, *finished, &start.effects.registry.moment());
    }
    if let Some(id) = &action.replaces {
        let removed = remove_unstarted(start, id.as_str()).await;
        removed.map_err(|error| ContainerStartError::of_runtime(CREATE_ERROR, error))?;
    }
    let events = &start.effects.context.events;
    for message in &images.volumes.present {
        events.normal(pod_object(&start.desired.pod), "Pulled", message.clone());
    }
    let object = container_object(&start.desired.pod, starting.kind, &action.name);
    let pulled = start.pulled.take(&action.name);
    if !images.own.message.is_empty() && !pulled {
        events.normal(object.clone(), "Pulled", images.own.message.clone());
    }
    let (uid, pod) = (&start.job.uid, &start.desired.pod);
    // Recorded first: a container that runs with other resources than are recorded would never get its own.
    start.effects.registry.record_actuated(uid, &Allocation::of(pod), &action.name, pod);
    let id = Box::pin(create(start, sandbox, request)).await?;
    events.normal(object.clone(), "Created", "Container created");
    let request = cri::StartContainerRequest { container_id: id.clone() };
    let timeout = start.effects.clients.cri_timeout;
    start.effects.clients.cri().start_container(bounded(request, timeout)).await.map_err(|s| {
        let error = SyncError::from_status("cannot start the container", &s);
        let failed = ContainerStartError::of_runtime("RunContainerError", error);
        ContainerStartError { id: Some(id.clone()), ..failed }
    })?;
    events.normal(object, "Started", "Container started");
    tracing::info!(pod = pod_name(&start.desired.pod), container = action.name, id, attempt = prepared.attempt, reason = %action.reason, "started a container");
    note(start, StepName::Container, &action.name, Cause::done("runtime-shim"));
    Ok(id)
}

/// Has the files of the container written and asks for the variables of services.
async fn prepare<'a>(
    start: &Start<'_>,
    sandbox: &'a Sandbox,
    starting: Starting<'a>,
    images: &'a PresentImages,
) -> Result<Prepared<'a>, ContainerStartError> {
    let Starting { action, container, .. } = starting;
    let files = write_files(start, sandbox, starting).await.map_err(|status| {
        let error = SyncError::from_status("cannot write the container's files", &status);
        ContainerStartError::of_runtime(CONFIG_ERROR, error)
    })?;
    let attempt = if action.attempt_from_logs {
        action.attempt.max(files.next_attempt_by_logs)
    } else {
        action.attempt
    };
    let services = cluster::service_env(start.effects, start.desired)
        .await
        .map_err(|error| ContainerStartError::of(CONFIG_ERROR, "pod-config", error))?;
    let file = |mount: runtime::FileMount| FileMount {
        container_path: mount.container_path,
        host_path: mount.host_path,
        read_only: mount.read_only,
    };
    let files = files.mounts.into_iter().map(file).collect();
    let runtime_handler = handler_for_images(start, images).await?;
    Ok(Prepared {
        container,
        attempt,
        image: &images.own,
        volume_images: &images.volumes.references,
        runtime_handler,
        pod_ips: &sandbox.ips,
        files,
        services,
    })
}

/// The runtime handler of the pod if the container mounts images, else an empty one.
async fn handler_for_images(
    start: &Start<'_>,
    images: &PresentImages,
) -> Result<String, ContainerStartError> {
    if images.volumes.references.is_empty() {
        return Ok(String::new());
    }
    let handler = cluster::runtime_handler(start.effects, &start.desired.pod).await;
    handler.map_err(|error| ContainerStartError::of(CONFIG_ERROR, "pod-config", error))
}

/// Creates a container, unless it would run with an id of the agent. Returns its id.
async fn create(
    start: &Start<'_>,
    sandbox: &Sandbox,
    request: ContainerRequest,
) -> Result<String, ContainerStartError> {
    let metrics = &start.effects.publisher.metrics.image_volumes;
    let volumes = request.image_mounts();
    metrics.requested(volumes);
    let clients = &start.effects.clients;
    let created = create_container::create_container(clients, &sandbox.id, &sandbox.config, request).await;
    let id = created.map_err(|status| {
        if status.message().starts_with(IMAGE_MOUNT_FAILED) {
            metrics.failed(volumes);
        }
        let error = SyncError::from_status("cannot create the container", &status);
        ContainerStartError::of_runtime(CREATE_ERROR, error)
    })?;
    metrics.mounted(volumes);
    let refused = container_ids::refuse_created(start.effects, &id).await;
    refused.map_err(|error| ContainerStartError::of_runtime(CONFIG_ERROR, error))?;
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
            state.runtime.freshness.invalidate();
            state.inbox.wake();
        });
        return Err(SyncError {
            peer_unavailable: true,
            ..SyncError::new(format!("{FAILED}: it has started meanwhile"))
        });
    }
    let request = cri::RemoveContainerRequest { container_id: id.to_owned() };
    let removed = ok_if_gone(cri.clone().remove_container(bounded(request, timeout)).await);
    removed.map_err(|status| SyncError::from_status(FAILED, &status))
}

async fn write_files(
    start: &Start<'_>,
    sandbox: &Sandbox,
    starting: Starting<'_>,
) -> Result<runtime::WriteContainerFilesResponse, Status> {
    let (pod, container) = (&start.desired.pod, starting.container);
    let own_hosts = container.volume_mounts.iter().any(|m| m.mount_path == "/etc/hosts");
    let known = pod.is_host_network() || !sandbox.ips.is_empty();
    let request = runtime::WriteContainerFilesRequest {
        pod: Some(pod_ref(pod)),
        container: starting.action.name.clone(),
        attempt: starting.action.attempt,
        termination_message_path: container.termination_message_path.clone(),
        etc_hosts: (!own_hosts && known).then(|| etc_hosts(start, sandbox)),
    };
    let mut client = start.effects.clients.runtime();
    client.write_container_files(bounded(request, FILES)).await.map(tonic::Response::into_inner)
}

fn etc_hosts(start: &Start<'_>, sandbox: &Sandbox) -> runtime::EtcHosts {
    let pod = &start.desired.pod;
    let names = host_names(pod, &start.effects.context.config.runtime.cluster_domain).unwrap_or_default();
    let alias = |a: &HostAlias| runtime::HostAlias { ip: a.ip.clone(), hostnames: a.hostnames.clone() };
    runtime::EtcHosts {
        host_network: pod.is_host_network(),
        pod_ips: sandbox.ips.clone(),
        hostname: names.hostname,
        domain: names.domain,
        aliases: pod.spec.host_aliases.iter().map(alias).collect(),
    }
}

/// Runs the postStart hook of a container. If it fails, the container is stopped.
pub(super) async fn post_start(
    start: &Start<'_>,
    starting: Starting<'_>,
    id: &str,
) -> Result<(), StartError> {
    let Starting { container, kind, .. } = starting;
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
