//! What other clients change at the API server of reported pods (pod-lifecycle.md §14.5) and of mirror pods (§3).
//!
//! The loop `mirrors` follows pod-config, which reads the API for all services: a mirror pod that another client deletes is
//! created again, and so is a Node. A status that another client has changed is written again within ten seconds; by then our own
//! change has come back and is no difference.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use keelson_config::ServiceName;
use keelson_kube_model::PodFullName;
use keelson_kube_model::pod_ext::API;
use keelson_node_status_core::PodReport;
use keelson_node_status_core::drift::{ServerPod, drifts};
use keelson_node_status_core::patch::{Mirror, decide_mirror, node_drifts};
use keelson_proto::keelson::pod_config::v1 as pc;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_proto::keelson::pod_config::v1::watch_pods_response::Item;
use keelson_service_kit::{Context, LoopHandle, Signal, follow};
use serde_json::Value;

use crate::kubernetes::KubernetesWriter;
use crate::kubernetes::report_cache::{LastReport, ServerState};
use crate::queue::Job;

/// Follows the Node and the mirror pods until the shutdown.
pub(super) async fn run(writer: Arc<KubernetesWriter>, ctx: Context) {
    let handle = ctx.progress.register("mirrors");
    // Cancel-safe: each arm runs until the shutdown and holds nothing that outlives it.
    tokio::select! {
        () = follow_pods(&ctx, Arc::clone(&writer)) => {}
        () = follow_node(&ctx, Arc::clone(&writer)) => {}
        () = heartbeat(handle, writer) => {}
    }
}

/// No work here can block, so it is enough that a timer wakes the task.
async fn heartbeat(handle: LoopHandle, writer: Arc<KubernetesWriter>) {
    loop {
        handle.tick();
        writer.requeue_drifted();
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
                writer.requeue_node();
            }
            was_registered = node.registered;
            if let Some(live) = serde_json::from_slice(&node.node_json).ok().filter(|_| node.registered) {
                writer.observe_node(&live);
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
        async move { client.watch_pods(pc::WatchPodsRequest { unannotated: true }).await }
    };
    let mut observed = ObservedPods::default();
    let on = async move |signal: Signal<pc::WatchPodsResponse>| observed.take(signal, &writer);
    follow(&name, &ctx.progress, &ctx.shutdown, open, on).await;
}

/// The API's pods, as they were last observed.
#[derive(Default)]
struct ObservedPods {
    /// By UID: the revision, and the name of a mirror pod.
    pods: BTreeMap<String, (u64, Option<PodFullName>)>,
    /// Pods that the current replay has not sent yet.
    unseen: BTreeSet<String>,
}

impl ObservedPods {
    fn take(&mut self, signal: Signal<pc::WatchPodsResponse>, writer: &KubernetesWriter) {
        let message = match signal {
            Signal::Opened => {
                self.unseen = self.pods.keys().cloned().collect();
                return;
            }
            Signal::Lost(_) => return,
            Signal::Message(message) => message,
        };
        match message.item {
            Some(Item::Pod(pod)) if pod.source == API => self.observe(pod, writer),
            Some(Item::GoneUid(uid)) => self.remove(&uid, writer),
            Some(Item::Synced(_)) => {
                for uid in std::mem::take(&mut self.unseen) {
                    self.remove(&uid, writer);
                }
            }
            Some(Item::Pod(_) | Item::SourceReady(_)) | None => {}
        }
    }

    /// Decodes only documents that have changed.
    fn observe(&mut self, pod: pc::DesiredPod, writer: &KubernetesWriter) {
        self.unseen.remove(&pod.uid);
        if self.pods.get(&pod.uid).is_some_and(|(revision, _)| *revision == pod.revision) {
            return;
        }
        let Some(server) = ServerPod::decode(&pod.pod_json) else { return };
        let name = PodFullName::new(&pod.name, &pod.namespace);
        writer.cache().on_server.insert(pod.uid.clone(), name.clone());
        let version = server.resource_version();
        let mirror = match server.static_pod_uid() {
            Some(static_pod_uid) => {
                if !writer.cache().has_report(static_pod_uid, version) {
                    writer.observe_mirror(&name, Some(&server.compared_part()));
                }
                writer.remove_if_stale(&name, static_pod_uid);
                Some(name)
            }
            None => {
                if !writer.cache().has_report(&pod.uid, version) {
                    writer.observe_pod(&pod.uid, &server.compared_part());
                }
                None
            }
        };
        self.pods.insert(pod.uid, (pod.revision, mirror));
        self.count(writer);
    }

