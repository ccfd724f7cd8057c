use keelson_kube_model::Pod;
use serde_json::{Value, json};

use super::*;
use crate::testing::{Seen, at, deleting, in_sandbox, nanos, pod, seen};

fn decide(pod: &Pod, seen: &Seen) -> PodActions {
    compute_pod_actions(pod, &seen.0, &ProbeHints::default(), &BackoffBook::default(), &at(60))
}

fn started(actions: &PodActions) -> Vec<&str> {
    actions.start.iter().map(|start| start.name.as_str()).collect()
}

fn killed(actions: &PodActions) -> Vec<(&str, Reason, &str)> {
    actions.kill.iter().map(|kill| (kill.id.as_str(), kill.reason, kill.message.as_str())).collect()
}

fn plain(policy: &str, names: &[&str]) -> Pod {
    let containers: Vec<Value> = names.iter().map(|name| json!({"name": name, "image": "app:v1"})).collect();
    pod(json!({"restartPolicy": policy, "containers": containers}))
}

#[test]
fn whatever_there_is_to_do_is_not_nothing() {
    use restart_all::ResetContainer;
    let first = decide(&plain("Always", &["a"]), &in_sandbox());
    let nothing = PodActions::default();
    assert!(nothing.is_empty());
    let reset = ResetContainer { id: "a-0".into(), name: "a".into(), kill: false, last: false };
    let kill = decide(&plain("Always", &["a"]), &in_sandbox().unknown("a")).kill;
    assert_eq!((first.start.len(), kill.len()), (1, 1));
    let plan = decide(&plain("Always", &["a"]), &seen()).create_sandbox;
    assert!(plan.is_some());
    for one in [
        PodActions { kill_pod: Some(Reason::PodRemoved), ..nothing.clone() },
        PodActions { create_sandbox: plan, ..nothing.clone() },
        PodActions { kill, ..nothing.clone() },
        PodActions { start: first.start, ..nothing.clone() },
        PodActions { reset: vec![reset], ..nothing.clone() },
    ] {
        assert!(!one.is_empty(), "{one:?}");
    }
    // Waiting is no change.
    assert!(PodActions { terminal: true, ..nothing }.is_empty());
}

fn hints(kind: &str, id: &str, result: ProbeResult) -> ProbeHints {
    let mut hints = ProbeHints::default();
    let map = if kind == "liveness" { &mut hints.liveness } else { &mut hints.startup };
    map.insert(ContainerId::from(id), result);
    hints
}

mod sandbox_rows {
    use super::*;

    fn plan(pod: &Pod, seen: &Seen) -> Option<(u32, Option<String>, Reason)> {
        decide(pod, seen).create_sandbox.map(|p| (p.attempt, p.replaces.map(|id| id.0), p.reason))
    }

    #[test]
    fn without_a_sandbox_the_first_one_is_made_and_nothing_is_killed() {
        let actions = decide(&plain("Always", &["a", "b"]), &seen());
        assert_eq!(actions.create_sandbox.as_ref().map(|p| (p.attempt, &p.replaces)), Some((0, &None)));
        assert_eq!(actions.kill_pod, None);
        assert_eq!(started(&actions), ["a", "b"]);
        assert!(actions.start.iter().all(|s| s.attempt == 0 && s.attempt_from_logs));
    }

    #[test]
    fn of_several_ready_sandboxes_none_is_kept() {
        let seen = in_sandbox().sandbox(1, true).running("a");
        let pod = plain("Always", &["a"]);
        assert_eq!(plan(&pod, &seen), Some((2, Some("sandbox-1".into()), Reason::SeveralSandboxesReady)));
        assert_eq!(decide(&pod, &seen).kill_pod, Some(Reason::SeveralSandboxesReady));
    }

    #[test]
    fn a_sandbox_that_is_not_ready_is_replaced_by_the_next_attempt() {
        let seen = seen().sandbox(4, false);
        assert_eq!(
            plan(&plain("Always", &["a"]), &seen),
            Some((5, Some("sandbox-4".into()), Reason::SandboxNotReady))
        );
    }

