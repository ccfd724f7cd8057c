//! What is kept over restarts and losses, and of claims in use.

use super::*;
use crate::manifest::Kind;
use crate::object::ObjectKey;

fn decide_lost(objects: &[Value], known: &Bindings) -> Outcome {
    let known = Records { lost: true, ..records(known) };
    bind(&manifests(objects), &known, &node())
}

fn lost_reason(objects: &[Value]) -> String {
    match &decide_lost(objects, &Bindings::new()).claims[&key("c")] {
        ClaimState::Pending { reason } => reason.clone(),
        other => panic!("the claim is not pending: {other:?}"),
    }
}

fn named(volume: &str) -> Value {
    json!({"volumeName": volume})
}

fn reserved(claim: &str) -> Value {
    json!({"claimRef": {"namespace": "default", "name": claim}})
}

#[test]
fn after_a_loss_only_what_is_named_is_bound() {
    let plain = json!({});
    let two = |first: &Value, second: &Value, asks: &Value| {
        [volume("a", "1Gi", first), volume("b", "2Gi", second), claim("c", "1Gi", asks)]
    };
    for (objects, expected) in [
        (two(&plain, &plain, &named("b")), "b"),
        (two(&plain, &reserved("c"), &plain), "b"),
        (two(&plain, &reserved("c"), &named("b")), "b"),
    ] {
        assert_eq!(decide_lost(&objects, &Bindings::new()).claims[&key("c")], bound(expected), "{objects:?}");
    }
    for (objects, expected) in [
        (
            two(&plain, &plain, &plain),
            "which PersistentVolume has the data of the claim default/c; write its name",
        ),
        (
            two(&reserved("c"), &reserved("c"), &plain),
            "several PersistentVolumes names the claim default/c: a, b",
        ),
        (
            two(&reserved("c"), &plain, &named("b")),
            "is b, while spec.claimRef of other PersistentVolumes names",
        ),
        (two(&plain, &plain, &named("gone")), "spec.volumeName is gone, and no manifest"),
        (two(&plain, &reserved("other"), &named("b")), "reserves it for the claim default/other"),
    ] {
        let found = lost_reason(&objects);
        assert!(found.contains(expected), "{expected}: {found}");
    }
    // Without a loss the same claim gets the smallest one.
    assert_eq!(decide(&two(&plain, &plain, &plain), &Bindings::new()).claims[&key("c")], bound("a"));
}

#[test]
fn after_a_loss_two_claims_that_name_one_volume_wait_until_it_names_one_of_them() {
    let mut objects =
        vec![volume("a", "1Gi", &json!({})), claim("c", "1Gi", &named("a")), claim("d", "1Gi", &named("a"))];
    let found = lost_reason(&objects);
    assert!(found.contains("the claims default/c and default/d both name the PersistentVolume a"), "{found}");
    objects[0] = volume("a", "1Gi", &reserved("d"));
    let outcome = decide_lost(&objects, &Bindings::new());
    assert_eq!(outcome.claims[&key("d")], bound("a"));
    assert!(matches!(&outcome.claims[&key("c")], ClaimState::Pending { .. }));
}

#[test]
fn after_a_loss_a_binding_that_was_made_since_is_kept_without_names() {
    let objects = [volume("a", "1Gi", &json!({})), claim("c", "1Gi", &named("a"))];
    let known = decide_lost(&objects, &Bindings::new()).bindings;
    let unnamed = [objects[0].clone(), claim("c", "1Gi", &json!({}))];
    assert_eq!(decide_lost(&unnamed, &known).claims[&key("c")], bound("a"));
}

#[test]
fn records_round_trip_and_damaged_or_newer_ones_are_told_apart() {
    let outcome = decide(&[volume("a", "1Gi", &json!({})), claim("c", "1Gi", &json!({}))], &Bindings::new());
    let gone = DeletedClaim {
        namespace: "default".into(),
        name: "d".into(),
        since: "2026-01-01T00:00:00Z".into(),
        object: json!({"metadata": {"name": "d"}}),
    };
    let all = Records { lost: true, deleted: vec![gone], reported: true, ..records(&outcome.bindings) };
    for written in [Records::default(), Records::lost(), all] {
        assert_eq!(Records::decode(&written.encode()), Ok(written));
    }
    let text = Records::lost().encode();
    for damaged in [&text[1..], &text[..text.len() / 2], b"", b"{}", b"{\"version\":0}", b"{\"version\":1}"] {
        let found = Records::decode(damaged);
        assert!(matches!(found, Err(RecordsError::Damaged(_))), "{damaged:?}: {found:?}");
    }
    assert_eq!(Records::decode(b"{\"version\":2}"), Err(RecordsError::TooNew { found: 2 }));
}

#[test]
fn a_binding_of_an_earlier_release_is_read() {
    let text = br#"{"claim":{"namespace":"default","name":"c","uid":"u"},"released":true,"volume_uid":"v",
                   "volume_digest":"d","node_local":true}"#;
    let binding = Binding::decode(text).unwrap();
    assert_eq!((binding.claim.name.as_str(), binding.released, binding.seen_released), ("c", true, false));
    assert_eq!(Binding::decode(&text[1..]), None);
}

