//! Records events of the Node, and stores its conditions for the next turn and the next start.

use keelson_kube_model::Node;
use keelson_node_status_core::{NodeEvent, condition_events, rebooted_event, starting_event};
use keelson_service_kit::{NewEvent, ObjectRef};

use super::NodeLoop;

impl NodeLoop {
    /// Records that the agent has started, unless an earlier node-status of the same start has done so.
    pub(super) fn record_start(&self) {
        let now = self.ctx.config.resolved_unix_nanos;
        let before = self.checkpoint.borrow().agent_start;
        if let Some(event) = starting_event(before, now) {
            self.record(&self.ctx.config.node_name, event);
            self.checkpoint.send_modify(|checkpoint| checkpoint.agent_start = now);
        }
    }

    /// Records events of what has changed, and stores the conditions for the next turn and the next start.
    pub(super) fn record_changes(&mut self, node: &Node) {
        let name = &node.metadata.name;
        let boot_id = &node.status.node_info.boot_id;
        let before = self.checkpoint.borrow().boot_id.clone();
        let reboot = rebooted_event(name, &before, boot_id);
        for event in
            condition_events(name, &self.conditions, &node.status.conditions).into_iter().chain(reboot)
        {
            self.record(name, event);
        }
        self.conditions.clone_from(&node.status.conditions);
        let mut lasting = self.conditions.clone();
        for condition in &mut lasting {
            condition.last_heartbeat_time = None;
        }
        self.checkpoint.send_if_modified(|checkpoint| {
            let changed =
                checkpoint.conditions != lasting || (!boot_id.is_empty() && checkpoint.boot_id != *boot_id);
            checkpoint.conditions = lasting;
            if !boot_id.is_empty() {
                checkpoint.boot_id.clone_from(boot_id);
            }
            changed
        });
    }

    fn record(&self, node: &str, event: NodeEvent) {
        if event.reason == "NodeNotReady" {
            tracing::warn!(node, "{}", event.message);
        } else {
            tracing::info!(node, "{}", event.message);
        }
        self.ctx.events.record(NewEvent {
            warning: event.warning,
            reason: event.reason.to_owned(),
            message: event.message,
            object: ObjectRef::node(node),
        });
    }
}
