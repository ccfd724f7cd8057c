//! Decisions applied to a simulated runtime until no action is left, from any initial state.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use keelson_kube_model::{Pod, SandboxId};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};

use super::*;
use crate::moment::SECOND;
use crate::observation::SandboxObservation;
use crate::restart::exit_allows_restart;
use crate::testing::{at, empty_observation, pod};

/// How a container behaves: exit codes of its first runs; then init containers succeed and others keep running.
type Behaviour = BTreeMap<String, Vec<i32>>;

struct Runtime {
    observed: PodObservation,
    behaviour: Behaviour,
    backoffs: Backoffs,
    now: Moment,
}

impl Runtime {
    fn pass(&mut self, nanos: i64) {
        self.now.now_unix_nanos += nanos;
        self.observed.observed_boot_nanos = self.now.now_unix_nanos;
    }

    fn end(&mut self, matches: impl Fn(&ContainerObservation) -> bool, exit_code: i32) {
        let now = self.now.now_unix_nanos;
        for record in self.observed.containers.iter_mut().filter(|record| record.may_run() && matches(record))
        {
            record.state = ContainerRecordState::Exited;
            record.exit_code = exit_code;
            record.finished_unix_nanos = now;
        }
    }

    fn apply(&mut self, pod: &Pod, actions: &PodActions) {
        if actions.kill_pod.is_some() {
            self.end(|_| true, 137);
            self.observed.sandboxes.iter_mut().for_each(|sandbox| sandbox.ready = false);
        }
        for kill in &actions.kill {
            self.end(|record| record.id == kill.id, 137);
        }
        if let Some(plan) = &actions.create_sandbox {
            let sandbox = SandboxObservation {
                id: SandboxId(format!("made-{}", plan.attempt)),
                attempt: plan.attempt,
                ready: true,
                created_unix_nanos: self.now.now_unix_nanos,
                ips: vec!["10.1.0.9".to_owned()],
                host_network: pod.is_host_network(),
            };
            self.observed.sandboxes.insert(0, sandbox);
        }
        for start in &actions.start {
            self.pass(1);
            if let Some((key, finished)) = &start.backoff {
                self.backoffs.advance(key, *finished, &self.now);
            }
            let (_, container) = pod.container(&start.name).unwrap();
            self.observed.containers.retain(|record| Some(&record.id) != start.replaces.as_ref());
            self.observed.containers.insert(
                0,
                ContainerObservation {
                    id: ContainerId(format!("{}-made-{}", start.name, start.attempt)),
                    name: start.name.clone(),
                    sandbox_id: self.observed.sandboxes[0].id.clone(),
                    attempt: start.attempt,
                    restart_count: start.attempt,
                    state: ContainerRecordState::Running,
                    created_unix_nanos: self.now.now_unix_nanos,
                    started_unix_nanos: self.now.now_unix_nanos,
                    hash: crate::container_hash(container),
                    ..ContainerObservation::default()
                },
            );
        }
        self.observed.sort();
    }

    /// Terminates every running container whose behaviour says so.
    fn live(&mut self, pod: &Pod) {
        for (kind, container) in pod.containers() {
            if !self.observed.records(&container.name).any(ContainerObservation::is_running) {
                continue;
            }
            let runs = self.behaviour.get_mut(&container.name);
            let code = match runs.filter(|runs| !runs.is_empty()) {
                Some(runs) => runs.remove(0),
                None if kind == ContainerKind::Init => 0,
                None => continue,
            };
            self.end(|record| record.name == container.name, code);
        }
    }
}

fn policy() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["Always", "OnFailure", "Never"])
}

fn container(name: String) -> impl Strategy<Value = Value> {
    prop::option::weighted(0.3, policy()).prop_map(move |own| match own {
        Some(own) => json!({"name": name, "image": "app:v1", "restartPolicy": own}),
        None => json!({"name": name, "image": "app:v1"}),
    })
}

fn pods() -> impl Strategy<Value = Pod> {
    let regular = (1..4_usize)
        .prop_flat_map(|count| (0..count).map(|index| container(format!("c{index}"))).collect::<Vec<_>>());
    let init = prop::collection::vec(prop::bool::weighted(0.4), 0..4).prop_map(|sidecars| {
        let one = |(index, sidecar): (usize, bool)| match sidecar {
            true => json!({"name": format!("i{index}"), "image": "app:v1", "restartPolicy": "Always"}),
            false => json!({"name": format!("i{index}"), "image": "app:v1"}),
        };
        sidecars.into_iter().enumerate().map(one).collect::<Vec<_>>()
    });
    (policy(), regular, init, prop::bool::weighted(0.2)).prop_map(|(policy, containers, init, host)| {
        pod(json!({"restartPolicy": policy, "containers": containers, "initContainers": init, "hostNetwork": host}))
    })
}

/// A sandbox: ready, has addresses, uses the node's network.
type AnySandbox = (bool, bool, bool);
/// A container record: which container, in which sandbox, state, exit code, hash.
type AnyRecord = (prop::sample::Index, prop::sample::Index, u8, i32, u8);

