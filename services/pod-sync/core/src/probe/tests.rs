use keelson_testkit::Reached;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::actions::ProbeHints;
use crate::explain::{StepState, YOU};
use crate::observation::PodObservation;
use crate::status::{Readiness, StatusInputs, generate_status};
use crate::testing::{ObservationBuilder, at, in_sandbox, pod};
use keelson_kube_model::{Pod, PodStatus};

fn times(fields: Value) -> ProbeTimes {
    ProbeTimes::of(&serde_json::from_value(fields).unwrap())
}

fn record(seen: &ObservationBuilder) -> ContainerObservation {
    seen.0.current("a").unwrap().clone()
}

/// Inputs for the container `a`, which has started, when nothing is due.
fn inputs<'a>(running: Option<&'a ContainerObservation>, at: &'a Moment) -> ProbeInputs<'a> {
    ProbeInputs { running, started: true, previous: PreviousStatus::default(), due: false, spread: 0.5, at }
}

fn change(state: &mut ProbeState, kind: ProbeKind, times: &ProbeTimes, outcomes: &str) -> Vec<bool> {
    let id = state.container_id.clone();
    let one = |o: char| state.record_outcome(kind, times, &id, o == '+', "probe failed").changed;
    outcomes.chars().map(one).collect()
}

fn taken(kind: ProbeKind) -> ProbeState {
    let mut state = ProbeState::new(kind);
    let seen = record(&in_sandbox().running("a"));
    let next = state.next_probe(kind, &times(json!({})), &inputs(Some(&seen), &at(1)));
    assert_eq!(next, NextProbe::Probe, "a container that starts is probed at once");
    state
}

#[test]
fn each_probe_kind_has_its_name_and_spec_field() {
    let probe = |seconds: i32| json!({"periodSeconds": seconds});
    let all: Container = serde_json::from_value(json!({"name": "a", "startupProbe": probe(1),
        "livenessProbe": probe(2), "readinessProbe": probe(3)}))
    .unwrap();
    let found = ProbeKind::ALL.map(|kind| (kind.as_str(), kind.of(&all).and_then(|p| p.period_seconds)));
    assert_eq!(found, [("Startup", Some(1)), ("Liveness", Some(2)), ("Readiness", Some(3))]);
    assert!(ProbeKind::ALL.iter().all(|kind| kind.of(&Container::default()).is_none()));
}

#[test]
fn missing_or_zero_probe_fields_have_upstreams_defaults() {
    let defaults = ProbeTimes {
        initial_delay_seconds: 0,
        period_seconds: 10,
        timeout_seconds: 1,
        success_threshold: 1,
        failure_threshold: 3,
    };
    assert_eq!(times(json!({})), defaults);
    assert_eq!(times(json!({"periodSeconds": 0, "timeoutSeconds": 0, "failureThreshold": 0})), defaults);
    assert_eq!(times(json!({"periodSeconds": 3})).period_nanos(), 3 * SECOND);
}

#[test]
fn initial_probe_results_by_kind() {
    for (kind, result) in [
        (ProbeKind::Liveness, ProbeResult::Success),
        (ProbeKind::Readiness, ProbeResult::Failure),
        (ProbeKind::Startup, ProbeResult::Unknown),
    ] {
        assert_eq!(taken(kind).result, result, "{kind:?}");
    }
}

#[test]
fn failure_threshold_is_three_and_success_threshold_one_by_default() {
    let defaults = times(json!({}));
    let mut state = taken(ProbeKind::Readiness);
    assert_eq!(change(&mut state, ProbeKind::Readiness, &defaults, "+"), [true]);
    let changes = change(&mut state, ProbeKind::Readiness, &defaults, "--+---+");
    assert_eq!(changes, [false, false, false, false, false, true, true]);
    assert!(state.failure.is_empty());
}

#[test]
fn success_threshold_counts_consecutive_successes() {
    let two = times(json!({"successThreshold": 2}));
    let mut state = taken(ProbeKind::Readiness);
    assert_eq!(change(&mut state, ProbeKind::Readiness, &two, "+-+"), [false, false, false]);
    assert_eq!(change(&mut state, ProbeKind::Readiness, &two, "+"), [true]);
}

