use keelson_config::{ControlPlane, Etcd};
use serde_json::{Value, json};

use crate::resolve::Flags;
use crate::resolve::tests::{etcd, host, keelson, kubelet, problems_of, run};

fn lease(fields: Value) -> (Etcd, bool) {
    let own = keelson(etcd(json!({"endpoints": ["http://h:1"]})));
    let config = run(&Flags::default(), Some(&kubelet(fields)), Some(&own), &host()).unwrap().config;
    let told = config.provenance.contains_key("controlPlane.etcd.leaseSeconds");
    match config.control_plane {
        ControlPlane::Etcd(etcd) => (etcd, told),
        ControlPlane::None => panic!("there is an etcd"),
    }
}

#[test]
fn the_nodes_lease_is_as_long_as_the_kubelet_configuration_says_and_forty_seconds_otherwise() {
    for (fields, seconds, told) in [
        (json!({}), 40, false),
        (json!({"nodeLeaseDurationSeconds": 0}), 40, false),
        (json!({"nodeLeaseDurationSeconds": 1}), 1, true),
        (json!({"nodeLeaseDurationSeconds": 10}), 10, true),
        (json!({"nodeLeaseDurationSeconds": i32::MAX}), 2_147_483_647, true),
    ] {
        let (etcd, named) = lease(fields.clone());
        assert_eq!((etcd.lease_seconds, named), (seconds, told), "{fields}");
    }
    for wrong in [json!(-1), json!("40s"), json!(1_u64 << 31)] {
        let problems = problems_of(json!({"nodeLeaseDurationSeconds": wrong}));
        assert!(problems.len() == 1 && problems[0].contains("nodeLeaseDurationSeconds"), "{problems:?}");
    }
}

#[test]
fn without_a_control_plane_the_length_of_the_lease_is_no_problem_and_nothing_to_tell_of() {
    let file = kubelet(json!({"nodeLeaseDurationSeconds": 10}));
    let resolved = run(&Flags::default(), Some(&file), None, &host()).unwrap();
    assert_eq!(resolved.config.control_plane, ControlPlane::None);
    assert!(!resolved.notes.iter().any(|note| note.text.contains("nodeLease")), "{:?}", resolved.notes);
}
