//! Limits at their exact value, and what no other test asks for.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;

use keelson_kube_model::Quantity;
use keelson_resource_manager_core::desire::{
    Amounts, ContainerShare, Desire as _, EmptyDirShare, PodDesire, PodRef, Quantities,
};
use keelson_resource_manager_core::enforce::{
    Extent, Part, above_capacity, parts, pods_limits, reserved_limits,
};
use keelson_resource_manager_core::eviction::local::has_limits;
use keelson_resource_manager_core::eviction::order::Order;
use keelson_resource_manager_core::eviction::preempt::victims;
use keelson_resource_manager_core::eviction::signal::{Layout, Observation, Signal};
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
fn a_desire_says_whose_it_is_and_which_of_several_it_is() {
    let desire = PodDesire { revision: 7, ..pod("u") };
    assert_eq!((desire.pod(), desire.revision()), (&desire.pod, 7));
    assert_eq!(desire.pod().uid, "u");
}

#[test]
fn each_word_of_the_configuration_names_its_part() {
    for (word, part, extent) in [
        ("pods", Part::Pods, Extent::All),
        ("kube-reserved", Part::KubeReserved, Extent::All),
        ("system-reserved", Part::SystemReserved, Extent::All),
        ("kube-reserved-compressible", Part::KubeReserved, Extent::Compressible),
        ("system-reserved-compressible", Part::SystemReserved, Extent::Compressible),
    ] {
        assert_eq!(parts(&[word.to_owned()]), [(part, extent)].into(), "{word}");
    }
}

#[test]
fn what_is_reserved_as_a_whole_or_not_at_all_bounds_nothing() {
    let all = amounts(&[("memory", 1 << 30), ("pid", 30_000)]);
    let limits = pods_limits(&all, &[&all]);
    assert_eq!((limits.memory, limits.pids), (None, None));
    let one_less = amounts(&[("memory", (1 << 30) - 1), ("pid", 29_999)]);
    let limits = pods_limits(&all, &[&one_less]);
    assert_eq!((limits.memory, limits.pids), (Some(1), Some(1)));

    let none = amounts(&[("cpu", 0), ("memory", 0), ("pid", 0)]);
    assert_eq!(reserved_limits(&none, Extent::All), reserved_limits(&Amounts::new(), Extent::All));
    let least = amounts(&[("cpu", 1), ("memory", 1), ("pid", 1)]);
    let limits = reserved_limits(&least, Extent::All);
    assert_eq!((limits.cpu_milli, limits.memory, limits.pids), (Some(1), Some(1), Some(1)));
}

#[test]
fn a_reservation_of_processes_is_told_in_powers_of_ten() {
    let message = above_capacity(&amounts(&[("pid", 2000)]), &amounts(&[("pid", 4000)])).unwrap();
    assert!(message.contains("a reservation of 4k but capacity of 2k."), "{message}");
}

#[test]
fn a_limit_of_any_kind_is_a_reason_to_look_at_a_pod() {
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
fn what_takes_exactly_what_it_asked_for_is_not_named() {
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
    Some(chosen.iter().map(|one| one.pod.uid.clone()).collect())
}

#[test]
fn a_critical_pod_goes_for_another_only_when_both_have_a_priority() {
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
fn guaranteed_then_more_important_then_older_pods_are_spared_whatever_their_order() {
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
            // There is room for two: one of the pair is enough, and whoever is spared first stays.
            assert_eq!(chosen(&pair, &it, 200), Some(vec![goes.to_owned()]));
        }
    }
}

#[test]
fn only_a_hard_threshold_of_memory_is_one_of_all_pods_together_too() {
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
fn of_writable_layers_too_the_hard_threshold_stands_before_the_soft_one() {
    let both = Texts {
        hard: texts(&[("nodefs.available", "5%")]),
        soft: texts(&[("nodefs.available", "10%")]),
        soft_grace_ms: [("nodefs.available".to_owned(), 1)].into(),
        minimum_reclaim: BTreeMap::new(),
    };
    let list = with_derived(&thresholds(&both, false).unwrap(), Layout::One);
    let found: Vec<_> = list.iter().map(|t| (t.signal, t.is_hard())).collect();
    let expected = [
        (Signal::NodefsAvailable, true),
        (Signal::NodefsAvailable, false),
        (Signal::ContainerfsAvailable, true),
        (Signal::ContainerfsAvailable, false),
    ];
    assert_eq!(found, expected);
    // Whatever the order in which they come.
    let mut turned = thresholds(&both, false).unwrap();
    turned.reverse();
    assert_eq!(with_derived(&turned, Layout::One), list);
}

#[test]
fn the_room_that_a_pod_takes_is_counted_in_bytes_and_in_files() {
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