    #[test]
    fn an_older_ready_sandbox_does_not_save_a_newest_one_that_is_not() {
        let seen = in_sandbox().sandbox(1, false);
        assert_eq!(
            plan(&plain("Always", &["a"]), &seen),
            Some((2, Some("sandbox-1".into()), Reason::SandboxNotReady))
        );
    }

    #[test]
    fn another_network_mode_makes_a_new_sandbox_without_naming_the_old_one() {
        let seen = in_sandbox().edit_sandbox(|sandbox| sandbox.host_network = true);
        assert_eq!(plan(&plain("Always", &["a"]), &seen), Some((1, None, Reason::SandboxNetworkModeChanged)));
        let host = pod(json!({"hostNetwork": true, "containers": [{"name": "a"}]}));
        assert_eq!(plan(&host, &in_sandbox()), Some((1, None, Reason::SandboxNetworkModeChanged)));
    }

    #[test]
    fn a_pod_network_without_an_address_is_replaced() {
        let seen = in_sandbox().edit_sandbox(|sandbox| sandbox.ips.clear());
        assert_eq!(
            plan(&plain("Always", &["a"]), &seen),
            Some((1, Some("sandbox-0".into()), Reason::SandboxWithoutAddress))
        );
    }

    #[test]
    fn a_node_network_needs_no_address() {
        let host = pod(json!({"hostNetwork": true, "containers": [{"name": "a"}]}));
        let seen = in_sandbox().edit_sandbox(|sandbox| {
            sandbox.host_network = true;
            sandbox.ips.clear();
        });
        assert_eq!(plan(&host, &seen), None);
    }

    #[test]
    fn a_good_sandbox_is_kept() {
        assert_eq!(plan(&plain("Always", &["a"]), &in_sandbox()), None);
        assert_eq!(sandbox_decision(&plain("Always", &["a"]), &in_sandbox().0), SandboxDecision::Keep);
    }
}

mod sandbox_needed {
    use super::*;

    #[test]
    fn starts_nothing_when_the_sandbox_is_lost_and_policy_is_never() {
        let actions = decide(&plain("Never", &["a"]), &seen().sandbox(0, false).exited("a", 137));
        assert_eq!(actions.kill_pod, Some(Reason::RestartNotAllowed));
        assert!(actions.create_sandbox.is_none() && actions.start.is_empty() && actions.terminal);
    }

    #[test]
    fn policy_never_gets_a_second_sandbox_when_no_container_was_made_in_the_first() {
        let actions = decide(&plain("Never", &["a"]), &seen().sandbox(0, false));
        assert_eq!(actions.create_sandbox.as_ref().map(|plan| plan.attempt), Some(1));
        assert_eq!(started(&actions), ["a"]);
    }

    #[test]
    fn what_succeeded_under_on_failure_is_not_started_in_the_new_sandbox() {
        let seen = seen().sandbox(0, false).exited("a", 0).exited("b", 1);
        let actions = decide(&plain("OnFailure", &["a", "b"]), &seen);
        assert_eq!(started(&actions), ["b"]);
        assert_eq!(actions.start[0].attempt, 1);
    }

    #[test]
    fn the_containers_own_policy_goes_before_the_pods() {
        let pod = pod(json!({"restartPolicy": "Always", "containers": [
            {"name": "a", "restartPolicy": "OnFailure"}, {"name": "b"}]}));
        let actions = decide(&pod, &seen().sandbox(0, false).exited("a", 0).exited("b", 0));
        assert_eq!(started(&actions), ["b"]);
    }

    #[test]
    fn what_may_never_start_again_does_not_start_in_a_new_sandbox() {
        let pod = pod(json!({"restartPolicy": "Always", "containers": [
            {"name": "a", "restartPolicy": "Never"}, {"name": "b"}]}));
        let actions = decide(&pod, &seen().sandbox(0, false).exited("a", 137).exited("b", 137));
        assert_eq!(started(&actions), ["b"]);
    }

