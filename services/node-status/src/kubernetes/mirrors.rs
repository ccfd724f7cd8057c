//! Mirrors: how static pods show at the API server (pod-lifecycle.md §3), and what becomes there of what was told of pods (§14.5).
//!
//! The loop `mirrors` follows pod-config, which reads the API for everybody: a mirror that somebody deletes is made again, and
//! so is a Node. A status that somebody else has changed is told again within ten seconds; by then a change of our own has come
//! back and is none.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use keelson_config::ServiceName;
use keelson_kube_api::{KubeError, Object, Range, Resource};
use keelson_kube_model::pod_ext::API;
use keelson_kube_model::{PodFullName, annotations};
use keelson_node_status_core::drift::{drifts, seen};
use keelson_node_status_core::patch::{Mirror, judge_mirror, mirror_of, node_drifts};
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
        () = follow_node(&ctx, Arc::clone(&writer)) => {}
        () = beat(handle, writer) => {}
    }
}

/// Nothing here can be caught in work of its own, so it is enough that the task is woken.
async fn beat(handle: LoopHandle, writer: Arc<KubernetesWriter>) {
    loop {
        handle.tick();
        writer.tell_drifted_again();
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
            if let Some(live) = serde_json::from_slice(&node.node_json).ok().filter(|_| node.registered) {
                writer.look_at_node(&live);
            }
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
    let mut looked_at = LookedAt::default();
    let on = async move |signal: Signal<pc::WatchPodsResponse>| looked_at.take(signal, &writer);
    follow(&name, &ctx.progress, &ctx.shutdown, open, on).await;
}

/// The pods of the API, as they were looked at last.
#[derive(Default)]
struct LookedAt {
    /// By UID: the revision, and the name of a mirror.
    pods: BTreeMap<String, (u64, Option<PodFullName>)>,
    /// Those that the replay has not told of yet.
    untold: BTreeSet<String>,
}

impl LookedAt {
    fn take(&mut self, signal: Signal<pc::WatchPodsResponse>, writer: &KubernetesWriter) {
        let message = match signal {
            Signal::Opened => {
                self.untold = self.pods.keys().cloned().collect();
                return;
            }
            Signal::Lost(_) => return,
            Signal::Message(message) => message,
        };
        match message.item {
            Some(Item::Pod(pod)) if pod.source == API => self.look(pod, writer),
            Some(Item::GoneUid(uid)) => self.lose(&uid, writer),
            Some(Item::Synced(_)) => {
                for uid in std::mem::take(&mut self.untold) {
                    self.lose(&uid, writer);
                }
            }
            Some(Item::Pod(_) | Item::SourceReady(_)) | None => {}
        }
    }

    /// Decodes only what has changed.
    fn look(&mut self, pod: pc::DesiredPod, writer: &KubernetesWriter) {
        self.untold.remove(&pod.uid);
        if self.pods.get(&pod.uid).is_some_and(|(revision, _)| *revision == pod.revision) {
            return;
        }
        let Some(live) = seen(&pod.pod_json) else { return };
        let name = PodFullName::new(&pod.name, &pod.namespace);
        writer.known().on_server.insert(pod.uid.clone(), name.clone());
        let mirror = is_mirror(&live).then_some(name);
        match &mirror {
            Some(name) => {
                writer.look_at_mirror(name, Some(&live));
                writer.remove_if_stale(name, &live);
            }
            None => writer.look_at_pod(&pod.uid, &live),
        }
        self.pods.insert(pod.uid, (pod.revision, mirror));
        self.count(writer);
    }

    fn count(&self, writer: &KubernetesWriter) {
        writer.measured.mirrors(self.pods.values().filter(|(_, mirror)| mirror.is_some()).count());
    }

    fn lose(&mut self, uid: &str, writer: &KubernetesWriter) {
        self.untold.remove(uid);
        writer.known().on_server.remove(uid);
        if let Some((_, Some(name))) = self.pods.remove(uid) {
            writer.look_at_mirror(&name, None);
            self.count(writer);
        }
    }
}

fn is_mirror(pod: &Value) -> bool {
    whose(pod).is_some()
}

/// The UID of the static pod that a pod of the server is the mirror of.
fn whose(pod: &Value) -> Option<&str> {
    pod["metadata"]["annotations"][annotations::CONFIG_MIRROR].as_str()
}

impl KubernetesWriter {
    /// The Node as it was told last is told again.
    fn tell_node_again(&self) {
        let node = self.known().node.clone();
        if let Some(node) = node {
            self.put(Job::Node(node.to_string().into_bytes()), true);
        }
    }

    /// The server's Node has changed.
    fn look_at_node(&self, live: &Value) {
        let addresses = live["status"]["addresses"].clone();
        self.change_host(|known| known.addresses = addresses);
        let node = self.known().node.clone();
        self.known().node_drifts = node.is_some_and(|ours| node_drifts(live, &ours, self.of_cloud));
    }

    /// A mirror has changed, or is gone: where it is not what it should be, its pod is told of again.
    fn look_at_mirror(&self, name: &PodFullName, live: Option<&Value>) {
        let is_its = |told: &&Told| told.report.is_static && told.report.name == *name;
        let told = self.known().pods.values().find(is_its).map(|told| told.report.clone());
        let Some(pod) = told else { return };
        let ours: Value = serde_json::from_slice(&pod.json).unwrap_or_default();
        match (judge_mirror(live, &ours), live) {
            (Mirror::Make { .. }, _) => self.put(Job::Pod(pod), false),
            (Mirror::Stands, Some(live)) => self.look_at_status(&pod, live),
            (Mirror::Stands | Mirror::Foreign | Mirror::NotAnyMore, _) => {}
        }
    }

    /// Removes a mirror whose pod is not here any more: the server may carry out a create late, after the pod has gone.
    fn remove_if_stale(&self, name: &PodFullName, live: &Value) {
        let Some(whose) = whose(live) else { return };
        let is_stale = {
            let known = self.known();
            known.all_pods && !known.pods.contains_key(whose)
        };
        if is_stale {
            self.put(Job::Gone { uid: whose.to_owned(), name: name.clone() }, false);
        }
    }

    /// A pod of the API has changed.
    fn look_at_pod(&self, uid: &str, live: &Value) {
        let told = self.known().pods.get(uid).map(|told| told.report.clone());
        if let Some(pod) = told.filter(|pod| !pod.is_static) {
            self.look_at_status(&pod, live);
        }
    }

    /// Remembers whether the server has another status than was told.
    fn look_at_status(&self, pod: &queue::Pod, live: &Value) {
        let host = self.known().host(self.of_cloud);
        let drifts = drifts(live, &pod.json, host.as_ref(), pod.is_static, pod.ended);
        if let Some(told) = self.known().pods.get_mut(&pod.uid) {
            told.drifts = drifts;
        }
    }

    /// What the server has otherwise than it was told is told again.
    fn tell_drifted_again(&self) {
        if std::mem::take(&mut self.known().node_drifts) {
            tracing::debug!("the API server has another Node than it was told");
            self.tell_node_again();
        }
        let mut drifted = Vec::new();
        for told in self.known().pods.values_mut() {
            if std::mem::take(&mut told.drifts) {
                drifted.push(told.report.clone());
            }
        }
        for pod in drifted {
            tracing::debug!(pod = %pod.name, uid = pod.uid, "the API server has another status than it was told");
            self.put(Job::Pod(pod), false);
        }
    }

    /// Makes sure of the mirror of a static pod; none where a pod of that name is in its way.
    ///
    /// A node may not read a pod that does not exist, so the pod is read only where pod-config has seen one of the name on this
    /// node, or the server has said that it exists.
    pub(super) async fn mirror(&self, pod: &queue::Pod, ours: &Value) -> Result<Option<Object>, KubeError> {
        let is_there = self.known().on_server.values().any(|name| *name == pod.name);
        let live = if is_there { self.related(&pod.name).await? } else { None };
        if live.is_some() {
            return self.mirror_beside(pod, ours, live).await;
        }
        match self.mirror_beside(pod, ours, None).await {
            // A pod of the name exists. One that this node may not read is of another node, or of none.
            Err(error) if error.is_conflict() => {
                match self.main.get(Resource::POD, Some(&pod.name.namespace), &pod.name.name).await {
                    Ok(Some(live)) => self.mirror_beside(pod, ours, Some(live)).await,
                    Err(unrelated) if unrelated.is_unrelated() => {
                        tracing::warn!(pod = %pod.name, "a pod of another node has the name of a static one, which is not shown at the API");
                        Ok(None)
                    }
                    Ok(None) => Err(error),
                    Err(error) => Err(error),
                }
            }
            done => done,
        }
    }

    /// The server's pod of a name; none where there is none, or none that this node may read.
    async fn related(&self, name: &PodFullName) -> Result<Option<Object>, KubeError> {
        match self.main.get(Resource::POD, Some(&name.namespace), &name.name).await {
            Err(error) if error.is_unrelated() => Ok(None),
            read => read,
        }
    }

    /// Makes sure of the mirror where `live` is the server's pod of the name.
    async fn mirror_beside(
        &self,
        pod: &queue::Pod,
        ours: &Value,
        live: Option<Object>,
    ) -> Result<Option<Object>, KubeError> {
        let namespace = &pod.name.namespace;
        let judged = judge_mirror(live.as_ref().map(|live| &live.0), ours);
        match (judged, live) {
            (Mirror::Stands, live) => return Ok(live),
            (Mirror::Foreign, _) => {
                tracing::warn!(pod = %pod.name, "a pod of the API has the name of a static one, which is not shown there");
                return Ok(None);
            }
            (Mirror::NotAnyMore, _) => return Ok(None),
            // The mirror of the instance before an update, which is still ending. This pod is reported again once that has gone.
            (Mirror::Make { instead: true }, Some(live)) if self.is_of_another(&live, pod) => {
                return Ok(None);
            }
            (Mirror::Make { instead: true }, Some(live)) => self.delete(&live).await?,
            (Mirror::Make { .. }, _) => {}
        }
        let Some(node_uid) = self.known().node_uid.clone() else {
            let message = format!("the Node {} that owns it is not registered yet", self.node_name);
            return Err(self.main.unreachable(&format!("the mirror of {}", pod.name), message));
        };
        let mirror = mirror_of(ours, &self.node_name, &node_uid);
        let made = self.main.create(Resource::POD, Some(namespace), &mirror).await?;
        // Until pod-config shows it, the next report knows that there is one.
        self.known().on_server.insert(made.uid().to_owned(), pod.name.clone());
        Ok(Some(made))
    }

    /// Whether a mirror is that of another static pod that is still here.
    fn is_of_another(&self, mirror: &Object, pod: &queue::Pod) -> bool {
        whose(&mirror.0).is_some_and(|whose| whose != pod.uid && self.known().pods.contains_key(whose))
    }

    /// Reports the static pods of this name again: one of them may have waited for the mirror of another.
    pub(super) fn tell_next_of(&self, name: &PodFullName) {
        let is_next = |told: &&Told| told.report.is_static && told.report.name == *name;
        let next: Vec<queue::Pod> =
            self.known().pods.values().filter(is_next).map(|told| told.report.clone()).collect();
        for pod in next {
            self.put(Job::Pod(pod), false);
        }
    }

    /// Removes the mirror of a pod that is gone; with `uid` only where it is that pod's.
    pub(super) async fn remove_mirror(&self, name: &PodFullName, uid: Option<&str>) -> Result<(), KubeError> {
        let live = self.related(name).await?;
        let Some(live) = live.filter(|live| is_mirror(&live.0)) else { return Ok(()) };
        if uid.is_none_or(|uid| whose(&live.0) == Some(uid)) { self.delete(&live).await } else { Ok(()) }
    }

    /// Removes the mirrors of pods that are not here any more.
    pub(super) async fn remove_stale_mirrors(&self, uids: &BTreeSet<String>) -> Result<(), KubeError> {
        let range = Range::of_fields(Resource::POD, format!("spec.nodeName={}", self.node_name));
        for live in self.main.list(&range).await? {
            let Some(hash) = whose(&live.0) else { continue };
            // One that came while this waited.
            let is_here = |known: &BTreeMap<String, Told>| known.contains_key(hash);
            if !uids.contains(hash) && !is_here(&self.known().pods) {
                self.delete(&live).await?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use keelson_config::{Config, Kubernetes};
    use keelson_kube_model::Node;
    use keelson_node_status_core::Ended;
    use keelson_service_kit::Context;
    use serde_json::json;
    use tokio::time::Instant;

    use super::*;
    use crate::writer::{ControlPlaneWriter as _, GonePods, PodReport};

    fn writer() -> Arc<KubernetesWriter> {
        writer_of(Config { node_name: "n1".into(), ..Config::default() })
    }

    fn writer_of(config: Config) -> Arc<KubernetesWriter> {
        let ctx = Context::detached(ServiceName::NodeStatus, config);
        KubernetesWriter::new(&ctx, &Kubernetes::of("/none".into()))
    }

    fn status(phase: &str) -> Value {
        json!({"phase": phase, "conditions": [{"type": "Ready", "status": "True"}]})
    }

    async fn tell(writer: &KubernetesWriter, uid: &str, source: &str, hash: &str) {
        let pod = json!({
            "metadata": {"annotations": {(annotations::CONFIG_HASH): hash}},
            "spec": {"containers": []}, "status": status("Running"),
        });
        let report = PodReport {
            uid: uid.into(),
            namespace: "default".into(),
            name: uid.into(),
            pod_json: pod.to_string().into_bytes().into(),
            source: source.into(),
            turned: false,
            ended: Ended::default(),
        };
        writer.write_pod(&report).await.unwrap();
    }

    /// What waits to be written.
    fn jobs(writer: &KubernetesWriter) -> Vec<String> {
        let mut queue = writer.queue();
        let jobs = std::iter::from_fn(|| queue.take()).map(|pending| match pending.job {
            Job::Pod(pod) => pod.uid,
            other => format!("{other:?}"),
        });
        jobs.collect()
    }

    #[tokio::test]
    async fn a_mirror_that_turned_first_does_not_go_before_the_node_that_it_belongs_to() {
        let writer = writer();
        tell(&writer, "s", "file", "1").await;
        let next = || writer.next_job().map(|pending| pending.job);
        let node: Node = serde_json::from_value(json!({"metadata": {"name": "n1"}})).unwrap();
        writer.write_node(&node).await.unwrap();
        assert!(matches!(next(), Some(Job::Node(_))));
        // Without its Node it is put off, and taken as soon as there is one.
        let mirror = writer.next_job().unwrap();
        assert!(mirror.job.is_mirror());
        writer.queue().defer(mirror, queue::Fault::OfJob, Instant::now());
        assert_eq!(next(), None);
        writer.registered("u1", Value::Null);
        assert!(next().is_some_and(|job| job.is_mirror()));
    }

    #[tokio::test]
    async fn a_status_that_somebody_else_changes_is_told_again_at_the_next_beat_and_once() {
        let writer = writer();
        tell(&writer, "a", API, "").await;
        assert_eq!(jobs(&writer), ["a"]);
        let live = |phase: &str| json!({"metadata": {"uid": "a"}, "status": status(phase)});
        writer.look_at_pod("a", &live("Running"));
        writer.look_at_pod("other", &live("Pending"));
        writer.tell_drifted_again();
        assert_eq!(jobs(&writer), [""; 0]);
        writer.look_at_pod("a", &live("Pending"));
        assert_eq!(jobs(&writer), [""; 0], "it may be a change of ours that is on its way");
        writer.tell_drifted_again();
        writer.tell_drifted_again();
        assert_eq!(jobs(&writer), ["a"]);
        // What comes back as it was told in time is none.
        writer.look_at_pod("a", &live("Pending"));
        writer.look_at_pod("a", &live("Running"));
        writer.tell_drifted_again();
        assert_eq!(jobs(&writer), [""; 0]);
        writer.look_at_pod("a", &live("Pending"));
        writer.drop_pods(GonePods::One("a".into())).await;
        writer.tell_drifted_again();
        assert_eq!(jobs(&writer), [""; 0], "nobody tells of what is gone");
    }

    #[tokio::test]
    async fn a_node_that_somebody_else_changes_is_told_again_at_the_next_beat_and_its_heartbeats_are_none() {
        let writer = writer();
        let node = |ready: &str, heartbeat: &str| {
            let condition = json!({"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat});
            json!({"metadata": {"name": "n1", "uid": "u"}, "status": {"conditions": [condition]}})
        };
        let of = |value: Value| serde_json::from_value::<Node>(value).unwrap();
        writer.write_node(&of(node("True", "2026-01-01T00:00:00Z"))).await.unwrap();
        let own = jobs(&writer);
        assert_eq!(own.len(), 1);
        writer.look_at_node(&node("True", "2026-01-01T00:05:00Z"));
        writer.tell_drifted_again();
        assert_eq!(jobs(&writer), [""; 0]);
        // The node controller has heard nothing for long.
        writer.look_at_node(&node("Unknown", "2026-01-01T00:05:00Z"));
        assert_eq!(jobs(&writer), [""; 0], "it may be a change of ours that is on its way");
        writer.tell_drifted_again();
        writer.tell_drifted_again();
        assert_eq!(jobs(&writer), own);
    }

    #[tokio::test]
    async fn all_pods_are_reported_again_to_a_node_that_was_registered_anew() {
        let writer = writer();
        writer.registered("first", Value::Null);
        tell(&writer, "s", "file", "1").await;
        tell(&writer, "a", API, "").await;
        assert_eq!(jobs(&writer).len(), 2);
        for (uid, expected) in [("first", 0), ("second", 2), ("second", 0)] {
            writer.registered(uid, Value::Null);
            writer.tell_drifted_again();
            assert_eq!(jobs(&writer).len(), expected, "{uid}");
        }
    }

    #[tokio::test]
    async fn pods_have_the_addresses_that_a_cloud_gives_their_node_as_soon_as_it_does() {
        let mut config = Config { node_name: "n1".into(), ..Config::default() };
        config.node_status.external_cloud = true;
        let writer = writer_of(config);
        let node = |addresses: Value| json!({"metadata": {"name": "n1"}, "status": {"addresses": addresses}});
        tell(&writer, "a", API, "").await;
        let own = node(json!([{"type": "Hostname", "address": "n1"}]));
        writer.write_node(&serde_json::from_value(own).unwrap()).await.unwrap();
        writer.tell_drifted_again();
        jobs(&writer);
        let of_cloud = json!([{"type": "InternalIP", "address": "10.0.0.7"}]);
        writer.look_at_node(&node(of_cloud.clone()));
        assert_eq!(writer.known().host(true).unwrap()["status"]["addresses"], of_cloud);
        writer.tell_drifted_again();
        assert!(jobs(&writer).contains(&"a".to_owned()));
        writer.look_at_node(&node(of_cloud));
        writer.tell_drifted_again();
        assert!(!jobs(&writer).contains(&"a".to_owned()));
    }

    #[tokio::test]
    async fn what_has_not_changed_is_not_looked_at_again_and_what_went_unseen_is_gone() {
        let writer = writer();
        tell(&writer, "s", "file", "h").await;
        tell(&writer, "a", API, "").await;
        jobs(&writer);
        let message = |item| Signal::Message(pc::WatchPodsResponse { item: Some(item) });
        let pod = |uid: &str, name: &str, revision: u64, json: Value| {
            message(Item::Pod(pc::DesiredPod {
                uid: uid.into(),
                namespace: "default".into(),
                name: name.into(),
                source: API.into(),
                pod_json: json.to_string().into_bytes().into(),
                revision,
                ..pc::DesiredPod::default()
            }))
        };
        let mirror = json!({"metadata": {"annotations": {(annotations::CONFIG_MIRROR): "h"}}, "status": status("Running")});
        let drifted = json!({"metadata": {}, "status": status("Pending")});
        let synced = || message(Item::Synced(Default::default()));
        let mut looked_at = LookedAt::default();
        looked_at.take(Signal::Opened, &writer);
        looked_at.take(pod("m", "s", 1, mirror.clone()), &writer);
        looked_at.take(pod("a", "a", 1, json!({"status": status("Running")})), &writer);
        looked_at.take(synced(), &writer);
        // Another revision would be looked at; it is the one of before, whatever is in it.
        looked_at.take(Signal::Opened, &writer);
        looked_at.take(pod("a", "a", 1, drifted.clone()), &writer);
        writer.tell_drifted_again();
        assert_eq!(jobs(&writer), [""; 0]);
        looked_at.take(pod("a", "a", 2, drifted), &writer);
        writer.tell_drifted_again();
        assert_eq!(jobs(&writer), ["a"]);
        looked_at.take(synced(), &writer);
        assert_eq!(jobs(&writer), ["s"], "the mirror went while nobody listened");
    }

    #[tokio::test]
    async fn a_mirror_that_comes_after_its_pod_has_gone_is_removed_once_all_pods_are_known() {
        let writer = writer();
        tell(&writer, "s", "file", "s").await;
        jobs(&writer);
        let mut looked_at = LookedAt::default();
        let mut revision = 0;
        let mut mirror_of = |hash: &str| {
            revision += 1;
            let json = json!({"metadata": {"annotations": {(annotations::CONFIG_MIRROR): hash}}, "status": status("Running")});
            looked_at.look(
                pc::DesiredPod {
                    uid: format!("mirror of {hash}"),
                    namespace: "default".into(),
                    name: hash.into(),
                    source: API.into(),
                    pod_json: json.to_string().into_bytes().into(),
                    revision,
                    ..pc::DesiredPod::default()
                },
                &writer,
            );
        };
        mirror_of("gone");
        assert_eq!(jobs(&writer), [""; 0], "its pod may not have been told yet");
        writer.drop_pods(GonePods::AllBut(["s".into()].into())).await;
        assert_eq!(jobs(&writer).len(), 1);
        mirror_of("s");
        assert_eq!(jobs(&writer), [""; 0]);
        mirror_of("gone");
        let removal = |uid: &str| {
            let name = PodFullName::new(uid, "default");
            [format!("{:?}", Job::Gone { uid: uid.into(), name })]
        };
        assert_eq!(jobs(&writer), removal("gone"));
        writer.drop_pods(GonePods::One("s".into())).await;
        assert_eq!(jobs(&writer), removal("s"));
        mirror_of("s");
        assert_eq!(jobs(&writer), removal("s"), "the server has made it late");
    }

    #[tokio::test]
    async fn a_mirror_is_made_again_at_once_and_its_status_told_again_at_the_next_beat() {
        let writer = writer();
        tell(&writer, "s", "file", "h").await;
        jobs(&writer);
        let name = PodFullName::new("s", "default");
        let mirror = |hash: &str, phase: &str| json!({"metadata": {"uid": "m", "annotations": {(annotations::CONFIG_MIRROR): hash}}, "status": status(phase)});
        writer.look_at_mirror(&name, Some(&mirror("h", "Pending")));
        assert_eq!(jobs(&writer), [""; 0]);
        writer.tell_drifted_again();
        assert_eq!(jobs(&writer), ["s"]);
        writer.look_at_mirror(&name, Some(&mirror("h", "Running")));
        writer.tell_drifted_again();
        assert_eq!(jobs(&writer), [""; 0]);
        for live in [Some(mirror("older", "Running")), None] {
            writer.look_at_mirror(&name, live.as_ref());
            assert_eq!(jobs(&writer), ["s"]);
        }
    }
}
