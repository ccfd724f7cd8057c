use keelson_testkit::Reached;
use proptest::prelude::*;

use super::*;

fn whole(volume: &str) -> OperationKey {
    OperationKey::whole(volume.into(), None)
}

fn of_pod(volume: &str, pod: &str) -> OperationKey {
    OperationKey::of_pod(volume.into(), pod.into())
}

fn on_node(key: OperationKey, node: &str) -> OperationKey {
    OperationKey { node: Some(node.into()), ..key }
}

const NOTHING: OperationKey = OperationKey { volume: None, pod: None, node: None, on_behalf_of: None };

#[test]
fn keys_match_on_the_volume_and_an_absent_pod_or_node_matches_each() {
    for (left, right, does_match) in [
        (whole("v"), whole("v"), true),
        (whole("v"), of_pod("v", "a"), true),
        (of_pod("v", "a"), of_pod("v", "a"), true),
        (of_pod("v", "a"), of_pod("v", "b"), false),
        (whole("v"), whole("w"), false),
        (of_pod("v", "a"), of_pod("w", "a"), false),
        (on_node(whole("v"), "n"), whole("v"), true),
        (on_node(whole("v"), "n"), on_node(of_pod("v", "a"), "n"), true),
        (on_node(whole("v"), "n"), on_node(whole("v"), "m"), false),
        (NOTHING, whole("v"), false),
        (NOTHING, NOTHING, false),
        (OperationKey { pod: Some("a".into()), ..NOTHING }, of_pod("v", "a"), false),
        (OperationKey::whole("v".into(), Some("a".into())), of_pod("v", "b"), true),
    ] {
        assert_eq!(left.matches(&right), does_match, "{left:?} {right:?}");
        assert_eq!(right.matches(&left), does_match, "{right:?} {left:?}");
    }
}

#[test]
fn operations_without_a_volume_run_side_by_side_and_leave_no_record() {
    let mut operations = Operations::default();
    for _ in 0..2 {
        assert_eq!(operations.start(&NOTHING, OperationKind::Attach, 0), Ok(()));
    }
    operations.finish(&NOTHING, Err("no".into()), 0);
    assert_eq!(operations, Operations::default());
}

#[test]
fn a_running_operation_refuses_each_kind_on_a_matching_key() {
    let mut operations = Operations::default();
    operations.start(&of_pod("v", "a"), OperationKind::TearDown, 0).unwrap();
    operations.start(&of_pod("v", "b"), OperationKind::TearDown, 0).unwrap();
    operations.start(&whole("w"), OperationKind::SetUp, 0).unwrap();
    for kind in [OperationKind::TearDown, OperationKind::SetUp] {
        let refusal = operations.start(&whole("v"), kind, u64::MAX).unwrap_err();
        assert_eq!(refusal.to_string(), "the teardown of volume v is still running");
    }
    operations.finish(&of_pod("v", "a"), Ok(()), 1);
    assert!(operations.start(&whole("v"), OperationKind::SetUp, 1).is_err());
    operations.finish(&of_pod("v", "b"), Ok(()), 1);
    assert_eq!(operations.start(&whole("v"), OperationKind::SetUp, 1), Ok(()));
}

#[test]
fn a_failed_record_never_hides_a_running_one() {
    let mut operations = Operations::default();
    operations.start(&of_pod("v", "a"), OperationKind::TearDown, 0).unwrap();
    operations.finish(&of_pod("v", "a"), Err("busy".into()), 0);
    operations.start(&of_pod("v", "b"), OperationKind::TearDown, 0).unwrap();
    assert!(matches!(
        operations.start(&whole("v"), OperationKind::SetUp, 0),
        Err(Refusal::Running { kind: OperationKind::TearDown, .. })
    ));
}

#[test]
fn the_back_off_doubles_from_half_a_second_to_two_minutes_and_two_seconds() {
    let (mut operations, mut now) = (Operations::default(), 1000);
    for back_off in [500, 1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 122_000, 122_000] {
        operations.start(&whole("v"), OperationKind::SetUp, now).unwrap();
        operations.finish(&whole("v"), Err("no route".into()), now);
        assert!(operations.start(&whole("v"), OperationKind::SetUp, now + back_off - 1).is_err());
        now += back_off;
    }
    assert_eq!(operations.start(&whole("v"), OperationKind::SetUp, now), Ok(()));
}

#[test]
fn the_back_off_error_tells_until_when_and_has_the_last_error() {
    let mut operations = Operations::default();
    operations.start(&whole("v"), OperationKind::MountDevice, 100).unwrap();
    operations.finish(&whole("v"), Err("no such device".into()), 100);
    let refusal = operations.start(&whole("v"), OperationKind::MountDevice, 400).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "the device mount of volume v failed; no retry is permitted until 600 ms, 200 ms from now: no such device"
    );
}

