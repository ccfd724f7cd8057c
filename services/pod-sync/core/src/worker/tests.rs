use std::cell::RefCell;
use std::collections::BTreeMap;

use keelson_kube_model::Pod;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::json;

use super::*;
use crate::testing::{at, deleting, empty_observation, from_file, in_sandbox, nanos, pod};

fn with_grace(seconds: i64) -> Pod {
    pod(json!({"terminationGracePeriodSeconds": seconds, "containers": [{"name": "a"}]}))
}

fn update<'a>(kind: UpdateKind, pod: &'a Pod) -> Input<'a> {
    Input::Update { kind, pod, observed: None }
}

fn outcome<'a>(outcome: SyncOutcome, pod: &'a Pod) -> Input<'a> {
    Input::Outcome { outcome, pod: Some(pod) }
}

/// A worker of an API pod that runs.
fn running(pod: &Pod) -> WorkerState {
    step(None, &update(UpdateKind::Create, pod), &at(0)).state
}

fn terminating(pod: &Pod) -> WorkerState {
    step(Some(&running(pod)), &Input::Removed { pod: Some(pod) }, &at(10)).state
}

#[test]
fn the_first_update_starts_to_sync() {
    let got = step(None, &update(UpdateKind::Create, &with_grace(30)), &at(0));
    assert_eq!((got.state.phase, got.work), (WorkerPhase::Sync, Some(Work::Sync)));
    assert!(got.state.desired && got.state.started && !got.cancel_running && !got.forget);
}

#[test]
fn an_unknown_uid_is_neither_terminated_nor_kept() {
    let pod = with_grace(30);
    for input in [Input::Removed { pod: None }, Input::Removed { pod: Some(&pod) }, Input::Started] {
        let got = step(None, &input, &at(0));
        assert_eq!((got.forget, got.ended, got.work), (true, false, None), "{input:?}");
    }
}

#[test]
fn a_deletion_is_remembered() {
    let state = step(None, &update(UpdateKind::Create, &deleting(with_grace(30))), &at(0)).state;
    assert!(state.deleted);
    let state = step(Some(&state), &update(UpdateKind::Update, &with_grace(30)), &at(1)).state;
    assert!(state.deleted);
    assert!(!running(&with_grace(30)).deleted);
}

#[test]
fn worker_phases_have_stable_names() {
    let words: Vec<&str> =
        [WorkerPhase::Sync, WorkerPhase::Terminating, WorkerPhase::Terminated, WorkerPhase::Finished]
            .map(WorkerPhase::as_str)
            .into();
    assert_eq!(words, ["sync", "terminating", "terminated", "finished"]);
}

#[test]
fn a_pod_in_a_final_phase_without_processes_is_only_cleaned_up() {
    let mut pod = with_grace(30);
    pod.status.phase = "Succeeded".into();
    let observed = empty_observation().sandbox(0, false).exited("a", 0).0;
    let input = Input::Update { kind: UpdateKind::Create, pod: &pod, observed: Some(&observed) };
    let got = step(None, &input, &at(0));
    assert_eq!((got.state.phase, got.work, got.ended), (WorkerPhase::Terminated, Some(Work::Clean), true));
    for observed in [in_sandbox().0, empty_observation().running("a").0] {
        let input = Input::Update { kind: UpdateKind::Create, pod: &pod, observed: Some(&observed) };
        assert_eq!(step(None, &input, &at(0)).state.phase, WorkerPhase::Terminating);
    }
    assert_eq!(step(None, &update(UpdateKind::Create, &pod), &at(0)).state.phase, WorkerPhase::Terminating);
}

#[test]
fn each_cause_terminates_a_running_pod_and_cancels_its_sync() {
    let pod = with_grace(30);
    let deleted = deleting(pod.clone());
    let mut failed = pod.clone();
    failed.status.phase = "Failed".into();
    let evict = Input::Killed { pod: &pod, grace_seconds: None, patch: None };
    for (input, cause) in [
        (update(UpdateKind::Update, &deleted), Reason::PodDeleted),
        (update(UpdateKind::Update, &failed), Reason::PodTerminal),
        (Input::Removed { pod: Some(&pod) }, Reason::PodRemoved),
        (evict, Reason::PodEvicted),
    ] {
        let got = step(Some(&running(&pod)), &input, &at(10));
        assert_eq!(got.state.phase, WorkerPhase::Terminating, "{cause}");
        assert_eq!(got.state.cause, Some(cause));
        assert!(got.cancel_running);
        assert_eq!(got.work, Some(Work::Terminate { kill_deadline_unix_nanos: nanos(40) }));
    }
}

