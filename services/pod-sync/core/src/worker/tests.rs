use std::cell::RefCell;
use std::collections::BTreeMap;

use keelson_kube_model::Pod;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::json;

use super::*;
use crate::testing::{at, deleting, from_file, in_sandbox, nanos, pod, seen};

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
fn the_first_update_begins_to_sync() {
    let got = step(None, &update(UpdateKind::Create, &with_grace(30)), &at(0));
    assert_eq!((got.state.phase, got.work), (WorkerPhase::Sync, Some(Work::Sync)));
    assert!(got.state.desired && got.state.started && !got.cancel_running && !got.forget);
}

#[test]
fn a_uid_that_nobody_knows_is_not_ended_and_not_kept() {
    let pod = with_grace(30);
    for input in [Input::Removed { pod: None }, Input::Removed { pod: Some(&pod) }, Input::Started] {
        let got = step(None, &input, &at(0));
        assert_eq!((got.forget, got.ended, got.work), (true, false, None), "{input:?}");
    }
}

#[test]
fn a_deletion_is_not_forgotten() {
    let state = step(None, &update(UpdateKind::Create, &deleting(with_grace(30))), &at(0)).state;
    assert!(state.deleted);
    let state = step(Some(&state), &update(UpdateKind::Update, &with_grace(30)), &at(1)).state;
    assert!(state.deleted);
    assert!(!running(&with_grace(30)).deleted);
}

#[test]
fn phases_have_their_words() {
    let words: Vec<&str> =
        [WorkerPhase::Sync, WorkerPhase::Terminating, WorkerPhase::Terminated, WorkerPhase::Finished]
            .map(WorkerPhase::as_str)
            .into();
    assert_eq!(words, ["sync", "terminating", "terminated", "finished"]);
}

#[test]
fn a_pod_of_a_final_phase_with_nothing_running_is_only_cleaned() {
    let mut pod = with_grace(30);
    pod.status.phase = "Succeeded".into();
    let observed = seen().sandbox(0, false).exited("a", 0).0;
    let input = Input::Update { kind: UpdateKind::Create, pod: &pod, observed: Some(&observed) };
    let got = step(None, &input, &at(0));
    assert_eq!((got.state.phase, got.work, got.ended), (WorkerPhase::Terminated, Some(Work::Clean), true));
    for observed in [in_sandbox().0, seen().running("a").0] {
        let input = Input::Update { kind: UpdateKind::Create, pod: &pod, observed: Some(&observed) };
        assert_eq!(step(None, &input, &at(0)).state.phase, WorkerPhase::Terminating);
    }
    assert_eq!(step(None, &update(UpdateKind::Create, &pod), &at(0)).state.phase, WorkerPhase::Terminating);
}

