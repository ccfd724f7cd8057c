//! The watchdog over services, the ledger of pods and the cursors of events.

#![allow(clippy::unwrap_used)]

use keelson_node_status_core::health::{Answer, NO_WATCH_MS, SILENCE_MS, Watchdog};
use keelson_node_status_core::{Cursor, Ended, News, Page, PodLedger, PodView};
use keelson_testkit::Reached;
use proptest::prelude::*;

fn silence() -> Answer {
    Answer::None { error: "no socket".into() }
}

#[test]
fn a_loop_is_stuck_beyond_its_own_limit_or_thirty_seconds() {
    type Loops = &'static [(&'static str, u64, u64)];
    let table: &[(Loops, Answer)] = &[
        (&[], Answer::Turning),
        (&[("a", 30_000, 30_000), ("b", 10_000, 0)], Answer::Turning),
        (&[("a", 30_001, 30_000)], Answer::Stuck { loop_name: "a".into() }),
        (&[("a", 1, 30_000), ("b", 30_001, 0)], Answer::Stuck { loop_name: "b".into() }),
        (&[("a", 50_000, 60_000)], Answer::Turning),
    ];
    for (loops, answer) in table {
        assert_eq!(Answer::of_loops(loops.iter().copied()), *answer);
    }
}

#[test]
fn a_service_that_never_answered_is_named_at_once() {
    let mut dog = Watchdog::new(&["pod-sync", "runtime-shim"]);
    assert_eq!(dog.errors(0), ["pod-sync has not answered yet", "runtime-shim has not answered yet"]);
    assert!(!dog.all_asked());
    dog.record("pod-sync", silence(), 5);
    dog.record("runtime-shim", Answer::Turning, 5);
    assert!(dog.all_asked() && !dog.all_turning());
    assert_eq!(dog.errors(5), ["pod-sync has not answered yet (no socket)"]);
    assert_eq!(dog.next_change_ms(5), None);
}

#[test]
fn a_service_that_stops_answering_is_named_after_thirty_seconds() {
    let mut dog = Watchdog::new(&["pod-sync"]);
    dog.record("pod-sync", Answer::Turning, 1_000);
    dog.record("pod-sync", silence(), 11_000);
    assert_eq!(dog.errors(30_999), [""; 0]);
    assert_eq!(dog.next_change_ms(11_000), Some(1_000 + SILENCE_MS));
    assert_eq!(
        dog.errors(31_000),
        ["pod-sync makes no progress: it has not answered for more than 30s (no socket)"]
    );
    assert_eq!(dog.next_change_ms(31_000), None);
    dog.record("pod-sync", Answer::Turning, 40_000);
    assert_eq!(dog.errors(40_000), [""; 0]);
    assert!(dog.all_turning());
}

#[test]
fn a_stuck_loop_is_named_at_once_although_its_service_answers() {
    let mut dog = Watchdog::new(&["volume-manager"]);
    dog.record("volume-manager", Answer::Stuck { loop_name: "mounts".into() }, 0);
    assert_eq!(
        dog.errors(0),
        ["volume-manager makes no progress: its loop \"mounts\" has not turned for more than 30s"]
    );
}

#[test]
fn the_reader_of_the_sources_is_named_only_after_five_minutes() {
    let stuck = Answer::Stuck { loop_name: "file-source".into() };
    let of_silence =
        "pod-config has read no source of pods for more than 5m: it does not answer (no socket)".to_owned();
    let mut dog = Watchdog::new(&[]).with_sources_of("pod-config");
    assert_eq!((dog.errors(0), dog.next_change_ms(0), dog.all_asked()), (vec![], None, false));

    // It never answered: it is given its time since it was first asked.
    dog.record("pod-config", silence(), 1_000);
    dog.record("pod-config", silence(), 200_000);
    assert_eq!(dog.errors(NO_WATCH_MS + 999), [""; 0]);
    assert_eq!(dog.next_change_ms(200_000), Some(NO_WATCH_MS + 1_000));
    assert_eq!(dog.errors(NO_WATCH_MS + 1_000), [of_silence]);

    // An answer alone is no watch: its loops must turn.
    dog.record("pod-config", stuck.clone(), NO_WATCH_MS + 2_000);
    assert_eq!(
        dog.errors(NO_WATCH_MS + 2_000),
        ["pod-config has read no source of pods for more than 5m: its loop \"file-source\" does not turn"]
    );
    dog.record("pod-config", Answer::Turning, 400_000);
    assert_eq!((dog.errors(900_000), dog.next_change_ms(400_000)), (vec![], None));
    dog.record("pod-config", stuck, 500_000);
    assert_eq!(dog.errors(699_999), [""; 0]);
    assert_eq!(dog.errors(700_000).len(), 1);
}

#[test]
fn an_unwatched_service_changes_nothing() {
    let mut dog = Watchdog::new(&["pod-sync"]);
    let before = dog.clone();
    dog.record("node-api", Answer::Turning, 1);
    assert_eq!(dog, before);
}

fn pod(phase: &str, ready: &str, extra: &str) -> Vec<u8> {
    format!(
        r#"{{"metadata":{{"name":"web"}},"spec":{{"containers":[{{"name":"c"}}]}},"status":{{"phase":"{phase}",
        "conditions":[{{"type":"PodScheduled","status":"True"}},{{"type":"Ready","status":"{ready}"}}],
        "message":"{extra}"}}}}"#
    )
    .into_bytes()
}

