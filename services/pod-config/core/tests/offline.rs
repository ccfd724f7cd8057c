//! What starts after a reboot without the control plane.

use std::time::Duration;

use keelson_config::{Offline, StartAfterReboot};
use keelson_pod_config_core::offline::{WaitsFor, age, waits_for, written_every};
use serde_json::{Value, json};

const HOUR: Duration = Duration::from_secs(3600);

fn policy(start_after_reboot: StartAfterReboot, most: Duration) -> Offline {
    Offline { start_after_reboot, max_age_ms: u64::try_from(most.as_millis()).unwrap_or(0) }
}

fn pod(owners: &Value, volumes: &Value) -> Vec<u8> {
    json!({
        "metadata": {"name": "web", "ownerReferences": owners},
        "spec": {"containers": [], "volumes": volumes},
    })
    .to_string()
    .into_bytes()
}

fn plain() -> Vec<u8> {
    pod(
        &json!([{"kind": "ReplicaSet"}]),
        &json!([{"name": "a", "emptyDir": {}}, {"name": "b", "secret": {}}]),
    )
}

fn owned() -> Vec<u8> {
    pod(&json!([{"kind": "Other"}, {"kind": "StatefulSet", "name": "db"}]), &json!([]))
}

fn claiming(kind: &str) -> Vec<u8> {
    pod(&json!([]), &json!([{"name": "tmp", "emptyDir": {}}, {"name": "data", kind: {}}]))
}

#[test]
fn the_policy_says_which_pods_start() {
    let claim = || Some(WaitsFor::Claim { volume: "data".into() });
    for (what, json, stateless) in [
        ("plain", plain(), None),
        ("nothing set", b"{}".to_vec(), None),
        ("of a StatefulSet", owned(), Some(WaitsFor::Owner)),
        ("with a claim", claiming("persistentVolumeClaim"), claim()),
        ("with a claim of its own", claiming("ephemeral"), claim()),
    ] {
        let of = |start| waits_for(&json, &policy(start, HOUR), Some(HOUR));
        assert_eq!(of(StartAfterReboot::Never), Some(WaitsFor::Any), "{what}");
        assert_eq!(of(StartAfterReboot::Stateless), stateless, "{what}");
        assert_eq!(of(StartAfterReboot::All), None, "{what}");
    }
    let broken = waits_for(b"no pod", &policy(StartAfterReboot::Stateless, HOUR), Some(HOUR));
    assert_eq!(broken, Some(WaitsFor::Any), "what cannot be read does not start");
}

#[test]
fn nothing_starts_that_is_older_than_the_maximum_age_whatever_else_is_allowed() {
    let second = Duration::from_secs(1);
    for start in [StartAfterReboot::Stateless, StartAfterReboot::All] {
        let of = |most, age| waits_for(&plain(), &policy(start, most), age);
        assert_eq!(of(HOUR, Some(HOUR)), None);
        let old = HOUR + second;
        assert_eq!(of(HOUR, Some(old)), Some(WaitsFor::Age { age: Some(old), most: HOUR }));
        assert_eq!(of(HOUR, None), Some(WaitsFor::Age { age: None, most: HOUR }), "nobody knows its age");
        assert_eq!(of(Duration::ZERO, Some(HOUR * 10_000)), None, "no limit");
        assert_eq!(of(Duration::ZERO, None), None, "no limit");
    }
}

#[test]
fn each_reason_names_the_setting_that_it_comes_from() {
    let age = |age| WaitsFor::Age { age, most: HOUR };
    for (why, text) in [
        (WaitsFor::Any, "offline.startAfterReboot is never"),
        (age(Some(HOUR * 2)), "it was last heard 2h0m0s ago, and offline.maxAge is 1h0m0s"),
        (age(None), "it is not known when it was last heard, and offline.maxAge is 1h0m0s"),
        (WaitsFor::Owner, "offline.startAfterReboot is stateless"),
        (WaitsFor::Claim { volume: "data".into() }, "the volume data is a claim"),
    ] {
        assert!(why.to_string().contains(text), "{why}");
    }
}

#[test]
fn the_last_word_is_written_down_ten_times_in_the_maximum_age_between_each_minute_and_each_hour() {
    let minute = Duration::from_secs(60);
    for (most, every) in [
        (Duration::ZERO, HOUR),
        (minute, minute),
        (minute * 100, minute * 10),
        (HOUR * 10, HOUR),
        (HOUR * 72, HOUR),
    ] {
        assert_eq!(written_every(&policy(StartAfterReboot::Stateless, most)), every, "{most:?}");
    }
}

#[test]
fn a_clock_that_runs_back_counts_as_no_time() {
    assert_eq!(age(Some(100), 160), Some(Duration::from_secs(60)));
    assert_eq!(age(Some(100), 40), Some(Duration::ZERO));
    assert_eq!(age(Some(i64::MIN), i64::MAX), Some(Duration::from_secs(i64::MAX.cast_unsigned())));
    assert_eq!(age(None, 100), None);
}
