//! Conversion of orders to wire types.

use std::sync::Arc;

use keelson_proto::keelson::common::v1::{PodRef, Synced};
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_resource_manager_core::eviction::order::{Order, OrderKind};
use keelson_service_kit::WatchItem;

/// Converts a change of the orders.
pub(crate) fn watch_response(item: WatchItem<String, Arc<Order>>) -> pb::WatchEvictionsResponse {
    use pb::watch_evictions_response::Item;
    let item = match item {
        WatchItem::Set(_, order) => Item::Eviction(eviction(&order)),
        WatchItem::Gone(uid) => Item::GoneUid(uid),
        WatchItem::Synced => Item::Synced(Synced {}),
    };
    pb::WatchEvictionsResponse { item: Some(item) }
}

fn eviction(order: &Order) -> pb::Eviction {
    let pod = &order.pod;
    pb::Eviction {
        pod: Some(PodRef { uid: pod.uid.clone(), namespace: pod.namespace.clone(), name: pod.name.clone() }),
        reason: order.reason.clone(),
        message: order.message.clone(),
        grace_period_seconds: order.grace_seconds,
        condition_type: "DisruptionTarget".to_owned(),
        condition_reason: "TerminationByKubelet".to_owned(),
        condition_message: order.condition_message.clone(),
        since_unix_nanos: order.since_unix_nanos,
        signal: order.signal.clone(),
        node_shutdown: order.kind() == OrderKind::NodeShutdown,
        node_drain: order.kind() == OrderKind::NodeDrain,
    }
}