    #[test]
    fn only_kills_when_every_container_succeeded_under_on_failure() {
        let actions = decide(&plain("OnFailure", &["a"]), &seen().sandbox(0, false).exited("a", 0));
        assert_eq!(actions.kill_pod, Some(Reason::PodCompleted));
        assert!(actions.create_sandbox.is_none() && actions.terminal);
    }

    #[test]
    fn begins_with_the_first_init_container() {
        let pod =
            pod(json!({"initContainers": [{"name": "i0"}, {"name": "i1"}], "containers": [{"name": "a"}]}));
        let actions = decide(&pod, &seen().sandbox(0, false).exited("i0", 0).exited("i1", 0).exited("a", 1));
        assert_eq!(started(&actions), ["i0"]);
        assert_eq!(actions.start[0].kind, ContainerKind::Init);
    }

    #[test]
    fn a_pod_that_is_being_deleted_gets_no_sandbox() {
        let actions = decide(&deleting(plain("Always", &["a"])), &seen());
        assert!(actions.terminal && actions.create_sandbox.is_none() && actions.kill_pod.is_none());
    }
}

mod regular_containers {
    use super::*;

    #[test]
    fn what_runs_is_kept() {
        let actions = decide(&plain("Always", &["a"]), &in_sandbox().running("a"));
        assert_eq!(actions, PodActions::default());
    }

    #[test]
    fn an_adopted_container_of_the_same_image_is_kept() {
        let pod = plain("Always", &["a"]);
        let hash = crate::container_hash(&pod.spec.containers[0]);
        assert!(decide(&pod, &in_sandbox().running("a").edit(|record| record.hash = hash)).is_empty());
    }

    #[test]
    fn missing_containers_start_in_spec_order() {
        assert_eq!(started(&decide(&plain("Never", &["b", "a"]), &in_sandbox())), ["b", "a"]);
    }

    #[test]
    fn what_exited_starts_again_as_its_policy_says() {
        for (policy, code, again) in [
            ("Always", 0, true),
            ("Always", 1, true),
            ("OnFailure", 0, false),
            ("OnFailure", 1, true),
            ("Never", 0, false),
            ("Never", 1, false),
        ] {
            let actions = decide(&plain(policy, &["a", "b"]), &in_sandbox().exited("a", code).running("b"));
            assert_eq!(started(&actions), if again { vec!["a"] } else { vec![] }, "{policy} {code}");
            assert!(!actions.terminal);
        }
    }

    #[test]
    fn a_restart_counts_one_up_from_the_newest_record() {
        let actions = decide(&plain("Always", &["a"]), &in_sandbox().exited("a", 1).exited("a", 1));
        assert_eq!((actions.start[0].attempt, actions.start[0].attempt_from_logs), (2, false));
        assert_eq!(actions.start[0].reason, Reason::ContainerExited);
    }

    #[test]
    fn a_container_in_unknown_state_is_killed_first() {
        let actions = decide(&plain("Always", &["a"]), &in_sandbox().unknown("a"));
        assert_eq!(killed(&actions)[0].1, Reason::ContainerStateUnknown);
        assert_eq!(started(&actions), ["a"]);
    }

    #[test]
    fn a_changed_image_restarts_whatever_the_policy_says() {
        let actions = decide(
            &plain("Never", &["a"]),
            &in_sandbox().running("a").edit(|record| record.hash = "1".into()),
        );
        assert_eq!(
            killed(&actions),
            [(
                "a-0",
                Reason::ContainerDefinitionChanged,
                "Container a definition changed, will be restarted"
            )]
        );
        assert_eq!(started(&actions), ["a"]);
    }

