use keelson_testkit::Reached;
use proptest::prelude::*;

use super::*;

fn content(revision: i64) -> AssignedConfiguration {
    AssignedConfiguration { revision, text: format!("maxPods: {revision}"), problem: None }
}

fn changed() -> Resolution {
    Resolution::Changed([("pod-sync".to_owned(), ServiceState::Running)].into())
}

fn refused(why: &str) -> Resolution {
    Resolution::Failed(why.to_owned())
}

/// `state@assigned`, the active content, the last known good one, and the error.
fn shown(checkpoint: &ConfigurationCheckpoint) -> String {
    let Some(status) = checkpoint.status() else { return "none".to_owned() };
    let number = |revision: Option<Revision>| revision.map_or("-".to_owned(), |r| r.revision.to_string());
    let error = status.error.as_deref().map_or(String::new(), |error| format!(" {error}"));
    let (active, good) = (number(status.active), number(status.last_known_good));
    format!("{}@{} {active} {good}{error}", status.state.as_str(), number(status.assigned))
}

fn good(revision: i64) -> ConfigurationCheckpoint {
    ConfigurationCheckpoint::default().with_resolution(content(revision), changed()).trial_passed()
}

#[test]
fn an_assigned_configuration_becomes_active_in_trial_or_refused() {
    let none = ConfigurationCheckpoint::default();
    let tried = none.clone().with_resolution(content(1), changed());
    let both = good(1).with_resolution(content(2), changed());
    for (checkpoint, expected) in [
        (none.clone(), "none"),
        (none.clone().with_resolution(content(1), refused("line 3")), "refused@1 - - line 3"),
        (none.clone().with_resolution(content(1), Resolution::Unchanged), "active@1 1 1"),
        (tried.clone(), "trial@1 1 -"),
        (tried.clone().trial_passed(), "active@1 1 1"),
        (tried.clone().trial_failed("it fails"), "refused@1 - - it fails"),
        (both.clone(), "trial@2 2 1"),
        (both.clone().trial_passed(), "active@2 2 2"),
        (both.clone().trial_failed("it fails"), "refused@2 1 1 it fails"),
        (both.clone().trial_failed("it fails").with_resolution(content(3), changed()), "trial@3 3 1"),
        (
            both.clone().trial_failed("it fails").with_resolution(content(3), Resolution::Unchanged),
            "active@3 3 3",
        ),
        // A later content during a trial.
        (both.clone().with_resolution(content(3), refused("line 3")), "refused@3 2 1 line 3"),
        (both.clone().with_resolution(content(3), refused("line 3")).trial_passed(), "refused@3 2 2 line 3"),
        (
            both.clone().with_resolution(content(3), refused("line 3")).trial_failed("it fails"),
            "refused@3 1 1 line 3",
        ),
        (both.clone().with_resolution(content(3), Resolution::Unchanged), "trial@3 3 1"),
        (both.clone().with_resolution(content(3), changed()), "trial@3 3 1"),
        // Without a trial, its result changes nothing.
        (good(1).trial_passed(), "active@1 1 1"),
        (good(1).trial_failed("it fails"), "active@1 1 1"),
        // The content in force does not resolve with the current files.
        (good(1).no_longer_resolves("line 3"), "refused@1 - - line 3"),
        (both.clone().no_longer_resolves("line 3"), "refused@2 1 1 line 3"),
        (both.clone().no_longer_resolves("line 3").no_longer_resolves("line 4"), "refused@2 - - line 3"),
        (none.clone().no_longer_resolves("line 3"), "none"),
    ] {
        assert_eq!(shown(&checkpoint), expected, "{checkpoint:#?}");
    }
}

#[test]
fn an_assigned_configuration_is_resolved_once_per_change() {
    let again = AssignedConfiguration { text: "maxPods: 9".into(), ..content(1) };
    for checkpoint in [
        ConfigurationCheckpoint::default().with_resolution(content(1), refused("line 3")),
        ConfigurationCheckpoint::default().with_resolution(content(1), changed()),
        ConfigurationCheckpoint::default().with_resolution(content(1), changed()).trial_failed("it fails"),
        ConfigurationCheckpoint::default()
            .with_resolution(content(1), changed())
            .trial_failed("it fails")
            .init_started(),
        good(1),
    ] {
        assert_eq!(checkpoint.action_for(Some(&content(1))), KeyAction::Keep, "{checkpoint:#?}");
        assert_eq!(checkpoint.action_for(Some(&content(2))), KeyAction::Resolve, "{checkpoint:#?}");
        assert_eq!(
            checkpoint.action_for(Some(&again)),
            KeyAction::Resolve,
            "a new store counts revisions from 1 again: {checkpoint:#?}"
        );
        assert_eq!(checkpoint.action_for(None), KeyAction::Withdraw, "{checkpoint:#?}");
    }
    assert_eq!(ConfigurationCheckpoint::default().action_for(None), KeyAction::Keep);
    assert_eq!(ConfigurationCheckpoint::default().action_for(Some(&content(1))), KeyAction::Resolve);
    let back = good(1).with_resolution(content(2), refused("line 3"));
    assert_eq!(
        back.action_for(Some(&content(1))),
        KeyAction::Resolve,
        "the store was restored from a backup"
    );
}

#[test]
fn the_third_start_of_init_fails_the_trial() {
    let tried = good(1).with_resolution(content(2), changed());
    let second = tried.init_started().init_started();
    assert_eq!(shown(&second), "trial@2 2 1");
    let third = second.clone().init_started();
    assert_eq!(shown(&third), "refused@2 1 1 init was started 3 times during the trial");
    assert_eq!(third.action_for(Some(&content(2))), KeyAction::Keep);
    // Another content starts a new count.
    assert_eq!(
        shown(&second.with_resolution(content(3), changed()).init_started().init_started()),
        "trial@3 3 1"
    );
    assert_eq!(good(1).init_started(), good(1));
}