fn turn(phase: &str, ready: bool) -> News {
    News::Turn(PodView { phase: phase.into(), ready })
}

#[test]
fn only_a_change_of_phase_or_readiness_is_a_turn() {
    let mut ledger = PodLedger::default();
    let steps = [
        (pod("Pending", "False", ""), false, turn("Pending", false)),
        (pod("Pending", "False", ""), false, News::Known),
        (pod("Pending", "False", "x"), false, News::Detail),
        (pod("Running", "False", "x"), false, turn("Running", false)),
        (pod("Running", "True", "x"), false, turn("Running", true)),
        (pod("Running", "True", "x"), true, turn("Running", true)),
        (pod("Running", "True", "x"), true, News::Known),
    ];
    for (document, stopped, news) in steps {
        let ended = Ended { stopped, finished: false };
        assert_eq!(ledger.observe("u1", &document, ended).unwrap(), news);
    }
    assert_eq!((ledger.len(), ledger.is_empty()), (1, false));
}

#[test]
fn a_report_that_failed_is_made_again() {
    let mut ledger = PodLedger::default();
    let document = pod("Running", "True", "");
    ledger.observe("u1", &document, Ended::default()).unwrap();
    assert!(ledger.forget("u1"));
    assert!(!ledger.forget("u1"));
    assert!(ledger.is_empty());
    assert_eq!(ledger.observe("u1", &document, Ended::default()).unwrap(), turn("Running", true));
}

#[test]
fn a_replay_drops_what_it_does_not_name_and_repeats_nothing() {
    let mut ledger = PodLedger::default();
    for uid in ["u1", "u2", "u3"] {
        ledger.observe(uid, &pod("Running", "True", ""), Ended::default()).unwrap();
    }
    ledger.begin_replay();
    assert_eq!(ledger.observe("u1", &pod("Running", "True", ""), Ended::default()).unwrap(), News::Known);
    assert_eq!(
        ledger.observe("u3", &pod("Failed", "False", ""), Ended::default()).unwrap(),
        turn("Failed", false)
    );
    assert_eq!(ledger.end_replay(), ["u2"]);
    assert_eq!(ledger.len(), 2);
}

#[test]
fn a_pod_without_status_is_pending_and_a_document_that_is_no_pod_is_named() {
    let view = |text: &str| PodView::of("u1", text.as_bytes());
    for text in ["{}", r#"{"status":{}}"#, r#"{"status":{"phase":null,"conditions":null}}"#] {
        assert_eq!(view(text).unwrap(), PodView { phase: "Pending".into(), ready: false });
    }
    assert_eq!(view("[").unwrap_err().to_string(), "the document of pod u1 is not a Pod");
}

#[test]
fn a_cursor_moves_on_and_notices_a_restart() {
    let table = [
        (("", 0), ("a", 7, 0), (7, 0, false)),
        (("a", 7), ("a", 9, 0), (9, 0, false)),
        (("a", 7), ("a", 700, 181), (700, 181, false)),
        (("a", 7), ("b", 3, 0), (3, 0, true)),
    ];
    for ((ring, at), (answered, last, lost), (next, missing, restarted)) in table {
        let cursor = Cursor { ring_id: ring.into(), sequence: at };
        let taken = cursor.advance(&Page { ring_id: answered, last_sequence: last, lost });
        assert_eq!(taken.next, Cursor { ring_id: answered.into(), sequence: next });
        assert_eq!((taken.lost, taken.restarted), (missing, restarted));
    }
}

/// Whatever the answers, a service that turned less than 30 s ago is never blamed for silence, and a
/// verdict without new answers changes exactly when it is foretold.
#[test]
fn silence_is_blamed_exactly_when_foretold() {
    let reached = &Reached::default();
    let answers = proptest::collection::vec((0u64..20_000, any::<bool>()), 1..20);
    proptest!(ProptestConfig::with_cases(1024), |(answers in answers)| {
        let mut dog = Watchdog::new(&["pod-sync"]);
        let (mut now, mut last_good) = (0, None);
        let (mut spared, mut blamed, mut foretold, mut again) = (false, false, false, false);
        for (wait, good) in answers {
            now += wait;
            dog.record("pod-sync", if good { Answer::Turning } else { silence() }, now);
            if good { last_good = Some(now); }
            if let Some(at) = last_good {
                prop_assert_eq!(dog.errors(now).is_empty(), good || now - at < SILENCE_MS);
            }
            if let Some(at) = dog.next_change_ms(now) {
                prop_assert!(dog.errors(at - 1).is_empty());
                prop_assert!(!dog.errors(at).is_empty());
                foretold = true;
            }
            again |= good && blamed;
            spared |= !good && dog.errors(now).is_empty();
            blamed |= last_good.is_some() && !dog.errors(now).is_empty();
        }
        reached.case([
            ("never turned", last_good.is_none()),
            ("silent and not blamed yet", spared),
            ("blamed for its silence", blamed),
            ("turns again", again),
            ("blame is foretold", foretold),
        ]);
    });
    // The rarest: "never turned", in one case of 20.
    reached.assert_each();
}
