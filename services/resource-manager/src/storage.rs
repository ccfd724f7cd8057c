//! The storage usage of pods: runtime-shim measures writable layers and logs, volume-manager measures volumes. Both measure in
//! the background, so requests are cheap; statistics of a service that does not answer in time are missing.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
use keelson_proto::keelson::volume_manager::v1 as vm;
use keelson_proto::keelson::volume_manager::v1::volume_manager_client::VolumeManagerClient;
use keelson_resource_manager_core::eviction::usage::{ContainerUsage, PodUsage, Space, VolumeUsage};
use keelson_service_kit::Peer;
use tonic::{Request, Status};

/// Timeout of a request for statistics.
const STATS_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of garbage collection: there may be many images, and runtime-shim continues after it.
const RECLAIM_TIMEOUT: Duration = Duration::from_secs(20);

/// The clients of the two services that measure storage.
#[derive(Debug, Clone)]
pub(crate) struct Storage {
    runtime: Peer,
    volumes: Peer,
}

/// Measured storage usage.
#[derive(Debug, Default)]
pub(crate) struct StorageStats {
    /// The filesystem of writable layers.
    layers: Option<rt::FilesystemFigures>,
    pods: HashMap<String, rt::PodFilesystemFigures>,
    volumes: HashMap<String, Vec<vm::VolumeStats>>,
}

impl Storage {
    pub(crate) fn new(runtime: Peer, volumes: Peer) -> Self {
        Self { runtime, volumes }
    }

    /// The filesystems of images and layers; with `all` also the usage of each container.
    pub(crate) async fn filesystems(&self, all: bool) -> Result<rt::FilesystemStatsResponse, Status> {
        let mut request = Request::new(rt::FilesystemStatsRequest { filesystems_only: !all });
        request.set_timeout(STATS_TIMEOUT);
        let answer = RuntimeClient::new(self.runtime.channel()).filesystem_stats(request).await;
        Ok(answer?.into_inner())
    }

    /// The filesystem of writable layers, if runtime-shim answers.
    pub(crate) async fn layers(&self) -> Option<rt::FilesystemFigures> {
        let response = self.filesystems(false).await;
        layers(response.inspect_err(|status| log_missing("filesystems", status)).ok()?)
    }

    /// All storage statistics; unavailable parts are missing.
    pub(crate) async fn stats(&self) -> StorageStats {
        let (filesystems, volumes) = tokio::join!(self.filesystems(true), self.volumes());
        let mut stats = StorageStats::default();
        match filesystems {
            Ok(mut response) => {
                let pods = std::mem::take(&mut response.pods);
                let by_uid = pods.into_iter().filter_map(|pod| Some((pod.pod.as_ref()?.uid.clone(), pod)));
                stats.pods = by_uid.collect();
                stats.layers = layers(response);
            }
            Err(status) => log_missing("writable layers and logs", &status),
        }
        match volumes {
            Ok(volumes) => stats.volumes = volumes,
            Err(status) => log_missing("volumes", &status),
        }
        stats
    }

    async fn volumes(&self) -> Result<HashMap<String, Vec<vm::VolumeStats>>, Status> {
        let request = async {
            let mut client = VolumeManagerClient::new(self.volumes.channel());
            let mut answers =
                client.pod_volume_stats(vm::PodVolumeStatsRequest::default()).await?.into_inner();
            let mut volumes = HashMap::new();
            while let Some(answer) = answers.message().await? {
                if let Some(pod) = answer.pod {
                    volumes.insert(pod.uid, answer.volumes);
                }
            }
            Ok(volumes)
        };
        let late = |_| Err(Status::deadline_exceeded("volume-manager has not sent its statistics in time"));
        tokio::time::timeout(STATS_TIMEOUT, request).await.unwrap_or_else(late)
    }

    /// Removes dead containers, and with `images` also unused images; returns a summary for the log.
    pub(crate) async fn reclaim(&self, images: bool) -> Result<String, Status> {
        let mut request = Request::new(rt::CollectGarbageRequest {
            unused_images: images,
            ended_pods: true,
            ..Default::default()
        });
        request.set_timeout(RECLAIM_TIMEOUT);
        let answer = RuntimeClient::new(self.runtime.channel()).collect_garbage(request).await?.into_inner();
        Ok(format!("{} containers and {} images", answer.containers_removed, answer.images_removed))
    }
}

fn log_missing(what: &str, status: &Status) {
    tracing::debug!("no statistics of {what}: {}", status.message());
}

fn layers(response: rt::FilesystemStatsResponse) -> Option<rt::FilesystemFigures> {
    response.containers.into_iter().next().or(response.images.into_iter().next())
}

