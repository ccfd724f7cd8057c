//! Garbage collection of dead containers and sandboxes. Nothing else removes them; images are removed by
//! [`crate::image_gc`].

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use keelson_config::ContainerCollection;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::container_gc::{ContainerGcPlan, GcPolicy, ListedPod, plan_container_gc};
use keelson_service_kit::{Context, EventRing, ObjectRef, now_unix_nanos};
use tonic::Status;

use crate::cri::Cri;
use crate::cri_objects::gc_pod;
use crate::desired_pods::DesiredPods;
use crate::files::Files;
use crate::heartbeat::with_heartbeat;
use crate::image_gc::ImageCollector;
use crate::images::Images;
use crate::observe::Observer;

/// Interval between two collections without a trigger (pod-lifecycle.md §1).
const PERIOD: Duration = Duration::from_secs(60);
/// Delay after an exit: exits come in groups, and one collection handles them all.
const EXIT_BATCH_DELAY: Duration = Duration::from_millis(200);
/// Timeout of one removal.
pub const REMOVE_TIMEOUT: Duration = Duration::from_secs(20);
const HEARTBEAT: Duration = keelson_service_kit::LoopHandle::HEARTBEAT;

/// The policy from the configuration.
pub fn gc_policy(config: &ContainerCollection) -> GcPolicy {
    let limit = |number: i32| usize::try_from(number).ok();
    GcPolicy {
        minimum_age: i64::try_from(config.minimum_age_ms).unwrap_or(i64::MAX).saturating_mul(1_000_000),
        max_per_container: limit(config.max_per_container),
        max_total: limit(config.max_total),
        reclaim_space: false,
    }
}

/// Garbage collector of dead containers, sandboxes, links and logs.
#[derive(Debug, Clone)]
pub struct Collector {
    /// The runtime.
    pub cri: Cri,
    /// The observed pods.
    pub observer: Observer,
    /// Log folders and links.
    pub files: Files,
    /// The image service, whose pull failures are forgotten with a pod.
    pub images: Images,
    /// The desired pods.
    pub desired: DesiredPods,
    /// Garbage collector of images.
    pub image_collector: ImageCollector,
    /// Removals that failed.
    pub failed_removals: FailedRemovals,
    /// How many dead containers are kept.
    pub policy: GcPolicy,
    /// Where errors are reported as events.
    pub events: EventRing,
    /// The node, as the object of the events.
    pub node: ObjectRef,
    /// A removal that takes longer is cancelled and retried after the others.
    pub remove_timeout: Duration,
}

/// Containers and sandboxes whose removal failed, by the number of the last failure. They are removed after the others,
/// so that a removal that hangs does not block others.
#[derive(Debug, Clone, Default)]
pub struct FailedRemovals(Arc<Mutex<RemovalErrors>>);

#[derive(Debug, Default)]
struct RemovalErrors {
    count: u64,
    last: HashMap<String, u64>,
}

impl FailedRemovals {
    fn errors(&self) -> std::sync::MutexGuard<'_, RemovalErrors> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, id: &str) {
        let mut errors = self.errors();
        errors.count += 1;
        let number = errors.count;
        errors.last.insert(id.to_owned(), number);
    }

    fn succeeded(&self, id: &str) {
        self.errors().last.remove(id);
    }

    /// The removals of a plan: those without a failure first, then by the time of the last failure. Failures of objects
    /// that are not due any more are forgotten.
    fn removal_order<'a>(&self, plan: &'a ContainerGcPlan) -> Vec<&'a String> {
        let mut due: Vec<&String> = plan.containers.iter().chain(&plan.sandboxes).collect();
        let mut errors = self.errors();
        errors.last.retain(|id, _| due.contains(&id));
        due.sort_by_key(|id| errors.last.get(*id).copied().unwrap_or(0));
        due
    }
}

/// The removals of one collection so far.
#[derive(Debug, Default)]
struct Removed {
    containers: u32,
    sandboxes: u32,
    last_error: Option<Status>,
}

