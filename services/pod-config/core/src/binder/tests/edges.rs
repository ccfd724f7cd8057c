//! The rules of the upstream controller, case by case.

use super::*;

/// What the claim `c` is bound to; empty: nothing.
fn chosen(objects: &[Value]) -> String {
    match &decide(objects, &Bindings::new()).claims[&key("c")] {
        ClaimState::Bound { volume } => volume.clone(),
        ClaimState::Pending { .. } => String::new(),
        ClaimState::Lost { volume } => panic!("{volume} is lost"),
    }
}

fn with_class_annotation(mut object: Value, class: &str) -> Value {
    object["metadata"]["annotations"] = json!({CLASS_ANNOTATION: class});
    object
}

#[test]
fn classes_are_equal_and_an_absent_one_is_an_empty_one() {
    let class = |class: &str| json!({"storageClassName": class});
    let absent = json!({});
    for (of_volume, of_claim, fits) in [
        (&absent, &absent, true),
        (&class(""), &absent, true),
        (&absent, &class(""), true),
        (&class("fast"), &class("fast"), true),
        (&class("fast"), &absent, false),
        (&class("fast"), &class(""), false),
        (&absent, &class("fast"), false),
        (&class("fast"), &class("slow"), false),
        // Also for one that is named.
        (&class("fast"), &json!({"volumeName": "a"}), false),
    ] {
        let found = chosen(&[volume("a", "1Gi", of_volume), claim("c", "1Gi", of_claim)]);
        assert_eq!(found == "a", fits, "{of_volume} {of_claim}");
    }
    // The annotation takes precedence over the field, for both.
    let pair = |volume_class: &str, claim_class: &str| {
        let fast = class("fast");
        [
            with_class_annotation(volume("a", "1Gi", &fast), volume_class),
            with_class_annotation(claim("c", "1Gi", &fast), claim_class),
        ]
    };
    assert_eq!(chosen(&pair("slow", "slow")), "a");
    assert_eq!(chosen(&pair("slow", "fast")), "");
    assert_eq!(chosen(&pair("", "")), "a");
}

#[test]
fn a_volume_has_all_requested_access_modes_and_the_same_volume_mode() {
    let modes = |modes: &[&str]| json!({"accessModes": modes});
    for (of_volume, of_claim, fits) in [
        (&["ReadWriteOnce"][..], &["ReadWriteOnce"][..], true),
        (&["ReadWriteOnce", "ReadOnlyMany"], &["ReadOnlyMany"], true),
        (&["ReadOnlyMany"], &["ReadWriteOnce", "ReadOnlyMany"], false),
        (&["ReadWriteMany"], &["ReadWriteOnce"], false),
        (&["ReadWriteOncePod"], &["ReadWriteOncePod"], true),
        (&["ReadWriteOnce"], &["ReadWriteOncePod"], false),
        (&["ReadWriteOncePod"], &["ReadWriteOnce"], false),
    ] {
        let found = chosen(&[volume("a", "1Gi", &modes(of_volume)), claim("c", "1Gi", &modes(of_claim))]);
        assert_eq!(found == "a", fits, "{of_volume:?} {of_claim:?}");
    }
    let mode = |mode: &str| json!({"volumeMode": mode});
    for (of_volume, of_claim, fits) in [
        (&json!({}), &mode("Filesystem"), true),
        (&mode("Filesystem"), &json!({}), true),
        (&mode("Block"), &mode("Block"), true),
        (&mode("Block"), &json!({}), false),
        (&json!({}), &mode("Block"), false),
    ] {
        let found = chosen(&[volume("a", "1Gi", of_volume), claim("c", "1Gi", of_claim)]);
        assert_eq!(found == "a", fits, "{of_volume} {of_claim}");
    }
}

#[test]
fn the_smallest_volume_that_is_large_enough_wins_by_amount_and_not_by_text() {
    for (capacities, request, expected) in [
        (&["10Gi", "9Gi"][..], "8Gi", "v1"),
        (&["1Gi", "1G"], "1G", "v1"),
        (&["1Gi", "1G"], "1Gi", "v0"),
        (&["1073741824", "1Gi"], "1Gi", "v0"),
        (&["1023Mi"], "1Gi", ""),
    ] {
        let mut objects: Vec<Value> = capacities
            .iter()
            .enumerate()
            .map(|(at, capacity)| volume(&format!("v{at}"), capacity, &json!({})))
            .collect();
        objects.push(claim("c", request, &json!({})));
        assert_eq!(chosen(&objects), expected, "{capacities:?} {request}");
    }
}

