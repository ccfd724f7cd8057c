mod mount;

use keelson_testkit::Reached;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::wait_owner::WaitOwner;

fn pod() -> PodRef {
    PodRef { uid: "pod-uid".into(), namespace: "ns".into(), name: "web".into() }
}

fn named(pod: &PodRef) -> ClaimRequest<'_> {
    let source = ClaimSource::Named { claim_name: "data", read_only: false };
    ClaimRequest { pod, volume: "v", source }
}

fn ephemeral(pod: &PodRef) -> ClaimRequest<'_> {
    ClaimRequest { pod, volume: "scratch", source: ClaimSource::Ephemeral }
}

/// `base` with every field of `changes`; objects are merged, and a null removes a field.
fn merge(base: &mut Value, changes: &Value) {
    match (base, changes) {
        (Value::Object(base), Value::Object(changes)) => {
            for (key, change) in changes {
                if change.is_null() {
                    base.remove(key);
                } else {
                    merge(base.entry(key.clone()).or_insert(json!({})), change);
                }
            }
        }
        (base, changes) => *base = changes.clone(),
    }
}

/// A claim that is bound to `pv`, with changes.
fn claim(changes: Value) -> PersistentVolumeClaim {
    let mut claim = json!({
        "metadata": {"name": "data", "namespace": "ns", "uid": "claim-uid",
            "finalizers": ["kubernetes.io/pvc-protection"]},
        "spec": {"volumeName": "pv", "accessModes": ["ReadWriteOnce"], "storageClassName": "fast",
            "volumeMode": "Filesystem"},
        "status": {"phase": "Bound"},
    });
    merge(&mut claim, &changes);
    serde_json::from_value(claim).unwrap()
}

/// The PersistentVolume `pv` of that claim, with changes.
fn volume(changes: Value) -> PersistentVolume {
    let mut volume = json!({
        "metadata": {"name": "pv", "uid": "pv-uid"},
        "spec": {"claimRef": {"namespace": "ns", "name": "data", "uid": "claim-uid"},
            "accessModes": ["ReadWriteOnce", "ReadOnlyMany"], "storageClassName": "fast",
            "volumeMode": "Filesystem", "csi": {"driver": "d", "volumeHandle": "h"}},
    });
    merge(&mut volume, &changes);
    serde_json::from_value(volume).unwrap()
}

fn claim_error(request: &ClaimRequest<'_>, changes: Value) -> ClaimError {
    check_claim(request, Fetched::Found(&claim(changes))).unwrap_err()
}

/// The result of checking a bound claim against its PersistentVolume: the mode.
fn resolve(of_claim: Value, of_volume: Value) -> Result<VolumeMode, ClaimError> {
    let (pod, claim, volume) = (pod(), claim(of_claim), volume(of_volume));
    let bound = check_claim(&named(&pod), Fetched::Found(&claim)).unwrap();
    check_volume(&bound, Fetched::Found(&volume)).map(|resolved| resolved.mode)
}

#[track_caller]
fn assert_error(error: &ClaimError, text: &str, owner: &WaitOwner) {
    let shown = error.to_string();
    assert!(shown.starts_with("error processing PVC ns/"), "{shown}");
    assert!(shown.contains(text), "{shown:?} does not contain {text:?}");
    assert_eq!(error.wait_owner(), *owner, "{shown}");
    assert_eq!(owner.can_resolve_itself(), *owner != WaitOwner::You);
}

#[test]
fn a_claim_is_named_by_the_volume_or_by_pod_and_volume() {
    let pod = pod();
    assert_eq!(named(&pod).claim_name(), "data");
    assert_eq!(ephemeral(&pod).claim_name(), "web-scratch");
    assert_eq!(claim_name("a-b", "c"), "a-b-c");
}

