//! Pod arithmetic, cgroup values and OOM scores.
#![allow(clippy::unwrap_used)] // helpers outside #[test] functions may unwrap too

use keelson_kube_model::resources::*;
use keelson_kube_model::{Pod, Quantity};
use keelson_testkit::Reached;
use proptest::prelude::*;
use serde_json::{Value, json};

fn pod(spec: Value) -> Pod {
    serde_json::from_value(json!({ "spec": spec })).unwrap()
}

fn asks(name: &str, cpu: &str, memory: &str) -> Value {
    json!({"name": name, "resources": {"requests": {"cpu": cpu, "memory": memory}}})
}

fn limited(name: &str, cpu: &str, memory: &str) -> Value {
    let list = json!({"cpu": cpu, "memory": memory});
    json!({"name": name, "resources": {"requests": list, "limits": list}})
}

fn text(list: &keelson_kube_model::ResourceList) -> String {
    list.iter().map(|(name, amount)| format!("{name}={amount}")).collect::<Vec<_>>().join(" ")
}

#[test]
fn shares_follow_the_request_within_the_kernels_bounds() {
    for (milli, shares) in [(0, 2), (1, 2), (2, 2), (100, 102), (1000, 1024), (1_000_000, 262_144), (-5, 2)] {
        assert_eq!(milli_cpu_to_shares(milli), shares, "{milli}m");
    }
}

#[test]
fn quota_follows_the_limit_and_is_at_least_a_millisecond() {
    for (milli, quota) in [(0, 0), (1, 1000), (10, 1000), (200, 20_000), (1500, 150_000)] {
        assert_eq!(milli_cpu_to_quota(milli, DEFAULT_PERIOD_US), quota, "{milli}m");
    }
    assert_eq!(milli_cpu_to_quota(500, 5_000), 2_500);
}

#[test]
fn weights_span_one_to_ten_thousand() {
    for (shares, weight) in [(0, 1), (2, 1), (102, 4), (1024, 39), (262_144, 10_000), (u64::MAX, 10_000)] {
        assert_eq!(shares_to_weight(shares), weight, "{shares}");
    }
    assert_eq!(weight_to_shares(1), 2);
    assert_eq!(weight_to_shares(10_000), 262_144);
}

#[test]
fn requests_are_the_sum_of_regular_containers_or_the_peak_of_the_init_phase() {
    let sum = pod(json!({"containers": [asks("a", "100m", "1Gi"), asks("b", "200m", "1Gi")]}));
    assert_eq!(text(&pod_requests(&sum)), "cpu=300m memory=2Gi");
    let peak = pod(json!({
        "containers": [asks("a", "100m", "1Gi")],
        "initContainers": [asks("i", "1", "10Mi"), asks("j", "500m", "3Gi")],
    }));
    assert_eq!(text(&pod_requests(&peak)), "cpu=1 memory=3Gi");
}

#[test]
fn sidecars_count_for_the_running_phase_and_for_later_init_containers_only() {
    let mut sidecar = asks("s", "1", "1Gi");
    sidecar["restartPolicy"] = json!("Always");
    let spec = json!({
        "containers": [asks("a", "100m", "100Mi")],
        "initContainers": [asks("early", "1500m", "0"), sidecar, asks("late", "1", "2Gi")],
    });
    assert_eq!(text(&pod_requests(&pod(spec))), "cpu=2 memory=3Gi");
}

