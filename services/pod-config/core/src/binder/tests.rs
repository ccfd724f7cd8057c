mod edges;
mod first_seen;
mod in_use;
mod kept;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::parse_file;
use crate::static_pod::StaticRules;

/// The PersistentVolumes and claims of a manifest for the node `n1`.
fn manifests(objects: &[Value]) -> Manifests {
    let text: Vec<String> = objects.iter().map(Value::to_string).collect();
    let content = parse_file(text.join("\n").as_bytes(), "/m/a.yaml", &StaticRules::standalone("n1"));
    let mut manifests = Manifests { complete: true, ..Manifests::default() };
    for object in content.unwrap_or_else(|errors| panic!("{errors:?}")).objects {
        match Volume::read(&object) {
            Some(volume) if object.key.namespace.is_empty() => {
                manifests.volumes.insert(object.key.name.clone(), volume);
            }
            _ => {
                let key = ClaimKey { namespace: object.key.namespace.clone(), name: object.key.name.clone() };
                manifests.claims.insert(key, Claim::read(&object).unwrap());
            }
        }
    }
    manifests
}

fn volume(name: &str, storage: &str, with: &Value) -> Value {
    let mut volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name, "labels": {"disk": "ssd"}},
        "spec": {
            "capacity": {"storage": storage}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/data"},
        },
    });
    merge(&mut volume["spec"], with);
    volume
}

fn claim(name: &str, storage: &str, with: &Value) -> Value {
    let mut claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": storage}}},
    });
    merge(&mut claim["spec"], with);
    claim
}

fn merge(spec: &mut Value, with: &Value) {
    for (field, value) in with.as_object().unwrap() {
        spec[field] = value.clone();
    }
}

fn key(name: &str) -> ClaimKey {
    ClaimKey { namespace: "default".into(), name: name.into() }
}

fn node() -> NodeFacts {
    let labels = Strings::from([("kubernetes.io/hostname".to_owned(), "n1".to_owned())]);
    NodeFacts { name: "n1".into(), labels }
}

fn decide(objects: &[Value], known: &Bindings) -> Outcome {
    bind(&manifests(objects), &records(known), &node())
}

fn records(bindings: &Bindings) -> Records {
    Records { bindings: bindings.clone(), ..Records::default() }
}

fn bound(volume: &str) -> ClaimState {
    ClaimState::Bound { volume: volume.into() }
}

/// The reason for which the claim `c` is pending.
fn reason(objects: &[Value], known: &Bindings) -> String {
    match &decide(objects, known).claims[&key("c")] {
        ClaimState::Pending { reason } => reason.clone(),
        other => panic!("the claim is not pending: {other:?}"),
    }
}

fn on_node(name: &str) -> Value {
    json!({"nodeAffinity": {"required": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [name]}]}]}}})
}

#[test]
fn a_claim_gets_the_smallest_fitting_volume_and_ties_go_by_name() {
    let plain = json!({});
    let objects = [
        volume("d", "1Gi", &plain),
        volume("c", "10Gi", &plain),
        volume("b", "5Gi", &plain),
        volume("a", "5120Mi", &plain),
        claim("c", "2Gi", &plain),
    ];
    let outcome = decide(&objects, &Bindings::new());
    assert_eq!(outcome.claims[&key("c")], bound("a"));
    assert!(
        matches!(&outcome.volumes["a"], VolumeState::Bound(claim) if claim.name == "c" && !claim.uid.is_empty())
    );
    assert_eq!(outcome.volumes["b"], VolumeState::Available);
}

#[test]
fn a_volume_reserved_for_the_claim_is_preferred_and_given_to_no_other() {
    let reserved = json!({"claimRef": {"namespace": "default", "name": "c"}});
    let volumes = [volume("a", "1Gi", &json!({})), volume("z", "9Gi", &reserved)];
    let mut objects = volumes.to_vec();
    objects.push(claim("c", "1Gi", &json!({"selector": {"matchLabels": {"disk": "hdd"}}})));
    assert_eq!(
        decide(&objects, &Bindings::new()).claims[&key("c")],
        bound("z"),
        "the selector does not count"
    );
    objects[2] = claim("b", "5Gi", &json!({}));
    let ClaimState::Pending { reason } = &decide(&objects, &Bindings::new()).claims[&key("b")] else {
        panic!()
    };
    assert!(reason.contains("z: its spec.claimRef reserves it for the claim default/c"), "{reason}");
}