fn initial_states() -> impl Strategy<Value = (Vec<AnySandbox>, Vec<AnyRecord>)> {
    let often = prop::bool::weighted(0.8);
    let sandbox = (often, prop::bool::weighted(0.7), prop::bool::weighted(0.2));
    let code = prop::sample::select(vec![0, 1, 137]);
    let record = (any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..5_u8, code, 0..4_u8);
    (prop::collection::vec(sandbox, 0..3), prop::collection::vec(record, 0..6))
}

fn observation(pod: &Pod, sandboxes: &[AnySandbox], records: &[AnyRecord]) -> PodObservation {
    let mut seen = empty_observation();
    for (attempt, (ready, has_ip, host)) in sandboxes.iter().enumerate() {
        seen = seen.sandbox(u32::try_from(attempt).unwrap(), *ready).edit_sandbox(|sandbox| {
            sandbox.host_network = *host;
            if !has_ip {
                sandbox.ips.clear();
            }
        });
    }
    let all: Vec<&Container> = pod.containers().map(|(_, container)| container).collect();
    // A later record is in the same or a later sandbox.
    let mut records = records.to_vec();
    records.sort_by_key(|(_, place, ..)| std::cmp::Reverse(place.index(sandboxes.len().max(1))));
    for (which, place, state, code, hash) in &records {
        let container = which.get(&all);
        let sandbox_id =
            if sandboxes.is_empty() { SandboxId::default() } else { place.get(&seen.0.sandboxes).id.clone() };
        seen = match state {
            0 | 1 => seen.running(&container.name),
            2 => seen.exited(&container.name, *code),
            3 => seen.created(&container.name),
            _ => seen.unknown(&container.name),
        }
        .edit(|record| {
            record.sandbox_id = sandbox_id;
            record.hash = match hash {
                0 => "1".to_owned(),
                1 => String::new(),
                _ => crate::container_hash(container),
            };
        });
    }
    seen.0.sort();
    seen.0
}

/// Invariants of every decision.
fn check(pod: &Pod, seen: &PodObservation, actions: &PodActions) -> Result<(), TestCaseError> {
    let starts: Vec<&str> = actions.start.iter().map(|start| start.name.as_str()).collect();
    let unique: BTreeSet<&str> = starts.iter().copied().collect();
    prop_assert_eq!(unique.len(), starts.len(), "nothing starts twice");
    let waits: Vec<&str> = actions.waiting.iter().map(|wait| wait.name.as_str()).collect();
    prop_assert!(waits.iter().all(|name| !starts.contains(name)), "what waits does not start");
    for name in &starts {
        let running = seen.current(name).filter(|record| record.is_running());
        let killed =
            |id: &ContainerId| actions.kill_pod.is_some() || actions.kill.iter().any(|k| k.id == *id);
        prop_assert!(running.is_none_or(|record| killed(&record.id)), "{} is kept and started", name);
    }
    for kill in &actions.kill {
        let record = seen.containers.iter().find(|record| record.id == kill.id);
        prop_assert!(record.is_some_and(|record| !record.has_exited()), "only what may run is killed");
    }
    prop_assert!(actions.kill_pod.is_none() || actions.kill.is_empty(), "the whole pod or single containers");
    let has_work =
        actions.create_sandbox.is_some() || !actions.start.is_empty() || !actions.waiting.is_empty();
    prop_assert!(!actions.terminal || !has_work, "a terminal pod starts nothing");
    let keeps = sandbox_decision(pod, seen) == SandboxDecision::Keep;
    prop_assert!(
        actions.start.is_empty() || keeps || actions.create_sandbox.is_some(),
        "no start without a sandbox"
    );
    let places: Vec<_> =
        starts.iter().map(|name| pod.containers().position(|(_, c)| c.name == *name)).collect();
    prop_assert!(places.is_sorted(), "init before regular, each in spec order");
    let init = actions.start.iter().filter(|start| start.kind == ContainerKind::Init).count();
    prop_assert!(init <= 1, "one init container at a time");
    Ok(())
}

/// Invariants of the final state.
fn check_end(pod: &Pod, seen: &PodObservation, actions: &PodActions) -> Result<(), TestCaseError> {
    if actions.terminal {
        prop_assert!(!seen.anything_running(), "no container runs in a terminal pod");
        return Ok(());
    }
    prop_assert_eq!(seen.sandboxes.iter().filter(|sandbox| sandbox.ready).count(), 1);
    let mut some_runs = false;
    let running: Vec<&str> =
        seen.containers.iter().filter(|r| r.may_run()).map(|r| r.name.as_str()).collect();
    let unique: BTreeSet<&str> = running.iter().copied().collect();
    prop_assert_eq!(unique.len(), running.len(), "one instance of each container");
    for container in &pod.spec.containers {
        let record = seen.current(&container.name).expect("every regular container was started");
        some_runs |= record.is_running();
        let over = record.has_exited() && !exit_allows_restart(pod, container, record.exit_code);
        prop_assert!(record.is_running() || over, "{} is {:?}", container.name, record.state);
    }
    prop_assert!(some_runs, "a pod that is not terminal has a running container");
    for container in pod.spec.init_containers.iter().filter(|container| container.is_restartable_init()) {
        prop_assert!(seen.current(&container.name).is_some_and(ContainerObservation::is_running));
    }
    Ok(())
}

