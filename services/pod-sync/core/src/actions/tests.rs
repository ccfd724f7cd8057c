use keelson_kube_model::Pod;
use serde_json::{Value, json};

use super::*;
use crate::testing::{ObservationBuilder, at, deleting, empty_observation, in_sandbox, nanos, pod};

fn decide(pod: &Pod, seen: &ObservationBuilder) -> PodActions {
    compute_pod_actions(pod, &seen.0, &ProbeHints::default(), &Backoffs::default(), &at(60))
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
fn pod_actions_with_any_change_are_not_empty() {
    use restart_all::ResetContainer;
    let first = decide(&plain("Always", &["a"]), &in_sandbox());
    let nothing = PodActions::default();
    assert!(nothing.is_empty());
    let reset = ResetContainer { id: "a-0".into(), name: "a".into(), kill: false, last: false };
    let kill = decide(&plain("Always", &["a"]), &in_sandbox().unknown("a")).kill;
    assert_eq!((first.start.len(), kill.len()), (1, 1));
    let plan = decide(&plain("Always", &["a"]), &empty_observation()).create_sandbox;
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
    // A waiting container is no change.
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

    fn plan(pod: &Pod, seen: &ObservationBuilder) -> Option<(u32, Option<String>, Reason)> {
        decide(pod, seen).create_sandbox.map(|p| (p.attempt, p.replaces.map(|id| id.0), p.reason))
    }

    #[test]
    fn without_a_sandbox_the_first_one_is_created() {
        let actions = decide(&plain("Always", &["a", "b"]), &empty_observation());
        assert_eq!(actions.create_sandbox.as_ref().map(|p| (p.attempt, &p.replaces)), Some((0, &None)));
        assert_eq!(actions.kill_pod, None);
        assert_eq!(started(&actions), ["a", "b"]);
        assert!(actions.start.iter().all(|s| s.attempt == 0 && s.attempt_from_logs));
    }

    #[test]
    fn with_several_ready_sandboxes_none_is_kept() {
        let seen = in_sandbox().sandbox(1, true).running("a");
        let pod = plain("Always", &["a"]);
        assert_eq!(plan(&pod, &seen), Some((2, Some("sandbox-1".into()), Reason::SeveralSandboxesReady)));
        assert_eq!(decide(&pod, &seen).kill_pod, Some(Reason::SeveralSandboxesReady));
    }

    #[test]
    fn a_sandbox_that_is_not_ready_is_replaced_by_the_next_attempt() {
        let seen = empty_observation().sandbox(4, false);
        assert_eq!(
            plan(&plain("Always", &["a"]), &seen),
            Some((5, Some("sandbox-4".into()), Reason::SandboxNotReady))
        );
    }

    #[test]
    fn an_older_ready_sandbox_does_not_replace_the_newest() {
        let seen = in_sandbox().sandbox(1, false);
        assert_eq!(
            plan(&plain("Always", &["a"]), &seen),
            Some((2, Some("sandbox-1".into()), Reason::SandboxNotReady))
        );
    }

    #[test]
    fn a_changed_network_mode_creates_a_new_sandbox() {
        let seen = in_sandbox().edit_sandbox(|sandbox| sandbox.host_network = true);
        assert_eq!(plan(&plain("Always", &["a"]), &seen), Some((1, None, Reason::SandboxNetworkModeChanged)));
        let host = pod(json!({"hostNetwork": true, "containers": [{"name": "a"}]}));
        assert_eq!(plan(&host, &in_sandbox()), Some((1, None, Reason::SandboxNetworkModeChanged)));
    }

    #[test]
    fn a_sandbox_without_an_address_is_replaced() {
        let seen = in_sandbox().edit_sandbox(|sandbox| sandbox.ips.clear());
        assert_eq!(
            plan(&plain("Always", &["a"]), &seen),
            Some((1, Some("sandbox-0".into()), Reason::SandboxWithoutAddress))
        );
    }

    #[test]
    fn a_host_network_sandbox_needs_no_address() {
        let host = pod(json!({"hostNetwork": true, "containers": [{"name": "a"}]}));
        let seen = in_sandbox().edit_sandbox(|sandbox| {
            sandbox.host_network = true;
            sandbox.ips.clear();
        });
        assert_eq!(plan(&host, &seen), None);
    }

    #[test]
    fn a_ready_sandbox_is_kept() {
        assert_eq!(plan(&plain("Always", &["a"]), &in_sandbox()), None);
        assert_eq!(sandbox_decision(&plain("Always", &["a"]), &in_sandbox().0), SandboxDecision::Keep);
    }
}

mod sandbox_needed {
    use super::*;

    #[test]
    fn starts_nothing_when_the_sandbox_is_lost_and_policy_is_never() {
        let actions =
            decide(&plain("Never", &["a"]), &empty_observation().sandbox(0, false).exited("a", 137));
        assert_eq!(actions.kill_pod, Some(Reason::RestartNotAllowed));
        assert!(actions.create_sandbox.is_none() && actions.start.is_empty() && actions.terminal);
    }

    #[test]
    fn policy_never_gets_a_new_sandbox_if_the_first_had_no_containers() {
        let actions = decide(&plain("Never", &["a"]), &empty_observation().sandbox(0, false));
        assert_eq!(actions.create_sandbox.as_ref().map(|plan| plan.attempt), Some(1));
        assert_eq!(started(&actions), ["a"]);
    }

    #[test]
    fn containers_that_succeeded_under_on_failure_skip_the_new_sandbox() {
        let seen = empty_observation().sandbox(0, false).exited("a", 0).exited("b", 1);
        let actions = decide(&plain("OnFailure", &["a", "b"]), &seen);
        assert_eq!(started(&actions), ["b"]);
        assert_eq!(actions.start[0].attempt, 1);
    }

    #[test]
    fn container_restart_policy_overrides_the_pods() {
        let pod = pod(json!({"restartPolicy": "Always", "containers": [
            {"name": "a", "restartPolicy": "OnFailure"}, {"name": "b"}]}));
        let actions = decide(&pod, &empty_observation().sandbox(0, false).exited("a", 0).exited("b", 0));
        assert_eq!(started(&actions), ["b"]);
    }

    #[test]
    fn containers_that_may_not_restart_skip_the_new_sandbox() {
        let pod = pod(json!({"restartPolicy": "Always", "containers": [
            {"name": "a", "restartPolicy": "Never"}, {"name": "b"}]}));
        let actions = decide(&pod, &empty_observation().sandbox(0, false).exited("a", 137).exited("b", 137));
        assert_eq!(started(&actions), ["b"]);
    }

    #[test]
    fn only_kills_when_every_container_succeeded_under_on_failure() {
        let actions =
            decide(&plain("OnFailure", &["a"]), &empty_observation().sandbox(0, false).exited("a", 0));
        assert_eq!(actions.kill_pod, Some(Reason::PodCompleted));
        assert!(actions.create_sandbox.is_none() && actions.terminal);
    }

    #[test]
    fn a_new_sandbox_starts_with_the_first_init_container() {
        let pod =
            pod(json!({"initContainers": [{"name": "i0"}, {"name": "i1"}], "containers": [{"name": "a"}]}));
        let actions = decide(
            &pod,
            &empty_observation().sandbox(0, false).exited("i0", 0).exited("i1", 0).exited("a", 1),
        );
        assert_eq!(started(&actions), ["i0"]);
        assert_eq!(actions.start[0].kind, ContainerKind::Init);
    }

    #[test]
    fn a_deleted_pod_gets_no_sandbox() {
        let actions = decide(&deleting(plain("Always", &["a"])), &empty_observation());
        assert!(actions.terminal && actions.create_sandbox.is_none() && actions.kill_pod.is_none());
    }
}

mod regular_containers {
    use super::*;

    #[test]
    fn running_containers_are_kept() {
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
    fn exited_containers_restart_by_restart_policy() {
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
    fn a_restart_increments_the_count_of_the_newest_record() {
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
    fn a_changed_image_restarts_under_any_policy() {
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
    fn a_failed_probe_restarts_the_container_unless_policy_is_never() {
        let cases = [("liveness", Reason::LivenessProbeFailed), ("startup", Reason::StartupProbeFailed)];
        for (kind, reason) in cases {
            let hints = hints(kind, "a-0", ProbeResult::Failure);
            let run = |policy| {
                let seen = in_sandbox().running("a").running("b");
                let pod = plain(policy, &["a", "b"]);
                compute_pod_actions(&pod, &seen.0, &hints, &Backoffs::default(), &at(60))
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
    fn a_container_that_is_resized_by_a_restart_is_killed_and_started_under_any_policy() {
        for (name, policy) in [("a", "Never"), ("s", "Always")] {
            let pod = pod(json!({"restartPolicy": policy, "containers": [{"name": "a"}],
                "initContainers": [{"name": "s", "restartPolicy": "Always"}, {"name": "i"}]}));
            let mut seen = in_sandbox().running("s").running("i");
            if name == "a" {
                seen = in_sandbox().running("s").exited("i", 0).running("a");
            }
            let id = format!("{name}-0");
            let resized = [ContainerId::from(id.as_str())].into();
            let hints = ProbeHints { resized, ..ProbeHints::without_probes() };
            let actions = compute_pod_actions(&pod, &seen.0, &hints, &Backoffs::default(), &at(60));
            let message = format!("Container {name} resize requires restart");
            assert_eq!(killed(&actions), [(id.as_str(), Reason::ResizeRequiresRestart, message.as_str())]);
            assert_eq!(started(&actions), [name]);
        }
    }

    #[test]
    fn the_grace_period_of_a_failed_probe_overrides_the_specs() {
        let pod = pod(json!({"terminationGracePeriodSeconds": 30, "containers": [
            {"name": "a", "livenessProbe": {"terminationGracePeriodSeconds": 5}}]}));
        let seen = in_sandbox().running("a");
        let hints = hints("liveness", "a-0", ProbeResult::Failure);
        let actions = compute_pod_actions(&pod, &seen.0, &hints, &Backoffs::default(), &at(60));
        assert_eq!(actions.kill[0].grace_seconds, 5);
    }

    #[test]
    fn the_pod_is_killed_if_no_container_is_kept_or_started() {
        let pod = pod(json!({"restartPolicy": "Never", "containers": [{"name": "a"}],
            "initContainers": [{"name": "s", "restartPolicy": "Always"}]}));
        let actions = decide(&pod, &in_sandbox().running("s").exited("a", 0));
        assert_eq!(actions.kill_pod, Some(Reason::PodCompleted));
        assert!(actions.terminal && actions.start.is_empty(), "sidecars do not keep a pod alive");
    }

    #[test]
    fn containers_of_a_deleted_pod_do_not_restart() {
        let actions =
            decide(&deleting(plain("Always", &["a", "b"])), &in_sandbox().exited("a", 1).running("b"));
        assert!(actions.start.is_empty());
    }

    #[test]
    fn of_several_running_instances_only_the_newest_is_kept() {
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
    fn the_first_init_container_starts_if_none_has_a_record() {
        assert_eq!(started(&decide(&three("Always"), &in_sandbox())), ["i0"]);
    }

    #[test]
    fn the_next_init_container_starts_after_a_success() {
        assert_eq!(started(&decide(&three("Always"), &in_sandbox().exited("i0", 0))), ["i1"]);
    }

    #[test]
    fn records_of_earlier_init_containers_may_be_removed() {
        assert_eq!(started(&decide(&three("Always"), &in_sandbox().exited("i1", 0))), ["i2"]);
    }

    #[test]
    fn a_running_init_container_is_waited_for() {
        assert!(decide(&three("Always"), &in_sandbox().exited("i0", 0).running("i1")).is_empty());
    }

    #[test]
    fn a_running_init_container_is_not_restarted_for_another_image() {
        let seen = in_sandbox().running("i0").edit(|record| record.hash = "1".into());
        assert!(decide(&three("Always"), &seen).is_empty());
    }

    #[test]
    fn regular_containers_start_after_the_last_init_container() {
        assert_eq!(started(&decide(&three("Always"), &in_sandbox().exited("i2", 0))), ["a"]);
    }

    #[test]
    fn a_created_init_container_is_started_again() {
        assert_eq!(started(&decide(&three("Always"), &in_sandbox().created("i0"))), ["i0"]);
    }

    #[test]
    fn a_failed_init_container_restarts_or_fails_the_pod() {
        for policy in ["Always", "OnFailure"] {
            assert_eq!(started(&decide(&three(policy), &in_sandbox().exited("i0", 1))), ["i0"], "{policy}");
        }
        let ended = decide(&three("Never"), &in_sandbox().exited("i0", 1));
        assert_eq!((ended.kill_pod, ended.terminal), (Some(Reason::InitContainerFailed), true));
    }

    #[test]
    fn an_oom_killed_init_container_failed_even_with_exit_code_zero() {
        let seen = in_sandbox().exited("i0", 0).edit(|record| record.reason = "OOMKilled".into());
        assert_eq!(started(&decide(&three("Always"), &seen)), ["i0"]);
        assert_eq!(decide(&three("Never"), &seen).kill_pod, Some(Reason::InitContainerFailed));
    }

    #[test]
    fn an_init_container_in_unknown_state_is_replaced_or_fails_the_pod() {
        let again = decide(&three("OnFailure"), &in_sandbox().unknown("i0"));
        assert_eq!((killed(&again)[0].1, started(&again)), (Reason::ContainerStateUnknown, vec!["i0"]));
        let ended = decide(&three("Never"), &in_sandbox().unknown("i0"));
        assert_eq!(ended.kill_pod, Some(Reason::InitContainerFailed));
    }

    #[test]
    fn completed_init_containers_do_not_rerun_while_a_regular_one_lives() {
        assert!(decide(&three("Always"), &in_sandbox().running("a")).is_empty());
        assert!(decide(&three("Always"), &in_sandbox().exited("i0", 1).running("a")).is_empty());
        assert_eq!(started(&decide(&three("Always"), &in_sandbox().created("a"))), ["a"]);
    }

    #[test]
    fn an_interrupted_start_is_repeated_with_the_same_restart_count() {
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
    fn init_containers_rerun_if_regular_ones_exited_and_records_are_removed() {
        assert_eq!(started(&decide(&three("Always"), &in_sandbox().exited("a", 1))), ["i0"]);
    }

    #[test]
    fn init_records_of_an_earlier_sandbox_do_not_count() {
        let ended = in_sandbox().exited("i0", 0).exited("i1", 0).exited("i2", 0).exited("a", 137);
        let lost =
            |seen: ObservationBuilder| seen.edit_sandbox(|sandbox| sandbox.ready = false).sandbox(1, true);
        let again = decide(&three("Always"), &lost(ended).exited("i0", 0));
        assert_eq!(started(&again), ["i1"]);
        assert_eq!(again.start[0].attempt, 1);
        let stuck = lost(in_sandbox().exited("i2", 0).created("a"));
        assert_eq!(started(&decide(&three("Always"), &stuck)), ["i0"]);
    }

    #[test]
    fn a_running_sidecar_lets_the_next_container_start() {
        assert_eq!(started(&decide(&with_sidecars("Always"), &in_sandbox().running("s0"))), ["i1"]);
        let last = in_sandbox().running("s0").exited("i1", 0).running("s2");
        assert_eq!(started(&decide(&with_sidecars("Always"), &last)), ["a"]);
    }

    #[test]
    fn an_exited_sidecar_restarts_together_with_later_containers() {
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
    fn a_sidecar_in_unknown_state_is_replaced() {
        let actions = decide(&with_sidecars("Never"), &in_sandbox().unknown("s0"));
        assert_eq!((killed(&actions)[0].1, started(&actions)), (Reason::ContainerStateUnknown, vec!["s0"]));
    }

    #[test]
    fn a_sidecar_with_another_image_is_replaced_without_blocking_the_next() {
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
            compute_pod_actions(&with_sidecars("Never"), &seen.0, &hints, &Backoffs::default(), &at(60));
        assert_eq!((killed(&actions)[0].1, started(&actions)), (Reason::LivenessProbeFailed, vec!["s0"]));
    }

    #[test]
    fn a_sidecars_startup_probe_gates_the_next_one() {
        let pod = pod(json!({"containers": [{"name": "a"}],
            "initContainers": [{"name": "s0", "restartPolicy": "Always", "startupProbe": {}}]}));
        let seen = in_sandbox().running("s0");
        let run =
            |hints: &ProbeHints| compute_pod_actions(&pod, &seen.0, hints, &Backoffs::default(), &at(60));
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

    fn backoffs(pod: &Pod, name: &str, starts: usize) -> Backoffs {
        let mut backoffs = Backoffs::default();
        let (_, container) = pod.container(name).unwrap();
        for _ in 0..starts {
            backoffs.advance(&BackoffKey::of(pod, container), nanos(0), &at(0));
        }
        backoffs
    }

    #[test]
    fn the_first_restart_is_immediate_and_advances_the_back_off() {
        let actions = decide(&plain("Always", &["a"]), &in_sandbox().exited("a", 1));
        assert_eq!(started(&actions), ["a"]);
        assert_eq!(actions.start[0].backoff.as_ref().map(|(_, finished)| *finished), Some(nanos(1)));
    }

    #[test]
    fn a_first_start_advances_no_back_off() {
        assert_eq!(decide(&plain("Always", &["a"]), &in_sandbox()).start[0].backoff, None);
    }

    #[test]
    fn a_container_in_back_off_waits_with_the_kubelets_message() {
        let pod = plain("Always", &["a", "b"]);
        let seen = in_sandbox().exited("a", 0).running("b");
        let backoffs = backoffs(&pod, "a", 2);
        let actions = compute_pod_actions(&pod, &seen.0, &ProbeHints::default(), &backoffs, &at(10));
        assert!(actions.start.is_empty());
        let wait = &actions.waiting[0];
        assert_eq!(wait.reason, Reason::CrashLoopBackOff);
        assert_eq!(wait.message, "back-off 20s restarting failed container=a pod=web_shop(u-1)");
        assert_eq!(wait.event_message, "Back-off restarting failed container a in pod web_shop(u-1)");
        assert_eq!((wait.until_unix_nanos, actions.next_wake_unix_nanos()), (nanos(21), Some(nanos(21))));
        let later = compute_pod_actions(&pod, &seen.0, &ProbeHints::default(), &backoffs, &at(21));
        assert_eq!(started(&later), ["a"]);
    }

    #[test]
    fn a_pod_with_a_container_in_back_off_is_not_killed() {
        let pod = plain("Always", &["a"]);
        let seen = in_sandbox().exited("a", 1);
        let actions =
            compute_pod_actions(&pod, &seen.0, &ProbeHints::default(), &backoffs(&pod, "a", 1), &at(2));
        assert!(actions.kill_pod.is_none() && !actions.terminal && actions.waiting.len() == 1);
    }

    #[test]
    fn an_init_container_in_back_off_blocks_later_containers() {
        let pod = pod(json!({"containers": [{"name": "a"}], "initContainers": [
            {"name": "s", "restartPolicy": "Always"}, {"name": "i"}]}));
        let seen = in_sandbox().exited("s", 1).exited("i", 1);
        let actions =
            compute_pod_actions(&pod, &seen.0, &ProbeHints::default(), &backoffs(&pod, "i", 1), &at(3));
        assert_eq!(started(&actions), ["s"]);
        assert_eq!(actions.waiting[0].name, "i");
        let sidecar =
            compute_pod_actions(&pod, &seen.0, &ProbeHints::default(), &backoffs(&pod, "s", 1), &at(3));
        assert_eq!(started(&sidecar), ["i"], "a sidecar in back-off blocks no container");
    }

    #[test]
    fn another_image_resets_the_back_off() {
        let old = plain("Always", &["a"]);
        let backoffs = backoffs(&old, "a", 3);
        let new = pod(json!({"containers": [{"name": "a", "image": "app:v2"}]}));
        let seen = in_sandbox().exited("a", 1);
        let actions = compute_pod_actions(&new, &seen.0, &ProbeHints::default(), &backoffs, &at(2));
        assert_eq!(started(&actions), ["a"]);
    }
}
