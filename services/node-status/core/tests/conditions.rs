//! The conditions of a Node: texts, order, transition times and events.

#![allow(clippy::unwrap_used)]

use keelson_kube_model::NodeCondition;
use keelson_node_status_core::conditions::{
    ReadyInputs, condition_events, node_conditions, rebooted_event, starting_event,
};
use keelson_node_status_core::{Machine, RuntimeState};

const EARLIER: &str = "2026-01-01T00:00:00Z";
const NOW: &str = "2026-01-01T00:01:00Z";
const ALL: [&str; 4] = ["cpu", "memory", "pods", "ephemeral-storage"];

fn good_runtime() -> RuntimeState {
    RuntimeState {
        name: "containerd".into(),
        version: "1.6.20".into(),
        ready: true,
        network_ready: true,
        message: String::new(),
        ..RuntimeState::default()
    }
}

fn ready_of(runtime: Option<&RuntimeState>, capacity: &[&str], services: &[String]) -> (String, String) {
    let inputs = ReadyInputs { runtime, capacity: capacity.to_vec(), services };
    let ready = node_conditions(None, &inputs, &[], NOW).pop().unwrap();
    assert_eq!(ready.type_, "Ready");
    assert_eq!(ready.reason, if ready.status == "True" { "KubeletReady" } else { "KubeletNotReady" });
    (ready.status, ready.message)
}

#[test]
fn the_ready_message_has_the_kubelets_text() {
    let state = |ready, network_ready, message: &str| RuntimeState {
        ready,
        network_ready,
        message: message.into(),
        ..good_runtime()
    };
    let never = "[container runtime status check may not have completed yet, network state unknown]";
    let runtime = "container runtime not ready: RuntimeReady=false reason:Broken message:no shim";
    let network = "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady \
        message:cni plugin not initialized";
    let unreachable_runtime = |name: &str| RuntimeState {
        name: name.into(),
        unreachable: true,
        message: "connection refused".into(),
        ..RuntimeState::default()
    };
    let table = [
        (Some(good_runtime()), "kubelet is posting ready status"),
        (None, never),
        (Some(RuntimeState::default()), never),
        (Some(unreachable_runtime("")), never),
        (Some(unreachable_runtime("containerd")), "container runtime is down"),
        (Some(state(false, true, runtime)), runtime),
        (Some(state(false, false, "")), "container runtime not ready: RuntimeReady=false"),
        (Some(state(true, false, network)), network),
        (Some(state(true, false, "")), "container runtime network not ready: NetworkReady=false"),
    ];
    for (runtime, message) in table {
        let (status, text) = ready_of(runtime.as_ref(), &ALL, &[]);
        assert_eq!(text, message);
        assert_eq!(status == "True", message == "kubelet is posting ready status");
    }
}

#[test]
fn the_ready_message_names_missing_capacity_and_services_last() {
    let services = vec!["pod-sync has not answered yet".to_owned()];
    let (status, text) = ready_of(Some(&good_runtime()), &["pods"], &services);
    assert_eq!(status, "False");
    assert_eq!(
        text,
        "[missing node capacity for resources: cpu, memory, ephemeral-storage, pod-sync has not answered yet]"
    );
    assert_eq!(ready_of(Some(&good_runtime()), &ALL, &services).1, services[0]);
}

