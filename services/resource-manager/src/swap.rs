//! Warns once at startup when memory-backed volumes may be swapped out to disk.

use std::fs;

use keelson_resource_manager_core::swap::SwapFacts;
use keelson_service_kit::{Context, ObjectRef};

const REASON: &str = "PossibleMemoryBackedVolumesOnDisk";
const TEXT: &str = "This machine has swap and its kernel cannot keep a tmpfs out of it (noswap): volumes in memory, such as \
                    Secrets and emptyDirs of the medium Memory, may be written to the disk; turn swap off, or use a kernel \
                    from 6.4 on";

/// The swap facts of this machine. The files are in procfs, so reads do not block.
fn read_facts() -> SwapFacts {
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    SwapFacts {
        swaps: read("/proc/swaps"),
        release: rustix::system::uname().release().to_string_lossy().into_owned(),
        uid_map: read("/proc/self/uid_map"),
    }
}

/// Logs a warning and records a node event if memory-backed volumes may reach a disk.
pub(crate) fn warn_about_volumes(ctx: &Context) {
    warn(ctx, &read_facts());
}

fn warn(ctx: &Context, facts: &SwapFacts) {
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
    async fn memory_backed_volumes_that_may_be_swapped_out_record_a_node_event() {
        let config = Config { node_name: "n1".into(), ..Config::default() };
        let ctx = Context::detached(ServiceName::ResourceManager, config);
        let swaps = "Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2\n".to_owned();
        let facts = |release: &str| SwapFacts {
            swaps: swaps.clone(),
            release: release.into(),
            ..SwapFacts::default()
        };
        warn(&ctx, &facts("6.4.0"));
        warn(&ctx, &facts("6.1.0"));
        let request = tonic::Request::new(ListEventsRequest::default());
        let events = ctx.events.list_events(request).await.unwrap().into_inner().events;
        let [event] = &events[..] else { panic!("{events:?}") };
        assert_eq!((&*event.r#type, &*event.reason), ("Warning", "PossibleMemoryBackedVolumesOnDisk"));
        assert_eq!((&*event.kind, &*event.name, event.count), ("Node", "n1", 1));
        assert!(event.message.contains("noswap"), "{}", event.message);
    }

    #[test]
    fn swap_facts_are_read_from_this_machine() {
        let facts = read_facts();
        assert!(!facts.release.is_empty() && !facts.uid_map.is_empty(), "{facts:?}");
    }
}