    #[test]
    fn a_failed_probe_restarts_unless_the_policy_is_never() {
        let cases = [("liveness", Reason::LivenessProbeFailed), ("startup", Reason::StartupProbeFailed)];
        for (kind, reason) in cases {
            let hints = hints(kind, "a-0", ProbeResult::Failure);
            let run = |policy| {
                let seen = in_sandbox().running("a").running("b");
                let pod = plain(policy, &["a", "b"]);
                compute_pod_actions(&pod, &seen.0, &hints, &BackoffBook::default(), &at(60))
            };
            let again = run("OnFailure");
            let message = format!("Container a failed {kind} probe, will be restarted");
            assert_eq!(killed(&again), [("a-0", reason, message.as_str())]);
            assert_eq!(started(&again), ["a"]);
            let once = run("Never");
            assert_eq!(killed(&once)[0].2, format!("Container a failed {kind} probe"));
            assert!(once.start.is_empty());
        }
    }

    #[test]
    fn the_grace_of_a_failed_probe_goes_before_that_of_the_spec() {
        let pod = pod(json!({"terminationGracePeriodSeconds": 30, "containers": [
            {"name": "a", "livenessProbe": {"terminationGracePeriodSeconds": 5}}]}));
        let seen = in_sandbox().running("a");
        let hints = hints("liveness", "a-0", ProbeResult::Failure);
        let actions = compute_pod_actions(&pod, &seen.0, &hints, &BackoffBook::default(), &at(60));
        assert_eq!(actions.kill[0].grace_seconds, 5);
    }

    #[test]
    fn the_pod_is_killed_when_nothing_is_kept_or_started() {
        let pod = pod(json!({"restartPolicy": "Never", "containers": [{"name": "a"}],
            "initContainers": [{"name": "s", "restartPolicy": "Always"}]}));
        let actions = decide(&pod, &in_sandbox().running("s").exited("a", 0));
        assert_eq!(actions.kill_pod, Some(Reason::PodCompleted));
        assert!(actions.terminal && actions.start.is_empty(), "sidecars do not keep a pod alive");
    }

    #[test]
    fn nothing_of_a_pod_that_is_being_deleted_starts_again() {
        let actions =
            decide(&deleting(plain("Always", &["a", "b"])), &in_sandbox().exited("a", 1).running("b"));
        assert!(actions.start.is_empty());
    }

    #[test]
    fn of_several_running_instances_the_newest_is_kept() {
        let actions = decide(&plain("Always", &["a"]), &in_sandbox().running("a").unknown("a").running("a"));
        let ids: Vec<_> = killed(&actions).into_iter().map(|(id, reason, _)| (id, reason)).collect();
        assert_eq!(ids, [("a-1", Reason::DuplicateContainer), ("a-0", Reason::DuplicateContainer)]);
        assert!(actions.start.is_empty());
    }

    #[test]
    fn an_ephemeral_container_starts_once() {
        let pod = pod(json!({"containers": [{"name": "a"}], "ephemeralContainers": [{"name": "e"}]}));
        let actions = decide(&pod, &in_sandbox().running("a"));
        assert_eq!(started(&actions), ["e"]);
        assert!(decide(&pod, &in_sandbox().running("a").exited("e", 1)).is_empty());
    }
}

mod init_containers {
    use super::*;

    fn three(policy: &str) -> Pod {
        pod(json!({"restartPolicy": policy, "containers": [{"name": "a"}],
            "initContainers": [{"name": "i0"}, {"name": "i1"}, {"name": "i2"}]}))
    }

    fn with_sidecars(policy: &str) -> Pod {
        pod(json!({"restartPolicy": policy, "containers": [{"name": "a"}], "initContainers": [
            {"name": "s0", "restartPolicy": "Always", "image": "side:v1"}, {"name": "i1"},
            {"name": "s2", "restartPolicy": "Always", "image": "side:v1"}]}))
    }

    #[test]
    fn the_first_one_starts_when_none_has_a_record() {
        assert_eq!(started(&decide(&three("Always"), &in_sandbox())), ["i0"]);
    }

