//! Creates, replaces and deletes mirror pods: how static pods are shown at the API server (pod-lifecycle.md §3).

use std::collections::{BTreeMap, BTreeSet};

use keelson_kube_api::{KubeError, Object, Range, Resource};
use keelson_kube_model::{PodFullName, annotations};
use keelson_node_status_core::PodReport;
use keelson_node_status_core::patch::{Mirror, decide_mirror, mirror_of};
use serde_json::Value;

use crate::kubernetes::KubernetesWriter;
use crate::kubernetes::report_cache::LastReport;
use crate::queue::Job;

/// The UID of the static pod of which a server's pod is the mirror pod.
fn static_pod_uid(pod: &Value) -> Option<&str> {
    pod["metadata"]["annotations"][annotations::CONFIG_MIRROR].as_str()
}

impl KubernetesWriter {
    /// Makes sure that a static pod has its mirror pod, and returns it; `None` if another pod has its name.
    ///
    /// A node may not read a pod that does not exist, so the pod is read only if pod-config has seen one of the name on this
    /// node, or the server has said that it exists.
    pub(super) async fn ensure_mirror(&self, report: &PodReport) -> Result<Option<Object>, KubeError> {
        let is_there = self.cache().on_server.values().any(|name| *name == report.name);
        let live = if is_there { self.get_readable(&report.name).await? } else { None };
        if live.is_some() {
            return self.reconcile_mirror(report, live).await;
        }
        match self.reconcile_mirror(report, None).await {
            // A pod of the name exists. If this node may not read it, it belongs to another node, or to none.
            Err(error) if error.is_conflict() => {
                match self.main.get(Resource::POD, Some(&report.name.namespace), &report.name.name).await {
                    Ok(Some(live)) => self.reconcile_mirror(report, Some(live)).await,
                    Err(unrelated) if unrelated.is_unrelated() => {
                        tracing::warn!(pod = %report.name, "a pod of another node has the name of a static pod, which therefore gets no mirror pod");
                        Ok(None)
                    }
                    Ok(None) => Err(error),
                    Err(error) => Err(error),
                }
            }
            done => done,
        }
    }

    /// The server's pod of a name; `None` if there is none, or none that this node may read.
    async fn get_readable(&self, name: &PodFullName) -> Result<Option<Object>, KubeError> {
        match self.main.get(Resource::POD, Some(&name.namespace), &name.name).await {
            Err(error) if error.is_unrelated() => Ok(None),
            read => read,
        }
    }

    /// Creates or replaces the mirror pod if needed; `live` is the server's pod of the name.
    async fn reconcile_mirror(
        &self,
        report: &PodReport,
        live: Option<Object>,
    ) -> Result<Option<Object>, KubeError> {
        let namespace = &report.name.namespace;
        let (hash, is_deleting) = (report.pod.config_hash.as_deref(), report.is_deleting());
        let needed = decide_mirror(live.as_ref().map(|live| &live.0), hash, is_deleting);
        match (needed, live) {
            (Mirror::UpToDate, live) => return Ok(live),
            (Mirror::Foreign, _) => {
                tracing::warn!(pod = %report.name, "a pod of the API has the name of a static pod, which therefore gets no mirror pod");
                return Ok(None);
            }
            (Mirror::NotNeeded, _) => return Ok(None),
            // The mirror pod of the instance before an update, which is still ending. This pod is queued again once that has
            // gone.
            (Mirror::Create { replace: true }, Some(live)) if self.belongs_to_other_pod(&live, report) => {
                return Ok(None);
            }
            (Mirror::Create { replace: true }, Some(live)) => self.delete(&live).await?,
            (Mirror::Create { .. }, _) => {}
        }
        let Some(node_uid) = self.cache().node_uid.clone() else {
            let message = format!("the Node {} that owns it is not registered yet", self.node_name);
            return Err(self.main.unreachable(&format!("the mirror of {}", report.name), message));
        };
        let mirror = mirror_of(report.pod().unwrap_or_default(), &self.node_name, &node_uid);
        let made = self.main.create(Resource::POD, Some(namespace), &mirror).await?;
        // Until pod-config shows it, the next report finds it here.
        self.cache().on_server.insert(made.uid().to_owned(), report.name.clone());
        Ok(Some(made))
    }

    /// Whether a mirror pod is that of another static pod that is still on this node.
    fn belongs_to_other_pod(&self, mirror: &Object, report: &PodReport) -> bool {
        static_pod_uid(&mirror.0).is_some_and(|static_pod_uid| {
            static_pod_uid != report.uid && self.cache().pods.contains_key(static_pod_uid)
        })
    }

    /// Queues the static pods of this name again: one of them may have waited for the mirror pod of another to go.
    pub(super) fn requeue_static_pods(&self, name: &PodFullName) {
        let is_next = |last: &&LastReport| last.report.is_static() && last.report.name == *name;
        let next: Vec<Job> =
            self.cache().pods.values().filter(is_next).map(|last| Job::again(&last.report)).collect();
        for job in next {
            self.put(job, false);
        }
    }

    /// Removes the mirror pod of a pod that is gone; with `uid` only if it is that pod's.
    pub(super) async fn remove_mirror(&self, name: &PodFullName, uid: Option<&str>) -> Result<(), KubeError> {
        let live = self.get_readable(name).await?;
        let Some(live) = live.filter(|live| static_pod_uid(&live.0).is_some()) else { return Ok(()) };
        if uid.is_none_or(|uid| static_pod_uid(&live.0) == Some(uid)) {
            self.delete(&live).await
        } else {
            Ok(())
        }
    }

    /// Removes the mirror pods of pods that are not here any more.
    pub(super) async fn remove_stale_mirrors(&self, uids: &BTreeSet<String>) -> Result<(), KubeError> {
        let range = Range::of_fields(Resource::POD, format!("spec.nodeName={}", self.node_name));
        for live in self.main.list(&range).await? {
            let Some(hash) = static_pod_uid(&live.0) else { continue };
            // A pod that came while this waited.
            let is_here = |cache: &BTreeMap<String, LastReport>| cache.contains_key(hash);
            if !uids.contains(hash) && !is_here(&self.cache().pods) {
                self.delete(&live).await?;
            }
        }
        Ok(())
    }
}
