//! Generates the status of a pod from its spec, its observation and its last status (§14.1 to §14.4, §14.6).
//!
//! Parity: as the kubelet, except that lost and unknown records have messages of our own (the reasons are upstream's).

mod containers;
mod resources;

use std::collections::BTreeMap;

use keelson_kube_model::{IpAddress, Pod, PodPhase, PodStatus, compute_qos};

use crate::actions::{ContainerWait, SandboxDecision, is_restarting, sandbox_decision};
use crate::admission::waits_for_admission;
use crate::conditions::{self, ConditionInputs};
use crate::moment::{Moment, SECOND, status_time};
use crate::observation::PodObservation;
use crate::phase::{PhaseInputs, compute_phase};
use crate::reason::Reason;
use crate::resize::ResizeRecord;
use crate::worker::StatusPatch;

pub use containers::{STATUS_UNKNOWN_REASON, finalise_containers};

/// Probe results of a running container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readiness {
    /// The readiness probe succeeded, or there is none.
    pub ready: bool,
    /// The startup probe succeeded, or there is none.
    pub started: bool,
}

impl Default for Readiness {
    /// Without probes a running container is started and ready.
    fn default() -> Self {
        Self { ready: true, started: true }
    }
}

/// Why the last start of each container failed: container name to reason and message. A failed start sets the entry, a
/// successful one removes it.
pub type StartErrors = BTreeMap<String, (String, String)>;

/// Everything that a status depends on in addition to pod and observation.
#[derive(Clone, Debug, Default)]
pub struct StatusInputs<'a> {
    /// No container of the pod will be started any more: the worker is past terminating.
    pub pod_is_terminal: bool,
    /// Why starts failed.
    pub start_errors: StartErrors,
    /// The containers that wait by the last decision; only crash-loop back-offs show in the status.
    pub waiting: &'a [ContainerWait],
    /// Probe results by container name; a container without an entry is ready and started while it runs.
    pub readiness: BTreeMap<String, Readiness>,
    /// `PodReadyToStartContainers`, if the caller knows it better than the observation: right after it created the sandbox.
    pub pod_ready_to_start: Option<bool>,
    /// The status has no condition `PodReadyToStartContainers` (gate `PodReadyToStartContainersCondition`).
    pub without_ready_to_start: bool,
    /// Addresses of the node, primary family first; empty without a control plane.
    pub host_ips: &'a [String],
    /// Whether the node's primary address is IPv4, if `host_ips` is empty; `None` keeps the runtime's order.
    pub v4_first: Option<bool>,
    /// The runtime name of CRI `Version`: the prefix of container ids.
    pub runtime_name: &'a str,
    /// The runtime supports recursive read-only mounts.
    pub recursive_read_only: bool,
    /// The resize of the pod.
    pub resize: Option<&'a ResizeRecord>,
    /// Reason and message of a pending admission.
    pub admission_wait: Option<&'a (String, String)>,
    /// The status fields of an eviction, pre-emption or shutdown.
    pub patch: Option<&'a StatusPatch>,
}

/// Reason of a pod that ran longer than `activeDeadlineSeconds`, and of its event.
pub const DEADLINE: &str = "DeadlineExceeded";
/// Message of a pod that ran longer than `activeDeadlineSeconds`.
pub const DEADLINE_MESSAGE: &str = "Pod was active on the node longer than the specified deadline";

