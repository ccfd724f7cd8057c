//! pod-config: what should run here?
//!
//! It reads the manifests of this node (a folder or file and a URL that are configured, and the folder that `keelson
//! apply` fills), defaults and checks each Pod once, merges the sources, and streams the desired pods to everybody who
//! asks. It hands out the Node object and the Secrets and ConfigMaps that stand beside the pods; of a Kubernetes API the
//! variables of services and tokens of service accounts as well. It puts node-api's questions about who asks something of the
//! node to the API server ([`reviews`]).
//!
//! Loops: `file-source` (inotify and rescan), `url-source` (a request each period), `manifest-store` (commands), `checkpoint` (writes to disk what was
//! good), `control-plane` (the Node, and what etcd says), `services` (those of a cluster). Each publishes into [`desired::Desired`], where the decisions of
//! `keelson-pod-config-core` are applied and told. `node-configuration` hands what etcd says of the configuration to init.
//!
//! A manifest that breaks takes nothing away: its last good version goes on, also over a restart. A restart sends
//! the same bytes for the same pods.

pub mod checkpoint;
mod cluster;
pub mod control_plane;
pub mod desired;
mod disk;
mod etcd_source;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod fake_api;
mod fetch;
mod file_source;
mod kubernetes_objects;
mod kubernetes_source;
mod last_word;
mod manifest_store;
mod metrics;
mod mutations;
mod node_configuration;
mod objects;
mod review_metrics;
mod reviews;
mod secrets;
mod server;
mod this_boot;
mod url_source;
mod waiting;
mod watcher;

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::StreamExt as _;
use keelson_config::{ControlPlane as ControlPlaneConfig, ServiceName};
use keelson_etcd::keys::NODES;
use keelson_kube_model::pod_ext::{API, ETCD};
use keelson_pod_config_core::manifest::MAX_BYTES;
use keelson_proto::keelson::pod_config::v1::pod_config_server::PodConfigServer;
use keelson_service_kit::server::CallerPolicy;
use keelson_service_kit::{Context, LoopHandle, WatchHub};
use tonic::service::Routes;

use crate::checkpoint::{Checkpoint, Remembered};
use crate::cluster::Cluster;
use crate::control_plane::{ControlPlane, NoControlPlane, NodeState};
use crate::desired::{Desired, FILE, HTTP, MANIFEST};
use crate::etcd_source::{Earlier, EtcdPlane};
use crate::file_source::FileSource;
use crate::kubernetes_source::{KEPT, KubernetesPlane};
use crate::manifest_store::StoreLoop;
use crate::objects::Objects;
use crate::secrets::Secrets;
use crate::server::Server;
use crate::url_source::{UrlSource, is_url};

