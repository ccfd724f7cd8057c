//! The watchdog over services, the reported pods and the event cursors.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use keelson_node_status_core::health::{NO_WATCH_MS, Progress, SILENCE_MS, Watchdog};
use keelson_node_status_core::{
    Cursor, Deletion, NotAPod, Page, PodDocument, PodUpdate, ReportedPods, Termination,
};
use keelson_testkit::Reached;
use proptest::prelude::*;

fn no_answer() -> Progress {
    Progress::NoAnswer { error: "no socket".into() }
}

#[test]
fn a_loop_is_stuck_after_its_own_limit_or_thirty_seconds() {
    type Loops = &'static [(&'static str, u64, u64)];
    let table: &[(Loops, Progress)] = &[
        (&[], Progress::Healthy),
        (&[("a", 30_000, 30_000), ("b", 10_000, 0)], Progress::Healthy),
        (&[("a", 30_001, 30_000)], Progress::Stuck { loop_name: "a".into() }),
        (&[("a", 1, 30_000), ("b", 30_001, 0)], Progress::Stuck { loop_name: "b".into() }),
        (&[("a", 50_000, 60_000)], Progress::Healthy),
    ];
    for (loops, answer) in table {
        assert_eq!(Progress::from_loops(loops.iter().copied()), *answer);
    }
}

#[test]
fn ready_names_a_service_that_never_answered_at_once() {
    let mut watchdog = Watchdog::new(&["pod-sync", "runtime-shim"]);
    assert_eq!(watchdog.errors(0), ["pod-sync has not answered yet", "runtime-shim has not answered yet"]);
    assert!(!watchdog.all_asked());
    watchdog.record("pod-sync", no_answer(), 5);
    watchdog.record("runtime-shim", Progress::Healthy, 5);
    assert!(watchdog.all_asked() && !watchdog.all_healthy());
    assert_eq!(watchdog.errors(5), ["pod-sync has not answered yet (no socket)"]);
    assert_eq!(watchdog.next_change_ms(5), None);
}

#[test]
fn ready_names_a_service_that_stops_answering_after_thirty_seconds() {
    let mut watchdog = Watchdog::new(&["pod-sync"]);
    watchdog.record("pod-sync", Progress::Healthy, 1_000);
    watchdog.record("pod-sync", no_answer(), 11_000);
    assert_eq!(watchdog.errors(30_999), [""; 0]);
    assert_eq!(watchdog.next_change_ms(11_000), Some(1_000 + SILENCE_MS));
    assert_eq!(
        watchdog.errors(31_000),
        ["pod-sync makes no progress: it has not answered for more than 30s (no socket)"]
    );
    assert_eq!(watchdog.next_change_ms(31_000), None);
    watchdog.record("pod-sync", Progress::Healthy, 40_000);
    assert_eq!(watchdog.errors(40_000), [""; 0]);
    assert!(watchdog.all_healthy());
}

#[test]
fn ready_names_a_stuck_loop_at_once_although_its_service_answers() {
    let mut watchdog = Watchdog::new(&["volume-manager"]);
    watchdog.record("volume-manager", Progress::Stuck { loop_name: "mounts".into() }, 0);
    assert_eq!(
        watchdog.errors(0),
        ["volume-manager makes no progress: its loop \"mounts\" has not run for more than 30s"]
    );
}

