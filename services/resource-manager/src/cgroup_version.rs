//! Warns once at startup about cgroup v1.

use keelson_resource_manager_core::hierarchy::Version;
use keelson_service_kit::{Context, ObjectRef};

const REASON: &str = "CgroupV1";
const TEXT: &str = "cgroup v1 support is in maintenance mode, please migrate to cgroup v2";

/// Logs a warning and records a node event on cgroup v1.
pub(crate) fn warn_on_v1(ctx: &Context, version: Version) {
    if version == Version::V1 {
        tracing::warn!("{TEXT}");
        ctx.events.warning(ObjectRef::node(&ctx.config.node_name), REASON, TEXT);
    }
}

#[cfg(test)]
mod tests {
    use keelson_config::{Config, ServiceName};
    use keelson_proto::keelson::events::v1::ListEventsRequest;
    use keelson_proto::keelson::events::v1::events_server::Events as _;

    use super::*;

    #[tokio::test]
    async fn cgroup_v1_records_one_node_event() {
        let config = Config { node_name: "n1".into(), ..Config::default() };
        let ctx = Context::detached(ServiceName::ResourceManager, config);
        warn_on_v1(&ctx, Version::V2);
        warn_on_v1(&ctx, Version::V1);
        let request = tonic::Request::new(ListEventsRequest::default());
        let events = ctx.events.list_events(request).await.unwrap().into_inner().events;
        let [event] = &events[..] else { panic!("{events:?}") };
        assert_eq!((&*event.r#type, &*event.reason, &*event.kind), ("Warning", "CgroupV1", "Node"));
        assert_eq!((&*event.name, &*event.message), ("n1", TEXT));
    }
}
