use keelson_testkit::Reached;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::actions::ProbeHints;
use crate::explain::{StepState, YOU};
use crate::observation::PodObservation;
use crate::status::{Readiness, StatusInputs, generate_status};
use crate::testing::{Seen, at, in_sandbox, pod};
use keelson_kube_model::{Pod, PodStatus};

fn times(fields: Value) -> ProbeTimes {
    ProbeTimes::of(&serde_json::from_value(fields).unwrap())
}

fn record(seen: &Seen) -> ContainerObservation {
    seen.0.current("a").unwrap().clone()
}

/// A look at `a`, which has started, at a second, when nothing is due.
fn look<'a>(running: Option<&'a ContainerObservation>, at: &'a Moment) -> Look<'a> {
    Look { running, started: true, was: Was::default(), due: false, spread: 0.5, at }
}

fn judged(state: &mut ProbeState, kind: ProbeKind, times: &ProbeTimes, outcomes: &str) -> Vec<bool> {
    let id = state.container_id.clone();
    let one = |o: char| state.judge(kind, times, &id, o == '+', "it said no").changed;
    outcomes.chars().map(one).collect()
}

fn taken(kind: ProbeKind) -> ProbeState {
    let mut state = ProbeState::new(kind);
    let seen = record(&in_sandbox().running("a"));
    let next = state.look(kind, &times(json!({})), &look(Some(&seen), &at(1)));
    assert_eq!(next, Next::Probe, "a container that starts is probed at once");
    state
}

#[test]
fn each_kind_has_its_word_and_its_probe() {
    let probe = |seconds: i32| json!({"periodSeconds": seconds});
    let all: Container = serde_json::from_value(json!({"name": "a", "startupProbe": probe(1),
        "livenessProbe": probe(2), "readinessProbe": probe(3)}))
    .unwrap();
    let found = ProbeKind::ALL.map(|kind| (kind.as_str(), kind.of(&all).and_then(|p| p.period_seconds)));
    assert_eq!(found, [("Startup", Some(1)), ("Liveness", Some(2)), ("Readiness", Some(3))]);
    assert!(ProbeKind::ALL.iter().all(|kind| kind.of(&Container::default()).is_none()));
}

