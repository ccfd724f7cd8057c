//! The control plane as pod-config reads it (architecture §6). Manifests of the node are read independently of it.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use keelson_config::{Config, ControlPlane as ControlPlaneConfig};
use keelson_pod_config_core::files::SourceSet;
use keelson_pod_config_core::node::standalone_node;
use keelson_pod_config_core::static_pod::StaticRules;
use tokio::sync::watch;

/// The rules for manifests from files and URLs.
pub fn static_rules(config: &Config) -> StaticRules {
    StaticRules::new(&config.node_name, matches!(config.control_plane, ControlPlaneConfig::Kubernetes(_)))
}

/// The pods and objects of a control plane at one moment.
#[derive(Debug, Default)]
pub struct ControlPlanePods {
    /// All of them.
    pub set: SourceSet,
    /// Whether the control plane has answered since the start; if not, this is restored state.
    pub settled: bool,
}

/// The Node object at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeState {
    /// The Node as JSON.
    pub json: Vec<u8>,
    /// False for a standalone Node, which no control plane has.
    pub registered: bool,
}

/// An object by kind, namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectRequest {
    /// `ConfigMap`, `Secret`…
    pub kind: String,
    /// Empty for a cluster-wide object.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

/// Why the control plane returned nothing.
#[derive(Debug, thiserror::Error)]
pub enum ControlPlaneError {
    /// It is unavailable; the cause is for people.
    #[error("the control plane {name} does not answer: {cause}")]
    Unavailable {
        /// Its name.
        name: &'static str,
        /// The cause.
        cause: String,
    },
}

/// What pod-config reads from a control plane. Streams never end: an implementation reconnects by itself, and a lost connection
/// removes nothing.
pub trait ControlPlane: Send + Sync + 'static {
    /// Its name, for messages: `none`, `api` or `etcd`.
    fn name(&self) -> &'static str;

    /// The name of its source of pods, if it has one.
    fn source(&self) -> Option<&'static str>;

    /// The pods of this node: the complete set after each change.
    fn pods(&self) -> BoxStream<'static, ControlPlanePods>;

    /// The Node object: now and after each change.
    fn node(&self) -> BoxStream<'static, NodeState>;

    /// Reads an object to which a pod refers; `None` if it does not exist.
    fn get_object(&self, wanted: ObjectRequest) -> BoxFuture<'_, Result<Option<Vec<u8>>, ControlPlaneError>>;

    /// Incremented when [`ControlPlane::get_object`] may return something else; `None` if the control plane sends no
    /// notifications.
    fn subscribe_objects(&self) -> Option<watch::Receiver<u64>> {
        None
    }

    /// Adds (`watched`) or removes a user of an object.
    fn retain_objects(&self, _wanted: &ObjectRequest, _watched: bool) {}
}

/// No control plane: pods and objects only from manifests, and a standalone Node.
#[derive(Debug)]
pub struct NoControlPlane {
    config: Arc<Config>,
}

impl NoControlPlane {
    /// For the node that `config` names.
    pub fn new(config: Arc<Config>) -> Self {
        Self { config }
    }
}

/// A stream with the standalone Node as its only item.
pub fn standalone(config: &Config) -> BoxStream<'static, NodeState> {
    let labels = &config.resources.node_labels;
    let node = standalone_node(&config.node_name, labels, std::env::consts::ARCH);
    let state = NodeState { json: node.to_string().into_bytes(), registered: false };
    stream::once(std::future::ready(state)).chain(stream::pending()).boxed()
}

impl ControlPlane for NoControlPlane {
    fn name(&self) -> &'static str {
        "none"
    }

    fn source(&self) -> Option<&'static str> {
        None
    }

    fn pods(&self) -> BoxStream<'static, ControlPlanePods> {
        stream::pending().boxed()
    }

    fn node(&self) -> BoxStream<'static, NodeState> {
        standalone(&self.config)
    }

    fn get_object(&self, _: ObjectRequest) -> BoxFuture<'_, Result<Option<Vec<u8>>, ControlPlaneError>> {
        Box::pin(std::future::ready(Ok(None)))
    }
}

#[cfg(test)]
mod tests {
    use keelson_config::{Etcd, Kubernetes};

    use super::*;

    #[test]
    fn static_pods_may_not_reference_secrets_only_with_an_api_server() {
        for (control_plane, allowed) in [
            (ControlPlaneConfig::None, true),
            (ControlPlaneConfig::Etcd(Etcd::plain(Vec::new())), true),
            (ControlPlaneConfig::Kubernetes(Kubernetes::of("/k".into())), false),
        ] {
            let rules = static_rules(&Config { control_plane, ..Config::default() });
            assert_eq!((rules.allowed.secrets, rules.allowed.config_maps), (allowed, allowed));
            assert_eq!(rules.clone().for_url().allowed, rules.allowed);
        }
    }
}