    fn count(&self, writer: &KubernetesWriter) {
        writer.metrics.set_mirrors(self.pods.values().filter(|(_, mirror)| mirror.is_some()).count());
    }

    fn remove(&mut self, uid: &str, writer: &KubernetesWriter) {
        self.unseen.remove(uid);
        writer.cache().on_server.remove(uid);
        if let Some((_, Some(name))) = self.pods.remove(uid) {
            writer.observe_mirror(&name, None);
            self.count(writer);
        }
    }
}

impl KubernetesWriter {
    /// Queues the last reported Node again.
    fn requeue_node(&self) {
        let node = self.cache().node.clone();
        if let Some(node) = node {
            self.put(Job::Node(node.to_string().into_bytes()), true);
        }
    }

    /// Handles a change of the server's Node.
    fn observe_node(&self, live: &Value) {
        let addresses = live["status"]["addresses"].clone();
        self.update_host(|cache| cache.addresses = addresses);
        let (node, csi_drivers) = {
            let cache = self.cache();
            (cache.node.clone(), Arc::clone(&cache.csi_drivers))
        };
        self.cache().node_drifts = node.is_some_and(|ours| {
            node_drifts(live, &ours, self.external_cloud) || csi_drivers.differ_from(live)
        });
    }

    /// Handles a changed or deleted mirror pod: if it is not as it should be, its static pod is queued again.
    fn observe_mirror(&self, name: &PodFullName, live: Option<&Value>) {
        let is_its = |last: &&LastReport| last.report.is_static() && last.report.name == *name;
        let last = self.cache().pods.values().find(is_its).map(|last| Arc::clone(&last.report));
        let Some(report) = last else { return };
        match (decide_mirror(live, report.pod.config_hash.as_deref(), report.is_deleting()), live) {
            (Mirror::Create { .. }, _) => self.put(Job::again(&report), false),
            (Mirror::UpToDate, Some(live)) => self.observe_status_of(&report, live),
            (Mirror::UpToDate | Mirror::Foreign | Mirror::NotNeeded, _) => {}
        }
    }

    /// Removes a mirror pod whose static pod is not here any more: the server may carry out a create late, after the pod has
    /// gone.
    fn remove_if_stale(&self, name: &PodFullName, static_pod_uid: &str) {
        let is_stale = {
            let cache = self.cache();
            cache.pods_complete && !cache.pods.contains_key(static_pod_uid)
        };
        if is_stale {
            self.put(Job::RemovePod { uid: static_pod_uid.to_owned(), name: name.clone() }, false);
        }
    }

    /// Handles a change of an API pod.
    fn observe_pod(&self, uid: &str, live: &Value) {
        let last = self.cache().pods.get(uid).map(|last| Arc::clone(&last.report));
        if let Some(report) = last.filter(|report| !report.is_static()) {
            self.observe_status_of(&report, live);
        }
    }

    /// Stores whether the server's status differs from the last report.
    fn observe_status_of(&self, report: &PodReport, live: &Value) {
        let mut cache = self.cache();
        let differs = drifts(live, report, cache.host_addresses(self.external_cloud));
        if let Some(last) = cache.pods.get_mut(&report.uid) {
            last.server = if differs { ServerState::Differs } else { ServerState::Unknown };
        }
    }

    /// Queues the reports again from which the server differs.
    fn requeue_drifted(&self) {
        if std::mem::take(&mut self.cache().node_drifts) {
            tracing::debug!("the Node at the API server differs from the last report");
            self.requeue_node();
        }
        let mut drifted = Vec::new();
        for last in self.cache().pods.values_mut().filter(|last| last.server == ServerState::Differs) {
            last.server = ServerState::Unknown;
            drifted.push(Arc::clone(&last.report));
        }
        for report in drifted {
            tracing::debug!(pod = %report.name, uid = report.uid, "the status at the API server differs from the last report");
            self.put(Job::again(&report), false);
        }
    }
}

#[cfg(test)]
#[path = "unchanged_status_tests.rs"]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod unchanged_status_tests;

#[cfg(test)]
mod tests {
    use keelson_config::{Config, Kubernetes};
    use keelson_kube_model::{Node, annotations};
    use keelson_node_status_core::{NodeReport, PodDocument, PodUpdate};
    use keelson_service_kit::Context;
    use serde_json::json;
    use tokio::time::Instant;

    use super::*;
    use crate::queue::JobError;
    use crate::writer::{ControlPlaneWriter as _, GonePods};

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