#[test]
fn numbers_that_are_missing_or_zero_have_upstreams_defaults() {
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
fn results_before_the_first_probe() {
    for (kind, result) in [
        (ProbeKind::Liveness, ProbeResult::Success),
        (ProbeKind::Readiness, ProbeResult::Failure),
        (ProbeKind::Startup, ProbeResult::Unknown),
    ] {
        assert_eq!(taken(kind).result, result, "{kind:?}");
    }
}

#[test]
fn three_failures_in_a_row_fail_and_one_success_succeeds_by_default() {
    let defaults = times(json!({}));
    let mut state = taken(ProbeKind::Readiness);
    assert_eq!(judged(&mut state, ProbeKind::Readiness, &defaults, "+"), [true]);
    let changes = judged(&mut state, ProbeKind::Readiness, &defaults, "--+---+");
    assert_eq!(changes, [false, false, false, false, false, true, true]);
    assert!(state.failure.is_empty());
}

#[test]
fn a_success_threshold_wants_successes_in_a_row() {
    let two = times(json!({"successThreshold": 2}));
    let mut state = taken(ProbeKind::Readiness);
    assert_eq!(judged(&mut state, ProbeKind::Readiness, &two, "+-+"), [false, false, false]);
    assert_eq!(judged(&mut state, ProbeKind::Readiness, &two, "+"), [true]);
}

#[test]
fn a_failed_liveness_and_any_startup_result_hold_until_another_instance() {
    let defaults = times(json!({}));
    let (first, second) = (in_sandbox().running("a"), in_sandbox().exited("a", 1).running("a"));
    for (kind, outcomes) in
        [(ProbeKind::Liveness, "---"), (ProbeKind::Startup, "---"), (ProbeKind::Startup, "--+")]
    {
        let mut state = taken(kind);
        assert_eq!(judged(&mut state, kind, &defaults, outcomes), [false, false, true], "{kind:?}");
        let (now, old) = (at(20), record(&first));
        let due = Look { due: true, ..look(Some(&old), &now) };
        assert_eq!(state.look(kind, &defaults, &due), Next::Hold, "{kind:?}");
        assert_eq!(judged(&mut state, kind, &defaults, "+-"), [false, false], "a late outcome");
        let (id, new) = (state.container_id.clone(), record(&second));
        assert_eq!(state.look(kind, &defaults, &look(Some(&new), &now)), Next::Probe);
        assert_ne!(state.container_id, id);
        assert_eq!(state.result, initial(kind, Was::default()));
        assert!(!state.judge(kind, &defaults, &id, false, "").keep, "of the instance before");
    }
    let mut state = taken(ProbeKind::Liveness);
    judged(&mut state, ProbeKind::Liveness, &defaults, "++");
    let (now, old) = (at(20), record(&first));
    let due = Look { due: true, ..look(Some(&old), &now) };
    assert_eq!(state.look(ProbeKind::Liveness, &defaults, &due), Next::Probe, "a success holds nothing");
}

#[test]
fn startup_holds_the_other_probes_back_and_its_success_makes_them_due() {
    let seen = record(&in_sandbox().running("a"));
    let (defaults, now) = (times(json!({})), at(1));
    for kind in [ProbeKind::Liveness, ProbeKind::Readiness] {
        let mut state = ProbeState::new(kind);
        let waits = Look { started: false, due: true, ..look(Some(&seen), &now) };
        assert_eq!(state.look(kind, &defaults, &waits), Next::Hold);
        assert_eq!(state.look(kind, &defaults, &look(Some(&seen), &now)), Next::Probe);
        assert_eq!(state.look(kind, &defaults, &look(Some(&seen), &now)), Next::Keep, "not due twice");
    }
    let mut startup = ProbeState::new(ProbeKind::Startup);
    let waits = Look { started: false, ..look(Some(&seen), &now) };
    assert_eq!(startup.look(ProbeKind::Startup, &defaults, &waits), Next::Probe);
}

#[test]
fn the_initial_delay_counts_from_the_containers_start() {
    let delayed = times(json!({"initialDelaySeconds": 5}));
    let seen = record(&in_sandbox().running("a"));
    let mut state = ProbeState::new(ProbeKind::Readiness);
    let next = |state: &mut ProbeState, second, due| {
        let now = at(second);
        state.look(ProbeKind::Readiness, &delayed, &Look { due, ..look(Some(&seen), &now) })
    };
    assert_eq!(next(&mut state, 2, true), Next::After(3 * SECOND));
    assert_eq!(state.next_unix_nanos, at(5).now_unix_nanos);
    assert_eq!(next(&mut state, 5, true), Next::Probe);
    let mut set_back = ProbeState::new(ProbeKind::Readiness);
    assert_eq!(next(&mut set_back, -1000, true), Next::After(5 * SECOND), "the clock was set back");
}

#[test]
fn what_does_not_run_is_not_probed() {
    let mut state = taken(ProbeKind::Readiness);
    let now = at(50);
    let nothing = Look { due: true, ..look(None, &now) };
    assert_eq!(state.look(ProbeKind::Readiness, &times(json!({})), &nothing), Next::Hold);
}

/// The times of the early probes of a container that begins at second 1, until the first regular one.
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
fn who_has_just_begun_is_probed_between_the_periods_until_it_succeeds() {
    let ten = times(json!({}));
    for kind in [ProbeKind::Readiness, ProbeKind::Startup] {
        let expected = [250, 500, 1500, 2500, 3500, 4500, 5500, 6500, 7500, 8500, 9500];
        assert_eq!(early(&mut taken(kind), kind, &ten, 0), expected, "{kind:?}");
    }
    assert_eq!(early(&mut taken(ProbeKind::Liveness), ProbeKind::Liveness, &ten, 0), [0; 0]);
    // A short period has hardly any, and a slow probe is not made more often than its share.
    let kind = ProbeKind::Readiness;
    assert_eq!(early(&mut taken(kind), kind, &times(json!({"periodSeconds": 1})), 0), [250, 500]);
    assert_eq!(early(&mut taken(kind), kind, &ten, 600_000_000), [3000, 6000, 9000]);

    // Failures of regular probes change nothing about it, a success ends it for good.
    let mut state = taken(kind);
    judged(&mut state, kind, &ten, "-");
    assert!(!early(&mut state, kind, &ten, 0).is_empty());
    judged(&mut state, kind, &ten, "+---");
    assert_eq!(state.result, ProbeResult::Failure);
    assert_eq!(early(&mut state, kind, &ten, 0), [0; 0]);
    // One that has to succeed several times does so at its period.
    let mut state = taken(kind);
    judged(&mut state, kind, &times(json!({"successThreshold": 2})), "+");
    assert_eq!(early(&mut state, kind, &ten, 0), [0; 0]);
}

#[test]
fn in_the_long_run_there_are_no_more_probes_than_periods() {
    let kind = ProbeKind::Readiness;
    let minute = times(json!({"periodSeconds": 60}));
    let early_ones = early(&mut taken(kind), kind, &minute, 0);
    assert_eq!(early_ones.last(), Some(&30_500));
    assert_eq!(early_ones.len(), 32);
}

#[test]
fn a_container_that_was_found_is_awaited_only_while_it_is_young_and_not_ready() {
    let (kind, ten) = (ProbeKind::Readiness, times(json!({})));
    let seen = record(&in_sandbox().running("a"));
    let after = |seconds: i64| Moment {
        now_unix_nanos: seen.started_unix_nanos + seconds * SECOND,
        agent_started_unix_nanos: seen.started_unix_nanos + (seconds - 1) * SECOND,
    };
    for (seconds, was_ready, awaited) in [(5, false, true), (5, true, false), (40, false, false)] {
        let (mut state, at) = (ProbeState::new(kind), after(seconds));
        let was = Was { ready: was_ready, started: true };
        let next = state.look(kind, &ten, &Look { was, ..look(Some(&seen), &at) });
        assert_eq!(next == Next::Probe, awaited, "{seconds} s, {was_ready}");
        assert_eq!(state.plan_early(kind, 0, i64::MAX, &at).is_some(), awaited, "{seconds} s, {was_ready}");
    }
}

#[test]
fn what_ran_before_this_process_waits_for_its_place_in_the_first_period() {
    let mut old = record(&in_sandbox().running("a"));
    let now = at(-99);
    for (started, spread, wants) in [
        (-200, 0.5, Next::After(5 * SECOND)),
        (-200, 0.0, Next::Probe),
        // It was started by this process.
        (-99, 0.5, Next::Probe),
    ] {
        old.started_unix_nanos = at(started).now_unix_nanos;
        let mut state = ProbeState::new(ProbeKind::Liveness);
        let found = Look { spread, ..look(Some(&old), &now) };
        assert_eq!(state.look(ProbeKind::Liveness, &times(json!({})), &found), wants);
    }
    // As old as the process is young enough: it was not there before.
    old.started_unix_nanos = at(-100).now_unix_nanos;
    let mut state = ProbeState::new(ProbeKind::Liveness);
    let found = Look { spread: 0.5, ..look(Some(&old), &now) };
    assert_eq!(state.look(ProbeKind::Liveness, &times(json!({})), &found), Next::Probe);
    old.started_unix_nanos = at(-200).now_unix_nanos;
    for (late, wants) in [(-91, Next::After(5 * SECOND)), (-90, Next::Probe), (-80, Next::Probe)] {
        let (mut state, late) = (ProbeState::new(ProbeKind::Liveness), at(late));
        let found = Look { spread: 0.5, ..look(Some(&old), &late) };
        let next = state.look(ProbeKind::Liveness, &times(json!({})), &found);
        assert_eq!(next, wants, "the process is as old as a period or not");
    }
}

#[test]
fn a_state_that_is_read_back_goes_on_where_it_was() {
    let defaults = times(json!({}));
    let mut state = taken(ProbeKind::Liveness);
    judged(&mut state, ProbeKind::Liveness, &defaults, "--");
    let text = serde_json::to_string(&state).unwrap();
    let mut back: ProbeState = serde_json::from_str(&text).unwrap();
    let (now, seen) = (at(30), record(&in_sandbox().running("a")));
    assert_eq!(back.look(ProbeKind::Liveness, &defaults, &look(Some(&seen), &now)), Next::Keep);
    assert_eq!(back.failures(), 2);
    assert_eq!(judged(&mut back, ProbeKind::Liveness, &defaults, "-"), [true]);
}

#[test]
fn counters_below_the_threshold_are_worth_keeping_and_what_changes_nothing_is_not() {
    let defaults = times(json!({}));
    let mut state = taken(ProbeKind::Liveness);
    let id = state.container_id.clone();
    let mut keep = |success| state.judge(ProbeKind::Liveness, &defaults, &id, success, "").keep;
    assert!(!keep(true));
    assert!(keep(false) && keep(false) && keep(false));
}

#[test]
fn a_long_failure_is_cut_between_characters() {
    let mut state = taken(ProbeKind::Readiness);
    let id = state.container_id.clone();
    let text = "é".repeat(KEPT_TEXT);
    state.judge(ProbeKind::Readiness, &times(json!({})), &id, false, &text);
    assert_eq!(state.failure.len(), KEPT_TEXT);
    for (bytes, kept) in [(0, ""), (1, ""), (2, "é"), (3, "é"), (4, "éé"), (9, "éé")] {
        assert_eq!(cut("éé", bytes), kept, "{bytes}");
    }
    state.errored("another", "no");
    assert_ne!(state.failure, "no");
    state.errored(&id, "no");
    assert_eq!((state.failure.as_str(), state.failures()), ("no", 1), "an error is not counted");
}

/// A pod whose container has all three probes and whose sidecar has a startup probe.
fn probed() -> Pod {
    pod(json!({"restartPolicy": "Always",
        "initContainers": [{"name": "s", "image": "i", "restartPolicy": "Always", "startupProbe": {}}],
        "containers": [{"name": "a", "image": "i", "startupProbe": {}, "readinessProbe": {}, "livenessProbe": {}},
            {"name": "b", "image": "i"}]}))
}

fn book(states: &[(&str, ProbeKind, &str, ProbeResult)]) -> ProbeBook {
    let one = |(name, kind, id, result): &(&str, ProbeKind, &str, ProbeResult)| {
        let state = ProbeState { result: *result, container_id: (*id).to_owned(), ..ProbeState::new(*kind) };
        (((*name).to_owned(), *kind), state)
    };
    states.iter().map(one).collect()
}

fn ready_of(seen: &PodObservation, old: Option<&PodStatus>, book: &ProbeBook) -> (bool, bool) {
    let all = readiness(&probed(), seen, old, book);
    let Readiness { ready, started } = all["a"];
    (ready, started)
}

#[test]
fn readiness_and_started_are_those_of_the_running_instance() {
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
        assert_eq!(ready_of(&seen, None, &book(&states)), wants, "{states:?}");
    }
    let all = readiness(&probed(), &seen, None, &ProbeBook::new());
    assert_eq!(all.keys().collect::<Vec<_>>(), ["a", "s"], "what has no probe is not named");
}