#[test]
fn ready_names_pod_config_only_after_five_minutes() {
    let stuck = Progress::Stuck { loop_name: "file-source".into() };
    let of_silence =
        "pod-config has read no pod source for more than 5m: it does not answer (no socket)".to_owned();
    let mut watchdog = Watchdog::new(&[]).with_source_reader("pod-config");
    assert_eq!((watchdog.errors(0), watchdog.next_change_ms(0), watchdog.all_asked()), (vec![], None, false));

    // It never answered: its time starts with the first request.
    watchdog.record("pod-config", no_answer(), 1_000);
    watchdog.record("pod-config", no_answer(), 200_000);
    assert_eq!(watchdog.errors(NO_WATCH_MS + 999), [""; 0]);
    assert_eq!(watchdog.next_change_ms(200_000), Some(NO_WATCH_MS + 1_000));
    assert_eq!(watchdog.errors(NO_WATCH_MS + 1_000), [of_silence]);

    // An answer is not enough: its loops must make progress.
    watchdog.record("pod-config", stuck.clone(), NO_WATCH_MS + 2_000);
    assert_eq!(
        watchdog.errors(NO_WATCH_MS + 2_000),
        ["pod-config has read no pod source for more than 5m: its loop \"file-source\" is stuck"]
    );
    watchdog.record("pod-config", Progress::Healthy, 400_000);
    assert_eq!((watchdog.errors(900_000), watchdog.next_change_ms(400_000)), (vec![], None));
    watchdog.record("pod-config", stuck, 500_000);
    assert_eq!(watchdog.errors(699_999), [""; 0]);
    assert_eq!(watchdog.errors(700_000).len(), 1);
}

#[test]
fn an_answer_of_an_unwatched_service_is_ignored() {
    let mut watchdog = Watchdog::new(&["pod-sync"]);
    let before = watchdog.clone();
    watchdog.record("node-api", Progress::Healthy, 1);
    assert_eq!(watchdog, before);
}

fn pod(phase: &str, ready: &str, extra: &str) -> Vec<u8> {
    format!(
        r#"{{"metadata":{{"name":"web"}},"spec":{{"containers":[{{"name":"c"}}]}},"status":{{"phase":"{phase}",
        "conditions":[{{"type":"PodScheduled","status":"True"}},{{"type":"Ready","status":"{ready}"}}],
        "message":"{extra}"}}}}"#
    )
    .into_bytes()
}

/// What a document changes against the last report.
#[derive(Debug, PartialEq)]
enum PodChange {
    Unchanged,
    Detail,
    PhaseOrReadiness(PodView),
}

#[derive(Debug, PartialEq)]
struct PodView {
    phase: String,
    ready: bool,
}

fn view(update: &PodUpdate) -> PodView {
    PodView { phase: update.report.status.phase.to_string(), ready: update.report.status.ready }
}

fn phase_or_readiness(phase: &str, ready: bool) -> PodChange {
    PodChange::PhaseOrReadiness(PodView { phase: phase.into(), ready })
}

fn change(reported: &mut ReportedPods, document: &PodDocument<'_>) -> Result<PodChange, NotAPod> {
    Ok(match reported.observe(document, false)? {
        None => PodChange::Unchanged,
        Some(update) if update.urgent => PodChange::PhaseOrReadiness(view(&update)),
        Some(_) => PodChange::Detail,
    })
}

/// Observes a complete document.
fn observe(
    reported: &mut ReportedPods,
    uid: &str,
    pod_json: &[u8],
    termination: Termination,
) -> Result<PodChange, NotAPod> {
    change(reported, &PodDocument { uid, pod_json, termination, ..PodDocument::default() })
}

#[test]
fn only_a_change_of_phase_or_readiness_is_urgent() {
    let mut reported = ReportedPods::default();
    let steps = [
        (pod("Pending", "False", ""), false, phase_or_readiness("Pending", false)),
        (pod("Pending", "False", ""), false, PodChange::Unchanged),
        (pod("Pending", "False", "x"), false, PodChange::Detail),
        (pod("Running", "False", "x"), false, phase_or_readiness("Running", false)),
        (pod("Running", "True", "x"), false, phase_or_readiness("Running", true)),
        (pod("Running", "True", "x"), true, phase_or_readiness("Running", true)),
        (pod("Running", "True", "x"), true, PodChange::Unchanged),
    ];
    for (document, stopped, expected) in steps {
        let termination = Termination { stopped, finished: false };
        assert_eq!(observe(&mut reported, "u1", &document, termination).unwrap(), expected);
    }
    assert_eq!((reported.len(), reported.is_empty()), (1, false));
}

