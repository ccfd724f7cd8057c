//! Tests of eviction thresholds and enforcement.

use serde_json::{Value, json};

use crate::document::Document;
use crate::inputs::{Flags, Host, Inputs};
use crate::outcome::Level;
use crate::resolve::{Resolved, resolve as resolve_all};

fn resolved(fields: Value) -> Result<Resolved, Vec<String>> {
    let mut root = json!({"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"});
    root.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let document = Document { root: root.as_object().unwrap().clone(), ..Document::default() };
    let host =
        Host { hostname: "edge".into(), memory_bytes: 8 << 30, nodefs_bytes: 1 << 40, ..Host::default() };
    let flags = Flags::default();
    resolve_all(Inputs { flags: &flags, kubelet: Some(&document), drop_ins: &[], keelson: None, host: &host })
        .map_err(|errors| errors.iter().map(ToString::to_string).collect())
}

#[test]
fn eviction_and_allocatable_fields_are_applied() {
    let config = resolved(json!({
        "evictionHard": {"pid.available": "10%"},
        "evictionSoft": {"memory.available": "1Gi"},
        "evictionSoftGracePeriod": {"memory.available": "1m30s"},
        "evictionMinimumReclaim": {"nodefs.available": "1Gi"},
        "evictionPressureTransitionPeriod": "10s",
        "evictionMaxPodGracePeriod": 7,
        "localStorageCapacityIsolation": false,
        "kernelMemcgNotification": true,
        "podsPerCore": 5,
        "protectKernelDefaults": true,
        "kubeReserved": {"cpu": "1"},
        "kubeReservedCgroup": "/kube.slice",
        "enforceNodeAllocatable": ["pods", "kube-reserved"],
    }))
    .unwrap()
    .config;
    let eviction = &config.resources.eviction;
    assert_eq!(eviction.hard, [("pid.available".to_owned(), "10%".to_owned())].into());
    assert_eq!(eviction.soft["memory.available"], "1Gi");
    assert_eq!(eviction.soft_grace_ms["memory.available"], 90_000);
    assert_eq!(eviction.minimum_reclaim["nodefs.available"], "1Gi");
    assert_eq!((eviction.pressure_transition_ms, eviction.max_pod_grace_seconds), (10_000, 7));
    assert!(!eviction.local_storage_limits && eviction.kernel_memcg_notification);
    let allocatable = &config.resources.node_allocatable;
    assert!(allocatable.protect_kernel_defaults);
    assert_eq!((allocatable.enforce.len(), allocatable.kube_reserved_cgroup.as_str()), (2, "/kube.slice"));
    assert_eq!((allocatable.kube_reserved["cpu"].as_str(), config.resources.pods_per_core), ("1", 5));
}

#[test]
fn eviction_defaults_are_those_of_a_kubelet() {
    let resolved = resolved(json!({})).unwrap();
    let eviction = &resolved.config.resources.eviction;
    let hard: Vec<String> = eviction.hard.iter().map(|(signal, text)| format!("{signal}<{text}")).collect();
    assert_eq!(
        hard,
        [
            "imagefs.available<15%",
            "imagefs.inodesFree<5%",
            "memory.available<100Mi",
            "nodefs.available<10%",
            "nodefs.inodesFree<5%"
        ]
    );
    assert_eq!((eviction.pressure_transition_ms, eviction.local_storage_limits), (300_000, true));
    assert_eq!(resolved.config.resources.node_allocatable.enforce, ["pods"]);
}

#[test]
fn dropped_default_eviction_thresholds_are_listed_in_a_warning() {
    let resolved = resolved(json!({"evictionHard": {"memory.available": "1Gi"}})).unwrap();
    let warned = resolved.notes.iter().filter(|note| note.level == Level::Warn);
    assert!(warned.clone().any(|note| note.text.contains("nodefs.available")), "{:?}", resolved.notes);
    let merged = json!({"evictionHard": {"memory.available": "1Gi"}, "mergeDefaultEvictionSettings": true});
    let notes = super::tests::resolved(merged).unwrap().notes;
    assert!(notes.iter().all(|note| !note.text.contains("drops the defaults")), "{notes:?}");
}

#[test]
fn invalid_values_are_refused_with_a_remedy() {
    for (fields, part) in [
        (json!({"evictionSoft": {"memory.available": "1Gi"}}), "evictionSoftGracePeriod.memory.available"),
        (
            json!({"evictionSoft": {"memory.free": "1Gi"}, "evictionSoftGracePeriod": {"memory.free": "1s"}}),
            "no such signal",
        ),
        (json!({"evictionSoftGracePeriod": {"memory.available": "soon"}}), "1m30s"),
        (json!({"evictionMinimumReclaim": {"nodefs.available": "much"}}), "100Mi"),
        (json!({"evictionMaxPodGracePeriod": -1}), "evictionMaxPodGracePeriod"),
        (json!({"enforceNodeAllocatable": ["pod"]}), "kube-reserved-compressible"),
        (json!({"enforceNodeAllocatable": ["pods", "pods"]}), "once"),
        (json!({"enforceNodeAllocatable": ["pods", "none"]}), "only value"),
        (json!({"enforceNodeAllocatable": ["kube-reserved"]}), "kubeReservedCgroup"),
        (
            json!({"enforceNodeAllocatable": ["system-reserved", "system-reserved-compressible"], "systemReservedCgroup": "/s"}),
            "exclude each other",
        ),
    ] {
        let errors = resolved(fields.clone()).unwrap_err();
        assert!(errors.iter().any(|error| error.contains(part)), "{fields}: {errors:?}");
    }
}

#[test]
fn kernel_memcg_notification_is_reported_as_without_effect_on_cgroup_v2() {
    let says = |asked: bool| {
        let resolved = resolved(json!({"kernelMemcgNotification": asked})).unwrap();
        resolved
            .notes
            .iter()
            .any(|note| note.text.starts_with("kernelMemcgNotification") && note.text.contains("v2"))
    };
    assert!(says(true) && !says(false));
}
