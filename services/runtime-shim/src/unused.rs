//! The removal of images that nothing uses (runtime-and-resources.md §6.7): a part of the collector, the only one that
//! removes images.
//!
//! The runtime is asked for its images at each collection and under an order, not in between; what is used in between
//! is known from the observation. Without a fresh list of what containers use, or before pod-sync has sent its whole
//! set of wanted pods, nothing is removed.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_cri::v1 as cri;
use keelson_config::{Config, ImageCollection};
use keelson_runtime_shim_core::image::with_default_tag;
use keelson_runtime_shim_core::size_text::size;
use keelson_runtime_shim_core::unused_images::{
    Candidate, Demand, ImageBook, ListedImage, Policy, Space, plan_images,
};
use keelson_service_kit::{Context, EventRing, Metrics, ObjectRef};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tonic::Status;

use crate::clock::Clock;
use crate::collect::Desires;
use crate::cri::{Cri, gone_is_done};
use crate::images::Images;
use crate::observe::Observer;
use crate::ticking::ticking;

/// Between two collections (runtime-and-resources.md §0.2).
const PERIOD: Duration = Duration::from_secs(300);
/// Between two looks at what the observed containers use.
const LOOK: Duration = Duration::from_secs(30);
/// How long a file system may take to say how full it is.
const STATFS_WITHIN: Duration = Duration::from_secs(10);
/// How long an image stays at least after somebody was told that it is there.
const PROMISED: i64 = 120 * 1_000_000_000;
const NANOS_PER_MS: i64 = 1_000_000;

/// Removes unused images.
#[derive(Debug, Clone)]
pub struct UnusedImages {
    cri: Cri,
    observer: Observer,
    images: Images,
    desires: Desires,
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
    policy: Mutex<Policy>,
    book: Mutex<ImageBook>,
    /// One collection at a time.
    turn: tokio::sync::Mutex<()>,
    /// How many collections have failed since the last good one.
    failures: AtomicU32,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            policy: Mutex::new(policy_of(&ImageCollection::default())),
            book: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            failures: AtomicU32::default(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: String,
}

/// What has to stay for the sake of pods and sandboxes.
#[derive(Debug, Default)]
struct Wanted {
    /// As the specs name it.
    references: BTreeSet<String>,
    /// Those of them whose image is in `ids`, if there is one.
    resolved: BTreeSet<String>,
    ids: BTreeSet<String>,
}

/// Who says how full the file system of the images is.
#[derive(Debug, Clone, Default)]
enum Disk {
    /// The file system.
    #[default]
    Statfs,
    #[cfg(test)]
    Set(Space),
}

/// What a collection has removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Freed {
    /// Images.
    pub images: u32,
    /// What they were listed with.
    pub bytes: u64,
}

/// Why a collection did not do what it was to do.
#[derive(Debug, thiserror::Error)]
pub enum CollectionError {
    /// The runtime does not answer or refuses.
    #[error("the runtime does not answer: {}", .0.message())]
    Runtime(Status),
    /// The file system cannot be looked at.
    #[error("cannot see how full the file system of the images is: {0}")]
    Disk(String),
    /// Too little could be removed.
    #[error(
        "Failed to garbage collect required amount of images. Attempted to free {wanted} bytes, but only found {freed} bytes eligible to free."
    )]
    TooLittle {
        /// Bytes that had to be freed.
        wanted: u64,
        /// Bytes that were.
        freed: u64,
    },
}

impl UnusedImages {
    /// With the thresholds of the configuration.
    pub fn new(cri: Cri, observer: Observer, images: Images, desires: Desires, events: EventRing) -> Self {
        Self {
            cri,
            observer,
            images,
            desires,
            events,
            node: ObjectRef::default(),
            sandbox_image: None,
            clock: Clock::System,
            disk: Disk::Statfs,
            removed: Family::default(),
            shared: Arc::default(),
        }
    }