#[test]
fn without_a_record_what_was_ready_stays_ready_and_what_had_started_has_started() {
    use ProbeKind::{Readiness, Startup};
    let seen = in_sandbox().running("s").running("a").running("b").0;
    let yes = ProbeResult::Success;
    let states =
        book(&[("a", Startup, "a-0", yes), ("a", Readiness, "a-0", yes), ("s", Startup, "s-0", yes)]);
    let inputs = StatusInputs {
        readiness: readiness(&probed(), &seen, None, &states),
        runtime_name: "containerd",
        ..StatusInputs::default()
    };
    let status = generate_status(&probed(), &seen, None, &inputs, &at(60));
    let none = ProbeBook::new();
    assert_eq!(ready_of(&seen, Some(&status), &none), (true, true));
    let record = seen.current("a").unwrap();
    assert_eq!(was(Some(&status), record), Was { ready: true, started: true });
    let kept = hints(&probed(), &seen, Some(&status), &none);
    assert_eq!(kept.startup.values().collect::<Vec<_>>(), [&yes, &yes]);
    // Another instance was none of that.
    let later = in_sandbox().running("s").exited("a", 1).running("a").running("b").0;
    assert_eq!(ready_of(&later, Some(&status), &none), (false, false));
}

#[test]
fn hints_name_running_instances_with_probes_only() {
    let seen = in_sandbox().running("s").exited("a", 1).running("b").0;
    let made = hints(&probed(), &seen, None, &ProbeBook::new());
    let startup = [("s-0".into(), ProbeResult::Unknown)].into();
    assert_eq!(made, ProbeHints { startup, ..ProbeHints::default() });
}

