//! The control plane as pod-config reads it (architecture §6). The files of the node stand beside it.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use keelson_config::{Config, ControlPlane as ControlPlaneConfig};
use keelson_pod_config_core::files::SourceSet;
use keelson_pod_config_core::node::standalone_node;
use keelson_pod_config_core::static_pod::StaticRules;
use tokio::sync::watch;

/// The rules of the manifests that no control plane has.
pub fn static_rules(config: &Config) -> StaticRules {
    StaticRules::new(&config.node_name, matches!(config.control_plane, ControlPlaneConfig::Kubernetes(_)))
}

/// The pods and objects of a control plane at one moment.
#[derive(Debug, Default)]
pub struct PlanePods {
    /// All of them.
    pub set: SourceSet,
    /// It has answered since the service began; before that this is what an earlier run knew.
    pub settled: bool,
}

/// The Node object at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeState {
    /// The Node as JSON.
    pub json: Vec<u8>,
    /// False while the object is made up here.
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

/// Why the control plane has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ControlPlaneError {
    /// It does not answer; the cause is for people.
    #[error("the control plane {name} does not answer: {cause}")]
    Unavailable {
        /// Its name.
        name: &'static str,
        /// What happened.
        cause: String,
    },
}

/// What pod-config reads from a control plane. Streams never end: an implementation reconnects by itself, and a
/// broken connection takes nothing away.
pub trait ControlPlane: Send + Sync + 'static {
    /// Its name, for messages: `none`, `api` or `etcd`.
    fn name(&self) -> &'static str;

    /// The source of pods that it is, when it is one.
    fn source(&self) -> Option<&'static str>;

    /// The pods of this node: with each change the complete set.
    fn pods(&self) -> BoxStream<'static, PlanePods>;

    /// The Node object, and each change of it.
    fn node(&self) -> BoxStream<'static, NodeState>;

    /// An object that a pod refers to; `None` when there is none.
    fn get_object(&self, wanted: ObjectRequest) -> BoxFuture<'_, Result<Option<Vec<u8>>, ControlPlaneError>>;

    /// Counts how often what [`ControlPlane::get_object`] answers may have changed; `None` where it tells nothing by itself.
    fn objects_change(&self) -> Option<watch::Receiver<u64>> {
        None
    }

    /// One more caller follows an object, or one less.
    fn retain_objects(&self, _wanted: &ObjectRequest, _watched: bool) {}
}

/// Standalone: no pods and no objects but those of the manifests, and a Node that is made up here.
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

/// The Node that is made up here, once.
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

    fn pods(&self) -> BoxStream<'static, PlanePods> {
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
    fn only_beside_an_api_server_may_static_pods_name_no_secrets() {
        for (control_plane, allowed) in [
            (ControlPlaneConfig::None, true),
            (ControlPlaneConfig::Etcd(Etcd::plain(Vec::new())), true),
            (ControlPlaneConfig::Kubernetes(Kubernetes::of("/k".into())), false),
        ] {
            let rules = static_rules(&Config { control_plane, ..Config::default() });
            assert_eq!((rules.allowed.secrets, rules.allowed.config_maps), (allowed, allowed));
            assert_eq!(rules.clone().of_url().allowed, rules.allowed);
        }
    }
}