#[test]
fn a_failed_pod_report_is_repeated() {
    let mut reported = ReportedPods::default();
    let document = pod("Running", "True", "");
    let observe =
        |reported: &mut ReportedPods| observe(reported, "u1", &document, Termination::default()).unwrap();
    observe(&mut reported);
    reported.repeat("u1");
    assert_eq!(observe(&mut reported), phase_or_readiness("Running", true));
    assert_eq!(observe(&mut reported), PodChange::Unchanged);
    assert!(reported.forget("u1"));
    assert!(!reported.forget("u1"));
    assert!(reported.is_empty());
    assert_eq!(observe(&mut reported), phase_or_readiness("Running", true));
}

#[test]
fn a_replay_drops_missing_pods_and_repeats_no_report() {
    let mut reported = ReportedPods::default();
    for uid in ["u1", "u2", "u3"] {
        observe(&mut reported, uid, &pod("Running", "True", ""), Termination::default()).unwrap();
    }
    reported.begin_replay();
    assert_eq!(
        observe(&mut reported, "u1", &pod("Running", "True", ""), Termination::default()).unwrap(),
        PodChange::Unchanged
    );
    assert_eq!(
        observe(&mut reported, "u3", &pod("Failed", "False", ""), Termination::default()).unwrap(),
        phase_or_readiness("Failed", false)
    );
    assert_eq!(reported.end_replay(), ["u2"]);
    assert_eq!(reported.len(), 2);
}

#[test]
fn a_pod_without_status_is_pending_and_an_invalid_document_is_an_error() {
    let view = |text: &str| {
        let document = PodDocument { uid: "u1", pod_json: text.as_bytes(), ..PodDocument::default() };
        PodUpdate::first(&document, false).map(|update| view(&update))
    };
    for text in ["{}", r#"{"status":{}}"#, r#"{"status":{"phase":null,"conditions":null}}"#] {
        assert_eq!(view(text).unwrap(), PodView { phase: "Pending".into(), ready: false });
    }
    for text in ["[", r#"{"status":null}"#, r#"{"status":{"phase":1}}"#] {
        assert_eq!(view(text).unwrap_err().to_string(), "the document of pod u1 is not a Pod");
    }
}

const POD: &str = r#"{"metadata":{"name":"web"},"spec":{"hostNetwork":true},"status":{"phase":"Unknown"}}"#;
const RUNNING: &str = r#"{"phase":"Running","conditions":[{"type":"Ready","status":"True"}]}"#;

fn separate<'a>(pod_json: &'a str, status_json: &'a str, pod_revision: u64) -> PodDocument<'a> {
    PodDocument {
        uid: "u1",
        pod_json: pod_json.as_bytes(),
        status_json: status_json.as_bytes(),
        pod_revision,
        ..PodDocument::default()
    }
}

