//! Limits at their exact values.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::time::Duration;

use keelson_init_core::{
    Document, Flags, Health, Host, Inputs, KEELSON_API_VERSION, KEELSON_KIND, KUBELET_API_VERSION,
    KUBELET_KIND, LoopReport, Poll, Report, Resolved, ServiceState, resolve,
};
use serde_json::{Value, json};

/// The highest ID that setuid(2) accepts.
const MAX_ID: u32 = u32::MAX - 1;

fn host() -> Host {
    Host {
        hostname: "edge-1".into(),
        exe_dir: "/opt/keelson/bin".into(),
        cwd: "/srv".into(),
        memory_bytes: 8 << 30,
        nodefs_bytes: 100 << 30,
        ..Host::default()
    }
}

fn document(version: &str, kind: &str, fields: &Value) -> Document {
    let mut root = fields.as_object().unwrap().clone();
    root.insert("apiVersion".into(), version.into());
    root.insert("kind".into(), kind.into());
    Document { file: "f.yaml".into(), folder: "/etc/k".into(), root, ..Document::default() }
}

fn resolved(flags: &Flags, kubelet: &Value, keelson: &Value) -> Result<Resolved, String> {
    let kubelet = document(KUBELET_API_VERSION, KUBELET_KIND, kubelet);
    let keelson = document(KEELSON_API_VERSION, KEELSON_KIND, keelson);
    let host = host();
    resolve(Inputs { flags, kubelet: Some(&kubelet), drop_ins: &[], keelson: Some(&keelson), host: &host })
        .map_err(|errors| errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
}

fn with_kubelet(fields: &Value) -> Result<Resolved, String> {
    resolved(&Flags::default(), fields, &json!({}))
}

fn with_keelson(fields: &Value) -> Result<Resolved, String> {
    resolved(&Flags::default(), &json!({}), fields)
}

#[test]
fn service_states_are_displayed_by_name() {
    for (state, word) in [
        (ServiceState::Starting, "starting"),
        (ServiceState::Running, "running"),
        (ServiceState::Degraded, "degraded"),
        (ServiceState::Stuck, "stuck"),
        (ServiceState::BackingOff, "backing-off"),
        (ServiceState::Failed, "failed"),
        (ServiceState::Stopped, "stopped"),
    ] {
        assert_eq!((state.as_str(), state.to_string().as_str()), (word, word));
    }
}

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

#[test]
fn a_loop_is_stuck_once_stalled_longer_than_its_limit() {
    let state = |stalled: Duration| {
        let one = LoopReport { name: "relist".into(), stalled, stuck_after: seconds(30) };
        let mut health = Health::new(seconds(0));
        health.observe(seconds(100), Poll::Answer(Report { loops: vec![one], conditions: Vec::new() }));
        health.state()
    };
    assert_eq!(state(seconds(30)), ServiceState::Running);
    assert_eq!(state(seconds(30) + Duration::from_nanos(1)), ServiceState::Stuck);
}

#[test]
fn a_good_poll_resets_the_poll_backoff() {
    let error_answer = || Poll::Error("not now".into());
    let mut health = Health::new(seconds(0));
    health.observe(seconds(1), error_answer());
    let first = health.next_poll(seconds(1));
    health.observe(seconds(2), error_answer());
    health.observe(seconds(3), error_answer());
    assert!(health.next_poll(seconds(3)) > first);
    health.observe(seconds(4), Poll::Answer(Report::default()));
    health.observe(seconds(5), error_answer());
    assert_eq!(health.next_poll(seconds(5)), first);
}

#[test]
fn a_starting_service_is_polled_frequently_for_five_seconds() {
    let health = Health::new(seconds(10));
    assert_eq!(health.next_poll(seconds(15) - Duration::from_nanos(1)), Duration::from_millis(50));
    assert_eq!(health.next_poll(seconds(15)), seconds(1));
}

#[test]
fn uid_base_leaves_room_for_every_service() {
    assert!(with_keelson(&json!({"uidBase": MAX_ID - 16})).is_ok());
    assert!(with_keelson(&json!({"uidBase": MAX_ID - 15})).unwrap_err().contains("uidBase"));
    assert!(with_keelson(&json!({"uidBase": 0})).unwrap_err().contains("uidBase"));
}

#[test]
fn run_dir_length_is_limited_by_socket_paths() {
    let run = |length: usize| {
        let dir = format!("/r/{}", "x".repeat(length - 3));
        resolved(&Flags { run_dir: Some(dir), ..Flags::default() }, &json!({}), &json!({}))
    };
    assert!(run(65).is_ok());
    assert!(run(66).unwrap_err().contains("66 bytes long"));
}

#[test]
fn max_parallel_image_pulls_1_agrees_with_serialized_pulls() {
    let pulls = |max: u32| with_kubelet(&json!({"maxParallelImagePulls": max, "serializeImagePulls": true}));
    assert_eq!(pulls(1).unwrap().config.runtime.max_parallel_pulls, 1);
    assert!(pulls(2).unwrap_err().contains("serializeImagePulls"));
}

#[test]
fn pod_pids_limit_zero_or_negative_means_no_limit() {
    for (written, limit) in [(-1, -1), (0, -1), (1, 1), (4096, 4096)] {
        let config = with_kubelet(&json!({"podPidsLimit": written})).unwrap().config;
        assert_eq!(config.resources.pod_pids_limit, limit, "{written}");
    }
}

#[test]
fn image_pull_progress_timeout_is_one_second_to_one_day() {
    for (written, good) in [("999ms", false), ("1s", true), ("24h", true), ("24h0m1s", false)] {
        let result = with_keelson(&json!({"imagePullProgressTimeout": written}));
        assert_eq!(result.is_ok(), good, "{written}: {:?}", result.err());
    }
}

#[test]
fn enforce_node_allocatable_none_must_be_the_only_value() {
    let enforce = |words: &[&str]| with_kubelet(&json!({"enforceNodeAllocatable": words}));
    let config = enforce(&["none"]).unwrap().config;
    assert_eq!(config.resources.node_allocatable.enforce, ["none"]);
    assert!(enforce(&["none", "pods"]).unwrap_err().contains("none must be the only value"));
}

#[test]
fn reservations_may_equal_the_memory_capacity() {
    // The eviction threshold counts too.
    let reserved = |bytes: u64| {
        with_kubelet(&json!({
            "systemReserved": {"memory": bytes.to_string()},
            "evictionHard": {"memory.available": "100Mi"},
        }))
    };
    let most = (8 << 30) - (100 << 20);
    assert!(reserved(most).is_ok(), "{:?}", reserved(most).err());
    assert!(reserved(most + 1).unwrap_err().contains("Expected capacity >= reservation"));
}

#[test]
fn durations_are_at_most_a_year_and_ages_a_century() {
    for (field, most, more) in [
        ("fileCheckFrequency", "8760h", "8760h0m1s"),
        ("volumeStatsAggPeriod", "8760h", "8760h0m1s"),
        ("syncFrequency", "8760h", "8760h0m1s"),
        ("imageMaximumGCAge", "876000h", "876000h0m1s"),
    ] {
        let set = |value: &str| with_kubelet(&json!({field: value}));
        assert!(set(most).is_ok(), "{field}: {:?}", set(most).err());
        let error = set(more).err().unwrap_or_default();
        assert!(error.contains(field), "{field}: {error:?}");
    }
}
