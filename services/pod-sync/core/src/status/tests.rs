use keelson_kube_model::{ContainerStatus, Pod, PodCondition};
use serde_json::{Value, json};

use super::*;
use crate::testing::{
    ObservationBuilder, at, deleting, empty_observation, from_file, in_sandbox, nanos, pod,
};

fn inputs() -> StatusInputs<'static> {
    StatusInputs { runtime_name: "containerd", ..StatusInputs::default() }
}

fn generate(pod: &Pod, seen: &ObservationBuilder) -> PodStatus {
    generate_status(pod, &seen.0, None, &inputs(), &at(60))
}

fn then(pod: &Pod, seen: &ObservationBuilder, old: &PodStatus) -> PodStatus {
    generate_status(pod, &seen.0, Some(old), &inputs(), &at(120))
}

fn plain(policy: &str, names: &[&str]) -> Pod {
    let containers: Vec<Value> = names.iter().map(|name| json!({"name": name, "image": "app:v1"})).collect();
    pod(json!({"restartPolicy": policy, "containers": containers}))
}

fn with_init() -> Pod {
    pod(json!({"containers": [{"name": "a"}], "initContainers": [
        {"name": "i"}, {"name": "s", "restartPolicy": "Always"}]}))
}

fn only(status: &PodStatus) -> &ContainerStatus {
    &status.container_statuses[0]
}

fn waiting(entry: &ContainerStatus) -> Option<(&str, &str)> {
    entry.state.waiting.as_ref().map(|waiting| (waiting.reason.as_str(), waiting.message.as_str()))
}

fn ended(state: &keelson_kube_model::ContainerState) -> Option<(i32, &str)> {
    state.terminated.as_ref().map(|ended| (ended.exit_code, ended.reason.as_str()))
}

fn condition<'a>(status: &'a PodStatus, type_: &str) -> (&'a str, &'a str, &'a str) {
    let found: &PodCondition = status.condition(type_).unwrap();
    (&found.status, &found.reason, &found.message)
}

mod container_states;

mod phases {
    use super::*;

    fn phase(pod: &Pod, seen: &ObservationBuilder, terminal: bool) -> String {
        let inputs = StatusInputs { pod_is_terminal: terminal, ..inputs() };
        generate_status(pod, &seen.0, None, &inputs, &at(60)).phase
    }

    #[test]
    fn each_row_of_the_phase_table_is_met() {
        let never = || plain("Never", &["a", "b"]);
        let on_failure = || plain("OnFailure", &["a", "b"]);
        let always = || plain("Always", &["a", "b"]);
        let table = [
            ("nothing started", always(), in_sandbox(), false, "Pending"),
            ("one never started", always(), in_sandbox().running("a"), false, "Pending"),
            ("all run", always(), in_sandbox().running("a").running("b"), false, "Running"),
            ("one runs, one ended", never(), in_sandbox().running("a").exited("b", 1), false, "Running"),
            (
                "all ended, will restart",
                always(),
                in_sandbox().exited("a", 0).exited("b", 1),
                false,
                "Running",
            ),
            ("one will restart", on_failure(), in_sandbox().exited("a", 0).exited("b", 1), false, "Running"),
            ("all succeeded", never(), in_sandbox().exited("a", 0).exited("b", 0), false, "Succeeded"),
            (
                "all succeeded on failure",
                on_failure(),
                in_sandbox().exited("a", 0).exited("b", 0),
                false,
                "Succeeded",
            ),
            ("one failed for good", never(), in_sandbox().exited("a", 0).exited("b", 1), false, "Failed"),
            (
                "ended by the node, well",
                always(),
                in_sandbox().exited("a", 0).exited("b", 0),
                true,
                "Succeeded",
            ),
            (
                "ended by the node, badly",
                always(),
                in_sandbox().exited("a", 0).exited("b", 137),
                true,
                "Failed",
            ),
        ];
        for (case, pod, seen, terminal, expected) in table {
            assert_eq!(phase(&pod, &seen, terminal), expected, "{case}");
        }
    }