    #[test]
    fn the_next_one_starts_after_a_success() {
        assert_eq!(started(&decide(&three("Always"), &in_sandbox().exited("i0", 0))), ["i1"]);
    }

    #[test]
    fn records_of_earlier_ones_may_be_gone() {
        assert_eq!(started(&decide(&three("Always"), &in_sandbox().exited("i1", 0))), ["i2"]);
    }

    #[test]
    fn a_running_one_is_waited_for() {
        assert!(decide(&three("Always"), &in_sandbox().exited("i0", 0).running("i1")).is_empty());
    }

    #[test]
    fn a_running_one_is_not_restarted_for_another_image() {
        let seen = in_sandbox().running("i0").edit(|record| record.hash = "1".into());
        assert!(decide(&three("Always"), &seen).is_empty());
    }

    #[test]
    fn the_regular_containers_start_after_the_last_success() {
        assert_eq!(started(&decide(&three("Always"), &in_sandbox().exited("i2", 0))), ["a"]);
    }

    #[test]
    fn one_that_was_only_created_starts_again() {
        assert_eq!(started(&decide(&three("Always"), &in_sandbox().created("i0"))), ["i0"]);
    }

    #[test]
    fn a_failed_one_starts_again_or_ends_the_pod() {
        for policy in ["Always", "OnFailure"] {
            assert_eq!(started(&decide(&three(policy), &in_sandbox().exited("i0", 1))), ["i0"], "{policy}");
        }
        let ended = decide(&three("Never"), &in_sandbox().exited("i0", 1));
        assert_eq!((ended.kill_pod, ended.terminal), (Some(Reason::InitContainerFailed), true));
    }

    #[test]
    fn out_of_memory_is_a_failure_even_with_exit_code_zero() {
        let seen = in_sandbox().exited("i0", 0).edit(|record| record.reason = "OOMKilled".into());
        assert_eq!(started(&decide(&three("Always"), &seen)), ["i0"]);
        assert_eq!(decide(&three("Never"), &seen).kill_pod, Some(Reason::InitContainerFailed));
    }

    #[test]
    fn one_in_unknown_state_is_killed_and_started_or_ends_the_pod() {
        let again = decide(&three("OnFailure"), &in_sandbox().unknown("i0"));
        assert_eq!((killed(&again)[0].1, started(&again)), (Reason::ContainerStateUnknown, vec!["i0"]));
        let ended = decide(&three("Never"), &in_sandbox().unknown("i0"));
        assert_eq!(ended.kill_pod, Some(Reason::InitContainerFailed));
    }

    #[test]
    fn completed_ones_do_not_rerun_while_a_regular_container_lives() {
        assert!(decide(&three("Always"), &in_sandbox().running("a")).is_empty());
        assert!(decide(&three("Always"), &in_sandbox().exited("i0", 1).running("a")).is_empty());
        assert_eq!(started(&decide(&three("Always"), &in_sandbox().created("a"))), ["a"]);
    }

    #[test]
    fn a_start_that_was_cut_is_made_again_and_counts_as_the_same() {
        let first = decide(&three("Always"), &in_sandbox().created("a"));
        let start = &first.start[0];
        let id = start.replaces.as_ref().map(|id| id.as_str());
        assert_eq!((start.attempt, id, start.attempt_from_logs), (0, Some("a-0"), false));
        let later = decide(&three("Always"), &in_sandbox().exited("a", 1).created("a"));
        let start = &later.start[0];
        let id = start.replaces.as_ref().map(|id| id.as_str());
        assert_eq!((start.attempt, id), (1, Some("a-1")));
    }

    #[test]
    fn they_run_again_when_all_regular_ones_exited_and_the_records_are_gone() {
        assert_eq!(started(&decide(&three("Always"), &in_sandbox().exited("a", 1))), ["i0"]);
    }