#[test]
fn a_completed_pod_terminates_without_cancelling() {
    let pod = with_grace(5);
    let got = step(Some(&running(&pod)), &outcome(SyncOutcome::Terminal, &pod), &at(10));
    assert_eq!(got.work, Some(Work::Terminate { kill_deadline_unix_nanos: nanos(15) }));
    assert!(!got.cancel_running && got.state.cause == Some(Reason::PodTerminal));
}

#[test]
fn a_worker_goes_from_terminating_to_terminated_to_finished() {
    let pod = with_grace(5);
    let state =
        step(Some(&running(&pod)), &update(UpdateKind::Update, &deleting(pod.clone())), &at(10)).state;
    let failed = step(Some(&state), &outcome(SyncOutcome::Failed, &pod), &at(11));
    assert_eq!((failed.state.phase, failed.work), (WorkerPhase::Terminating, None), "retried later");
    let ended = step(Some(&state), &outcome(SyncOutcome::Done, &pod), &at(12));
    assert_eq!(
        (ended.state.phase, ended.work, ended.ended),
        (WorkerPhase::Terminated, Some(Work::Clean), true)
    );
    let failed = step(Some(&ended.state), &outcome(SyncOutcome::Failed, &pod), &at(13));
    assert_eq!(failed.state.phase, WorkerPhase::Terminated);
    let finished = step(Some(&ended.state), &outcome(SyncOutcome::Done, &pod), &at(14));
    assert_eq!((finished.state.phase, finished.work), (WorkerPhase::Finished, None));
    assert!(!finished.forget, "the source still has it");
    let gone = step(Some(&finished.state), &Input::Removed { pod: Some(&pod) }, &at(15));
    assert!(gone.forget && !gone.start_new_worker);
}

#[test]
fn a_removed_pod_is_forgotten_when_it_has_finished() {
    let pod = with_grace(5);
    let ended = step(Some(&terminating(&pod)), &outcome(SyncOutcome::Done, &pod), &at(12)).state;
    assert!(step(Some(&ended), &outcome(SyncOutcome::Done, &pod), &at(13)).forget);
}

#[test]
fn a_finished_uid_ignores_updates() {
    let pod = with_grace(5);
    let state = WorkerState { phase: WorkerPhase::Finished, desired: true, ..running(&pod) };
    let got = step(Some(&state), &update(UpdateKind::Update, &pod), &at(20));
    assert_eq!((got.work, got.forget, got.ended), (None, false, false));
}

#[test]
fn a_uid_added_again_while_terminating_starts_again_afterwards() {
    let pod = with_grace(5);
    let got = step(Some(&terminating(&pod)), &update(UpdateKind::Create, &pod), &at(11));
    assert!(got.state.restart_requested && got.work.is_none() && !got.cancel_running);
    let ended = step(Some(&got.state), &outcome(SyncOutcome::Done, &pod), &at(12)).state;
    let finished = step(Some(&ended), &outcome(SyncOutcome::Done, &pod), &at(13));
    assert!(finished.forget && finished.start_new_worker);
    let removed_again = step(Some(&got.state), &Input::Removed { pod: Some(&pod) }, &at(12)).state;
    assert!(!removed_again.restart_requested);
}

#[test]
fn a_restored_worker_continues_at_its_phase() {
    let pod = with_grace(30);
    let stored = WorkerState { desired: true, ..terminating(&pod) };
    let stored = serde_json::to_string(&stored).unwrap();
    let state = serde_json::from_str::<WorkerState>(&stored).unwrap().restored();
    let got = step(Some(&state), &update(UpdateKind::Create, &pod), &at(25));
    assert!(!got.state.restart_requested, "a replay does not request a new worker");
    assert_eq!(got.work, Some(Work::Terminate { kill_deadline_unix_nanos: nanos(40) }));
    assert_eq!(grace_left_seconds(&got.state, &at(25)), 15);
    assert!(step(Some(&got.state), &update(UpdateKind::Create, &pod), &at(26)).state.restart_requested);
}