    #[test]
    fn a_static_pod_is_not_forced_to_a_final_phase() {
        let pod = from_file(plain("Always", &["a"]));
        assert_eq!(phase(&pod, &in_sandbox().exited("a", 0), true), "Running");
    }

    #[test]
    fn init_containers_decide_the_phase_before_regular_ones() {
        let never = pod(json!({"restartPolicy": "Never", "containers": [{"name": "a"}],
            "initContainers": [{"name": "i"}]}));
        let mut again = never.clone();
        again.spec.restart_policy = "OnFailure".into();
        for (case, pod, seen, expected) in [
            ("not begun", &never, in_sandbox(), "Pending"),
            ("runs", &never, in_sandbox().running("i"), "Pending"),
            ("done", &never, in_sandbox().exited("i", 0), "Pending"),
            ("failed for good", &never, in_sandbox().exited("i", 1), "Failed"),
            ("failed, starts again", &again, in_sandbox().exited("i", 1), "Pending"),
            ("done, the rest runs", &never, in_sandbox().exited("i", 0).running("a"), "Running"),
        ] {
            assert_eq!(phase(pod, &seen, false), expected, "{case}");
        }
    }

    #[test]
    fn a_failed_init_container_in_back_off_fails_the_pod_only_under_never() {
        let pod = with_init();
        let start_errors = StartErrors::from([("i".into(), ("ErrImagePull".into(), String::new()))]);
        let inputs = StatusInputs { start_errors, ..inputs() };
        let status = generate_status(&pod, &in_sandbox().exited("i", 1).0, None, &inputs, &at(60));
        assert_eq!(status.phase, "Pending");
    }

    #[test]
    fn the_phase_is_pending_until_sidecars_started_or_regular_ones_exist() {
        let pod = pod(json!({"containers": [{"name": "a"}],
            "initContainers": [{"name": "s", "restartPolicy": "Always"}]}));
        let slow = BTreeMap::from([("s".to_owned(), Readiness { ready: false, started: false })]);
        let inputs = StatusInputs { readiness: slow, ..inputs() };
        let run = |seen: &ObservationBuilder| generate_status(&pod, &seen.0, None, &inputs, &at(60)).phase;
        assert_eq!(run(&in_sandbox().running("s")), "Pending");
        assert_eq!(run(&in_sandbox().running("s").running("a")), "Running");
        assert_eq!(
            run(&in_sandbox().exited("s", 1).running("a")),
            "Running",
            "an ended sidecar does not count"
        );
    }

    #[test]
    fn containers_of_an_earlier_sandbox_do_not_make_the_pod_initialised() {
        let pod = pod(json!({"containers": [{"name": "a"}],
            "initContainers": [{"name": "s", "restartPolicy": "Always"}]}));
        let slow = BTreeMap::from([("s".to_owned(), Readiness { ready: false, started: false })]);
        let inputs = StatusInputs { readiness: slow, ..inputs() };
        let earlier = empty_observation().sandbox(0, false).exited("a", 1).sandbox(1, true).running("s");
        assert_eq!(generate_status(&pod, &earlier.0, None, &inputs, &at(60)).phase, "Pending");
    }

    #[test]
    fn a_final_phase_never_changes_back() {
        let mut pod = plain("Always", &["a"]);
        let mut old = generate(&pod, &in_sandbox().running("a"));
        old.phase = "Failed".into();
        old.reason = "Evicted".into();
        let status = then(&pod, &in_sandbox().running("a"), &old);
        assert_eq!((status.phase.as_str(), status.reason.as_str()), ("Failed", "Evicted"));
        pod.status.phase = "Succeeded".into();
        assert_eq!(generate(&pod, &in_sandbox().running("a")).phase, "Succeeded");
    }

