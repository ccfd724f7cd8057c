//! Mirrors: how static pods show at the API server (pod-lifecycle.md §3).
//!
//! The loop `mirrors` follows pod-config, which reads the API for everybody: a mirror that somebody deletes is made again, and
//! so is a Node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use keelson_config::ServiceName;
use keelson_kube_api::{KubeError, Object, Range, Resource};
use keelson_kube_model::pod_ext::API;
use keelson_kube_model::{PodFullName, annotations};
use keelson_node_status_core::patch::{Mirror, judge_mirror, mirror_of};
use keelson_proto::keelson::pod_config::v1 as pc;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_proto::keelson::pod_config::v1::watch_pods_response::Item;
use keelson_service_kit::{Context, LoopHandle, Signal, follow};
use serde_json::Value;

use crate::kubernetes::{KubernetesWriter, Told};
use crate::queue::{self, Job};

/// Follows the Node and the mirrors until the shutdown.
pub(super) async fn run(writer: Arc<KubernetesWriter>, ctx: Context) {
    let handle = ctx.progress.register("mirrors");
    // Cancel-safe: each arm runs until the shutdown and holds nothing that outlives it.
    tokio::select! {
        () = follow_pods(&ctx, Arc::clone(&writer)) => {}
        () = follow_node(&ctx, writer) => {}
        () = beat(handle) => {}
    }
}

/// Nothing here can be caught in work of its own, so it is enough that the task is woken.
async fn beat(handle: LoopHandle) {
    loop {
        handle.tick();
        tokio::time::sleep(LoopHandle::HEARTBEAT).await;
    }
}

async fn follow_node(ctx: &Context, writer: Arc<KubernetesWriter>) {
    let peer = ctx.peer(ServiceName::PodConfig);
    let name = peer.name().to_owned();
    let open = move || {
        let mut client = PodConfigClient::new(peer.channel());
        async move { client.watch_node(pc::WatchNodeRequest {}).await }
    };
    let mut was_registered = false;
    let on = async move |signal: Signal<pc::WatchNodeResponse>| {
        if let Signal::Message(node) = signal {
            if was_registered && !node.registered {
                tracing::warn!("the Node was deleted at the API server; it is registered again");
                writer.tell_node_again();
            }
            was_registered = node.registered;
        }
    };
    follow(&name, &ctx.progress, &ctx.shutdown, open, on).await;
}

async fn follow_pods(ctx: &Context, writer: Arc<KubernetesWriter>) {
    let peer = ctx.peer(ServiceName::PodConfig);
    let name = peer.name().to_owned();
    let open = move || {
        let mut client = PodConfigClient::new(peer.channel());
        async move { client.watch_pods(pc::WatchPodsRequest {}).await }
    };
    // The mirrors that stand, by UID.
    let mut mirrors: BTreeMap<String, PodFullName> = BTreeMap::new();
    let on = async move |signal: Signal<pc::WatchPodsResponse>| {
        let Signal::Message(message) = signal else { return };
        match message.item {
            Some(Item::Pod(pod)) if pod.source == API => {
                let Some(live) = serde_json::from_slice::<Value>(&pod.pod_json).ok().filter(is_mirror) else {
                    return;
                };
                let name = PodFullName::new(&pod.name, &pod.namespace);
                mirrors.insert(pod.uid, name.clone());
                writer.look_at_mirror(&name, Some(&live));
            }
            Some(Item::GoneUid(uid)) => {
                if let Some(name) = mirrors.remove(&uid) {
                    writer.look_at_mirror(&name, None);
                }
            }
            _ => {}
        }
    };
    follow(&name, &ctx.progress, &ctx.shutdown, open, on).await;
}

fn is_mirror(pod: &Value) -> bool {
    pod["metadata"]["annotations"][annotations::CONFIG_MIRROR].is_string()
}

impl KubernetesWriter {
    /// The Node as it was told last is told again.
    fn tell_node_again(&self) {
        let node = self.known().node.clone();
        if let Some(node) = node {
            self.put(Job::Node(node.to_string().into_bytes()), true);
        }
    }

    /// A mirror has changed, or is gone: where it is not what it should be, its pod is told of again.
    fn look_at_mirror(&self, name: &PodFullName, live: Option<&Value>) {
        let told =
            self.known().pods.values().find(|told| told.name == *name).and_then(|told| told.mirrored.clone());
        let Some(pod) = told else { return };
        let ours: Value = serde_json::from_slice(&pod.json).unwrap_or_default();
        if matches!(judge_mirror(live, &ours), Mirror::Make { .. }) {
            self.put(Job::Pod(pod), false);
        }
    }

    /// Makes sure of the mirror of a static pod; none where a pod of that name is in its way.
    pub(super) async fn mirror(&self, pod: &queue::Pod, ours: &Value) -> Result<Option<Object>, KubeError> {
        let PodFullName { name, namespace } = &pod.name;
        let live = self.main.get(Resource::POD, Some(namespace), name).await?;
        let judged = judge_mirror(live.as_ref().map(|live| &live.0), ours);
        match (judged, live) {
            (Mirror::Stands, live) => return Ok(live),
            (Mirror::Foreign, _) => {
                tracing::warn!(pod = %pod.name, "a pod of the API has the name of a static one, which is not shown there");
                return Ok(None);
            }
            (Mirror::NotAnyMore, _) => return Ok(None),
            (Mirror::Make { instead: true }, Some(live)) => self.delete(&live).await?,
            (Mirror::Make { .. }, _) => {}
        }
        let Some(node_uid) = self.known().node_uid.clone() else {
            let message = format!("the Node {} that owns it is not registered yet", self.node_name);
            return Err(self.main.unreachable(&format!("the mirror of {}", pod.name), message));
        };
        let mirror = mirror_of(ours, &self.node_name, &node_uid);
        match self.main.create(Resource::POD, Some(namespace), &mirror).await {
            Ok(made) => Ok(Some(made)),
            // Somebody was faster: the next report finds it.
            Err(error) if error.is_conflict() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Removes the mirror of a pod that is gone; with `uid` only where it is that pod's.
    pub(super) async fn remove_mirror(&self, name: &PodFullName, uid: Option<&str>) -> Result<(), KubeError> {
        let live = self.main.get(Resource::POD, Some(&name.namespace), &name.name).await?;
        let Some(live) = live.filter(|live| is_mirror(&live.0)) else { return Ok(()) };
        let theirs = live.0["metadata"]["annotations"][annotations::CONFIG_MIRROR].as_str();
        if uid.is_none_or(|uid| theirs == Some(uid)) { self.delete(&live).await } else { Ok(()) }
    }

    /// Removes the mirrors of pods that are not here any more.
    pub(super) async fn remove_stale_mirrors(&self, uids: &BTreeSet<String>) -> Result<(), KubeError> {
        let range = Range::of_fields(Resource::POD, format!("spec.nodeName={}", self.node_name));
        for live in self.main.list(&range).await? {
            if !is_mirror(&live.0) {
                continue;
            }
            let hash =
                live.0["metadata"]["annotations"][annotations::CONFIG_MIRROR].as_str().unwrap_or_default();
            // One that came while this waited.
            let is_here = |known: &BTreeMap<String, Told>| known.contains_key(hash);
            if !uids.contains(hash) && !is_here(&self.known().pods) {
                self.delete(&live).await?;
            }
        }
        Ok(())
    }
}