#[test]
fn a_claim_gets_the_volume_that_it_names_before_any_other_claim() {
    let objects = [
        volume("a", "1Gi", &json!({})),
        volume("b", "2Gi", &json!({})),
        claim("a-first", "1Gi", &json!({})),
        claim("c", "1Gi", &json!({"volumeName": "a"})),
    ];
    let outcome = decide(&objects, &Bindings::new());
    assert_eq!((&outcome.claims[&key("c")], &outcome.claims[&key("a-first")]), (&bound("a"), &bound("b")));
}

#[test]
fn a_pending_claim_says_why_each_volume_does_not_fit() {
    let none = Bindings::new();
    let plain = json!({});
    let uid = json!({"claimRef": {"namespace": "default", "name": "c", "uid": "other"}});
    for (volume_with, claim_with, expected) in [
        (
            json!({"storageClassName": "fast"}),
            plain.clone(),
            "its storage class is \"fast\", and the claim asks for none",
        ),
        (
            json!({"volumeMode": "Block"}),
            plain.clone(),
            "its volumeMode is Block, and the claim asks for Filesystem",
        ),
        (plain.clone(), json!({"accessModes": ["ReadWriteMany"]}), "it lacks the access mode ReadWriteMany"),
        (
            plain.clone(),
            json!({"resources": {"requests": {"storage": "2Gi"}}}),
            "its capacity is 1Gi, and the claim requests 2Gi",
        ),
        (plain.clone(), json!({"selector": {"matchLabels": {"disk": "hdd"}}}), "its labels do not match"),
        (on_node("n2"), plain.clone(), "its spec.nodeAffinity does not select this node, n1"),
        (uid, plain.clone(), "remove spec.claimRef.uid"),
        (plain.clone(), json!({"volumeName": "gone"}), "spec.volumeName is gone, and no manifest"),
    ] {
        let objects = [volume("a", "1Gi", &volume_with), claim("c", "1Gi", &claim_with)];
        let found = reason(&objects, &none);
        assert!(found.contains(expected), "{expected}: {found}");
    }
    assert!(
        reason(&[claim("c", "1Gi", &plain)], &none)
            .contains("no manifest of this node has a PersistentVolume")
    );
    let mut many: Vec<Value> = ["a", "b", "d", "e", "f"].map(|name| volume(name, "1Gi", &plain)).to_vec();
    many.push(claim("c", "2Gi", &plain));
    let found = reason(&many, &none);
    assert!(found.ends_with("; and 2 more)") && !found.contains("e:"), "{found}");
    assert_eq!(
        decide(&[volume("a", "1Gi", &on_node("n1")), claim("c", "1Gi", &plain)], &none).claims[&key("c")],
        bound("a")
    );
}

#[test]
fn a_binding_is_kept_although_a_better_volume_appears() {
    let mut objects = vec![volume("b", "5Gi", &json!({})), claim("c", "1Gi", &json!({}))];
    let first = decide(&objects, &Bindings::new());
    objects.push(volume("a", "1Gi", &json!({})));
    objects[1] = claim("c", "1Gi", &json!({"volumeName": "a"}));
    let second = decide(&objects, &first.bindings);
    assert_eq!(second.claims[&key("c")], bound("b"));
    let read = manifests(&objects);
    let warning = claim_warning(&key("c"), &read.claims[&key("c")], &second.claims[&key("c")]).unwrap();
    assert!(warning.contains("stays bound to the PersistentVolume b"), "{warning}");
}

#[test]
fn a_released_volume_stays_released_when_its_manifest_changes() {
    let plain = json!({});
    let with_claim = |name: &str| vec![volume("a", "1Gi", &plain), claim(name, "1Gi", &plain)];
    let first = decide(&with_claim("old"), &Bindings::new());
    let released = decide(&with_claim("c"), &first.bindings);
    assert!(matches!(&released.volumes["a"], VolumeState::Released(claim) if claim.name == "old"));
    let why = reason(&with_claim("c"), &released.bindings);
    assert!(why.contains("it holds the data of the claim default/old"), "{why}");

    let back = decide(&with_claim("old"), &released.bindings);
    assert_eq!(back.claims[&key("old")], bound("a"));

    let mut changed = with_claim("c");
    changed[0] = volume("a", "2Gi", &json!({"mountOptions": ["ro"]}));
    changed[0]["metadata"]["annotations"] = json!({"changed": "today"});
    let why = reason(&changed, &released.bindings);
    assert!(why.contains("delete the PersistentVolume and create it again"), "{why}");
}