#[test]
fn a_removed_pod_that_returns_after_a_restart_starts_again() {
    let pod = with_grace(30);
    let stored = terminating(&pod);
    assert!(!stored.desired);
    let got = step(Some(&stored.restored()), &update(UpdateKind::Create, &pod), &at(25));
    assert!(got.state.restart_requested);
}

#[test]
fn the_remaining_grace_period_is_rounded_up_and_never_negative() {
    let state = terminating(&with_grace(30));
    let mut moment = at(39);
    moment.now_unix_nanos += 1;
    assert_eq!(grace_left_seconds(&state, &moment), 1);
    assert_eq!(grace_left_seconds(&state, &at(40)), 0);
    assert_eq!(grace_left_seconds(&state, &at(99)), 0);
}

#[test]
fn grace_period_is_the_least_of_deletion_and_override_else_the_spec() {
    let mut pod = with_grace(30);
    assert_eq!(grace_seconds(None, Some(&pod), None), 30);
    assert_eq!(grace_seconds(None, Some(&pod), Some(60)), 60, "an override counts even when it is longer");
    assert_eq!(grace_seconds(Some(20), Some(&pod), Some(60)), 20, "it only shrinks");
    assert_eq!(
        grace_seconds(Some(60), Some(&pod), None),
        60,
        "the spec does not count once a grace period is set"
    );
    pod.metadata.deletion_grace_period_seconds = Some(10);
    assert_eq!(grace_seconds(None, Some(&pod), None), 10);
    assert_eq!(grace_seconds(None, Some(&pod), Some(3)), 3);
    assert_eq!(grace_seconds(Some(5), Some(&pod), None), 5);
    assert_eq!(grace_seconds(None, Some(&with_grace(0)), None), 0);
    assert_eq!(grace_seconds(None, None, None), 1);
}

#[test]
fn a_shorter_grace_period_cancels_the_turn_and_a_longer_one_is_ignored() {
    let mut pod = with_grace(30);
    let state = terminating(&pod);
    let evict = |seconds| Input::Killed { pod: &pod, grace_seconds: Some(seconds), patch: None };
    let longer = step(Some(&state), &evict(90), &at(12));
    assert!(!longer.cancel_running && longer.state.grace_seconds == Some(30));
    let shorter = step(Some(&state), &evict(3), &at(12));
    assert!(shorter.cancel_running);
    assert_eq!(shorter.work, Some(Work::Terminate { kill_deadline_unix_nanos: nanos(15) }));
    pod.metadata.deletion_grace_period_seconds = Some(2);
    let deleted = step(Some(&shorter.state), &update(UpdateKind::Update, &pod), &at(14));
    assert_eq!(deleted.state.kill_deadline_unix_nanos, Some(nanos(15)), "the deadline never moves back");
}

#[test]
fn a_pod_that_a_shutdown_ends_is_of_an_earlier_boot_after_the_reboot() {
    for (of, boot, earlier) in [("b1", "b2", true), ("b1", "b1", false), ("", "b1", false), ("b1", "", false)]
    {
        let patch = StatusPatch { shutdown_of_boot: of.into(), ..StatusPatch::default() };
        let state = WorkerState { status_patch: Some(patch), ..WorkerState::default() };
        assert_eq!(state.is_of_earlier_boot(boot), earlier, "{of} {boot}");
    }
    assert!(!WorkerState::default().is_of_earlier_boot("b1"));
}

#[test]
fn an_eviction_sets_the_status_patch_until_the_pod_has_terminated() {
    let pod = with_grace(30);
    let patch = StatusPatch {
        reason: "Evicted".into(),
        message: "m".into(),
        disruption_target: true,
        ..StatusPatch::default()
    };
    let kill = Input::Killed { pod: &pod, grace_seconds: Some(0), patch: Some(patch.clone()) };
    let got = step(Some(&running(&pod)), &kill, &at(10));
    assert!(got.state.evicted && got.state.status_patch == Some(patch));
    assert_eq!(got.state.kill_deadline_unix_nanos, Some(nanos(10)));
    let done = WorkerState { phase: WorkerPhase::Terminated, ..running(&pod) };
    assert_eq!(step(Some(&done), &kill, &at(10)).state.status_patch, None);
}

