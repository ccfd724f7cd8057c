//! Results of a pod's probes: hints for decisions, readiness for the status, causes for people.

use std::collections::BTreeMap;

use keelson_kube_model::{Container, ContainerStatus, Pod, PodStatus};

use super::{PreviousStatus, ProbeKind, ProbeState, ProbeTimes, initial};
use crate::actions::{ProbeHints, ProbeResult};
use crate::explain::{Cause, YOU};
use crate::observation::{ContainerObservation, PodObservation};
use crate::status::Readiness;

/// The probes of one pod, by container name and kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProbeStates {
    /// In the order of their keys. A vector: a pod has few probes, and a map would keep room for more.
    entries: Vec<((String, ProbeKind), ProbeState)>,
}

impl ProbeStates {
    /// No probes yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn find(&self, container: &str, kind: ProbeKind) -> Result<usize, usize> {
        self.entries.binary_search_by(|((name, of), _)| (name.as_str(), *of).cmp(&(container, kind)))
    }

    /// The state of a probe.
    pub fn get(&self, container: &str, kind: ProbeKind) -> Option<&ProbeState> {
        self.find(container, kind).ok().map(|index| &self.entries[index].1)
    }

    /// The state of a probe, to change it.
    pub fn get_mut(&mut self, container: &str, kind: ProbeKind) -> Option<&mut ProbeState> {
        self.find(container, kind).ok().map(|index| &mut self.entries[index].1)
    }

    /// Adds a probe in its first state, unless it is known.
    pub fn add(&mut self, container: &str, kind: ProbeKind) {
        if self.get(container, kind).is_none() {
            self.set(container.to_owned(), kind, ProbeState::new(kind));
        }
    }

    /// Adds a probe or replaces its state.
    fn set(&mut self, container: String, kind: ProbeKind, state: ProbeState) {
        match self.find(&container, kind) {
            Ok(index) => self.entries[index].1 = state,
            Err(index) => {
                self.entries.reserve_exact(1);
                self.entries.insert(index, ((container, kind), state));
            }
        }
    }

    /// Every probe, by container name and then by kind.
    pub fn iter(&self) -> impl Iterator<Item = (&str, ProbeKind, &ProbeState)> {
        self.entries.iter().map(|((container, kind), state)| (container.as_str(), *kind, state))
    }
}

impl FromIterator<((String, ProbeKind), ProbeState)> for ProbeStates {
    fn from_iter<I: IntoIterator<Item = ((String, ProbeKind), ProbeState)>>(entries: I) -> Self {
        let mut states = Self::new();
        entries.into_iter().for_each(|((container, kind), state)| states.set(container, kind, state));
        states
    }
}

/// Containers that may have probes (§13.1): regular ones and sidecars.
fn probed(pod: &Pod) -> impl Iterator<Item = &Container> {
    let sidecars = pod.spec.init_containers.iter().filter(|c| c.is_restartable_init());
    sidecars.chain(&pod.spec.containers)
}

fn status_of<'a>(old: Option<&'a PodStatus>, record: &ContainerObservation) -> Option<&'a ContainerStatus> {
    let old = old?;
    let named = |status: &&ContainerStatus| status.name == record.name;
    let status = old.init_container_statuses.iter().chain(&old.container_statuses).find(named)?;
    let id = status.container_id.rsplit_once("://").map_or("", |(_, id)| id);
    (id == record.id.as_str() && status.state.running.is_some()).then_some(status)
}

/// Readiness of the container instance in the last status; the default if the status is about another instance.
pub fn previous_status(old: Option<&PodStatus>, record: &ContainerObservation) -> PreviousStatus {
    status_of(old, record).map_or_else(PreviousStatus::default, |status| PreviousStatus {
        ready: status.ready,
        started: status.started == Some(true),
    })
}