    #[test]
    fn reason_and_message_are_kept_while_the_phase_is_the_same() {
        let pod = plain("Always", &["a"]);
        let mut old = generate(&pod, &in_sandbox());
        (old.reason, old.message) = ("R".into(), "M".into());
        let same = then(&pod, &in_sandbox(), &old);
        assert_eq!((same.reason.as_str(), same.message.as_str()), ("R", "M"));
        assert_eq!(then(&pod, &in_sandbox().running("a"), &old).reason, "");
    }

    #[test]
    fn active_deadline_seconds_fails_the_pod() {
        let mut pod = plain("Always", &["a"]);
        pod.spec.active_deadline_seconds = Some(30);
        let mut old = generate(&pod, &in_sandbox().running("a"));
        old.start_time = status_time(nanos(0));
        assert_eq!(deadline_unix_nanos(&pod, &old), Some(nanos(30)));
        let run =
            |second| generate_status(&pod, &in_sandbox().running("a").0, Some(&old), &inputs(), &at(second));
        assert_eq!(run(29).phase, "Running");
        let over = run(30);
        assert_eq!(
            (over.phase.as_str(), over.reason.as_str(), over.message.as_str()),
            ("Failed", "DeadlineExceeded", DEADLINE_MESSAGE)
        );
        // Its container exits with 0 on SIGTERM.
        let ended = generate_status(&pod, &in_sandbox().exited("a", 0).0, Some(&over), &inputs(), &at(31));
        assert_eq!(
            (ended.phase.as_str(), ended.reason.as_str(), ended.message.as_str()),
            ("Failed", "DeadlineExceeded", DEADLINE_MESSAGE)
        );
    }

    #[test]
    fn an_evicted_pod_stays_failed_regardless_of_exit_codes() {
        let patch = StatusPatch {
            reason: "Evicted".into(),
            message: "low on memory".into(),
            disruption_target: true,
            ..StatusPatch::default()
        };
        let pod = plain("Always", &["a"]);
        let run = |seen: ObservationBuilder, terminal| {
            let inputs = StatusInputs { patch: Some(&patch), pod_is_terminal: terminal, ..inputs() };
            generate_status(&pod, &seen.0, None, &inputs, &at(60))
        };
        let killed = run(in_sandbox().exited("a", 137), true);
        assert_eq!((killed.phase.as_str(), killed.reason.as_str()), ("Failed", "Evicted"));
        assert_eq!(condition(&killed, "DisruptionTarget"), ("True", "TerminationByKubelet", "low on memory"));
        // Its container exits with 0 on SIGTERM.
        let clean = run(in_sandbox().exited("a", 0), true);
        assert_eq!((clean.phase.as_str(), clean.reason.as_str()), ("Failed", "Evicted"));
        assert!(clean.condition("DisruptionTarget").is_some());
        // A restarted service has only the stored status of the completed eviction.
        let stored = then(&pod, &in_sandbox().exited("a", 0), &clean);
        assert_eq!((stored.phase.as_str(), stored.reason.as_str()), ("Failed", "Evicted"));
        let mut over = clean.clone();
        (over.phase, over.reason, over.message) = ("Succeeded".into(), String::new(), String::new());
        let inputs_of = StatusInputs { patch: Some(&patch), pod_is_terminal: true, ..inputs() };
        let late = generate_status(&pod, &in_sandbox().exited("a", 0).0, Some(&over), &inputs_of, &at(61));
        assert_eq!((late.phase.as_str(), late.reason.as_str()), ("Succeeded", ""), "it had succeeded before");
        let later = then(&pod, &in_sandbox().exited("a", 137), &killed);
        assert!(later.condition("DisruptionTarget").is_some(), "carried over");
        let worded = StatusPatch { condition_message: "made room".into(), ..patch.clone() };
        let inputs = StatusInputs { patch: Some(&worded), ..inputs() };
        let status = generate_status(&pod, &in_sandbox().running("a").0, None, &inputs, &at(60));
        assert_eq!(status.message, "low on memory");
        assert_eq!(condition(&status, "DisruptionTarget"), ("True", "TerminationByKubelet", "made room"));
    }
}

