//! The phase of a pod (§14.3).

use keelson_kube_model::{Container, ContainerStateTerminated, ContainerStatus, Pod, PodPhase, PodStatus};

use crate::restart::{RESTARTING_REASON, exit_allows_restart};

/// What the phase depends on in addition to the container statuses.
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
    /// Stopped and will not restart.
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

/// Whether it restarts, by its rules and policies or because all containers of the pod restart.
fn starts_again(pod: &Pod, container: &Container, ended: &ContainerStateTerminated) -> bool {
    ended.reason == RESTARTING_REASON || exit_allows_restart(pod, container, ended.exit_code)
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
            if bad && !starts_again(pod, container, ended) {
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
        Some(_) => counts.waiting += 1,
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
    if !starts_again(pod, container, ended) {
        counts.finals += 1;
    }
    if entry.state.terminated.as_ref().is_some_and(|ended| ended.exit_code == 0) {
        counts.succeeded += 1;
    }
}

/// The first matching row of the table.
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::{from_file, pod};

    fn running(started: bool) -> Value {
        json!({"state": {"running": {}}, "started": started})
    }

    fn ended(code: i32) -> Value {
        json!({"state": {"terminated": {"exitCode": code}}})
    }

    fn waiting() -> Value {
        json!({"state": {"waiting": {"reason": "ContainerCreating"}}})
    }

    /// In back-off after a termination.
    fn backing_off(code: i32) -> Value {
        json!({"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {"exitCode": code}}})
    }

    /// The statuses of containers with these names; `null` has none.
    fn statuses(names: &[&str], list: &[Value]) -> Vec<ContainerStatus> {
        let named = names.iter().zip(list).filter(|(_, status)| !status.is_null());
        let complete = |(name, status): (&&str, &Value)| {
            let mut status = status.clone();
            status["name"] = json!(name);
            serde_json::from_value(status).unwrap()
        };
        named.map(complete).collect()
    }

    /// Init container `i`, sidecar `s`, containers `a` and `b`, as far as statuses are given for them.
    struct Case {
        policy: &'static str,
        init: Option<Value>,
        sidecar: Option<Value>,
        regular: Vec<Value>,
    }

    impl Case {
        fn of(policy: &'static str, regular: &[Value]) -> Self {
            Self { policy, init: None, sidecar: None, regular: regular.to_vec() }
        }

        fn init(self, status: Value) -> Self {
            Self { init: Some(status), ..self }
        }

        fn sidecar(self, status: Value) -> Self {
            Self { sidecar: Some(status), ..self }
        }

        fn phase_of(&self, inputs: &PhaseInputs, file: bool) -> PodPhase {
            let mut init = Vec::new();
            let mut init_statuses = Vec::new();
            if let Some(status) = &self.init {
                init.push(json!({"name": "i"}));
                init_statuses.extend(statuses(&["i"], std::slice::from_ref(status)));
            }
            if let Some(status) = &self.sidecar {
                init.push(json!({"name": "s", "restartPolicy": "Always"}));
                init_statuses.extend(statuses(&["s"], std::slice::from_ref(status)));
            }
            let names = &["a", "b"][..self.regular.len()];
            let containers: Vec<Value> = names.iter().map(|name| json!({"name": name})).collect();
            let spec =
                json!({"restartPolicy": self.policy, "initContainers": init, "containers": containers});
            let pod = if file { from_file(pod(spec)) } else { pod(spec) };
            let status = PodStatus {
                init_container_statuses: init_statuses,
                container_statuses: statuses(names, &self.regular),
                ..PodStatus::default()
            };
            compute_phase(&pod, &status, inputs)
        }

        fn phase(&self) -> PodPhase {
            self.phase_of(&PhaseInputs { pod_is_terminal: false, initialised: true }, false)
        }
    }

    #[test]
    fn the_phase_follows_from_regular_containers() {
        for (policy, regular, phase) in [
            ("Always", vec![running(true), running(false)], PodPhase::Running),
            ("Always", vec![running(true), waiting()], PodPhase::Pending),
            ("Always", vec![waiting(), waiting()], PodPhase::Pending),
            ("Always", vec![running(true), Value::Null], PodPhase::Pending),
            ("Always", vec![ended(0), Value::Null], PodPhase::Pending),
            ("Always", vec![ended(0), running(true)], PodPhase::Running),
            ("Always", vec![ended(0), ended(1)], PodPhase::Running),
            ("Always", vec![backing_off(1)], PodPhase::Running),
            ("OnFailure", vec![ended(0), ended(0)], PodPhase::Succeeded),
            ("OnFailure", vec![ended(0), backing_off(1)], PodPhase::Running),
            ("Never", vec![ended(0), ended(0)], PodPhase::Succeeded),
            ("Never", vec![ended(0), ended(3)], PodPhase::Failed),
            ("Never", vec![ended(0), running(true)], PodPhase::Running),
            ("Never", vec![], PodPhase::Pending),
        ] {
            assert_eq!(Case::of(policy, &regular).phase(), phase, "{policy} {regular:?}");
        }
    }

    #[test]
    fn a_terminated_pod_has_a_final_phase_unless_it_is_static() {
        let terminal = PhaseInputs { pod_is_terminal: true, initialised: true };
        for (regular, file, phase) in [
            (vec![ended(0), ended(0)], false, PodPhase::Succeeded),
            (vec![ended(0), ended(137)], false, PodPhase::Failed),
            (vec![ended(0), ended(137)], true, PodPhase::Running),
            (vec![running(true), ended(0)], false, PodPhase::Running),
        ] {
            let case = Case::of("Always", &regular);
            assert_eq!(case.phase_of(&terminal, file), phase, "{regular:?} static: {file}");
        }
    }

    #[test]
    fn the_phase_is_pending_until_init_containers_have_succeeded() {
        let oom = json!({"state": {"terminated": {"exitCode": 0, "reason": "OOMKilled"}}});
        for (policy, init, phase) in [
            ("Always", Value::Null, PodPhase::Pending),
            ("Always", running(true), PodPhase::Pending),
            ("Always", waiting(), PodPhase::Pending),
            ("Always", backing_off(1), PodPhase::Running),
            ("Always", ended(0), PodPhase::Running),
            ("Never", ended(0), PodPhase::Running),
            ("Never", ended(1), PodPhase::Failed),
            ("Never", oom, PodPhase::Failed),
        ] {
            let case = Case::of(policy, &[running(true)]).init(init.clone());
            assert_eq!(case.phase(), phase, "{policy} {init}");
        }
    }

    #[test]
    fn the_phase_waits_for_sidecars_to_start_and_ignores_their_exit() {
        let initialised = |initialised| PhaseInputs { pod_is_terminal: false, initialised };
        for (sidecar, regular, is_initialised, phase) in [
            (running(true), running(true), false, PodPhase::Running),
            // Not started yet: Pending until a regular container has a record.
            (running(false), running(true), false, PodPhase::Pending),
            (running(false), running(true), true, PodPhase::Running),
            (waiting(), running(true), true, PodPhase::Pending),
            (Value::Null, running(true), true, PodPhase::Pending),
            (ended(1), running(true), false, PodPhase::Running),
            (backing_off(1), running(true), false, PodPhase::Running),
            // The pod has not ended while a sidecar runs, and has when only sidecars have failed.
            (running(true), ended(0), true, PodPhase::Running),
            (ended(137), ended(0), true, PodPhase::Succeeded),
            (backing_off(137), ended(0), true, PodPhase::Succeeded),
            (ended(0), ended(1), true, PodPhase::Failed),
        ] {
            let case = Case::of("Never", std::slice::from_ref(&regular)).sidecar(sidecar.clone());
            let phase_now = case.phase_of(&initialised(is_initialised), false);
            assert_eq!(phase_now, phase, "{sidecar} {regular} initialised: {is_initialised}");
        }
    }
}
