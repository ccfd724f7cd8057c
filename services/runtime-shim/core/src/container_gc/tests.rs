use super::*;

/// A plan with the default limits.
fn planned(pods: &[ListedPod], wanted: &BTreeMap<String, Wanted>, complete: bool) -> ContainerGcPlan {
    plan_container_gc(pods, wanted, complete, &GcPolicy::default(), i64::MAX)
}

fn container(id: &str, name: &str, alive: bool, created: i64) -> ListedContainer {
    ListedContainer {
        id: id.into(),
        name: name.into(),
        sandbox_id: "s".into(),
        alive,
        pending: false,
        created_unix_nanos: created,
    }
}

fn pod(containers: Vec<ListedContainer>, ready: bool) -> ListedPod {
    ListedPod {
        uid: "u".into(),
        containers,
        sandboxes: vec![ListedSandbox { id: "s".into(), ready, attempt: 0, created_unix_nanos: 0 }],
    }
}

fn wants(want: Wanted) -> BTreeMap<String, Wanted> {
    BTreeMap::from([("u".to_owned(), want)])
}

#[test]
fn keeps_the_newest_dead_container_of_each_name_while_the_pod_is_wanted() {
    let pod = pod(
        vec![
            container("a1", "a", false, 1),
            container("a2", "a", false, 2),
            container("a3", "a", true, 3),
            container("b1", "b", false, 1),
        ],
        true,
    );
    let plan = planned(&[pod], &wants(Wanted::Keep), true);
    assert_eq!(plan.containers, ["a1"]);
    assert!(plan.sandboxes.is_empty());
}

#[test]
fn removes_all_dead_containers_of_a_forgotten_pod() {
    let pod = pod(vec![container("a1", "a", false, 1)], false);
    let plan = planned(&[pod], &wants(Wanted::Forget), false);
    assert_eq!((plan.containers.len(), plan.sandboxes.len()), (1, 1));
    assert_eq!(plan.forgotten, ["u"]);
}

#[test]
fn never_removes_running_containers_even_of_a_forgotten_pod() {
    let pod = pod(vec![container("a1", "a", true, 1)], true);
    assert!(planned(&[pod], &wants(Wanted::Forget), true).is_empty());
}

#[test]
fn created_container_is_kept_unless_the_pod_is_forgotten() {
    let pending = ListedContainer { pending: true, ..container("a1", "a", false, 1) };
    let pod = pod(vec![pending], false);
    let plan = planned(std::slice::from_ref(&pod), &wants(Wanted::Keep), true);
    assert!(plan.containers.is_empty());
    assert_eq!(planned(&[pod], &wants(Wanted::Forget), true).containers, ["a1"]);
}

#[test]
fn unknown_pod_is_removed_only_after_the_set_is_complete() {
    let pod = pod(vec![container("a1", "a", false, 1)], false);
    assert!(planned(std::slice::from_ref(&pod), &BTreeMap::new(), false).is_empty());
    assert_eq!(planned(&[pod], &BTreeMap::new(), true).forgotten, ["u"]);
}

#[test]
fn older_sandbox_without_containers_is_removed_and_the_newest_kept() {
    let mut pod = pod(vec![], false);
    pod.sandboxes.push(ListedSandbox { id: "s1".into(), ready: false, attempt: 1, created_unix_nanos: 5 });
    let plan = planned(&[pod], &wants(Wanted::Keep), true);
    assert_eq!(plan.sandboxes, ["s"]);
}

#[test]
fn sandbox_with_running_containers_or_ready_is_not_removed() {
    // A running container in a sandbox that is not ready: the pod's pause process has died.
    let orphaned = pod(vec![container("a1", "a", true, 1)], false);
    assert!(planned(&[orphaned], &wants(Wanted::Forget), true).is_empty());
    let ready = pod(vec![], true);
    assert!(planned(&[ready], &wants(Wanted::Forget), true).is_empty());
}

#[test]
fn plan_is_empty_only_without_containers_sandboxes_and_pods() {
    assert!(ContainerGcPlan::default().is_empty());
    let one = || vec!["x".to_owned()];
    for some in [
        ContainerGcPlan { containers: one(), ..ContainerGcPlan::default() },
        ContainerGcPlan { sandboxes: one(), ..ContainerGcPlan::default() },
        ContainerGcPlan { forgotten: one(), ..ContainerGcPlan::default() },
    ] {
        assert!(!some.is_empty(), "{some:?}");
    }
}

/// Five dead containers `a1` to `a5` of the name `a`, created at 1 to 5.
fn five() -> ListedPod {
    pod((1..=5).map(|n| container(&format!("a{n}"), "a", false, n)).collect(), true)
}

fn limited(pods: &[ListedPod], policy: &GcPolicy, now: i64) -> Vec<String> {
    plan_container_gc(pods, &wants(Wanted::Keep), true, policy, now).containers
}

