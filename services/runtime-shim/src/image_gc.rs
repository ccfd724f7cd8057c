//! Garbage collection of unused images (runtime-and-resources.md §6.7), the only code that removes images.
//!
//! The runtime's images are listed at each collection; between two collections, use is known from the observed pods.
//! Nothing is removed without a current list of the images that containers use, nor before pod-sync has sent its
//! complete set of desired pods.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use keelson_config::{Config, ImageCollection};
use keelson_runtime_shim_core::image::with_default_tag;
use keelson_runtime_shim_core::image_gc::{
    Candidate, DiskSpace, Goal, ImageGcPolicy, ImageUsage, ListedImage, plan_image_gc,
};
use keelson_runtime_shim_core::size_text::format_size;
use keelson_service_kit::{Context, EventRing, Metrics, ObjectRef};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tonic::Status;

use crate::clock::Clock;
use crate::cri::Cri;
use crate::cri_objects::listed_image;
use crate::desired_pods::DesiredPods;
use crate::heartbeat::with_heartbeat;
use crate::images::Images;
use crate::observe::Observer;

/// Interval between two collections (runtime-and-resources.md §0.2).
const PERIOD: Duration = Duration::from_secs(300);
/// Interval between two updates of image use from the observed containers.
const USAGE_INTERVAL: Duration = Duration::from_secs(30);
/// Timeout of statvfs(2).
const STATFS_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum time for which an image is kept after an `EnsureImage` call has reported it as present.
const ENSURED_RETENTION_NANOS: i64 = 120 * 1_000_000_000;
const NANOS_PER_MS: i64 = 1_000_000;

/// Garbage collector of images.
#[derive(Debug, Clone)]
pub struct ImageCollector {
    cri: Cri,
    observer: Observer,
    images: Images,
    desired: DesiredPods,
    events: EventRing,
    node: ObjectRef,
    sandbox_image: Option<String>,
    clock: Clock,
    disk: Disk,
    removed: Family<ReasonLabel, Counter>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    policy: Mutex<ImageGcPolicy>,
    usage: Mutex<ImageUsage>,
    /// Held during a collection, so that only one runs at a time.
    collection_lock: tokio::sync::Mutex<()>,
    /// Number of consecutive failed collections.
    consecutive_errors: AtomicU32,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            policy: Mutex::new(policy_of(&ImageCollection::default())),
            usage: Mutex::default(),
            collection_lock: tokio::sync::Mutex::default(),
            consecutive_errors: AtomicU32::default(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: String,
}

/// Images that pods and sandboxes need.
#[derive(Debug, Default)]
struct NeededImages {
    /// References as written in the specs.
    references: BTreeSet<String>,
    /// References that have been looked up; the id of the image, if present, is in `ids`.
    resolved: BTreeSet<String>,
    ids: BTreeSet<String>,
}

/// Source of the usage of the images' file system.
#[derive(Debug, Clone, Default)]
enum Disk {
    /// The file system.
    #[default]
    Statfs,
    #[cfg(test)]
    Set(DiskSpace),
}

/// The result of a collection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Freed {
    /// Number of removed images.
    pub images: u32,
    /// Sum of their listed sizes.
    pub bytes: u64,
}

/// Why a collection failed.
#[derive(Debug, thiserror::Error)]
pub enum ImageGcError {
    /// The runtime does not answer or returned an error.
    #[error("the runtime does not answer: {}", .0.message())]
    Runtime(Status),
    /// The usage of the file system cannot be read.
    #[error("cannot read the usage of the images' file system: {0}")]
    Disk(String),
    /// The collection freed less than required.
    #[error(
        "Failed to garbage collect required amount of images. Attempted to free {needed} bytes, but only found {freed} bytes eligible to free."
    )]
    TooLittleFreed {
        /// Bytes that had to be freed.
        needed: u64,
        /// Bytes that were freed.
        freed: u64,
    },
}