#[test]
fn a_node_that_shuts_down_is_not_ready_and_says_so_after_the_runtime() {
    let services = vec!["pod-sync has not answered yet".to_owned()];
    let broken = RuntimeState { ready: false, ..good_runtime() };
    let runtime = "container runtime not ready: RuntimeReady=false";
    let all = format!(
        "[{runtime}, node is shutting down, missing node capacity for resources: pods, {}]",
        services[0]
    );
    type Case<'a> = (bool, RuntimeState, &'a [&'a str], &'a [String], &'a str);
    let table: [Case<'_>; 4] = [
        (true, good_runtime(), &ALL, &[], "node is shutting down"),
        (false, good_runtime(), &ALL, &[], "kubelet is posting ready status"),
        (true, broken.clone(), &ALL, &[], &format!("[{runtime}, node is shutting down]")),
        (true, broken, &["cpu", "memory", "ephemeral-storage"], &services, &all),
    ];
    for (shutting_down, runtime, capacity, services, message) in table {
        let machine = Machine { shutting_down, ..Machine::default() };
        let inputs = ReadyInputs { runtime: Some(&runtime), capacity: capacity.to_vec(), services };
        let ready = node_conditions(Some(&machine), &inputs, &[], NOW).pop().unwrap();
        assert_eq!((ready.type_.as_str(), ready.message.as_str()), ("Ready", message));
        let expected = if shutting_down { ("False", "KubeletNotReady") } else { ("True", "KubeletReady") };
        assert_eq!((ready.status.as_str(), ready.reason.as_str()), expected);
    }
}

#[test]
fn conditions_have_the_kubelets_order_and_reasons() {
    let machine = Machine { memory_pressure: true, pid_pressure: true, ..Machine::default() };
    let runtime = good_runtime();
    let inputs = ReadyInputs { runtime: Some(&runtime), capacity: ALL.to_vec(), services: &[] };
    let conditions = node_conditions(Some(&machine), &inputs, &[], NOW);
    let short: Vec<_> =
        conditions.iter().map(|c| (c.type_.as_str(), c.status.as_str(), c.reason.as_str())).collect();
    assert_eq!(
        short,
        [
            ("MemoryPressure", "True", "KubeletHasInsufficientMemory"),
            ("DiskPressure", "False", "KubeletHasNoDiskPressure"),
            ("PIDPressure", "True", "KubeletHasInsufficientPID"),
            ("Ready", "True", "KubeletReady"),
        ]
    );
    assert_eq!(conditions[0].message, "kubelet has insufficient memory available");
    assert_eq!(conditions[1].message, "kubelet has no disk pressure");
    assert_eq!(conditions[2].message, "kubelet has insufficient PID available");
}

#[test]
fn last_transition_time_changes_only_with_the_status() {
    let old = |status: &str| NodeCondition {
        type_: "Ready".into(),
        status: status.into(),
        last_heartbeat_time: Some(EARLIER.into()),
        last_transition_time: Some(EARLIER.into()),
        ..NodeCondition::default()
    };
    let runtime = good_runtime();
    let inputs = ReadyInputs { runtime: Some(&runtime), capacity: ALL.to_vec(), services: &[] };
    for (before, transition) in [("True", EARLIER), ("False", NOW), ("Unknown", NOW)] {
        let ready = node_conditions(None, &inputs, &[old(before)], NOW).pop().unwrap();
        assert_eq!(ready.last_transition_time.as_deref(), Some(transition), "from {before}");
        assert_eq!(ready.last_heartbeat_time.as_deref(), Some(NOW));
    }
}

#[test]
fn a_new_pressure_condition_is_an_event_and_ready_only_when_it_changes() {
    let runtime = good_runtime();
    let good = ReadyInputs { runtime: Some(&runtime), capacity: ALL.to_vec(), services: &[] };
    let bad = ReadyInputs::default();
    let reasons = |before: &[NodeCondition], after: &[NodeCondition]| {
        let events = condition_events("n1", before, after);
        for event in &events {
            assert_eq!(event.message, format!("Node n1 status is now: {}", event.reason));
            assert!(!event.warning);
        }
        events.iter().map(|e| e.reason).collect::<Vec<_>>()
    };
    let first = node_conditions(None, &bad, &[], NOW);
    let pressures = ["NodeHasSufficientMemory", "NodeHasNoDiskPressure", "NodeHasSufficientPID"];
    assert_eq!(reasons(&[], &first), pressures);
    let second = node_conditions(None, &good, &first, NOW);
    assert_eq!(reasons(&first, &second), ["NodeReady"]);
    assert_eq!(reasons(&second, &second), [""; 0]);
    let full = Machine { disk_pressure: true, ..Machine::default() };
    let third = node_conditions(Some(&full), &bad, &second, NOW);
    assert_eq!(reasons(&second, &third), ["NodeHasDiskPressure", "NodeNotReady"]);
    let memory = Machine { memory_pressure: true, pid_pressure: true, ..Machine::default() };
    let fourth = node_conditions(Some(&memory), &bad, &third, NOW);
    let all = ["NodeHasInsufficientMemory", "NodeHasNoDiskPressure", "NodeHasInsufficientPID"];
    assert_eq!(reasons(&third, &fourth), all);
}

#[test]
fn the_rebooted_event_needs_two_known_boot_ids() {
    for (before, now, expected) in [("a", "b", true), ("a", "a", false), ("", "b", false), ("a", "", false)] {
        let event = rebooted_event("n1", before, now);
        assert_eq!(event.is_some(), expected, "{before:?} to {now:?}");
        if let Some(event) = event {
            assert!(event.warning);
            assert_eq!(event.message, "Node n1 has been rebooted, boot id: b");
        }
    }
}

#[test]
fn the_starting_event_is_recorded_once_per_start() {
    for (before, now, expected) in
        [(0, 7, true), (7, 8, true), (8, 7, true), (7, 7, false), (7, 0, false), (0, 0, false)]
    {
        let event = starting_event(before, now);
        assert_eq!(event.is_some(), expected, "{before} to {now}");
        if let Some(event) = event {
            assert_eq!(
                (event.reason, event.message.as_str(), event.warning),
                ("Starting", "Starting kubelet.", false)
            );
        }
    }
}