#[test]
fn a_binding_is_seen_once_it_is_stored() {
    let objects = [volume("a", "1Gi", &json!({})), claim("c", "1Gi", &json!({}))];
    let decided = decide(&objects, &Bindings::new());
    let hidden = published(&decided, &Bindings::new(), "why");
    assert_eq!(hidden.claims[&key("c")], ClaimState::Pending { reason: "why".into() });
    assert_eq!((&hidden.volumes["a"], &hidden.bindings), (&VolumeState::Available, &decided.bindings));
    assert_eq!(published(&decided, &decided.bindings, "why"), decided);

    // The volume was released, and another claim has got it since. That is not stored yet.
    let mut stored = decided.bindings.clone();
    stored.get_mut("a").unwrap().claim.name = "other".into();
    assert_eq!(published(&decided, &stored, "why"), hidden);
    let mut stored = decided.bindings.clone();
    stored.get_mut("a").unwrap().released = true;
    assert_eq!(published(&decided, &stored, "why"), hidden);
    // A release may be seen at once: nobody gets the data by it.
    let released = decide(&objects[..1], &decided.bindings);
    assert_eq!(published(&released, &decided.bindings, "why"), released);
    // A claim that has lost a volume that nobody knows of waits as well.
    let lost = decide(&objects[1..], &decided.bindings);
    assert_eq!(published(&lost, &Bindings::new(), "why").claims, hidden.claims);
}

#[test]
fn while_the_records_are_not_known_nothing_is_bound() {
    let found = manifests(&[volume("a", "1Gi", &json!({})), claim("c", "1Gi", &json!({}))]);
    let outcome = unknown(&found, "the disk is broken");
    assert_eq!(outcome.claims[&key("c")], ClaimState::Pending { reason: "the disk is broken".into() });
    assert_eq!((&outcome.volumes["a"], outcome.bindings.len()), (&VolumeState::Available, 0));
}

#[test]
fn a_deleted_claim_keeps_its_volume_until_no_pod_uses_it() {
    let plain = json!({});
    let objects = [volume("a", "1Gi", &plain), claim("old", "1Gi", &plain), claim("c", "1Gi", &named("a"))];
    let known = decide(&objects[..2], &Bindings::new()).bindings;
    let mut later = manifests(&[objects[0].clone(), objects[2].clone()]);
    later.used = BTreeSet::from([key("old")]);
    let outcome = bind(&later, &records(&known), &node());
    assert_eq!(outcome.bindings, known);
    assert!(matches!(&outcome.volumes["a"], VolumeState::Bound(claim) if claim.name == "old"));
    let ClaimState::Pending { reason } = &outcome.claims[&key("c")] else { panic!() };
    assert!(reason.contains("it is bound to the claim default/old"), "{reason}");
    later.used.clear();
    let outcome = bind(&later, &records(&known), &node());
    assert!(matches!(&outcome.volumes["a"], VolumeState::Released(claim) if claim.name == "old"));
}

#[test]
fn a_deleted_claim_is_bound_as_before_and_to_nothing_new() {
    let objects = [volume("a", "1Gi", &json!({})), claim("c", "1Gi", &json!({}))];
    let known = decide(&objects, &Bindings::new()).bindings;
    let mut found = manifests(&objects);
    found.claims.get_mut(&key("c")).unwrap().deleted = true;
    assert_eq!(bind(&found, &records(&known), &node()).claims[&key("c")], bound("a"));
    let outcome = bind(&found, &Records::default(), &node());
    assert_eq!((outcome.claims.len(), outcome.bindings.len()), (0, 0));
}

type Objects = BTreeMap<ObjectKey, std::sync::Arc<StoredObject>>;

fn deleted(
    known: &Records,
    before: &Objects,
    now: &Objects,
    used: &BTreeSet<ClaimKey>,
    complete: bool,
) -> Vec<DeletedClaim> {
    deleted_claims(known, before, now, used, complete, "t")
}

#[test]
fn deleted_claims_are_those_in_use_that_no_manifest_has() {
    let text = format!("{}\n{}", volume("a", "1Gi", &json!({})), claim("c", "1Gi", &json!({})));
    let content = parse_file(text.as_bytes(), "/m/a.yaml", &StaticRules::standalone("n1")).unwrap();
    let before: Objects =
        content.objects.iter().map(|object| (object.key.clone(), std::sync::Arc::clone(object))).collect();
    let claim_key =
        ObjectKey { kind: Kind::PersistentVolumeClaim, namespace: "default".into(), name: "c".into() };
    let mut now = before.clone();
    now.remove(&claim_key);
    let bindings =
        decide(&[volume("a", "1Gi", &json!({})), claim("c", "1Gi", &json!({}))], &Bindings::new()).bindings;
    let (bound, used, unused) = (records(&bindings), BTreeSet::from([key("c")]), BTreeSet::new());
    let found = deleted(&bound, &before, &now, &used, true);
    assert_eq!((found[0].key(), found[0].since.as_str()), (key("c"), "t"));
    assert_eq!(found[0].object["spec"]["volumeMode"], "Filesystem");
    assert!(Claim::of(&found[0].object).is_some());

    let later = Records { deleted: found.clone(), ..bound.clone() };
    assert_eq!(deleted(&later, &now, &now, &used, true), found, "over later decisions and restarts");
    assert_eq!(deleted(&later, &now, &now, &unused, false), found, "until all sources were read");
    assert_eq!(deleted(&later, &now, &now, &unused, true), [], "no pod uses it");
    assert_eq!(deleted(&later, &now, &before, &used, true), [], "it is back");
    assert_eq!(deleted(&bound, &before, &now, &unused, true), [], "no pod uses it");
    assert_eq!(deleted(&Records::default(), &before, &now, &used, true), [], "it is not bound");
}
