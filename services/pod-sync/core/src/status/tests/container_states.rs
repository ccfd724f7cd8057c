use super::*;
use crate::observation::UserObservation;

#[test]
fn a_container_without_a_record_is_waiting() {
    assert_eq!(
        waiting(only(&generate(&plain("Always", &["a"]), &empty_observation()))),
        Some(("ContainerCreating", ""))
    );
    assert_eq!(waiting(only(&generate(&with_init(), &empty_observation()))), Some(("PodInitializing", "")));
    assert_eq!(only(&generate(&plain("Always", &["a"]), &empty_observation())).image, "app:v1");
}

#[test]
fn a_running_record_shows_start_image_and_id() {
    let status = generate(&plain("Always", &["a"]), &in_sandbox().running("a"));
    let entry = only(&status);
    let started_at = entry.state.running.as_ref().and_then(|running| running.started_at.as_deref());
    assert_eq!(started_at, Some("2023-11-14T22:13:20Z"));
    assert_eq!(entry.container_id, "containerd://a-0");
    assert_eq!((entry.image.as_str(), entry.image_id.as_str()), ("registry/app:v1", "sha256:abc"));
    assert!(entry.ready && entry.started == Some(true) && entry.restart_count == 0);
}

#[test]
fn a_created_record_waits_without_a_reason() {
    let status = generate(&plain("Always", &["a"]), &in_sandbox().created("a"));
    assert_eq!(waiting(only(&status)), Some(("", "")));
}

#[test]
fn an_exited_record_shows_the_runtimes_reason_and_message() {
    let seen = in_sandbox().exited("a", 3).edit(|record| {
        record.message = "boom".into();
        record.termination_message = "last words".into();
    });
    let status = generate(&plain("Never", &["a"]), &seen);
    let got = only(&status).state.terminated.clone().unwrap();
    assert_eq!((got.exit_code, got.reason.as_str()), (3, "Error"));
    assert_eq!(got.message, "boom: last words");
    assert_eq!(got.container_id, "containerd://a-0");
    assert_eq!(got.started_at.as_deref(), Some("2023-11-14T22:13:20Z"));
    assert_eq!(got.finished_at.as_deref(), Some("2023-11-14T22:13:21Z"));
}

#[test]
fn container_users_are_those_that_the_runtime_reports() {
    let pod = pod(json!({"containers": [{"name": "a"}, {"name": "b"}, {"name": "c"}],
        "initContainers": [{"name": "i"}], "ephemeralContainers": [{"name": "e"}]}));
    let as_user = |seen: ObservationBuilder, uid: i64, groups: &[i64]| {
        let user = UserObservation { uid, gid: uid * 2, supplemental_groups: groups.to_vec() };
        seen.edit(|record| record.user = Some(Box::new(user)))
    };
    let seen = as_user(in_sandbox().exited("i", 0), 7, &[]);
    let seen = as_user(seen.exited("a", 1), 8, &[]);
    let seen = as_user(seen.running("a"), 0, &[]).running("b");
    let seen = as_user(seen.running("e"), 1000, &[2000, 3000]);
    let status = generate(&pod, &seen);
    let users = |list: &[ContainerStatus]| {
        let user = |entry: &ContainerStatus| serde_json::to_value(&entry.user).unwrap();
        list.iter().map(user).collect::<Vec<_>>()
    };
    assert_eq!(users(&status.init_container_statuses), [json!({"linux": {"uid": 7, "gid": 14}})]);
    // The newest record, a record without a reported user, and a container without a record.
    let regular = [json!({"linux": {"uid": 0, "gid": 0}}), Value::Null, Value::Null];
    assert_eq!(users(&status.container_statuses), regular);
    let groups = json!({"linux": {"uid": 1000, "gid": 2000, "supplementalGroups": [2000, 3000]}});
    assert_eq!(users(&status.ephemeral_container_statuses), [groups]);
}

#[test]
fn the_second_newest_record_is_the_last_state() {
    let status = generate(&plain("Always", &["a"]), &in_sandbox().exited("a", 1).exited("a", 2).running("a"));
    assert_eq!(only(&status).restart_count, 2);
    assert_eq!(ended(&only(&status).last_state), Some((2, "Error")));
}