#[test]
fn a_static_pod_that_never_started_finishes_without_work() {
    let pod = from_file(with_grace(30));
    let waiting = running(&pod);
    assert!(!waiting.started);
    let got = step(Some(&waiting), &Input::Removed { pod: Some(&pod) }, &at(1));
    assert_eq!((got.state.phase, got.work, got.forget), (WorkerPhase::Finished, None, true));
    assert!(got.ended);
    let started = step(Some(&waiting), &Input::Started, &at(1)).state;
    let got = step(Some(&started), &Input::Removed { pod: Some(&pod) }, &at(2));
    assert_eq!(got.state.phase, WorkerPhase::Terminating);
}

#[test]
fn a_static_pod_found_in_the_runtime_has_started() {
    let pod = from_file(with_grace(30));
    let observed = in_sandbox().running("a").0;
    let input = Input::Update { kind: UpdateKind::Create, pod: &pod, observed: Some(&observed) };
    assert!(step(None, &input, &at(0)).state.started);
}

#[test]
fn an_orphan_terminates_with_the_grace_period_of_its_records() {
    let observed = in_sandbox().running("a").edit(|record| record.termination_grace_seconds = Some(7)).0;
    let got = step(None, &Input::ObservedOrphan { observed: &observed }, &at(10));
    assert_eq!(got.work, Some(Work::TerminateOrphan { kill_deadline_unix_nanos: nanos(17) }));
    assert_eq!(got.state.cause, Some(Reason::OrphanedPod));
    let done = Input::Outcome { outcome: SyncOutcome::Done, pod: None };
    let ended = step(Some(&got.state), &done, &at(11));
    assert!(ended.forget && ended.ended && !ended.start_new_worker);
}

#[test]
fn a_pod_of_a_source_is_never_terminated_as_an_orphan() {
    let state = running(&with_grace(30));
    let observed = in_sandbox().running("a").0;
    let got = step(Some(&state), &Input::ObservedOrphan { observed: &observed }, &at(10));
    assert_eq!((got.state, got.work), (state, None));
}

#[test]
fn an_orphan_that_a_source_sends_starts_again_after_its_termination() {
    let observed = in_sandbox().running("a").0;
    let orphan = step(None, &Input::ObservedOrphan { observed: &observed }, &at(10)).state;
    let named = step(Some(&orphan), &update(UpdateKind::Create, &with_grace(30)), &at(11)).state;
    let done = Input::Outcome { outcome: SyncOutcome::Done, pod: None };
    let ended = step(Some(&named), &done, &at(12));
    assert!(ended.forget && ended.start_new_worker);
}

#[test]
fn the_removal_of_a_uid_without_a_worker_is_ignored() {
    let got = step(None, &Input::Removed { pod: None }, &at(0));
    assert!(got.forget && got.work.is_none());
}

#[test]
fn queries_answer_for_known_and_unknown_uids() {
    let pod = with_grace(30);
    let sync = running(&pod);
    let of = |phase| WorkerState { phase, ..sync.clone() };
    let (terminating, terminated, finished) =
        (of(WorkerPhase::Terminating), of(WorkerPhase::Terminated), of(WorkerPhase::Finished));
    let rows = [
        (None, false, [false, true, false, false, false, false]),
        (None, true, [false, false, true, false, true, true]),
        (Some(&sync), true, [false, true, false, false, false, false]),
        (Some(&terminating), true, [false, true, false, true, false, false]),
        (Some(&terminated), true, [true, false, false, true, true, false]),
        (Some(&finished), true, [true, false, true, true, true, false]),
    ];
    for (state, seen_all, expected) in rows {
        let got = [
            queries::known_terminated(state),
            queries::could_run(state, seen_all),
            queries::should_be_finished(state, seen_all),
            queries::termination_requested(state),
            queries::runtime_should_be_removed(state, seen_all),
            queries::content_should_be_removed(state, seen_all),
        ];
        assert_eq!(got, expected, "{state:?}");
    }
    let removed = WorkerState { desired: false, ..terminated.clone() };
    let deleted = WorkerState { deleted: true, ..terminated };
    let evicted = WorkerState { evicted: true, ..sync };
    for state in [removed, deleted, evicted] {
        assert!(queries::content_should_be_removed(Some(&state), false));
    }
}

