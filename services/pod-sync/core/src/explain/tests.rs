use super::*;

fn at(seconds: i64) -> Moment {
    Moment { now_unix_nanos: seconds * SECOND, agent_started_unix_nanos: 0 }
}

fn pull(message: &str) -> Cause {
    Cause::failed("ErrImagePull", message, YOU).retried_at(40 * SECOND)
}

#[test]
fn since_is_kept_while_state_and_kind_stay() {
    let mut steps = PodSteps::default();
    assert!(steps.set(StepName::Image, "web", pull("no such host"), &at(10)));
    assert!(!steps.set(StepName::Image, "web", pull("no such host"), &at(15)), "nothing new");
    assert!(steps.set(StepName::Image, "web", pull("timeout"), &at(20)));
    let (steps, _) = steps.explain(&at(30));
    assert_eq!(steps[0].since_unix_nanos, 10 * SECOND);
    assert_eq!(steps[0].cause.message, "timeout");
}

#[test]
fn since_is_reset_when_kind_or_state_changes() {
    let mut steps = PodSteps::default();
    steps.set(StepName::Image, "web", pull("x"), &at(10));
    steps.set(StepName::Image, "web", Cause::failed("ImagePullBackOff", "x", YOU), &at(20));
    assert_eq!(steps.explain(&at(30)).0[0].since_unix_nanos, 20 * SECOND);
    steps.set(StepName::Image, "web", Cause::working("runtime-shim", "pulling"), &at(25));
    assert_eq!(steps.explain(&at(30)).0[0].since_unix_nanos, 25 * SECOND);
}

#[test]
fn an_error_keeps_its_since_across_retries_until_one_succeeds() {
    let mut steps = PodSteps::default();
    let since = |steps: &PodSteps| steps.explain(&at(99)).0[0].since_unix_nanos / SECOND;
    let working = || Cause::working("runtime-shim", "pulling");
    steps.set(StepName::Image, "web", pull("x"), &at(10));
    for (attempt, failed) in [(20, 21), (30, 31)] {
        steps.set(StepName::Image, "web", working(), &at(attempt));
        assert_eq!(since(&steps), attempt);
        steps.set(StepName::Image, "web", pull("y"), &at(failed));
        assert_eq!(since(&steps), 10);
    }
    steps.set(StepName::Image, "web", working(), &at(40));
    steps.set(StepName::Image, "web", Cause::failed("InvalidImageName", "z", YOU), &at(41));
    assert_eq!(since(&steps), 41);
    steps.set(StepName::Image, "web", Cause::done("runtime-shim"), &at(50));
    steps.set(StepName::Image, "web", Cause::failed("InvalidImageName", "z", YOU), &at(60));
    assert_eq!(since(&steps), 60);
}

#[test]
fn next_attempt_is_set_on_pending_steps_without_a_later_one() {
    let mut steps = PodSteps::default();
    steps.set(StepName::Source, "", Cause::done("pod-config"), &at(1));
    steps.set(StepName::Volumes, "", Cause::failed("FailedMount", "x", YOU), &at(1));
    steps.set(StepName::Image, "later", pull("x"), &at(1));
    steps.set(StepName::Image, "over", pull("x").retried_at(5 * SECOND), &at(1));
    steps.retried_at(20 * SECOND, &at(10));
    let next = |name, subject| steps.get(name, subject).unwrap().next_retry_unix_nanos / SECOND;
    assert_eq!(next(StepName::Source, ""), 0);
    assert_eq!(next(StepName::Volumes, ""), 20);
    assert_eq!(next(StepName::Image, "later"), 40);
    assert_eq!(next(StepName::Image, "over"), 20);
}

#[test]
fn a_cleared_cause_is_no_longer_explained() {
    let mut steps = PodSteps::default();
    steps.set(StepName::Image, "web", pull("x"), &at(10));
    assert!(steps.clear(StepName::Image, "web"));
    assert!(!steps.clear(StepName::Image, "web"));
    let (steps, summary) = steps.explain(&at(30));
    assert!(steps.is_empty());
    assert_eq!(summary, "The pod waits for nothing.");
}

#[test]
fn steps_are_listed_in_the_order_of_a_pods_life() {
    let mut steps = PodSteps::default();
    for name in
        [StepName::Termination, StepName::Container, StepName::Source, StepName::Sandbox, StepName::Image]
    {
        steps.set(name, "", Cause::done("pod-sync"), &at(1));
    }
    let names: Vec<&str> = steps.explain(&at(2)).0.iter().map(|step| step.name.as_str()).collect();
    assert_eq!(names, ["source", "image", "sandbox", "container", "termination"]);
}