mod pod_conditions {
    use super::*;
    use crate::allocation::Allocation;
    use crate::resize::PendingReason;

    #[test]
    fn status_fields_of_other_owners_are_kept() {
        let mut pod = plain("Always", &["a"]);
        pod.status = serde_json::from_value(json!({
            "nominatedNodeName": "n2",
            "resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "gpu-1"}],
            "extendedResourceClaimStatus": {"resourceClaimName": "gpu-2"},
            "nodeAllocatableResourceClaimStatuses": [{"resourceClaimName": "gpu-3"}]
        }))
        .unwrap();
        let status = generate(&pod, &in_sandbox().running("a"));
        assert_eq!(status.nominated_node_name, "n2");
        assert!(status.resource_claim_statuses.is_some());
        assert!(status.extended_resource_claim_status.is_some());
        assert!(status.node_allocatable_resource_claim_statuses.is_some());
    }

    #[test]
    fn a_running_pod_has_all_five_conditions() {
        let status = generate(&plain("Always", &["a"]), &in_sandbox().running("a"));
        for type_ in ["PodScheduled", "PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready"]
        {
            assert_eq!(condition(&status, type_), ("True", "", ""), "{type_}");
            assert_eq!(status.condition(type_).unwrap().observed_generation, Some(3));
        }
        assert_eq!(status.observed_generation, Some(3));
        assert_eq!(status.qos_class, "BestEffort");
    }

    #[test]
    fn without_a_sandbox_ready_to_start_containers_is_false() {
        let status = generate(&plain("Always", &["a"]), &empty_observation());
        assert_eq!(condition(&status, "PodReadyToStartContainers"), ("False", "", ""));
        let early = StatusInputs { pod_ready_to_start: Some(true), ..inputs() };
        let status = generate_status(&plain("Always", &["a"]), &empty_observation().0, None, &early, &at(60));
        assert_eq!(condition(&status, "PodReadyToStartContainers").0, "True");
    }

    #[test]
    fn ready_to_start_containers_is_left_out_without_its_gate() {
        let without = StatusInputs { without_ready_to_start: true, ..inputs() };
        let pod = plain("Always", &["a"]);
        let seen = in_sandbox().running("a");
        let old = generate(&pod, &seen);
        for early in [None, Some(true)] {
            let inputs = StatusInputs { pod_ready_to_start: early, ..without.clone() };
            let status = generate_status(&pod, &seen.0, Some(&old), &inputs, &at(60));
            let types: Vec<&str> = status.conditions.iter().map(|c| c.type_.as_str()).collect();
            assert_eq!(types, ["Initialized", "Ready", "ContainersReady", "PodScheduled"]);
        }
    }

    #[test]
    fn containers_ready_lists_unready_containers() {
        let status = generate(&plain("Always", &["b", "a"]), &in_sandbox());
        let expected = ("False", "ContainersNotReady", "containers with unready status: [b a]");
        assert_eq!(condition(&status, "ContainersReady"), expected);
        assert_eq!(condition(&status, "Ready"), expected);
    }

    #[test]
    fn containers_ready_lists_containers_without_a_status_first() {
        let pod = plain("Always", &["a", "b"]);
        let mut status = generate(&pod, &in_sandbox().running("a"));
        status.container_statuses.retain(|entry| entry.name == "a");
        status.container_statuses[0].ready = false;
        let inputs = ConditionInputs {
            pod: &pod,
            status: &status,
            old: &PodStatus::default(),
            ready_to_start: Some(true),
            resize: None,
            disruption: None,
            restarting: false,
            now: None,
        };
        let list = conditions::generate(&inputs);
        let ready = list.iter().find(|condition| condition.type_ == "Ready").unwrap();
        assert_eq!(ready.message, "containers with unknown status: [b], containers with unready status: [a]");
        let mut empty = status.clone();
        empty.container_statuses.clear();
        let list = conditions::generate(&ConditionInputs { status: &empty, ..inputs });
        assert!(list.iter().any(|c| c.type_ == "Ready" && c.reason == "UnknownContainerStatuses"));
    }

