//! What starts after a reboot without the control plane.

use std::time::Duration;

use keelson_config::{Offline, StartAfterReboot};
use keelson_pod_config_core::api_pod::api_pod;
use keelson_pod_config_core::offline::{
    SingleRun, WaitReason, contact_age, contact_write_interval, wait_reason,
};
use serde_json::{Value, json};

const HOUR: Duration = Duration::from_secs(3600);

fn policy(start_after_reboot: StartAfterReboot, most: Duration) -> Offline {
    Offline { start_after_reboot, max_age_ms: u64::try_from(most.as_millis()).unwrap_or(0) }
}

/// Whether a pod from the API must not run twice.
fn single_run(metadata: &Value, spec: &Value) -> Option<SingleRun> {
    let mut object = json!({"metadata": metadata, "spec": spec});
    for field in ["name", "namespace", "uid"] {
        object["metadata"][field] = json!("web");
    }
    api_pod(object).unwrap_or_else(|error| panic!("{error}")).single_run
}

fn pod(owners: &Value, volumes: &Value) -> Option<SingleRun> {
    single_run(&json!({"ownerReferences": owners}), &json!({"containers": [], "volumes": volumes}))
}

fn plain() -> Option<SingleRun> {
    pod(
        &json!([{"kind": "ReplicaSet"}]),
        &json!([{"name": "a", "emptyDir": {}}, {"name": "b", "secret": {}}]),
    )
}

fn owned() -> Option<SingleRun> {
    pod(&json!([{"kind": "Other"}, {"kind": "StatefulSet", "name": "db"}]), &json!([]))
}

fn claiming(kind: &str) -> Option<SingleRun> {
    pod(&json!([]), &json!([{"name": "tmp", "emptyDir": {}}, {"name": "data", kind: {}}]))
}

#[test]
fn start_after_reboot_policy_decides_which_pods_start_offline() {
    let claim = || Some(WaitReason::Claim { volume: "data".into() });
    for (what, pod, stateless) in [
        ("plain", plain(), None),
        ("nothing set", single_run(&json!({}), &json!({})), None),
        ("of a StatefulSet", owned(), Some(WaitReason::StatefulSet)),
        ("with a claim", claiming("persistentVolumeClaim"), claim()),
        ("with a claim of its own", claiming("ephemeral"), claim()),
    ] {
        let of = |start| wait_reason(pod.as_ref(), &policy(start, HOUR), Some(HOUR));
        assert_eq!(of(StartAfterReboot::Never), Some(WaitReason::Policy), "{what}");
        assert_eq!(of(StartAfterReboot::Stateless), stateless, "{what}");
        assert_eq!(of(StartAfterReboot::All), None, "{what}");
    }
    assert!(api_pod(json!("no pod")).is_err(), "a pod that cannot be decoded does not start");
}

#[test]
fn no_pod_starts_offline_after_the_maximum_age() {
    let second = Duration::from_secs(1);
    for start in [StartAfterReboot::Stateless, StartAfterReboot::All] {
        let of = |most, age| wait_reason(plain().as_ref(), &policy(start, most), age);
        assert_eq!(of(HOUR, Some(HOUR)), None);
        let old = HOUR + second;
        assert_eq!(of(HOUR, Some(old)), Some(WaitReason::Age { age: Some(old), max_age: HOUR }));
        assert_eq!(of(HOUR, None), Some(WaitReason::Age { age: None, max_age: HOUR }), "the age is unknown");
        assert_eq!(of(Duration::ZERO, Some(HOUR * 10_000)), None, "no limit");
        assert_eq!(of(Duration::ZERO, None), None, "no limit");
    }
}

#[test]
fn each_wait_reason_names_its_setting() {
    let age = |age| WaitReason::Age { age, max_age: HOUR };
    for (why, text) in [
        (WaitReason::Policy, "offline.startAfterReboot is never"),
        (age(Some(HOUR * 2)), "the last contact was 2h0m0s ago, and offline.maxAge is 1h0m0s"),
        (age(None), "the time of the last contact is not known, and offline.maxAge is 1h0m0s"),
        (WaitReason::StatefulSet, "offline.startAfterReboot is stateless"),
        (WaitReason::Claim { volume: "data".into() }, "the volume data is a PersistentVolumeClaim"),
    ] {
        assert!(why.to_string().contains(text), "{why}");
    }
}

#[test]
fn the_last_contact_is_written_ten_times_per_max_age_from_every_minute_to_hourly() {
    let minute = Duration::from_secs(60);
    for (most, every) in [
        (Duration::ZERO, HOUR),
        (minute, minute),
        (minute * 100, minute * 10),
        (HOUR * 10, HOUR),
        (HOUR * 72, HOUR),
    ] {
        assert_eq!(contact_write_interval(&policy(StartAfterReboot::Stateless, most)), every, "{most:?}");
    }
}

#[test]
fn a_clock_that_was_set_back_counts_as_age_zero() {
    assert_eq!(contact_age(Some(100), 160), Some(Duration::from_secs(60)));
    assert_eq!(contact_age(Some(100), 40), Some(Duration::ZERO));
    assert_eq!(contact_age(Some(i64::MIN), i64::MAX), Some(Duration::from_secs(i64::MAX.cast_unsigned())));
    assert_eq!(contact_age(None, 100), None);
}

#[test]
fn a_claim_to_a_path_of_this_node_is_no_reason_to_run_once() {
    let volumes = |claims: &[&str]| -> Vec<serde_json::Value> {
        let volume = |name| serde_json::json!({"name": name, "persistentVolumeClaim": {"claimName": name}});
        claims.iter().map(volume).collect()
    };
    let single_run = |claims: &[&str]| {
        let pod = serde_json::json!({"metadata": {"name": "p"}, "spec": {"volumes": volumes(claims)}});
        let pod: keelson_kube_model::Pod = serde_json::from_value(pod).unwrap();
        SingleRun::with_node_local_claims(&pod, |claim| claim == "local")
    };
    assert_eq!(single_run(&["local"]), None);
    assert_eq!(single_run(&["local", "shared"]), Some(SingleRun::Claim { volume: "shared".into() }));
}