#[test]
fn a_failed_liveness_or_any_startup_result_is_final_for_the_instance() {
    let defaults = times(json!({}));
    let (first, second) = (in_sandbox().running("a"), in_sandbox().exited("a", 1).running("a"));
    for (kind, outcomes) in
        [(ProbeKind::Liveness, "---"), (ProbeKind::Startup, "---"), (ProbeKind::Startup, "--+")]
    {
        let mut state = taken(kind);
        assert_eq!(change(&mut state, kind, &defaults, outcomes), [false, false, true], "{kind:?}");
        let (now, old) = (at(20), record(&first));
        let due = ProbeInputs { due: true, ..inputs(Some(&old), &now) };
        assert_eq!(state.next_probe(kind, &defaults, &due), NextProbe::Hold, "{kind:?}");
        assert_eq!(change(&mut state, kind, &defaults, "+-"), [false, false], "a late outcome");
        let (id, new) = (state.container_id.clone(), record(&second));
        assert_eq!(state.next_probe(kind, &defaults, &inputs(Some(&new), &now)), NextProbe::Probe);
        assert_ne!(state.container_id, id);
        assert_eq!(state.result, initial(kind, PreviousStatus::default()));
        assert!(!state.record_outcome(kind, &defaults, &id, false, "").keep, "of the instance before");
    }
    let mut state = taken(ProbeKind::Liveness);
    change(&mut state, ProbeKind::Liveness, &defaults, "++");
    let (now, old) = (at(20), record(&first));
    let due = ProbeInputs { due: true, ..inputs(Some(&old), &now) };
    assert_eq!(
        state.next_probe(ProbeKind::Liveness, &defaults, &due),
        NextProbe::Probe,
        "a success holds nothing"
    );
}

#[test]
fn other_probes_wait_for_the_startup_probe_and_are_then_due() {
    let seen = record(&in_sandbox().running("a"));
    let (defaults, now) = (times(json!({})), at(1));
    for kind in [ProbeKind::Liveness, ProbeKind::Readiness] {
        let mut state = ProbeState::new(kind);
        let waits = ProbeInputs { started: false, due: true, ..inputs(Some(&seen), &now) };
        assert_eq!(state.next_probe(kind, &defaults, &waits), NextProbe::Hold);
        assert_eq!(state.next_probe(kind, &defaults, &inputs(Some(&seen), &now)), NextProbe::Probe);
        assert_eq!(
            state.next_probe(kind, &defaults, &inputs(Some(&seen), &now)),
            NextProbe::Keep,
            "not due twice"
        );
    }
    let mut startup = ProbeState::new(ProbeKind::Startup);
    let waits = ProbeInputs { started: false, ..inputs(Some(&seen), &now) };
    assert_eq!(startup.next_probe(ProbeKind::Startup, &defaults, &waits), NextProbe::Probe);
}

#[test]
fn initial_delay_counts_from_the_containers_start() {
    let delayed = times(json!({"initialDelaySeconds": 5}));
    let seen = record(&in_sandbox().running("a"));
    let mut state = ProbeState::new(ProbeKind::Readiness);
    let next = |state: &mut ProbeState, second, due| {
        let now = at(second);
        state.next_probe(ProbeKind::Readiness, &delayed, &ProbeInputs { due, ..inputs(Some(&seen), &now) })
    };
    assert_eq!(next(&mut state, 2, true), NextProbe::After(3 * SECOND));
    assert_eq!(state.next_unix_nanos, at(5).now_unix_nanos);
    assert_eq!(next(&mut state, 5, true), NextProbe::Probe);
    let mut set_back = ProbeState::new(ProbeKind::Readiness);
    assert_eq!(next(&mut set_back, -1000, true), NextProbe::After(5 * SECOND), "the clock was set back");
}

#[test]
fn a_container_that_does_not_run_is_not_probed() {
    let mut state = taken(ProbeKind::Readiness);
    let now = at(50);
    let nothing = ProbeInputs { due: true, ..inputs(None, &now) };
    assert_eq!(state.next_probe(ProbeKind::Readiness, &times(json!({})), &nothing), NextProbe::Hold);
}