    #[test]
    fn initialized_waits_for_init_containers_and_started_sidecars() {
        let status = generate(&with_init(), &in_sandbox().exited("i", 0));
        assert_eq!(
            condition(&status, "Initialized"),
            ("False", "ContainersNotInitialized", "containers with incomplete status: [s]")
        );
        let status = generate(&with_init(), &in_sandbox().exited("i", 0).running("s"));
        assert_eq!(condition(&status, "Initialized"), ("True", "", ""));
    }

    #[test]
    fn initialized_stays_true_once_a_regular_container_ran() {
        let status = generate(&with_init(), &in_sandbox().exited("s", 1).running("a"));
        assert_eq!(condition(&status, "Initialized").0, "True");
    }

    #[test]
    fn an_unready_sidecar_makes_the_pod_unready() {
        let status = generate(&with_init(), &in_sandbox().exited("i", 0).exited("s", 1).running("a"));
        assert_eq!(condition(&status, "Ready").2, "containers with unready status: [s]");
    }

    #[test]
    fn ready_conditions_have_the_reason_of_a_final_phase() {
        let done = generate(&plain("Never", &["a"]), &in_sandbox().exited("a", 0));
        assert_eq!(condition(&done, "Ready"), ("False", "PodCompleted", ""));
        assert_eq!(condition(&done, "Initialized"), ("True", "PodCompleted", ""));
        let failed = generate(&plain("Never", &["a"]), &in_sandbox().exited("a", 1));
        assert_eq!(condition(&failed, "ContainersReady"), ("False", "PodFailed", ""));
    }

    /// A pod with a container of this list that has the rule.
    fn restarts_all(place: &str) -> Pod {
        let rules =
            json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
        let mut spec = json!({"restartPolicy": "Never", "containers": [{"name": "a"}, {"name": "b"}],
            "initContainers": [{"name": "i"}], "ephemeralContainers": [{"name": "e"}]});
        spec[place][0]["restartPolicyRules"] = rules;
        pod(spec)
    }

    #[test]
    fn all_containers_restarting_has_no_observed_generation() {
        let pod = restarts_all("containers");
        for (seen, reason) in [
            (in_sandbox().exited("i", 0).running("a").running("b"), ""),
            (in_sandbox().exited("i", 0).exited("a", 0).exited("b", 0), "PodCompleted"),
            (in_sandbox().exited("i", 0).exited("a", 0).exited("b", 1), "PodFailed"),
        ] {
            let status = generate(&pod, &seen);
            assert_eq!(condition(&status, "AllContainersRestarting"), ("False", reason, ""));
            let generation = |type_: &str| {
                status.conditions.iter().find(|c| c.type_ == type_).map(|c| c.observed_generation)
            };
            assert_eq!(generation("AllContainersRestarting"), Some(None));
            assert_eq!(generation("Ready"), Some(Some(3)));
        }
        let of_ephemeral = generate(&restarts_all("ephemeralContainers"), &in_sandbox());
        assert!(of_ephemeral.condition("AllContainersRestarting").is_none());
    }

    #[test]
    fn only_restart_all_containers_keeps_initialized_true() {
        let anew = in_sandbox().running("i");
        for (place, was, is) in [
            ("containers", true, "True"),
            ("containers", false, "False"),
            ("ephemeralContainers", true, "False"),
        ] {
            let pod = restarts_all(place);
            let before = if was { in_sandbox().exited("i", 0) } else { in_sandbox().running("i") };
            let old = generate(&pod, &before);
            assert_eq!(condition(&old, "Initialized").0, if was { "True" } else { "False" });
            assert_eq!(condition(&then(&pod, &anew, &old), "Initialized").0, is, "{place} {was}");
        }
    }

