use keelson_testkit::Reached;
use proptest::prelude::*;

use super::*;

fn content(revision: i64) -> AssignedConfiguration {
    AssignedConfiguration { revision, text: format!("maxPods: {revision}"), problem: None }
}

fn well() -> Judgement {
    Judgement::Other([("pod-sync".to_owned(), ServiceState::Running)].into())
}

fn refused(why: &str) -> Judgement {
    Judgement::Refused(why.to_owned())
}

/// `state@assigned`, what is in force, what is known to be good, and why not.
fn shown(kept: &Kept) -> String {
    let Some(status) = kept.status() else { return "none".to_owned() };
    let number = |revision: Option<Revision>| revision.map_or("-".to_owned(), |r| r.revision.to_string());
    let error = status.error.as_deref().map_or(String::new(), |error| format!(" {error}"));
    let (active, good) = (number(status.active), number(status.last_known_good));
    format!("{}@{} {active} {good}{error}", status.state.as_str(), number(status.assigned))
}

fn good(revision: i64) -> Kept {
    Kept::default().judged(content(revision), well()).passed()
}

#[test]
fn each_content_becomes_active_tried_or_refused() {
    let none = Kept::default();
    let tried = none.clone().judged(content(1), well());
    let both = good(1).judged(content(2), well());
    for (kept, expected) in [
        (none.clone(), "none"),
        (none.clone().judged(content(1), refused("line 3")), "refused@1 - - line 3"),
        (none.clone().judged(content(1), Judgement::Same), "active@1 1 1"),
        (tried.clone(), "trial@1 1 -"),
        (tried.clone().passed(), "active@1 1 1"),
        (tried.clone().failed("it fails"), "refused@1 - - it fails"),
        (both.clone(), "trial@2 2 1"),
        (both.clone().passed(), "active@2 2 2"),
        (both.clone().failed("it fails"), "refused@2 1 1 it fails"),
        (both.clone().failed("it fails").judged(content(3), well()), "trial@3 3 1"),
        (both.clone().failed("it fails").judged(content(3), Judgement::Same), "active@3 3 3"),
        // A later content while one is tried.
        (both.clone().judged(content(3), refused("line 3")), "refused@3 2 1 line 3"),
        (both.clone().judged(content(3), refused("line 3")).passed(), "refused@3 2 2 line 3"),
        (both.clone().judged(content(3), refused("line 3")).failed("it fails"), "refused@3 1 1 line 3"),
        (both.clone().judged(content(3), Judgement::Same), "trial@3 3 1"),
        (both.clone().judged(content(3), well()), "trial@3 3 1"),
        // Without a trial there is none to end.
        (good(1).passed(), "active@1 1 1"),
        (good(1).failed("it fails"), "active@1 1 1"),
        // What is in force does not fit the files any more.
        (good(1).unfit("line 3"), "refused@1 - - line 3"),
        (both.clone().unfit("line 3"), "refused@2 1 1 line 3"),
        (both.clone().unfit("line 3").unfit("line 4"), "refused@2 - - line 3"),
        (none.clone().unfit("line 3"), "none"),
    ] {
        assert_eq!(shown(&kept), expected, "{kept:#?}");
    }
}

#[test]
fn a_content_is_looked_at_once_until_the_key_changes() {
    let again = AssignedConfiguration { text: "maxPods: 9".into(), ..content(1) };
    for kept in [
        Kept::default().judged(content(1), refused("line 3")),
        Kept::default().judged(content(1), well()),
        Kept::default().judged(content(1), well()).failed("it fails"),
        Kept::default().judged(content(1), well()).failed("it fails").started(),
        good(1),
    ] {
        assert_eq!(kept.step(Some(&content(1))), Step::Nothing, "{kept:#?}");
        assert_eq!(kept.step(Some(&content(2))), Step::Judge, "{kept:#?}");
        assert_eq!(
            kept.step(Some(&again)),
            Step::Judge,
            "a store that was made anew counts from 1: {kept:#?}"
        );
        assert_eq!(kept.step(None), Step::Withdraw, "{kept:#?}");
    }
    assert_eq!(Kept::default().step(None), Step::Nothing);
    assert_eq!(Kept::default().step(Some(&content(1))), Step::Judge);
    let back = good(1).judged(content(2), refused("line 3"));
    assert_eq!(back.step(Some(&content(1))), Step::Judge, "the store has gone back");
}

#[test]
fn the_third_start_within_one_trial_ends_it() {
    let tried = good(1).judged(content(2), well());
    let second = tried.started().started();
    assert_eq!(shown(&second), "trial@2 2 1");
    let third = second.clone().started();
    assert_eq!(shown(&third), "refused@2 1 1 init was started 3 times while it was tried");
    assert_eq!(third.step(Some(&content(2))), Step::Nothing);
    // Another content begins to count anew.
    assert_eq!(shown(&second.judged(content(3), well()).started().started()), "trial@3 3 1");
    assert_eq!(good(1).started(), good(1));
}

