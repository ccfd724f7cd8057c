//! Usage of the file systems of images and containers, and the disk usage of each container
//! (runtime-and-resources.md §14.1). It is collected in the background, so that no request walks a folder.
//!
//! The file systems are read every ten seconds. The usage of containers is collected as often, but only while it is
//! requested, because the runtime reads the cgroups of all containers for that call. Requests for the usage of logs
//! only ([`Filesystems::logs`]) cause no call to the runtime.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_service_kit::{Context, now_unix_nanos};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic::Status;

use crate::cri::Cri;
use crate::cri_objects::FilesystemUse;
use crate::files::Files;
use crate::heartbeat::with_heartbeat;
use crate::observe::Observer;

/// Interval between two collections: the period of the eviction loop (runtime-and-resources.md §0.2), which acts only
/// on a sample that is newer than its last one.
const PERIOD: Duration = Duration::from_secs(10);
/// After this time without a request the usage of containers is no longer collected.
const REQUEST_RETENTION: Duration = Duration::from_secs(60);
/// Timeout of statvfs(2). A file system that takes longer is left out until the call returns.
const STATVFS_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of the runtime's call for the layers of all containers.
const LAYER_STATS_TIMEOUT: Duration = Duration::from_secs(30);

/// Collects the usage statistics.
#[derive(Debug, Clone)]
pub struct Filesystems {
    cri: Cri,
    observer: Observer,
    files: Files,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified of the first request for the usage of containers after a while.
    requested: Notify,
    /// Calls of statvfs(2) that have not returned yet.
    pending_calls: tokio::sync::Mutex<HashMap<PathBuf, JoinHandle<std::io::Result<FilesystemUsage>>>>,
}

#[derive(Debug, Default)]
struct State {
    /// The last statistics; `None` before the runtime's first response.
    stats: Option<pb::FilesystemStatsResponse>,
    pods_requested: Option<Instant>,
    /// The last usage of logs; `None` if there was no request within [`REQUEST_RETENTION`].
    logs: Option<Arc<[LogUsage]>>,
    logs_requested: Option<Instant>,
}

/// Disk usage of a container's log, including rotated files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LogUsage {
    pub(crate) pod: PodRef,
    pub(crate) container: String,
    pub(crate) bytes: u64,
}

/// Records a request. Returns whether it is the first one after a while.
fn record_request(requested: &mut Option<Instant>) -> bool {
    let before = requested.replace(Instant::now());
    !is_recent(before)
}

fn is_recent(requested: Option<Instant>) -> bool {
    requested.is_some_and(|at| at.elapsed() <= REQUEST_RETENTION)
}

/// Usage of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FilesystemUsage {
    device: u64,
    capacity: u64,
    available: u64,
    inodes: u64,
    inodes_free: u64,
}

/// Disk usage of some files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct DiskUsage {
    /// Bytes on the disk.
    pub bytes: u64,
    /// Number of files.
    pub inodes: u64,
}

/// The runtime's usage of each container's layer, by container id.
type Layers = HashMap<String, FilesystemUse>;