#[test]
fn what_runs_and_is_not_ready_says_why_and_when_it_is_tried_again() {
    let (pod, seen) = (probed(), in_sandbox().running("a").0);
    let (container, record) = (&pod.spec.containers[0], seen.current("a").unwrap());
    let cause = |book: &ProbeBook| unready_cause(container, record, None, book);
    let mut states = book(&[("a", ProbeKind::Startup, "a-0", ProbeResult::Unknown)]);
    let first = cause(&states).unwrap();
    assert_eq!((first.state, &*first.owner), (StepState::Waiting, "pod-sync"));
    let key = ("a".to_owned(), ProbeKind::Startup);
    let startup = states.get_mut(&key).unwrap();
    startup.errored("a-0", "no shell");
    assert_eq!(cause(&states).unwrap().message, "its startup probe fails: no shell", "and none is counted");
    let startup = states.get_mut(&key).unwrap();
    startup.judge(ProbeKind::Startup, &times(json!({})), "a-0", false, "no answer\n");
    startup.next_unix_nanos = 7;
    let failing = cause(&states).unwrap();
    assert_eq!(failing.message, "its startup probe fails (1 of 3): no answer");
    assert_eq!((failing.state, &*failing.owner), (StepState::Waiting, YOU));
    assert_eq!(failing.next_retry_unix_nanos, 7);

    let yes = ProbeResult::Success;
    let mut states = book(&[
        ("a", ProbeKind::Startup, "a-0", yes),
        ("a", ProbeKind::Readiness, "a-0", ProbeResult::Failure),
    ]);
    assert_eq!(cause(&states).unwrap().message, "its readiness probe has not succeeded yet");
    let key = ("a".to_owned(), ProbeKind::Readiness);
    states.get_mut(&key).unwrap().errored("a-0", "no shell");
    let failed = cause(&states).unwrap();
    assert_eq!((failed.state, &*failed.owner), (StepState::Failed, YOU));
    assert_eq!(failed.message, "its readiness probe fails: no shell");
    states.get_mut(&key).unwrap().crowded =
        "16 of 16 commands of probes run, 15 of them by default/greedy".to_owned();
    let crowded = cause(&states).unwrap();
    assert_eq!((crowded.state, &*crowded.owner), (StepState::Waiting, "pod-sync"));
    let text = "its readiness probe waits for its turn: 16 of 16 commands of probes run, 15 of them by default/greedy";
    assert_eq!(crowded.message, text);
    states.get_mut(&key).unwrap().crowded.clear();
    states.get_mut(&key).unwrap().result = yes;
    assert_eq!(cause(&states), None);
}