    #[test]
    fn a_succeeded_pod_names_containers_without_a_status() {
        let pod = plain("Never", &["a", "b"]);
        let mut status = generate(&pod, &in_sandbox().exited("a", 0).exited("b", 0));
        assert_eq!(status.phase, "Succeeded");
        status.container_statuses.retain(|entry| entry.name == "a");
        let list = conditions::generate(&ConditionInputs {
            pod: &pod,
            status: &status,
            old: &PodStatus::default(),
            ready_to_start: Some(true),
            resize: None,
            disruption: None,
            restarting: false,
            now: None,
        });
        let ready = list.iter().find(|condition| condition.type_ == "ContainersReady").unwrap();
        assert_eq!(ready.reason, "ContainersNotReady");
        assert!(ready.message.contains("containers with unknown status: [b]"), "{}", ready.message);
    }

    #[test]
    fn an_owned_condition_that_ended_is_not_copied_back_from_the_api() {
        let mut pod = plain("Always", &["a"]);
        pod.status.conditions = serde_json::from_value(json!([
            {"type": "PodResizePending", "status": "True"}, {"type": "x/gate", "status": "True"}]))
        .unwrap();
        let status = generate(&pod, &in_sandbox().running("a"));
        assert!(status.condition("PodResizePending").is_none());
        assert!(status.condition("x/gate").is_some());
    }

    #[test]
    fn conditions_of_a_resize_have_their_own_generations_until_the_pod_has_ended() {
        let mut pod = plain("Never", &["a"]);
        pod.metadata.generation = Some(9);
        let mut record = ResizeRecord::default();
        record.accept(&pod, Allocation::default(), 1);
        pod.metadata.generation = Some(10);
        record.deny(&pod, PendingReason::Deferred, "no room", 1);
        pod.metadata.generation = Some(11);
        let refused = StatusInputs { resize: Some(&record), ..inputs() };
        let seen = in_sandbox().running("a").0;
        let status = generate_status(&pod, &seen, None, &refused, &at(60));
        assert_eq!(condition(&status, "PodResizePending"), ("True", "Deferred", "no room"));
        assert_eq!(condition(&status, "PodResizeInProgress"), ("True", "", ""));
        let generation = |type_| status.condition(type_).and_then(|c| c.observed_generation);
        assert_eq!((generation("PodResizePending"), generation("PodResizeInProgress")), (Some(10), Some(9)));
        let ended = generate_status(&pod, &in_sandbox().exited("a", 0).0, None, &refused, &at(60));
        assert!(ended.condition("PodResizePending").is_none());
        assert!(ended.condition("PodResizeInProgress").is_none());
    }

    #[test]
    fn the_transition_time_of_a_resize_condition_changes_with_its_reason() {
        let pod = plain("Always", &["a"]);
        let seen = in_sandbox().running("a").0;
        let mut record = ResizeRecord::default();
        record.accept(&pod, Allocation::default(), 1);
        let first = StatusInputs { resize: Some(&record), ..inputs() };
        let first = generate_status(&pod, &seen, None, &first, &at(60));
        let time = |status: &PodStatus| {
            status.condition("PodResizeInProgress").and_then(|c| c.last_transition_time.clone())
        };
        let again = StatusInputs { resize: Some(&record), ..inputs() };
        let again = generate_status(&pod, &seen, Some(&first), &again, &at(70));
        assert_eq!(time(&again), time(&first));
        record.fail("below usage");
        let failed = StatusInputs { resize: Some(&record), ..inputs() };
        let failed = generate_status(&pod, &seen, Some(&again), &failed, &at(80));
        assert_eq!(condition(&failed, "PodResizeInProgress"), ("True", "Error", "below usage"));
        assert_ne!(time(&failed), time(&again));
    }

