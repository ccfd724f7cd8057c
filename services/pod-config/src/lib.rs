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
//! A pod is decoded and encoded once, when its source reads it. Its record
//! ([`DesiredPod`](keelson_pod_config_core::desired_pod::DesiredPod)) is shared by the source, the merge and the subscribers; the
//! merge adds its version, and `sent_pod` makes the message. A source passes the records of unchanged pods again, which the merge
//! recognises by their address.
//!
//! An invalid manifest removes no pods: its last good version stays in effect, also over a restart. After a restart the same pods
//! are sent as the same bytes.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them"))]

mod binding_loop;
mod binding_store;
mod blocking;
mod boot_state;
pub mod checkpoint;
mod checkpoint_database;
mod claims_in_use;
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
mod followed_objects;
mod followed_pods;
mod kubernetes_node;
mod kubernetes_objects;
mod kubernetes_source;
mod last_contact;
mod live_objects;
mod manifest_files;
mod manifest_store;
mod metrics;
mod mutations;
mod node_configuration;
mod objects;
mod pod_certificates;
mod review_metrics;
mod reviews;
mod secrets;
mod sent_pod;
mod server;
mod source_state;
mod url_source;
mod volume_objects;
mod watcher;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use futures_util::StreamExt as _;
use keelson_config::{Config, ControlPlane as ControlPlaneConfig, MANIFEST_LIMIT, ServiceName};
use keelson_etcd::keys::NODES;
use keelson_kube_model::pod_ext::{API, ETCD};
use keelson_pod_config_core::binder::{ClaimKey, node_local_claims};
use keelson_proto::keelson::pod_config::v1::pod_config_server::PodConfigServer;
use keelson_service_kit::server::CallerPolicy;
use keelson_service_kit::{Context, LoopHandle, WatchHub};
use tonic::service::Routes;

use crate::binding_store::Opened;
use crate::checkpoint::{API_KEY_PREFIX, Checkpoint, Restored};
use crate::cluster::Cluster;
use crate::control_plane::{ControlPlane, NoControlPlane, NodeState};
use crate::desired_state::{DesiredState, FILE, HTTP, MANIFEST};
use crate::etcd_source::EtcdControlPlane;
use crate::file_source::FileSource;
use crate::followed_pods::RestoredState;
use crate::kubernetes_source::KubernetesControlPlane;
use crate::manifest_store::StoreLoop;
use crate::objects::Objects;
use crate::reviews::Reviewer;
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
    let sources = configured_sources(&ctx.config, &manifests);
    // With an API server nothing is bound here.
    let binds = !matches!(ctx.config.control_plane, ControlPlaneConfig::Kubernetes(_));
    let (bindings, (checkpoint, writer, restored, error)) = {
        let state = state.clone();
        let bindings =
            move |state: &Path| if binds { binding_store::open(state) } else { Ok(Opened::default()) };
        // In this order: a broken checkpoint says something about the bindings, and is replaced when it is opened.
        tokio::task::spawn_blocking(move || (bindings(&state), Checkpoint::open(&state))).await?
    };
    let bindings = bindings.map_err(|error| binding_store::message(&error));
    ctx.progress.condition("checkpoint", error.map_or(Ok(()), |e| Err(checkpoint::condition_message(&e))));
    ctx.spawn("checkpoint", writer.run(ctx.clone()));
    let Restored { manifests: rows, pods, name_owners, last_contact } = restored;
    let rows = RestoredRows::of(rows);
    let node_local_claims =
        bindings.as_ref().map(|opened| node_local_claims(&opened.records.bindings)).unwrap_or_default();
    let desired = DesiredState::new(&ctx, &sources, checkpoint.clone(), pods, bindings);

    if binds {
        ctx.spawn("bindings", binding_loop::run(ctx.clone(), state, desired.clone()));
    }
    let (store, store_loop) = StoreLoop::new(&ctx, &manifests, desired.clone());
    ctx.spawn("manifest-store", store_loop.run());
    if let Some(path) = ctx.config.sources.static_pod_path.clone() {
        let (desired, checkpoint) = (desired.clone(), checkpoint.clone());
        let source = FileSource::new(&ctx, &path, desired, checkpoint, rows.files, name_owners);
        ctx.spawn("file-source", source.run());
    }
    start_url_source(&ctx, &desired, &checkpoint, rows.url);
    let StartedControlPlane { control_plane, cluster, reviewer } =
        start_control_plane(&ctx, &checkpoint, rows.etcd, rows.api, &last_contact, node_local_claims);
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
    let service = PodConfigServer::new(server).max_decoding_message_size(MANIFEST_LIMIT + 64 * 1024);
    Ok(Routes::new(service))
}

