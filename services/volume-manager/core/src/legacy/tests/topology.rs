use super::*;
use crate::objects::{NodeSelectorRequirement, NodeSelectorTerm};

const ZONE: &str = "topology.kubernetes.io/zone";
const BETA_ZONE: &str = "failure-domain.beta.kubernetes.io/zone";
const REGION: &str = "topology.kubernetes.io/region";
const BETA_REGION: &str = "failure-domain.beta.kubernetes.io/region";
const EBS_ZONE: &str = "topology.ebs.csi.aws.com/zone";

type Requirements = Vec<(&'static str, &'static str, Vec<&'static str>)>;

/// A node affinity with these terms.
fn affinity(terms: Vec<Requirements>) -> VolumeNodeAffinity {
    let term = |requirements: Requirements| {
        let expression =
            |(key, operator, values)| json!({"key": key, "operator": operator, "values": values});
        json!({
            "matchExpressions": requirements.into_iter().map(expression).collect::<Vec<_>>(),
            "matchFields": [{"key": "metadata.name", "operator": "In", "values": [ZONE]}],
        })
    };
    let terms: Vec<Value> = terms.into_iter().map(term).collect();
    serde_json::from_value(json!({"required": {"nodeSelectorTerms": terms}})).unwrap()
}

/// The node affinity of an EBS volume, or another one.
fn rewritten(kind: &str, labels: &Value, before: Option<&VolumeNodeAffinity>) -> Option<VolumeNodeAffinity> {
    let mut pv = volume(json!({"labels": labels}), json!({}));
    pv.spec.node_affinity = before.cloned();
    let (_, spec, _) = valid_sources().into_iter().find(|(name, ..)| *name == kind).unwrap();
    migrated(persistent(kind, spec, &pv)).node_affinity
}

#[test]
fn each_driver_has_its_topology_labels() {
    let before = affinity(vec![vec![(ZONE, "In", vec!["a"]), (REGION, "In", vec!["r"])]]);
    let table = [
        ("awsElasticBlockStore", EBS_ZONE, REGION),
        ("azureDisk", ZONE, REGION),
        ("azureFile", ZONE, REGION),
        ("cinder", "topology.cinder.csi.openstack.org/zone", REGION),
        ("gcePersistentDisk", "topology.gke.io/zone", REGION),
        ("portworxVolume", ZONE, REGION),
        ("vsphereVolume", "topology.csi.vmware.com/zone", "topology.csi.vmware.com/region"),
    ];
    for (kind, zone, region) in table {
        let expected = affinity(vec![vec![(zone, "In", vec!["a"]), (region, "In", vec!["r"])]]);
        assert_eq!(rewritten(kind, &json!({}), Some(&before)), Some(expected), "{kind}");
        // Without a node affinity, the labels of the PersistentVolume count for the drivers that have keys.
        let found = rewritten(kind, &json!({ZONE: "a-b-c", REGION: "r"}), None);
        let keys: Vec<String> = found
            .into_iter()
            .flat_map(|affinity| affinity.required.unwrap().node_selector_terms)
            .flat_map(|term| term.match_expressions)
            .map(|requirement| requirement.key)
            .collect();
        let expected: Vec<&str> =
            [zone, region].into_iter().filter(|key| ![ZONE, REGION].contains(key)).collect();
        assert_eq!(keys, expected, "{kind}");
    }
}

#[test]
fn zones_in_the_node_affinity_are_renamed_in_every_term_and_nothing_else_is() {
    let before = affinity(vec![
        vec![(ZONE, "In", vec!["a", "b"]), ("disk", "In", vec![ZONE])],
        vec![(BETA_ZONE, "NotIn", vec!["c"]), (ZONE, "Exists", vec![])],
        vec![("disk", "Exists", vec![])],
    ]);
    let after = affinity(vec![
        vec![(EBS_ZONE, "In", vec!["a", "b"]), ("disk", "In", vec![ZONE])],
        vec![(EBS_ZONE, "NotIn", vec!["c"]), (EBS_ZONE, "Exists", vec![])],
        vec![("disk", "Exists", vec![])],
    ]);
    // The label is ignored, because the affinity has zones.
    for labels in [json!({}), json!({ZONE: "z"}), json!({BETA_ZONE: "z"})] {
        assert_eq!(rewritten("awsElasticBlockStore", &labels, Some(&before)), Some(after.clone()));
    }
}

#[test]
fn the_zone_label_is_added_to_every_term_without_zones_in_the_affinity() {
    let table = [
        (json!({ZONE: "a"}), vec!["a"]),
        (json!({BETA_ZONE: "a"}), vec!["a"]),
        (json!({ZONE: "a", BETA_ZONE: "b"}), vec!["a"]),
        (json!({ZONE: "b__a__ b __"}), vec!["a", "b"]),
    ];
    for (labels, zones) in table {
        let zone = (EBS_ZONE, "In", zones);
        let before = affinity(vec![vec![("disk", "In", vec!["x"])], vec![]]);
        let after = affinity(vec![vec![("disk", "In", vec!["x"]), zone.clone()], vec![zone.clone()]]);
        assert_eq!(rewritten("awsElasticBlockStore", &labels, Some(&before)), Some(after), "{labels}");
        // Without terms there is one with the zones alone.
        let requirement = NodeSelectorRequirement {
            key: EBS_ZONE.to_owned(),
            operator: "In".to_owned(),
            values: zone.2.iter().map(|zone| (*zone).to_owned()).collect(),
        };
        let only = vec![NodeSelectorTerm { match_expressions: vec![requirement], match_fields: vec![] }];
        for before in [None, Some(VolumeNodeAffinity::default()), Some(affinity(vec![]))] {
            let found = rewritten("awsElasticBlockStore", &labels, before.as_ref()).unwrap();
            assert_eq!(found.required.unwrap().node_selector_terms, only, "{labels}");
        }
    }
}

#[test]
fn labels_without_a_zone_change_nothing() {
    let before = affinity(vec![vec![("disk", "In", vec!["x"])]]);
    for labels in [json!({}), json!({ZONE: ""}), json!({ZONE: " __ "}), json!({REGION: "r", "zone": "a"})] {
        assert_eq!(rewritten("awsElasticBlockStore", &labels, None), None, "{labels}");
        let found = rewritten("awsElasticBlockStore", &labels, Some(&before));
        assert_eq!(found, Some(before.clone()), "{labels}");
    }
}

#[test]
fn a_beta_region_becomes_the_current_one_or_that_of_the_driver() {
    let before = affinity(vec![vec![(BETA_ZONE, "In", vec!["a"]), (BETA_REGION, "In", vec!["r"])]]);
    for (kind, zone, region) in [
        ("awsElasticBlockStore", EBS_ZONE, REGION),
        ("vsphereVolume", "topology.csi.vmware.com/zone", "topology.csi.vmware.com/region"),
    ] {
        let after = affinity(vec![vec![(zone, "In", vec!["a"]), (region, "In", vec!["r"])]]);
        assert_eq!(rewritten(kind, &json!({}), Some(&before)), Some(after), "{kind}");
    }
}

#[test]
fn a_rewritten_affinity_has_no_legacy_zone_and_stays_as_it_is() {
    let reached = &Reached::default();
    let key = prop::sample::select(vec![ZONE, BETA_ZONE, BETA_REGION, "disk", EBS_ZONE]);
    let requirement =
        (key, prop::sample::select(vec!["In", "Exists"]), prop::sample::subsequence(vec!["a", "b"], 0..=2));
    let terms = prop::collection::vec(prop::collection::vec(requirement, 0..3), 0..3);
    let label = prop::option::of(prop::sample::select(vec!["", "a", "a__b"]));
    proptest!(ProptestConfig::with_cases(1024), |(terms in terms, label in label, is_beta: bool)| {
        let before = affinity(terms.clone());
        let labels = match label {
            Some(zones) if is_beta => json!({BETA_ZONE: zones}),
            Some(zones) => json!({ZONE: zones}),
            None => json!({}),
        };
        let after = rewritten("awsElasticBlockStore", &labels, Some(&before)).unwrap();
        let keys = |affinity: &VolumeNodeAffinity| -> Vec<Vec<String>> {
            let terms = &affinity.required.as_ref().unwrap().node_selector_terms;
            terms.iter().map(|term| term.match_expressions.iter().map(|r| r.key.clone()).collect()).collect()
        };
        let (keys_before, keys_after) = (keys(&before), keys(&after));
        prop_assert!(keys_after.iter().flatten().all(|key| ![ZONE, BETA_ZONE, BETA_REGION].contains(&key.as_str())));
        let had_zone = keys_before.iter().flatten().any(|key| [ZONE, BETA_ZONE].contains(&key.as_str()));
        let is_added = !had_zone && label.is_some_and(|zones| !zones.is_empty());
        let added = if is_added { keys_after.len() } else { 0 };
        let count = |keys: &[Vec<String>]| keys.iter().map(Vec::len).sum::<usize>();
        prop_assert_eq!(count(&keys_after), count(&keys_before) + added);
        // Translated once more, without the label, it is the same.
        prop_assert_eq!(rewritten("awsElasticBlockStore", &json!({}), Some(&after)), Some(after.clone()));
        reached.case([
            ("zones of the affinity", had_zone && label.is_some()),
            ("zones of the label", is_added && !keys_before.is_empty()),
            ("zones of the label alone", is_added && keys_before.is_empty()),
            ("no zones", !had_zone && !is_added),
        ]);
    });
    // The rarest: "zones of the label alone", in one case of 9.
    reached.assert_each();
}