#[test]
fn a_released_volume_is_free_once_it_was_deleted_and_created_again() {
    let plain = json!({});
    let objects = [volume("a", "1Gi", &plain), claim("old", "1Gi", &plain), claim("c", "1Gi", &plain)];
    let first = decide(&objects[..2], &Bindings::new());
    let (with_c, only_c) = ([objects[0].clone(), objects[2].clone()], [objects[2].clone()]);
    let released = decide(&with_c, &first.bindings);
    let deleted = decide(&only_c, &released.bindings);
    assert_eq!(deleted.bindings, Bindings::new());
    assert_eq!(decide(&with_c, &deleted.bindings).claims[&key("c")], bound("a"));

    // Both have gone at the same time, as with a folder that is not mounted: that deletes nothing.
    let gone = decide(&only_c, &first.bindings);
    let back = decide(&with_c, &gone.bindings);
    assert!(matches!(&back.volumes["a"], VolumeState::Released(claim) if claim.name == "old"));
    assert_eq!(decide(&objects, &gone.bindings).claims[&key("old")], bound("a"));
    // Before all sources were read, nothing is deleted.
    let partly =
        bind(&Manifests { complete: false, ..manifests(&only_c) }, &records(&released.bindings), &node());
    assert_eq!(partly.bindings, released.bindings);
}

#[test]
fn in_etcd_a_recreated_volume_has_another_uid_and_is_free() {
    let plain = json!({});
    let objects = [volume("a", "1Gi", &plain), claim("old", "1Gi", &plain)];
    let first = decide(&objects, &Bindings::new());
    let released = decide(&objects[..1], &first.bindings);
    let mut recreated = manifests(&objects[..1]);
    recreated.volumes.get_mut("a").unwrap().uid = "another".into();
    let outcome = bind(&recreated, &records(&released.bindings), &node());
    assert_eq!(outcome.volumes["a"], VolumeState::Available);
    // While its claim is there, a recreated one is the same: the data is that of the claim.
    recreated.claims = manifests(&objects[1..]).claims;
    let outcome = bind(&recreated, &records(&first.bindings), &node());
    assert_eq!(outcome.claims[&key("old")], bound("a"));
}

#[test]
fn a_released_volume_goes_to_the_claim_that_its_manifest_names() {
    let reserved = json!({"claimRef": {"namespace": "default", "name": "c"}});
    let first = decide(&[volume("a", "1Gi", &json!({})), claim("old", "1Gi", &json!({}))], &Bindings::new());
    // The manifest is changed while the volume is still bound.
    let both =
        [volume("a", "1Gi", &reserved), claim("old", "1Gi", &json!({})), claim("c", "1Gi", &json!({}))];
    let kept = decide(&both, &first.bindings);
    assert_eq!(kept.claims[&key("old")], bound("a"));
    let given = decide(&[both[0].clone(), both[2].clone()], &kept.bindings);
    assert_eq!(given.claims[&key("c")], bound("a"));
}

#[test]
fn a_claim_without_its_volume_is_lost_until_the_volume_returns() {
    let plain = json!({});
    let first = decide(&[volume("a", "1Gi", &plain), claim("c", "1Gi", &plain)], &Bindings::new());
    let lost = decide(&[volume("b", "1Gi", &plain), claim("c", "1Gi", &plain)], &first.bindings);
    assert_eq!(lost.claims[&key("c")], ClaimState::Lost { volume: "a".into() });
    let back = decide(&[volume("a", "1Gi", &plain), claim("c", "1Gi", &plain)], &lost.bindings);
    assert_eq!(back.claims[&key("c")], bound("a"));
    // A claim that was removed meanwhile is bound anew, and the old volume stays released.
    let none = decide(&[volume("b", "1Gi", &plain)], &lost.bindings);
    let other = decide(&[volume("b", "1Gi", &plain), claim("c", "1Gi", &plain)], &none.bindings);
    assert_eq!(other.claims[&key("c")], bound("b"));
    let all = [volume("a", "1Gi", &plain), volume("b", "1Gi", &plain), claim("c", "1Gi", &plain)];
    let last = decide(&all, &other.bindings);
    assert_eq!(last.claims[&key("c")], bound("b"));
    assert!(matches!(&last.volumes["a"], VolumeState::Released(_)));
}

