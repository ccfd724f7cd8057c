//! The sandbox of a pod that starts.

use std::sync::Arc;

use k8s_cri::v1 as cri;
use keelson_pod_sync_core::actions::SandboxPlan;
use keelson_pod_sync_core::config::remedy;
use keelson_pod_sync_core::explain::{Cause, StepName, YOU};
use keelson_pod_sync_core::observation::{PodObservation, SandboxObservation};
use tonic::Status;

use super::request::{node_dns, sandbox_request};
use super::{FILES, Start, note};
use crate::effects::clients::bounded;
use crate::effects::cluster;
use crate::error::SyncError;
use crate::publish::StatusFacts;
use crate::publish::objects::{pod_name, pod_object};

/// A sandbox that containers can be started in.
pub(super) struct Sandbox {
    pub(super) id: String,
    pub(super) ips: Vec<String>,
    pub(super) config: cri::PodSandboxConfig,
}

/// The existing sandbox of the pod, or a new one.
pub(super) async fn sandbox(start: &Start<'_>, plan: Option<&SandboxPlan>) -> Result<Sandbox, SyncError> {
    // An existing sandbox has its handler already.
    let runtime_handler = match plan {
        Some(_) => cluster::runtime_handler(start.effects, &start.desired.pod)
            .await
            .map_err(|error| report_error_of(start, error, "pod-config"))?,
        None => String::new(),
    };
    let attempt =
        plan.map_or_else(|| start.observed.newest_sandbox().map_or(0, |s| s.attempt), |p| p.attempt);
    let node_dns = node_dns(start).await;
    // A sandbox with a user namespace is of a handler that supports it.
    let can_have_users = plan.is_none() || supports_user_namespaces(start, &runtime_handler);
    let users = start.mounts.user_namespace.filter(|_| can_have_users);
    let has_user_namespace = start.desired.pod.spec.host_users == Some(false);
    let metrics = &start.effects.publisher.metrics;
    if plan.is_some() {
        metrics.pod_starts(has_user_namespace);
    }
    let config = sandbox_request(start, (attempt, users), &node_dns).map_err(|text| {
        if plan.is_some() {
            metrics.pod_failed(has_user_namespace);
        }
        report_error(start, SyncError::new(text))
    })?;
    let Some(plan) = plan else {
        let ready = start.observed.ready_sandbox().ok_or_else(|| SyncError::new("the sandbox is gone"))?;
        let id = ready.id.as_str().to_owned();
        return Ok(Sandbox { id, ips: start.observed.pod_ips(), config });
    };
    let request = cri::RunPodSandboxRequest { config: Some(config.clone()), runtime_handler };
    let id = run(start, request).await?;
    let made = read(start, &id, plan.attempt).await.map_err(|status| report_unreadable(start, &status))?;
    let ips = record(start, made);
    note(start, StepName::Sandbox, "", Cause::done("runtime-shim"));
    tracing::debug!(pod = pod_name(&start.desired.pod), id, attempt = plan.attempt, reason = %plan.reason, "made a sandbox");
    Ok(Sandbox { id, ips, config })
}

fn supports_user_namespaces(start: &Start<'_>, runtime_handler: &str) -> bool {
    start.effects.registry.node.runtime.borrow().user_namespace_handlers.contains(runtime_handler)
}

/// Has the runtime make a sandbox. Returns its id.
async fn run(start: &Start<'_>, request: cri::RunPodSandboxRequest) -> Result<String, SyncError> {
    note(start, StepName::Sandbox, "", Cause::working("runtime-shim", "the runtime is making the sandbox"));
    let (effects, metrics) = (start.effects, &start.effects.publisher.metrics);
    let has_user_namespace = start.desired.pod.spec.host_users == Some(false);
    let timeout = effects.clients.cri_timeout * 2;
    match effects.clients.cri().run_pod_sandbox(bounded(request, timeout)).await {
        Ok(response) => Ok(response.into_inner().pod_sandbox_id),
        Err(status) => {
            let mut error = SyncError::from_status("Failed to create pod sandbox", &status);
            if let Some(remedy) = remedy(&error.message) {
                error.message = format!("{}: {remedy}", error.message);
            }
            if !error.peer_unavailable {
                metrics.pod_failed(has_user_namespace);
            }
            Err(report_error(start, error))
        }
    }
}

async fn read(start: &Start<'_>, id: &str, attempt: u32) -> Result<SandboxObservation, Status> {
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

/// Adds the sandbox that was just made to the observation, so that the status shows it at once. Returns the addresses of the pod.
fn record(start: &Start<'_>, sandbox: SandboxObservation) -> Vec<String> {
    let mut known: PodObservation = (**start.observed).clone();
    known.sandboxes.insert(0, sandbox);
    // Only the status uses this: the next decision is based on a fresh read.
    let ips = known.pod_ips();
    start.effects.registry.with(&start.job.uid, |state| state.runtime.observed = Arc::new(known));
    start
        .effects
        .publisher
        .publish(&start.job.uid, &StatusFacts { sandbox_made: Some(true), ..StatusFacts::default() });
    ips
}

fn report_unreadable(start: &Start<'_>, status: &Status) -> SyncError {
    let error = SyncError::from_status("Unable to get pod sandbox status", status);
    if !error.peer_unavailable {
        let object = pod_object(&start.desired.pod);
        start.effects.context.events.warning(object, "FailedPodSandBoxStatus", error.message.clone());
    }
    report_error(start, error)
}

fn report_error(start: &Start<'_>, error: SyncError) -> SyncError {
    report_error_of(start, error, "runtime-shim")
}

/// `peer` has to act while it is unavailable. An answer is about the pod or the node.
fn report_error_of(start: &Start<'_>, error: SyncError, peer: &'static str) -> SyncError {
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