fn result(
    states: &ProbeStates,
    kind: ProbeKind,
    record: &ContainerObservation,
    old: Option<&PodStatus>,
) -> ProbeResult {
    let state = states.get(&record.name, kind).filter(|s| s.container_id == record.id.as_str());
    state.map_or_else(|| initial(kind, previous_status(old, record)), |state| state.result)
}

/// Whether a running container has started (§13.4).
pub fn started(
    container: &Container,
    record: &ContainerObservation,
    old: Option<&PodStatus>,
    states: &ProbeStates,
) -> bool {
    container.startup_probe.is_none()
        || result(states, ProbeKind::Startup, record, old) == ProbeResult::Success
}

/// Probe results of the running containers, for the next decision (§9.4, §9.5).
pub fn hints(
    pod: &Pod,
    observed: &PodObservation,
    old: Option<&PodStatus>,
    states: &ProbeStates,
) -> ProbeHints {
    let mut hints = ProbeHints::default();
    for container in probed(pod) {
        let Some(record) = observed.current(&container.name).filter(|r| r.is_running()) else { continue };
        let of = |kind: ProbeKind| result(states, kind, record, old);
        if container.liveness_probe.is_some() {
            hints.liveness.insert(record.id.clone(), of(ProbeKind::Liveness));
        }
        if container.startup_probe.is_some() {
            hints.startup.insert(record.id.clone(), of(ProbeKind::Startup));
        }
    }
    hints
}

/// `started` and `ready` of the running containers that have probes (§13.4).
pub fn readiness(
    pod: &Pod,
    observed: &PodObservation,
    old: Option<&PodStatus>,
    states: &ProbeStates,
) -> BTreeMap<String, Readiness> {
    let mut all = BTreeMap::new();
    for container in probed(pod) {
        if container.startup_probe.is_none() && container.readiness_probe.is_none() {
            continue;
        }
        let Some(record) = observed.current(&container.name).filter(|r| r.is_running()) else { continue };
        let ready = container.readiness_probe.is_none()
            || result(states, ProbeKind::Readiness, record, old) == ProbeResult::Success;
        let started = started(container, record, old, states);
        all.insert(container.name.clone(), Readiness { ready, started });
    }
    all
}

/// Why a running container is not ready; `None` if its probes succeed.
pub fn unready_cause(
    container: &Container,
    record: &ContainerObservation,
    old: Option<&PodStatus>,
    states: &ProbeStates,
) -> Option<Cause> {
    let kind = if !started(container, record, old, states) {
        ProbeKind::Startup
    } else if container.readiness_probe.is_some()
        && result(states, ProbeKind::Readiness, record, old) != ProbeResult::Success
    {
        ProbeKind::Readiness
    } else {
        return None;
    };
    let state = states.get(&record.name, kind).filter(|s| s.container_id == record.id.as_str());
    let (word, text) = match kind {
        ProbeKind::Startup => ("StartupProbe", "startup"),
        _ => ("ReadinessProbe", "readiness"),
    };
    if let Some(state) = state.filter(|state| !state.turn_wait.is_empty()) {
        let text = format!("its {text} probe waits for its turn: {}", state.turn_wait);
        return Some(Cause::waiting(word, &text, "pod-sync"));
    }
    let cause = match state.filter(|state| !state.failure.is_empty()) {
        None => Cause::waiting(word, &format!("its {text} probe has not succeeded yet"), "pod-sync"),
        Some(state) => {
            let of = match (kind, kind.of(container)) {
                (ProbeKind::Startup, Some(probe)) if state.failures() > 0 => {
                    format!(" ({} of {})", state.failures(), ProbeTimes::of(probe).failure_threshold)
                }
                _ => String::new(),
            };
            let text = format!("its {text} probe fails{of}: {}", state.failure.trim_end());
            match kind {
                // A failing startup probe is no error before its threshold is reached.
                ProbeKind::Startup => Cause::waiting(word, &text, YOU),
                _ => Cause::failed(word, &text, YOU),
            }
        }
    };
    Some(cause.retried_at(state.map_or(0, |state| state.next_unix_nanos)))
}