    #[test]
    fn records_of_an_earlier_sandbox_do_not_count() {
        let ended = in_sandbox().exited("i0", 0).exited("i1", 0).exited("i2", 0).exited("a", 137);
        let lost = |seen: Seen| seen.edit_sandbox(|sandbox| sandbox.ready = false).sandbox(1, true);
        let again = decide(&three("Always"), &lost(ended).exited("i0", 0));
        assert_eq!(started(&again), ["i1"]);
        assert_eq!(again.start[0].attempt, 1);
        let stuck = lost(in_sandbox().exited("i2", 0).created("a"));
        assert_eq!(started(&decide(&three("Always"), &stuck)), ["i0"]);
    }

    #[test]
    fn a_running_sidecar_lets_the_next_one_start() {
        assert_eq!(started(&decide(&with_sidecars("Always"), &in_sandbox().running("s0"))), ["i1"]);
        let last = in_sandbox().running("s0").exited("i1", 0).running("s2");
        assert_eq!(started(&decide(&with_sidecars("Always"), &last)), ["a"]);
    }

    #[test]
    fn an_exited_sidecar_starts_again_beside_what_comes_next() {
        let seen = in_sandbox().exited("s0", 0).exited("i1", 0);
        assert_eq!(started(&decide(&with_sidecars("Never"), &seen)), ["s0", "s2"]);
        let later = in_sandbox().exited("s0", 1).running("s2").running("a");
        assert_eq!(started(&decide(&with_sidecars("Never"), &later)), ["s0"]);
    }

    #[test]
    fn a_sidecar_without_a_record_starts_once_the_pod_is_initialised() {
        assert_eq!(started(&decide(&with_sidecars("Always"), &in_sandbox().running("a"))), ["s0", "s2"]);
    }

    #[test]
    fn a_sidecar_in_unknown_state_is_killed_and_started() {
        let actions = decide(&with_sidecars("Never"), &in_sandbox().unknown("s0"));
        assert_eq!((killed(&actions)[0].1, started(&actions)), (Reason::ContainerStateUnknown, vec!["s0"]));
    }

    #[test]
    fn a_sidecar_with_another_image_is_replaced_and_the_next_one_starts_all_the_same() {
        let seen = in_sandbox().running("s0").edit(|record| record.hash = "1".into());
        let actions = decide(&with_sidecars("Always"), &seen);
        assert_eq!(killed(&actions)[0].1, Reason::ContainerDefinitionChanged);
        assert_eq!(started(&actions), ["s0", "i1"]);
    }

    #[test]
    fn a_sidecar_whose_liveness_probe_failed_is_replaced_under_any_policy() {
        let seen = in_sandbox().running("s0").running("s2").running("a");
        let hints = hints("liveness", "s0-0", ProbeResult::Failure);
        let actions =
            compute_pod_actions(&with_sidecars("Never"), &seen.0, &hints, &BackoffBook::default(), &at(60));
        assert_eq!((killed(&actions)[0].1, started(&actions)), (Reason::LivenessProbeFailed, vec!["s0"]));
    }

    #[test]
    fn a_sidecars_startup_probe_gates_the_next_one() {
        let pod = pod(json!({"containers": [{"name": "a"}],
            "initContainers": [{"name": "s0", "restartPolicy": "Always", "startupProbe": {}}]}));
        let seen = in_sandbox().running("s0");
        let run =
            |hints: &ProbeHints| compute_pod_actions(&pod, &seen.0, hints, &BackoffBook::default(), &at(60));
        let waiting = run(&ProbeHints::default());
        assert!(waiting.is_empty());
        assert_eq!(waiting.waiting[0].reason, Reason::WaitingForStartupProbe);
        assert!(run(&hints("startup", "s0-0", ProbeResult::Unknown)).is_empty());
        assert_eq!(started(&run(&hints("startup", "s0-0", ProbeResult::Success))), ["a"]);
        let failed = run(&hints("startup", "s0-0", ProbeResult::Failure));
        assert_eq!((killed(&failed)[0].1, started(&failed)), (Reason::StartupProbeFailed, vec!["s0"]));
        assert_eq!(started(&run(&ProbeHints::without_probes())), ["a"]);
    }
}