impl Collector {
    /// Collects when the desired pods change, when a container exits, and every minute.
    pub async fn run(self, context: Context) {
        let progress = context.progress.register("collector");
        let mut exits = self.observer.hub().subscribe();
        let mut logs_swept = false;
        let mut full_at = tokio::time::Instant::now() + PERIOD;
        loop {
            progress.tick();
            // Every arm is cancel-safe: the next period makes up for a lost wake-up of `exits`.
            tokio::select! {
                () = context.shutdown.cancelled() => return,
                () = self.desired.changed() => {}
                _ = exits.next() => {
                    tokio::time::sleep(EXIT_BATCH_DELAY).await;
                    while exits.try_next().is_some() {}
                }
                () = tokio::time::sleep(HEARTBEAT) => {
                    if tokio::time::Instant::now() < full_at {
                        continue;
                    }
                    full_at = tokio::time::Instant::now() + PERIOD;
                    logs_swept = false;
                }
            }
            let is_periodic = !logs_swept;
            // Each removal has its own timeout, so waiting for several of them must not make the loop look stuck.
            let collection = with_heartbeat(&progress, self.collect());
            // Cancel-safe: the next start removes what is left.
            let result = tokio::select! {
                () = context.shutdown.cancelled() => return,
                result = collection => result,
            };
            if let Err(status) = &result {
                tracing::debug!(error = status.message(), "a container collection failed, will retry");
                // Only the collection of each minute is reported; it repeats the others.
                if is_periodic && self.desired.is_complete() {
                    self.events.warning(self.node.clone(), "ContainerGCFailed", status.message());
                }
            }
            let (_, complete) = self.desired.snapshot();
            if complete && !logs_swept && result.is_ok() {
                logs_swept = true;
                with_heartbeat(&progress, self.sweep()).await;
            }
        }
    }

    /// Removes the log folders of unknown pods.
    async fn sweep(&self) {
        let (desired, observer, files) = (self.desired.clone(), self.observer.clone(), self.files.clone());
        let known = move |uid: &str| desired.is_desired(uid) || observer.knows(uid);
        match tokio::task::spawn_blocking(move || files.sweep_logs(known)).await {
            Ok(Ok(removed @ 1..)) => {
                tracing::info!(removed, "removed log folders of pods that no longer exist")
            }
            Ok(Err(error)) => {
                tracing::warn!(
                    error = keelson_service_kit::status::chain(&error),
                    "cannot remove log folders of pods that no longer exist"
                );
            }
            Ok(Ok(0)) | Err(_) => {}
        }
    }

    /// Runs one collection. Returns the numbers of removed containers and sandboxes.
    ///
    /// # Errors
    /// The last error of the runtime; the other removals are tried nevertheless.
    pub async fn collect(&self) -> Result<(u32, u32), Status> {
        self.collect_with(&self.policy).await
    }

    /// As [`Self::collect`], to reclaim disk space: keeps nothing of pods that have ended for good, and of other pods only
    /// what restart decisions need.
    ///
    /// # Errors
    /// As [`Self::collect`].
    pub async fn reclaim_space(&self) -> Result<(u32, u32), Status> {
        self.collect_with(&GcPolicy { reclaim_space: true, ..self.policy }).await
    }

    async fn collect_with(&self, policy: &GcPolicy) -> Result<(u32, u32), Status> {
        let pods = self.observer.all();
        let (wanted, complete) = self.desired.snapshot();
        let listed: Vec<ListedPod> = pods.iter().map(|p| gc_pod(p)).collect();
        let plan = plan_container_gc(&listed, &wanted, complete, policy, now_unix_nanos());
        if plan.is_empty() {
            return Ok((0, 0));
        }
        self.apply_plan(&plan, &pods, policy).await
    }

