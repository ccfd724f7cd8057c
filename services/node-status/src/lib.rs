//! node-status: tells the control plane about this node.
//!
//! It makes the Node object of what resource-manager and runtime-shim say and of whether the services make
//! progress, follows the pods of pod-sync, drains everybody's events, and hands all of it to one
//! [`ControlPlaneWriter`]. Standalone, that writer is [`NoControlPlane`]: it counts and forgets. With etcd alone it writes
//! below the node's keys, and the node's lease is an etcd lease.
//!
//! | loop | wakes | does |
//! |---|---|---|
//! | `inputs` | on news, every 30 s | follows `ResourceManager.WatchMachine` and `Runtime.WatchPods` (the runtime's own state only); asks for the images |
//! | `neighbours` | every 10 s; sooner while one is silent | `GetProgress` of the services that Ready depends on |
//! | `node` | on news, every 10 s | builds the Node, publishes and writes it |
//! | `pods` | on news | reports each changed pod status |
//! | `etcd-writer` | on reports | writes to etcd, where that is the control plane |
//! | `kubernetes-writer` | on reports | writes to the API server, where that is the control plane |
//! | `client-certificate`, `serving-certificate` | every second or 10 s, on answers | asks the API server for the node's certificates |
//! | `mirrors` | on news, every 10 s | follows the Node and the pods of the API at pod-config; has the Node and mirrors made again, and what others have changed of a status told again |
//! | `cordon` | on news | tells when the Node is cordoned, where an API server is the control plane |
//! | `node-configuration` | every 10 s | hands on what init tells of the configuration under the node's key, or without init that none is taken, where etcd is the control plane |
//! | `lease` | a quarter of the lease, 10 s at most; after a failure 200 ms to 7 s | renews the lease |
//! | `report` | every 10 s | drains events, saves its state |
//!
//! Nothing that it holds is needed to run pods. Its state file holds event cursors, the last conditions and the
//! boot id; without it some events are read twice and transition times begin anew.

mod cordon;
mod etcd;
mod images;
mod inputs;
mod kubernetes;
mod metrics;
mod neighbours;
mod node;
mod pods;
mod queue;
mod report;
mod saved;
mod server;
mod writer;

use std::sync::Arc;

use keelson_config::ControlPlane;
use keelson_proto::keelson::node_status::v1::node_status_server::NodeStatusServer;
use keelson_service_kit::{Context, is_kept_by_init};
use tokio::sync::{oneshot, watch};
use tonic::service::Routes;

use crate::etcd::EtcdWriter;
use crate::kubernetes::KubernetesWriter;

pub use writer::{ControlPlaneWriter, GonePods, NoControlPlane, PodReport, ReportState, WriteError};

/// Builds the service with the writer that the configuration asks for, and starts its loops.
///
/// # Errors
/// The state file was written by a newer release, or the state folder cannot be written.
pub async fn build(ctx: Context) -> anyhow::Result<Routes> {
    build_kept(ctx, is_kept_by_init()).await
}

/// The same, where it is said whether an init keeps the services of this node.
///
/// # Errors
/// As [`build`].
pub async fn build_kept(ctx: Context, is_kept_by_init: bool) -> anyhow::Result<Routes> {
    let writer: Arc<dyn ControlPlaneWriter> = match &ctx.config.control_plane {
        ControlPlane::None => Arc::new(NoControlPlane::new(&ctx.metrics)),
        ControlPlane::Etcd(settings) => EtcdWriter::start(&ctx, settings, is_kept_by_init)?,
        ControlPlane::Kubernetes(settings) => KubernetesWriter::start(&ctx, settings),
    };
    build_with(ctx, writer).await
}

/// Builds the service with any writer, and starts its loops.
///
/// # Errors
/// The state file was written by a newer release.
pub async fn build_with(ctx: Context, writer: Arc<dyn ControlPlaneWriter>) -> anyhow::Result<Routes> {
    let file = saved::state_file(&ctx.config);
    let stored = file.load().await?;
    let saved = Arc::new(watch::Sender::new(stored.clone()));
    let (world, world_seen) = watch::channel(inputs::World::default());
    let clock = neighbours::Clock::start();
    let (health, health_seen) = watch::channel(neighbours::watchdog());
    let (published, node) = watch::channel(None);

    let renewed = metrics::register(&ctx.metrics, &writer);

    ctx.spawn("inputs", inputs::run(ctx.clone(), clock, world));
    let peers = neighbours::Peers::new(&ctx, renewed.clone());
    ctx.spawn("neighbours", neighbours::run(ctx.clone(), clock, peers, health));
    let builder = node::NodeLoop::new(&ctx, clock, Arc::clone(&writer), Arc::clone(&saved));
    ctx.spawn("node", builder.run(world_seen, health_seen, published));
    ctx.spawn("pods", pods::run(ctx.clone(), Arc::clone(&writer)));
    let (tried, lease_tried) = oneshot::channel();
    ctx.spawn("lease", report::renew(ctx.clone(), Arc::clone(&writer), renewed, tried));
    if let ControlPlane::Kubernetes(_) = &ctx.config.control_plane {
        ctx.spawn("cordon", cordon::run(ctx.clone(), Arc::clone(&saved)));
    }
    let drain = report::Drain::new(&ctx, Arc::clone(&writer), saved);
    ctx.spawn("report", report::run(ctx.clone(), drain, file, stored, lease_tried));
    Ok(Routes::new(NodeStatusServer::new(server::Server { node, writer })))
}
