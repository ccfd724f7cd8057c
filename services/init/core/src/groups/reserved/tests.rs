use serde_json::json;

use super::*;
use crate::document::{ConfigError, Document};
use crate::inputs::{Flags, Host};
use crate::testing::{assert_refused, host, kubelet, run};

const CAPACITY: Capacity = Capacity { memory: 8 << 30, nodefs: 100 << 30, reserves_thresholds: true };

fn amounts(root: serde_json::Value) -> (Amounts, Vec<ConfigError>) {
    let document = Document { root: root.as_object().unwrap().clone(), ..Document::default() };
    let mut errors = Vec::new();
    let amounts = Amounts::read(&mut Reader::new(&document, &mut errors));
    (amounts, errors)
}

fn read(root: serde_json::Value) -> (BTreeMap<String, String>, Vec<String>) {
    let (amounts, mut errors) = amounts(root);
    let sums = amounts.sums(CAPACITY);
    errors.extend(amounts.above(&sums, CAPACITY));
    let sums = sums.into_iter().map(|(key, amount)| (key, amount.to_string())).collect();
    (sums, errors.iter().map(ToString::to_string).collect())
}

fn sums(root: serde_json::Value) -> Vec<String> {
    let (sums, errors) = read(root);
    assert!(errors.is_empty(), "{errors:?}");
    sums.iter().map(|(k, v)| format!("{k}={v}")).collect()
}

#[test]
fn default_hard_eviction_thresholds_are_reserved() {
    assert_eq!(sums(json!({})), ["ephemeral-storage=10Gi", "memory=100Mi"]);
}

#[test]
fn reservations_and_hard_eviction_thresholds_add_up() {
    let root = json!({
        "kubeReserved": {"cpu": "100m", "memory": "200Mi", "pid": "1000"},
        "systemReserved": {"cpu": "1", "memory": "100Mi", "ephemeral-storage": "1Gi"},
        "evictionHard": {"memory.available": "5%", "nodefs.available": "2Gi"},
    });
    // 300 MiB and 5 % of 8 GiB, in bytes.
    assert_eq!(sums(root), ["cpu=1100m", "ephemeral-storage=3Gi", "memory=744069529", "pid=1k"]);
}

#[test]
fn one_hard_eviction_threshold_drops_the_other_defaults() {
    let root = json!({"evictionHard": {"memory.available": "1Gi"}});
    assert_eq!(sums(root), ["memory=1Gi"]);
}

#[test]
fn dropped_default_thresholds_are_recorded() {
    let read = |root: serde_json::Value| {
        let (amounts, _) = amounts(root);
        (amounts.hard.len(), amounts.dropped)
    };
    assert_eq!(read(json!({})), (5, vec![]));
    let (hard, dropped) = read(json!({"evictionHard": {"memory.available": "1Gi"}}));
    assert_eq!((hard, dropped.len()), (1, 4));
    assert!(dropped.contains(&"nodefs.inodesFree"), "{dropped:?}");
}

#[test]
fn reserved_system_cpus_replace_the_cpu_reservations() {
    let root = json!({
        "kubeReserved": {"cpu": "3", "memory": "1Gi"}, "systemReserved": {"cpu": "1"},
        "reservedSystemCPUs": "0-1,4,1", "evictionHard": {"memory.available": "0%"},
    });
    assert_eq!(sums(root), ["cpu=3", "memory=1Gi"]);
    let (_, errors) = read(json!({"reservedSystemCPUs": "3-1"}));
    assert!(errors[0].contains("reservedSystemCPUs"), "{errors:?}");
}

#[test]
fn offline_cpus_cannot_be_reserved() {
    for (named, online, missing) in [
        ("0-1,4", "0-7\n", None),
        (
            "0-1,4",
            "0-3",
            Some(
                "\"0-1,4\" (kubelet.yaml:3; --reserved-cpus): the CPUs 4 are not online on this machine; it has 0-3",
            ),
        ),
        ("7-65535,1", "0,2-7\n", Some("the CPUs 1,8-65535 are not online on this machine; it has 0,2-7")),
        ("8-9", "", None),
    ] {
        let host = Host { online_cpus: online.to_owned(), ..host() };
        let file = kubelet(json!({"reservedSystemCPUs": named}));
        match (run(&Flags::default(), Some(&file), None, &host), missing) {
            (Ok(_), None) => {}
            (Err(errors), Some(part)) => {
                assert!(errors.len() == 1 && errors[0].contains(part), "{named}: {errors:?}");
            }
            (result, _) => panic!("{named} of {online}: {result:?}"),
        }
    }
}

#[test]
fn allocatable_ignore_eviction_flag_excludes_thresholds() {
    let file = kubelet(json!({"kubeReserved": {"memory": "1Gi"}}));
    for (uses, reserved) in
        [("true", &["memory=1Gi"][..]), ("true,false", &["ephemeral-storage=10Gi", "memory=1124Mi"])]
    {
        let others = [("experimental-allocatable-ignore-eviction", uses.to_owned())].into();
        let resolved = run(&Flags { others, ..Flags::default() }, Some(&file), None, &host()).unwrap();
        let found: Vec<String> =
            resolved.config.resources.reserved.iter().map(|(k, v)| format!("{k}={v}")).collect();
        assert_eq!(found, reserved, "{uses}");
        assert_eq!(resolved.config.resources.eviction.hard.len(), 5, "they are still eviction thresholds");
    }
}

#[test]
fn reservations_above_the_capacity_are_refused() {
    let (_, errors) = read(json!({"systemReserved": {"memory": "9Gi", "cpu": "900"}}));
    assert_eq!(errors.len(), 1, "{errors:?}");
    let text = "Resource \"memory\" has a reservation of 9316Mi but capacity of 8Gi. Expected capacity >= reservation.";
    assert!(errors[0].contains(text), "{errors:?}");
}

#[test]
fn invalid_reservations_are_reported() {
    let (_, errors) = read(json!({
        "kubeReserved": {"gpu": "1", "cpu": "-1", "memory": "lots"},
        "evictionHard": {"memory.free": "1Gi", "nodefs.available": "110%"},
    }));
    assert_eq!(errors.len(), 5, "{errors:#?}");
    for text in ["kubeReserved.gpu", "kubeReserved.cpu = \"-1\"", "\"lots\"", "memory.free", "\"110%\""] {
        assert!(errors.iter().any(|p| p.contains(text)), "{text}: {errors:#?}");
    }
}

#[test]
fn excluding_reservation_fields_are_refused_with_a_remedy() {
    assert_refused(&[
        (json!({"cgroupsPerQOS": false}), "cgroupsPerQOS = false", "enforceNodeAllocatable"),
        (
            json!({"reservedSystemCPUs": "0", "kubeReservedCgroup": "/kube"}),
            "reservedSystemCPUs = \"0\"",
            "excludes systemReservedCgroup and kubeReservedCgroup",
        ),
        (json!({"reservedSystemCPUs": "0", "systemReservedCgroup": "/s"}), "reservedSystemCPUs", "excludes"),
    ]);
}