/// A filesystem with the usage of the runtime, or all used space when the runtime does not report its own.
pub(crate) fn filesystem(figures: rt::FilesystemFigures) -> pb::FilesystemUsage {
    pb::FilesystemUsage {
        taken_unix_nanos: figures.taken_unix_nanos,
        capacity: figures.capacity_bytes,
        available: figures.available_bytes,
        used: figures.used_bytes.unwrap_or(figures.capacity_bytes.saturating_sub(figures.available_bytes)),
        inodes: figures.inodes,
        inodes_free: figures.inodes_free,
        inodes_used: figures.inodes_used.unwrap_or(figures.inodes.saturating_sub(figures.inodes_free)),
    }
}

/// Statistics of a part of a filesystem: the size of the whole and the usage of the part.
fn part(whole: Option<pb::FilesystemUsage>, space: Space, taken_unix_nanos: i64) -> pb::FilesystemUsage {
    let whole = whole.unwrap_or_default();
    pb::FilesystemUsage { taken_unix_nanos, used: space.bytes, inodes_used: space.inodes, ..whole }
}

/// The usage by container name, including dead containers, and when layers and logs were measured last.
fn by_name(containers: &[rt::ContainerFilesystemFigures]) -> BTreeMap<&str, (ContainerUsage, i64, i64)> {
    let mut found: BTreeMap<&str, (ContainerUsage, i64, i64)> = BTreeMap::new();
    for container in containers {
        let (usage, layer_taken, log_taken) = found.entry(&container.name).or_default();
        if let Some(bytes) = container.layer_bytes {
            let layer = usage.layer.get_or_insert_default();
            layer.bytes = layer.bytes.saturating_add(bytes);
            layer.inodes = layer.inodes.saturating_add(container.layer_inodes.unwrap_or(0));
            *layer_taken = (*layer_taken).max(container.layer_taken_unix_nanos);
        }
        if container.log_taken_unix_nanos > 0 {
            let logs = usage.logs.get_or_insert_default();
            logs.bytes = logs.bytes.saturating_add(container.log_bytes);
            logs.inodes = logs.inodes.saturating_add(container.log_inodes);
            *log_taken = (*log_taken).max(container.log_taken_unix_nanos);
            let messages = usage.termination_log.get_or_insert_default();
            messages.bytes = messages.bytes.saturating_add(container.termination_log_bytes);
            messages.inodes = messages.inodes.saturating_add(container.termination_log_inodes);
        }
    }
    found
}

impl StorageStats {
    fn containers(&self, uid: &str) -> &[rt::ContainerFilesystemFigures] {
        self.pods.get(uid).map(|pod| pod.containers.as_slice()).unwrap_or_default()
    }

    fn hosts_file(&self, uid: &str) -> Option<Space> {
        let pod = self.pods.get(uid)?;
        Some(Space { bytes: pod.hosts_file_bytes, inodes: pod.hosts_file_inodes })
    }

    /// The storage usage of a pod.
    pub(crate) fn usage(&self, uid: &str) -> PodUsage {
        let containers = by_name(self.containers(uid));
        let volumes = self.volumes.get(uid).map(Vec::as_slice).unwrap_or_default();
        PodUsage {
            containers: containers.into_iter().map(|(name, (usage, ..))| (name.to_owned(), usage)).collect(),
            volumes: volumes.iter().map(volume_usage).collect(),
            hosts_file: self.hosts_file(uid),
            ..PodUsage::default()
        }
    }

    /// Adds the storage usage to the statistics of a pod. `root` is the node's filesystem.
    pub(crate) fn add_to(
        &self,
        mut stats: pb::PodStatsResponse,
        root: Option<pb::FilesystemUsage>,
    ) -> pb::PodStatsResponse {
        let uid = stats.pod.as_ref().map(|pod| pod.uid.clone()).unwrap_or_default();
        let named = by_name(self.containers(&uid));
        let layers = self.layers.clone().map(filesystem);
        let mut newest = 0;
        for container in &mut stats.containers {
            let Some((usage, layer_taken, log_taken)) = named.get(container.name.as_str()) else { continue };
            container.root = usage.layer.map(|space| part(layers, space, *layer_taken));
            container.logs = usage.logs.map(|space| part(root, space, *log_taken));
            container.termination_log = usage.termination_log.map(|space| part(root, space, *log_taken));
        }
        newest = named.values().map(|(_, layer, log)| (*layer).max(*log)).fold(newest, i64::max);
        stats.hosts_file = self.hosts_file(&uid).map(|space| part(root, space, newest));
        let volumes = self.volumes.get(&uid).map(Vec::as_slice).unwrap_or_default();
        stats.volumes = volumes
            .iter()
            .map(|volume| pb::VolumeUsage {
                name: volume.name.clone(),
                filesystem: Some(pb::FilesystemUsage {
                    taken_unix_nanos: volume.measured_unix_nanos,
                    capacity: volume.capacity_bytes,
                    available: volume.available_bytes,
                    used: volume.used_bytes,
                    inodes: volume.inodes,
                    inodes_free: volume.inodes_free,
                    inodes_used: volume.inodes_used,
                }),
                local_ephemeral: volume.local_ephemeral,
            })
            .collect();
        newest = volumes.iter().map(|volume| volume.measured_unix_nanos).fold(newest, i64::max);
        if newest > 0 {
            let whole = self.usage(&uid);
            stats.ephemeral_storage = Some(part(root, whole.local_space(), newest));
        }
        stats
    }
}

