//! Observes the eviction signals: the machine, the cgroup of all pods, the runtime's filesystems, and the usage of each pod.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_resource_manager_core::eviction::signal::{FsLayout, Observation, Observations, Signal};
use keelson_resource_manager_core::eviction::usage::{PodUsage, Space};
use keelson_resource_manager_core::machine::{MachineReading, observations};
use keelson_service_kit::now_unix_nanos;
use keelson_service_kit::status::chain;
use tokio::sync::watch;

use crate::host;
use crate::statistics::Statistics;
use crate::storage::StorageStats;
use crate::view::TreeState;

/// Timeout of reading the machine; a filesystem that hangs must not block the loop.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// Reads signals and usage.
#[derive(Debug, Clone)]
pub(crate) struct Observer {
    pub(crate) root: PathBuf,
    pub(crate) statistics: Arc<Statistics>,
    pub(crate) tree: watch::Receiver<TreeState>,
}

/// The observed signals at one time.
#[derive(Debug, Clone, Default)]
pub(crate) struct Snapshot {
    pub(crate) signals: Observations,
    pub(crate) layout: FsLayout,
}

impl Snapshot {
    /// The age of the oldest measurement.
    pub(crate) fn age(&self) -> Duration {
        let oldest = self.signals.values().map(|seen| seen.taken).min().unwrap_or_else(now_unix_nanos);
        Duration::from_nanos(u64::try_from(now_unix_nanos().saturating_sub(oldest)).unwrap_or(0))
    }
}

impl Observer {
    /// Observes every signal. Signals that need runtime-shim are missing when it does not answer.
    pub(crate) async fn observe(&self) -> Result<Snapshot, String> {
        let filesystems = self.statistics.storage().filesystems(false).await.inspect_err(|status| {
            tracing::debug!("no statistics of the runtime's filesystems: {}", status.message());
        });
        let filesystems = filesystems.unwrap_or_default();
        let (root, tree) = (self.root.clone(), self.tree.borrow().clone());
        let work = tokio::task::spawn_blocking(move || {
            let reading = host::read_machine(&root).map_err(|e| chain(&e))?;
            let mut snapshot =
                Snapshot { signals: observations(&reading, now_unix_nanos()), layout: FsLayout::One };
            if let TreeState::Ready(tree) = tree {
                let pods = tree.layout().pods().to_string();
                snapshot.signals.extend(allocatable_memory(tree.usage(&pods).memory));
            }
            add_filesystems(&mut snapshot, &reading, &root, &filesystems);
            Ok(snapshot)
        });
        match tokio::time::timeout(READ_TIMEOUT, work).await {
            Ok(Ok(snapshot)) => snapshot,
            Ok(Err(error)) => Err(format!("the task that reads the machine's resources has ended: {error}")),
            Err(_) => {
                Err(format!("reading the machine's resources takes longer than {} s", READ_TIMEOUT.as_secs()))
            }
        }
    }

    /// The storage usage of pods.
    pub(crate) async fn storage(&self) -> StorageStats {
        self.statistics.storage().stats().await
    }

    /// The usage of each pod.
    pub(crate) async fn usages(&self) -> Result<BTreeMap<String, PodUsage>, String> {
        let stats = self.statistics.pods(false).await;
        let stats = stats.map_err(|status| format!("cannot read the usage of pods: {}", status.message()))?;
        Ok(stats.into_iter().filter_map(usage).collect())
    }

    /// Reclaims unused node resources: dead containers, and with `images` unused images.
    pub(crate) async fn reclaim(&self, images: bool) -> Result<String, String> {
        self.statistics.storage().reclaim(images).await.map_err(|status| status.message().to_owned())
    }
}

fn allocatable_memory(
    memory: Option<keelson_resource_manager_core::statistics::Memory>,
) -> Option<(Signal, Observation)> {
    let memory = memory?;
    let available = memory.available?;
    let capacity = available.saturating_add(memory.working_set);
    let observed = Observation { capacity, available, taken: now_unix_nanos() };
    Some((Signal::AllocatableMemoryAvailable, observed))
}

/// Adds the signals of the runtime's filesystems. A filesystem that is nodefs gets the observations of nodefs.
fn add_filesystems(
    snapshot: &mut Snapshot,
    reading: &MachineReading,
    root: &Path,
    filesystems: &rt::FilesystemStatsResponse,
) {
    let Some(images) = filesystems.images.first() else { return };
    let layers = filesystems.containers.first().unwrap_or(images);
    let on_node = |figures: &rt::FilesystemFigures| {
        let by_size =
            figures.capacity_bytes == reading.nodefs.total && figures.inodes == reading.nodefs.inodes;
        host::same_filesystem(root, Path::new(&figures.mountpoint)).unwrap_or(by_size)
    };
    snapshot.layout = match (on_node(images), on_node(layers)) {
        (true, _) => FsLayout::One,
        (false, true) => FsLayout::Split,
        (false, false) => FsLayout::Separate,
    };
    let node = [Signal::NodefsAvailable, Signal::NodefsInodesFree]
        .map(|signal| snapshot.signals.get(&signal).copied());
    let of = |figures: &rt::FilesystemFigures| {
        if on_node(figures) {
            return node;
        }
        let observation =
            |capacity, available| Observation { capacity, available, taken: figures.taken_unix_nanos };
        let inodes = observation(figures.inodes, figures.inodes_free);
        let bytes = observation(figures.capacity_bytes, figures.available_bytes);
        [Some(bytes).filter(|seen| seen.capacity > 0), Some(inodes).filter(|seen| seen.capacity > 0)]
    };
    let signals = [
        ([Signal::ImagefsAvailable, Signal::ImagefsInodesFree], of(images)),
        ([Signal::ContainerfsAvailable, Signal::ContainerfsInodesFree], of(layers)),
    ];
    for (names, found) in signals {
        let found = names.into_iter().zip(found).filter_map(|(name, found)| Some((name, found?)));
        snapshot.signals.extend(found);
    }
}

