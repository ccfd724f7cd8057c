//! The merge of pod-lifecycle.md §2.5.

use std::sync::Arc;

use keelson_kube_model::Pod;
use keelson_pod_config_core::desired_pod::DesiredPod;
use keelson_pod_config_core::merge::{Change, Merge, Op};
use keelson_pod_config_core::sent_record::SentRecord;
use serde::Deserialize as _;
use serde_json::{Value, json};

fn pod_of(value: Value) -> Arc<DesiredPod> {
    let mut pod = Pod::deserialize(&value).unwrap_or_else(|error| panic!("{error}: {value}"));
    pod.metadata.namespace = "default".into();
    Arc::new(DesiredPod::new(&value, &pod, "/m/x.yaml"))
}

fn pod(uid: &str, image: &str) -> Arc<DesiredPod> {
    pod_of(json!({"metadata": {"uid": uid, "name": format!("pod-{uid}")}, "spec": {"image": image}}))
}

fn ops(changes: &[Change]) -> Vec<(Op, &str)> {
    changes.iter().map(|c| (c.op, c.pod.uid.as_str())).collect()
}

#[test]
fn the_first_set_of_a_source_is_reported_as_first_even_if_empty() {
    let mut merge = Merge::default();
    let outcome = merge.set("file", vec![], 1);
    assert!(outcome.first && outcome.changes.is_empty());
    assert!(merge.has_source("file") && !merge.has_source("manifest"));
    assert!(!merge.set("file", vec![], 2).first);
}

#[test]
fn changes_are_ordered_remove_add_update_delete_reconcile() {
    let status = |phase: &str| {
        pod_of(json!({"metadata": {"uid": "status", "name": "s"}, "spec": {}, "status": {"phase": phase}}))
    };
    let deletion = |at: Value| {
        pod_of(json!({"metadata": {"uid": "deleted", "name": "d", "deletionTimestamp": at}, "spec": {}}))
    };
    let mut merge = Merge::default();
    let first = vec![
        pod("same", "1"),
        pod("gone", "1"),
        pod("update", "1"),
        status("Pending"),
        deletion(Value::Null),
    ];
    assert_eq!(merge.set("api", first, 1).changes.len(), 5);
    let second = vec![
        status("Running"),
        deletion(json!("2026-01-01T00:00:00Z")),
        pod("update", "2"),
        pod("new", "1"),
        pod("same", "1"),
    ];
    let outcome = merge.set("api", second, 2);
    assert_eq!(
        ops(&outcome.changes),
        [
            (Op::Remove, "gone"),
            (Op::Add, "new"),
            (Op::Update, "update"),
            (Op::Delete, "deleted"),
            (Op::Reconcile, "status"),
        ]
    );
    assert_eq!(merge.count("api"), 5);
}

#[test]
fn local_annotations_owners_and_key_order_are_not_a_change() {
    let base =
        json!({"metadata": {"uid": "u", "name": "n", "annotations": {"a": "1"}}, "spec": {"x": 1, "y": 2}});
    let same = json!({
        "metadata": {"uid": "u", "name": "n", "finalizers": ["f"], "ownerReferences": [{}], "resourceVersion": "7",
            "annotations": {"kubernetes.io/config.seen": "now", "kubernetes.io/config.source": "x",
                "kubernetes.io/config.mirror": "m", "a": "1"}},
        "spec": {"y": 2, "x": 1},
    });
    let mut merge = Merge::default();
    merge.set("api", vec![pod_of(base.clone())], 1);
    assert!(merge.set("api", vec![pod_of(same)], 2).changes.is_empty());
    for (pointer, value) in [("/metadata/annotations/a", json!("2")), ("/spec/x", json!(2))] {
        let mut other = base.clone();
        *other.pointer_mut(pointer).unwrap() = value;
        let mut merge = Merge::default();
        merge.set("api", vec![pod_of(base.clone())], 1);
        assert_eq!(ops(&merge.set("api", vec![pod_of(other)], 2).changes), [(Op::Update, "u")], "{pointer}");
    }
}

#[test]
fn config_source_and_config_seen_are_annotated_and_config_seen_stays() {
    let mut merge = Merge::default();
    let seen = |change: &Change| {
        let value: Value =
            serde_json::from_slice(&change.pod.annotated_json("file", change.sent.seen_unix_nanos)).unwrap();
        let annotations = &value["metadata"]["annotations"];
        assert_eq!(annotations["kubernetes.io/config.source"], "file");
        annotations["kubernetes.io/config.seen"].as_str().unwrap().to_owned()
    };
    let first = merge.set("file", vec![pod("u", "1")], 1_500_000_000_000_000_001);
    assert_eq!(seen(&first.changes[0]), "2017-07-14T02:40:00.000000001Z");
    let second = merge.set("file", vec![pod("u", "2")], 1_600_000_000_000_000_000);
    assert_eq!(seen(&second.changes[0]), seen(&first.changes[0]));
    assert_eq!(second.changes[0].sent.seen_unix_nanos, 1_500_000_000_000_000_001);
}