#[test]
fn overhead_is_added_to_requests_and_to_limits_that_exist() {
    let spec = json!({
        "containers": [{"resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "1Gi"}}}],
        "overhead": {"cpu": "50m", "memory": "1Gi"},
    });
    assert_eq!(text(&pod_requests(&pod(spec.clone()))), "cpu=150m memory=1Gi");
    assert_eq!(text(&pod_limits(&pod(spec))), "memory=2Gi");
}

#[test]
fn pod_level_resources_replace_container_requests() {
    let spec = json!({
        "containers": [asks("a", "100m", "1Gi")],
        "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "3"}},
    });
    assert_eq!(text(&pod_requests(&pod(spec.clone()))), "cpu=2 memory=1Gi");
    assert_eq!(text(&pod_limits(&pod(spec.clone()))), "cpu=3");
    let pod = pod(spec);
    assert_eq!(effective_limit(&pod, &pod.spec.containers[0], "cpu"), Quantity::parse("3").ok());
}

#[test]
fn equal_amounts_keep_the_text_of_the_running_phase() {
    let memory = |amount: &str| json!({"resources": {"requests": {"memory": amount}}});
    let spec = json!({"containers": [memory("1Ki")], "initContainers": [memory("1024")]});
    assert_eq!(text(&pod_requests(&pod(spec))), "memory=1Ki");
}

#[test]
fn container_limit_precedes_pod_level_limit_and_zero_is_unset() {
    let limits = |list: Value| json!({"resources": {"limits": list}});
    let pod = pod(json!({
        "containers": [
            limits(json!({"cpu": "1", "example.com/gpu": "2"})),
            limits(json!({"cpu": "0", "example.com/gpu": "0"})),
        ],
        "resources": {"limits": {"cpu": "3", "example.com/gpu": "4"}},
    }));
    let of = |index: usize, name| effective_limit(&pod, &pod.spec.containers[index], name);
    assert_eq!((of(0, "cpu"), of(1, "cpu")), (Quantity::parse("1").ok(), Quantity::parse("3").ok()));
    // Only CPU and memory are limited by the pod.
    assert_eq!((of(0, "example.com/gpu"), of(1, "example.com/gpu")), (Quantity::parse("2").ok(), None));
}

#[test]
fn only_cpu_memory_and_huge_pages_count_at_pod_level() {
    let spec = json!({
        "containers": [{"resources": {"requests": {"example.com/gpu": "1", "hugepages-2Mi": "2Mi"}}}],
        "resources": {"requests": {"example.com/gpu": "5", "hugepages-2Mi": "4Mi"}},
    });
    assert_eq!(text(&pod_requests(&pod(spec))), "example.com/gpu=1 hugepages-2Mi=4Mi");
}

#[test]
fn guaranteed_pods_get_all_limits() {
    let values = pod_cgroup_values(&pod(json!({"containers": [limited("a", "2", "1Gi")]})), 100_000, true);
    assert_eq!((values.shares, values.quota_us, values.memory_limit), (2048, Some(200_000), Some(1 << 30)));
}

#[test]
fn burstable_pods_are_limited_only_where_every_container_is() {
    let open = pod(json!({"containers": [limited("a", "2", "1Gi"), asks("b", "1", "1Gi")]}));
    let values = pod_cgroup_values(&open, 100_000, true);
    assert_eq!((values.shares, values.quota_us, values.memory_limit), (3072, None, None));
    let closed = pod(json!({"containers": [
        {"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "1Gi"}}},
    ]}));
    let values = pod_cgroup_values(&closed, 100_000, true);
    assert_eq!((values.shares, values.quota_us, values.memory_limit), (1024, Some(200_000), Some(1 << 30)));
}

#[test]
fn best_effort_pods_get_the_least_shares_and_no_limits() {
    let values = pod_cgroup_values(&pod(json!({"containers": [{}]})), 100_000, true);
    assert_eq!((values.shares, values.quota_us, values.memory_limit), (2, None, None));
}

#[test]
fn the_overhead_of_a_best_effort_pod_gives_it_no_share() {
    let overhead = json!({"containers": [{}], "overhead": {"cpu": "500m", "memory": "1Gi"}});
    let values = pod_cgroup_values(&pod(overhead), 100_000, true);
    assert_eq!((values.shares, values.quota_us, values.memory_limit), (2, None, None));
}

#[test]
fn a_zero_limit_is_unset_even_for_a_guaranteed_pod() {
    let mut open = pod(json!({"containers": [{}]}));
    open.status.qos_class = "Guaranteed".into();
    let values = pod_cgroup_values(&open, 100_000, true);
    assert_eq!((values.quota_us, values.memory_limit), (None, None));
}

#[test]
fn without_cfs_quota_there_is_no_quota() {
    let values = pod_cgroup_values(&pod(json!({"containers": [limited("a", "2", "1Gi")]})), 100_000, false);
    assert_eq!((values.quota_us, values.memory_limit), (None, Some(1 << 30)));
}

#[test]
fn huge_page_limits_are_named_by_size() {
    let spec = json!({"containers": [{"resources": {"limits": {"hugepages-2Mi": "4Mi", "memory": "1Gi"}}}]});
    let values = pod_cgroup_values(&pod(spec), 100_000, true);
    assert_eq!(values.hugepage_limits.get("2Mi"), Some(&(4 << 20)));
}

#[test]
fn oom_scores_follow_the_class_and_the_request() {
    let node = 4_000_000_000;
    let score = |spec: Value| {
        let pod = pod(spec);
        oom_score_adj(&pod, &pod.spec.containers[0], node)
    };
    assert_eq!(score(json!({"containers": [{}]})), 1000);
    assert_eq!(score(json!({"containers": [limited("a", "1", "1G")]})), -997);
    assert_eq!(score(json!({"containers": [asks("a", "1", "2G")]})), 500);
    assert_eq!(score(json!({"containers": [asks("a", "1", "1")]})), 999);
    assert_eq!(score(json!({"containers": [asks("a", "1", "4G")]})), 3);
    let critical = json!({
        "containers": [{}], "priority": 2_000_001_000, "priorityClassName": "system-node-critical",
    });
    assert_eq!(score(critical), -997);
}

#[test]
fn a_sidecar_outlives_the_smallest_regular_container() {
    let mut small = asks("s", "1m", "40M");
    small["restartPolicy"] = json!("Always");
    let pod = pod(json!({
        "initContainers": [small],
        "containers": [asks("a", "1", "2G"), asks("b", "1", "1G")],
    }));
    assert_eq!(oom_score_adj(&pod, &pod.spec.init_containers[0], 4_000_000_000), 750);
}

#[test]
fn an_init_container_that_ends_has_the_score_of_its_own_request() {
    let pod = pod(json!({
        "initContainers": [asks("i", "1m", "40M")],
        "containers": [asks("a", "1", "2G"), asks("b", "1", "1G")],
    }));
    assert_eq!(oom_score_adj(&pod, &pod.spec.init_containers[0], 4_000_000_000), 990);
}

#[test]
fn memory_left_over_at_pod_level_is_split_among_containers() {
    let pod = pod(json!({
        "containers": [asks("a", "1", "1G"), {"name": "b"}],
        "resources": {"requests": {"memory": "2G"}},
    }));
    assert_eq!(oom_score_adj(&pod, &pod.spec.containers[0], 4_000_000_000), 625);
    assert_eq!(oom_score_adj(&pod, &pod.spec.containers[1], 4_000_000_000), 875);
}

#[test]
fn weight_keeps_the_order_of_shares() {
    let reached = &Reached::default();
    let less = prop_oneof![0u64..8, 0u64..300_000];
    let apart = prop_oneof![0u64..40, 0u64..300_000];
    proptest!(ProptestConfig::with_cases(512), |(less in less, apart in apart)| {
        let more = less + apart;
        let (of_less, of_more) = (shares_to_weight(less), shares_to_weight(more));
        prop_assert!(of_less <= of_more);
        prop_assert!((1..=10_000).contains(&of_less) && (1..=10_000).contains(&of_more));
        reached.case([
            ("fewer shares than the least", less < 2),
            ("more shares than the most", more > 262_144),
            ("the same weight for more shares", apart > 0 && of_less == of_more),
            ("another weight", of_less < of_more),
        ]);
    });
    // The rarest: "fewer shares than the least", in one case of 8.
    reached.assert_each();
}

#[test]
fn weight_to_shares_round_trips_within_one() {
    let reached = &Reached::default();
    proptest!(ProptestConfig::with_cases(512), |(weight in prop_oneof![Just(1), Just(10_000), 1u64..=10_000])| {
        let back = shares_to_weight(weight_to_shares(weight));
        prop_assert!(weight - back <= 1);
        reached.case([("the same", back == weight), ("one less", back < weight)]);
    });
    // The rarest: "one less", in one case of 3.
    reached.assert_each();
}