#[test]
fn nothing_is_bound_lost_or_released_before_all_sources_were_read() {
    let plain = json!({});
    let objects = [volume("a", "1Gi", &plain), claim("c", "1Gi", &plain)];
    let first = decide(&objects, &Bindings::new());
    let partly = |objects: &[Value], known: &Bindings| {
        bind(&Manifests { complete: false, ..manifests(objects) }, &records(known), &node())
    };
    let pending = ClaimState::Pending { reason: SOURCES_NOT_READ.into() };
    assert_eq!(partly(&objects, &Bindings::new()).claims[&key("c")], pending);
    assert_eq!(partly(&objects, &first.bindings), first);
    for objects in [&objects[..1], &objects[1..]] {
        let outcome = partly(objects, &first.bindings);
        assert_eq!(outcome.bindings, first.bindings);
        assert!(outcome.claims.values().all(|state| *state == pending), "{outcome:?}");
    }
}

#[test]
fn a_volume_with_the_uid_of_another_claim_is_released_as_upstream() {
    let exported = json!({"claimRef": {"namespace": "default", "name": "c", "uid": "of-a-cluster"}});
    let outcome = decide(&[volume("a", "1Gi", &exported)], &Bindings::new());
    assert!(matches!(&outcome.volumes["a"], VolumeState::Released(claim) if claim.uid == "of-a-cluster"));
}

#[test]
fn node_local_claims_are_those_bound_to_a_path_of_this_node() {
    let nfs = json!({"hostPath": null, "nfs": {"server": "s", "path": "/p"}, "storageClassName": "nfs"});
    let objects = [
        volume("a", "1Gi", &json!({})),
        volume("b", "1Gi", &nfs),
        claim("c", "1Gi", &json!({})),
        claim("d", "1Gi", &json!({"storageClassName": "nfs"})),
    ];
    let outcome = decide(&objects, &Bindings::new());
    assert_eq!(outcome.claims[&key("d")], bound("b"));
    assert_eq!(node_local_claims(&outcome.bindings), BTreeSet::from([key("c")]));
}

/// A PersistentVolume by its capacity, class and UID, or a claim by its request, class and UID.
type Drawn = Option<(u8, bool, u8)>;

/// Up to four PersistentVolumes and claims, and whether all sources have been read.
fn any_manifests() -> impl Strategy<Value = ([Drawn; 4], [Drawn; 4], bool)> {
    let one = || proptest::option::weighted(0.7, (1_u8..4, any::<bool>(), 0_u8..2));
    ([one(), one(), one(), one()], [one(), one(), one(), one()], proptest::bool::weighted(0.8))
}

fn drawn(volumes: &[Drawn], claims: &[Drawn], complete: bool) -> Manifests {
    let class = |fast: bool| if fast { "fast" } else { "" };
    let amount = |units: u8| BTreeMap::from([("storage".to_owned(), format!("{units}Gi").parse().unwrap())]);
    let mut manifests = Manifests { complete, ..Manifests::default() };
    for (index, volume) in volumes.iter().enumerate() {
        let Some((units, fast, version)) = *volume else { continue };
        let spec = VolumeSpec { capacity: amount(units), ..VolumeSpec::default() };
        let volume =
            Volume { uid: format!("v{version}"), class: class(fast).into(), spec, ..Volume::default() };
        manifests.volumes.insert(format!("v{index}"), volume);
    }
    for (index, claim) in claims.iter().enumerate() {
        let Some((units, fast, version)) = *claim else { continue };
        let mut spec = ClaimSpec::default();
        spec.resources.requests = amount(units);
        let uid = format!("u{version}");
        let claim = Claim { uid, class: class(fast).into(), spec, ..Claim::default() };
        manifests.claims.insert(key(&format!("c{index}")), claim);
    }
    manifests
}