#[test]
fn a_selector_needs_the_labels_of_the_volume() {
    let expression = |key: &str, operator: &str, values: &[&str]| json!({"selector": {"matchExpressions": [{"key": key, "operator": operator, "values": values}]}});
    for (selector, fits) in [
        (json!({"selector": {}}), true),
        (json!({"selector": {"matchLabels": {"disk": "ssd"}}}), true),
        (json!({"selector": {"matchLabels": {"disk": "ssd", "zone": "a"}}}), false),
        (expression("disk", "In", &["hdd", "ssd"]), true),
        (expression("disk", "NotIn", &["ssd"]), false),
        (expression("zone", "NotIn", &["a"]), true),
        (expression("disk", "Exists", &[]), true),
        (expression("disk", "DoesNotExist", &[]), false),
        // The selector does not count for a volume that the claim names.
        (json!({"volumeName": "a", "selector": {"matchLabels": {"disk": "hdd"}}}), true),
    ] {
        let found = chosen(&[volume("a", "1Gi", &json!({})), claim("c", "1Gi", &selector)]);
        assert_eq!(found == "a", fits, "{selector}");
    }
}

#[test]
fn a_volume_of_another_node_fits_no_claim_not_even_one_that_names_it() {
    for (with, fits) in [(on_node("n1"), true), (on_node("n2"), false)] {
        for asks in [json!({}), json!({"volumeName": "a"})] {
            let found = chosen(&[volume("a", "1Gi", &with), claim("c", "1Gi", &asks)]);
            assert_eq!(found == "a", fits, "{with} {asks}");
        }
    }
}

#[test]
fn a_reserved_volume_is_for_the_claim_of_that_namespace_name_and_uid() {
    let reference = |namespace: &str, name: &str, uid: &str| json!({"claimRef": {"namespace": namespace, "name": name, "uid": uid}});
    let own = manifests(&[claim("c", "1Gi", &json!({}))]).claims[&key("c")].uid.clone();
    for (with, fits, is_released) in [
        (reference("default", "c", ""), true, false),
        (reference("default", "c", &own), true, false),
        (reference("default", "c", "other"), false, true),
        (reference("other", "c", ""), false, false),
        (reference("default", "d", ""), false, false),
        // The API server accepts one without a namespace or a name, and no claim matches it.
        (json!({"claimRef": {"name": "c"}}), false, false),
        (json!({"claimRef": {}}), false, false),
    ] {
        let objects = [volume("a", "1Gi", &with), claim("c", "1Gi", &json!({}))];
        let outcome = decide(&objects, &Bindings::new());
        assert_eq!(chosen(&objects) == "a", fits, "{with}");
        let state = &outcome.volumes["a"];
        assert_eq!(matches!(state, VolumeState::Released(_)), is_released, "{with}: {state:?}");
    }
    // A reserved one that is too small does not keep the claim from another one.
    let reserved = reference("default", "c", "");
    let objects =
        [volume("a", "1Gi", &reserved), volume("b", "9Gi", &json!({})), claim("c", "2Gi", &json!({}))];
    assert_eq!(chosen(&objects), "b");
}

#[test]
fn claims_that_want_one_volume_get_it_by_namespace_and_name() {
    let in_namespace = |mut claim: Value, namespace: &str| {
        claim["metadata"]["namespace"] = json!(namespace);
        claim
    };
    let plain = json!({});
    let mut objects = vec![
        volume("a", "1Gi", &plain),
        in_namespace(claim("b", "1Gi", &plain), "z"),
        claim("d", "1Gi", &plain),
        claim("c", "1Gi", &plain),
    ];
    for _ in 0..2 {
        assert_eq!(chosen(&objects), "a");
        objects[1..].reverse();
    }
    let found = reason(
        &[objects[0].clone(), claim("a-first", "1Gi", &plain), claim("c", "1Gi", &plain)],
        &Bindings::new(),
    );
    assert!(found.contains("it is bound to the claim default/a-first"), "{found}");
}

#[test]
fn a_claim_with_a_data_source_gets_only_a_volume_that_is_named() {
    let source = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s"});
    for field in ["dataSource", "dataSourceRef"] {
        let mut asks = json!({});
        asks[field] = source.clone();
        let objects = [volume("a", "1Gi", &json!({})), claim("c", "1Gi", &asks)];
        let found = reason(&objects, &Bindings::new());
        assert!(found.contains("nobody fills it from the data source"), "{found}");
        asks["volumeName"] = json!("a");
        assert_eq!(chosen(&[objects[0].clone(), claim("c", "1Gi", &asks)]), "a");
    }
}

#[test]
fn the_class_of_attributes_is_compared() {
    let class = |class: &str| json!({"volumeAttributesClassName": class});
    for (of_volume, of_claim, fits) in [
        (&class("gold"), &class("gold"), true),
        (&class("gold"), &json!({}), false),
        (&json!({}), &class("gold"), false),
        (&class(""), &json!({}), true),
    ] {
        let found = chosen(&[volume("a", "1Gi", of_volume), claim("c", "1Gi", of_claim)]);
        assert_eq!(found == "a", fits, "{of_volume} {of_claim}");
    }
}
