//! What is looked at: the machine, the cgroup of all pods, the filesystems of the runtime, what each pod takes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_resource_manager_core::eviction::signal::{Layout, Observation, Observations, Signal};
use keelson_resource_manager_core::eviction::usage::{PodUsage, Space};
use keelson_resource_manager_core::machine::{Reading, observations};
use keelson_service_kit::now_unix_nanos;
use keelson_service_kit::status::chain;
use tokio::sync::watch;

use crate::host;
use crate::statistics::Statistics;
use crate::storage::Figures;
use crate::view::TreeState;

/// Bound of a look at the machine; a filesystem that hangs must not stop the loop.
const LOOK_WITHIN: Duration = Duration::from_secs(5);

/// Looks.
#[derive(Debug, Clone)]
pub(crate) struct Look {
    pub(crate) root: PathBuf,
    pub(crate) statistics: Arc<Statistics>,
    pub(crate) tree: watch::Receiver<TreeState>,
}

/// What was seen.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    pub(crate) signals: Observations,
    pub(crate) layout: Layout,
}

impl Seen {
    /// How old the oldest figure is.
    pub(crate) fn age(&self) -> Duration {
        let oldest = self.signals.values().map(|seen| seen.taken).min().unwrap_or_else(now_unix_nanos);
        Duration::from_nanos(u64::try_from(now_unix_nanos().saturating_sub(oldest)).unwrap_or(0))
    }
}

impl Look {
    /// Looks at every signal. What runtime-shim does not tell is not seen.
    pub(crate) async fn observe(&self) -> Result<Seen, String> {
        let told = self.statistics.storage().filesystems(false).await;
        let told =
            told.inspect_err(|status| tracing::debug!("no filesystems of the runtime: {}", status.message()));
        let told = told.unwrap_or_default();
        let (root, tree) = (self.root.clone(), self.tree.borrow().clone());
        let work = tokio::task::spawn_blocking(move || {
            let reading = host::look(&root).map_err(|e| chain(&e))?;
            let mut seen = Seen { signals: observations(&reading, now_unix_nanos()), layout: Layout::One };
            if let TreeState::Ready(tree) = tree {
                let pods = tree.layout().pods().to_string();
                seen.signals.extend(of_all_pods(tree.usage(&pods).memory));
            }
            add_filesystems(&mut seen, &reading, &root, &told);
            Ok(seen)
        });
        match tokio::time::timeout(LOOK_WITHIN, work).await {
            Ok(Ok(seen)) => seen,
            Ok(Err(error)) => Err(format!("the look at the machine has ended: {error}")),
            Err(_) => Err(format!("looking at the machine takes longer than {} s", LOOK_WITHIN.as_secs())),
        }
    }

    /// What pods take of filesystems.
    pub(crate) async fn figures(&self) -> Figures {
        self.statistics.storage().figures().await
    }

    /// What each pod takes of everything.
    pub(crate) async fn usages(&self) -> Result<BTreeMap<String, PodUsage>, String> {
        let stats = self.statistics.pods(false).await;
        let stats = stats.map_err(|status| format!("nobody can say what pods take: {}", status.message()))?;
        Ok(stats.into_iter().filter_map(usage).collect())
    }

    /// Has the node give back what nobody uses.
    pub(crate) async fn reclaim(&self, images: bool) -> Result<String, String> {
        self.statistics.storage().reclaim(images).await.map_err(|status| status.message().to_owned())
    }
}

fn of_all_pods(
    memory: Option<keelson_resource_manager_core::statistics::Memory>,
) -> Option<(Signal, Observation)> {
    let memory = memory?;
    let available = memory.available?;
    let capacity = available.saturating_add(memory.working_set);
    let seen = Observation { capacity, available, taken: now_unix_nanos() };
    Some((Signal::AllocatableMemoryAvailable, seen))
}

/// Adds what the runtime tells of its filesystems. One that is the node's own is told as that.
fn add_filesystems(seen: &mut Seen, reading: &Reading, root: &Path, told: &rt::FilesystemStatsResponse) {
    let Some(images) = told.images.first() else { return };
    let layers = told.containers.first().unwrap_or(images);
    let on_node = |figures: &rt::FilesystemFigures| {
        let by_size =
            figures.capacity_bytes == reading.nodefs.total && figures.inodes == reading.nodefs.inodes;
        host::same_filesystem(root, Path::new(&figures.mountpoint)).unwrap_or(by_size)
    };
    seen.layout = match (on_node(images), on_node(layers)) {
        (true, _) => Layout::One,
        (false, true) => Layout::Split,
        (false, false) => Layout::Separate,
    };
    let node =
        [Signal::NodefsAvailable, Signal::NodefsInodesFree].map(|signal| seen.signals.get(&signal).copied());
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
        seen.signals.extend(found);
    }
}

/// What a pod takes, from its statistics.
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
    fn the_layout_follows_from_where_images_and_layers_lie() {
        let nodefs = Filesystem { total: 1000, available: 400, inodes: 10, inodes_free: 7 };
        let reading = Reading { nodefs, ..Reading::default() };
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().to_str().unwrap();
        // What cannot be looked at here is told by its size; /proc is certainly another filesystem.
        for (images, layers, layout, images_left, layers_left) in [
            (figures(own, 9, 9), None, Layout::One, 400, 400),
            (figures("/absent", 1000, 400), None, Layout::One, 400, 400),
            (figures("/proc", 50, 20), None, Layout::Separate, 20, 20),
            (figures("/absent", 60, 20), Some(figures("/absent", 70, 30)), Layout::Separate, 20, 30),
            (figures("/proc", 50, 20), Some(figures(own, 9, 9)), Layout::Split, 20, 400),
        ] {
            let told = rt::FilesystemStatsResponse {
                images: vec![images],
                containers: layers.into_iter().collect(),
                ..Default::default()
            };
            let mut seen = Seen { signals: observations(&reading, 9), layout: Layout::One };
            add_filesystems(&mut seen, &reading, dir.path(), &told);
            let left = |signal| seen.signals[&signal].available;
            let found = (left(Signal::ImagefsAvailable), left(Signal::ContainerfsAvailable));
            assert_eq!((seen.layout, found), (layout, (images_left, layers_left)), "{told:?}");
        }
        let mut seen = Seen::default();
        add_filesystems(&mut seen, &reading, dir.path(), &rt::FilesystemStatsResponse::default());
        assert!(seen.signals.is_empty(), "nothing is seen of what nobody tells");
    }

    #[test]
    fn the_statistics_of_a_pod_are_what_it_takes() {
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