impl ImageCollector {
    /// A collector with the default thresholds.
    pub fn new(
        cri: Cri,
        observer: Observer,
        images: Images,
        desired: DesiredPods,
        events: EventRing,
    ) -> Self {
        Self {
            cri,
            observer,
            images,
            desired,
            events,
            node: ObjectRef::default(),
            sandbox_image: None,
            clock: Clock::System,
            disk: Disk::Statfs,
            removed: Family::default(),
            shared: Arc::default(),
        }
    }

    /// Takes the thresholds, the node name and the sandbox image from the configuration.
    #[must_use]
    pub fn configured(mut self, config: &Config, metrics: &Metrics) -> Self {
        self.set_policy(policy_of(&config.image_collection));
        self.node = ObjectRef::node(&config.node_name);
        self.sandbox_image.clone_from(&config.runtime.sandbox_image);
        metrics.register(
            "kubelet_image_garbage_collected",
            "Images that were removed because of disk usage or of their age",
            self.removed.clone(),
        );
        self
    }

    fn policy(&self) -> ImageGcPolicy {
        *self.shared.policy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_policy(&self, policy: ImageGcPolicy) {
        *self.shared.policy.lock().unwrap_or_else(PoisonError::into_inner) = policy;
    }

    fn usage(&self) -> std::sync::MutexGuard<'_, ImageUsage> {
        self.shared.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Collects every five minutes until the shutdown, by the current thresholds of the configuration.
    pub async fn run(self, context: Context) {
        let progress = context.progress.register("image-collector");
        let mut live = context.live.subscribe();
        let work = async {
            while let Err(status) = self.images.resolve_interrupted_pulls().await {
                tracing::debug!(error = status.message(), "cannot resolve interrupted pulls, will retry");
                tokio::time::sleep(USAGE_INTERVAL).await;
            }
            let mut due = tokio::time::Instant::now() + PERIOD;
            let mut listed = false;
            loop {
                if !self.policy().is_off() {
                    // The age of images counts from the first list.
                    if !listed && let Ok(images) = self.list().await {
                        listed = true;
                        self.usage().record_list(images, self.clock.read().boot_nanos);
                    }
                    self.mark_observed();
                    // If the desired pods are not complete yet, this is tried again at the next interval.
                    if tokio::time::Instant::now() >= due && self.desired.is_complete() {
                        due = tokio::time::Instant::now() + PERIOD;
                        self.collect_and_report().await;
                    }
                }
                // Cancel-safe: a change stays visible until it is taken.
                let changed = tokio::select! {
                    changed = live.changed() => changed.is_ok(),
                    () = tokio::time::sleep(USAGE_INTERVAL) => false,
                };
                let policy = policy_of(&live.borrow_and_update().image_collection);
                if changed && policy != self.policy() {
                    self.set_policy(policy);
                    due = tokio::time::Instant::now();
                }
            }
        };
        // Cancel-safe: the next start removes what is left.
        tokio::select! {
            () = context.shutdown.cancelled() => {}
            () = with_heartbeat(&progress, work) => {}
        }
    }

    /// Marks the images of the observed containers as used.
    fn mark_observed(&self) {
        let pods = self.observer.all();
        let containers = pods.iter().flat_map(|pod| &pod.containers);
        let names = containers.flat_map(|c| [c.image.clone(), c.image_ref.clone()]);
        self.usage().mark_used(&names.collect(), self.clock.read().boot_nanos);
    }

    async fn collect_and_report(&self) {
        match self.collect().await {
            Ok(freed) => {
                self.shared.consecutive_errors.store(0, Ordering::Relaxed);
                if freed.images > 0 {
                    tracing::info!(images = freed.images, bytes = freed.bytes, "removed unused images");
                }
            }
            Err(error) => {
                tracing::warn!(%error, "image collection failed, will retry");
                // The first failure may come from a runtime that has only just started.
                if self.shared.consecutive_errors.fetch_add(1, Ordering::Relaxed) > 0 {
                    self.events.warning(self.node.clone(), "ImageGCFailed", error.to_string());
                }
            }
        }
    }

    /// Runs one collection by the thresholds and the maximum age.
    async fn collect(&self) -> Result<Freed, ImageGcError> {
        let _turn = self.shared.collection_lock.lock().await;
        if self.policy().high_percent == 100 {
            return self.remove(Goal::Age).await.map(|(freed, _)| freed);
        }
        let disk_space = self.disk_space().await?;
        if disk_space.capacity == 0 {
            let text = "invalid capacity 0 on image filesystem";
            self.events.warning(self.node.clone(), "InvalidDiskCapacity", text);
            return Err(ImageGcError::Disk(text.to_owned()));
        }
        let (freed, needed) = self.remove(Goal::Thresholds(disk_space)).await?;
        if freed.bytes < needed {
            self.events.warning(
                self.node.clone(),
                "FreeDiskSpaceFailed",
                insufficient_space_message(disk_space, freed),
            );
            return Err(ImageGcError::TooLittleFreed { needed, freed: freed.bytes });
        }
        Ok(freed)
    }

    /// Removes every image that may be removed, at any usage.
    ///
    /// # Errors
    /// The runtime does not answer.
    pub async fn collect_all(&self) -> Result<Freed, ImageGcError> {
        let _turn = self.shared.collection_lock.lock().await;
        if !self.desired.is_complete() {
            return Ok(Freed::default());
        }
        self.remove(Goal::Everything).await.map(|(freed, _)| freed)
    }

    /// Removes images, the least recently used first, until this many bytes are freed, by their listed sizes.
    ///
    /// # Errors
    /// The runtime does not answer. Freeing less is not an error; the result has the freed bytes.
    pub async fn free_bytes(&self, bytes: u64) -> Result<Freed, ImageGcError> {
        let _turn = self.shared.collection_lock.lock().await;
        if !self.desired.is_complete() {
            return Ok(Freed::default());
        }
        self.remove(Goal::Bytes(bytes)).await.map(|(freed, _)| freed)
    }

    /// Plans and removes. Returns what was freed and how many bytes had to be freed.
    async fn remove(&self, goal: Goal) -> Result<(Freed, u64), ImageGcError> {
        let now = self.clock.read().boot_nanos;
        let listed_at = std::time::SystemTime::now();
        let listed = self.list().await.map_err(ImageGcError::Runtime)?;
        let ids: BTreeSet<String> = listed.iter().map(|image| image.id.clone()).collect();
        self.images.prune_records(ids, listed_at).await;
        let mut used_images = self.used_images().await.map_err(ImageGcError::Runtime)?;
        self.usage().record_list(listed, now);
        self.usage().mark_used(&used_images, now);
        if plan_image_gc(&self.usage(), &used_images, &self.policy(), goal, now).is_empty() {
            return Ok((Freed::default(), 0));
        }
        // Only now, because each lookup is a call to the runtime.
        let mut needed = NeededImages::default();
        needed.references.extend(self.sandbox_images().await.map_err(ImageGcError::Runtime)?);
        self.resolve(&mut needed).await.map_err(ImageGcError::Runtime)?;
        used_images.extend(needed.ids.iter().cloned());
        self.usage().mark_used(&used_images, now);
        let plan = plan_image_gc(&self.usage(), &used_images, &self.policy(), goal, now);
        let mut freed = Freed::default();
        let expired = plan.expired.iter().map(|candidate| (candidate, "age"));
        for (candidate, reason) in expired.chain(plan.for_space.iter().map(|candidate| (candidate, "space")))
        {
            if reason == "space" && freed.bytes >= plan.bytes_to_free {
                break;
            }
            // A pod that was added after the plan was made may need an image that was unused then.
            self.resolve(&mut needed).await.map_err(ImageGcError::Runtime)?;
            if !needed.ids.contains(&candidate.id) {
                self.remove_one(candidate, reason, &mut freed).await;
            }
        }
        Ok((freed, plan.bytes_to_free))
    }

    async fn list(&self) -> Result<Vec<ListedImage>, Status> {
        Ok(self.cri.list_images().await?.into_iter().map(listed_image).collect())
    }

    /// Ids, tags and digests of the images of all containers in any state, including those not created by Keelson.
    async fn used_images(&self) -> Result<BTreeSet<String>, Status> {
        let containers = self.cri.list(None).await?.containers;
        let names = containers.into_iter().flat_map(|c| [c.image_ref, c.image_name]);
        Ok(names.filter(|name| !name.is_empty()).collect())
    }

    /// Looks up the images of desired pods and of `references`, unless they have been looked up before.
    async fn resolve(&self, needed: &mut NeededImages) -> Result<(), Status> {
        needed.references.extend(self.desired.wanted_images());
        let new: Vec<String> = needed.references.difference(&needed.resolved).cloned().collect();
        for reference in new {
            if let Ok(tagged) = with_default_tag(&reference) {
                needed.ids.extend(self.images.present().inspect(&tagged).await?.map(|image| image.id));
            }
            needed.resolved.insert(reference);
        }
        Ok(())
    }

    /// The sandbox image. Runtimes older than containerd 2.0 do not list it as pinned.
    async fn sandbox_images(&self) -> Result<BTreeSet<String>, Status> {
        let runtime_image = self.cri.sandbox_image().await?;
        Ok(self.sandbox_image.iter().cloned().chain(runtime_image).collect())
    }

    async fn remove_one(&self, candidate: &Candidate, reason: &str, freed: &mut Freed) {
        let id = &candidate.id;
        let minimum_idle = self.policy().minimum_age.max(ENSURED_RETENTION_NANOS);
        if !self.images.present().begin_removal(id, minimum_idle) {
            return;
        }
        let result = self.cri.remove_image(id).await;
        self.images.present().end_removal(id);
        match result {
            Ok(()) => {
                freed.images += 1;
                freed.bytes = freed.bytes.saturating_add(candidate.bytes);
                self.removed.get_or_create(&ReasonLabel { reason: reason.to_owned() }).inc();
                tracing::info!(image = id, bytes = candidate.bytes, reason, "removed an unused image");
            }
            Err(status) => {
                tracing::warn!(image = id, error = status.message(), "cannot remove an image, will retry");
            }
        }
    }

    /// The usage of the images' file system.
    async fn disk_space(&self) -> Result<DiskSpace, ImageGcError> {
        match &self.disk {
            Disk::Statfs => {}
            #[cfg(test)]
            Disk::Set(disk_space) => return Ok(*disk_space),
        }
        let (images, _) = self.cri.filesystems().await.map_err(ImageGcError::Runtime)?;
        let folder = images
            .into_iter()
            .next()
            .and_then(|first| first.mountpoint)
            .map(PathBuf::from)
            .ok_or_else(|| ImageGcError::Disk("the runtime reports no image file system".to_owned()))?;
        let name = folder.display().to_string();
        let statvfs_task = tokio::task::spawn_blocking(move || rustix::fs::statvfs(&folder));
        let failed = |how: String| ImageGcError::Disk(format!("{name}: {how}"));
        let stat = tokio::time::timeout(STATFS_TIMEOUT, statvfs_task)
            .await
            .map_err(|_| failed("statvfs does not return".to_owned()))?
            .map_err(|error| failed(error.to_string()))?
            .map_err(|error| failed(error.to_string()))?;
        Ok(DiskSpace {
            capacity: stat.f_blocks.saturating_mul(stat.f_frsize),
            available: stat.f_bavail.saturating_mul(stat.f_frsize),
        })
    }
}

fn policy_of(config: &ImageCollection) -> ImageGcPolicy {
    let nanos = |ms: u64| i64::try_from(ms).unwrap_or(i64::MAX).saturating_mul(NANOS_PER_MS);
    ImageGcPolicy {
        high_percent: config.high_threshold_percent.into(),
        low_percent: config.low_threshold_percent.into(),
        minimum_age: nanos(config.minimum_age_ms),
        maximum_age: nanos(config.maximum_age_ms),
    }
}

/// The message of the event for a collection that freed too little.
fn insufficient_space_message(disk_space: DiskSpace, freed: Freed) -> String {
    format!(
        "Insufficient free disk space on the node's image filesystem ({}% of {} used). Failed to free sufficient space \
         by deleting unused images (freed {} bytes). The rest is in use by images of containers, by logs, volumes or \
         other files: free some of it, or give the node a larger disk.",
        disk_space.used_percent(),
        format_size(disk_space.capacity),
        freed.bytes
    )
}

#[cfg(test)]
mod tests;