/// The configured sources with their locations, in order of precedence.
fn configured_sources(config: &Config, manifests: &Path) -> Vec<(&'static str, String)> {
    let mut sources = Vec::new();
    if let Some(path) = &config.sources.static_pod_path {
        sources.push((FILE, path.display().to_string()));
    }
    sources.extend(config.sources.static_pod_url.clone().map(|url| (HTTP, url)));
    sources.push((MANIFEST, manifests.display().to_string()));
    match &config.control_plane {
        ControlPlaneConfig::None => {}
        ControlPlaneConfig::Etcd(etcd) => sources.push((ETCD, etcd.endpoints.join(", "))),
        ControlPlaneConfig::Kubernetes(api) => sources.push((API, api.kubeconfig.display().to_string())),
    }
    sources
}

type Rows = BTreeMap<String, Vec<u8>>;

/// The restored contents by where they are from, each by its checkpoint key.
struct RestoredRows {
    files: Rows,
    url: Rows,
    etcd: Rows,
    api: Rows,
}

impl RestoredRows {
    fn of(rows: Rows) -> Self {
        let (etcd, rows): (Rows, Rows) = rows.into_iter().partition(|(key, _)| key.starts_with(NODES));
        let (api, rows): (Rows, Rows) =
            rows.into_iter().partition(|(key, _)| key.starts_with(API_KEY_PREFIX));
        let (url, files) = rows.into_iter().partition(|(key, _)| is_url(key));
        Self { files, url, etcd, api }
    }
}

/// Starts the source `http` if there is a URL. The contents of other URLs are deleted.
fn start_url_source(ctx: &Context, desired: &DesiredState, checkpoint: &Checkpoint, mut rows: Rows) {
    let url = ctx.config.sources.static_pod_url.clone();
    let row = url.as_ref().and_then(|url| rows.remove(url));
    rows.keys().for_each(|url| checkpoint.remove(url));
    if let Some(url) = url {
        let source = UrlSource::new(ctx, url, desired.clone(), checkpoint.clone(), row);
        ctx.spawn("url-source", source.run());
    }
}

/// The configured control plane, and what only an API server has.
struct StartedControlPlane {
    control_plane: Arc<dyn ControlPlane>,
    cluster: Option<Cluster>,
    reviewer: Option<Reviewer>,
}

/// Connects to the configured control plane. The restored rows of other ones are deleted. `last_contact` is that of each
/// source, in seconds since 1970; `node_local_claims` are the claims that were bound to paths of this node.
fn start_control_plane(
    ctx: &Context,
    checkpoint: &Checkpoint,
    etcd_rows: Rows,
    mut api_rows: Rows,
    last_contact: &BTreeMap<String, i64>,
    node_local_claims: BTreeSet<ClaimKey>,
) -> StartedControlPlane {
    let remove = |rows: &Rows| rows.keys().for_each(|key| checkpoint.remove(key));
    let restored = |source, values| RestoredState { values, last_contact: last_contact.get(source).copied() };
    match &ctx.config.control_plane {
        ControlPlaneConfig::None => {
            remove(&etcd_rows);
            remove(&api_rows);
            Secrets::remove_all(&ctx.config.paths.socket_dir(ServiceName::PodConfig));
            let control_plane = Arc::new(NoControlPlane::new(Arc::clone(&ctx.config)));
            StartedControlPlane { control_plane, cluster: None, reviewer: None }
        }
        ControlPlaneConfig::Kubernetes(settings) => {
            remove(&etcd_rows);
            let api = kubernetes_source::connection(ctx, settings);
            let cluster = Cluster::new(api.clone(), checkpoint.clone(), &mut api_rows);
            ctx.spawn("services", cluster.clone().follow(ctx.progress.clone(), ctx.shutdown.clone()));
            let restored = restored(API, api_rows);
            let control_plane = KubernetesControlPlane::new(ctx, api, checkpoint.clone(), restored);
            let reviewer = Some(control_plane.reviewer(settings, &ctx.metrics));
            StartedControlPlane { control_plane: Arc::new(control_plane), cluster: Some(cluster), reviewer }
        }
        ControlPlaneConfig::Etcd(etcd) => {
            remove(&api_rows);
            let restored = restored(ETCD, etcd_rows);
            let control_plane =
                EtcdControlPlane::new(ctx, etcd, checkpoint.clone(), restored, node_local_claims);
            ctx.spawn("node-configuration", node_configuration::run(ctx.clone(), control_plane.etcd()));
            StartedControlPlane { control_plane: Arc::new(control_plane), cluster: None, reviewer: None }
        }
    }
}

/// Publishes the pods and the Node of the control plane until the service shuts down.
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
