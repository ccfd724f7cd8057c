//! Says once at the start when what pods keep in memory may be written to a disk.

use std::fs;

use keelson_resource_manager_core::swap::SwapFacts;
use keelson_service_kit::{Context, ObjectRef};

const REASON: &str = "PossibleMemoryBackedVolumesOnDisk";
const TEXT: &str = "This machine has swap and its kernel cannot keep a tmpfs out of it (noswap): volumes in memory, such as \
                    Secrets and emptyDirs of the medium Memory, may be written to the disk; turn swap off, or use a kernel \
                    from 6.4 on";

/// What this machine says of its swap. The files are the kernel's own and read at once.
fn look() -> SwapFacts {
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    SwapFacts {
        swaps: read("/proc/swaps"),
        release: rustix::system::uname().release().to_string_lossy().into_owned(),
        uid_map: read("/proc/self/uid_map"),
    }
}

/// An event of the node, where that is so.
pub(crate) fn tell(ctx: &Context) {
    tell_of(ctx, &look());
}

fn tell_of(ctx: &Context, facts: &SwapFacts) {
    if facts.volumes_may_reach_disk() {
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
    async fn the_node_is_told_of_volumes_that_may_reach_the_disk() {
        let config = Config { node_name: "n1".into(), ..Config::default() };
        let ctx = Context::detached(ServiceName::ResourceManager, config);
        let swaps = "Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2\n".to_owned();
        let facts = |release: &str| SwapFacts {
            swaps: swaps.clone(),
            release: release.into(),
            ..SwapFacts::default()
        };
        tell_of(&ctx, &facts("6.4.0"));
        tell_of(&ctx, &facts("6.1.0"));
        let request = tonic::Request::new(ListEventsRequest::default());
        let events = ctx.events.list_events(request).await.unwrap().into_inner().events;
        let [event] = &events[..] else { panic!("{events:?}") };
        assert_eq!((&*event.r#type, &*event.reason), ("Warning", "PossibleMemoryBackedVolumesOnDisk"));
        assert_eq!((&*event.kind, &*event.name, event.count), ("Node", "n1", 1));
        assert!(event.message.contains("noswap"), "{}", event.message);
    }

    #[test]
    fn this_machine_says_which_kernel_it_has() {
        let facts = look();
        assert!(!facts.release.is_empty() && !facts.uid_map.is_empty(), "{facts:?}");
    }
}
