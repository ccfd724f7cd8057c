//! The desires that pod-sync has sent, and the removal of what is dead: the only place that removes
//! containers and sandboxes, and by [`crate::unused`], its part for them, images.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_cri::v1 as cri;
use keelson_config::ContainerCollection;
use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::collection::{
    Collection, Limits, ListedContainer, ListedPod, ListedSandbox, Wanted, plan_collection,
};
use keelson_service_kit::{Context, EventRing, ObjectRef, now_unix_nanos};
use tokio::sync::Notify;
use tonic::Status;

use crate::cri::{Cri, gone_is_done};
use crate::files::Files;
use crate::images::Images;
use crate::observe::Observer;
use crate::ticking::ticking;
use crate::unused::UnusedImages;

/// Between two collections when nothing asks for one (pod-lifecycle.md §1).
const PERIOD: Duration = Duration::from_secs(60);
/// Exits come in groups; one collection serves them all.
const GATHER: Duration = Duration::from_millis(200);
/// How long one removal may take.
pub const REMOVE_WITHIN: Duration = Duration::from_secs(20);
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
    /// Images of the pods, as their specs name them.
    images: BTreeMap<String, Vec<String>>,
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
                    Ok(Want::Unmount) => Wanted::Ended,
                    _ => Wanted::Keep,
                };
                if state.replaying {
                    state.incoming.insert(uid.clone(), want);
                }
                state.images.insert(uid.clone(), pod.images);
                state.wanted.insert(uid, want);
            }
            pb::sync_request::Item::DroppedUid(uid) => {
                state.wanted.remove(&uid);
                state.incoming.remove(&uid);
                state.images.remove(&uid);
            }
            pb::sync_request::Item::Complete(set) => {
                // A set that ends before every source has reported goes on with the next message.
                if set.sources_ready && std::mem::take(&mut state.replaying) {
                    state.wanted = std::mem::take(&mut state.incoming);
                    let State { images, wanted, .. } = &mut *state;
                    images.retain(|uid, _| wanted.contains_key(uid));
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

    /// Whether a whole set with all sources ready is known.
    pub fn are_complete(&self) -> bool {
        self.state().complete
    }

    /// The images of every pod that is wanted or still ends, as the specs name them. One that has ended needs none.
    pub fn wanted_images(&self) -> BTreeSet<String> {
        let state = self.state();
        let kept = state
            .images
            .iter()
            .filter(|(uid, _)| state.wanted.get(*uid).is_some_and(|want| *want == Wanted::Keep));
        kept.flat_map(|(_, images)| images).cloned().collect()
    }

    fn snapshot(&self) -> (BTreeMap<String, Wanted>, bool) {
        let state = self.state();
        (state.wanted.clone(), state.complete)
    }

    /// As [`Self::snapshot`], of one pod.
    fn of(&self, uid: &str) -> (BTreeMap<String, Wanted>, bool) {
        let state = self.state();
        let wanted = state.wanted.get(uid).map(|want| (uid.to_owned(), *want));
        (wanted.into_iter().collect(), state.complete)
    }

    /// Whether nothing of a pod with this UID is to remain.
    fn forgets(&self, uid: &str) -> bool {
        let state = self.state();
        state.wanted.get(uid).map_or(state.complete, |want| *want == Wanted::Forget)
    }

    /// Whether a pod with this UID is wanted; everything is until the first whole set.
    fn wants(&self, uid: &str) -> bool {
        let state = self.state();
        !state.complete || state.wanted.get(uid).is_some_and(|w| *w != Wanted::Forget)
    }
}

/// The limits of the configuration.
pub fn limits_of(config: &ContainerCollection) -> Limits {
    let kept = |number: i32| usize::try_from(number).ok();
    Limits {
        minimum_age: i64::try_from(config.minimum_age_ms).unwrap_or(i64::MAX).saturating_mul(1_000_000),
        per_container: kept(config.max_per_container),
        total: kept(config.max_total),
        order: false,
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
    /// Removes unused images.
    pub unused: UnusedImages,
    /// Which removals failed.
    pub failures: Failures,
    /// How many dead containers are kept.
    pub limits: Limits,
    /// Where failures are told.
    pub events: EventRing,
    /// The node that they are about.
    pub node: ObjectRef,
    /// A removal that takes longer is given up and tried again after the others.
    pub remove_within: Duration,
}

/// Containers and sandboxes that could not be removed, by the number of the last failure: they come after the
/// others, so that one that hangs holds nothing else up.
#[derive(Debug, Clone, Default)]
pub struct Failures(Arc<Mutex<FailureBook>>);

#[derive(Debug, Default)]
struct FailureBook {
    count: u64,
    last: HashMap<String, u64>,
}

impl Failures {
    fn book(&self) -> std::sync::MutexGuard<'_, FailureBook> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, id: &str) {
        let mut book = self.book();
        book.count += 1;
        let number = book.count;
        book.last.insert(id.to_owned(), number);
    }

    fn done(&self, id: &str) {
        self.book().last.remove(id);
    }

    /// What a plan removes: what has failed comes behind what has not, the latest failure last. Failures of
    /// what is not due any more are forgotten.
    fn order<'a>(&self, plan: &'a Collection) -> Vec<&'a String> {
        let mut due: Vec<&String> = plan.containers.iter().chain(&plan.sandboxes).collect();
        let mut book = self.book();
        book.last.retain(|id, _| due.contains(&id));
        due.sort_by_key(|id| book.last.get(*id).copied().unwrap_or(0));
        due
    }
}

