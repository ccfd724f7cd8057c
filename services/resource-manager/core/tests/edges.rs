//! Edge cases: exact limits, and what no other test covers.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;

use keelson_kube_model::Quantity;
use keelson_resource_manager_core::desire::{
    Amounts, ContainerShare, Desire as _, EmptyDirShare, PodDesire, PodRef, Quantities,
};
use keelson_resource_manager_core::enforce::{
    EnforceScope, EnforceTarget, above_capacity, enforce_targets, pods_limits, reserved_limits,
};
use keelson_resource_manager_core::eviction::local::has_limits;
use keelson_resource_manager_core::eviction::order::Order;
use keelson_resource_manager_core::eviction::preempt::victims;
use keelson_resource_manager_core::eviction::signal::{FsLayout, Observation, Signal};
use keelson_resource_manager_core::eviction::threshold::{
    Amount, Texts, Threshold, thresholds, with_derived,
};
use keelson_resource_manager_core::eviction::usage::{
    Candidate, ContainerUsage, PodUsage, Space, VolumeUsage,
};
use keelson_resource_manager_core::layout::Qos;

fn amounts(list: &[(&str, i64)]) -> Amounts {
    list.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect()
}

fn quantities(list: &[(&str, &str)]) -> Quantities {
    list.iter().map(|(name, text)| ((*name).to_owned(), Quantity::parse(text).unwrap())).collect()
}

fn texts(list: &[(&str, &str)]) -> BTreeMap<String, String> {
    list.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
}

fn pod(uid: &str) -> PodDesire {
    PodDesire::forget(PodRef { uid: uid.to_owned(), ..PodRef::default() })
}

#[test]
fn pod_desire_exposes_its_pod_and_revision() {
    let mut desire = pod("u");
    desire.header.revision = 7;
    assert_eq!((&desire.header().pod, desire.header().revision), (&desire.header.pod, 7));
    assert_eq!(desire.header().pod.uid, "u");
}

#[test]
fn each_enforce_node_allocatable_word_has_its_target() {
    for (word, target, scope) in [
        ("pods", EnforceTarget::Pods, EnforceScope::All),
        ("kube-reserved", EnforceTarget::KubeReserved, EnforceScope::All),
        ("system-reserved", EnforceTarget::SystemReserved, EnforceScope::All),
        ("kube-reserved-compressible", EnforceTarget::KubeReserved, EnforceScope::Compressible),
        ("system-reserved-compressible", EnforceTarget::SystemReserved, EnforceScope::Compressible),
    ] {
        assert_eq!(enforce_targets(&[word.to_owned()]), [(target, scope)].into(), "{word}");
    }
}

#[test]
fn fully_reserved_and_zero_reservations_set_no_limits() {
    let all = amounts(&[("memory", 1 << 30), ("pid", 30_000)]);
    let limits = pods_limits(&all, &[&all]);
    assert_eq!((limits.memory, limits.pids), (None, None));
    let one_less = amounts(&[("memory", (1 << 30) - 1), ("pid", 29_999)]);
    let limits = pods_limits(&all, &[&one_less]);
    assert_eq!((limits.memory, limits.pids), (Some(1), Some(1)));

    let none = amounts(&[("cpu", 0), ("memory", 0), ("pid", 0)]);
    assert_eq!(
        reserved_limits(&none, EnforceScope::All),
        reserved_limits(&Amounts::new(), EnforceScope::All)
    );
    let least = amounts(&[("cpu", 1), ("memory", 1), ("pid", 1)]);
    let limits = reserved_limits(&least, EnforceScope::All);
    assert_eq!((limits.cpu_milli, limits.memory, limits.pids), (Some(1), Some(1), Some(1)));
}

#[test]
fn a_pid_reservation_is_printed_in_decimal_units() {
    let message = above_capacity(&amounts(&[("pid", 2000)]), &amounts(&[("pid", 4000)])).unwrap();
    assert!(message.contains("a reservation of 4k but capacity of 2k."), "{message}");
}

#[test]
fn any_local_storage_limit_makes_a_pod_limited() {
    let storage = || quantities(&[("ephemeral-storage", "1Gi")]);
    let share = |limits| ContainerShare { limits, ..ContainerShare::default() };
    let volume = |size_limit| EmptyDirShare { name: "scratch".into(), size_limit };
    for (desire, any) in [
        (pod("u"), false),
        (PodDesire { containers: vec![share(quantities(&[("memory", "1Gi")]))], ..pod("u") }, false),
        (PodDesire { containers: vec![share(storage())], ..pod("u") }, true),
        (PodDesire { pod_level_limits: storage(), ..pod("u") }, true),
        (PodDesire { empty_dirs: vec![volume(None)], ..pod("u") }, false),
        (PodDesire { empty_dirs: vec![volume(Some(Quantity::from_bytes(1)))], ..pod("u") }, true),
    ] {
        assert_eq!(has_limits(&desire), any, "{desire:?}");
    }
}