#[test]
fn an_unknown_record_of_a_running_container_is_lost() {
    let pod = plain("Always", &["a"]);
    let old = generate(&pod, &in_sandbox().running("a"));
    let status = then(&pod, &in_sandbox().unknown("a"), &old);
    assert_eq!(ended(&only(&status).state), Some((137, STATUS_UNKNOWN_REASON)));
    let message = &only(&status).state.terminated.as_ref().unwrap().message;
    assert_eq!(message, "The container was running before, and the runtime reports its state as unknown");
    assert_eq!(only(&status).restart_count, 1);
    assert_eq!(waiting(only(&generate(&pod, &in_sandbox().unknown("a")))), Some(("", "")));
}

#[test]
fn a_missing_record_of_a_running_container_is_lost_in_the_last_state() {
    let pod = plain("Always", &["a"]);
    let old = generate(&pod, &in_sandbox().running("a"));
    let status = then(&pod, &in_sandbox(), &old);
    assert_eq!(ended(&only(&status).last_state), Some((137, STATUS_UNKNOWN_REASON)));
    assert_eq!((waiting(only(&status)), only(&status).restart_count), (Some(("ContainerCreating", "")), 1));
    let deleted = deleting(pod);
    assert_eq!(only(&then(&deleted, &in_sandbox(), &old)).restart_count, 0);
}

#[test]
fn a_terminated_status_is_kept_when_its_record_is_removed() {
    let pod = plain("Never", &["a"]);
    let old = generate(&pod, &in_sandbox().exited("a", 3));
    assert_eq!(then(&pod, &in_sandbox(), &old).container_statuses, old.container_statuses);
}

#[test]
fn restart_count_and_last_state_are_kept_while_waiting() {
    let pod = plain("Always", &["a"]);
    let mut old = generate(&pod, &in_sandbox());
    old.container_statuses[0].restart_count = 4;
    old.container_statuses[0].last_state.terminated = Some(Default::default());
    let status = then(&pod, &in_sandbox(), &old);
    assert_eq!(only(&status).restart_count, 4);
    assert!(only(&status).last_state.terminated.is_some());
}

#[test]
fn a_failed_start_shows_its_reason_and_moves_the_exit_to_the_last_state() {
    let pod = plain("Always", &["a"]);
    let start_errors = StartErrors::from([("a".into(), ("ErrImagePull".into(), "no such host".into()))]);
    let inputs = StatusInputs { start_errors, ..inputs() };
    let fresh = generate_status(&pod, &in_sandbox().0, None, &inputs, &at(60));
    assert_eq!(waiting(only(&fresh)), Some(("ErrImagePull", "no such host")));
    let again = generate_status(&pod, &in_sandbox().exited("a", 1).0, None, &inputs, &at(60));
    assert_eq!(waiting(only(&again)), Some(("ErrImagePull", "no such host")));
    assert_eq!(ended(&only(&again).last_state), Some((1, "Error")));
    let done =
        generate_status(&plain("Never", &["a"]), &in_sandbox().exited("a", 1).0, None, &inputs, &at(60));
    assert_eq!(ended(&only(&done).state), Some((1, "Error")), "it does not restart");
}

#[test]
fn back_off_is_shown_as_crash_loop_back_off() {
    let pod = plain("Always", &["a"]);
    let wait = |reason| {
        [ContainerWait {
            name: "a".into(),
            reason,
            message: "back-off 10s".into(),
            event_message: String::new(),
            until_unix_nanos: 0,
        }]
    };
    let seen = in_sandbox().exited("a", 1);
    let run = |waits: &[ContainerWait]| {
        generate_status(&pod, &seen.0, None, &StatusInputs { waiting: waits, ..inputs() }, &at(60))
    };
    let status = run(&wait(Reason::CrashLoopBackOff));
    assert_eq!(waiting(only(&status)), Some(("CrashLoopBackOff", "back-off 10s")));
    assert_eq!(status.phase, "Running");
    let other = run(&wait(Reason::WaitingForInitContainer));
    assert_eq!(waiting(only(&other)), None);
}