#[test]
fn a_start_looks_again_at_what_was_refused_for_its_text_alone() {
    let text = good(1).judged(content(2), refused("line 3")).started();
    assert_eq!(text.step(Some(&content(2))), Step::Judge);
    let tried = good(1).judged(content(2), well()).failed("it fails").started();
    assert_eq!(tried.step(Some(&content(2))), Step::Nothing);
    assert_eq!(tried.refusal(), Some("it fails"));
}

#[test]
fn how_the_services_were_before_the_first_of_several_trials_counts() {
    let worse = Judgement::Other([("pod-sync".to_owned(), ServiceState::Stuck)].into());
    let kept = Kept::default().judged(content(1), well()).judged(content(2), worse);
    assert_eq!(kept.trial().unwrap().before()["pod-sync"], ServiceState::Running);
}

#[test]
fn what_is_kept_is_read_again_and_nothing_is_kept_of_nothing() {
    let kept = good(1).judged(content(2), well()).judged(content(3), refused("line 3")).started();
    let json = serde_json::to_string(&kept).unwrap();
    assert_eq!(serde_json::from_str::<Kept>(&json).unwrap(), kept);
    assert_eq!(serde_json::to_string(&Kept::default()).unwrap(), "{}");
}

/// What may happen, in any order.
#[derive(Debug, Clone)]
enum Happens {
    Assigned(i64, u8),
    Withdrawn,
    Passed,
    Failed,
    Unfit,
    Started,
}

fn happens() -> impl Strategy<Value = Happens> {
    prop_oneof![
        4 => (1i64..5, 0u8..3).prop_map(|(revision, judgement)| Happens::Assigned(revision, judgement)),
        1 => Just(Happens::Withdrawn),
        2 => Just(Happens::Passed),
        2 => Just(Happens::Failed),
        1 => Just(Happens::Unfit),
        2 => Just(Happens::Started),
    ]
}

fn after(kept: Kept, event: &Happens) -> Kept {
    match event {
        Happens::Assigned(revision, judgement) => {
            let content = content(*revision);
            if kept.step(Some(&content)) != Step::Judge {
                return kept;
            }
            let judgement = match judgement {
                0 => refused("line 3"),
                1 => Judgement::Same,
                _ => well(),
            };
            kept.judged(content, judgement)
        }
        Happens::Withdrawn => Kept::default(),
        Happens::Passed => kept.passed(),
        Happens::Failed => kept.failed("it fails"),
        Happens::Unfit => kept.unfit("line 3"),
        Happens::Started => kept.started(),
    }
}

#[test]
fn what_is_known_to_be_good_is_lost_to_nothing_but_a_better_one_a_withdrawal_or_other_files() {
    let reached = &Reached::default();
    let events = proptest::collection::vec(happens(), 0..40);
    proptest!(ProptestConfig::with_cases(1024), |(events in events)| {
        let mut kept = Kept::default();
        let mut seen = [false; 4];
        for event in &events {
            let before = kept.clone();
            kept = after(kept, event);
            // All that a start knows is what was written.
            let read: Kept = serde_json::from_str(&serde_json::to_string(&kept).unwrap()).unwrap();
            prop_assert_eq!(&read, &kept);
            let good = |kept: &Kept| kept.last_known_good.clone();
            let may_lose = matches!(
                event,
                Happens::Withdrawn | Happens::Passed | Happens::Unfit | Happens::Assigned(_, 1)
            );
            prop_assert!(may_lose || good(&before) == good(&kept), "{:?}: {:?} {:?}", event, before, kept);
            if matches!(event, Happens::Failed) {
                prop_assert_eq!(kept.active(), kept.last_known_good.as_ref(), "back to what is good");
            }
            if let Happens::Assigned(revision, _) = event {
                prop_assert_eq!(kept.step(Some(&content(*revision))), Step::Nothing);
            }
            prop_assert_eq!(kept.status().is_none(), kept == Kept::default());
            if let Some(status) = kept.status() {
                prop_assert_eq!(status.error.is_some(), status.state == ConfigurationState::Refused);
            }
            seen[0] |= kept.trial.is_some() && kept.last_known_good.is_some();
            seen[1] |= kept.trial.is_some() && kept.refused.is_some();
            seen[2] |= kept.refused.as_ref().is_some_and(|refused| refused.tried);
            seen[3] |= kept.refusal().is_some_and(|why| why.starts_with("init was started"));
        }
        reached.case([
            ("a trial over a good one", seen[0]),
            ("a refusal while one is tried", seen[1]),
            ("one that was tried and refused", seen[2]),
            ("one that was started too often", seen[3]),
        ]);
    });
    reached.assert_each();
}