fn count(counts: &RefCell<BTreeMap<String, usize>>, actions: &PodActions) {
    let mut counts = counts.borrow_mut();
    let mut add = |what: String| *counts.entry(what).or_default() += 1;
    actions.kill_pod.iter().for_each(|reason| add(format!("kill pod: {reason}")));
    actions.create_sandbox.iter().for_each(|plan| add(format!("sandbox: {}", plan.reason)));
    actions.kill.iter().for_each(|kill| add(format!("kill: {}", kill.reason)));
    actions.start.iter().for_each(|start| add(format!("start {}: {}", start.kind, start.reason)));
    actions.waiting.iter().for_each(|wait| add(format!("wait: {}", wait.reason)));
    if actions.terminal {
        add("terminal".to_owned());
    }
}

/// Decides and applies until no action is left, at most 80 times.
fn run(pod: &Pod, runtime: &mut Runtime, seen: &mut impl FnMut(&PodActions)) -> Result<(), TestCaseError> {
    let hints = ProbeHints::without_probes();
    for _ in 0..80 {
        let actions = compute_pod_actions(pod, &runtime.observed, &hints, &runtime.backoffs, &runtime.now);
        seen(&actions);
        check(pod, &runtime.observed, &actions)?;
        runtime.apply(pod, &actions);
        let again = compute_pod_actions(pod, &runtime.observed, &hints, &runtime.backoffs, &runtime.now);
        let repeated = again.start.iter().any(|s| actions.start.iter().any(|first| first.name == s.name));
        prop_assert!(
            !repeated && again.create_sandbox.is_none(),
            "actions are not repeated after they were carried out"
        );
        prop_assert!(again.kill.is_empty() || actions.create_sandbox.is_some() || actions.kill_pod.is_none());
        if again.terminal {
            runtime.apply(pod, &again);
            let end = compute_pod_actions(pod, &runtime.observed, &hints, &runtime.backoffs, &runtime.now);
            prop_assert!(end.terminal, "what is over stays over");
            return check_end(pod, &runtime.observed, &end);
        }
        let before = runtime.observed.clone();
        runtime.pass(SECOND);
        runtime.live(pod);
        let wake = again.next_wake_unix_nanos().unwrap_or(0);
        runtime.now.now_unix_nanos = runtime.now.now_unix_nanos.max(wake);
        let resting = again.is_empty() && again.waiting.is_empty();
        if resting && runtime.observed.containers == before.containers {
            return check_end(pod, &before, &again);
        }
    }
    Err(TestCaseError::fail("80 rounds were not enough"))
}

/// Actions that a run of the test must have covered.
const NEEDED: [&str; 16] = [
    "kill: DuplicateContainer",
    "sandbox: NoSandbox",
    "sandbox: SeveralSandboxesReady",
    "sandbox: SandboxNotReady",
    "sandbox: SandboxNetworkModeChanged",
    "sandbox: SandboxWithoutAddress",
    "kill pod: PodCompleted",
    "kill pod: RestartNotAllowed",
    "kill pod: InitContainerFailed",
    "kill: ContainerDefinitionChanged",
    "kill: ContainerStateUnknown",
    "start init: ContainerNotStarted",
    "start sidecar: ContainerExited",
    "start regular: ContainerExited",
    "wait: CrashLoopBackOff",
    "terminal",
];

#[test]
fn decisions_converge_from_any_state_and_never_start_a_kept_container() {
    let counts: RefCell<BTreeMap<String, usize>> = RefCell::default();
    let exits = prop::collection::vec(prop::sample::select(vec![0, 1, 2]), 0..3);
    let behaviours = prop::collection::vec(exits, 8);
    let mut runner = TestRunner::new(Config { cases: 1500, ..Config::with_source_file(file!()) });
    let result =
        runner.run(&(pods(), initial_states(), behaviours), |(pod, (sandboxes, records), behaviours)| {
            let names = pod.containers().map(|(_, container)| container.name.clone());
            let mut runtime = Runtime {
                observed: observation(&pod, &sandboxes, &records),
                behaviour: names.zip(behaviours).collect(),
                backoffs: Backoffs::default(),
                now: at(600),
            };
            run(&pod, &mut runtime, &mut |actions| count(&counts, actions))
        });
    println!("reached: {:#?}", counts.borrow());
    result.unwrap();
    for needed in NEEDED {
        let reached = counts.borrow().get(needed).copied().unwrap_or(0);
        assert!(reached >= 5, "{needed:?} was reached {reached} times only");
    }
}