/// The times of the early probes of a container that starts at second 1, until the first regular one.
fn early(state: &mut ProbeState, kind: ProbeKind, times: &ProbeTimes, took: i64) -> Vec<i64> {
    let begun = at(1).now_unix_nanos;
    let mut now = begun;
    let regular = now + times.period_nanos();
    let mut early = Vec::new();
    while let Some(wait) = {
        let at = Moment { now_unix_nanos: now + took, agent_started_unix_nanos: 0 };
        state.plan_early(kind, took, regular, &at)
    } {
        now += took + wait;
        assert_eq!(state.next_unix_nanos, now);
        assert!(state.take_early() && !state.take_early());
        early.push((now - begun) / 1_000_000);
    }
    early
}

#[test]
fn early_probes_run_between_the_periods_until_a_success() {
    let ten = times(json!({}));
    for kind in [ProbeKind::Readiness, ProbeKind::Startup] {
        let expected = [250, 500, 1500, 2500, 3500, 4500, 5500, 6500, 7500, 8500, 9500];
        assert_eq!(early(&mut taken(kind), kind, &ten, 0), expected, "{kind:?}");
    }
    assert_eq!(early(&mut taken(ProbeKind::Liveness), ProbeKind::Liveness, &ten, 0), [0; 0]);
    // With a short period there are hardly any, and after a slow probe the wait is longer.
    let kind = ProbeKind::Readiness;
    assert_eq!(early(&mut taken(kind), kind, &times(json!({"periodSeconds": 1})), 0), [250, 500]);
    assert_eq!(early(&mut taken(kind), kind, &ten, 600_000_000), [3000, 6000, 9000]);

    // Failures of regular probes do not end early probes, a success does.
    let mut state = taken(kind);
    change(&mut state, kind, &ten, "-");
    assert!(!early(&mut state, kind, &ten, 0).is_empty());
    change(&mut state, kind, &ten, "+---");
    assert_eq!(state.result, ProbeResult::Failure);
    assert_eq!(early(&mut state, kind, &ten, 0), [0; 0]);
    // With a success threshold above one, successes are counted at the regular period.
    let mut state = taken(kind);
    change(&mut state, kind, &times(json!({"successThreshold": 2})), "+");
    assert_eq!(early(&mut state, kind, &ten, 0), [0; 0]);
}

#[test]
fn early_probes_end_after_their_window() {
    let kind = ProbeKind::Readiness;
    let minute = times(json!({"periodSeconds": 60}));
    let early_ones = early(&mut taken(kind), kind, &minute, 0);
    assert_eq!(early_ones.last(), Some(&30_500));
    assert_eq!(early_ones.len(), 32);
}

#[test]
fn an_adopted_container_has_early_probes_only_while_young_and_unready() {
    let (kind, ten) = (ProbeKind::Readiness, times(json!({})));
    let seen = record(&in_sandbox().running("a"));
    let after = |seconds: i64| Moment {
        now_unix_nanos: seen.started_unix_nanos + seconds * SECOND,
        agent_started_unix_nanos: seen.started_unix_nanos + (seconds - 1) * SECOND,
    };
    for (seconds, was_ready, awaited) in [(5, false, true), (5, true, false), (40, false, false)] {
        let (mut state, at) = (ProbeState::new(kind), after(seconds));
        let previous = PreviousStatus { ready: was_ready, started: true };
        let next = state.next_probe(kind, &ten, &ProbeInputs { previous, ..inputs(Some(&seen), &at) });
        assert_eq!(next == NextProbe::Probe, awaited, "{seconds} s, {was_ready}");
        assert_eq!(state.plan_early(kind, 0, i64::MAX, &at).is_some(), awaited, "{seconds} s, {was_ready}");
    }
}

#[test]
fn an_adopted_container_is_probed_at_a_random_time_of_the_first_period() {
    let mut old = record(&in_sandbox().running("a"));
    let now = at(-99);
    for (started, spread, wants) in [
        (-200, 0.5, NextProbe::After(5 * SECOND)),
        (-200, 0.0, NextProbe::Probe),
        // It was started by this process.
        (-99, 0.5, NextProbe::Probe),
    ] {
        old.started_unix_nanos = at(started).now_unix_nanos;
        let mut state = ProbeState::new(ProbeKind::Liveness);
        let found = ProbeInputs { spread, ..inputs(Some(&old), &now) };
        assert_eq!(state.next_probe(ProbeKind::Liveness, &times(json!({})), &found), wants);
    }
    // As old as the process is young enough: it was not there before.
    old.started_unix_nanos = at(-100).now_unix_nanos;
    let mut state = ProbeState::new(ProbeKind::Liveness);
    let found = ProbeInputs { spread: 0.5, ..inputs(Some(&old), &now) };
    assert_eq!(state.next_probe(ProbeKind::Liveness, &times(json!({})), &found), NextProbe::Probe);
    old.started_unix_nanos = at(-200).now_unix_nanos;
    for (late, wants) in
        [(-91, NextProbe::After(5 * SECOND)), (-90, NextProbe::Probe), (-80, NextProbe::Probe)]
    {
        let (mut state, late) = (ProbeState::new(ProbeKind::Liveness), at(late));
        let found = ProbeInputs { spread: 0.5, ..inputs(Some(&old), &late) };
        let next = state.next_probe(ProbeKind::Liveness, &times(json!({})), &found);
        assert_eq!(next, wants, "the process is as old as a period or not");
    }
}

