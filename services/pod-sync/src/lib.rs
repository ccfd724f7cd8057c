//! pod-sync makes the desired pods run.
//!
//! Each UID has one worker, whose turns ask the core (`keelson-pod-sync-core`) what to do and carry it out. The modules are layers; each uses only
//! those before it:
//!
//! 1. [`node`]: facts about the node; [`error`].
//! 2. [`state`]: the pods, and what the other services are to hold of them.
//! 3. [`publish`]: status, events, metrics, and the documents that others watch.
//! 4. [`effects`]: calls of other services and of the runtime, hooks, requests of probes.
//! 5. [`turn`]: the workers.
//! 6. [`inputs`]: the streams and requests that set pods in motion.
//!
//! Truth is the runtime and the sources. pod-sync itself stores one small file per pod ([`state::store`]). After a restart it reads
//! everything, adopts what runs, and only then acts.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them"))]

pub mod effects;
pub mod error;
pub mod inputs;
pub mod node;
pub mod publish;
pub mod state;
pub mod turn;

use std::sync::Arc;

use keelson_config::ServiceName;
use keelson_pod_sync_core::worker::WorkerPhase;
use keelson_proto::keelson::pod_sync::v1::pod_sync_server;
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, ObjectRef};
use tonic::Request;
use tonic::service::Routes;

use crate::effects::Effects;
use crate::effects::convert::read_resolv_conf;
use crate::inputs::evictions::EvictionOrders;
use crate::inputs::server::PodSyncServer;
use crate::inputs::sources::Sources;
use crate::inputs::{evictions, machine, pod_cidr, streams};
use crate::publish::metrics::census;
use crate::state::registry::PodRegistry;
use crate::state::store::Store;
use crate::turn::{lifecycle, resize};

/// Builds the service and starts its loops.
///
/// # Errors
/// None at present: everything that fails is retried.
pub async fn build(context: Context) -> anyhow::Result<Routes> {
    let state_dir = context.config.paths.state(ServiceName::PodSync);
    let store = match Store::open(&state_dir) {
        Ok(store) => Some(store),
        Err(error) => {
            context.progress.condition("state folder", Err(chain(&error)));
            None
        }
    };
    let boot_id = node::boot_id(&context.config.resources.identity_files);
    let records = store.as_ref().map(|store| store.load_in_boot(&boot_id)).unwrap_or_default();
    let effects = Effects::new(context.clone(), store);
    census::register(&effects.registry, &context.metrics);
    for record in records {
        effects.registry.restore(record);
    }
    resume_ends(&effects);
    spawn_loops(&context, &effects);
    Ok(Routes::new(pod_sync_server::PodSyncServer::new(PodSyncServer { effects })))
}

/// Continues to end the pods that an earlier process was ending, even if their sources send them again.
fn resume_ends(effects: &Arc<Effects>) {
    let registry = &effects.registry;
    for uid in registry.uids() {
        let ending = registry.read(&uid, |state| {
            let is_ending = state.worker.phase != WorkerPhase::Sync;
            is_ending
                .then(|| (state.worker.phase, state.desired.as_ref().map(|desired| Arc::clone(&desired.pod))))
        });
        let Some(Some((phase, pod))) = ending else { continue };
        if let Some(pod) = pod {
            if phase == WorkerPhase::Terminating {
                registry.adopt_name(&pod);
            }
            registry.update_desired_state(&uid);
        }
        lifecycle::begin_worker(effects, &uid);
    }
}

/// An event of the node if pods do not get everything that its resolv.conf contains.
fn check_resolv_conf(context: &Context) {
    let runtime = &context.config.runtime;
    if let Some(excess) = read_resolv_conf(&runtime.resolv_conf).excess(&runtime.cluster_domain) {
        let text = format!("resolv.conf file {} is cut for pods: {excess}", runtime.resolv_conf);
        context.events.warning(ObjectRef::node(&context.config.node_name), "CheckLimitsForResolvConf", text);
    }
}

fn spawn_loops(context: &Context, effects: &Arc<Effects>) {
    check_resolv_conf(context);
    let orders = Arc::new(EvictionOrders::default());
    let sources = Arc::new(Sources::new(Arc::clone(&orders)));
    context.spawn("desired pods", streams::follow_desired(Arc::clone(effects), Arc::clone(&sources)));
    context.spawn("machine", machine::follow_machine(Arc::clone(effects)));
    context.spawn("node", machine::follow_node(Arc::clone(effects)));
    context.spawn("pod CIDR", pod_cidr::follow(Arc::clone(effects)));
    context.spawn("resizes", resize::follow(Arc::clone(effects)));
    context.spawn("evictions", evictions::follow(Arc::clone(effects), orders));
    context.spawn("volumes of the machine", machine::follow_allocatable(Arc::clone(effects)));
    context.spawn("observations", streams::follow_runtime(Arc::clone(effects), sources));
    let progress = context.progress.register("pod workers");
    context.spawn("heartbeat", streams::heartbeat(Arc::clone(effects), progress, gauges(context, effects)));

    let clients = effects.clients.clone();
    let runtime = effects.registry.desired_state.sets.runtime.clone().run(
        context.clone(),
        "runtime-shim",
        move |messages| {
            let mut client = clients.runtime();
            async move { client.sync(Request::new(messages)).await }
        },
    );
    context.spawn("runtime sync", runtime);
    let clients = effects.clients.clone();
    let volumes = effects.registry.desired_state.sets.volumes.clone().run(
        context.clone(),
        "volume-manager",
        move |messages| {
            let mut client = clients.volumes();
            async move { client.sync(Request::new(messages)).await }
        },
    );
    context.spawn("volume sync", volumes);
    let clients = effects.clients.clone();
    let resources = effects.registry.desired_state.sets.resources.clone().run(
        context.clone(),
        "resource-manager",
        move |messages| {
            let mut client = clients.resources();
            async move { client.sync(Request::new(messages)).await }
        },
    );
    context.spawn("resource sync", resources);
}

/// Updates the gauges of pod workers, by phase.
fn gauges(context: &Context, effects: &Arc<Effects>) -> impl Fn(&PodRegistry) + Send + use<> {
    use prometheus_client::encoding::EncodeLabelSet;
    use prometheus_client::metrics::family::Family;
    use prometheus_client::metrics::gauge::Gauge;

    #[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
    struct Phase {
        phase: &'static str,
    }
    let workers: Family<Phase, Gauge> = Family::default();
    context.metrics.register("keelson_pod_sync_workers", "Pod workers, by phase", workers.clone());
    let resizes = effects.publisher.metrics.resizes.clone();
    move |registry| {
        resizes.count(registry);
        let counts = registry.phases();
        for phase in ["sync", "terminating", "terminated", "finished"] {
            workers.get_or_create(&Phase { phase }).set(counts.get(phase).copied().unwrap_or(0));
        }
    }
}