    async fn report(writer: &KubernetesWriter, uid: &str, source: &str, hash: &str) {
        let pod = json!({
            "metadata": {"annotations": {(annotations::CONFIG_HASH): hash}},
            "spec": {"containers": []}, "status": status("Running"),
        });
        let json = pod.to_string();
        let pod_json = json.as_bytes();
        let document =
            PodDocument { uid, namespace: "default", name: uid, source, pod_json, ..PodDocument::default() };
        let update = PodUpdate::first(&document, writer.writes_pods_of(source)).unwrap();
        writer.write_pod(update).await.unwrap();
    }

    /// A report of this Node whose volumes in use are not known.
    fn node_report(node: Value) -> NodeReport {
        NodeReport {
            node: serde_json::from_value::<Node>(node).unwrap().into(),
            has_volumes_in_use: false,
            csi_drivers: Arc::default(),
        }
    }

    /// The queued jobs.
    fn jobs(writer: &KubernetesWriter) -> Vec<String> {
        let mut queue = writer.queue();
        let jobs = std::iter::from_fn(|| queue.take()).map(|pending| match pending.job {
            Job::Pod(pod) => pod.report.uid.clone(),
            other => format!("{other:?}"),
        });
        jobs.collect()
    }

    #[tokio::test]
    async fn the_node_is_written_before_mirror_pods() {
        let writer = writer();
        report(&writer, "s", "file", "1").await;
        let next = || writer.next_job().map(|pending| pending.job);
        writer.write_node(&node_report(json!({"metadata": {"name": "n1"}}))).await.unwrap();
        assert!(matches!(next(), Some(Job::Node(_))));
        // Without its Node it is deferred, and taken as soon as there is one.
        let mirror = writer.next_job().unwrap();
        assert!(mirror.job.is_mirror());
        writer.queue().defer(mirror, JobError::ThisJob, Instant::now());
        assert_eq!(next(), None);
        writer.set_registered("u1", Value::Null);
        assert!(next().is_some_and(|job| job.is_mirror()));
    }

    #[tokio::test]
    async fn a_pod_status_changed_by_another_client_is_written_again_once() {
        let writer = writer();
        report(&writer, "a", API, "").await;
        assert_eq!(jobs(&writer), ["a"]);
        let live = |phase: &str| json!({"metadata": {"uid": "a"}, "status": status(phase)});
        writer.observe_pod("a", &live("Running"));
        writer.observe_pod("other", &live("Pending"));
        writer.requeue_drifted();
        assert_eq!(jobs(&writer), [""; 0]);
        writer.observe_pod("a", &live("Pending"));
        assert_eq!(jobs(&writer), [""; 0], "it may be our own change on its way");
        writer.requeue_drifted();
        writer.requeue_drifted();
        assert_eq!(jobs(&writer), ["a"]);
        // A change that is reverted in time is no drift.
        writer.observe_pod("a", &live("Pending"));
        writer.observe_pod("a", &live("Running"));
        writer.requeue_drifted();
        assert_eq!(jobs(&writer), [""; 0]);
        writer.observe_pod("a", &live("Pending"));
        writer.drop_pods(GonePods::One("a".into())).await;
        writer.requeue_drifted();
        assert_eq!(jobs(&writer), [""; 0], "a pod that is gone is not reported");
    }