#[test]
fn a_result_turns_only_after_its_threshold_in_a_row() {
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
            let judged = state.judge(ProbeKind::Readiness, &times, &id, *success, "no");
            let run = outcomes[..=index].iter().rev().take_while(|o| *o == success).count();
            let threshold = if *success { times.success_threshold } else { times.failure_threshold };
            let enough = u32::try_from(run).unwrap() >= threshold;
            let says = if *success { ProbeResult::Success } else { ProbeResult::Failure };
            prop_assert_eq!(state.result, if enough { says } else { before });
            prop_assert_eq!(judged.changed, state.result != before);
            turned[usize::from(*success)] |= judged.changed;
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
fn the_first_wait_lies_within_the_first_period() {
    let reached = &Reached::default();
    let (period, spread, age) = (1..1000i32, 0.0..1.0f64, 0..2000i64);
    proptest!(ProptestConfig::with_cases(512), |(period in period, spread in spread, age in age)| {
        let times = times(json!({"periodSeconds": period}));
        let mut old = record(&in_sandbox().running("a"));
        old.started_unix_nanos = at(-200).now_unix_nanos;
        let now = at(-100 + age);
        let mut state = ProbeState::new(ProbeKind::Liveness);
        let next = state.look(ProbeKind::Liveness, &times, &Look { spread, ..look(Some(&old), &now) });
        match next {
            Next::After(wait) => {
                prop_assert!(wait > 0 && wait < times.period_nanos());
                prop_assert!(age < times.period_seconds);
            }
            next => prop_assert_eq!(next, Next::Probe),
        }
        reached.case([("waits", next != Next::Probe), ("is probed at once", next == Next::Probe)]);
    });
    // The rarest: "waits", in one case of 4.
    reached.assert_each();
}