#[test]
fn the_next_turn_is_due_by_the_result_of_the_last() {
    let minute = 60 * SECOND;
    for (next, random, expected) in [
        (NextAttempt::Resync, 0.0, 60),
        (NextAttempt::Resync, 0.5, 75),
        (NextAttempt::Failed, 0.0, 10),
        (NextAttempt::Failed, 0.5, 12),
        (NextAttempt::NetworkNotReady, 0.0, 1),
        (NextAttempt::Until(nanos(33)), 0.9, 33),
        (NextAttempt::Until(nanos(-5)), 0.9, 0),
    ] {
        let got = next_run_unix_nanos(next, minute, random, &at(0));
        assert_eq!((got - nanos(0)) / SECOND, expected, "{next:?}");
    }
    assert!(next_run_unix_nanos(NextAttempt::Failed, 4 * SECOND, 1.0, &at(0)) < nanos(6));
}

/// The events of a random history.
#[derive(Clone, Debug)]
enum HistoryEvent {
    Create,
    Update { deleting: Option<i64>, terminal: bool },
    Removed,
    Killed(Option<i64>),
    Orphan,
    Started,
    Outcome(SyncOutcome),
}

fn history_event() -> impl Strategy<Value = HistoryEvent> {
    let outcomes = prop::sample::select(vec![
        SyncOutcome::Done,
        SyncOutcome::Terminal,
        SyncOutcome::Failed,
        SyncOutcome::Cancelled,
    ]);
    prop_oneof![
        2 => Just(HistoryEvent::Create),
        2 => (prop::option::weighted(0.2, 0..40_i64), prop::bool::weighted(0.1))
            .prop_map(|(deleting, terminal)| HistoryEvent::Update { deleting, terminal }),
        1 => Just(HistoryEvent::Removed),
        1 => prop::option::of(0..40_i64).prop_map(HistoryEvent::Killed),
        1 => Just(HistoryEvent::Orphan),
        1 => Just(HistoryEvent::Started),
        4 => outcomes.prop_map(HistoryEvent::Outcome),
    ]
}

/// The pod as it is when the event happens.
fn pod_at(event: &HistoryEvent, base: &Pod) -> Pod {
    let mut pod = base.clone();
    if let HistoryEvent::Update { deleting: grace, terminal } = event {
        if let Some(grace) = grace {
            pod = deleting(pod);
            pod.metadata.deletion_grace_period_seconds = Some(*grace);
        }
        if *terminal {
            pod.status.phase = "Failed".into();
        }
    }
    pod
}

/// Invariants of every transition.
fn check(before: Option<&WorkerState>, got: &Transition) -> Result<(), TestCaseError> {
    if let Some(before) = before {
        prop_assert!(got.state.phase >= before.phase);
        if let (Some(old), Some(new)) = (before.grace_seconds, got.state.grace_seconds) {
            prop_assert!(new <= old);
        }
        if let Some(old) = before.kill_deadline_unix_nanos {
            prop_assert!(got.state.kill_deadline_unix_nanos.is_some_and(|new| new <= old));
        }
        prop_assert!(before.phase < WorkerPhase::Terminated || !got.ended);
    }
    prop_assert!(got.state.phase != WorkerPhase::Finished || got.work.is_none());
    prop_assert!(!got.start_new_worker || got.forget);
    let deadline_set = got.state.kill_deadline_unix_nanos.is_some();
    prop_assert!(got.state.phase != WorkerPhase::Terminating || deadline_set);
    Ok(())
}

fn count(counts: &mut BTreeMap<String, usize>, before: Option<&WorkerState>, got: &Transition) {
    *counts.entry(format!("phase {}", got.state.phase.as_str())).or_default() += 1;
    let shrunk =
        before.and_then(|state| state.grace_seconds).is_some_and(|old| Some(old) != got.state.grace_seconds);
    for (what, happened) in [
        ("cancel", got.cancel_running),
        ("ended", got.ended),
        ("forget", got.forget),
        ("start new worker", got.start_new_worker),
        ("runtime only", got.state.runtime_only),
        ("shrunk", shrunk),
    ] {
        *counts.entry(what.to_owned()).or_default() += usize::from(happened);
    }
}