#[test]
fn the_summary_names_the_most_urgent_step_its_owner_and_next_attempt() {
    let mut steps = PodSteps::default();
    steps.set(StepName::Source, "", Cause::done("pod-config"), &at(1));
    steps.set(StepName::Volumes, "data", Cause::waiting("not mounted", "claim data is unbound", YOU), &at(5));
    assert_eq!(
        steps.explain(&at(20)).1,
        "Volumes data has been waiting for 15s: claim data is unbound (you have to act)."
    );
    steps.set(StepName::Image, "web", pull("no such host"), &at(10));
    assert_eq!(
        steps.explain(&at(20)).1,
        "Image web has been failing for 10s: no such host (you have to act, next attempt in 20s)."
    );
    steps.set(StepName::Termination, "", Cause::working("pod-sync", "waiting for web to stop"), &at(19));
    assert!(steps.explain(&at(20)).1.starts_with("Termination has been in progress for 1s"));
}

#[test]
fn a_quarantined_worker_is_reported_before_the_termination() {
    let mut steps = PodSteps::default();
    steps.set(StepName::Termination, "", Cause::working("pod-sync", "removed"), &at(1));
    let cause = Cause::failed("Panicked", "the worker panicked", "pod-sync").retried_at(12 * SECOND);
    steps.set(StepName::Worker, "", cause, &at(2));
    assert_eq!(
        steps.explain(&at(5)).1,
        "Worker has been failing for 3s: the worker panicked (pod-sync is to act, next attempt in 7s)."
    );
    steps.clear(StepName::Worker, "");
    assert!(steps.explain(&at(5)).1.starts_with("Termination has been in progress"));
}

#[test]
fn a_pod_with_all_steps_done_waits_for_nothing() {
    let mut steps = PodSteps::default();
    steps.set(StepName::Container, "web", Cause::done("runtime-shim"), &at(1));
    assert_eq!(steps.explain(&at(2)).1, "The pod waits for nothing.");
}

#[test]
fn entries_of_containers_that_no_longer_exist_are_dropped() {
    let mut steps = PodSteps::default();
    steps.set(StepName::Image, "old", pull("x"), &at(1));
    steps.set(StepName::Container, "old", pull("x"), &at(1));
    steps.retain(StepName::Image, |subject| subject == "web");
    assert!(steps.get(StepName::Image, "old").is_none());
    assert!(steps.get(StepName::Container, "old").is_some());
}

#[test]
fn step_names_and_states_have_stable_wire_names() {
    let states = [
        (StepState::Done, "done"),
        (StepState::Working, "working"),
        (StepState::Waiting, "waiting"),
        (StepState::Failed, "failed"),
        (StepState::NotReached, "not reached"),
    ];
    for (state, word) in states {
        assert_eq!(state.as_str(), word);
    }
    let names = [
        (StepName::Source, "source"),
        (StepName::Admission, "admission"),
        (StepName::Volumes, "volumes"),
        (StepName::Cgroup, "cgroup"),
        (StepName::Image, "image"),
        (StepName::Sandbox, "sandbox"),
        (StepName::Container, "container"),
        (StepName::Termination, "termination"),
    ];
    for (name, word) in names {
        assert_eq!((name.as_str(), name.to_string().as_str()), (word, word));
    }
}

#[test]
fn since_is_reset_by_another_kind_but_not_by_another_message() {
    let since = |steps: &PodSteps| steps.explain(&at(0)).0[0].since_unix_nanos;
    let mut steps = PodSteps::default();
    steps.set(StepName::Volumes, "", Cause::waiting("Mounting", "one", YOU), &at(1));
    steps.set(StepName::Volumes, "", Cause::waiting("Mounting", "two", YOU), &at(2));
    assert_eq!(since(&steps), SECOND);
    steps.set(StepName::Volumes, "", Cause::waiting("NoAnswer", "two", YOU), &at(3));
    assert_eq!(since(&steps), 3 * SECOND);
    // An error of another kind is another wait, even with an attempt in between.
    steps.set(StepName::Volumes, "", Cause::failed("FailedMount", "x", YOU), &at(4));
    steps.set(StepName::Volumes, "", Cause::working("x", ""), &at(5));
    steps.set(StepName::Volumes, "", Cause::failed("Other", "x", YOU), &at(6));
    assert_eq!(since(&steps), 6 * SECOND);
}

#[test]
fn an_overdue_attempt_is_reported_as_due_now() {
    let mut steps = PodSteps::default();
    steps.set(StepName::Image, "main", pull("no such host"), &at(10));
    let summary = |second| steps.explain(&at(second)).1;
    assert!(summary(39).contains("next attempt in 1s"), "{}", summary(39));
    assert!(summary(40).contains("next attempt now"), "{}", summary(40));
}