#[test]
fn a_restored_probe_state_continues() {
    let defaults = times(json!({}));
    let mut state = taken(ProbeKind::Liveness);
    change(&mut state, ProbeKind::Liveness, &defaults, "--");
    let text = serde_json::to_string(&state).unwrap();
    let mut back: ProbeState = serde_json::from_str(&text).unwrap();
    let (now, seen) = (at(30), record(&in_sandbox().running("a")));
    assert_eq!(back.next_probe(ProbeKind::Liveness, &defaults, &inputs(Some(&seen), &now)), NextProbe::Keep);
    assert_eq!(back.failures(), 2);
    assert_eq!(change(&mut back, ProbeKind::Liveness, &defaults, "-"), [true]);
}

#[test]
fn probe_counters_are_stored_only_if_they_matter() {
    let defaults = times(json!({}));
    let mut state = taken(ProbeKind::Liveness);
    let id = state.container_id.clone();
    let mut keep = |success| state.record_outcome(ProbeKind::Liveness, &defaults, &id, success, "").keep;
    assert!(!keep(true));
    assert!(keep(false) && keep(false) && keep(false));
}

#[test]
fn a_long_probe_error_is_cut_between_characters() {
    let mut state = taken(ProbeKind::Readiness);
    let id = state.container_id.clone();
    let text = "é".repeat(MAX_FAILURE_BYTES);
    state.record_outcome(ProbeKind::Readiness, &times(json!({})), &id, false, &text);
    assert_eq!(state.failure.len(), MAX_FAILURE_BYTES);
    for (bytes, kept) in [(0, ""), (1, ""), (2, "é"), (3, "é"), (4, "éé"), (9, "éé")] {
        assert_eq!(cut("éé", bytes), kept, "{bytes}");
    }
    state.record_error("another", "no");
    assert_ne!(state.failure, "no");
    state.record_error(&id, "no");
    assert_eq!((state.failure.as_str(), state.failures()), ("no", 1), "an error is not counted");
}

/// A pod whose container has all three probes and whose sidecar has a startup probe.
fn probed() -> Pod {
    pod(json!({"restartPolicy": "Always",
        "initContainers": [{"name": "s", "image": "i", "restartPolicy": "Always", "startupProbe": {}}],
        "containers": [{"name": "a", "image": "i", "startupProbe": {}, "readinessProbe": {}, "livenessProbe": {}},
            {"name": "b", "image": "i"}]}))
}

fn probe_states(states: &[(&str, ProbeKind, &str, ProbeResult)]) -> ProbeStates {
    let one = |(name, kind, id, result): &(&str, ProbeKind, &str, ProbeResult)| {
        let state = ProbeState { result: *result, container_id: (*id).to_owned(), ..ProbeState::new(*kind) };
        (((*name).to_owned(), *kind), state)
    };
    states.iter().map(one).collect()
}

fn ready_of(seen: &PodObservation, old: Option<&PodStatus>, states: &ProbeStates) -> (bool, bool) {
    let all = readiness(&probed(), seen, old, states);
    let Readiness { ready, started } = all["a"];
    (ready, started)
}