#[test]
fn usage_equal_to_the_request_is_not_named_in_eviction_messages() {
    let memory = |bytes| PodUsage {
        memory: Some(bytes),
        containers: [("a".to_owned(), ContainerUsage { memory: Some(bytes), ..ContainerUsage::default() })]
            .into(),
        ..PodUsage::default()
    };
    let requests = || quantities(&[("memory", "1Ki")]);
    let whole = PodDesire { pod_level_requests: requests(), ..pod("u") };
    let share = ContainerShare { name: "a".into(), requests: requests(), ..ContainerShare::default() };
    let threshold = Threshold {
        signal: Signal::MemoryAvailable,
        amount: Amount::parse("1Mi").unwrap(),
        grace_ms: None,
        reclaim: None,
    };
    for desire in [whole, PodDesire { containers: vec![share], ..pod("u") }] {
        for (bytes, named) in [(1024, false), (1025, true)] {
            let usage = memory(bytes);
            let candidate = Candidate { desire: &desire, usage: &usage };
            let order = Order::for_shortage(&candidate, &threshold, &Observation::default(), 0, 0);
            assert_eq!(order.message.contains("was using"), named, "{}", order.message);
        }
    }
}

fn chosen(others: &[PodDesire], pod: &PodDesire, cpu: i64) -> Option<Vec<String>> {
    let others: Vec<&PodDesire> = others.iter().collect();
    let chosen = victims(&amounts(&[("cpu", cpu)]), &others, pod, |_| false)?;
    Some(chosen.iter().map(|one| one.header.pod.uid.clone()).collect())
}

#[test]
fn a_critical_pod_is_preempted_only_by_a_higher_nonzero_priority() {
    let critical = |uid: &str, priority, cpu| PodDesire {
        critical: true,
        priority,
        requests: amounts(&[("cpu", cpu)]),
        ..pod(uid)
    };
    for (theirs, its, goes) in [
        (0, 0, false),
        (0, 5, false),
        (-5, 0, false),
        (5, 0, false),
        (5, 5, false),
        (5, 6, true),
        (-5, -4, true),
    ] {
        let found = chosen(&[critical("other", theirs, 900)], &critical("it", its, 500), 1000);
        assert_eq!(found.is_some(), goes, "{theirs} {its}");
    }
}

#[test]
fn preemption_spares_by_qos_then_priority_then_age() {
    let of = |uid: &str, qos, priority, created| PodDesire {
        qos,
        priority,
        created,
        requests: amounts(&[("cpu", 100)]),
        ..pod(uid)
    };
    use Qos::{BestEffort, Burstable, Guaranteed};
    for (one, other, goes) in [
        (of("g", Guaranteed, 0, 9), of("b", Burstable, 9, 0), "b"),
        (of("b", Burstable, 0, 9), of("e", BestEffort, 9, 0), "e"),
        (of("g", Guaranteed, 0, 9), of("e", BestEffort, 9, 0), "e"),
        (of("high", Burstable, 2, 9), of("low", Burstable, 1, 0), "low"),
        (of("old", Burstable, 1, 0), of("new", Burstable, 1, 9), "new"),
    ] {
        let it = PodDesire { critical: true, ..of("it", Burstable, 0, 0) };
        for pair in [[one.clone(), other.clone()], [other.clone(), one.clone()]] {
            // Two fit: preempting one of the pair is enough, and the pod that is spared first stays.
            assert_eq!(chosen(&pair, &it, 200), Some(vec![goes.to_owned()]));
        }
    }
}

#[test]
fn allocatable_memory_threshold_follows_only_the_hard_memory_threshold() {
    let soft = Texts {
        hard: texts(&[("imagefs.available", "5%")]),
        soft: texts(&[("memory.available", "1Gi")]),
        soft_grace_ms: [("memory.available".to_owned(), 90_000)].into(),
        minimum_reclaim: BTreeMap::new(),
    };
    let of_all = |texts: &Texts| {
        let list = thresholds(texts, true).unwrap();
        list.into_iter().find(|t| t.signal == Signal::AllocatableMemoryAvailable).map(|t| t.amount)
    };
    assert_eq!(of_all(&soft), None);
    let hard = Texts { hard: texts(&[("imagefs.available", "5%"), ("memory.available", "100Mi")]), ..soft };
    assert_eq!(of_all(&hard), Amount::parse("100Mi"));
}

#[test]
fn containerfs_thresholds_are_sorted_with_hard_before_soft() {
    let both = Texts {
        hard: texts(&[("nodefs.available", "5%")]),
        soft: texts(&[("nodefs.available", "10%")]),
        soft_grace_ms: [("nodefs.available".to_owned(), 1)].into(),
        minimum_reclaim: BTreeMap::new(),
    };
    let list = with_derived(&thresholds(&both, false).unwrap(), FsLayout::One);
    let found: Vec<_> = list.iter().map(|t| (t.signal, t.is_hard())).collect();
    let expected = [
        (Signal::NodefsAvailable, true),
        (Signal::NodefsAvailable, false),
        (Signal::ContainerfsAvailable, true),
        (Signal::ContainerfsAvailable, false),
    ];
    assert_eq!(found, expected);
    // In any input order.
    let mut turned = thresholds(&both, false).unwrap();
    turned.reverse();
    assert_eq!(with_derived(&turned, FsLayout::One), list);
}

#[test]
fn pod_local_storage_is_counted_in_bytes_and_inodes() {
    let space = |bytes, inodes| Space { bytes, inodes };
    let container =
        ContainerUsage { layer: Some(space(100, 10)), logs: Some(space(20, 2)), ..ContainerUsage::default() };
    let volume = |local| VolumeUsage { name: "v".into(), space: space(3, 1), local };
    let usage = PodUsage {
        containers: [("a".to_owned(), container)].into(),
        volumes: vec![volume(true), volume(false)],
        ..PodUsage::default()
    };
    assert_eq!(usage.local_space(), space(123, 13));
}