#[test]
fn max_dead_containers_per_container_keeps_at_least_the_newest() {
    let keep = |kept| GcPolicy { max_per_container: kept, ..GcPolicy::default() };
    assert_eq!(limited(&[five()], &keep(Some(3)), 9), ["a2", "a1"]);
    assert_eq!(limited(&[five()], &keep(Some(0)), 9), ["a4", "a3", "a2", "a1"]);
    assert!(limited(&[five()], &keep(None), 9).is_empty());
}

#[test]
fn container_younger_than_the_minimum_age_is_kept() {
    let policy = GcPolicy { minimum_age: 5, ..GcPolicy::default() };
    assert_eq!(limited(&[five()], &policy, 8), ["a3", "a2", "a1"]);
    assert!(limited(&[five()], &policy, 5).is_empty());
    // The minimum age does not protect containers of a pod that is not desired.
    let plan = plan_container_gc(&[five()], &wants(Wanted::Forget), true, &policy, 5);
    assert_eq!(plan.containers.len(), 5);
    let reclaim = GcPolicy { reclaim_space: true, ..policy };
    assert_eq!(limited(&[five()], &reclaim, 5), ["a4", "a3", "a2", "a1"]);
}

#[test]
fn max_dead_containers_removes_by_equal_share_then_by_age_never_the_newest() {
    let mut pod = five();
    for n in 6..=8 {
        pod.containers.push(container(&format!("b{n}"), "b", false, n));
    }
    pod.containers.push(container("c9", "c", true, 9));
    let limited_to =
        |total| GcPolicy { max_per_container: None, max_total: Some(total), ..GcPolicy::default() };
    let pods = [pod];
    assert!(limited(&pods, &limited_to(8), 99).is_empty());
    // The share is 3 of each name: two of `a` exceed it.
    assert_eq!(limited(&pods, &limited_to(6), 99), ["a2", "a1"]);
    // The share is 2; the oldest of the remaining 5 is one of `a`.
    assert_eq!(limited(&pods, &limited_to(5), 99), ["a3", "a2", "a1"]);
    assert_eq!(limited(&pods, &limited_to(3), 99), ["b6", "a4", "a3", "a2", "a1"]);
    assert_eq!(limited(&pods, &limited_to(0), 99), ["b7", "b6", "a4", "a3", "a2", "a1"]);
    let young = GcPolicy { minimum_age: 93, ..limited_to(0) };
    assert_eq!(limited(&pods, &young, 97), ["a4", "a3", "a2", "a1"]);
}

#[test]
fn max_dead_containers_removes_from_the_name_above_its_share_first() {
    let mut pod = pod(vec![container("b1", "b", false, 1), container("b2", "b", false, 2)], true);
    pod.containers.extend((3..=7).map(|n| container(&format!("a{n}"), "a", false, n)));
    let policy = GcPolicy { max_per_container: None, max_total: Some(4), ..GcPolicy::default() };
    assert_eq!(limited(&[pod], &policy, 99), ["a5", "a4", "a3"]);
}

#[test]
fn max_dead_containers_removes_within_the_share_when_others_are_too_young() {
    let mut pod = pod((1..=7).map(|n| container(&format!("a{n}"), "a", false, n)).collect(), true);
    pod.containers.push(container("b8", "b", false, 8));
    // `a4` to `a6` are too young. The share is 2 of each name: `a1` and `a2` exceed it, and one more has to be removed.
    let policy =
        GcPolicy { max_per_container: None, max_total: Some(5), minimum_age: 7, ..GcPolicy::default() };
    assert_eq!(limited(&[pod], &policy, 10), ["a3", "a2", "a1"]);
}

#[test]
fn reclaiming_space_removes_all_dead_containers_of_an_ended_pod() {
    let ended = wants(Wanted::Ended);
    let dead = || {
        let mut dead = five();
        dead.sandboxes[0].ready = false;
        dead
    };
    let usual = plan_container_gc(&[dead()], &ended, true, &GcPolicy::default(), 9);
    assert_eq!(usual.containers, ["a4", "a3", "a2", "a1"]);
    assert!(usual.sandboxes.is_empty());
    let reclaim = GcPolicy { reclaim_space: true, ..GcPolicy::default() };
    let plan = plan_container_gc(&[dead()], &ended, true, &reclaim, 9);
    assert_eq!((plan.containers.len(), plan.sandboxes.as_slice()), (5, ["s".to_owned()].as_slice()));
    assert!(plan.forgotten.is_empty(), "its log folder is kept as long as the pod object exists");
    let kept = plan_container_gc(&[dead()], &wants(Wanted::Keep), true, &reclaim, 9);
    assert_eq!((kept.containers.len(), kept.sandboxes.len()), (4, 0));
}