mod back_off {
    use super::*;

    fn book(pod: &Pod, name: &str, starts: usize) -> BackoffBook {
        let mut book = BackoffBook::default();
        let (_, container) = pod.container(name).unwrap();
        for _ in 0..starts {
            book.advance(&BackoffKey::of(pod, container), nanos(0), &at(0));
        }
        book
    }

    #[test]
    fn the_first_restart_is_immediate_and_names_what_to_advance() {
        let actions = decide(&plain("Always", &["a"]), &in_sandbox().exited("a", 1));
        assert_eq!(started(&actions), ["a"]);
        assert_eq!(actions.start[0].backoff.as_ref().map(|(_, finished)| *finished), Some(nanos(1)));
    }

    #[test]
    fn a_first_start_has_nothing_to_advance() {
        assert_eq!(decide(&plain("Always", &["a"]), &in_sandbox()).start[0].backoff, None);
    }

    #[test]
    fn a_container_in_back_off_waits_with_the_kubelets_words() {
        let pod = plain("Always", &["a", "b"]);
        let seen = in_sandbox().exited("a", 0).running("b");
        let book = book(&pod, "a", 2);
        let actions = compute_pod_actions(&pod, &seen.0, &ProbeHints::default(), &book, &at(10));
        assert!(actions.start.is_empty());
        let wait = &actions.waiting[0];
        assert_eq!(wait.reason, Reason::CrashLoopBackOff);
        assert_eq!(wait.message, "back-off 20s restarting failed container=a pod=web_shop(u-1)");
        assert_eq!(wait.event_message, "Back-off restarting failed container a in pod web_shop(u-1)");
        assert_eq!((wait.until_unix_nanos, actions.next_wake_unix_nanos()), (nanos(21), Some(nanos(21))));
        let later = compute_pod_actions(&pod, &seen.0, &ProbeHints::default(), &book, &at(21));
        assert_eq!(started(&later), ["a"]);
    }

    #[test]
    fn a_waiting_container_keeps_its_pod_from_being_killed() {
        let pod = plain("Always", &["a"]);
        let seen = in_sandbox().exited("a", 1);
        let actions = compute_pod_actions(&pod, &seen.0, &ProbeHints::default(), &book(&pod, "a", 1), &at(2));
        assert!(actions.kill_pod.is_none() && !actions.terminal && actions.waiting.len() == 1);
    }

    #[test]
    fn an_init_container_in_back_off_holds_what_follows() {
        let pod = pod(json!({"containers": [{"name": "a"}], "initContainers": [
            {"name": "s", "restartPolicy": "Always"}, {"name": "i"}]}));
        let seen = in_sandbox().exited("s", 1).exited("i", 1);
        let actions = compute_pod_actions(&pod, &seen.0, &ProbeHints::default(), &book(&pod, "i", 1), &at(3));
        assert_eq!(started(&actions), ["s"]);
        assert_eq!(actions.waiting[0].name, "i");
        let sidecar = compute_pod_actions(&pod, &seen.0, &ProbeHints::default(), &book(&pod, "s", 1), &at(3));
        assert_eq!(started(&sidecar), ["i"], "a sidecar in back-off holds nobody");
    }

    #[test]
    fn another_image_begins_anew() {
        let old = plain("Always", &["a"]);
        let book = book(&old, "a", 3);
        let new = pod(json!({"containers": [{"name": "a", "image": "app:v2"}]}));
        let seen = in_sandbox().exited("a", 1);
        let actions = compute_pod_actions(&new, &seen.0, &ProbeHints::default(), &book, &at(2));
        assert_eq!(started(&actions), ["a"]);
    }
}
