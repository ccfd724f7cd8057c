//! What resource-manager says about the machine and runtime-shim about the runtime and its images.

use std::collections::BTreeMap;
use std::future::ready;
use std::sync::Arc;

use keelson_config::ServiceName;
use keelson_kube_model::ContainerImage;
use keelson_node_status_core::{Machine, RuntimeHandler, RuntimeState};
use keelson_proto::keelson::resource_manager::v1 as rm;
use keelson_proto::keelson::resource_manager::v1::resource_manager_client::ResourceManagerClient;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
use keelson_proto::keelson::runtime::v1::watch_pods_response::Item;
use keelson_service_kit::{Context, LoopHandle, Signal, follow};
use tokio::sync::watch;

use crate::images::{self, Images};
use crate::neighbours::Clock;

/// The last word of both. It stands while they are away: whether they are is the watchdog's question.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct World {
    pub(crate) machine: Option<Machine>,
    pub(crate) runtime: Option<RuntimeState>,
    /// Since when runtime-shim has had no answer of the runtime, after it had one before.
    pub(crate) runtime_unknown_since_ms: Option<u64>,
    /// What the Node lists of the runtime's images; `None` before they were asked for. Only the first list wakes those
    /// who watch.
    pub(crate) images: Option<Arc<[ContainerImage]>>,
}

impl World {
    /// Takes a state of the runtime. While the runtime does not answer, or a restarted runtime-shim has not
    /// asked it yet, its last answer stands; only since when is remembered.
    pub(crate) fn take_runtime(&mut self, state: RuntimeState, now_ms: u64) {
        let unknown = state.unreachable || state.name.is_empty();
        if unknown && self.runtime.as_ref().is_some_and(|known| !known.name.is_empty()) {
            self.runtime_unknown_since_ms.get_or_insert(now_ms);
        } else {
            self.runtime = Some(state);
            self.runtime_unknown_since_ms = None;
        }
    }
}

/// Follows both until the shutdown, and asks for the images.
pub(crate) async fn run(ctx: Context, clock: Clock, world: watch::Sender<World>) {
    let handle = ctx.progress.register("inputs");
    let world = Arc::new(world);
    // Cancel-safe: each arm runs until the shutdown and holds nothing that outlives it.
    tokio::select! {
        () = follow_machine(&ctx, Arc::clone(&world)) => {}
        () = follow_runtime(&ctx, clock, Arc::clone(&world)) => {}
        () = images::run(&ctx, Images::new(&ctx), world) => {}
        () = beat(handle) => {}
    }
}

/// Nothing here can be caught in work of its own, so it is enough that the task is woken.
async fn beat(handle: LoopHandle) {
    loop {
        handle.tick();
        tokio::time::sleep(LoopHandle::HEARTBEAT).await;
    }
}

async fn follow_machine(ctx: &Context, world: Arc<watch::Sender<World>>) {
    let peer = ctx.peer(ServiceName::ResourceManager);
    let name = peer.name().to_owned();
    let open = move || {
        let mut client = ResourceManagerClient::new(peer.channel());
        async move { client.watch_machine(rm::WatchMachineRequest {}).await }
    };
    let on = move |signal: Signal<rm::Machine>| {
        if let Signal::Message(message) = signal {
            let machine = Some(machine_of(message));
            world.send_if_modified(|world| {
                let changed = world.machine != machine;
                world.machine = machine;
                changed
            });
        }
        ready(())
    };
    follow(&name, &ctx.progress, &ctx.shutdown, open, on).await;
}

async fn follow_runtime(ctx: &Context, clock: Clock, world: Arc<watch::Sender<World>>) {
    let peer = ctx.peer(ServiceName::RuntimeShim);
    let name = peer.name().to_owned();
    let open = move || {
        let mut client = RuntimeClient::new(peer.channel());
        async move { client.watch_pods(rt::WatchPodsRequest::default()).await }
    };
    let on = move |signal: Signal<rt::WatchPodsResponse>| {
        // Everything but the runtime's own state passes by unread.
        if let Signal::Message(rt::WatchPodsResponse { item: Some(Item::State(state)) }) = signal {
            world.send_if_modified(|world| {
                let before = world.clone();
                world.take_runtime(runtime_of(state), clock.now_ms());
                *world != before
            });
        }
        ready(())
    };
    follow(&name, &ctx.progress, &ctx.shutdown, open, on).await;
}

fn machine_of(message: rm::Machine) -> Machine {
    let sorted = |map: std::collections::HashMap<String, i64>| map.into_iter().collect::<BTreeMap<_, _>>();
    Machine {
        capacity: sorted(message.capacity),
        allocatable: sorted(message.allocatable),
        memory_pressure: message.memory_pressure,
        disk_pressure: message.disk_pressure,
        pid_pressure: message.pid_pressure,
        machine_id: message.machine_id,
        system_uuid: message.system_uuid,
        boot_id: message.boot_id,
        kernel_version: message.kernel_version,
        os_image: message.os_image,
        architecture: message.architecture,
        swap: message.swap_bytes,
    }
}

fn runtime_of(message: rt::RuntimeState) -> RuntimeState {
    RuntimeState {
        name: message.name,
        version: message.version,
        ready: message.ready,
        network_ready: message.network_ready,
        message: message.message,
        unreachable: message.unreachable,
        handlers: message.handlers.into_iter().map(handler_of).collect(),
        supplemental_groups_policy: message.supplemental_groups_policy,
    }
}

fn handler_of(message: rt::RuntimeHandler) -> RuntimeHandler {
    RuntimeHandler {
        name: message.name,
        recursive_read_only_mounts: message.recursive_read_only_mounts,
        user_namespaces: message.user_namespaces,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(name: &str, ready: bool, unreachable: bool) -> RuntimeState {
        let name = name.to_owned();
        RuntimeState { name, ready, network_ready: ready, unreachable, ..RuntimeState::default() }
    }

    #[test]
    fn the_last_answer_of_the_runtime_stands_while_nobody_can_ask_it() {
        let (good, bad) = (state("containerd", true, false), state("containerd", false, false));
        let (away, unasked) = (state("containerd", false, true), state("", false, false));
        let mut world = World::default();
        for (now, taken, stands, since) in [
            (0, &unasked, &unasked, None),
            (1, &good, &good, None),
            (2, &unasked, &good, Some(2)),
            (3, &away, &good, Some(2)),
            (4, &bad, &bad, None),
            (5, &away, &bad, Some(5)),
            (6, &good, &good, None),
        ] {
            world.take_runtime(taken.clone(), now);
            assert_eq!(world.runtime.as_ref(), Some(stands), "at {now}");
            assert_eq!(world.runtime_unknown_since_ms, since, "at {now}");
        }
    }
}