    async fn apply_plan(
        &self,
        plan: &ContainerGcPlan,
        pods: &[Arc<pb::RuntimePod>],
        policy: &GcPolicy,
    ) -> Result<(u32, u32), Status> {
        let owners: HashMap<&str, &Arc<pb::RuntimePod>> =
            pods.iter().flat_map(|p| ids_of(p).map(move |id| (id, p))).collect();
        let mut removed = Removed::default();
        let mut changed: BTreeSet<&str> = plan.forgotten.iter().map(String::as_str).collect();
        for id in self.failed_removals.removal_order(plan) {
            let Some(pod) = owners.get(id.as_str()) else { continue };
            changed.insert(&pod.uid);
            match self.remove(pod, id, policy, &mut removed).await {
                Ok(()) => self.failed_removals.succeeded(id),
                Err(status) => {
                    self.failed_removals.failed(id);
                    let (pod, error) = (&pod.name, status.message());
                    tracing::warn!(id, pod, error, "cannot remove a container or sandbox, will retry");
                    removed.last_error = Some(status);
                }
            }
        }
        for uid in changed {
            let _ = self.observer.read(uid).await;
        }
        for pod in pods.iter().filter(|p| plan.forgotten.contains(&p.uid)) {
            self.forget(pod).await;
        }
        match removed.last_error {
            Some(status) => Err(status),
            None => Ok((removed.containers, removed.sandboxes)),
        }
    }

    /// Removes a container or sandbox if it is still due.
    async fn remove(
        &self,
        pod: &pb::RuntimePod,
        id: &str,
        policy: &GcPolicy,
        removed: &mut Removed,
    ) -> Result<(), Status> {
        if !self.still_due(&pod.uid, id, policy).await? {
            return Ok(());
        }
        if let Some(container) = pod.containers.iter().find(|c| c.id == id) {
            self.with_timeout(id, self.cri.remove_container(id)).await?;
            removed.containers += 1;
            self.files.forget_container(pod, container);
        } else {
            self.with_timeout(id, self.cri.remove_sandbox(id)).await?;
            removed.sandboxes += 1;
        }
        Ok(())
    }

    /// Repeats the decision, because earlier removals may have taken long.
    async fn still_due(&self, uid: &str, id: &str, policy: &GcPolicy) -> Result<bool, Status> {
        let Some(mut pod) = self.observer.cached(uid) else { return Ok(false) };
        // Not every runtime sends an event for a start, and a container that has started must not be removed.
        if pod.containers.iter().any(|c| c.id == id && c.state() == pb::ContainerState::Created) {
            pod = self.observer.read(uid).await?;
        }
        let (wanted, complete) = self.desired.snapshot_of(uid);
        // A single pod does not exceed the total: a container that did is still due unless it is the newest of its name.
        let single_pod_policy = GcPolicy { max_total: policy.max_total.map(|_| 0), ..*policy };
        let plan =
            plan_container_gc(&[gc_pod(&pod)], &wanted, complete, &single_pod_policy, now_unix_nanos());
        Ok(plan.containers.iter().chain(&plan.sandboxes).any(|due| due == id))
    }

    /// Removes the logs and links of a pod, if the runtime has nothing left of it and it is not desired again.
    async fn forget(&self, pod: &Arc<pb::RuntimePod>) {
        if self.observer.knows(&pod.uid) || !self.desired.is_forgotten(&pod.uid) {
            return;
        }
        self.images.forget(&pod.uid);
        let (files, pod) = (self.files.clone(), Arc::clone(pod));
        let _ = tokio::task::spawn_blocking(move || files.forget(&pod)).await;
    }

    async fn with_timeout<F>(&self, id: &str, removal: F) -> Result<(), Status>
    where
        F: Future<Output = Result<(), Status>>,
    {
        let limit = self.remove_timeout;
        let timed_out =
            |_| Status::deadline_exceeded(format!("the runtime has not removed {id} in {limit:?}"));
        tokio::time::timeout(limit, removal).await.map_err(timed_out)?
    }
}

fn ids_of(pod: &pb::RuntimePod) -> impl Iterator<Item = &str> {
    let sandboxes = pod.sandboxes.iter().map(|s| s.id.as_str());
    pod.containers.iter().map(|c| c.id.as_str()).chain(sandboxes)
}

#[cfg(test)]
mod tests;
