//! The desires that pod-sync has sent, and the removal of what is dead: the only place that removes
//! containers and sandboxes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_cri::v1 as cri;
use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::collection::{
    Collection, ListedContainer, ListedPod, ListedSandbox, Wanted, plan_collection,
};
use keelson_service_kit::{Context, ObjectRef};
use tokio::sync::Notify;
use tonic::Status;

use crate::cri::{Cri, gone_is_done};
use crate::files::Files;
use crate::images::Images;
use crate::observe::Observer;

/// Between two collections when nothing asks for one (pod-lifecycle.md §1).
const PERIOD: Duration = Duration::from_secs(60);
/// Exits come in groups; one collection serves them all.
const GATHER: Duration = Duration::from_millis(200);
const HEARTBEAT: Duration = keelson_service_kit::LoopHandle::HEARTBEAT;

/// What pod-sync wants, shared by the `Sync` stream and the collector.
#[derive(Debug, Clone, Default)]
pub struct Desires(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Counts streams; only the newest one is listened to.
    stream: u64,
    wanted: BTreeMap<String, Wanted>,
    /// What the newest stream has named so far, until it is complete.
    incoming: BTreeMap<String, Wanted>,
    replaying: bool,
    /// A whole set with all sources ready has been taken from the newest stream.
    complete: bool,
}

impl Desires {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new `Sync` stream begins; returns its number.
    pub fn begin(&self) -> u64 {
        let mut state = self.state();
        state.stream += 1;
        state.incoming.clear();
        state.replaying = true;
        state.complete = false;
        state.stream
    }

    /// Takes a message of stream `number`. The epoch to acknowledge, if it ends a set.
    ///
    /// # Errors
    /// ABORTED: a newer stream has taken over.
    pub fn take(&self, number: u64, item: pb::sync_request::Item) -> Result<Option<u64>, Status> {
        let mut state = self.state();
        if state.stream != number {
            return Err(Status::aborted("a newer Sync stream has taken over"));
        }
        let mut done = None;
        match item {
            pb::sync_request::Item::Pod(pod) => {
                let uid = pod.pod.unwrap_or_default().uid;
                let want = match Want::try_from(pod.want) {
                    Ok(Want::Forget) => Wanted::Forget,
                    _ => Wanted::Keep,
                };
                if state.replaying {
                    state.incoming.insert(uid.clone(), want);
                }
                state.wanted.insert(uid, want);
            }
            pb::sync_request::Item::DroppedUid(uid) => {
                state.wanted.remove(&uid);
            }
            pb::sync_request::Item::Complete(set) => {
                if std::mem::take(&mut state.replaying) && set.sources_ready {
                    state.wanted = std::mem::take(&mut state.incoming);
                }
                state.complete = set.sources_ready;
                done = Some(set.epoch);
            }
        }
        drop(state);
        self.0.changed.notify_one();
        Ok(done)
    }

    /// Asks for a collection soon.
    pub fn poke(&self) {
        self.0.changed.notify_one();
    }

    fn snapshot(&self) -> (BTreeMap<String, Wanted>, bool) {
        let state = self.state();
        (state.wanted.clone(), state.complete)
    }

    /// Whether a pod with this UID is wanted; everything is until the first whole set.
    fn wants(&self, uid: &str) -> bool {
        let state = self.state();
        !state.complete || state.wanted.get(uid).is_some_and(|w| *w == Wanted::Keep)
    }
}

/// Removes dead containers, sandboxes, links and logs.
#[derive(Debug, Clone)]
pub struct Collector {
    /// The runtime.
    pub cri: Cri,
    /// What runs.
    pub observer: Observer,
    /// Log folders and links.
    pub files: Files,
    /// Whose pull failures are forgotten with a pod.
    pub images: Images,
    /// What is wanted.
    pub desires: Desires,
}

impl Collector {
    /// Collects when a desire changes or a container exits, and every minute.
    pub async fn run(self, context: Context) {
        let progress = context.progress.register("collector");
        let mut exits = self.observer.hub().subscribe();
        let mut swept = false;
        let mut full_at = tokio::time::Instant::now() + PERIOD;
        loop {
            progress.tick();
            // Every arm is cancel-safe: a lost wake-up of `exits` is made good by the next period.
            tokio::select! {
                () = context.shutdown.cancelled() => return,
                () = self.desires.0.changed.notified() => {}
                _ = exits.next() => {
                    tokio::time::sleep(GATHER).await;
                    while exits.try_next().is_some() {}
                }
                () = tokio::time::sleep(HEARTBEAT) => {
                    if tokio::time::Instant::now() < full_at {
                        continue;
                    }
                    full_at = tokio::time::Instant::now() + PERIOD;
                    swept = false;
                }
            }
            let result = self.collect().await;
            if let Err(status) = &result {
                tracing::debug!(error = status.message(), "collection has to be repeated");
            }
            let (_, complete) = self.desires.snapshot();
            if complete && !swept && result.is_ok() {
                swept = true;
                let known = |uid: &str| self.desires.wants(uid) || self.observer.cached(uid).is_some();
                let removed = self.files.sweep_logs(known);
                if removed > 0 {
                    tracing::info!(removed, "removed log folders of pods that are gone");
                }
            }
        }
    }