/// Generates the status. `old` is the last one stored for this UID; without one the status in the pod object is used.
pub fn generate_status(
    pod: &Pod,
    observed: &PodObservation,
    old: Option<&PodStatus>,
    inputs: &StatusInputs<'_>,
    at: &Moment,
) -> PodStatus {
    let old = old.unwrap_or(&pod.status);
    let mut status = PodStatus {
        start_time: old.start_time.clone().or_else(|| pod.status.start_time.clone()),
        qos_class: compute_qos(pod).as_str().to_owned(),
        observed_generation: pod.metadata.generation,
        nominated_node_name: pod.status.nominated_node_name.clone(),
        resource_claim_statuses: pod.status.resource_claim_statuses.clone(),
        extended_resource_claim_status: pod.status.extended_resource_claim_status.clone(),
        node_allocatable_resource_claim_statuses: pod.status.node_allocatable_resource_claim_statuses.clone(),
        ..PodStatus::default()
    };
    containers::fill(&mut status, pod, observed, old, inputs);
    resources::fill_pod_level(&mut status, pod, inputs);
    fill_phase(&mut status, pod, observed, old, inputs, at);
    containers::fill_readiness(&mut status, pod, inputs);
    let keeps_sandbox = || sandbox_decision(pod, observed) == SandboxDecision::Keep;
    status.conditions = conditions::generate(&ConditionInputs {
        pod,
        status: &status,
        old,
        ready_to_start: (!inputs.without_ready_to_start)
            .then(|| inputs.pod_ready_to_start.unwrap_or_else(keeps_sandbox)),
        restarting: is_restarting(pod, observed),
        resize: inputs.resize,
        disruption: inputs.patch.filter(|patch| patch.disruption_target),
        now: status_time(at.now_unix_nanos),
    });
    fill_addresses(&mut status, pod, observed, old, inputs);
    status
}

fn fill_phase(
    status: &mut PodStatus,
    pod: &Pod,
    observed: &PodObservation,
    old: &PodStatus,
    inputs: &StatusInputs<'_>,
    at: &Moment,
) {
    let regular_made =
        observed.active().any(|record| pod.spec.containers.iter().any(|c| c.name == record.name));
    // The phase depends on `started` of the sidecars, so readiness is filled in before the phase is computed, and again after.
    containers::fill_readiness(status, pod, inputs);
    let computed = compute_phase(
        pod,
        status,
        &PhaseInputs { pod_is_terminal: inputs.pod_is_terminal, initialised: regular_made },
    );
    let mut phase = computed;
    for earlier in [pod.status.phase(), old.phase()] {
        // A Failed pod stays Failed, even if its containers exit with 0 when an eviction stops them.
        let is_failed = matches!(earlier, PodPhase::Failed);
        if earlier.is_terminal() && (!computed.is_terminal() || is_failed) {
            phase = earlier;
        }
    }
    if phase.as_str() == old.phase {
        let either =
            |ours: &str, theirs: &str| if ours.is_empty() { theirs.to_owned() } else { ours.to_owned() };
        status.reason = either(&old.reason, &pod.status.reason);
        status.message = either(&old.message, &pod.status.message);
    }
    if phase == PodPhase::Pending && waits_for_admission(pod) {
        (status.reason, status.message) = inputs.admission_wait.cloned().unwrap_or_default();
    }
    if !phase.is_terminal() && deadline_exceeded(pod, status, at) {
        phase = PodPhase::Failed;
        status.reason = DEADLINE.to_owned();
        status.message = DEADLINE_MESSAGE.to_owned();
    }
    // An eviction fails the pod regardless of the exit codes, unless the pod had succeeded before.
    if let Some(patch) = inputs.patch
        && old.phase() != PodPhase::Succeeded
    {
        phase = PodPhase::Failed;
        status.reason.clone_from(&patch.reason);
        status.message.clone_from(&patch.message);
    }
    if pod.status.phase().is_terminal() {
        phase = pod.status.phase();
    }
    status.phase = phase.as_str().to_owned();
}

/// When `activeDeadlineSeconds` has passed, unix nanoseconds; `None` without one or before the pod's start is known.
pub fn deadline_unix_nanos(pod: &Pod, status: &PodStatus) -> Option<i64> {
    let seconds = pod.spec.active_deadline_seconds?;
    let start = keelson_kube_model::time::parse_seconds(status.start_time.as_deref()?).ok()?;
    Some(start.saturating_add(seconds).saturating_mul(SECOND))
}