fn volume_usage(volume: &vm::VolumeStats) -> VolumeUsage {
    VolumeUsage {
        name: volume.name.clone(),
        space: Space { bytes: volume.used_bytes, inodes: volume.inodes_used },
        local: volume.local_ephemeral,
    }
}

#[cfg(test)]
mod tests {
    use keelson_proto::keelson::common::v1::PodRef;

    use super::*;

    fn container(name: &str, layer: Option<u64>, logs: u64) -> rt::ContainerFilesystemFigures {
        rt::ContainerFilesystemFigures {
            name: name.into(),
            layer_bytes: layer,
            layer_inodes: layer.map(|_| 2),
            layer_taken_unix_nanos: 5,
            log_bytes: logs,
            log_inodes: 1,
            log_taken_unix_nanos: 7,
            termination_log_bytes: 2 * logs,
            termination_log_inodes: 1,
            ..Default::default()
        }
    }

    fn stats() -> StorageStats {
        let volume = |name: &str, used_bytes, local_ephemeral| vm::VolumeStats {
            name: name.into(),
            used_bytes,
            capacity_bytes: 1000,
            local_ephemeral,
            measured_unix_nanos: 6,
            ..Default::default()
        };
        let layers = rt::FilesystemFigures { capacity_bytes: 500, ..Default::default() };
        let containers = vec![container("main", Some(30), 4), container("main", Some(1), 0)];
        let pod = rt::PodFilesystemFigures {
            containers,
            hosts_file_bytes: 100,
            hosts_file_inodes: 1,
            ..Default::default()
        };
        StorageStats {
            layers: Some(layers),
            pods: [("u".to_owned(), pod)].into(),
            volumes: [("u".to_owned(), vec![volume("scratch", 8, true), volume("claim", 90, false)])].into(),
        }
    }

    #[test]
    fn dead_containers_count_toward_storage_usage() {
        let usage = stats().usage("u");
        let main = usage.containers["main"];
        assert_eq!(main.layer, Some(Space { bytes: 31, inodes: 4 }));
        assert_eq!(main.logs, Some(Space { bytes: 4, inodes: 2 }));
        assert_eq!(main.termination_log, Some(Space { bytes: 8, inodes: 2 }));
        assert_eq!(usage.hosts_file, Some(Space { bytes: 100, inodes: 1 }));
        assert_eq!(usage.local_storage(), 151);
        assert_eq!(stats().usage("unknown"), PodUsage::default());
    }

    #[test]
    fn pod_statistics_include_layers_logs_volumes_and_ephemeral_storage() {
        let before = pb::PodStatsResponse {
            pod: Some(PodRef { uid: "u".into(), ..Default::default() }),
            containers: ["main", "other"]
                .map(|name| pb::ContainerStats { name: name.into(), ..Default::default() })
                .into(),
            ..Default::default()
        };
        let root = pb::FilesystemUsage { capacity: 9000, ..Default::default() };
        let after = stats().add_to(before.clone(), Some(root));
        let main = &after.containers[0];
        let (layer, logs) = (main.root.unwrap(), main.logs.unwrap());
        assert_eq!((layer.used, layer.capacity, layer.taken_unix_nanos), (31, 500, 5));
        assert_eq!((logs.used, logs.capacity, logs.taken_unix_nanos), (4, 9000, 7));
        assert_eq!(after.containers[1].root, None);
        let volumes: Vec<_> =
            after.volumes.iter().map(|v| (v.name.as_str(), v.filesystem.unwrap().used)).collect();
        assert_eq!(volumes, [("scratch", 8), ("claim", 90)]);
        let all = after.ephemeral_storage.unwrap();
        assert_eq!((all.used, all.capacity, all.taken_unix_nanos), (151, 9000, 7));
        let (hosts, messages) = (after.hosts_file.unwrap(), main.termination_log.unwrap());
        assert_eq!((hosts.used, messages.used), (100, 8));
        let nothing = StorageStats::default().add_to(before.clone(), Some(root));
        assert_eq!(nothing, before);
    }
}