/// Starts the loops and makes the routes of the service.
///
/// # Errors
/// None today: what is missing becomes a condition, not an end.
pub async fn build(ctx: Context) -> anyhow::Result<Routes> {
    let state = ctx.config.paths.state(ServiceName::PodConfig);
    let manifests = state.join("manifests");
    let static_path = ctx.config.sources.static_pod_path.clone();
    let mut sources = Vec::new();
    if let Some(path) = &static_path {
        sources.push((FILE, path.display().to_string()));
    }
    let static_url = ctx.config.sources.static_pod_url.clone();
    sources.extend(static_url.clone().map(|url| (HTTP, url)));
    sources.push((MANIFEST, manifests.display().to_string()));
    if let ControlPlaneConfig::Etcd(etcd) = &ctx.config.control_plane {
        sources.push((ETCD, etcd.endpoints.join(", ")));
    }
    if let ControlPlaneConfig::Kubernetes(api) = &ctx.config.control_plane {
        sources.push((API, api.kubeconfig.display().to_string()));
    }
    let (checkpoint, writer, remembered, trouble) =
        tokio::task::spawn_blocking(move || Checkpoint::open(&state)).await?;
    ctx.progress.condition("checkpoint", trouble.map_or(Ok(()), |e| Err(checkpoint::complaint(&e))));
    ctx.spawn("checkpoint", writer.run(ctx.clone()));
    let Remembered { manifests: contents, pods, holders, heard } = remembered;
    let (stored, contents): (BTreeMap<_, _>, BTreeMap<_, _>) =
        contents.into_iter().partition(|(path, _)| path.starts_with(NODES));
    let (mut of_api, contents): (BTreeMap<_, _>, BTreeMap<_, _>) =
        contents.into_iter().partition(|(path, _)| path.starts_with(KEPT));
    let (mut of_urls, contents): (BTreeMap<_, _>, BTreeMap<_, _>) =
        contents.into_iter().partition(|(path, _)| is_url(path));
    let desired = Desired::new(&ctx, &sources, checkpoint.clone(), pods);

    let (store, store_loop) = StoreLoop::new(&ctx, &manifests, desired.clone());
    ctx.spawn("manifest-store", store_loop.run());

    if let Some(path) = static_path {
        let source = FileSource::new(&ctx, &path, desired.clone(), checkpoint.clone(), contents, holders);
        ctx.spawn("file-source", source.run());
    }

    let of_url = static_url.as_ref().and_then(|url| of_urls.remove(url));
    of_urls.keys().for_each(|url| checkpoint.remove(url));
    if let Some(url) = static_url {
        let source = UrlSource::new(&ctx, url, desired.clone(), checkpoint.clone(), of_url);
        ctx.spawn("url-source", source.run());
    }

    let mut reviewer = None;
    let mut cluster = None;
    let plane: Arc<dyn ControlPlane> = match &ctx.config.control_plane {
        ControlPlaneConfig::None => {
            stored.keys().chain(of_api.keys()).for_each(|key| checkpoint.remove(key));
            Secrets::remove_all(&ctx.config.paths.socket_dir(ServiceName::PodConfig));
            Arc::new(NoControlPlane::new(Arc::clone(&ctx.config)))
        }
        ControlPlaneConfig::Kubernetes(settings) => {
            stored.keys().for_each(|key| checkpoint.remove(key));
            let api = kubernetes_source::connection(&ctx, settings);
            let services = Cluster::new(api.clone(), checkpoint.clone(), &mut of_api);
            ctx.spawn("services", services.clone().follow(ctx.progress.clone(), ctx.shutdown.clone()));
            cluster = Some(services);
            let earlier = kubernetes_source::Earlier { values: of_api, heard: heard.get(API).copied() };
            let plane = KubernetesPlane::new(&ctx, api, checkpoint.clone(), earlier);
            reviewer = Some(plane.reviewer(settings, &ctx.metrics));
            Arc::new(plane)
        }
        ControlPlaneConfig::Etcd(etcd) => {
            of_api.keys().for_each(|key| checkpoint.remove(key));
            let earlier = Earlier { values: stored, heard: heard.get(ETCD).copied() };
            let plane = EtcdPlane::new(&ctx, etcd, checkpoint.clone(), earlier);
            ctx.spawn("node-configuration", node_configuration::run(ctx.clone(), plane.etcd()));
            Arc::new(plane)
        }
    };
    let node = WatchHub::incomplete();
    ctx.spawn(
        "control-plane",
        follow_control_plane(ctx.clone(), Arc::clone(&plane), desired.clone(), node.clone()),
    );

    let shutdown = ctx.shutdown.clone();
    let objects = Objects { desired: desired.clone(), plane };
    let (policy, node_name) = (CallerPolicy::new(&ctx.config), ctx.config.node_name.clone());
    let server = Server { desired, node, store, objects, reviewer, cluster, policy, node_name, shutdown };
    // A manifest may be as long as the limit; what is longer is refused by name, not by the transport.
    let service = PodConfigServer::new(server).max_decoding_message_size(MAX_BYTES + 64 * 1024);
    Ok(Routes::new(service))
}

async fn follow_control_plane(
    ctx: Context,
    plane: Arc<dyn ControlPlane>,
    desired: Desired,
    hub: WatchHub<(), Arc<NodeState>>,
) {
    let turn = ctx.progress.register("control-plane");
    let (mut nodes, mut pods) = (plane.node(), plane.pods());
    loop {
        turn.tick();
        // Cancel-safe: `next` of a stream takes nothing before it returns.
        tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            node = nodes.next() => match node {
                Some(node) => {
                    hub.set((), Arc::new(node));
                    hub.complete();
                }
                None => ctx.shutdown.cancelled().await,
            },
            set = pods.next() => match (set, plane.source()) {
                (Some(pods), Some(source)) => desired.publish(source, pods.set, pods.settled),
                (Some(_), None) => {}
                (None, _) => ctx.shutdown.cancelled().await,
            },
            () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
        }
    }
}
