//! The phase of a pod (§14.3).

use keelson_kube_model::{Container, ContainerStatus, Pod, PodPhase, PodStatus};

use crate::restart::exit_allows_restart;

/// What the phase depends on beside the container statuses.
#[derive(Clone, Copy, Debug, Default)]
pub struct PhaseInputs {
    /// No container will be started any more.
    pub pod_is_terminal: bool,
    /// Some regular container has a record in the ready sandbox.
    pub initialised: bool,
}

#[derive(Default)]
struct Counts {
    init_failed: usize,
    pending_init: usize,
    pending_sidecar: usize,
    unknown: usize,
    running: usize,
    waiting: usize,
    stopped: usize,
    /// Stopped for good.
    finals: usize,
    /// Ended with 0.
    succeeded: usize,
}

/// Computes the phase from the container statuses of `status`, whose `started` must be filled in.
pub fn compute_phase(pod: &Pod, status: &PodStatus, inputs: &PhaseInputs) -> PodPhase {
    let mut counts = Counts::default();
    for container in &pod.spec.init_containers {
        let entry = find(&status.init_container_statuses, container);
        if container.is_restartable_init() {
            count_sidecar(&mut counts, entry);
        } else {
            count_init(&mut counts, pod, container, entry);
        }
    }
    for container in &pod.spec.containers {
        count_regular(&mut counts, pod, container, find(&status.container_statuses, container));
    }
    decide(pod, &counts, inputs)
}

fn find<'a>(list: &'a [ContainerStatus], container: &Container) -> Option<&'a ContainerStatus> {
    list.iter().find(|entry| entry.name == container.name)
}

fn count_init(counts: &mut Counts, pod: &Pod, container: &Container, entry: Option<&ContainerStatus>) {
    let ended = entry.and_then(|entry| {
        let before = || entry.state.waiting.as_ref().and(entry.last_state.terminated.as_ref());
        entry.state.terminated.as_ref().or_else(before)
    });
    match ended {
        None => counts.pending_init += 1,
        Some(ended) => {
            let bad = ended.exit_code != 0 || ended.reason == "OOMKilled";
            if bad && !exit_allows_restart(pod, container, ended.exit_code) {
                counts.init_failed += 1;
            }
        }
    }
}

fn count_sidecar(counts: &mut Counts, entry: Option<&ContainerStatus>) {
    match entry {
        None => counts.unknown += 1,
        Some(entry) if entry.state.running.is_some() => {
            counts.running += 1;
            if entry.started != Some(true) {
                counts.pending_sidecar += 1;
            }
        }
        Some(entry) if entry.state.terminated.is_some() || entry.last_state.terminated.is_some() => {}
        Some(_) => {
            counts.pending_sidecar += 1;
            counts.waiting += 1;
        }
    }
}

fn count_regular(counts: &mut Counts, pod: &Pod, container: &Container, entry: Option<&ContainerStatus>) {
    let Some(entry) = entry else {
        counts.unknown += 1;
        return;
    };
    if entry.state.running.is_some() {
        counts.running += 1;
        return;
    }
    let ended = entry.state.terminated.as_ref().or(entry.last_state.terminated.as_ref());
    let Some(ended) = ended else {
        counts.waiting += 1;
        return;
    };
    counts.stopped += 1;
    if !exit_allows_restart(pod, container, ended.exit_code) {
        counts.finals += 1;
    }
    if entry.state.terminated.as_ref().is_some_and(|ended| ended.exit_code == 0) {
        counts.succeeded += 1;
    }
}

/// The first row that holds.
fn decide(pod: &Pod, counts: &Counts, inputs: &PhaseInputs) -> PodPhase {
    let ended = counts.running == 0 && counts.stopped > 0 && counts.unknown == 0;
    let good_or_bad = if counts.succeeded == counts.stopped { PodPhase::Succeeded } else { PodPhase::Failed };
    if counts.init_failed > 0 {
        PodPhase::Failed
    } else if counts.pending_init > 0
        || (counts.pending_sidecar > 0 && !inputs.initialised)
        || counts.waiting > 0
    {
        PodPhase::Pending
    } else if counts.running > 0 && counts.unknown == 0 {
        PodPhase::Running
    } else if ended && inputs.pod_is_terminal && !pod.is_static() {
        good_or_bad
    } else if ended && counts.finals < counts.stopped {
        PodPhase::Running
    } else if ended {
        good_or_bad
    } else {
        PodPhase::Pending
    }
}
