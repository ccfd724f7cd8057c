//! The checks before a mount.

use super::*;
use crate::objects::Strings;

#[test]
fn a_persistent_volume_is_mounted_only_on_a_node_that_its_affinity_matches() {
    let labels = Strings::from([("zone".to_owned(), "a".to_owned())]);
    let node = NodeFacts { name: "n1", labels: &labels };
    let on =
        |zone: &str| json!([{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]}]);
    let check = |affinity: Value| check_node(&volume(json!({"spec": {"nodeAffinity": affinity}})), &node);
    for affinity in [json!({}), json!({"required": {"nodeSelectorTerms": on("a")}})] {
        assert_eq!(check(affinity), Ok(()));
    }
    assert_eq!(check_node(&volume(json!({})), &node), Ok(()));

    let error = check(json!({"required": {"nodeSelectorTerms": on("b")}})).unwrap_err();
    let text = "no matching NodeSelectorTerms: PV pv cannot be used on node n1; delete the pod";
    assert!(error.to_string().starts_with(text), "{error}");
    assert_eq!(error.wait_owner(), WaitOwner::You);
    assert_eq!(error.step(VolumeMode::Filesystem), "MountVolume.NodeAffinity check");
    assert_eq!(error.step(VolumeMode::Block), "MapVolume.NodeAffinity check");
    // Required, and nothing matches.
    for required in [json!({}), json!({"nodeSelectorTerms": []}), json!({"nodeSelectorTerms": [{}]})] {
        assert!(check(json!({"required": required})).is_err(), "{required}");
    }
    let like = json!([{"matchExpressions": [{"key": "zone", "operator": "Like", "values": ["a"]}]}]);
    let text = check(json!({"required": {"nodeSelectorTerms": like}})).unwrap_err().to_string();
    assert!(text.contains("on node n1, the operator \"Like\" of \"zone\" must be In"), "{text}");
}

#[test]
fn mount_options_of_the_annotation_replace_those_of_the_spec() {
    const ANNOTATION: &str = "volume.beta.kubernetes.io/mount-options";
    for (annotation, spec, expected) in [
        (json!(null), json!(null), &[][..]),
        (json!(null), json!(["soft", "nolock", "soft", ""]), &["nolock", "soft"]),
        (json!("ro,vers=4.1,,ro"), json!(null), &["ro", "vers=4.1"]),
        (json!("ro"), json!(["soft"]), &["ro"]),
        (json!("ro,context=\"u:r:t:s0:c1,c2\""), json!(null), &["context=\"u:r:t:s0:c1,c2\"", "ro"]),
        (json!(""), json!(["soft"]), &[]),
        (json!(","), json!(null), &[]),
    ] {
        let metadata = json!({"annotations": {ANNOTATION: annotation}});
        let pv = volume(json!({"metadata": metadata, "spec": {"mountOptions": spec}}));
        assert_eq!(check_mount_options(&pv, true).unwrap(), expected, "{annotation} {spec}");
        // A plugin that supports none takes a volume without any.
        let refused = check_mount_options(&pv, false);
        assert_eq!(refused.is_err(), !expected.is_empty(), "{annotation} {spec}: {refused:?}");
    }
}

#[test]
fn unsupported_mount_options_are_refused_by_their_place_and_never_shown() {
    for (changes, place) in [
        (json!({"spec": {"mountOptions": ["password=hunter2"]}}), "spec.mountOptions"),
        (
            json!({"metadata": {"annotations": {"volume.beta.kubernetes.io/mount-options": "password=hunter2"}}}),
            "volume.beta.kubernetes.io/mount-options",
        ),
    ] {
        let error = check_mount_options(&volume(changes), false).unwrap_err();
        let text = format!("mount options are not supported for this volume type; remove {place} of PV pv");
        assert_eq!(error.to_string(), text);
        assert!(!format!("{error:?}").contains("hunter2"));
        assert_eq!(error.step(VolumeMode::Filesystem), "MountVolume.MountOptionSupport check");
        assert_eq!(error.wait_owner(), WaitOwner::You);
    }
}

#[test]
fn a_volume_whose_only_mode_is_read_write_once_pod_is_used_by_one_pod() {
    let with = |modes: &[&str]| volume(json!({"spec": {"accessModes": modes}}));
    for (modes, is_single) in [
        (&["ReadWriteOncePod"][..], true),
        (&["ReadWriteOncePod", "ReadWriteOncePod"], true),
        (&["ReadWriteOncePod", "ReadWriteOnce"], false),
        (&["ReadWriteOnce"], false),
        (&["readwriteoncepod"], false),
        (&[], false),
    ] {
        assert_eq!(is_single_pod(&with(modes)), is_single, "{modes:?}");
    }
}

#[test]
fn the_group_of_a_persistent_volume_is_added_unless_the_pod_has_it() {
    for (annotation, groups, expected) in [
        (json!(null), &[][..], None),
        (json!("1234"), &[], Some(1234)),
        (json!("1234"), &[1, 2], Some(1234)),
        (json!("1234"), &[1, 1234], None),
        (json!("0"), &[], Some(0)),
        (json!("+7"), &[], Some(7)),
        (json!("2147483647"), &[], Some(2_147_483_647)),
        (json!("2147483648"), &[], None),
        (json!("99999999999999999999"), &[], None),
        (json!("-1"), &[], None),
        (json!(""), &[], None),
        (json!(" 1234"), &[], None),
        (json!("0x10"), &[], None),
        (json!("12.0"), &[], None),
        (json!("staff"), &[], None),
    ] {
        let annotations = json!({"pv.beta.kubernetes.io/gid": annotation});
        let pv = volume(json!({"metadata": {"annotations": annotations}}));
        assert_eq!(extra_gid(&pv, groups), expected, "{annotation} {groups:?}");
    }
}