impl Filesystems {
    /// Creates a collector, which has no statistics until [`Self::run`].
    pub fn new(cri: Cri, observer: Observer, files: Files) -> Self {
        Self { cri, observer, files, shared: Arc::default() }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last collected statistics; `None` before the runtime's first response.
    pub fn stats(&self, filesystems_only: bool) -> Option<pb::FilesystemStatsResponse> {
        let mut state = self.state();
        if !filesystems_only && record_request(&mut state.pods_requested) {
            self.shared.requested.notify_one();
        }
        let stats = state.stats.as_ref()?;
        let without = || pb::FilesystemStatsResponse {
            images: stats.images.clone(),
            containers: stats.containers.clone(),
            ..Default::default()
        };
        Some(if filesystems_only { without() } else { stats.clone() })
    }

    /// The last collected usage of logs. Empty for the first request after a while, which starts the collection again.
    pub(crate) fn logs(&self) -> Arc<[LogUsage]> {
        let mut state = self.state();
        if record_request(&mut state.logs_requested) {
            self.shared.requested.notify_one();
        }
        state.logs.clone().unwrap_or_default()
    }

    /// Collects until the shutdown.
    pub async fn run(self, context: Context) {
        let progress = context.progress.register("filesystems");
        let work = async {
            loop {
                self.collect().await;
                // Both are cancel-safe: a notification that is not taken here is kept for the next iteration.
                tokio::select! {
                    () = tokio::time::sleep(PERIOD) => {}
                    () = self.shared.requested.notified() => {}
                }
            }
        };
        // Cancel-safe: the collection has no effect outside this process.
        tokio::select! {
            () = context.shutdown.cancelled() => {}
            () = with_heartbeat(&progress, work) => {}
        }
    }

    /// Runs one collection. Statistics that cannot be read keep their last values.
    pub(crate) async fn collect(&self) {
        match self.filesystems().await {
            Ok((images, containers)) => {
                let mut state = self.state();
                let stats = state.stats.get_or_insert_default();
                (stats.images, stats.containers) = (images, containers);
            }
            Err(status) => {
                tracing::debug!(
                    error = status.message(),
                    "cannot read the usage of file systems, will retry"
                );
                return;
            }
        }
        let (of_pods, of_logs) = {
            let mut state = self.state();
            let requested = (is_recent(state.pods_requested), is_recent(state.logs_requested));
            if !requested.1 {
                state.logs = None;
            }
            requested
        };
        if !of_pods && !of_logs {
            return;
        }
        match self.pods(of_pods).await {
            Ok(pods) => {
                let mut state = self.state();
                if of_logs {
                    state.logs = Some(logs_of(&pods));
                }
                if of_pods {
                    let stats = state.stats.get_or_insert_default();
                    (stats.pods, stats.pods_taken_unix_nanos) = (pods, now_unix_nanos());
                }
            }
            Err(status) => {
                tracing::debug!(
                    error = status.message(),
                    "cannot read the disk usage of containers, will retry"
                );
            }
        }
    }

    /// The file systems of images, and those of layers if they are different ones.
    async fn filesystems(&self) -> Result<(Vec<pb::FilesystemFigures>, Vec<pb::FilesystemFigures>), Status> {
        let (images, containers) = self.cri.filesystems().await?;
        let mut devices = BTreeSet::new();
        let images = self.figures(images, &mut devices).await;
        let containers = self.figures(containers, &mut devices).await;
        Ok((images, containers))
    }

    /// The usage of file systems on devices that are not in `devices` yet; their devices are added.
    async fn figures(
        &self,
        usages: Vec<FilesystemUse>,
        devices: &mut BTreeSet<u64>,
    ) -> Vec<pb::FilesystemFigures> {
        let mut figures = Vec::new();
        for usage in usages {
            let mountpoint = usage.mountpoint.unwrap_or_default();
            let Some(fs) = self.usage_of(Path::new(&mountpoint)).await else { continue };
            if !devices.insert(fs.device) {
                continue;
            }
            figures.push(pb::FilesystemFigures {
                mountpoint,
                capacity_bytes: fs.capacity,
                available_bytes: fs.available,
                used_bytes: usage.used_bytes,
                inodes: fs.inodes,
                inodes_free: fs.inodes_free,
                inodes_used: usage.inodes_used,
                taken_unix_nanos: now_unix_nanos(),
            });
        }
        figures
    }

    /// The usage of a file system. If it hangs, only one thread waits for it, also when this is called again.
    async fn usage_of(&self, folder: &Path) -> Option<FilesystemUsage> {
        let mut pending_calls = self.shared.pending_calls.lock().await;
        let at = folder.to_owned();
        let begin = || tokio::task::spawn_blocking(move || read_usage(&at));
        let task = pending_calls.entry(folder.to_owned()).or_insert_with(begin);
        let result = match tokio::time::timeout(STATVFS_TIMEOUT, task).await {
            Ok(Ok(result)) => result,
            Ok(Err(error)) => Err(std::io::Error::other(error)),
            Err(_) => {
                tracing::warn!(folder = %folder.display(), "the file system does not answer statvfs");
                return None;
            }
        };
        pending_calls.remove(folder);
        result
            .inspect_err(
                |error| tracing::debug!(folder = %folder.display(), %error, "cannot read the usage of a file system"),
            )
            .ok()
    }

    /// The disk usage of the containers of all pods; that of their layers, a call to the runtime, only `with_layers`.
    async fn pods(&self, with_layers: bool) -> Result<Vec<pb::PodFilesystemFigures>, Status> {
        let layers = if with_layers { self.cri.layers(LAYER_STATS_TIMEOUT).await? } else { Layers::new() };
        let (pods, files) = (self.observer.all(), self.files.clone());
        let measure = move || pods.iter().map(|pod| figures_of(pod, &layers, &files)).collect();
        tokio::task::spawn_blocking(measure).await.map_err(|error| Status::internal(error.to_string()))
    }
}

fn read_usage(folder: &Path) -> std::io::Result<FilesystemUsage> {
    let stat = rustix::fs::statvfs(folder)?;
    Ok(FilesystemUsage {
        device: rustix::fs::stat(folder)?.st_dev,
        capacity: stat.f_blocks.saturating_mul(stat.f_frsize),
        available: stat.f_bavail.saturating_mul(stat.f_frsize),
        inodes: stat.f_files,
        inodes_free: stat.f_ffree,
    })
}

/// The usage of each log. Containers of one name share a log, whose usage is counted for one of them.
fn logs_of(pods: &[pb::PodFilesystemFigures]) -> Arc<[LogUsage]> {
    let of = |pod: &pb::PodFilesystemFigures| {
        let name = pod.pod.clone().unwrap_or_default();
        let existing = pod.containers.iter().filter(|container| container.log_inodes > 0);
        let logs = existing.map(move |container| LogUsage {
            pod: name.clone(),
            container: container.name.clone(),
            bytes: container.log_bytes,
        });
        logs.collect::<Vec<_>>()
    };
    pods.iter().flat_map(of).collect()
}

/// The disk usage of a pod's containers. Containers of one name are listed newest first.
fn figures_of(pod: &pb::RuntimePod, layers: &Layers, files: &Files) -> pb::PodFilesystemFigures {
    let mut named = BTreeSet::new();
    let containers = pod.containers.iter().map(|container| {
        let layer = layers.get(&container.id);
        // The files of a name count for its newest container. A missing folder counts as empty.
        let newest = named.insert(container.name.as_str());
        let log = Path::new(&container.log_path).parent().filter(|_| newest);
        let log = log.and_then(|folder| files.log_disk_usage(folder).ok()).unwrap_or_default();
        let messages = newest.then(|| files.termination_log_disk_usage(&pod.uid, &container.name).ok());
        let messages = messages.flatten().unwrap_or_default();
        pb::ContainerFilesystemFigures {
            name: container.name.clone(),
            id: container.id.clone(),
            running: container.state() == pb::ContainerState::Running,
            layer_bytes: layer.and_then(|l| l.used_bytes),
            layer_inodes: layer.and_then(|l| l.inodes_used),
            layer_taken_unix_nanos: layer.map_or(0, |l| l.taken_unix_nanos),
            log_bytes: log.bytes,
            log_inodes: log.inodes,
            log_taken_unix_nanos: now_unix_nanos(),
            termination_log_bytes: messages.bytes,
            termination_log_inodes: messages.inodes,
        }
    });
    let hosts = files.hosts_file_disk_usage(&pod.uid).unwrap_or_default();
    pb::PodFilesystemFigures {
        pod: Some(PodRef { uid: pod.uid.clone(), namespace: pod.namespace.clone(), name: pod.name.clone() }),
        containers: containers.collect(),
        hosts_file_bytes: hosts.bytes,
        hosts_file_inodes: hosts.inodes,
    }
}

#[cfg(test)]
mod tests;