#[test]
fn probe_states_are_in_order_and_a_known_probe_keeps_its_state() {
    use ProbeKind::{Liveness, Readiness, Startup};
    let no = ProbeResult::Failure;
    let mut states =
        probe_states(&[("b", Liveness, "b-0", no), ("a", Readiness, "a-0", no), ("a", Startup, "a-0", no)]);
    states.add("a", Startup);
    states.add("b", Startup);
    let keys: Vec<_> = states.iter().map(|(container, kind, _)| (container, kind)).collect();
    assert_eq!(keys, [("a", Startup), ("a", Readiness), ("b", Startup), ("b", Liveness)]);
    assert_eq!(states.get("a", Startup).map(|state| state.result), Some(no));
    assert_eq!(states.get("c", Startup), None);
}

#[test]
fn readiness_is_that_of_the_running_instance() {
    use ProbeKind::{Readiness, Startup};
    let seen = in_sandbox().running("s").running("a").running("b").0;
    let (yes, no) = (ProbeResult::Success, ProbeResult::Failure);
    for (states, wants) in [
        (vec![], (false, false)),
        (vec![("a", Startup, "a-0", yes)], (false, true)),
        (vec![("a", Startup, "a-0", yes), ("a", Readiness, "a-0", yes)], (true, true)),
        (vec![("a", Startup, "a-0", yes), ("a", Readiness, "a-0", no)], (false, true)),
        (vec![("a", Startup, "older", yes), ("a", Readiness, "older", yes)], (false, false)),
    ] {
        assert_eq!(ready_of(&seen, None, &probe_states(&states)), wants, "{states:?}");
    }
    let all = readiness(&probed(), &seen, None, &ProbeStates::new());
    assert_eq!(all.keys().collect::<Vec<_>>(), ["a", "s"], "containers without probes are not listed");
}

#[test]
fn without_a_probe_record_readiness_of_the_last_status_is_kept() {
    use ProbeKind::{Readiness, Startup};
    let seen = in_sandbox().running("s").running("a").running("b").0;
    let yes = ProbeResult::Success;
    let states =
        probe_states(&[("a", Startup, "a-0", yes), ("a", Readiness, "a-0", yes), ("s", Startup, "s-0", yes)]);
    let inputs = StatusInputs {
        readiness: readiness(&probed(), &seen, None, &states),
        runtime_name: "containerd",
        ..StatusInputs::default()
    };
    let status = generate_status(&probed(), &seen, None, &inputs, &at(60));
    let none = ProbeStates::new();
    assert_eq!(ready_of(&seen, Some(&status), &none), (true, true));
    let record = seen.current("a").unwrap();
    assert_eq!(previous_status(Some(&status), record), PreviousStatus { ready: true, started: true });
    let kept = hints(&probed(), &seen, Some(&status), &none);
    assert_eq!(kept.startup.values().collect::<Vec<_>>(), [&yes, &yes]);
    // The last status of another instance does not count.
    let later = in_sandbox().running("s").exited("a", 1).running("a").running("b").0;
    assert_eq!(ready_of(&later, Some(&status), &none), (false, false));
}

#[test]
fn probe_hints_cover_running_instances_with_probes_only() {
    let seen = in_sandbox().running("s").exited("a", 1).running("b").0;
    let made = hints(&probed(), &seen, None, &ProbeStates::new());
    let startup = [("s-0".into(), ProbeResult::Unknown)].into();
    assert_eq!(made, ProbeHints { startup, ..ProbeHints::default() });
}

