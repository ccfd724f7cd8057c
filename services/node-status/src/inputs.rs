//! The inputs from other services: the machine from resource-manager, the runtime and its images from runtime-shim, the volumes
//! in use and the CSI drivers from volume-manager.

use std::collections::{BTreeMap, BTreeSet};
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use keelson_config::ServiceName;
use keelson_node_status_core::{CsiDriver, CsiDrivers, Machine, RuntimeHandler, RuntimeState};
use keelson_proto::keelson::resource_manager::v1 as rm;
use keelson_proto::keelson::resource_manager::v1::resource_manager_client::ResourceManagerClient;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
use keelson_proto::keelson::runtime::v1::watch_pods_response::Item;
use keelson_proto::keelson::volume_manager::v1 as vm;
use keelson_proto::keelson::volume_manager::v1::volume_manager_client::VolumeManagerClient;
use keelson_service_kit::{Context, LoopHandle, Signal, follow};
use tokio::sync::watch;
use tonic::{Code, Status};

use crate::images::{self, CriImages};
use crate::observed_state::ObservedState;
use crate::peer_health::Clock;

/// Follows all until the shutdown, and lists the images.
pub(crate) async fn run(ctx: Context, clock: Clock, observed: watch::Sender<ObservedState>) {
    let handle = ctx.progress.register("inputs");
    let observed = Arc::new(observed);
    // Cancel-safe: each arm runs until the shutdown and holds nothing that outlives it.
    tokio::select! {
        () = follow_machine(&ctx, Arc::clone(&observed)) => {}
        () = follow_runtime(&ctx, clock, Arc::clone(&observed)) => {}
        () = follow_volumes_in_use(&ctx, Arc::clone(&observed)) => {}
        () = follow_csi_drivers(&ctx, Arc::clone(&observed)) => {}
        () = images::run(&ctx, CriImages::new(&ctx), observed) => {}
        () = heartbeat(handle) => {}
    }
}

/// No work here can block, so it is enough that a timer wakes the task.
async fn heartbeat(handle: LoopHandle) {
    loop {
        handle.tick();
        tokio::time::sleep(LoopHandle::HEARTBEAT).await;
    }
}

async fn follow_machine(ctx: &Context, observed: Arc<watch::Sender<ObservedState>>) {
    let peer = ctx.peer(ServiceName::ResourceManager);
    let name = peer.name().to_owned();
    let open = move || {
        let mut client = ResourceManagerClient::new(peer.channel());
        async move { client.watch_machine(rm::WatchMachineRequest {}).await }
    };
    let on = move |signal: Signal<rm::Machine>| {
        if let Signal::Message(message) = signal {
            let machine = Some(machine_of(message));
            observed.send_if_modified(|observed| {
                let changed = observed.machine != machine;
                observed.machine = machine;
                changed
            });
        }
        ready(())
    };
    follow(&name, &ctx.progress, &ctx.shutdown, open, on).await;
}

async fn follow_runtime(ctx: &Context, clock: Clock, observed: Arc<watch::Sender<ObservedState>>) {
    let peer = ctx.peer(ServiceName::RuntimeShim);
    let name = peer.name().to_owned();
    let open = move || {
        let mut client = RuntimeClient::new(peer.channel());
        async move { client.watch_pods(rt::WatchPodsRequest::default()).await }
    };
    let on = move |signal: Signal<rt::WatchPodsResponse>| {
        // Only the runtime's own state is used.
        if let Signal::Message(rt::WatchPodsResponse { item: Some(Item::State(state)) }) = signal {
            observed.send_if_modified(|observed| {
                let before = observed.clone();
                observed.store_runtime(runtime_of(state), clock.now_ms());
                *observed != before
            });
        }
        ready(())
    };
    follow(&name, &ctx.progress, &ctx.shutdown, open, on).await;
}

/// How often a volume-manager that does not know a call is asked again: it may have been upgraded.
const OLD_PEER_RETRY: Duration = Duration::from_secs(5);

/// Makes a call again until the peer knows it: a volume-manager of the release before does not. The API object keeps what it has
/// meanwhile.
async fn until_known<T>(mut call: impl AsyncFnMut() -> Result<T, Status>) -> Result<T, Status> {
    loop {
        let answer = call().await;
        let Err(Code::Unimplemented | Code::PermissionDenied) = answer.as_ref().map_err(Status::code) else {
            return answer;
        };
        tokio::time::sleep(OLD_PEER_RETRY).await;
    }
}

/// While volume-manager is down, its last list stays in effect.
async fn follow_volumes_in_use(ctx: &Context, observed: Arc<watch::Sender<ObservedState>>) {
    let peer = ctx.peer(ServiceName::VolumeManager);
    let name = peer.name().to_owned();
    let open = move || {
        let mut client = VolumeManagerClient::new(peer.channel());
        until_known(async move || client.watch_volumes_in_use(vm::WatchVolumesInUseRequest {}).await)
    };
    let on = move |signal: Signal<vm::WatchVolumesInUseResponse>| {
        if let Signal::Message(message) = signal {
            let names: BTreeSet<String> = message.names.into_iter().collect();
            let names: Option<Arc<[String]>> = Some(names.into_iter().collect());
            observed.send_if_modified(|observed| {
                let changed = observed.volumes_in_use != names;
                observed.volumes_in_use = names;
                changed
            });
        }
        ready(())
    };
    follow(&name, &ctx.progress, &ctx.shutdown, open, on).await;
}

/// While volume-manager is down, its last state stays in effect.
async fn follow_csi_drivers(ctx: &Context, observed: Arc<watch::Sender<ObservedState>>) {
    let peer = ctx.peer(ServiceName::VolumeManager);
    let name = peer.name().to_owned();
    let open = move || {
        let mut client = VolumeManagerClient::new(peer.channel());
        until_known(async move || client.watch_csi_drivers(vm::WatchCsiDriversRequest {}).await)
    };
    let on = move |signal: Signal<vm::WatchCsiDriversResponse>| {
        if let Signal::Message(message) = signal {
            let drivers = Arc::new(csi_drivers_of(message));
            observed.send_if_modified(|observed| {
                let changed = observed.csi_drivers != drivers;
                observed.csi_drivers = drivers;
                changed
            });
        }
        ready(())
    };
    follow(&name, &ctx.progress, &ctx.shutdown, open, on).await;
}

fn csi_drivers_of(message: vm::WatchCsiDriversResponse) -> CsiDrivers {
    let driver = |driver: vm::CsiDriver| {
        let topology = driver.topology.into_iter().collect();
        (driver.name, CsiDriver { node_id: driver.node_id, topology })
    };
    CsiDrivers {
        registered: message.registered.into_iter().map(driver).collect(),
        unregistered: message.unregistered.into_iter().collect(),
    }
}

fn machine_of(message: rm::Machine) -> Machine {
    let sorted = |map: std::collections::HashMap<String, i64>| map.into_iter().collect::<BTreeMap<_, _>>();
    Machine {
        capacity: sorted(message.capacity),
        allocatable: sorted(message.allocatable),
        memory_pressure: message.memory_pressure,
        disk_pressure: message.disk_pressure,
        pid_pressure: message.pid_pressure,
        shutting_down: message.shutting_down,
        drained: message.drained,
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