#[test]
fn phases_only_move_forward_and_the_grace_period_only_shrinks() {
    let counts: RefCell<BTreeMap<String, usize>> = RefCell::default();
    let histories = (prop::collection::vec((history_event(), 0..20_i64), 1..25), any::<bool>());
    let mut runner = TestRunner::new(Config { cases: 2000, ..Config::with_source_file(file!()) });
    let result = runner.run(&histories, |(history, is_static)| {
        let base = if is_static { from_file(with_grace(30)) } else { with_grace(30) };
        let observed = in_sandbox().running("a").0;
        let (mut state, mut now): (Option<WorkerState>, i64) = (None, 0);
        for (event, passed) in history {
            now += passed;
            let pod = pod_at(&event, &base);
            let input = match &event {
                HistoryEvent::Create => update(UpdateKind::Create, &pod),
                HistoryEvent::Update { .. } => update(UpdateKind::Update, &pod),
                HistoryEvent::Removed => Input::Removed { pod: Some(&pod) },
                HistoryEvent::Killed(grace) => {
                    Input::Killed { pod: &pod, grace_seconds: *grace, patch: None }
                }
                HistoryEvent::Orphan => Input::ObservedOrphan { observed: &observed },
                HistoryEvent::Started => Input::Started,
                HistoryEvent::Outcome(_) if state.is_none() => continue,
                HistoryEvent::Outcome(result) => outcome(*result, &pod),
            };
            let got = step(state.as_ref(), &input, &at(now));
            count(&mut counts.borrow_mut(), state.as_ref(), &got);
            check(state.as_ref(), &got)?;
            state = (!got.forget).then_some(got.state);
        }
        Ok(())
    });
    println!("reached: {:?}", counts.borrow());
    result.unwrap();
    assert!(counts.borrow().values().all(|count| *count > 20), "{:?}", counts.borrow());
}

#[test]
fn worker_flags_started_and_deleted_are_never_reset() {
    let (api, file) = (with_grace(5), from_file(with_grace(5)));
    let killed = |pod| Input::Killed { pod, grace_seconds: None, patch: None };
    // A pod that is killed without a worker is desired; a removed pod stays removed.
    assert!(step(None, &killed(&api), &at(0)).state.desired);
    assert!(!step(Some(&terminating(&api)), &killed(&api), &at(11)).state.desired);
    // Only a static pod may not have started.
    assert!(step(None, &killed(&api), &at(0)).state.started);
    assert!(!step(None, &killed(&file), &at(0)).state.started);
    let begun = step(Some(&running(&file)), &Input::Started, &at(1)).state;
    assert!(step(Some(&begun), &killed(&file), &at(2)).state.started);

    let deleted = deleting(api.clone());
    let gone = step(Some(&running(&api)), &Input::Removed { pod: Some(&deleted) }, &at(3)).state;
    assert!(gone.deleted);
    assert!(step(Some(&gone), &Input::Removed { pod: Some(&api) }, &at(4)).state.deleted);
    assert!(!terminating(&api).deleted);
}

#[test]
fn a_static_pod_with_a_sandbox_or_a_container_has_started() {
    let pod = from_file(with_grace(5));
    for (observed, begun) in
        [(empty_observation().0, false), (in_sandbox().0, true), (empty_observation().exited("a", 0).0, true)]
    {
        let input = Input::Update { kind: UpdateKind::Create, pod: &pod, observed: Some(&observed) };
        assert_eq!(step(None, &input, &at(0)).state.started, begun, "{observed:?}");
    }
    let update = Input::Update { kind: UpdateKind::Update, pod: &pod, observed: None };
    let begun = step(Some(&running(&pod)), &Input::Started, &at(1)).state;
    assert!(step(Some(&begun), &update, &at(2)).state.started);
}

#[test]
fn only_a_new_termination_cancels_and_only_a_real_end_is_reported() {
    let pod = with_grace(5);
    let again = step(Some(&running(&pod)), &update(UpdateKind::Update, &pod), &at(1));
    assert!(!again.cancel_running && !again.ended);
    let failed = step(Some(&terminating(&pod)), &outcome(SyncOutcome::Failed, &pod), &at(11));
    assert!(!failed.ended);
}

#[test]
fn a_clock_set_back_never_extends_the_grace_period() {
    let state = terminating(&with_grace(5));
    assert_eq!(grace_left_seconds(&state, &at(12)), 3);
    assert_eq!(grace_left_seconds(&state, &at(-3600)), 5);
}
