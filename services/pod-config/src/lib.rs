//! pod-config: what should run here?
//!
//! Reads the manifests of this node (from the configured folder or file and URL, and from the folder that `keelson apply` fills),
//! defaults and validates each Pod once, merges the sources, and streams the desired pods to subscribers. Serves the Node object,
//! and the Secrets and ConfigMaps from manifests. With a Kubernetes API it also serves service variables and service account
//! tokens, and reviews tokens and access for node-api ([`reviews`]).
//!
//! Loops: `file-source` (inotify and rescans), `url-source` (a request per period), `manifest-store` (commands), `checkpoint`
//! (writes the last good state to disk), `control-plane` (the Node, and the pods of etcd or the API), `services` (those of a
//! cluster). Each publishes into [`desired_state::DesiredState`], which applies the decisions of `keelson-pod-config-core` and
//! sends the changes. `node-configuration` passes the configuration from etcd to init.
//!
//! An invalid manifest removes no pods: its last good version stays in effect, also over a restart. After a restart the same pods
//! are sent as the same bytes.

mod blocking;
mod boot_state;
pub mod checkpoint;
mod cluster;
pub mod control_plane;
pub mod desired_state;
mod disk;
mod etcd_source;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod fake_api;
mod fetch;
mod file_source;
mod kubernetes_objects;
mod kubernetes_source;
mod last_contact;
mod manifest_store;
mod metrics;
mod mutations;
mod node_configuration;
mod objects;
mod review_metrics;
mod reviews;
mod secrets;
mod server;
mod url_source;
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

use crate::checkpoint::{API_KEY_PREFIX, Checkpoint, Restored};
use crate::cluster::Cluster;
use crate::control_plane::{ControlPlane, NoControlPlane, NodeState};
use crate::desired_state::{DesiredState, FILE, HTTP, MANIFEST};
use crate::etcd_source::{EtcdControlPlane, RestoredState};
use crate::file_source::FileSource;
use crate::kubernetes_source::KubernetesControlPlane;
use crate::manifest_store::StoreLoop;
use crate::objects::Objects;
use crate::secrets::Secrets;
use crate::server::Server;
use crate::url_source::{UrlSource, is_url};

/// Starts the loops and returns the gRPC routes of the service.
///
/// # Errors
/// Only if a task panics; everything else is reported as a condition.
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
    let (checkpoint, writer, restored, error) =
        tokio::task::spawn_blocking(move || Checkpoint::open(&state)).await?;
    ctx.progress.condition("checkpoint", error.map_or(Ok(()), |e| Err(checkpoint::condition_message(&e))));
    ctx.spawn("checkpoint", writer.run(ctx.clone()));
    let Restored { manifests: file_rows, pods, name_owners, last_contact } = restored;
    let (etcd_rows, file_rows): (BTreeMap<_, _>, BTreeMap<_, _>) =
        file_rows.into_iter().partition(|(path, _)| path.starts_with(NODES));
    let (mut api_rows, file_rows): (BTreeMap<_, _>, BTreeMap<_, _>) =
        file_rows.into_iter().partition(|(path, _)| path.starts_with(API_KEY_PREFIX));
    let (mut url_rows, file_rows): (BTreeMap<_, _>, BTreeMap<_, _>) =
        file_rows.into_iter().partition(|(path, _)| is_url(path));
    let desired = DesiredState::new(&ctx, &sources, checkpoint.clone(), pods);

    let (store, store_loop) = StoreLoop::new(&ctx, &manifests, desired.clone());
    ctx.spawn("manifest-store", store_loop.run());

    if let Some(path) = static_path {
        let source =
            FileSource::new(&ctx, &path, desired.clone(), checkpoint.clone(), file_rows, name_owners);
        ctx.spawn("file-source", source.run());
    }

    let url_row = static_url.as_ref().and_then(|url| url_rows.remove(url));
    url_rows.keys().for_each(|url| checkpoint.remove(url));
    if let Some(url) = static_url {
        let source = UrlSource::new(&ctx, url, desired.clone(), checkpoint.clone(), url_row);
        ctx.spawn("url-source", source.run());
    }

    let mut reviewer = None;
    let mut cluster = None;
    let control_plane: Arc<dyn ControlPlane> = match &ctx.config.control_plane {
        ControlPlaneConfig::None => {
            etcd_rows.keys().chain(api_rows.keys()).for_each(|key| checkpoint.remove(key));
            Secrets::remove_all(&ctx.config.paths.socket_dir(ServiceName::PodConfig));
            Arc::new(NoControlPlane::new(Arc::clone(&ctx.config)))
        }
        ControlPlaneConfig::Kubernetes(settings) => {
            etcd_rows.keys().for_each(|key| checkpoint.remove(key));
            let api = kubernetes_source::connection(&ctx, settings);
            let services = Cluster::new(api.clone(), checkpoint.clone(), &mut api_rows);
            ctx.spawn("services", services.clone().follow(ctx.progress.clone(), ctx.shutdown.clone()));
            cluster = Some(services);
            let restored = kubernetes_source::RestoredState {
                values: api_rows,
                last_contact: last_contact.get(API).copied(),
            };
            let control_plane = KubernetesControlPlane::new(&ctx, api, checkpoint.clone(), restored);
            reviewer = Some(control_plane.reviewer(settings, &ctx.metrics));
            Arc::new(control_plane)
        }
        ControlPlaneConfig::Etcd(etcd) => {
            api_rows.keys().for_each(|key| checkpoint.remove(key));
            let restored = RestoredState { values: etcd_rows, last_contact: last_contact.get(ETCD).copied() };
            let control_plane = EtcdControlPlane::new(&ctx, etcd, checkpoint.clone(), restored);
            ctx.spawn("node-configuration", node_configuration::run(ctx.clone(), control_plane.etcd()));
            Arc::new(control_plane)
        }
    };
    let node = WatchHub::incomplete();
    ctx.spawn(
        "control-plane",
        follow_control_plane(ctx.clone(), Arc::clone(&control_plane), desired.clone(), node.clone()),
    );

    let shutdown = ctx.shutdown.clone();
    let objects = Objects { desired: desired.clone(), control_plane };
    let (policy, node_name) = (CallerPolicy::new(&ctx.config), ctx.config.node_name.clone());
    let server = Server { desired, node, store, objects, reviewer, cluster, policy, node_name, shutdown };
    // A manifest may be as long as the limit. A longer one must be rejected with its name, not by the transport.
    let service = PodConfigServer::new(server).max_decoding_message_size(MAX_BYTES + 64 * 1024);
    Ok(Routes::new(service))
}

async fn follow_control_plane(
    ctx: Context,
    control_plane: Arc<dyn ControlPlane>,
    desired: DesiredState,
    hub: WatchHub<(), Arc<NodeState>>,
) {
    let loop_handle = ctx.progress.register("control-plane");
    let (mut nodes, mut pods) = (control_plane.node(), control_plane.pods());
    loop {
        loop_handle.tick();
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
            set = pods.next() => match (set, control_plane.source()) {
                (Some(pods), Some(source)) => desired.publish(source, pods.set, pods.settled),
                (Some(_), None) => {}
                (None, _) => ctx.shutdown.cancelled().await,
            },
            () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
        }
    }
}
