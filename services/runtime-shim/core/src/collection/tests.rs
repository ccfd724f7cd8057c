use super::*;

/// With the usual limits.
fn planned(pods: &[ListedPod], wanted: &BTreeMap<String, Wanted>, complete: bool) -> Collection {
    plan_collection(pods, wanted, complete, &Limits::default(), i64::MAX)
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
fn removes_everything_dead_of_a_forgotten_pod() {
    let pod = pod(vec![container("a1", "a", false, 1)], false);
    let plan = planned(&[pod], &wants(Wanted::Forget), false);
    assert_eq!((plan.containers.len(), plan.sandboxes.len()), (1, 1));
    assert_eq!(plan.forgotten, ["u"]);
}

#[test]
fn never_removes_what_is_alive_even_of_a_forgotten_pod() {
    let pod = pod(vec![container("a1", "a", true, 1)], true);
    assert!(planned(&[pod], &wants(Wanted::Forget), true).is_empty());
}

#[test]
fn a_container_that_is_about_to_start_stays_unless_the_pod_is_forgotten() {
    let pending = ListedContainer { pending: true, ..container("a1", "a", false, 1) };
    let pod = pod(vec![pending], false);
    let plan = planned(std::slice::from_ref(&pod), &wants(Wanted::Keep), true);
    assert!(plan.containers.is_empty());
    assert_eq!(planned(&[pod], &wants(Wanted::Forget), true).containers, ["a1"]);
}

#[test]
fn an_unknown_pod_is_swept_only_once_the_set_is_complete() {
    let pod = pod(vec![container("a1", "a", false, 1)], false);
    assert!(planned(std::slice::from_ref(&pod), &BTreeMap::new(), false).is_empty());
    assert_eq!(planned(&[pod], &BTreeMap::new(), true).forgotten, ["u"]);
}

#[test]
fn an_older_sandbox_without_containers_goes_while_the_newest_stays() {
    let mut pod = pod(vec![], false);
    pod.sandboxes.push(ListedSandbox { id: "s1".into(), ready: false, attempt: 1, created_unix_nanos: 5 });
    let plan = planned(&[pod], &wants(Wanted::Keep), true);
    assert_eq!(plan.sandboxes, ["s"]);
}

#[test]
fn a_sandbox_goes_after_its_containers_and_not_before() {
    // A live container in a sandbox that is not ready: a pod whose pause process has died.
    let orphaned = pod(vec![container("a1", "a", true, 1)], false);
    assert!(planned(&[orphaned], &wants(Wanted::Forget), true).is_empty());
    let ready = pod(vec![], true);
    assert!(planned(&[ready], &wants(Wanted::Forget), true).is_empty());
}

#[test]
fn nothing_to_do_means_none_of_the_three() {
    assert!(Collection::default().is_empty());
    let one = || vec!["x".to_owned()];
    for some in [
        Collection { containers: one(), ..Collection::default() },
        Collection { sandboxes: one(), ..Collection::default() },
        Collection { forgotten: one(), ..Collection::default() },
    ] {
        assert!(!some.is_empty(), "{some:?}");
    }
}

/// Five dead containers `a1` to `a5` of the name `a`, made at 1 to 5.
fn five() -> ListedPod {
    pod((1..=5).map(|n| container(&format!("a{n}"), "a", false, n)).collect(), true)
}

fn limited(pods: &[ListedPod], limits: &Limits, now: i64) -> Vec<String> {
    plan_collection(pods, &wants(Wanted::Keep), true, limits, now).containers
}

#[test]
fn so_many_dead_containers_of_a_name_are_kept_as_is_configured_and_never_none() {
    let keep = |kept| Limits { per_container: kept, ..Limits::default() };
    assert_eq!(limited(&[five()], &keep(Some(3)), 9), ["a2", "a1"]);
    assert_eq!(limited(&[five()], &keep(Some(0)), 9), ["a4", "a3", "a2", "a1"]);
    assert!(limited(&[five()], &keep(None), 9).is_empty());
}

#[test]
fn a_container_that_is_too_young_stays() {
    let limits = Limits { minimum_age: 5, ..Limits::default() };
    assert_eq!(limited(&[five()], &limits, 8), ["a3", "a2", "a1"]);
    assert!(limited(&[five()], &limits, 5).is_empty());
    // Of a pod that nobody wants nothing is too young.
    let plan = plan_collection(&[five()], &wants(Wanted::Forget), true, &limits, 5);
    assert_eq!(plan.containers.len(), 5);
    let order = Limits { order: true, ..limits };
    assert_eq!(limited(&[five()], &order, 5), ["a4", "a3", "a2", "a1"]);
}

#[test]
fn too_many_in_all_go_by_an_equal_share_first_and_then_by_age_but_never_the_newest_of_a_name() {
    let mut pod = five();
    for n in 6..=8 {
        pod.containers.push(container(&format!("b{n}"), "b", false, n));
    }
    pod.containers.push(container("c9", "c", true, 9));
    let total = |total| Limits { per_container: None, total: Some(total), ..Limits::default() };
    let pods = [pod];
    assert!(limited(&pods, &total(8), 99).is_empty());
    // The share is 3 of each: two of `a` are beyond it.
    assert_eq!(limited(&pods, &total(6), 99), ["a2", "a1"]);
    // The share is 2; of what is left of 5 the oldest is one of `a`.
    assert_eq!(limited(&pods, &total(5), 99), ["a3", "a2", "a1"]);
    assert_eq!(limited(&pods, &total(3), 99), ["b6", "a4", "a3", "a2", "a1"]);
    assert_eq!(limited(&pods, &total(0), 99), ["b7", "b6", "a4", "a3", "a2", "a1"]);
    let young = Limits { minimum_age: 93, ..total(0) };
    assert_eq!(limited(&pods, &young, 97), ["a4", "a3", "a2", "a1"]);
}

#[test]
fn of_two_names_the_one_with_more_than_its_share_goes_first_however_young() {
    let mut pod = pod(vec![container("b1", "b", false, 1), container("b2", "b", false, 2)], true);
    pod.containers.extend((3..=7).map(|n| container(&format!("a{n}"), "a", false, n)));
    let limits = Limits { per_container: None, total: Some(4), ..Limits::default() };
    assert_eq!(limited(&[pod], &limits, 99), ["a5", "a4", "a3"]);
}

#[test]
fn what_is_too_young_is_made_up_for_by_what_is_within_the_share() {
    let mut pod = pod((1..=7).map(|n| container(&format!("a{n}"), "a", false, n)).collect(), true);
    pod.containers.push(container("b8", "b", false, 8));
    // `a4` to `a6` are too young. The share is 2 of each: beyond it are `a1` and `a2`, and one more has to go.
    let limits = Limits { per_container: None, total: Some(5), minimum_age: 7, ..Limits::default() };
    assert_eq!(limited(&[pod], &limits, 10), ["a3", "a2", "a1"]);
}

#[test]
fn an_order_takes_all_that_is_dead_of_a_pod_that_has_ended_and_the_pod_stays_known() {
    let ended = wants(Wanted::Ended);
    let dead = || {
        let mut dead = five();
        dead.sandboxes[0].ready = false;
        dead
    };
    let usual = plan_collection(&[dead()], &ended, true, &Limits::default(), 9);
    assert_eq!(usual.containers, ["a4", "a3", "a2", "a1"]);
    assert!(usual.sandboxes.is_empty());
    let order = Limits { order: true, ..Limits::default() };
    let plan = plan_collection(&[dead()], &ended, true, &order, 9);
    assert_eq!((plan.containers.len(), plan.sandboxes.as_slice()), (5, ["s".to_owned()].as_slice()));
    assert!(plan.forgotten.is_empty(), "its logs folder stays as long as the pod is there");
    let kept = plan_collection(&[dead()], &wants(Wanted::Keep), true, &order, 9);
    assert_eq!((kept.containers.len(), kept.sandboxes.len()), (4, 0));
}