#[test]
fn a_separate_status_is_reported_with_the_pod_that_was_sent_before() {
    let mut reported = ReportedPods::default();
    let first = reported.observe(&separate(POD, r#"{"phase":"Pending"}"#, 4), true).unwrap().unwrap();
    assert_eq!((view(&first), first.urgent), (PodView { phase: "Pending".into(), ready: false }, true));
    let second = reported.observe(&separate("", RUNNING, 4), true).unwrap().unwrap();
    assert_eq!((view(&second), second.urgent), (PodView { phase: "Running".into(), ready: true }, true));
    assert!(Arc::ptr_eq(&first.report.pod, &second.report.pod) && second.report.pod.host_network);
    let document = String::from_utf8(second.report.document().unwrap()).unwrap();
    assert_eq!(document, POD.replace(r#"{"phase":"Unknown"}"#, RUNNING));
    assert_eq!(change(&mut reported, &separate("", RUNNING, 4)).unwrap(), PodChange::Unchanged);

    // A failed report needs no new pod.
    reported.repeat("u1");
    let again = reported.observe(&separate("", RUNNING, 4), true).unwrap().unwrap();
    assert_eq!((again.report, again.urgent), (second.report, true));
    let deletion = Some(Deletion { unix_seconds: 60, grace_seconds: 30 });
    let ending = PodDocument { deletion, ..separate("", RUNNING, 4) };
    assert!(reported.observe(&ending, true).unwrap().is_some_and(|update| update.report.is_deleting()));
}

#[test]
fn revisions_of_another_stream_neither_hide_a_changed_pod_nor_repeat_a_report() {
    let mut reported = ReportedPods::default();
    reported.observe(&separate(POD, RUNNING, 4), false).unwrap();
    reported.begin_replay();
    assert_eq!(change(&mut reported, &separate(POD, RUNNING, 1)).unwrap(), PodChange::Unchanged);
    assert_eq!(change(&mut reported, &separate("", RUNNING, 1)).unwrap(), PodChange::Unchanged);
    let changed = POD.replace("true", "false");
    assert_eq!(change(&mut reported, &separate(&changed, RUNNING, 2)).unwrap(), PodChange::Detail);
    reported.begin_replay();
    assert_eq!(change(&mut reported, &separate(POD, RUNNING, 2)).unwrap(), PodChange::Detail);
    // A restored pod may have changed without a new revision.
    assert_eq!(change(&mut reported, &separate(&changed, RUNNING, 2)).unwrap(), PodChange::Detail);
    assert_eq!(change(&mut reported, &separate("", RUNNING, 2)).unwrap(), PodChange::Unchanged);
    // The server did not send this revision.
    for (uid, revision) in [("u1", 3), ("u2", 2)] {
        let document = PodDocument { uid, ..separate("", "{}", revision) };
        assert!(change(&mut reported, &document).is_err(), "{uid}");
    }
}

#[test]
fn an_event_cursor_advances_and_detects_a_restart() {
    let table = [
        (("", 0), ("a", 7, 0), (7, 0, false)),
        (("a", 7), ("a", 9, 0), (9, 0, false)),
        (("a", 7), ("a", 700, 181), (700, 181, false)),
        (("a", 7), ("b", 3, 0), (3, 0, true)),
    ];
    for ((ring, at), (answered, last, lost), (next, missing, restarted)) in table {
        let cursor = Cursor { ring_id: ring.into(), sequence: at };
        let update = cursor.advance(&Page { ring_id: answered, last_sequence: last, lost });
        assert_eq!(update.next, Cursor { ring_id: answered.into(), sequence: next });
        assert_eq!((update.lost, update.restarted), (missing, restarted));
    }
}

/// For any answers, a service that made progress less than 30 s ago is never blamed for silence, and the errors change without a
/// new answer exactly when predicted.
#[test]
fn a_silent_service_is_blamed_exactly_when_predicted() {
    let reached = &Reached::default();
    let answers = proptest::collection::vec((0u64..20_000, any::<bool>()), 1..20);
    proptest!(ProptestConfig::with_cases(1024), |(answers in answers)| {
        let mut watchdog = Watchdog::new(&["pod-sync"]);
        let (mut now, mut last_good) = (0, None);
        let (mut spared, mut blamed, mut predicted, mut recovered) = (false, false, false, false);
        for (wait, good) in answers {
            now += wait;
            watchdog.record("pod-sync", if good { Progress::Healthy } else { no_answer() }, now);
            if good { last_good = Some(now); }
            if let Some(at) = last_good {
                prop_assert_eq!(watchdog.errors(now).is_empty(), good || now - at < SILENCE_MS);
            }
            if let Some(at) = watchdog.next_change_ms(now) {
                prop_assert!(watchdog.errors(at - 1).is_empty());
                prop_assert!(!watchdog.errors(at).is_empty());
                predicted = true;
            }
            recovered |= good && blamed;
            spared |= !good && watchdog.errors(now).is_empty();
            blamed |= last_good.is_some() && !watchdog.errors(now).is_empty();
        }
        reached.case([
            ("never healthy", last_good.is_none()),
            ("silent and not blamed yet", spared),
            ("blamed for its silence", blamed),
            ("healthy again", recovered),
            ("blame is predicted", predicted),
        ]);
    });
    // The rarest: "never healthy", in one case of 20.
    reached.assert_each();
}