#[test]
fn a_bound_claim_names_its_persistent_volume() {
    let (pod, claim) = (pod(), claim(json!({})));
    assert_eq!(check_claim(&named(&pod), Fetched::Found(&claim)).unwrap().volume_name(), "pv");
}

#[test]
fn a_claim_that_is_missing_or_unreadable_is_an_error() {
    let pod = pod();
    let text =
        "ns/data: failed to fetch PVC from API server: persistentvolumeclaims \"data\" not found; create";
    let error = check_claim(&named(&pod), Fetched::Missing).unwrap_err();
    assert_error(&error, text, &WaitOwner::You);
    let text = "persistentvolumeclaims \"web-scratch\" not found; the control plane creates the claim";
    let error = check_claim(&ephemeral(&pod), Fetched::Missing).unwrap_err();
    assert_error(&error, text, &WaitOwner::EphemeralVolumeController);
    for (request, owner) in
        [(named(&pod), WaitOwner::You), (ephemeral(&pod), WaitOwner::EphemeralVolumeController)]
    {
        let error = check_claim(&request, Fetched::NotVisible).unwrap_err();
        assert_error(&error, "not found or not yet visible to this node", &owner);
    }
    for request in [named(&pod), ephemeral(&pod)] {
        let error = check_claim(&request, Fetched::Failed("forbidden")).unwrap_err();
        assert_error(&error, "failed to fetch PVC from API server: forbidden", &WaitOwner::ApiServer);
    }
}