#[test]
fn each_cause_ends_a_running_pod_and_cancels_its_sync() {
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
fn a_pod_that_had_its_run_ends_without_cancelling_anything() {
    let pod = with_grace(5);
    let got = step(Some(&running(&pod)), &outcome(SyncOutcome::Terminal, &pod), &at(10));
    assert_eq!(got.work, Some(Work::Terminate { kill_deadline_unix_nanos: nanos(15) }));
    assert!(!got.cancel_running && got.state.cause == Some(Reason::PodTerminal));
}

#[test]
fn it_goes_from_terminating_through_terminated_to_finished() {
    let pod = with_grace(5);
    let state =
        step(Some(&running(&pod)), &update(UpdateKind::Update, &deleting(pod.clone())), &at(10)).state;
    let failed = step(Some(&state), &outcome(SyncOutcome::Failed, &pod), &at(11));
    assert_eq!((failed.state.phase, failed.work), (WorkerPhase::Terminating, None), "tried again later");
    let ended = step(Some(&state), &outcome(SyncOutcome::Done, &pod), &at(12));
    assert_eq!(
        (ended.state.phase, ended.work, ended.ended),
        (WorkerPhase::Terminated, Some(Work::Clean), true)
    );
    let failed = step(Some(&ended.state), &outcome(SyncOutcome::Failed, &pod), &at(13));
    assert_eq!(failed.state.phase, WorkerPhase::Terminated);
    let finished = step(Some(&ended.state), &outcome(SyncOutcome::Done, &pod), &at(14));
    assert_eq!((finished.state.phase, finished.work), (WorkerPhase::Finished, None));
    assert!(!finished.forget, "the source still names it");
    let gone = step(Some(&finished.state), &Input::Removed { pod: Some(&pod) }, &at(15));
    assert!(gone.forget && !gone.begin_anew);
}

#[test]
fn a_removed_pod_is_forgotten_when_it_has_finished() {
    let pod = with_grace(5);
    let ended = step(Some(&terminating(&pod)), &outcome(SyncOutcome::Done, &pod), &at(12)).state;
    assert!(step(Some(&ended), &outcome(SyncOutcome::Done, &pod), &at(13)).forget);
}

#[test]
fn a_finished_uid_takes_no_more_updates() {
    let pod = with_grace(5);
    let state = WorkerState { phase: WorkerPhase::Finished, desired: true, ..running(&pod) };
    let got = step(Some(&state), &update(UpdateKind::Update, &pod), &at(20));
    assert_eq!((got.work, got.forget, got.ended), (None, false, false));
}

#[test]
fn the_same_uid_added_anew_begins_again_after_the_end() {
    let pod = with_grace(5);
    let got = step(Some(&terminating(&pod)), &update(UpdateKind::Create, &pod), &at(11));
    assert!(got.state.restart_requested && got.work.is_none() && !got.cancel_running);
    let ended = step(Some(&got.state), &outcome(SyncOutcome::Done, &pod), &at(12)).state;
    let finished = step(Some(&ended), &outcome(SyncOutcome::Done, &pod), &at(13));
    assert!(finished.forget && finished.begin_anew);
    let removed_again = step(Some(&got.state), &Input::Removed { pod: Some(&pod) }, &at(12)).state;
    assert!(!removed_again.restart_requested);
}

#[test]
fn a_state_read_back_from_disk_goes_on_where_it_was() {
    let pod = with_grace(30);
    let stored = WorkerState { desired: true, ..terminating(&pod) };
    let stored = serde_json::to_string(&stored).unwrap();
    let state = serde_json::from_str::<WorkerState>(&stored).unwrap().read_back();
    let got = step(Some(&state), &update(UpdateKind::Create, &pod), &at(25));
    assert!(!got.state.restart_requested, "a replay is no request to begin anew");
    assert_eq!(got.work, Some(Work::Terminate { kill_deadline_unix_nanos: nanos(40) }));
    assert_eq!(grace_left_seconds(&got.state, &at(25)), 15);
    assert!(step(Some(&got.state), &update(UpdateKind::Create, &pod), &at(26)).state.restart_requested);
}

#[test]
fn a_pod_that_its_source_had_dropped_begins_anew_when_it_is_back_after_a_restart() {
    let pod = with_grace(30);
    let stored = terminating(&pod);
    assert!(!stored.desired);
    let got = step(Some(&stored.read_back()), &update(UpdateKind::Create, &pod), &at(25));
    assert!(got.state.restart_requested);
}

#[test]
fn the_grace_left_is_rounded_up_and_never_negative() {
    let state = terminating(&with_grace(30));
    let mut moment = at(39);
    moment.now_unix_nanos += 1;
    assert_eq!(grace_left_seconds(&state, &moment), 1);
    assert_eq!(grace_left_seconds(&state, &at(40)), 0);
    assert_eq!(grace_left_seconds(&state, &at(99)), 0);
}

#[test]
fn grace_is_found_in_order_and_zero_stays_zero() {
    let mut pod = with_grace(30);
    assert_eq!(grace_seconds(None, Some(&pod), None), 30);
    assert_eq!(grace_seconds(None, Some(&pod), Some(60)), 60, "an override counts even when it is longer");
    assert_eq!(grace_seconds(Some(20), Some(&pod), Some(60)), 20, "it only shrinks");
    assert_eq!(grace_seconds(Some(60), Some(&pod), None), 60, "the spec is not asked once a grace is set");
    pod.metadata.deletion_grace_period_seconds = Some(10);
    assert_eq!(grace_seconds(None, Some(&pod), None), 10);
    assert_eq!(grace_seconds(None, Some(&pod), Some(3)), 3);
    assert_eq!(grace_seconds(Some(5), Some(&pod), None), 5);
    assert_eq!(grace_seconds(None, Some(&with_grace(0)), None), 0);
    assert_eq!(grace_seconds(None, None, None), 1);
}

#[test]
fn a_shorter_grace_cancels_what_is_running_and_a_longer_one_changes_nothing() {
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
fn an_eviction_leaves_its_mark_until_the_pod_has_terminated() {
    let pod = with_grace(30);
    let patch = StatusPatch {
        reason: "Evicted".into(),
        message: "m".into(),
        disruption_target: true,
        condition_message: String::new(),
    };
    let kill = Input::Killed { pod: &pod, grace_seconds: Some(0), patch: Some(patch.clone()) };
    let got = step(Some(&running(&pod)), &kill, &at(10));
    assert!(got.state.evicted && got.state.status_patch == Some(patch));
    assert_eq!(got.state.kill_deadline_unix_nanos, Some(nanos(10)));
    let done = WorkerState { phase: WorkerPhase::Terminated, ..running(&pod) };
    assert_eq!(step(Some(&done), &kill, &at(10)).state.status_patch, None);
}

#[test]
fn a_static_pod_that_never_started_finishes_without_any_work() {
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
fn a_static_pod_that_was_found_in_the_runtime_has_started() {
    let pod = from_file(with_grace(30));
    let observed = in_sandbox().running("a").0;
    let input = Input::Update { kind: UpdateKind::Create, pod: &pod, observed: Some(&observed) };
    assert!(step(None, &input, &at(0)).state.started);
}

#[test]
fn an_orphan_is_ended_with_the_grace_of_its_records_and_then_forgotten() {
    let observed = in_sandbox().running("a").edit(|record| record.termination_grace_seconds = Some(7)).0;
    let got = step(None, &Input::ObservedOrphan { observed: &observed }, &at(10));
    assert_eq!(got.work, Some(Work::TerminateOrphan { kill_deadline_unix_nanos: nanos(17) }));
    assert_eq!(got.state.cause, Some(Reason::OrphanedPod));
    let done = Input::Outcome { outcome: SyncOutcome::Done, pod: None };
    let ended = step(Some(&got.state), &done, &at(11));
    assert!(ended.forget && ended.ended && !ended.begin_anew);
}

#[test]
fn what_a_source_names_is_never_ended_as_an_orphan() {
    let state = running(&with_grace(30));
    let observed = in_sandbox().running("a").0;
    let got = step(Some(&state), &Input::ObservedOrphan { observed: &observed }, &at(10));
    assert_eq!((got.state, got.work), (state, None));
}

#[test]
fn an_orphan_that_a_source_names_meanwhile_begins_anew_after_its_end() {
    let observed = in_sandbox().running("a").0;
    let orphan = step(None, &Input::ObservedOrphan { observed: &observed }, &at(10)).state;
    let named = step(Some(&orphan), &update(UpdateKind::Create, &with_grace(30)), &at(11)).state;
    let done = Input::Outcome { outcome: SyncOutcome::Done, pod: None };
    let ended = step(Some(&named), &done, &at(12));
    assert!(ended.forget && ended.begin_anew);
}

#[test]
fn a_removal_of_a_uid_without_a_worker_concerns_nobody() {
    let got = step(None, &Input::Removed { pod: None }, &at(0));
    assert!(got.forget && got.work.is_none());
}

#[test]
fn predicates_answer_for_known_and_unknown_uids() {
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
            ask::known_terminated(state),
            ask::could_run(state, seen_all),
            ask::should_be_finished(state, seen_all),
            ask::termination_requested(state),
            ask::runtime_should_be_removed(state, seen_all),
            ask::content_should_be_removed(state, seen_all),
        ];
        assert_eq!(got, expected, "{state:?}");
    }
    let removed = WorkerState { desired: false, ..terminated.clone() };
    let deleted = WorkerState { deleted: true, ..terminated };
    let evicted = WorkerState { evicted: true, ..sync };
    for state in [removed, deleted, evicted] {
        assert!(ask::content_should_be_removed(Some(&state), false));
    }
}

#[test]
fn the_next_attempt_comes_as_the_result_says() {
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

/// What a random history is made of.
#[derive(Clone, Debug)]
enum Happens {
    Create,
    Update { deleting: Option<i64>, terminal: bool },
    Removed,
    Killed(Option<i64>),
    Orphan,
    Started,
    Outcome(SyncOutcome),
}

fn happens() -> impl Strategy<Value = Happens> {
    let outcomes = prop::sample::select(vec![
        SyncOutcome::Done,
        SyncOutcome::Terminal,
        SyncOutcome::Failed,
        SyncOutcome::Cancelled,
    ]);
    prop_oneof![
        2 => Just(Happens::Create),
        2 => (prop::option::weighted(0.2, 0..40_i64), prop::bool::weighted(0.1))
            .prop_map(|(deleting, terminal)| Happens::Update { deleting, terminal }),
        1 => Just(Happens::Removed),
        1 => prop::option::of(0..40_i64).prop_map(Happens::Killed),
        1 => Just(Happens::Orphan),
        1 => Just(Happens::Started),
        4 => outcomes.prop_map(Happens::Outcome),
    ]
}

/// The pod as it is when the event happens.
fn pod_at(event: &Happens, base: &Pod) -> Pod {
    let mut pod = base.clone();
    if let Happens::Update { deleting: grace, terminal } = event {
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

/// What must hold of every transition.
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
    prop_assert!(!got.begin_anew || got.forget);
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
        ("begin anew", got.begin_anew),
        ("runtime only", got.state.runtime_only),
        ("shrunk", shrunk),
    ] {
        *counts.entry(what.to_owned()).or_default() += usize::from(happened);
    }
}

#[test]
fn any_history_moves_forward_only_and_its_grace_only_shrinks() {
    let counts: RefCell<BTreeMap<String, usize>> = RefCell::default();
    let histories = (prop::collection::vec((happens(), 0..20_i64), 1..25), any::<bool>());
    let mut runner = TestRunner::new(Config { cases: 2000, ..Config::with_source_file(file!()) });
    let result = runner.run(&histories, |(history, is_static)| {
        let base = if is_static { from_file(with_grace(30)) } else { with_grace(30) };
        let observed = in_sandbox().running("a").0;
        let (mut state, mut now): (Option<WorkerState>, i64) = (None, 0);
        for (event, passed) in history {
            now += passed;
            let pod = pod_at(&event, &base);
            let input = match &event {
                Happens::Create => update(UpdateKind::Create, &pod),
                Happens::Update { .. } => update(UpdateKind::Update, &pod),
                Happens::Removed => Input::Removed { pod: Some(&pod) },
                Happens::Killed(grace) => Input::Killed { pod: &pod, grace_seconds: *grace, patch: None },
                Happens::Orphan => Input::ObservedOrphan { observed: &observed },
                Happens::Started => Input::Started,
                Happens::Outcome(_) if state.is_none() => continue,
                Happens::Outcome(result) => outcome(*result, &pod),
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
fn marks_once_made_stay() {
    let (api, file) = (with_grace(5), from_file(with_grace(5)));
    let killed = |pod| Input::Killed { pod, grace_seconds: None, patch: None };
    // Whoever is killed without a worker is one that a source names; one that was removed stays removed.
    assert!(step(None, &killed(&api), &at(0)).state.desired);
    assert!(!step(Some(&terminating(&api)), &killed(&api), &at(11)).state.desired);
    // Only a static pod may not have begun.
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
fn a_sandbox_or_a_container_alone_says_that_a_static_pod_has_begun() {
    let pod = from_file(with_grace(5));
    for (observed, begun) in [(seen().0, false), (in_sandbox().0, true), (seen().exited("a", 0).0, true)] {
        let input = Input::Update { kind: UpdateKind::Create, pod: &pod, observed: Some(&observed) };
        assert_eq!(step(None, &input, &at(0)).state.started, begun, "{observed:?}");
    }
    let update = Input::Update { kind: UpdateKind::Update, pod: &pod, observed: None };
    let begun = step(Some(&running(&pod)), &Input::Started, &at(1)).state;
    assert!(step(Some(&begun), &update, &at(2)).state.started);
}

#[test]
fn only_a_beginning_end_cancels_what_is_done_and_only_a_real_one_is_told() {
    let pod = with_grace(5);
    let again = step(Some(&running(&pod)), &update(UpdateKind::Update, &pod), &at(1));
    assert!(!again.cancel_running && !again.ended);
    let failed = step(Some(&terminating(&pod)), &outcome(SyncOutcome::Failed, &pod), &at(11));
    assert!(!failed.ended);
}

#[test]
fn a_clock_that_is_set_back_gives_no_more_than_the_whole_grace() {
    let state = terminating(&with_grace(5));
    assert_eq!(grace_left_seconds(&state, &at(12)), 3);
    assert_eq!(grace_left_seconds(&state, &at(-3600)), 5);
}