#[test]
fn a_start_resolves_an_untried_refused_configuration_again() {
    let text = good(1).with_resolution(content(2), refused("line 3")).init_started();
    assert_eq!(text.action_for(Some(&content(2))), KeyAction::Resolve);
    let tried = good(1).with_resolution(content(2), changed()).trial_failed("it fails").init_started();
    assert_eq!(tried.action_for(Some(&content(2))), KeyAction::Keep);
    assert_eq!(tried.error(), Some("it fails"));
}

#[test]
fn service_states_before_the_first_of_several_trials_are_kept() {
    let worse = Resolution::Changed([("pod-sync".to_owned(), ServiceState::Stuck)].into());
    let checkpoint = ConfigurationCheckpoint::default()
        .with_resolution(content(1), changed())
        .with_resolution(content(2), worse);
    assert_eq!(checkpoint.trial().unwrap().before()["pod-sync"], ServiceState::Running);
}

#[test]
fn the_checkpoint_round_trips_and_is_empty_by_default() {
    let checkpoint = good(1)
        .with_resolution(content(2), changed())
        .with_resolution(content(3), refused("line 3"))
        .init_started();
    let json = serde_json::to_string(&checkpoint).unwrap();
    assert_eq!(serde_json::from_str::<ConfigurationCheckpoint>(&json).unwrap(), checkpoint);
    assert_eq!(serde_json::to_string(&ConfigurationCheckpoint::default()).unwrap(), "{}");
}

/// The events, in any order.
#[derive(Debug, Clone)]
enum Event {
    Assigned(i64, u8),
    Withdrawn,
    Passed,
    Failed,
    NoLongerResolves,
    InitStarted,
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (1i64..5, 0u8..3).prop_map(|(revision, resolution)| Event::Assigned(revision, resolution)),
        1 => Just(Event::Withdrawn),
        2 => Just(Event::Passed),
        2 => Just(Event::Failed),
        1 => Just(Event::NoLongerResolves),
        2 => Just(Event::InitStarted),
    ]
}

fn after(checkpoint: ConfigurationCheckpoint, event: &Event) -> ConfigurationCheckpoint {
    match event {
        Event::Assigned(revision, resolution) => {
            let content = content(*revision);
            if checkpoint.action_for(Some(&content)) != KeyAction::Resolve {
                return checkpoint;
            }
            let resolution = match resolution {
                0 => refused("line 3"),
                1 => Resolution::Unchanged,
                _ => changed(),
            };
            checkpoint.with_resolution(content, resolution)
        }
        Event::Withdrawn => ConfigurationCheckpoint::default(),
        Event::Passed => checkpoint.trial_passed(),
        Event::Failed => checkpoint.trial_failed("it fails"),
        Event::NoLongerResolves => checkpoint.no_longer_resolves("line 3"),
        Event::InitStarted => checkpoint.init_started(),
    }
}

#[test]
fn last_known_good_survives_everything_but_a_success_withdrawal_or_new_files() {
    let reached = &Reached::default();
    let events = proptest::collection::vec(any_event(), 0..40);
    proptest!(ProptestConfig::with_cases(1024), |(events in events)| {
        let mut checkpoint = ConfigurationCheckpoint::default();
        let mut reached_states = [false; 4];
        for event in &events {
            let before = checkpoint.clone();
            checkpoint = after(checkpoint, event);
            // A start knows only what was written.
            let read: ConfigurationCheckpoint = serde_json::from_str(&serde_json::to_string(&checkpoint).unwrap()).unwrap();
            prop_assert_eq!(&read, &checkpoint);
            let good = |checkpoint: &ConfigurationCheckpoint| checkpoint.last_known_good.clone();
            let may_lose = matches!(
                event,
                Event::Withdrawn | Event::Passed | Event::NoLongerResolves | Event::Assigned(_, 1)
            );
            prop_assert!(may_lose || good(&before) == good(&checkpoint), "{:?}: {:?} {:?}", event, before, checkpoint);
            if matches!(event, Event::Failed) {
                prop_assert_eq!(checkpoint.active(), checkpoint.last_known_good.as_ref(), "falls back to the last known good");
            }
            if let Event::Assigned(revision, _) = event {
                prop_assert_eq!(checkpoint.action_for(Some(&content(*revision))), KeyAction::Keep);
            }
            prop_assert_eq!(checkpoint.status().is_none(), checkpoint == ConfigurationCheckpoint::default());
            if let Some(status) = checkpoint.status() {
                prop_assert_eq!(status.error.is_some(), status.state == ConfigurationState::Refused);
            }
            reached_states[0] |= checkpoint.trial.is_some() && checkpoint.last_known_good.is_some();
            reached_states[1] |= checkpoint.trial.is_some() && checkpoint.refused.is_some();
            reached_states[2] |= checkpoint.refused.as_ref().is_some_and(|refused| refused.tried);
            reached_states[3] |= checkpoint.error().is_some_and(|why| why.starts_with("init was started"));
        }
        reached.case([
            ("a trial with a last known good content", reached_states[0]),
            ("a refusal during a trial", reached_states[1]),
            ("a content that failed its trial", reached_states[2]),
            ("a trial that failed by too many starts", reached_states[3]),
        ]);
    });
    reached.assert_each();
}
