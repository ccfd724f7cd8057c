//! pod-sync makes the desired pods so.
//!
//! Two streams come in: desired pods from pod-config, observations from runtime-shim ([`manager`]). Each UID
//! has one worker ([`worker`]) whose turns ask the core what to do and carry it out: [`sync`] and [`start`] for
//! a pod that is to run, [`stop`] for one that ends. What runtime-shim, volume-manager and resource-manager are
//! to hold goes down as a set ([`desired`]). What others are shown comes from [`documents`] and the ledger of
//! each entry. Beside the workers run the probes of their containers ([`probes`]).
//!
//! Before the first container [`admission`] asks whether the pod may run here; [`evictions`] end pods for the node's
//! sake; the runtime is told of the addresses of pods (`pod_cidr`). [`metrics`] count both, what is started, ends and is probed, and measure the turns of the workers ([`news`]).
//!
//! A UID that is named anew waits until nothing of its earlier life is left ([`again`]); one whose worker panics is
//! set aside while the others go on ([`aside`]).
//!
//! Truth is the runtime and the sources. Of its own pod-sync keeps one small file per pod ([`store`]); after a
//! restart it reads everything, adopts what runs, and only then acts.

pub mod admission;
pub mod again;
pub mod agent;
pub mod aside;
pub mod clients;
mod cluster;
pub mod convert;
pub mod desired;
pub mod desires;
pub mod documents;
pub mod entry;
pub mod evictions;
pub mod hooks;
pub mod http;
mod identity;
pub mod images;
pub mod manager;
pub mod metrics;
pub mod news;
pub mod objects;
pub mod observed;
mod pod_cidr;
pub mod probes;
pub mod server;
mod shares;
pub mod start;
pub mod stop;
pub mod store;
pub mod sync;
pub mod volumes;
pub mod worker;

use std::sync::Arc;

use keelson_config::ServiceName;
use keelson_pod_sync_core::worker::WorkerPhase;
use keelson_proto::keelson::pod_sync::v1::pod_sync_server;
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, ObjectRef};
use tonic::Request;
use tonic::service::Routes;

use crate::agent::Agent;
use crate::manager::Sources;
use crate::store::Store;

/// Builds the service and starts its loops.
///
/// # Errors
/// None at present: what is missing is retried.
pub async fn build(context: Context) -> anyhow::Result<Routes> {
    let state_dir = context.config.paths.state(ServiceName::PodSync);
    let store = match Store::open(&state_dir) {
        Ok(store) => Some(store),
        Err(error) => {
            context.progress.condition("state folder", Err(chain(&error)));
            None
        }
    };
    let records = store.as_ref().map(Store::load).unwrap_or_default();
    let agent = Agent::new(context.clone(), store);
    metrics::census::register(&agent, &context.metrics);
    for record in records {
        agent.restore(record);
    }
    for uid in agent.uids() {
        // A pod that was ending goes on ending, whatever its source says now.
        let ending = agent.with(&uid, |e| e.state.phase != WorkerPhase::Sync);
        if ending == Some(true) {
            if let Some(Some(wanted)) = agent.with(&uid, |e| e.wanted.clone()) {
                let phase = agent.with(&uid, |e| e.state.phase).unwrap_or_default();
                if phase == WorkerPhase::Terminating {
                    agent.adopt_name(&wanted.pod);
                }
                agent.with(&uid, |entry| desires::want(&agent, entry));
            }
            agent.begin_worker(&uid);
        }
    }
    spawn_loops(&context, &agent);
    Ok(Routes::new(pod_sync_server::PodSyncServer::new(server::PodSyncServer { agent })))
}

/// Says once on the node when pods will not get all that its resolv.conf has.
fn check_resolv_conf(context: &Context) {
    let runtime = &context.config.runtime;
    if let Some(excess) = convert::read_resolv_conf(&runtime.resolv_conf).excess(&runtime.cluster_domain) {
        let text = format!("resolv.conf file {} is cut for pods: {excess}", runtime.resolv_conf);
        context.events.warning(ObjectRef::node(&context.config.node_name), "CheckLimitsForResolvConf", text);
    }
}

fn spawn_loops(context: &Context, agent: &Arc<Agent>) {
    check_resolv_conf(context);
    let sources = Arc::new(Sources::default());
    context.spawn("desired pods", manager::follow_desired(Arc::clone(agent), Arc::clone(&sources)));
    context.spawn("machine", manager::follow_machine(Arc::clone(agent)));
    context.spawn("node", manager::follow_node(Arc::clone(agent)));
    context.spawn("pod CIDR", pod_cidr::tell(Arc::clone(agent)));
    context.spawn("evictions", evictions::follow(Arc::clone(agent)));
    context.spawn("volumes of the machine", volumes::follow_allocatable(Arc::clone(agent)));
    context.spawn("observations", manager::follow_runtime(Arc::clone(agent), sources));
    let progress = context.progress.register("pod workers");
    context.spawn("heartbeat", manager::heartbeat(Arc::clone(agent), progress, gauges(context)));

    let clients = agent.clients.clone();
    let runtime = agent.desired.runtime.clone().run(context.clone(), "runtime-shim", move |messages| {
        let mut client = clients.runtime();
        async move { client.sync(Request::new(messages)).await }
    });
    context.spawn("runtime sync", runtime);
    let clients = agent.clients.clone();
    let volumes = agent.desired.volumes.clone().run(context.clone(), "volume-manager", move |messages| {
        let mut client = clients.volumes();
        async move { client.sync(Request::new(messages)).await }
    });
    context.spawn("volume sync", volumes);
    let clients = agent.clients.clone();
    let resources =
        agent.desired.resources.clone().run(context.clone(), "resource-manager", move |messages| {
            let mut client = clients.resources();
            async move { client.sync(Request::new(messages)).await }
        });
    context.spawn("resource sync", resources);
}

/// Counts pod workers by phase at each heartbeat.
fn gauges(context: &Context) -> impl Fn(&Agent) + Send + use<> {
    use prometheus_client::encoding::EncodeLabelSet;
    use prometheus_client::metrics::family::Family;
    use prometheus_client::metrics::gauge::Gauge;

    #[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
    struct Phase {
        phase: &'static str,
    }
    let workers: Family<Phase, Gauge> = Family::default();
    context.metrics.register("keelson_pod_sync_workers", "Pod workers, by phase", workers.clone());
    move |agent| {
        let counts = agent.phases();
        for phase in ["sync", "terminating", "terminated", "finished"] {
            workers.get_or_create(&Phase { phase }).set(counts.get(phase).copied().unwrap_or(0));
        }
    }
}