#[test]
fn a_terminating_claim_is_fine_only_while_it_is_protected() {
    let pod = pod();
    let protected = claim(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    assert!(check_claim(&named(&pod), Fetched::Found(&protected)).is_ok());
    for finalizers in [json!([]), json!(null), json!(["example.com/other"]), json!(["pvc-protection"])] {
        let metadata = json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": finalizers});
        let changes = json!({"metadata": metadata});
        let error = claim_error(&named(&pod), changes.clone());
        assert_error(&error, "PVC is being deleted; once it is gone, create", &WaitOwner::You);
        let error = claim_error(&ephemeral(&pod), changes);
        let text = "PVC is being deleted; once it is gone, the control plane creates";
        assert_error(&error, text, &WaitOwner::EphemeralVolumeController);
    }
    // Without a deletion, the finalizer does not matter.
    let bare = claim(json!({"metadata": {"finalizers": null}}));
    assert!(check_claim(&named(&pod), Fetched::Found(&bare)).is_ok());
}

#[test]
fn a_pending_claim_says_who_gives_it_a_persistent_volume() {
    let provisioner = |name: &str| json!({format!("{name}storage-provisioner"): "ebs.example.com"});
    let by_provisioner = WaitOwner::Provisioner("ebs.example.com".into());
    let controller = WaitOwner::VolumeController;
    for (metadata, spec, text, owner) in [
        (json!({}), json!({"volumeName": "pv"}), "waits for the PersistentVolume pv", &controller),
        (
            json!({"annotations": provisioner("volume.kubernetes.io/")}),
            json!({"volumeName": "pv", "storageClassName": ""}),
            "waits for the PersistentVolume pv",
            &controller,
        ),
        (
            json!({"annotations": {"volume.beta.kubernetes.io/storage-provisioner": "old",
                "volume.kubernetes.io/storage-provisioner": "ebs.example.com"}}),
            json!({"storageClassName": ""}),
            "from the provisioner ebs.example.com",
            &by_provisioner,
        ),
        (json!({}), json!({}), "of the storage class fast (a class with WaitForFirstConsumer", &controller),
        (json!({}), json!({"storageClassName": null}), "of the default storage class", &controller),
        (json!({}), json!({"storageClassName": ""}), "no storage class; create a Persist", &WaitOwner::You),
        (
            json!({"annotations": provisioner("volume.kubernetes.io/")}),
            json!({}),
            "from the provisioner ebs.example.com",
            &by_provisioner,
        ),
        (
            json!({"annotations": provisioner("volume.beta.kubernetes.io/")}),
            json!({}),
            "from the provisioner ebs.example.com",
            &by_provisioner,
        ),
        (
            json!({"annotations": {"volume.kubernetes.io/storage-provisioner": ""}}),
            json!({}),
            "of the storage class fast",
            &controller,
        ),
        (
            json!({"annotations": {"volume.beta.kubernetes.io/storage-class": "slow"}}),
            json!({}),
            "of the storage class slow",
            &controller,
        ),
    ] {
        let mut spec_changes = json!({"volumeName": null});
        spec_changes.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        for phase in ["Pending", ""] {
            let changes = json!({"metadata": metadata, "spec": spec_changes, "status": {"phase": phase}});
            let error = claim_error(&named(&pod()), changes);
            assert_error(&error, "PVC is not bound: ", owner);
            assert_error(&error, text, owner);
        }
    }
}

#[test]
fn a_claim_that_is_lost_or_of_an_unknown_phase_needs_a_person() {
    for (status, text) in [
        (json!({"phase": "Lost"}), "its phase is Lost, because the PersistentVolume \"pv\" is gone"),
        (json!({"phase": "Released"}), "this version does not know its phase \"Released\""),
        (json!({"phase": "bound"}), "this version does not know its phase \"bound\""),
    ] {
        let error = claim_error(&named(&pod()), json!({"status": status}));
        assert_error(&error, "PVC is not bound: ", &WaitOwner::You);
        assert_error(&error, text, &WaitOwner::You);
    }
    for name in [json!(""), json!(null)] {
        let error = claim_error(&named(&pod()), json!({"spec": {"volumeName": name}}));
        assert_error(&error, "PVC has empty pvc.Spec.VolumeName", &WaitOwner::You);
    }
}

fn owned_by(owners: Value) -> Value {
    json!({"metadata": {"name": "web-scratch", "ownerReferences": owners}})
}

#[test]
fn an_ephemeral_claim_has_the_pod_as_its_controller() {
    let pod = pod();
    let owner = |uid: &str, name: &str, controller: Value| json!({"kind": "Pod", "name": name, "uid": uid, "controller": controller});
    let own = claim(owned_by(json!([owner("x", "x", json!(false)), owner("pod-uid", "web", json!(true))])));
    let bound = check_claim(&ephemeral(&pod), Fetched::Found(&own)).unwrap();
    assert_eq!(bound.volume_name(), "pv");

    let text = "ns/web-scratch: PVC ns/web-scratch was not created for pod ns/web (pod is not owner); rename the pod";
    for owners in [
        json!([]),
        json!(null),
        json!([owner("pod-uid", "web", json!(false))]),
        json!([owner("pod-uid", "web", json!(null))]),
        json!([owner("other", "web-scratch", json!(true))]),
        json!([owner("other", "x", json!(true)), owner("pod-uid", "web", json!(true))]),
        json!([{"kind": "Database", "name": "web", "uid": "other", "controller": true}]),
    ] {
        assert_error(&claim_error(&ephemeral(&pod), owned_by(owners)), text, &WaitOwner::You);
    }
    let text =
        "PVC ns/web-scratch was not created for pod ns/web (pod is not owner); it belongs to an earlier pod";
    let earlier = owned_by(json!([owner("earlier", "web", json!(true))]));
    assert_error(&claim_error(&ephemeral(&pod), earlier), text, &WaitOwner::GarbageCollector);
    // An owner without UID is not a pod without UID.
    let nobody = PodRef { uid: String::new(), ..pod.clone() };
    let unknown = claim(owned_by(json!([owner("", "web", json!(true))])));
    assert!(check_claim(&ephemeral(&nobody), Fetched::Found(&unknown)).is_err());
    // A claim that the pod names may belong to anybody.
    let foreign = claim(owned_by(json!([owner("other", "x", json!(true))])));
    assert!(check_claim(&named(&pod), Fetched::Found(&foreign)).is_ok());
}

#[test]
fn only_a_claim_that_the_pod_names_can_be_read_only() {
    let (pod, pv) = (pod(), volume(json!({})));
    let own = claim(json!({"metadata": {"ownerReferences": [{"uid": "pod-uid", "controller": true}]}}));
    let read_only = ClaimSource::Named { claim_name: "data", read_only: true };
    for (request, expected) in [
        (named(&pod), false),
        (ClaimRequest { source: read_only, ..named(&pod) }, true),
        (ephemeral(&pod), false),
    ] {
        let bound = check_claim(&request, Fetched::Found(&own)).unwrap();
        let resolved = check_volume(&bound, Fetched::Found(&pv)).unwrap();
        assert_eq!(resolved.read_only, expected, "{request:?}");
        assert_eq!(
            (resolved.mode, &resolved.volume.metadata.name),
            (VolumeMode::Filesystem, &"pv".to_owned())
        );
    }
}

#[test]
fn a_persistent_volume_that_is_missing_or_unreadable_is_an_error() {
    let (pod, claim) = (pod(), claim(json!({})));
    let bound = check_claim(&named(&pod), Fetched::Found(&claim)).unwrap();
    let error = check_volume(&bound, Fetched::Missing).unwrap_err();
    let text = "ns/data: failed to fetch PV pv from API server: persistentvolumes \"pv\" not found";
    assert_error(&error, text, &WaitOwner::You);
    let error = check_volume(&bound, Fetched::NotVisible).unwrap_err();
    let text = "persistentvolumes \"pv\" not found or not yet visible to this node";
    assert_error(&error, text, &WaitOwner::You);
    let error = check_volume(&bound, Fetched::Failed("timed out")).unwrap_err();
    assert_error(&error, "failed to fetch PV pv from API server: timed out", &WaitOwner::ApiServer);
    let error = resolve(json!({}), json!({"metadata": {"name": "pv-2"}})).unwrap_err();
    let text = "bound to the PersistentVolume pv, but \"pv-2\" was read";
    assert_error(&error, text, &WaitOwner::ApiServer);
}

#[test]
fn a_persistent_volume_has_to_refer_to_the_claim_by_its_uid() {
    for changes in [json!(null), json!({"uid": null}), json!({"uid": ""})] {
        let error = resolve(json!({}), json!({"spec": {"claimRef": changes}})).unwrap_err();
        let text = "PV pv is not bound to the claim yet";
        assert_error(&error, text, &WaitOwner::VolumeController);
    }
    for (changes, text) in [
        (
            json!({"uid": "old"}),
            "bound to the claim ns/data with UID \"old\", not to this one with UID \"claim-uid\"",
        ),
        (json!({"name": "other", "uid": "u"}), "bound to the claim ns/other with UID \"u\""),
        (json!({"name": "other", "uid": ""}), "bound to the claim ns/other with UID \"\""),
        (json!({"namespace": "other", "uid": null}), "bound to the claim other/data"),
    ] {
        let error = resolve(json!({}), json!({"spec": {"claimRef": changes}})).unwrap_err();
        assert_error(&error, text, &WaitOwner::You);
    }
    // Two missing UIDs are not the same claim.
    let error = resolve(json!({"metadata": {"uid": ""}}), json!({"spec": {"claimRef": {"uid": ""}}}));
    assert!(error.is_err());
}

#[test]
fn the_volume_modes_of_claim_and_persistent_volume_are_known_and_equal() {
    let of = |mode: Value| json!({"spec": {"volumeMode": mode}});
    let (filesystem, block) = (VolumeMode::Filesystem, VolumeMode::Block);
    for (of_claim, of_volume, mode) in [
        (json!("Filesystem"), json!("Filesystem"), filesystem),
        (json!(null), json!("Filesystem"), filesystem),
        (json!("Block"), json!("Block"), block),
    ] {
        assert_eq!(resolve(of(of_claim), of(of_volume)), Ok(mode));
    }
    for (of_claim, of_volume, text) in [
        (json!("Filesystem"), json!(null), "PV pv has no spec.volumeMode"),
        (json!("Filesystem"), json!(""), "PV pv has the unknown volumeMode \"\""),
        (json!("Filesystem"), json!("filesystem"), "PV pv has the unknown volumeMode \"filesystem\""),
        (json!("Object"), json!("Block"), "the claim has the unknown volumeMode \"Object\""),
        (
            json!("Block"),
            json!("Filesystem"),
            "PV pv has volumeMode Filesystem, but the claim asks for Block",
        ),
        (json!(null), json!("Block"), "PV pv has volumeMode Block, but the claim asks for Filesystem"),
    ] {
        let error = resolve(of(of_claim), of(of_volume)).unwrap_err();
        assert_error(&error, text, &WaitOwner::You);
    }
}

#[test]
fn a_persistent_volume_has_each_access_mode_that_its_claim_asks_for() {
    const ALL: [&str; 4] = ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"];
    let of = |modes: &[&str]| json!({"spec": {"accessModes": modes}});
    for (of_claim, of_volume) in [
        (&["ReadWriteOnce"][..], &["ReadWriteOnce"][..]),
        (&["ReadOnlyMany"], &ALL),
        (&ALL, &ALL),
        (&["ReadWriteOncePod"], &["ReadWriteOncePod"]),
        (&[], &["ReadWriteOnce"]),
        (&[], &[]),
    ] {
        assert!(resolve(of(of_claim), of(of_volume)).is_ok(), "{of_claim:?} {of_volume:?}");
    }
    for (of_claim, of_volume, text) in [
        (&["ReadWriteMany"][..], &["ReadWriteOnce"][..], "PV pv lacks the access modes ReadWriteMany that"),
        (
            &ALL,
            &["ReadOnlyMany"],
            "lacks the access modes ReadWriteOnce, ReadWriteMany, ReadWriteOncePod that",
        ),
        // No mode includes another one.
        (&["ReadWriteOnce"], &["ReadWriteMany"], "lacks the access modes ReadWriteOnce that"),
        (&["ReadWriteOncePod"], &["ReadWriteOnce"], "lacks the access modes ReadWriteOncePod that"),
        (&["ReadWriteOnce"], &[], "lacks the access modes ReadWriteOnce that"),
        (&["ReadWriteOnce"], &["ReadWriteOnce", "RWX"], "PV pv has the unknown access mode \"RWX\""),
        (&["readwriteonce"], &["ReadWriteOnce"], "the claim has the unknown access mode \"readwriteonce\""),
        (&[""], &ALL, "the claim has the unknown access mode \"\""),
    ] {
        let error = resolve(of(of_claim), of(of_volume)).unwrap_err();
        assert_error(&error, text, &WaitOwner::You);
    }
}

#[test]
fn a_persistent_volume_has_the_storage_class_of_its_claim() {
    let class = |class: Value, annotation: Value| {
        let annotations = json!({"volume.beta.kubernetes.io/storage-class": annotation});
        json!({"metadata": {"annotations": annotations}, "spec": {"storageClassName": class}})
    };
    let none = Value::Null;
    for (of_claim, of_volume) in [
        (class(json!("fast"), none.clone()), class(json!("fast"), none.clone())),
        (class(json!(""), none.clone()), class(json!(""), none.clone())),
        (class(json!(""), none.clone()), class(none.clone(), none.clone())),
        // A claim without a class takes any.
        (class(none.clone(), none.clone()), class(json!("fast"), none.clone())),
        (class(none.clone(), none.clone()), class(none.clone(), none.clone())),
        // Annotations take precedence.
        (class(json!("fast"), json!("slow")), class(json!("slow"), none.clone())),
        (class(json!("slow"), none.clone()), class(json!("fast"), json!("slow"))),
        (class(json!("x"), json!("")), class(json!("y"), json!(""))),
    ] {
        assert!(resolve(of_claim.clone(), of_volume.clone()).is_ok(), "{of_claim} {of_volume}");
    }
    for (of_claim, of_volume, text) in [
        (class(json!("fast"), none.clone()), class(json!("slow"), none.clone()), ["slow", "fast"]),
        (class(json!("fast"), none.clone()), class(none.clone(), none.clone()), ["", "fast"]),
        (class(json!(""), none.clone()), class(json!("slow"), none.clone()), ["slow", ""]),
        (class(json!("fast"), json!("slow")), class(json!("fast"), none.clone()), ["fast", "slow"]),
        (class(json!("fast"), none.clone()), class(json!("fast"), json!("slow")), ["slow", "fast"]),
    ] {
        let error = resolve(of_claim, of_volume).unwrap_err();
        let [found, requested] = text;
        let text = format!("PV pv has the storage class {found:?}, but the claim asks for {requested:?}");
        assert_error(&error, &text, &WaitOwner::You);
    }
}

#[test]
fn a_volume_is_mounted_or_used_as_a_device_as_its_mode_says() {
    let used = |mounts, devices| VolumeUse { mounts, devices };
    for (mode, used, field) in [
        (VolumeMode::Filesystem, used(true, false), None),
        (VolumeMode::Filesystem, used(false, true), Some("volumeDevices")),
        (VolumeMode::Filesystem, used(true, true), Some("volumeDevices")),
        (VolumeMode::Filesystem, used(false, false), None),
        (VolumeMode::Block, used(false, true), None),
        (VolumeMode::Block, used(true, false), Some("volumeMounts")),
        (VolumeMode::Block, used(true, true), Some("volumeMounts")),
        (VolumeMode::Block, used(false, false), None),
    ] {
        let text = field.map(|field| format!("volume v has volumeMode {mode}, but is specified in {field}"));
        assert_eq!(check_use("v", mode, used).err().map(|error| error.to_string()), text);
    }

    let (pod, claim, pv) = (pod(), claim(json!({})), volume(json!({})));
    let bound = check_claim(&named(&pod), Fetched::Found(&claim)).unwrap();
    let resolved = check_volume(&bound, Fetched::Found(&pv)).unwrap();
    assert_eq!(resolved.check_use("v", used(true, false)), Ok(()));
    let error = resolved.check_use("v", used(false, true)).unwrap_err();
    let text = "ns/data: volume v has volumeMode Filesystem, but is specified in volumeDevices";
    assert_error(&error, text, &WaitOwner::You);
}

#[test]
fn each_wait_owner_has_its_own_name() {
    let owners = [
        WaitOwner::You,
        WaitOwner::ApiServer,
        WaitOwner::VolumeController,
        WaitOwner::Provisioner("x".into()),
        WaitOwner::EphemeralVolumeController,
        WaitOwner::GarbageCollector,
    ];
    let names: BTreeSet<String> = owners.iter().map(ToString::to_string).collect();
    assert_eq!(names.len(), owners.len());
    // The word that `keelson explain` shows for a person.
    assert_eq!(WaitOwner::You.to_string(), "you");
}

#[derive(Debug, Clone)]
struct Case {
    phase: &'static str,
    is_deleted: bool,
    is_protected: bool,
    /// The PersistentVolume that the claim names.
    volume_name: &'static str,
    /// The UID in the PersistentVolume's reference.
    bound_uid: Option<&'static str>,
    controller: Option<&'static str>,
    is_ephemeral: bool,
}

fn any_case() -> impl Strategy<Value = Case> {
    let phase = prop_oneof![4 => Just("Bound"), 1 => prop::sample::select(vec!["", "Pending", "Lost", "?"])];
    let volume_name = prop_oneof![4 => Just("pv"), 1 => prop::sample::select(vec!["", "other"])];
    let bound_uid =
        prop_oneof![4 => Just(Some("claim-uid")), 1 => prop::sample::select(vec![None, Some(""), Some("x")])];
    let controller =
        prop_oneof![2 => Just(Some("pod-uid")), 1 => prop::sample::select(vec![None, Some("x")])];
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (phase, volume_name, bound_uid, controller, flags).prop_map(
        |(phase, volume_name, bound_uid, controller, (is_deleted, is_protected, is_ephemeral))| Case {
            phase,
            is_deleted,
            is_protected,
            volume_name,
            bound_uid,
            controller,
            is_ephemeral,
        },
    )
}

fn objects_of(case: &Case) -> (PersistentVolumeClaim, PersistentVolume) {
    let mut metadata = json!({"ownerReferences": [], "finalizers": []});
    if let Some(uid) = case.controller {
        metadata["ownerReferences"] = json!([{"kind": "Pod", "name": "web", "uid": uid, "controller": true}]);
    }
    if case.is_protected {
        metadata["finalizers"] = json!(["a", "kubernetes.io/pvc-protection"]);
    }
    if case.is_deleted {
        metadata["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    }
    let spec = json!({"volumeName": case.volume_name});
    let claim = claim(json!({"metadata": metadata, "spec": spec, "status": {"phase": case.phase}}));
    let reference = case.bound_uid.map(|uid| json!({"uid": uid}));
    (claim, volume(json!({"spec": {"claimRef": reference}})))
}

#[test]
fn a_claim_that_pod_config_cannot_bind_has_its_reason_and_waits_for_a_person() {
    let condition = json!({"type": "Bound", "status": "False", "message": "no volume is large enough"});
    let changes = json!({"status": {"phase": "Pending", "conditions": [condition]}});
    let (pod, error) = (pod(), claim_error(&named(&pod()), changes));
    assert_eq!(error.claim, format!("{}/data", pod.namespace));
    assert!(error.to_string().ends_with("PVC is not bound: no volume is large enough"), "{error}");
    assert_eq!(error.wait_owner(), WaitOwner::You);
}

#[test]
fn a_volume_resolves_only_if_both_sides_are_bound_and_the_claim_is_the_pods() {
    let reached = &Reached::default();
    proptest!(ProptestConfig::with_cases(2048), |(case in any_case())| {
        let pod = pod();
        let (claim, pv) = objects_of(&case);
        let request = if case.is_ephemeral { ephemeral(&pod) } else { named(&pod) };
        let result = check_claim(&request, Fetched::Found(&claim))
            .and_then(|bound| check_volume(&bound, Fetched::Found(&pv)).map(|_| ()));
        let is_kept = !case.is_deleted || case.is_protected;
        let is_own = !case.is_ephemeral || case.controller == Some("pod-uid");
        let names_volume = case.phase == "Bound" && case.volume_name == "pv";
        let names_claim = case.bound_uid == Some("claim-uid");
        prop_assert_eq!(result.is_ok(), is_kept && is_own && names_volume && names_claim);
        if let Err(error) = &result {
            let start = format!("error processing PVC ns/{}: ", request.claim_name());
            prop_assert!(error.to_string().starts_with(&start));
        }
        reached.case([
            ("a terminating claim resolves", result.is_ok() && case.is_deleted),
            ("an ephemeral claim resolves", result.is_ok() && case.is_ephemeral),
            ("only the deletion refuses", !is_kept && is_own && names_volume && names_claim),
            ("only the owner refuses", is_kept && !is_own && names_volume && names_claim),
            ("only the claim's side refuses", is_kept && is_own && !names_volume && names_claim),
            ("only the volume's side refuses", is_kept && is_own && names_volume && !names_claim),
        ]);
    });
    // The rarest: "only the owner refuses", in about one case of 17.
    reached.assert_each();
}