#[test]
fn after_a_restart_an_equal_pod_is_identical_and_a_changed_one_keeps_config_seen() {
    let mut before = Merge::default();
    before.set("file", vec![pod("u", "1")], 1_000);
    let last = before.set("file", vec![pod("u", "2")], 2_000).changes.remove(0);
    let again = |source: &str, uid: &str, image: &str| {
        let earlier =
            [("u".to_owned(), SentRecord { traceparent: "00-a-b-01".into(), ..last.sent.clone() })].into();
        Merge::restore(earlier).set(source, vec![pod(uid, image)], 9_000).changes.remove(0)
    };
    let same = again("file", "u", "2");
    assert_eq!(same.restored_traceparent.as_deref(), Some("00-a-b-01"));
    let json = |change: &Change| change.pod.annotated_json("file", change.sent.seen_unix_nanos);
    assert_eq!(
        (same.sent.revision, same.sent.seen_unix_nanos, json(&same)),
        (last.sent.revision, 1_000, json(&last))
    );

    for (source, image) in [("file", "3"), ("manifest", "2")] {
        let other = again(source, "u", image);
        assert_eq!(
            (other.sent.seen_unix_nanos, other.sent.revision, other.restored_traceparent),
            (1_000, 9_000, None)
        );
    }
    let fresh = again("file", "v", "2");
    assert_eq!(
        (fresh.sent.seen_unix_nanos, fresh.sent.revision, fresh.restored_traceparent),
        (9_000, 9_000, None)
    );
}

#[test]
fn a_revision_grows_over_a_restart_even_if_the_clock_was_set_back() {
    let last = Merge::default().set("file", vec![pod("u", "1")], 5_000).changes.remove(0);
    let mut merge = Merge::restore([("u".to_owned(), last.sent)].into());
    assert_eq!(merge.set("file", vec![pod("u", "2")], 10).changes[0].sent.revision, 5_001);
}

#[test]
fn restored_records_are_used_only_until_every_source_has_been_read() {
    let last = Merge::default().set("file", vec![pod("u", "1")], 5_000).changes.remove(0);
    let mut merge = Merge::restore([("u".to_owned(), last.sent)].into());
    assert!(!merge.contains("u"));
    merge.forget_restored();
    assert_eq!(merge.set("file", vec![pod("u", "1")], 6_000).changes[0].sent.seen_unix_nanos, 6_000);
    assert!(merge.contains("u"));
}

#[test]
fn revisions_grow_even_if_the_clock_is_set_back() {
    let mut merge = Merge::default();
    let mut last = 0;
    for (image, now) in [("1", 100), ("2", 200), ("3", 50), ("4", 60)] {
        let outcome = merge.set("file", vec![pod("u", image)], now);
        assert!(outcome.changes[0].sent.revision > last, "{image}");
        last = outcome.changes[0].sent.revision;
    }
}

#[test]
fn the_later_of_two_pods_with_one_name_in_a_source_is_rejected() {
    let named = |uid: &str| pod_of(json!({"metadata": {"uid": uid, "name": "n"}, "spec": {}}));
    let mut merge = Merge::default();
    let outcome = merge.set("file", vec![named("1"), named("2")], 1);
    assert_eq!(ops(&outcome.changes), [(Op::Add, "1")]);
    assert_eq!(outcome.errors[0].pod.uid, "2");
}

#[test]
fn two_sources_may_share_a_pod_name_but_a_uid_belongs_to_the_first_source() {
    let mut merge = Merge::default();
    merge.set("file", vec![pod("u", "1")], 1);
    let mut other = pod("v", "1");
    Arc::make_mut(&mut other).name = "pod-u".into();
    let outcome = merge.set("manifest", vec![pod("u", "1"), other], 2);
    assert_eq!(ops(&outcome.changes), [(Op::Add, "v")]);
    assert!(outcome.errors[0].message.contains("source file already: /m/x.yaml"), "{outcome:?}");
    let name = keelson_kube_model::PodFullName::new("pod-u", "default");
    assert_eq!(merge.find("file", &name), Some(("u", "/m/x.yaml")));
}

#[test]
fn a_new_uid_under_the_same_name_is_a_removal_and_an_addition() {
    let named = |uid: &str| pod_of(json!({"metadata": {"uid": uid, "name": "n"}, "spec": {}}));
    let mut merge = Merge::default();
    merge.set("file", vec![named("1")], 1);
    assert_eq!(ops(&merge.set("file", vec![named("2")], 2).changes), [(Op::Remove, "1"), (Op::Add, "2")]);
}

#[test]
fn unchanged_records_are_no_change_and_a_change_passes_on_the_record_of_its_source() {
    let mut merge = Merge::default();
    let (same, before, after) = (pod("same", "1"), pod("u", "1"), pod("u", "2"));
    let first = merge.set("file", vec![Arc::clone(&same), before], 1);
    assert!(Arc::ptr_eq(&first.changes[0].pod, &same));
    let second = merge.set("file", vec![same, Arc::clone(&after)], 2);
    assert_eq!(ops(&second.changes), [(Op::Update, "u")]);
    assert!(Arc::ptr_eq(&second.changes[0].pod, &after));
}