    /// Takes thresholds, node name and pinned image from the configuration.
    #[must_use]
    pub fn configured(mut self, config: &Config, metrics: &Metrics) -> Self {
        self.set_policy(policy_of(&config.image_collection));
        self.node = ObjectRef::node(&config.node_name);
        self.sandbox_image.clone_from(&config.runtime.sandbox_image);
        metrics.register(
            "kubelet_image_garbage_collected",
            "Images that were removed because of space or of their age",
            self.removed.clone(),
        );
        self
    }

    fn policy(&self) -> Policy {
        *self.shared.policy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_policy(&self, policy: Policy) {
        *self.shared.policy.lock().unwrap_or_else(PoisonError::into_inner) = policy;
    }

    fn book(&self) -> std::sync::MutexGuard<'_, ImageBook> {
        self.shared.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Collects each five minutes until the shutdown, by the thresholds that the configuration has then.
    pub async fn run(self, context: Context) {
        let progress = context.progress.register("image-collector");
        let mut live = context.live.subscribe();
        let work = async {
            while let Err(status) = self.images.settle_cut_off().await {
                tracing::debug!(
                    error = status.message(),
                    "cannot settle the pulls that were cut off, will retry"
                );
                tokio::time::sleep(LOOK).await;
            }
            let mut due = tokio::time::Instant::now() + PERIOD;
            let mut listed = false;
            loop {
                if !self.policy().is_off() {
                    // From the first list on images grow old.
                    if !listed && let Ok(images) = self.list().await {
                        listed = true;
                        self.book().list(images, self.clock.read().boot_nanos);
                    }
                    self.note_used();
                    // Until the wanted pods are known it is tried at each look.
                    if tokio::time::Instant::now() >= due && self.desires.are_complete() {
                        due = tokio::time::Instant::now() + PERIOD;
                        self.collect_and_tell().await;
                    }
                }
                // Cancel-safe: what has changed is seen until it is taken.
                let changed = tokio::select! {
                    changed = live.changed() => changed.is_ok(),
                    () = tokio::time::sleep(LOOK) => false,
                };
                let policy = policy_of(&live.borrow_and_update().image_collection);
                if changed && policy != self.policy() {
                    self.set_policy(policy);
                    due = tokio::time::Instant::now();
                }
            }
        };
        // Cancel-safe: what was not removed is removed after the next start.
        tokio::select! {
            () = context.shutdown.cancelled() => {}
            () = ticking(&progress, work) => {}
        }
    }

    /// Remembers what the containers use that are observed now.
    fn note_used(&self) {
        let pods = self.observer.all();
        let containers = pods.iter().flat_map(|pod| &pod.containers);
        let names = containers.flat_map(|c| [c.image.clone(), c.image_ref.clone()]);
        self.book().used(&names.collect(), self.clock.read().boot_nanos);
    }

    async fn collect_and_tell(&self) {
        match self.collect().await {
            Ok(freed) => {
                self.shared.failures.store(0, Ordering::Relaxed);
                if freed.images > 0 {
                    tracing::info!(images = freed.images, bytes = freed.bytes, "removed unused images");
                }
            }
            Err(error) => {
                tracing::warn!(%error, "image collection failed, will retry");
                // The first failure may be one of a runtime that has only just started.
                if self.shared.failures.fetch_add(1, Ordering::Relaxed) > 0 {
                    self.events.warning(self.node.clone(), "ImageGCFailed", error.to_string());
                }
            }
        }
    }

    /// One collection by the thresholds and the maximum age.
    async fn collect(&self) -> Result<Freed, CollectionError> {
        let _turn = self.shared.turn.lock().await;
        if self.policy().high_percent == 100 {
            return self.remove(Demand::Age).await.map(|(freed, _)| freed);
        }
        let space = self.space().await?;
        if space.capacity == 0 {
            let text = "invalid capacity 0 on image filesystem";
            self.events.warning(self.node.clone(), "InvalidDiskCapacity", text);
            return Err(CollectionError::Disk(text.to_owned()));
        }
        let (freed, wanted) = self.remove(Demand::Thresholds(space)).await?;
        if freed.bytes < wanted {
            self.events.warning(self.node.clone(), "FreeDiskSpaceFailed", too_little(space, freed));
            return Err(CollectionError::TooLittle { wanted, freed: freed.bytes });
        }
        Ok(freed)
    }

    /// Removes every image that may go, whatever the usage.
    ///
    /// # Errors
    /// The runtime does not answer.
    pub async fn collect_all(&self) -> Result<Freed, CollectionError> {
        let _turn = self.shared.turn.lock().await;
        if !self.desires.are_complete() {
            return Ok(Freed::default());
        }
        self.remove(Demand::Everything).await.map(|(freed, _)| freed)
    }

    /// Removes what may go, the least recently used first, until so many bytes are freed, as they are listed.
    ///
    /// # Errors
    /// The runtime does not answer. To have freed less is no error: the answer says it.
    pub async fn free(&self, bytes: u64) -> Result<Freed, CollectionError> {
        let _turn = self.shared.turn.lock().await;
        if !self.desires.are_complete() {
            return Ok(Freed::default());
        }
        self.remove(Demand::Bytes(bytes)).await.map(|(freed, _)| freed)
    }

    /// Plans and removes. What was freed, and what had to be.
    async fn remove(&self, demand: Demand) -> Result<(Freed, u64), CollectionError> {
        let now = self.clock.read().boot_nanos;
        let listed_at = std::time::SystemTime::now();
        let listed = self.list().await.map_err(CollectionError::Runtime)?;
        let ids: BTreeSet<String> = listed.iter().map(|image| image.id.clone()).collect();
        // A failure has been logged; the next collection tries again.
        let _ = self.images.in_records(move |records| Ok(records.prune(&ids, listed_at))).await;
        let mut used = self.used().await.map_err(CollectionError::Runtime)?;
        self.book().list(listed, now);
        self.book().used(&used, now);
        if plan_images(&self.book(), &used, &self.policy(), demand, now).is_empty() {
            return Ok((Freed::default(), 0));
        }
        // Only now, as each is a call of the runtime.
        let mut wanted = Wanted::default();
        wanted.references.extend(self.pinned().await.map_err(CollectionError::Runtime)?);
        self.resolve(&mut wanted).await.map_err(CollectionError::Runtime)?;
        used.extend(wanted.ids.iter().cloned());
        self.book().used(&used, now);
        let plan = plan_images(&self.book(), &used, &self.policy(), demand, now);
        let mut freed = Freed::default();
        let old = plan.old.iter().map(|candidate| (candidate, "age"));
        for (candidate, reason) in old.chain(plan.spare.iter().map(|candidate| (candidate, "space"))) {
            if reason == "space" && freed.bytes >= plan.needed {
                break;
            }
            // A pod that has come since the plan was made may want what was unused then.
            self.resolve(&mut wanted).await.map_err(CollectionError::Runtime)?;
            if !wanted.ids.contains(&candidate.id) {
                self.remove_one(candidate, reason, &mut freed).await;
            }
        }
        Ok((freed, plan.needed))
    }

    async fn list(&self) -> Result<Vec<ListedImage>, Status> {
        let request = cri::ListImagesRequest { filter: None };
        let images = self.cri.images().list_images(self.cri.quick(request)).await?.into_inner().images;
        let listed = |image: cri::Image| ListedImage {
            id: image.id,
            names: image.repo_tags.into_iter().chain(image.repo_digests).collect(),
            bytes: image.size,
            pinned: image.pinned,
        };
        Ok(images.into_iter().map(listed).collect())
    }

    /// Ids, tags and digests of what containers in any state were made from, also of those that are not ours.
    async fn used(&self) -> Result<BTreeSet<String>, Status> {
        let (_, containers) = self.cri.list(None).await?;
        let names = containers.into_iter().flat_map(|c| [c.image_ref, c.image.unwrap_or_default().image]);
        Ok(names.filter(|name| !name.is_empty()).collect())
    }

    /// Finds the images of what pods want and of what is pinned, as far as that is not known yet.
    async fn resolve(&self, wanted: &mut Wanted) -> Result<(), Status> {
        wanted.references.extend(self.desires.wanted_images());
        let new: Vec<String> = wanted.references.difference(&wanted.resolved).cloned().collect();
        for reference in new {
            if let Ok(tagged) = with_default_tag(&reference) {
                wanted.ids.extend(self.images.inspect(&tagged).await?.map(|image| image.id));
            }
            wanted.resolved.insert(reference);
        }
        Ok(())
    }

    /// The sandbox image: runtimes older than containerd 2.0 do not say that it is pinned.
    async fn pinned(&self) -> Result<BTreeSet<String>, Status> {
        let of_runtime = self.sandbox_image_of_runtime().await?;
        Ok(self.sandbox_image.iter().cloned().chain(of_runtime).collect())
    }

    /// The sandbox image as the runtime's own configuration names it, where it tells that.
    async fn sandbox_image_of_runtime(&self) -> Result<Option<String>, Status> {
        let request = cri::StatusRequest { verbose: true };
        let info = self.cri.runtime().status(self.cri.quick(request)).await?.into_inner().info;
        let config = info.get("config").and_then(|text| serde_json::from_str(text).ok());
        let name = config.and_then(|c: serde_json::Value| Some(c.get("sandboxImage")?.as_str()?.to_owned()));
        Ok(name.filter(|name| !name.is_empty()))
    }

    async fn remove_one(&self, candidate: &Candidate, reason: &str, freed: &mut Freed) {
        let id = &candidate.id;
        let spare = self.policy().minimum_age.max(PROMISED);
        if !self.images.begin_removal(id, spare) {
            return;
        }
        let image = cri::ImageSpec { image: id.clone(), ..Default::default() };
        let request = cri::RemoveImageRequest { image: Some(image) };
        let result = gone_is_done(self.cri.images().remove_image(self.cri.request(request)).await);
        self.images.end_removal(id);
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

    /// How full the file system of the images is.
    async fn space(&self) -> Result<Space, CollectionError> {
        match &self.disk {
            Disk::Statfs => {}
            #[cfg(test)]
            Disk::Set(space) => return Ok(*space),
        }
        let request = self.cri.quick(cri::ImageFsInfoRequest {});
        let answer = self.cri.images().image_fs_info(request).await.map_err(CollectionError::Runtime)?;
        let first = answer.into_inner().image_filesystems.into_iter().next().and_then(|usage| usage.fs_id);
        let folder = first
            .map(|id| PathBuf::from(id.mountpoint))
            .ok_or_else(|| CollectionError::Disk("the runtime names no file system of images".to_owned()))?;
        let name = folder.display().to_string();
        let look = tokio::task::spawn_blocking(move || rustix::fs::statvfs(&folder));
        let failed = |how: String| CollectionError::Disk(format!("{name}: {how}"));
        let stat = tokio::time::timeout(STATFS_WITHIN, look)
            .await
            .map_err(|_| failed("it hangs".to_owned()))?
            .map_err(|error| failed(error.to_string()))?
            .map_err(|error| failed(error.to_string()))?;
        Ok(Space {
            capacity: stat.f_blocks.saturating_mul(stat.f_frsize),
            available: stat.f_bavail.saturating_mul(stat.f_frsize),
        })
    }
}

fn policy_of(config: &ImageCollection) -> Policy {
    let nanos = |ms: u64| i64::try_from(ms).unwrap_or(i64::MAX).saturating_mul(NANOS_PER_MS);
    Policy {
        high_percent: config.high_threshold_percent.into(),
        low_percent: config.low_threshold_percent.into(),
        minimum_age: nanos(config.minimum_age_ms),
        maximum_age: nanos(config.maximum_age_ms),
    }
}

/// What the node is told when too little could be removed.
fn too_little(space: Space, freed: Freed) -> String {
    format!(
        "Insufficient free disk space on the node's image filesystem ({}% of {} used). Failed to free sufficient space \
         by deleting unused images (freed {} bytes). The rest is in use by images of containers, by logs, volumes or \
         other files: free some of it, or give the node a larger disk.",
        space.used_percent(),
        size(space.capacity),
        freed.bytes
    )
}

#[cfg(test)]
mod tests;