#[test]
fn a_completed_init_container_is_never_shown_as_waiting() {
    let start_errors = StartErrors::from([("i".into(), ("X".into(), String::new()))]);
    let inputs = StatusInputs { start_errors, ..inputs() };
    let status = generate_status(&with_init(), &in_sandbox().exited("i", 0).0, None, &inputs, &at(60));
    assert_eq!(ended(&status.init_container_statuses[0].state), Some((0, "Completed")));
    assert!(status.init_container_statuses[0].ready);
}

#[test]
fn an_init_container_that_failed_to_start_shows_the_reason() {
    let start_errors = StartErrors::from([("i".into(), ("ErrImagePull".into(), "no such host".into()))]);
    let inputs = StatusInputs { start_errors, ..inputs() };
    for seen in [in_sandbox(), in_sandbox().created("i"), in_sandbox().exited("i", 1)] {
        let status = generate_status(&with_init(), &seen.0, None, &inputs, &at(60));
        assert_eq!(waiting(&status.init_container_statuses[0]), Some(("ErrImagePull", "no such host")));
    }
}

#[test]
fn the_final_status_declares_started_containers_without_an_exit_lost() {
    let entry = |state: serde_json::Value, ready: bool| json!({"name": "x", "image": "", "imageID": "", "restartCount": 0, "ready": ready, "state": state});
    let (waits, runs) = (json!({"waiting": {"reason": "X"}}), json!({"running": {}}));
    for (inits, regular, initialised, lost) in [
        // A regular container ran, although its init container was never ready.
        (
            vec![entry(waits.clone(), false)],
            vec![entry(runs, false), entry(waits.clone(), false)],
            false,
            true,
        ),
        (vec![entry(waits.clone(), true)], vec![entry(waits.clone(), false)], false, true),
        (vec![entry(waits.clone(), false)], vec![entry(waits.clone(), false)], true, true),
        (vec![entry(waits.clone(), false)], vec![entry(waits, false)], false, false),
    ] {
        let conditions =
            json!([{"type": "Initialized", "status": if initialised { "True" } else { "False" }}]);
        let mut status: PodStatus = serde_json::from_value(
            json!({"initContainerStatuses": inits, "containerStatuses": regular, "conditions": conditions}),
        )
        .unwrap();
        finalise_containers(&mut status);
        let all_lost =
            |list: &[ContainerStatus]| list.iter().map(|one| ended(&one.state).is_some()).collect::<Vec<_>>();
        assert_eq!(all_lost(&status.init_container_statuses), [true], "the first at least");
        assert!(all_lost(&status.container_statuses).iter().all(|one| *one == lost), "{status:?}");
    }
}

#[test]
fn an_init_container_without_a_record_completed_if_a_regular_one_exists() {
    let status = generate(&with_init(), &in_sandbox().running("a"));
    let got = status.init_container_statuses[0].state.terminated.clone().unwrap();
    assert_eq!((got.exit_code, got.reason.as_str()), (0, "Completed"));
    assert!(got.message.starts_with("Unable to get init container status from container runtime"));
    assert_eq!(
        waiting(&status.init_container_statuses[1]),
        Some(("PodInitializing", "")),
        "not for sidecars"
    );
}

#[test]
fn container_statuses_are_sorted_by_name_and_init_ones_as_in_the_spec() {
    let names = |list: &[ContainerStatus]| list.iter().map(|c| c.name.clone()).collect::<Vec<_>>();
    assert_eq!(
        names(&generate(&plain("Always", &["b", "a"]), &empty_observation()).container_statuses),
        ["a", "b"]
    );
    let pod = pod(json!({"containers": [{"name": "a"}], "initContainers": [{"name": "z"}, {"name": "y"}]}));
    assert_eq!(names(&generate(&pod, &empty_observation()).init_container_statuses), ["z", "y"]);
}

fn pod_of(resources: serde_json::Value) -> Pod {
    pod(json!({"containers": [{"name": "a", "resources": resources}]}))
}