/// The pod has been active longer than it may (§17).
pub fn deadline_exceeded(pod: &Pod, status: &PodStatus, at: &Moment) -> bool {
    deadline_unix_nanos(pod, status).is_some_and(|deadline| at.now_unix_nanos >= deadline)
}

fn is_v4(ip: &str) -> bool {
    ip.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_ipv4())
}

/// At most one address per family, the node's primary family first.
fn one_of_each_family(ips: &[String], primary_is_v4: Option<bool>) -> Vec<String> {
    let Some(first) = ips.first() else { return Vec::new() };
    let v4_first = primary_is_v4.unwrap_or_else(|| is_v4(first));
    let of_family = |v4: bool| ips.iter().find(|ip| is_v4(ip) == v4).cloned();
    of_family(v4_first).into_iter().chain(of_family(!v4_first)).collect()
}

fn fill_addresses(
    status: &mut PodStatus,
    pod: &Pod,
    observed: &PodObservation,
    old: &PodStatus,
    inputs: &StatusInputs<'_>,
) {
    let as_texts = |list: &[IpAddress]| list.iter().map(|entry| entry.ip.clone()).collect::<Vec<_>>();
    let primary = inputs.host_ips.first().map(|ip| is_v4(ip)).or(inputs.v4_first);
    let hosts = if inputs.host_ips.is_empty() { as_texts(&old.host_ips) } else { inputs.host_ips.to_vec() };
    let mut ips = one_of_each_family(&observed.pod_ips(), primary);
    if pod.is_host_network() {
        let known = as_texts(&old.pod_ips);
        ips = if known.is_empty() { hosts.clone() } else { known };
        for host in &hosts {
            if ips.len() == 1 && is_v4(&ips[0]) != is_v4(host) {
                ips.push(host.clone());
            }
        }
    } else if ips.is_empty() && !observed.any_sandbox_ready() {
        ips = as_texts(&old.pod_ips);
    }
    let entries = |ips: &[String]| ips.iter().take(2).map(|ip| IpAddress { ip: ip.clone() }).collect();
    status.pod_ip = ips.first().cloned().unwrap_or_default();
    status.pod_ips = entries(&ips);
    status.host_ip = hosts.first().cloned().unwrap_or_default();
    status.host_ips = entries(&hosts);
}

/// The status of a pod that was rejected at admission (§15.3).
pub fn rejected_status(pod: &Pod, reason: &str, message: &str, at: &Moment) -> PodStatus {
    PodStatus {
        phase: PodPhase::Failed.as_str().to_owned(),
        reason: reason.to_owned(),
        message: format!("Pod was rejected: {message}"),
        qos_class: compute_qos(pod).as_str().to_owned(),
        start_time: pod.status.start_time.clone().or_else(|| status_time(at.now_unix_nanos)),
        observed_generation: pod.metadata.generation,
        ..PodStatus::default()
    }
}

/// The final status of a pod (§14.6): every container that is not known to have terminated is declared lost, and an API pod
/// that is still Pending or Running becomes Failed.
pub fn final_status(pod: &Pod, status: &PodStatus, at: &Moment) -> PodStatus {
    let mut last = status.clone();
    finalise_containers(&mut last);
    if !pod.is_static() && !last.phase().is_terminal() {
        last.phase = PodPhase::Failed.as_str().to_owned();
    }
    if last.phase().is_terminal() {
        conditions::make_unready(&mut last, status_time(at.now_unix_nanos));
    }
    last
}

/// Reason and message of a waiting container in its status; `None` for waits that the status does not show.
fn shown_wait(wait: &ContainerWait) -> Option<(&str, &str)> {
    (wait.reason == Reason::CrashLoopBackOff).then_some((wait.reason.as_str(), wait.message.as_str()))
}

#[cfg(test)]
mod tests;