    /// One collection. How many containers and sandboxes were removed.
    ///
    /// # Errors
    /// The first refusal of the runtime; the others are tried all the same.
    pub async fn collect(&self) -> Result<(u32, u32), Status> {
        let pods = self.observer.all();
        let (wanted, complete) = self.desires.snapshot();
        let listed: Vec<ListedPod> = pods.iter().map(|p| listed(p)).collect();
        let plan = plan_collection(&listed, &wanted, complete);
        if plan.is_empty() {
            return Ok((0, 0));
        }
        self.apply(&plan, &pods).await
    }

    async fn apply(&self, plan: &Collection, pods: &[Arc<pb::RuntimePod>]) -> Result<(u32, u32), Status> {
        let mut failed = Ok(());
        let mut counts = (0, 0);
        for id in &plan.containers {
            match self.remove_container(id).await {
                Ok(()) => {
                    counts.0 += 1;
                    self.forget_container_files(id, pods);
                }
                Err(status) => failed = self.note(id, pods, status),
            }
        }
        for id in &plan.sandboxes {
            match self.remove_sandbox(id).await {
                Ok(()) => counts.1 += 1,
                Err(status) => failed = self.note(id, pods, status),
            }
        }
        let touched = pods.iter().filter(|p| {
            p.containers.iter().any(|c| plan.containers.contains(&c.id))
                || p.sandboxes.iter().any(|s| plan.sandboxes.contains(&s.id))
        });
        for pod in touched {
            let _ = self.observer.read(&pod.uid).await;
        }
        for uid in &plan.forgotten {
            if failed.is_ok()
                && let Some(pod) = pods.iter().find(|p| p.uid == *uid)
            {
                self.files.forget(pod);
                self.images.forget(uid);
            }
        }
        failed.map(|()| counts)
    }

    fn forget_container_files(&self, id: &str, pods: &[Arc<pb::RuntimePod>]) {
        for pod in pods {
            if let Some(container) = pod.containers.iter().find(|c| c.id == id) {
                self.files.forget_container(pod, container);
            }
        }
    }

    fn note(&self, id: &str, pods: &[Arc<pb::RuntimePod>], status: Status) -> Result<(), Status> {
        let of = |p: &&Arc<pb::RuntimePod>| {
            p.containers.iter().any(|c| c.id == id) || p.sandboxes.iter().any(|s| s.id == id)
        };
        let object = pods.iter().find(of).map(|p| ObjectRef::pod(&p.namespace, &p.name, &p.uid));
        tracing::warn!(
            id,
            pod = object.map(|o| o.name),
            error = status.message(),
            "cannot remove, will retry"
        );
        Err(status)
    }

    async fn remove_container(&self, id: &str) -> Result<(), Status> {
        let request = cri::RemoveContainerRequest { container_id: id.to_owned() };
        gone_is_done(self.cri.runtime().remove_container(self.cri.request(request)).await)
    }

    async fn remove_sandbox(&self, id: &str) -> Result<(), Status> {
        let stop = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        gone_is_done(self.cri.runtime().stop_pod_sandbox(self.cri.request(stop)).await)?;
        let remove = cri::RemovePodSandboxRequest { pod_sandbox_id: id.to_owned() };
        gone_is_done(self.cri.runtime().remove_pod_sandbox(self.cri.request(remove)).await)
    }
}

fn listed(pod: &pb::RuntimePod) -> ListedPod {
    ListedPod {
        uid: pod.uid.clone(),
        containers: pod
            .containers
            .iter()
            .map(|c| ListedContainer {
                id: c.id.clone(),
                name: c.name.clone(),
                sandbox_id: c.sandbox_id.clone(),
                alive: !matches!(c.state(), pb::ContainerState::Exited | pb::ContainerState::Created),
                pending: c.state() == pb::ContainerState::Created,
                created_unix_nanos: c.created_unix_nanos,
            })
            .collect(),
        sandboxes: pod
            .sandboxes
            .iter()
            .map(|s| ListedSandbox {
                id: s.id.clone(),
                ready: s.ready,
                attempt: s.attempt,
                created_unix_nanos: s.created_unix_nanos,
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keelson_proto::keelson::common::v1::{PodRef, SetComplete};
    use pb::sync_request::Item;

    fn pod(uid: &str, want: Want) -> Item {
        Item::Pod(pb::PodDesire {
            pod: Some(PodRef { uid: uid.into(), ..Default::default() }),
            want: want as i32,
            ..Default::default()
        })
    }

    fn complete(sources_ready: bool) -> Item {
        Item::Complete(SetComplete { epoch: 7, sources_ready })
    }

    #[test]
    fn a_new_set_replaces_the_old_one_only_when_it_is_complete_and_all_sources_are_ready() {
        let desires = Desires::default();
        let first = desires.begin();
        desires.take(first, pod("old", Want::Run)).unwrap();
        assert_eq!(desires.take(first, complete(true)).unwrap(), Some(7));
        let second = desires.begin();
        desires.take(second, pod("new", Want::Run)).unwrap();
        assert!(desires.wants("old"), "nothing is swept while a set is incomplete");
        desires.take(second, complete(true)).unwrap();
        assert!(!desires.wants("old"));
        assert!(desires.wants("new"));
    }

    #[test]
    fn without_ready_sources_nothing_is_unwanted() {
        let desires = Desires::default();
        let stream = desires.begin();
        desires.take(stream, complete(false)).unwrap();
        assert!(desires.wants("anything"));
    }

    #[test]
    fn an_older_stream_is_turned_away() {
        let desires = Desires::default();
        let first = desires.begin();
        desires.begin();
        assert!(desires.take(first, pod("u", Want::Run)).is_err());
    }
}