#[test]
fn another_kind_resets_the_back_off() {
    let mut operations = Operations::default();
    for now in [0, 500] {
        operations.start(&whole("v"), OperationKind::SetUp, now).unwrap();
        operations.finish(&whole("v"), Err("no".into()), now);
    }
    assert!(operations.start(&whole("v"), OperationKind::SetUp, 600).is_err());
    operations.start(&of_pod("v", "a"), OperationKind::TearDown, 600).unwrap();
    operations.finish(&of_pod("v", "a"), Err("no".into()), 600);
    // The set-up starts from the beginning: its error is forgotten, and so is the teardown's.
    operations.start(&whole("v"), OperationKind::SetUp, 600).unwrap();
    operations.finish(&whole("v"), Err("no".into()), 600);
    assert!(operations.start(&whole("v"), OperationKind::SetUp, 1099).is_err());
    assert_eq!(operations.start(&whole("v"), OperationKind::SetUp, 1100), Ok(()));
}

#[test]
fn success_removes_the_record_and_its_back_off() {
    let mut operations = Operations::default();
    for (now, result) in [(0, Err("no".to_owned())), (500, Ok(()))] {
        operations.start(&whole("v"), OperationKind::SetUp, now).unwrap();
        operations.finish(&whole("v"), result, now);
    }
    assert_eq!(operations, Operations::default());
}

#[test]
fn an_end_of_an_operation_that_does_not_run_is_ignored() {
    let mut operations = Operations::default();
    operations.finish(&whole("v"), Err("no".into()), 0);
    assert_eq!(operations, Operations::default());
    operations.start(&whole("v"), OperationKind::SetUp, 0).unwrap();
    let before = operations.clone();
    operations.finish(&of_pod("v", "a"), Ok(()), 0);
    assert_eq!(operations, before);
}

#[test]
fn a_moment_near_the_end_of_the_clock_does_not_overflow() {
    let mut operations = Operations::default();
    operations.start(&whole("v"), OperationKind::SetUp, u64::MAX).unwrap();
    operations.finish(&whole("v"), Err("no".into()), u64::MAX - 1);
    assert!(operations.start(&whole("v"), OperationKind::SetUp, u64::MAX - 1).is_err());
    assert_eq!(operations.start(&whole("v"), OperationKind::SetUp, u64::MAX), Ok(()));
}

#[test]
fn errors_of_volumes_that_nobody_knows_are_forgotten_and_running_operations_stay() {
    let mut operations = Operations::default();
    operations.start(&of_pod("v", "a"), OperationKind::TearDown, 0).unwrap();
    operations.finish(&of_pod("v", "a"), Err("no".into()), 0);
    operations.start(&of_pod("v", "b"), OperationKind::TearDown, 0).unwrap();
    let before = operations.clone();
    operations.retain(|volume| volume.as_str() == "v");
    assert_eq!(operations, before);
    operations.retain(|_| false);
    assert_eq!(operations.refusal(&of_pod("v", "a"), OperationKind::TearDown, 0), None);
    assert!(operations.running(&of_pod("v", "b")).is_some());
}

#[test]
fn the_pod_for_which_an_operation_on_a_whole_volume_failed_is_known() {
    let mut operations = Operations::default();
    let key = OperationKey::whole("v".into(), Some("a".into()));
    operations.start(&key, OperationKind::SetUp, 0).unwrap();
    assert_eq!(operations.failed_for(&"v".into()), None);
    operations.finish(&key, Err("no".into()), 0);
    assert_eq!(operations.failed_for(&"v".into()), Some(&"a".into()));
    assert_eq!(operations.failed_for(&"w".into()), None);
}

/// Whatever is asked for, operations with matching keys never run together, and a refusal always has its reason.
#[test]
fn operations_with_matching_keys_never_run_together() {
    let reached = &Reached::default();
    let kinds =
        prop::sample::select(vec![OperationKind::SetUp, OperationKind::TearDown, OperationKind::Resize]);
    let step = (0..2usize, prop::option::of(0..2usize), kinds, 0..800u64, any::<bool>(), any::<bool>());
    let steps = prop::collection::vec(step, 1..40);
    proptest!(ProptestConfig::with_cases(256), |(steps in steps)| {
        let (mut operations, mut running, mut now) = (Operations::default(), Vec::<OperationKey>::new(), 0);
        let (mut busy, mut backed_off, mut started) = (0, 0, 0);
        for (volume, pod, kind, later, ends, is_error) in steps {
            now += later;
            if ends && !running.is_empty() {
                let result = if is_error { Err("no".to_owned()) } else { Ok(()) };
                operations.finish(&running.remove(0), result, now);
            }
            let volume = ["v", "w"][volume];
            let key = pod.map_or_else(|| whole(volume), |pod| of_pod(volume, ["a", "b"][pod]));
            match operations.start(&key, kind, now) {
                Ok(()) => {
                    prop_assert!(!running.iter().any(|other| other.matches(&key)));
                    running.push(key);
                    started += 1;
                }
                Err(Refusal::Running { .. }) => {
                    prop_assert!(running.iter().any(|other| other.matches(&key)));
                    busy += 1;
                }
                Err(Refusal::BackOff { until, left, .. }) => {
                    prop_assert!(now < until && left <= MAX_BACK_OFF);
                    backed_off += 1;
                }
            }
        }
        reached.case([("started", started > 0), ("busy", busy > 0), ("backed off", backed_off > 0)]);
    });
    // The rarest: "backed off", in more than one case of 5.
    reached.assert_each();
}