#[test]
fn volume_mounts_and_resources_are_in_the_container_status() {
    let pod =
        pod(json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}, "volumeMounts": [
        {"name": "v", "mountPath": "/v", "readOnly": true, "recursiveReadOnly": "IfPossible"},
        {"name": "w", "mountPath": "/w"},
        {"name": "x", "mountPath": "/x", "readOnly": true, "recursiveReadOnly": "Enabled"}]}]}));
    let mounts = |recursive_read_only| {
        let inputs = StatusInputs { recursive_read_only, ..inputs() };
        let status = generate_status(&pod, &empty_observation().0, None, &inputs, &at(60));
        only(&status).volume_mounts.iter().map(|m| m.recursive_read_only.clone()).collect::<Vec<_>>()
    };
    let text = |word: &str| Some(word.to_owned());
    assert_eq!(mounts(true), [text("Enabled"), None, text("Enabled")]);
    assert_eq!(mounts(false), [text("Disabled"), None, text("Enabled")]);
    let status = generate(&pod, &empty_observation());
    assert_eq!(only(&status).allocated_resources, pod.spec.containers[0].resources.requests);
    assert!(only(&status).resources.is_some());
    assert_eq!(only(&generate(&plain("Always", &["a"]), &empty_observation())).resources, None);
    let limited = pod_of(json!({"limits": {"cpu": "1"}}));
    assert!(only(&generate(&limited, &empty_observation())).resources.is_some());
}

#[test]
fn readiness_follows_probes_and_is_false_for_stopped_containers() {
    let pod = plain("Always", &["a"]);
    let run = |seen: &ObservationBuilder, readiness| {
        let inputs = StatusInputs { readiness: BTreeMap::from([("a".to_owned(), readiness)]), ..inputs() };
        let status = generate_status(&pod, &seen.0, None, &inputs, &at(60));
        (only(&status).ready, only(&status).started)
    };
    let (running, exited) = (in_sandbox().running("a"), in_sandbox().exited("a", 0));
    assert_eq!(run(&running, Readiness { ready: false, started: true }), (false, Some(true)));
    assert_eq!(run(&running, Readiness { ready: true, started: false }), (false, Some(false)));
    assert_eq!(run(&exited, Readiness::default()), (false, Some(false)));
}

#[test]
fn a_container_removed_by_restart_all_waits_with_one_more_restart() {
    let rule = json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    let pod =
        pod(json!({"restartPolicy": "Never", "initContainers": [{"name": "i", "restartPolicy": "Never"}],
        "containers": [{"name": "a", "restartPolicy": "Never", "restartPolicyRules": rule}, {"name": "b"}]}));
    let runs = generate(&pod, &in_sandbox().exited("i", 0).running("a").running("b"));
    assert_eq!(condition(&runs, "AllContainersRestarting"), ("False", "", ""));
    // The triggering container is removed last.
    let half = then(&pod, &in_sandbox().exited("a", 42), &runs);
    assert_eq!(condition(&half, "AllContainersRestarting"), ("True", "RestartAllContainersStarted", ""));
    assert_eq!(ended(&only(&half).state), Some((42, "Error")));
    for entry in [&half.container_statuses[1], &half.init_container_statuses[0]] {
        assert_eq!(waiting(entry), Some(("RestartingAllContainers", "")), "{}", entry.name);
        assert_eq!(ended(&entry.last_state), Some((137, "RestartingAllContainers")));
        assert_eq!(entry.restart_count, 1);
    }
    let none = then(&pod, &in_sandbox(), &half);
    assert_eq!(condition(&none, "AllContainersRestarting").0, "False");
    assert_eq!(waiting(only(&none)), Some(("RestartingAllContainers", "")));
    assert_eq!(none.container_statuses[1].restart_count, 1, "once");
    // Neither the init container nor the others count as failed for good, and the pod stays initialised.
    assert_eq!((half.phase.as_str(), none.phase.as_str()), ("Running", "Running"));
    assert_eq!(condition(&none, "Initialized").0, "True");
    let again = then(&pod, &in_sandbox().running("i"), &none);
    assert_eq!(again.init_container_statuses[0].restart_count, 1, "never less than before");
}

#[test]
fn a_container_that_never_started_terminated_at_the_epoch() {
    let pod = plain("Never", &["a"]);
    let mut seen = in_sandbox().exited("a", 128);
    for record in &mut seen.0.containers {
        (record.started_unix_nanos, record.reason) = (0, "StartError".into());
    }
    let status = generate(&pod, &seen);
    let ended = status.container_statuses[0].state.terminated.clone().unwrap();
    assert_eq!(ended.started_at.as_deref(), Some("1970-01-01T00:00:00Z"));
    assert!(ended.finished_at.is_some_and(|at| at.starts_with("2023")));
}