    #[test]
    fn readiness_gates_keep_the_pod_unready_with_one_clause_each() {
        let mut pod = plain("Always", &["a"]);
        pod.spec.readiness_gates = serde_json::from_value(json!([
            {"conditionType": "x/none"}, {"conditionType": "x/false"}, {"conditionType": "x/true"}]))
        .unwrap();
        pod.status.conditions = serde_json::from_value(json!([
            {"type": "x/false", "status": "False"}, {"type": "x/true", "status": "True"}]))
        .unwrap();
        let status = generate(&pod, &in_sandbox().running("a"));
        let (state, reason, message) = condition(&status, "Ready");
        assert_eq!((state, reason), ("False", "ReadinessGatesNotReady"));
        assert_eq!(
            message,
            "corresponding condition of pod readiness gate \"x/none\" does not exist., \
             the status of pod readiness gate \"x/false\" is not \"True\", but False"
        );
        assert_eq!(condition(&status, "ContainersReady").0, "True");
        assert_eq!(condition(&status, "x/true").0, "True", "conditions of other owners are preserved");
    }

    #[test]
    fn last_transition_time_changes_only_with_the_status() {
        let pod = plain("Always", &["a"]);
        let first = generate(&pod, &in_sandbox());
        let second = then(&pod, &in_sandbox().running("a"), &first);
        let time =
            |status: &PodStatus, type_: &str| status.condition(type_).unwrap().last_transition_time.clone();
        assert_eq!(time(&second, "PodScheduled"), status_time(nanos(60)));
        assert_eq!(time(&second, "Ready"), status_time(nanos(120)));
    }
}

mod addresses {
    use super::*;

    fn ips(status: &PodStatus) -> Vec<&str> {
        status.pod_ips.iter().map(|entry| entry.ip.as_str()).collect()
    }

    fn texts(list: &[&str]) -> Vec<String> {
        list.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn pod_ips_have_one_address_per_family_the_nodes_primary_first() {
        let seen =
            in_sandbox().edit_sandbox(|sandbox| sandbox.ips = texts(&["fd00::2", "10.1.0.2", "10.1.0.3"]));
        let hosts = texts(&["192.0.2.1"]);
        let inputs = StatusInputs { host_ips: &hosts, ..inputs() };
        let status = generate_status(&plain("Always", &["a"]), &seen.0, None, &inputs, &at(60));
        assert_eq!(ips(&status), ["10.1.0.2", "fd00::2"]);
        assert_eq!((status.pod_ip.as_str(), status.host_ip.as_str()), ("10.1.0.2", "192.0.2.1"));
        let alone = generate(&plain("Always", &["a"]), &seen);
        assert_eq!(ips(&alone), ["fd00::2", "10.1.0.2"]);
        let v4 = StatusInputs { v4_first: Some(true), host_ips: &[], ..inputs };
        let status = generate_status(&plain("Always", &["a"]), &seen.0, None, &v4, &at(60));
        assert_eq!((ips(&status), status.host_ip.as_str()), (vec!["10.1.0.2", "fd00::2"], ""));
        assert_eq!(alone.host_ip, "");
    }

    #[test]
    fn a_host_network_pod_has_the_nodes_addresses_and_keeps_them() {
        let pod = pod(json!({"hostNetwork": true, "containers": [{"name": "a"}]}));
        let seen = in_sandbox().edit_sandbox(|sandbox| sandbox.host_network = true);
        let run = |hosts: &[&str], old: Option<&PodStatus>| {
            let hosts = texts(hosts);
            generate_status(&pod, &seen.0, old, &StatusInputs { host_ips: &hosts, ..inputs() }, &at(60))
        };
        let first = run(&["192.0.2.1"], None);
        assert_eq!(ips(&first), ["192.0.2.1"]);
        assert_eq!(ips(&run(&["192.0.2.9"], Some(&first))), ["192.0.2.1"], "never changed");
        assert_eq!(ips(&run(&["192.0.2.9", "fd00::9"], Some(&first))), ["192.0.2.1", "fd00::9"]);
        assert_eq!(
            ips(&run(&["192.0.2.9", "192.0.2.10"], Some(&first))),
            ["192.0.2.1"],
            "no second of a family"
        );
        let both = run(&["192.0.2.9", "fd00::9"], Some(&first));
        assert_eq!(ips(&run(&["fd00::8"], Some(&both))), ["192.0.2.1", "fd00::9"], "no second of a family");
    }

    #[test]
    fn a_sandbox_without_an_address_does_not_inherit_the_last_one() {
        let pod = plain("Always", &["a"]);
        let old = generate(&pod, &in_sandbox().running("a"));
        let bare = in_sandbox().edit_sandbox(|sandbox| sandbox.ips.clear());
        assert!(ips(&then(&pod, &bare, &old)).is_empty());
    }

    #[test]
    fn an_ended_pod_keeps_its_addresses() {
        let pod = plain("Never", &["a"]);
        let old = generate(&pod, &in_sandbox().running("a"));
        let status = then(&pod, &empty_observation().sandbox(0, false).exited("a", 0), &old);
        assert_eq!(ips(&status), ["10.1.0.2"]);
    }
}

mod endings {
    use super::*;

