//! The events of a Node that the node controller had set to `Unknown`, when it is back.

use std::collections::BTreeMap;

use keelson_kube_model::NodeCondition;
use keelson_node_status_core::recovery_events;
use keelson_proto::keelson::events::v1::ListEventsRequest;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_service_kit::{Context, NewEvent, ObjectRef};
use serde_json::Value;
use tonic::Request;

/// Records events of the conditions that were `Unknown` at the server's Node before, except those that were recorded here since.
pub(super) async fn record_events(ctx: &Context, before: &Value, ours: &Value) {
    let (before, ours) = (conditions(before), conditions(ours));
    if before.iter().all(|condition| condition.status != "Unknown") {
        return;
    }
    let recorded = recorded_at(ctx).await;
    let node = &ctx.config.node_name;
    for event in recovery_events(node, &before, &ours, |message| recorded.get(message).copied()) {
        tracing::info!(node, "{}", event.message);
        ctx.events.record(NewEvent {
            warning: event.warning,
            reason: event.reason.to_owned(),
            message: event.message,
            object: ObjectRef::node(node),
        });
    }
}

fn conditions(node: &Value) -> Vec<NodeCondition> {
    let all = node["status"]["conditions"].as_array().into_iter().flatten();
    all.filter_map(|condition| serde_json::from_value(condition.clone()).ok()).collect()
}

/// When each event of the node was last recorded, by message, in seconds since 1970.
async fn recorded_at(ctx: &Context) -> BTreeMap<String, i64> {
    let answer = ctx.events.list_events(Request::new(ListEventsRequest::default())).await;
    let all = answer.map(|answer| answer.into_inner().events).unwrap_or_default();
    let of_node = all.into_iter().filter(|event| event.kind == "Node");
    of_node.map(|event| (event.message, event.last_unix_nanos / 1_000_000_000)).collect()
}

#[cfg(test)]
mod tests {
    use keelson_config::{Config, ServiceName};
    use keelson_kube_model::time::format_seconds;
    use keelson_service_kit::now_unix_nanos;
    use serde_json::json;

    use super::*;

    fn node(status: &str, since: &str) -> Value {
        json!({"status": {"conditions": [{"type": "Ready", "status": status, "lastTransitionTime": since}]}})
    }

    #[tokio::test]
    async fn a_recovered_node_has_one_node_ready_event() {
        let config = || Config { node_name: "n1".into(), ..Config::default() };
        let ready = "Node n1 status is now: NodeReady";
        let now = now_unix_nanos() / 1_000_000_000;
        let hour_ago = format_seconds(now - 3600).unwrap();
        for (status, noticed_here, expected) in [
            ("Unknown", false, Some(1)),
            // The node loop has recorded the change itself: the node was not ready meanwhile.
            ("Unknown", true, Some(1)),
            ("True", false, None),
            ("False", false, None),
        ] {
            let ctx = Context::detached(ServiceName::NodeStatus, config());
            if noticed_here {
                ctx.events.normal(ObjectRef::node("n1"), "NodeReady", ready);
            }
            record_events(&ctx, &node(status, &hour_ago), &node("True", &hour_ago)).await;
            let answer = ctx.events.list_events(Request::new(ListEventsRequest::default())).await.unwrap();
            let events = answer.into_inner().events;
            let count = events.iter().find(|event| event.message == ready).map(|event| event.count);
            assert_eq!(count, expected, "{status} {noticed_here}");
        }
    }
}
