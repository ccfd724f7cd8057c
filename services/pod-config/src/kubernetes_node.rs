//! The Node of an API server. While the server has none, it is the standalone one.

use std::sync::Arc;

use futures_util::stream::{self, BoxStream, StreamExt as _};
use keelson_config::Config;
use keelson_kube_api::{Change, Follower, KubeApi, Object, Range, Resource, WatchEvent};
use keelson_service_kit::Progress;
use keelson_service_kit::status::chain;
use serde_json::Value;
use tokio::sync::watch;

use crate::checkpoint::Checkpoint;
use crate::control_plane::{NodeState, standalone};
use crate::kubernetes_objects::ObjectCache;

/// The condition for the connection to the Node.
const NODE_CONDITION: &str = "control-plane-node";
/// Annotation of the Node: for how many seconds polled objects count as fresh.
const TTL_ANNOTATION: &str = "node.alpha.kubernetes.io/ttl";
/// The checkpoint key of the Node.
pub const NODE_KEY: &str = "api:node";

/// The stream of the Node.
pub struct NodeSource {
    follower: Follower,
    config: Arc<Config>,
    progress: Progress,
    checkpoint: Checkpoint,
    reports: NodeReports,
    restored: Option<Vec<u8>>,
    started: bool,
}

/// Who needs to know of the Node.
pub struct NodeReports {
    /// Whether the Node has been read.
    pub read: watch::Sender<bool>,
    /// How long polled objects count as fresh depends on an annotation of the Node.
    pub objects: ObjectCache,
}

impl NodeSource {
    /// The Node of the server; `restored` is that of the checkpoint.
    pub fn new(
        api: KubeApi,
        config: Arc<Config>,
        progress: Progress,
        checkpoint: Checkpoint,
        reports: NodeReports,
        restored: Option<Vec<u8>>,
    ) -> Self {
        let range = Range::one(Resource::NODE, None, &config.node_name);
        let follower = Follower::new(api, range);
        Self { follower, config, progress, checkpoint, reports, restored, started: false }
    }

    /// The Node now and after each change.
    pub fn into_stream(self) -> BoxStream<'static, NodeState> {
        stream::unfold(self, |mut source| async move { Some((source.next().await, source)) }).boxed()
    }

    async fn next(&mut self) -> NodeState {
        if !std::mem::replace(&mut self.started, true) {
            return match self.restored.take() {
                Some(json) => NodeState { json, registered: true },
                None => standalone_node_state(Arc::clone(&self.config)).await,
            };
        }
        loop {
            let object = match self.follower.next().await {
                WatchEvent::Listed(objects) => {
                    self.record_contact();
                    self.reports.read.send_replace(true);
                    objects.into_iter().next()
                }
                WatchEvent::Changed(Change::Put(object)) => Some(object),
                WatchEvent::Changed(Change::Deleted(_)) => None,
                WatchEvent::Contact => {
                    self.record_contact();
                    continue;
                }
                WatchEvent::Lost(error) => {
                    self.progress.condition(NODE_CONDITION, Err(chain(&error)));
                    continue;
                }
            };
            return match object {
                Some(object) => self.apply_registered(object),
                None => {
                    self.checkpoint.remove(NODE_KEY);
                    standalone_node_state(Arc::clone(&self.config)).await
                }
            };
        }
    }

    fn record_contact(&self) {
        self.progress.condition(NODE_CONDITION, Ok(()));
    }

    fn apply_registered(&self, Object(mut node): Object) -> NodeState {
        if let Some(map) = node.as_object_mut() {
            // Items of a list lack apiVersion and kind.
            map.insert("apiVersion".to_owned(), "v1".into());
            map.insert("kind".to_owned(), "Node".into());
            if let Some(metadata) = map.get_mut("metadata").and_then(Value::as_object_mut) {
                metadata.remove("managedFields");
            }
        }
        let ttl =
            node["metadata"]["annotations"][TTL_ANNOTATION].as_str().and_then(|seconds| seconds.parse().ok());
        self.reports.objects.set_ttl_seconds(ttl);
        let json = node.to_string().into_bytes();
        self.checkpoint.put(NODE_KEY, json.clone());
        NodeState { json, registered: true }
    }
}

/// The standalone Node, while the server has none.
async fn standalone_node_state(config: Arc<Config>) -> NodeState {
    match standalone(&config).next().await {
        Some(node) => node,
        None => std::future::pending().await,
    }
}