    #[test]
    fn a_rejected_pod_has_failed_with_the_reason() {
        let status = rejected_status(&plain("Always", &["a"]), "OutOfcpu", "Node didn't have enough", &at(0));
        assert_eq!((status.phase.as_str(), status.reason.as_str()), ("Failed", "OutOfcpu"));
        assert_eq!(status.message, "Pod was rejected: Node didn't have enough");
        assert!(status.container_statuses.is_empty() && status.start_time.is_some());
        assert_eq!((status.qos_class.as_str(), status.observed_generation), ("BestEffort", Some(3)));
    }

    #[test]
    fn the_final_status_declares_containers_without_an_exit_lost() {
        let pod = plain("Always", &["a", "b"]);
        let last = final_status(&pod, &generate(&pod, &in_sandbox().running("a").exited("b", 0)), &at(60));
        assert_eq!(last.phase, "Failed");
        assert_eq!(ended(&last.container_statuses[0].state), Some((137, STATUS_UNKNOWN_REASON)));
        assert_eq!(ended(&last.container_statuses[1].state), Some((0, "Completed")));
        assert_eq!(condition(&last, "Ready"), ("False", "PodFailed", ""));
    }

    #[test]
    fn in_a_never_initialised_pod_only_the_first_init_container_is_lost() {
        let pod =
            pod(json!({"containers": [{"name": "a"}], "initContainers": [{"name": "i"}, {"name": "j"}]}));
        let last = final_status(&pod, &generate(&pod, &in_sandbox()), &at(60));
        assert_eq!(ended(&last.init_container_statuses[0].state), Some((137, STATUS_UNKNOWN_REASON)));
        assert!(last.init_container_statuses[1].state.waiting.is_some());
        assert!(last.container_statuses[0].state.waiting.is_some());
        let second = final_status(&pod, &generate(&pod, &in_sandbox().exited("i", 0).running("j")), &at(60));
        assert_eq!(ended(&second.init_container_statuses[0].state), Some((0, "Completed")));
        assert_eq!(ended(&second.init_container_statuses[1].state), Some((137, STATUS_UNKNOWN_REASON)));
    }

    #[test]
    fn the_final_status_keeps_the_phase_of_a_static_pod() {
        let pod = from_file(plain("Always", &["a"]));
        let last = final_status(&pod, &generate(&pod, &in_sandbox().running("a")), &at(60));
        assert_eq!(last.phase, "Running");
    }
}