    #[tokio::test]
    async fn a_node_changed_by_another_client_is_written_again_once() {
        let writer = writer();
        let node = |ready: &str, heartbeat: &str| {
            let condition = json!({"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat});
            json!({"metadata": {"name": "n1", "uid": "u"}, "status": {"conditions": [condition]}})
        };
        writer.write_node(&node_report(node("True", "2026-01-01T00:00:00Z"))).await.unwrap();
        let own = jobs(&writer);
        assert_eq!(own.len(), 1);
        writer.observe_node(&node("True", "2026-01-01T00:05:00Z"));
        writer.requeue_drifted();
        assert_eq!(jobs(&writer), [""; 0]);
        // The node controller has not heard of the node for long.
        writer.observe_node(&node("Unknown", "2026-01-01T00:05:00Z"));
        assert_eq!(jobs(&writer), [""; 0], "it may be our own change on its way");
        writer.requeue_drifted();
        writer.requeue_drifted();
        assert_eq!(jobs(&writer), own);
    }

    #[tokio::test]
    async fn all_pods_are_reported_again_after_a_new_registration_of_the_node() {
        let writer = writer();
        writer.set_registered("first", Value::Null);
        report(&writer, "s", "file", "1").await;
        report(&writer, "a", API, "").await;
        assert_eq!(jobs(&writer).len(), 2);
        for (uid, expected) in [("first", 0), ("second", 2), ("second", 0)] {
            writer.set_registered(uid, Value::Null);
            writer.requeue_drifted();
            assert_eq!(jobs(&writer).len(), expected, "{uid}");
        }
    }

    #[tokio::test]
    async fn pods_are_reported_again_when_a_cloud_sets_the_node_addresses() {
        let mut config = Config { node_name: "n1".into(), ..Config::default() };
        config.node_status.external_cloud = true;
        let writer = writer_of(config);
        let node = |addresses: Value| json!({"metadata": {"name": "n1"}, "status": {"addresses": addresses}});
        report(&writer, "a", API, "").await;
        let own = node(json!([{"type": "Hostname", "address": "n1"}]));
        writer.write_node(&node_report(own)).await.unwrap();
        writer.requeue_drifted();
        jobs(&writer);
        let addresses = json!([{"type": "InternalIP", "address": "10.0.0.7"}]);
        writer.observe_node(&node(addresses.clone()));
        assert_eq!(writer.cache().host_addresses(true), Some(&addresses));
        writer.requeue_drifted();
        assert!(jobs(&writer).contains(&"a".to_owned()));
        writer.observe_node(&node(addresses));
        writer.requeue_drifted();
        assert!(!jobs(&writer).contains(&"a".to_owned()));
    }

    #[tokio::test]
    async fn a_replay_skips_unchanged_pods_and_removes_missing_ones() {
        let writer = writer();
        report(&writer, "s", "file", "h").await;
        report(&writer, "a", API, "").await;
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
        let mut observed = ObservedPods::default();
        observed.take(Signal::Opened, &writer);
        observed.take(pod("m", "s", 1, mirror.clone()), &writer);
        observed.take(pod("a", "a", 1, json!({"status": status("Running")})), &writer);
        observed.take(synced(), &writer);
        // A document of an unchanged revision is not read.
        observed.take(Signal::Opened, &writer);
        observed.take(pod("a", "a", 1, drifted.clone()), &writer);
        writer.requeue_drifted();
        assert_eq!(jobs(&writer), [""; 0]);
        observed.take(pod("a", "a", 2, drifted), &writer);
        writer.requeue_drifted();
        assert_eq!(jobs(&writer), ["a"]);
        observed.take(synced(), &writer);
        assert_eq!(jobs(&writer), ["s"], "the mirror pod was deleted while the stream was down");
    }

    #[tokio::test]
    async fn a_late_mirror_pod_of_a_removed_static_pod_is_deleted() {
        let writer = writer();
        report(&writer, "s", "file", "s").await;
        jobs(&writer);
        let mut observed = ObservedPods::default();
        let mut revision = 0;
        let mut mirror_of = |hash: &str| {
            revision += 1;
            let json = json!({"metadata": {"annotations": {(annotations::CONFIG_MIRROR): hash}}, "status": status("Running")});
            observed.observe(
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
        assert_eq!(jobs(&writer), [""; 0], "its pod may not have been reported yet");
        writer.drop_pods(GonePods::AllBut(["s".into()].into())).await;
        assert_eq!(jobs(&writer).len(), 1);
        mirror_of("s");
        assert_eq!(jobs(&writer), [""; 0]);
        mirror_of("gone");
        let removal = |uid: &str| {
            let name = PodFullName::new(uid, "default");
            [format!("{:?}", Job::RemovePod { uid: uid.into(), name })]
        };
        assert_eq!(jobs(&writer), removal("gone"));
        writer.drop_pods(GonePods::One("s".into())).await;
        assert_eq!(jobs(&writer), removal("s"));
        mirror_of("s");
        assert_eq!(jobs(&writer), removal("s"), "the server has created it late");
    }

    #[tokio::test]
    async fn a_deleted_mirror_pod_is_recreated_and_its_status_written_again() {
        let writer = writer();
        report(&writer, "s", "file", "h").await;
        jobs(&writer);
        let name = PodFullName::new("s", "default");
        let mirror = |hash: &str, phase: &str| json!({"metadata": {"uid": "m", "annotations": {(annotations::CONFIG_MIRROR): hash}}, "status": status(phase)});
        writer.observe_mirror(&name, Some(&mirror("h", "Pending")));
        assert_eq!(jobs(&writer), [""; 0]);
        writer.requeue_drifted();
        assert_eq!(jobs(&writer), ["s"]);
        writer.observe_mirror(&name, Some(&mirror("h", "Running")));
        writer.requeue_drifted();
        assert_eq!(jobs(&writer), [""; 0]);
        for live in [Some(mirror("older", "Running")), None] {
            writer.observe_mirror(&name, live.as_ref());
            assert_eq!(jobs(&writer), ["s"]);
        }
    }
}