#[test]
fn an_unready_container_has_a_cause_and_the_next_attempt() {
    let (pod, seen) = (probed(), in_sandbox().running("a").0);
    let (container, record) = (&pod.spec.containers[0], seen.current("a").unwrap());
    let cause = |states: &ProbeStates| unready_cause(container, record, None, states);
    let mut states = probe_states(&[("a", ProbeKind::Startup, "a-0", ProbeResult::Unknown)]);
    let first = cause(&states).unwrap();
    assert_eq!((first.state, &*first.owner), (StepState::Waiting, "pod-sync"));
    let startup = states.get_mut("a", ProbeKind::Startup).unwrap();
    startup.record_error("a-0", "no shell");
    assert_eq!(cause(&states).unwrap().message, "its startup probe fails: no shell", "and none is counted");
    let startup = states.get_mut("a", ProbeKind::Startup).unwrap();
    startup.record_outcome(ProbeKind::Startup, &times(json!({})), "a-0", false, "no answer\n");
    startup.next_unix_nanos = 7;
    let failing = cause(&states).unwrap();
    assert_eq!(failing.message, "its startup probe fails (1 of 3): no answer");
    assert_eq!((failing.state, &*failing.owner), (StepState::Waiting, YOU));
    assert_eq!(failing.next_retry_unix_nanos, 7);

    let yes = ProbeResult::Success;
    let mut states = probe_states(&[
        ("a", ProbeKind::Startup, "a-0", yes),
        ("a", ProbeKind::Readiness, "a-0", ProbeResult::Failure),
    ]);
    assert_eq!(cause(&states).unwrap().message, "its readiness probe has not succeeded yet");
    let key = ("a", ProbeKind::Readiness);
    states.get_mut(key.0, key.1).unwrap().record_error("a-0", "no shell");
    let failed = cause(&states).unwrap();
    assert_eq!((failed.state, &*failed.owner), (StepState::Failed, YOU));
    assert_eq!(failed.message, "its readiness probe fails: no shell");
    states.get_mut(key.0, key.1).unwrap().turn_wait =
        "16 of 16 commands of probes run, 15 of them by default/greedy".to_owned();
    let turn_wait = cause(&states).unwrap();
    assert_eq!((turn_wait.state, &*turn_wait.owner), (StepState::Waiting, "pod-sync"));
    let text = "its readiness probe waits for its turn: 16 of 16 commands of probes run, 15 of them by default/greedy";
    assert_eq!(turn_wait.message, text);
    states.get_mut(key.0, key.1).unwrap().turn_wait.clear();
    states.get_mut(key.0, key.1).unwrap().result = yes;
    assert_eq!(cause(&states), None);
}

#[test]
fn a_probe_result_changes_only_after_its_threshold() {
    let reached = &Reached::default();
    let outcomes = proptest::collection::vec(any::<bool>(), 1..60);
    let thresholds = (1..5i32, 1..5i32);
    proptest!(ProptestConfig::with_cases(1024), |(outcomes in outcomes, (success, failure) in thresholds)| {
        let times = times(json!({"successThreshold": success, "failureThreshold": failure}));
        let mut state = taken(ProbeKind::Readiness);
        let id = state.container_id.clone();
        let mut before = state.result;
        let (mut turned, mut short) = ([false; 2], [false; 2]);
        for (index, success) in outcomes.iter().enumerate() {
            let change = state.record_outcome(ProbeKind::Readiness, &times, &id, *success, "no");
            let run = outcomes[..=index].iter().rev().take_while(|o| *o == success).count();
            let threshold = if *success { times.success_threshold } else { times.failure_threshold };
            let enough = u32::try_from(run).unwrap() >= threshold;
            let says = if *success { ProbeResult::Success } else { ProbeResult::Failure };
            prop_assert_eq!(state.result, if enough { says } else { before });
            prop_assert_eq!(change.changed, state.result != before);
            turned[usize::from(*success)] |= change.changed;
            short[usize::from(*success)] |= !enough && says != before;
            before = state.result;
        }
        reached.case([
            ("turns to success", turned[1]),
            ("turns to failure", turned[0]),
            ("stays as it began", turned == [false; 2]),
            ("too few successes", short[1]),
            ("too few failures", short[0]),
        ]);
    });
    // The rarest: "stays as it began", in one case of 5.
    reached.assert_each();
}

#[test]
fn the_first_wait_is_within_the_first_period() {
    let reached = &Reached::default();
    let (period, spread, age) = (1..1000i32, 0.0..1.0f64, 0..2000i64);
    proptest!(ProptestConfig::with_cases(512), |(period in period, spread in spread, age in age)| {
        let times = times(json!({"periodSeconds": period}));
        let mut old = record(&in_sandbox().running("a"));
        old.started_unix_nanos = at(-200).now_unix_nanos;
        let now = at(-100 + age);
        let mut state = ProbeState::new(ProbeKind::Liveness);
        let next = state.next_probe(ProbeKind::Liveness, &times, &ProbeInputs { spread, ..inputs(Some(&old), &now) });
        match next {
            NextProbe::After(wait) => {
                prop_assert!(wait > 0 && wait < times.period_nanos());
                prop_assert!(age < times.period_seconds);
            }
            next => prop_assert_eq!(next, NextProbe::Probe),
        }
        reached.case([("waits", next != NextProbe::Probe), ("is probed at once", next == NextProbe::Probe)]);
    });
    // The rarest: "waits", in one case of 4.
    reached.assert_each();
}
