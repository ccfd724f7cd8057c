//! node-status: reports this node to the control plane.
//!
//! It builds the Node object from the reports of resource-manager, runtime-shim and volume-manager and from whether the services
//! make progress, follows the pods of pod-sync, drains the events of all services, and hands all of it to one
//! [`ControlPlaneWriter`]. Without a control plane, that writer is [`NoControlPlane`]: it counts and discards. With etcd alone it
//! writes below the node's keys, and the node's lease is an etcd lease.
//!
//! | loop | wakes | does |
//! |---|---|---|
//! | `inputs` | on changes, every 30 s | follows `ResourceManager.WatchMachine`, `VolumeManager.WatchVolumesInUse` and `Runtime.WatchPods` (the runtime's own state only); lists the images |
//! | `neighbours` | every 10 s; sooner while one does not answer | `GetProgress` of the services that Ready depends on |
//! | `node` | on changes, every 10 s | builds the Node, publishes and writes it |
//! | `pods` | on changes | reports each changed pod status |
//! | `etcd-writer` | on reports | writes to etcd, where that is the control plane |
//! | `kubernetes-writer` | on reports | writes to the API server, where that is the control plane |
//! | `client-certificate`, `serving-certificate` | every second or 10 s, on answers | requests the node's certificates from the API server |
//! | `mirrors` | on changes, every 10 s | follows the API's Node and pods at pod-config; has the Node and mirror pods created again, and what other clients have changed of a status written again |
//! | `cordon` | on changes | records an event when the Node is cordoned or uncordoned, where an API server is the control plane |
//! | `node-configuration` | every 10 s | reports init's status of the node configuration, or without init that none is applied, where etcd is the control plane |
//! | `lease` | a quarter of the lease, 10 s at most; after a failure 200 ms to 7 s | renews the lease |
//! | `report` | every 10 s | drains events, saves its state |
//!
//! None of its data is needed to run pods. Its state file holds event cursors, the last conditions and the boot id; without it
//! some events are read twice and transition times start again.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them"))]

mod checkpoint;
mod cordon;
mod etcd;
mod images;
mod inputs;
mod kubernetes;
mod lease_and_events;
mod metrics;
mod node;
mod observed_state;
mod peer_health;
mod pods;
mod queue;
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

pub use keelson_node_status_core::{NodeReport, PodReport, PodUpdate};
pub use writer::{ControlPlaneWriter, GonePods, NoControlPlane, ReportState, WriteError};

/// Builds the service with the writer that the configuration asks for, and starts its loops.
///
/// # Errors
/// The state file was written by a newer release, or the state folder cannot be written.
pub async fn build(ctx: Context) -> anyhow::Result<Routes> {
    build_with_init(ctx, is_kept_by_init()).await
}

/// Builds the service as [`build`] does; `has_init` is whether an init keeps the services of this node.
///
/// # Errors
/// As [`build`].
pub async fn build_with_init(ctx: Context, has_init: bool) -> anyhow::Result<Routes> {
    let writer: Arc<dyn ControlPlaneWriter> = match &ctx.config.control_plane {
        ControlPlane::None => Arc::new(NoControlPlane::new(&ctx.metrics)),
        ControlPlane::Etcd(settings) => EtcdWriter::start(&ctx, settings, has_init)?,
        ControlPlane::Kubernetes(settings) => KubernetesWriter::start(&ctx, settings),
    };
    build_with(ctx, writer).await
}

/// Builds the service with any writer, and starts its loops.
///
/// # Errors
/// The state file was written by a newer release.
pub async fn build_with(ctx: Context, writer: Arc<dyn ControlPlaneWriter>) -> anyhow::Result<Routes> {
    let file = checkpoint::state_file(&ctx.config);
    let stored = file.load().await?;
    let checkpoint = Arc::new(watch::Sender::new(stored.clone()));
    let (observed, observed_rx) = watch::channel(observed_state::ObservedState::default());
    let clock = peer_health::Clock::start();
    let (health, health_rx) = watch::channel(peer_health::watchdog());
    let (published, node) = watch::channel(None);

    let last_renewal = metrics::register(&ctx.metrics, &writer);

    ctx.spawn("inputs", inputs::run(ctx.clone(), clock, observed));
    let peers = peer_health::Peers::new(&ctx, last_renewal.clone());
    ctx.spawn("neighbours", peer_health::run(ctx.clone(), clock, peers, health));
    let builder = node::NodeLoop::new(&ctx, clock, Arc::clone(&writer), Arc::clone(&checkpoint));
    ctx.spawn("node", builder.run(observed_rx, health_rx, published));
    ctx.spawn("pods", pods::run(ctx.clone(), Arc::clone(&writer)));
    let (tried, lease_tried) = oneshot::channel();
    ctx.spawn("lease", lease_and_events::renew(ctx.clone(), Arc::clone(&writer), last_renewal, tried));
    if let ControlPlane::Kubernetes(_) = &ctx.config.control_plane {
        ctx.spawn("cordon", cordon::run(ctx.clone(), Arc::clone(&checkpoint)));
    }
    let drain = lease_and_events::Drain::new(&ctx, Arc::clone(&writer), checkpoint);
    ctx.spawn("report", lease_and_events::run(ctx.clone(), drain, file, stored, lease_tried));
    Ok(Routes::new(NodeStatusServer::new(server::Server { node, writer })))
}