/// What one collection has removed so far.
#[derive(Debug, Default)]
struct Removed {
    containers: u32,
    sandboxes: u32,
    refused: Option<Status>,
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
            let whole = !swept;
            // Removals that hang are given up one by one and must not make the loop look stuck.
            let collection = ticking(&progress, self.collect());
            // Cancel-safe: what was not removed is removed after the next start.
            let result = tokio::select! {
                () = context.shutdown.cancelled() => return,
                result = collection => result,
            };
            if let Err(status) = &result {
                tracing::debug!(error = status.message(), "collection has to be repeated");
                // Those in between are repeated each minute at the latest, and only that is told.
                if whole && self.desires.are_complete() {
                    self.events.warning(self.node.clone(), "ContainerGCFailed", status.message());
                }
            }
            let (_, complete) = self.desires.snapshot();
            if complete && !swept && result.is_ok() {
                swept = true;
                ticking(&progress, self.sweep()).await;
            }
        }
    }

    /// Removes the log folders of pods that nobody knows.
    async fn sweep(&self) {
        let (desires, observer, files) = (self.desires.clone(), self.observer.clone(), self.files.clone());
        let known = move |uid: &str| desires.wants(uid) || observer.knows(uid);
        match tokio::task::spawn_blocking(move || files.sweep_logs(known)).await {
            Ok(Ok(removed @ 1..)) => tracing::info!(removed, "removed log folders of pods that are gone"),
            Ok(Err(error)) => {
                tracing::warn!(
                    error = keelson_service_kit::status::chain(&error),
                    "log folders of pods that are gone stay for now"
                );
            }
            Ok(Ok(0)) | Err(_) => {}
        }
    }

    /// One collection. How many containers and sandboxes were removed.
    ///
    /// # Errors
    /// The last refusal of the runtime; the others are tried all the same.
    pub async fn collect(&self) -> Result<(u32, u32), Status> {
        self.collect_within(&self.limits).await
    }

    /// As [`Self::collect`], for room: of pods that have ended for good nothing is kept, and of the others as little as
    /// restarts need.
    ///
    /// # Errors
    /// As there.
    pub async fn collect_for_room(&self) -> Result<(u32, u32), Status> {
        self.collect_within(&Limits { order: true, ..self.limits }).await
    }

    async fn collect_within(&self, limits: &Limits) -> Result<(u32, u32), Status> {
        let pods = self.observer.all();
        let (wanted, complete) = self.desires.snapshot();
        let listed: Vec<ListedPod> = pods.iter().map(|p| listed(p)).collect();
        let plan = plan_collection(&listed, &wanted, complete, limits, now_unix_nanos());
        if plan.is_empty() {
            return Ok((0, 0));
        }
        self.apply(&plan, &pods, limits).await
    }

    async fn apply(
        &self,
        plan: &Collection,
        pods: &[Arc<pb::RuntimePod>],
        limits: &Limits,
    ) -> Result<(u32, u32), Status> {
        let owners: HashMap<&str, &Arc<pb::RuntimePod>> =
            pods.iter().flat_map(|p| ids_of(p).map(move |id| (id, p))).collect();
        let mut removed = Removed::default();
        let mut touched: BTreeSet<&str> = plan.forgotten.iter().map(String::as_str).collect();
        for id in self.failures.order(plan) {
            let Some(pod) = owners.get(id.as_str()) else { continue };
            touched.insert(&pod.uid);
            match self.remove(pod, id, limits, &mut removed).await {
                Ok(()) => self.failures.done(id),
                Err(status) => {
                    self.failures.failed(id);
                    let (pod, error) = (&pod.name, status.message());
                    tracing::warn!(id, pod, error, "cannot remove, will retry");
                    removed.refused = Some(status);
                }
            }
        }
        for uid in touched {
            let _ = self.observer.read(uid).await;
        }
        for pod in pods.iter().filter(|p| plan.forgotten.contains(&p.uid)) {
            self.forget(pod).await;
        }
        match removed.refused {
            Some(status) => Err(status),
            None => Ok((removed.containers, removed.sandboxes)),
        }
    }

    /// Removes a container or sandbox unless it is not due any more.
    async fn remove(
        &self,
        pod: &pb::RuntimePod,
        id: &str,
        limits: &Limits,
        removed: &mut Removed,
    ) -> Result<(), Status> {
        if !self.still_due(&pod.uid, id, limits).await? {
            return Ok(());
        }
        if let Some(container) = pod.containers.iter().find(|c| c.id == id) {
            self.within(id, self.remove_container(id)).await?;
            removed.containers += 1;
            self.files.forget_container(pod, container);
        } else {
            self.within(id, self.remove_sandbox(id)).await?;
            removed.sandboxes += 1;
        }
        Ok(())
    }

    /// Decides again: the plan is as old as the removals before this one took.
    async fn still_due(&self, uid: &str, id: &str, limits: &Limits) -> Result<bool, Status> {
        let Some(mut pod) = self.observer.cached(uid) else { return Ok(false) };
        // No event tells of a start everywhere, and what has started meanwhile must not be removed.
        if pod.containers.iter().any(|c| c.id == id && c.state() == pb::ContainerState::Created) {
            pod = self.observer.read(uid).await?;
        }
        let (wanted, complete) = self.desires.of(uid);
        // Alone the pod has not too many: what was beyond the number in all is due as long as it is not the newest.
        let alone = Limits { total: limits.total.map(|_| 0), ..*limits };
        let plan = plan_collection(&[listed(&pod)], &wanted, complete, &alone, now_unix_nanos());
        Ok(plan.containers.iter().chain(&plan.sandboxes).any(|due| due == id))
    }

    /// Removes what is left of a pod outside the runtime, if the runtime has nothing of it and it is not
    /// wanted again.
    async fn forget(&self, pod: &Arc<pb::RuntimePod>) {
        if self.observer.knows(&pod.uid) || !self.desires.forgets(&pod.uid) {
            return;
        }
        self.images.forget(&pod.uid);
        let (files, pod) = (self.files.clone(), Arc::clone(pod));
        let _ = tokio::task::spawn_blocking(move || files.forget(&pod)).await;
    }

    async fn within<F>(&self, id: &str, removal: F) -> Result<(), Status>
    where
        F: Future<Output = Result<(), Status>>,
    {
        let limit = self.remove_within;
        let late = |_| Status::deadline_exceeded(format!("the runtime has not removed {id} in {limit:?}"));
        tokio::time::timeout(limit, removal).await.map_err(late)?
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

fn ids_of(pod: &pb::RuntimePod) -> impl Iterator<Item = &str> {
    let sandboxes = pod.sandboxes.iter().map(|s| s.id.as_str());
    pod.containers.iter().map(|c| c.id.as_str()).chain(sandboxes)
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
mod tests;