/// The usage of a pod, from its statistics.
fn usage(stats: pb::PodStatsResponse) -> Option<(String, PodUsage)> {
    use keelson_resource_manager_core::eviction::usage::{ContainerUsage, VolumeUsage};
    let space = |usage: pb::FilesystemUsage| Space { bytes: usage.used, inodes: usage.inodes_used };
    let working_set = |usage: Option<pb::Usage>| Some(usage?.memory?.working_set);
    let containers = stats.containers.into_iter().map(|container| {
        let usage = ContainerUsage {
            memory: working_set(container.usage),
            layer: container.root.map(space),
            logs: container.logs.map(space),
            termination_log: container.termination_log.map(space),
        };
        (container.name, usage)
    });
    let volumes = stats.volumes.into_iter().map(|volume| VolumeUsage {
        name: volume.name,
        space: volume.filesystem.map(space).unwrap_or_default(),
        local: volume.local_ephemeral,
    });
    let usage = PodUsage {
        memory: working_set(stats.usage),
        processes: stats.processes,
        containers: containers.collect(),
        volumes: volumes.collect(),
        hosts_file: stats.hosts_file.map(space),
    };
    Some((stats.pod?.uid, usage))
}

#[cfg(test)]
mod tests {
    use keelson_resource_manager_core::machine::Filesystem;

    use super::*;

    fn figures(mountpoint: &str, capacity: u64, available: u64) -> rt::FilesystemFigures {
        rt::FilesystemFigures {
            mountpoint: mountpoint.into(),
            capacity_bytes: capacity,
            available_bytes: available,
            inodes: 10,
            inodes_free: 5,
            taken_unix_nanos: 3,
            ..Default::default()
        }
    }

    #[test]
    fn the_filesystem_layout_follows_the_image_and_container_filesystems() {
        let nodefs = Filesystem { total: 1000, available: 400, inodes: 10, inodes_free: 7 };
        let reading = MachineReading { nodefs, ..MachineReading::default() };
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().to_str().unwrap();
        // Paths that do not exist are compared by size; /proc is another filesystem.
        for (images, layers, layout, images_left, layers_left) in [
            (figures(own, 9, 9), None, FsLayout::One, 400, 400),
            (figures("/absent", 1000, 400), None, FsLayout::One, 400, 400),
            (figures("/proc", 50, 20), None, FsLayout::Separate, 20, 20),
            (figures("/absent", 60, 20), Some(figures("/absent", 70, 30)), FsLayout::Separate, 20, 30),
            (figures("/proc", 50, 20), Some(figures(own, 9, 9)), FsLayout::Split, 20, 400),
        ] {
            let filesystems = rt::FilesystemStatsResponse {
                images: vec![images],
                containers: layers.into_iter().collect(),
                ..Default::default()
            };
            let mut snapshot = Snapshot { signals: observations(&reading, 9), layout: FsLayout::One };
            add_filesystems(&mut snapshot, &reading, dir.path(), &filesystems);
            let left = |signal| snapshot.signals[&signal].available;
            let found = (left(Signal::ImagefsAvailable), left(Signal::ContainerfsAvailable));
            assert_eq!((snapshot.layout, found), (layout, (images_left, layers_left)), "{filesystems:?}");
        }
        let mut snapshot = Snapshot::default();
        add_filesystems(&mut snapshot, &reading, dir.path(), &rt::FilesystemStatsResponse::default());
        assert!(snapshot.signals.is_empty(), "without a report there are no signals");
    }

    #[test]
    fn pod_usage_is_taken_from_pod_statistics() {
        let part = |used| Some(pb::FilesystemUsage { used, inodes_used: 1, ..Default::default() });
        let memory = |working_set| {
            let memory = pb::MemoryUsage { working_set, ..Default::default() };
            Some(pb::Usage { memory: Some(memory), ..Default::default() })
        };
        let container = pb::ContainerStats {
            name: "c".into(),
            usage: memory(5),
            root: part(7),
            termination_log: part(13),
            ..Default::default()
        };
        let volume = pb::VolumeUsage { name: "v".into(), filesystem: part(9), local_ephemeral: true };
        let stats = pb::PodStatsResponse {
            pod: Some(keelson_proto::keelson::common::v1::PodRef { uid: "u".into(), ..Default::default() }),
            usage: memory(6),
            processes: Some(2),
            containers: vec![container],
            volumes: vec![volume],
            hosts_file: part(11),
            ..Default::default()
        };
        let (uid, found) = usage(stats).unwrap();
        assert_eq!((uid.as_str(), found.memory, found.processes), ("u", Some(6), Some(2)));
        assert_eq!((found.containers["c"].memory, found.containers["c"].logs), (Some(5), None));
        assert_eq!(found.local_storage(), 40);
    }
}