/// Each bound claim and PersistentVolume name each other, and no PersistentVolume is bound twice.
fn check_consistency(manifests: &Manifests, outcome: &Outcome) -> Result<(), TestCaseError> {
    let mut taken = BTreeSet::new();
    for (claim, state) in &outcome.claims {
        match state {
            ClaimState::Bound { volume } => {
                prop_assert!(taken.insert(volume), "{volume} is bound twice");
                let uid = manifests.claims[claim].uid.clone();
                let (namespace, name) = (claim.namespace.clone(), claim.name.clone());
                let expected = VolumeState::Bound(ClaimReference { namespace, name, uid });
                prop_assert_eq!(&outcome.volumes[volume], &expected);
            }
            ClaimState::Lost { volume } => prop_assert!(!manifests.volumes.contains_key(volume)),
            ClaimState::Pending { reason } => {
                prop_assert_eq!(reason == SOURCES_NOT_READ, !manifests.complete);
            }
        }
    }
    for (name, state) in &outcome.volumes {
        if let VolumeState::Bound(claim) = state
            && manifests.complete
        {
            prop_assert_eq!(&outcome.claims[&ClaimKey::of(claim)], &bound(name));
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn bindings_are_mutual_stable_and_never_hand_data_to_another_claim(
        steps in proptest::collection::vec(any_manifests(), 1..8),
    ) {
        let mut known = Records::default();
        // The claim whose data each PersistentVolume holds, and the UID that it had then.
        let mut data: BTreeMap<String, (ClaimKey, String)> = BTreeMap::new();
        // Those that were seen released.
        let mut seen = BTreeSet::new();
        for (volumes, claims, complete) in steps {
            let manifests = drawn(&volumes, &claims, complete);
            let outcome = bind(&manifests, &known, &node());
            check_consistency(&manifests, &outcome)?;
            let again = bind(&manifests, &records(&outcome.bindings), &node());
            prop_assert_eq!(&again, &outcome, "a second decision is the same");
            for (name, binding) in known.bindings.iter().filter(|(_, binding)| !binding.released) {
                let claim = ClaimKey::of(&binding.claim);
                if manifests.claims.contains_key(&claim) && manifests.volumes.contains_key(name) {
                    prop_assert_eq!(&outcome.claims[&claim], &bound(name), "a binding is kept");
                }
            }
            if complete {
                // A released one that is missing was deleted.
                for name in seen.iter().filter(|name| !manifests.volumes.contains_key(*name)) {
                    data.remove(name);
                }
                seen.retain(|name| manifests.volumes.contains_key(name));
            }
            for (name, state) in &outcome.volumes {
                let uid = &manifests.volumes[name].uid;
                let (VolumeState::Bound(claim) | VolumeState::Released(claim)) = state else {
                    let before = data.remove(name);
                    seen.remove(name);
                    prop_assert!(before.is_none_or(|(_, before)| before != *uid), "{} is free with data", name);
                    continue;
                };
                let claim = ClaimKey::of(claim);
                if let Some((owner, before)) = data.get(name) {
                    prop_assert!(*owner == claim || before != uid, "{} got the data of {}", claim, owner);
                }
                if matches!(state, VolumeState::Bound(_)) {
                    seen.remove(name);
                } else if complete {
                    seen.insert(name.clone());
                }
                // Before all sources were read, only what is bound is recorded.
                if manifests.complete || outcome.claims.get(&claim) == Some(&bound(name)) {
                    data.insert(name.clone(), (claim, uid.clone()));
                }
            }
            known.bindings = outcome.bindings;
        }
    }

    #[test]
    fn a_claim_is_pending_only_if_no_free_volume_fits(world in any_manifests()) {
        let manifests = drawn(&world.0, &world.1, true);
        let outcome = bind(&manifests, &Records::default(), &node());
        for (key, _) in outcome.claims.iter().filter(|(_, state)| matches!(state, ClaimState::Pending { .. })) {
            let claim = &manifests.claims[key];
            for (name, _) in outcome.volumes.iter().filter(|(_, state)| **state == VolumeState::Available) {
                let volume = &manifests.volumes[name];
                let fits = volume.class == claim.class
                    && volume.spec.capacity["storage"] >= claim.spec.resources.requests["storage"];
                prop_assert!(!fits, "{} fits {}", name, key);
            }
        }
    }
}
