//! The loop that records an event when the Node is cordoned or uncordoned (node-and-api.md §9.5).

use std::sync::Arc;

use keelson_config::ServiceName;
use keelson_node_status_core::schedulable_event;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_service_kit::{Context, LoopHandle, NewEvent, ObjectRef, Signal, follow};
use serde::Deserialize;
use tokio::sync::watch;

use crate::checkpoint::Checkpoint;

/// Follows the API server's Node, as pod-config streams it, until the shutdown.
pub(crate) async fn run(ctx: Context, checkpoint: Arc<watch::Sender<Checkpoint>>) {
    let handle = ctx.progress.register("cordon");
    let peer = ctx.peer(ServiceName::PodConfig);
    let name = peer.name().to_owned();
    let open = move || {
        let mut client = PodConfigClient::new(peer.channel());
        async move { client.watch_node(pb::WatchNodeRequest {}).await }
    };
    let own = ctx.clone();
    let on = async move |signal: Signal<pb::WatchNodeResponse>| {
        if let Signal::Message(node) = signal {
            record_change(&own, &checkpoint, &node);
        }
    };
    let stream = follow(&name, &ctx.progress, &ctx.shutdown, open, on);
    tokio::pin!(stream);
    loop {
        handle.tick();
        // Cancel-safe: `stream` is pinned outside.
        tokio::select! {
            () = &mut stream => return,
            () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
        }
    }
}

// Only this field is decoded.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Node {
    spec: Spec,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Spec {
    unschedulable: Option<bool>,
}

/// Records a change, also one that happened while this service was down.
fn record_change(ctx: &Context, checkpoint: &watch::Sender<Checkpoint>, node: &pb::WatchNodeResponse) {
    // A Node that is not registered is pod-config's own: nobody can have cordoned it.
    if !node.registered {
        return;
    }
    let Ok(Node { spec }) = serde_json::from_slice(&node.node_json) else { return };
    let now = spec.unschedulable.unwrap_or_default();
    let before = checkpoint.borrow().unschedulable;
    let Some(event) = schedulable_event(&ctx.config.node_name, before, now) else { return };
    tracing::info!(node = ctx.config.node_name, "{}", event.message);
    ctx.events.record(NewEvent {
        warning: event.warning,
        reason: event.reason.to_owned(),
        message: event.message,
        object: ObjectRef::node(&ctx.config.node_name),
    });
    checkpoint.send_modify(|checkpoint| checkpoint.unschedulable = now);
}

#[cfg(test)]
mod tests {
    use keelson_config::Config;
    use keelson_proto::keelson::events::v1::ListEventsRequest;
    use keelson_proto::keelson::events::v1::events_server::Events as _;
    use tonic::Request;

    use super::*;

    async fn recorded(ctx: &Context) -> Vec<(String, String, String)> {
        let answer = ctx.events.list_events(Request::new(ListEventsRequest::default())).await.unwrap();
        let events = answer.into_inner().events.into_iter();
        events.map(|event| (event.r#type, event.reason, event.message)).collect()
    }

    #[tokio::test]
    async fn cordon_and_uncordon_are_events_also_over_a_restart() {
        let context = || {
            Context::detached(ServiceName::NodeStatus, Config { node_name: "n1".into(), ..Config::default() })
        };
        let (ctx, checkpoint) = (context(), watch::Sender::new(Checkpoint::default()));
        let observe = |ctx: &Context, registered: bool, node: &str| {
            let node_json = node.as_bytes().to_vec();
            record_change(ctx, &checkpoint, &pb::WatchNodeResponse { node_json, registered });
        };
        for node in [r#"{"spec": {}}"#, "{}", r#"{"spec": {"unschedulable": null}}"#] {
            observe(&ctx, true, node);
        }
        assert!(recorded(&ctx).await.is_empty());
        observe(&ctx, false, r#"{"spec": {"unschedulable": true}}"#);
        assert!(recorded(&ctx).await.is_empty(), "the Node is not registered");
        for _ in 0..2 {
            observe(&ctx, true, r#"{"spec": {"unschedulable": true}}"#);
        }
        let event = |reason: &str| {
            ("Normal".to_owned(), reason.to_owned(), format!("Node n1 status is now: {reason}"))
        };
        assert_eq!(recorded(&ctx).await, [event("NodeNotSchedulable")]);
        let restarted = context();
        observe(&restarted, true, r#"{"spec": {"unschedulable": true}}"#);
        assert!(recorded(&restarted).await.is_empty());
        observe(&restarted, true, "{}");
        assert_eq!(recorded(&restarted).await, [event("NodeSchedulable")]);
    }
}
