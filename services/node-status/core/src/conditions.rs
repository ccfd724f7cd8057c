//! The four conditions of a Node and the events of their changes.

use std::slice::from_ref;

use keelson_kube_model::NodeCondition;
use keelson_kube_model::time::parse_seconds;

use crate::reports::{Machine, RuntimeState};

/// What decides the condition Ready.
#[derive(Debug, Clone, Default)]
pub struct ReadyInputs<'a> {
    /// The container runtime; `None` before its first report.
    pub runtime: Option<&'a RuntimeState>,
    /// Names of the resources that the Node shows as capacity.
    pub capacity: Vec<&'a str>,
    /// Errors of the services, one sentence each (see [`crate::Watchdog::errors`]).
    pub services: &'a [String],
}

/// An event about the Node, always of type `Normal` unless it says otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeEvent {
    /// Whether it is a `Warning`.
    pub warning: bool,
    /// The kubelet's reason.
    pub reason: &'static str,
    /// For people.
    pub message: String,
}

struct Texts {
    type_: &'static str,
    // Reason, message and event while the condition holds.
    bad: [&'static str; 3],
    good: [&'static str; 3],
}

const MEMORY: Texts = Texts {
    type_: "MemoryPressure",
    bad: [
        "KubeletHasInsufficientMemory",
        "kubelet has insufficient memory available",
        "NodeHasInsufficientMemory",
    ],
    good: [
        "KubeletHasSufficientMemory",
        "kubelet has sufficient memory available",
        "NodeHasSufficientMemory",
    ],
};
const DISK: Texts = Texts {
    type_: "DiskPressure",
    bad: ["KubeletHasDiskPressure", "kubelet has disk pressure", "NodeHasDiskPressure"],
    good: ["KubeletHasNoDiskPressure", "kubelet has no disk pressure", "NodeHasNoDiskPressure"],
};
const PID: Texts = Texts {
    type_: "PIDPressure",
    bad: ["KubeletHasInsufficientPID", "kubelet has insufficient PID available", "NodeHasInsufficientPID"],
    good: ["KubeletHasSufficientPID", "kubelet has sufficient PID available", "NodeHasSufficientPID"],
};

/// The error of Ready while pods are ended before a shutdown (node-and-api.md §11).
const SHUTTING_DOWN: &str = "node is shutting down";

/// Resources without which a Node is not ready, in the order in which they are named.
const REQUIRED: [&str; 4] = ["cpu", "memory", "pods", "ephemeral-storage"];

/// MemoryPressure, DiskPressure, PIDPressure and Ready, in this order.
///
/// `now` is RFC 3339. `lastTransitionTime` is that of `previous` while the status stays the same. Before resource-manager has
/// reported there is no pressure; Ready shows that its report is missing.
///
/// Parity: node-and-api.md §9.5; errors of our own services come last in the message of Ready.
pub fn node_conditions(
    machine: Option<&Machine>,
    ready: &ReadyInputs<'_>,
    previous: &[NodeCondition],
    now: &str,
) -> Vec<NodeCondition> {
    let pressure = machine.map_or([false; 3], |m| [m.memory_pressure, m.disk_pressure, m.pid_pressure]);
    let mut conditions = Vec::with_capacity(4);
    for (texts, holds) in [MEMORY, DISK, PID].iter().zip(pressure) {
        let [reason, message, _] = if holds { texts.bad } else { texts.good };
        conditions.push(condition(texts.type_, holds, reason, message.to_owned(), previous, now));
    }
    let errors = ready_errors(ready, machine.is_some_and(|machine| machine.shutting_down));
    let (reason, message) = match errors.as_slice() {
        [] => ("KubeletReady", "kubelet is posting ready status".to_owned()),
        [one] => ("KubeletNotReady", one.clone()),
        several => ("KubeletNotReady", format!("[{}]", several.join(", "))),
    };
    conditions.push(condition("Ready", errors.is_empty(), reason, message, previous, now));
    conditions
}

fn condition(
    type_: &str,
    holds: bool,
    reason: &str,
    message: String,
    previous: &[NodeCondition],
    now: &str,
) -> NodeCondition {
    let status = if holds { "True" } else { "False" };
    let since = previous
        .iter()
        .find(|old| old.type_ == type_ && old.status == status)
        .and_then(|old| old.last_transition_time.clone())
        .unwrap_or_else(|| now.to_owned());
    NodeCondition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        last_heartbeat_time: Some(now.to_owned()),
        last_transition_time: Some(since),
        reason: reason.to_owned(),
        message,
    }
}

fn ready_errors(inputs: &ReadyInputs<'_>, is_shutting_down: bool) -> Vec<String> {
    let mut errors = Vec::new();
    match inputs.runtime {
        Some(runtime) if runtime.unreachable && !runtime.name.is_empty() => {
            errors.push("container runtime is down".to_owned());
        }
        Some(runtime) if !runtime.name.is_empty() && !runtime.ready => {
            errors.push(message_or(&runtime.message, "container runtime not ready: RuntimeReady=false"));
        }
        Some(runtime) if !runtime.name.is_empty() && !runtime.network_ready => {
            errors.push(message_or(
                &runtime.message,
                "container runtime network not ready: NetworkReady=false",
            ));
        }
        Some(runtime) if !runtime.name.is_empty() => {}
        // It has never answered.
        Some(_) | None => {
            errors.push("container runtime status check may not have completed yet".to_owned());
            errors.push("network state unknown".to_owned());
        }
    }
    if is_shutting_down {
        errors.push(SHUTTING_DOWN.to_owned());
    }
    let missing: Vec<&str> = REQUIRED.into_iter().filter(|name| !inputs.capacity.contains(name)).collect();
    if !missing.is_empty() {
        errors.push(format!("missing node capacity for resources: {}", missing.join(", ")));
    }
    errors.extend_from_slice(inputs.services);
    errors
}

fn message_or(message: &str, without: &str) -> String {
    if message.is_empty() { without } else { message }.to_owned()
}

/// The events of the change from one set of conditions to the next.
///
/// A pressure condition that appears is an event too; Ready only when it changes.
pub fn condition_events(node: &str, before: &[NodeCondition], after: &[NodeCondition]) -> Vec<NodeEvent> {
    let mut events = Vec::new();
    for now in after {
        let old = before.iter().find(|c| c.type_ == now.type_);
        if old.is_some_and(|c| c.status == now.status) {
            continue;
        }
        let holds = now.status == "True";
        let reason = match [MEMORY, DISK, PID].iter().find(|t| t.type_ == now.type_) {
            Some(texts) if holds => texts.bad[2],
            Some(texts) => texts.good[2],
            None if old.is_none() => continue,
            None if holds => "NodeReady",
            None => "NodeNotReady",
        };
        let message = format!("Node {node} status is now: {reason}");
        events.push(NodeEvent { warning: false, reason, message });
    }
    events
}

/// The events of a Node whose conditions the node controller has set to `Unknown`, as it does with a silent node: such a
/// condition changes with the next write. If the condition did not change here, no other event reports the recovery; if it did,
/// that event is recorded already. `recorded_at` returns when a message was last recorded here, in seconds since 1970-01-01 UTC.
pub fn recovery_events(
    node: &str,
    on_server: &[NodeCondition],
    here: &[NodeCondition],
    recorded_at: impl Fn(&str) -> Option<i64>,
) -> Vec<NodeEvent> {
    let given_up = on_server.iter().filter(|condition| condition.status == "Unknown");
    let mut events = Vec::new();
    for old in given_up {
        let Some(now) = here.iter().find(|condition| condition.type_ == old.type_) else { continue };
        let since = old.last_transition_time.as_deref().and_then(|time| parse_seconds(time).ok());
        let is_recorded =
            |message: &str| recorded_at(message).is_some_and(|at| since.is_some_and(|since| at >= since));
        let changes = condition_events(node, from_ref(old), from_ref(now)).into_iter();
        events.extend(changes.filter(|event| !is_recorded(&event.message)));
    }
    events
}

/// The event of a Node that was cordoned (`spec.unschedulable`) or uncordoned.
pub fn schedulable_event(node: &str, before: bool, now: bool) -> Option<NodeEvent> {
    let reason = if now { "NodeNotSchedulable" } else { "NodeSchedulable" };
    let message = format!("Node {node} status is now: {reason}");
    (before != now).then_some(NodeEvent { warning: false, reason, message })
}

/// The event of a start of the agent, once per start. A start is identified by the time at which its configuration was resolved,
/// unix nanoseconds; 0 is unknown.
pub fn starting_event(before: i64, now: i64) -> Option<NodeEvent> {
    (now != 0 && now != before).then(|| NodeEvent {
        warning: false,
        reason: "Starting",
        message: "Starting kubelet.".to_owned(),
    })
}

/// The event of a new boot, once per boot: when the machine's boot id is known, was known before and differs.
pub fn rebooted_event(node: &str, before: &str, now: &str) -> Option<NodeEvent> {
    (!before.is_empty() && !now.is_empty() && before != now).then(|| NodeEvent {
        warning: true,
        reason: "Rebooted",
        message: format!("Node {node} has been rebooted, boot id: {now}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn condition(type_: &str, status: &str) -> NodeCondition {
        NodeCondition {
            type_: type_.into(),
            status: status.into(),
            last_transition_time: Some("2026-01-01T00:00:10Z".into()),
            ..NodeCondition::default()
        }
    }

    /// Reasons of the events of a Node whose conditions are good here.
    fn reasons(on_server: &[NodeCondition], recorded_at: impl Fn(&str) -> Option<i64>) -> Vec<&'static str> {
        let here = [condition("DiskPressure", "False"), condition("Ready", "True")];
        let events = recovery_events("n", on_server, &here, recorded_at);
        for event in &events {
            assert_eq!(event.message, format!("Node n status is now: {}", event.reason));
        }
        events.into_iter().map(|event| event.reason).collect()
    }

    #[test]
    fn a_condition_that_was_unknown_has_a_recovery_event_and_others_have_none() {
        let never = |_: &str| None;
        let unknown = |type_| condition(type_, "Unknown");
        assert_eq!(reasons(&[unknown("Ready")], never), ["NodeReady"]);
        let all = [unknown("NetworkUnavailable"), unknown("DiskPressure"), unknown("Ready")];
        assert_eq!(reasons(&all, never), ["NodeHasNoDiskPressure", "NodeReady"]);
        for status in ["True", "False", ""] {
            assert!(reasons(&[condition("Ready", status)], never).is_empty(), "{status:?}");
        }
        let not_ready = [condition("Ready", "False")];
        let event = recovery_events("n", &[unknown("Ready")], &not_ready, never).remove(0);
        assert_eq!(event.message, "Node n status is now: NodeNotReady");
    }

    #[test]
    fn a_recovery_that_is_recorded_already_has_no_second_event() {
        let given_up = condition("Ready", "Unknown");
        let since = parse_seconds("2026-01-01T00:00:10Z").unwrap();
        for (recorded, expected) in [(since - 1, &["NodeReady"][..]), (since, &[]), (since + 1, &[])] {
            let recorded_at = |message: &str| message.ends_with("NodeReady").then_some(recorded);
            assert_eq!(reasons(std::slice::from_ref(&given_up), recorded_at), expected, "{recorded}");
        }
        let timeless = NodeCondition { last_transition_time: None, ..given_up };
        assert_eq!(reasons(&[timeless], |_| Some(since)), ["NodeReady"]);
    }
}
