//! What pods take of filesystems: runtime-shim measures writable layers and logs, volume-manager volumes. Both do so
//! in the background, so that asking them costs little; whoever does not answer in time has no figures.

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

/// Bound of either question.
const ASK_WITHIN: Duration = Duration::from_secs(2);
/// Bound of what the node gives back: images may be many, and what is not done by then goes on.
const RECLAIM_WITHIN: Duration = Duration::from_secs(20);

/// The two that measure.
#[derive(Debug, Clone)]
pub(crate) struct Storage {
    runtime: Peer,
    volumes: Peer,
}

/// What they have measured.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    /// Where writable layers lie.
    layers: Option<rt::FilesystemFigures>,
    pods: HashMap<String, rt::PodFilesystemFigures>,
    volumes: HashMap<String, Vec<vm::VolumeStats>>,
}

impl Storage {
    pub(crate) fn new(runtime: Peer, volumes: Peer) -> Self {
        Self { runtime, volumes }
    }

    /// The filesystems of images and layers; `all` with what each container takes of them.
    pub(crate) async fn filesystems(&self, all: bool) -> Result<rt::FilesystemStatsResponse, Status> {
        let mut request = Request::new(rt::FilesystemStatsRequest { filesystems_only: !all });
        request.set_timeout(ASK_WITHIN);
        let answer = RuntimeClient::new(self.runtime.channel()).filesystem_stats(request).await;
        Ok(answer?.into_inner())
    }

    /// The filesystem of writable layers, when somebody tells.
    pub(crate) async fn layers(&self) -> Option<rt::FilesystemFigures> {
        let told = self.filesystems(false).await;
        layers(told.inspect_err(|status| unknown("filesystems", status)).ok()?)
    }

    /// Everything; what is not told is not there.
    pub(crate) async fn figures(&self) -> Figures {
        let (filesystems, volumes) = tokio::join!(self.filesystems(true), self.volumes());
        let mut figures = Figures::default();
        match filesystems {
            Ok(mut told) => {
                let pods = std::mem::take(&mut told.pods);
                let by_uid = pods.into_iter().filter_map(|pod| Some((pod.pod.as_ref()?.uid.clone(), pod)));
                figures.pods = by_uid.collect();
                figures.layers = layers(told);
            }
            Err(status) => unknown("writable layers and logs", &status),
        }
        match volumes {
            Ok(volumes) => figures.volumes = volumes,
            Err(status) => unknown("volumes", &status),
        }
        figures
    }

    async fn volumes(&self) -> Result<HashMap<String, Vec<vm::VolumeStats>>, Status> {
        let ask = async {
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
        let late = |_| Err(Status::deadline_exceeded("volume-manager has not told its figures in time"));
        tokio::time::timeout(ASK_WITHIN, ask).await.unwrap_or_else(late)
    }

    /// Has dead containers removed, and with `images` the images that nothing uses; for people what that came to.
    pub(crate) async fn reclaim(&self, images: bool) -> Result<String, Status> {
        let mut request = Request::new(rt::CollectGarbageRequest {
            unused_images: images,
            ended_pods: true,
            ..Default::default()
        });
        request.set_timeout(RECLAIM_WITHIN);
        let answer = RuntimeClient::new(self.runtime.channel()).collect_garbage(request).await?.into_inner();
        Ok(format!("{} containers and {} images", answer.containers_removed, answer.images_removed))
    }
}

fn unknown(what: &str, status: &Status) {
    tracing::debug!("no figures of {what}: {}", status.message());
}

fn layers(told: rt::FilesystemStatsResponse) -> Option<rt::FilesystemFigures> {
    told.containers.into_iter().next().or(told.images.into_iter().next())
}

/// A filesystem with what the runtime takes of it, or all that is taken when it does not say.
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

/// A part of a filesystem: its size, and what this part takes.
fn part(whole: Option<pb::FilesystemUsage>, space: Space, taken_unix_nanos: i64) -> pb::FilesystemUsage {
    let whole = whole.unwrap_or_default();
    pb::FilesystemUsage { taken_unix_nanos, used: space.bytes, inodes_used: space.inodes, ..whole }
}

/// What the containers of each name take, dead ones included, and when their layers and logs were measured last.
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

impl Figures {
    fn containers(&self, uid: &str) -> &[rt::ContainerFilesystemFigures] {
        self.pods.get(uid).map(|pod| pod.containers.as_slice()).unwrap_or_default()
    }

    fn hosts_file(&self, uid: &str) -> Option<Space> {
        let pod = self.pods.get(uid)?;
        Some(Space { bytes: pod.hosts_file_bytes, inodes: pod.hosts_file_inodes })
    }

    /// What a pod takes of filesystems.
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

    /// Adds to the statistics of a pod what it takes of filesystems. `root` is the node's filesystem.
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

    fn figures() -> Figures {
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
        Figures {
            layers: Some(layers),
            pods: [("u".to_owned(), pod)].into(),
            volumes: [("u".to_owned(), vec![volume("scratch", 8, true), volume("claim", 90, false)])].into(),
        }
    }

    #[test]
    fn what_dead_containers_of_a_name_take_counts_too() {
        let usage = figures().usage("u");
        let main = usage.containers["main"];
        assert_eq!(main.layer, Some(Space { bytes: 31, inodes: 4 }));
        assert_eq!(main.logs, Some(Space { bytes: 4, inodes: 2 }));
        assert_eq!(main.termination_log, Some(Space { bytes: 8, inodes: 2 }));
        assert_eq!(usage.hosts_file, Some(Space { bytes: 100, inodes: 1 }));
        assert_eq!(usage.local_storage(), 151);
        assert_eq!(figures().usage("unknown"), PodUsage::default());
    }

    #[test]
    fn a_pod_is_told_with_its_layers_logs_volumes_and_what_they_are_together() {
        let stats = pb::PodStatsResponse {
            pod: Some(PodRef { uid: "u".into(), ..Default::default() }),
            containers: ["main", "other"]
                .map(|name| pb::ContainerStats { name: name.into(), ..Default::default() })
                .into(),
            ..Default::default()
        };
        let root = pb::FilesystemUsage { capacity: 9000, ..Default::default() };
        let told = figures().add_to(stats.clone(), Some(root));
        let main = &told.containers[0];
        let (layer, logs) = (main.root.unwrap(), main.logs.unwrap());
        assert_eq!((layer.used, layer.capacity, layer.taken_unix_nanos), (31, 500, 5));
        assert_eq!((logs.used, logs.capacity, logs.taken_unix_nanos), (4, 9000, 7));
        assert_eq!(told.containers[1].root, None);
        let volumes: Vec<_> =
            told.volumes.iter().map(|v| (v.name.as_str(), v.filesystem.unwrap().used)).collect();
        assert_eq!(volumes, [("scratch", 8), ("claim", 90)]);
        let all = told.ephemeral_storage.unwrap();
        assert_eq!((all.used, all.capacity, all.taken_unix_nanos), (151, 9000, 7));
        let (hosts, messages) = (told.hosts_file.unwrap(), main.termination_log.unwrap());
        assert_eq!((hosts.used, messages.used), (100, 8));
        let nothing = Figures::default().add_to(stats.clone(), Some(root));
        assert_eq!(nothing, stats);
    }
}
