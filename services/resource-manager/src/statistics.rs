//! Reads the usage of pods and of the node on request (runtime-and-resources.md §14).
//!
//! Nothing is collected in the background, and no directory is walked: runtime-shim lists the containers, and each has a few
//! files. Only two samples of CPU time per cgroup are kept, for rates. Storage usage of pods is measured by runtime-shim and
//! volume-manager, see [`crate::storage`].

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1 as cri;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use keelson_config::SystemCgroups;
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_resource_manager_core::layout::is_usable_uid;
use keelson_resource_manager_core::statistics::{Rate, Sample, Usage};
use keelson_resource_manager_core::system_cgroups::{SystemCgroup, system_cgroups};
use keelson_service_kit::status::{chain, error};
use keelson_service_kit::{Peer, now_unix_nanos};
use tokio::sync::{Mutex, watch};
use tokio::time::Instant;
use tonic::{Code, Request, Status};

use crate::cgroup::Tree;
use crate::storage::{self, Storage, StorageStats};
use crate::view::TreeState;
use crate::wire_stats as wire;
use crate::{details, host, procfs, runtime_pods};

/// Timeout of the request for image statistics; the other statistics do not wait longer for it.
const IMAGES_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of statfs(2); a filesystem that hangs has no statistics.
const STATFS_TIMEOUT: Duration = Duration::from_secs(2);

/// Reads statistics, one reader at a time.
#[derive(Debug)]
pub(crate) struct Statistics {
    tree: watch::Receiver<TreeState>,
    runtime: Peer,
    storage: Storage,
    root: PathBuf,
    /// Configured system cgroups.
    system: Arc<SystemCgroups>,
    origin: Instant,
    history: Arc<Mutex<History>>,
    /// Held during statfs(2), so that a filesystem that hangs blocks only one thread.
    statfs_lock: Arc<Mutex<()>>,
}

/// CPU samples for rates.
#[derive(Debug, Default)]
struct History {
    node: Rate,
    pods: Rate,
    /// By the name of the cgroup in the summary.
    system: HashMap<&'static str, Rate>,
    /// By the path of the cgroup.
    cgroups: HashMap<String, Rate>,
}

impl Statistics {
    /// Reads this tree with the `system` cgroups in it, the containers of this runtime-shim, the measurements of `storage`, and
    /// the filesystem of `root`.
    pub(crate) fn new(
        tree: watch::Receiver<TreeState>,
        runtime: Peer,
        storage: Storage,
        root: PathBuf,
        system: SystemCgroups,
    ) -> Self {
        let (history, statfs_lock) = (Arc::default(), Arc::default());
        let (system, origin) = (Arc::new(system), Instant::now());
        Self { tree, runtime, storage, root, system, origin, history, statfs_lock }
    }

    /// Statistics of the node; with `brief` only CPU and memory.
    ///
    /// # Errors
    /// FAILED_PRECONDITION: there is no cgroup tree.
    pub(crate) async fn node(&self, brief: bool) -> Result<pb::NodeStatsResponse, Status> {
        let tree = self.tree()?;
        let (root, images) = if brief { (None, None) } else { self.filesystems().await };
        let layers = if brief { None } else { self.storage.layers().await };
        let containers = layers.map(storage::filesystem).or(images);
        let system = Arc::clone(&self.system);
        self.read(move |clock, history| {
            let taken = now_unix_nanos();
            let pods = tree.layout().pods().to_string();
            pb::NodeStatsResponse {
                boot_unix_nanos: procfs::boot_unix_nanos(),
                usage: Some(wire::usage(tree.node_usage(), taken, |cpu| clock.rate(&mut history.node, cpu))),
                pods: Some(wire::usage(tree.usage(&pods), taken, |cpu| clock.rate(&mut history.pods, cpu))),
                network: if brief { None } else { procfs::network("/proc/self/net/dev") },
                root,
                images,
                processes: if brief { None } else { process_count() },
                containers,
                pods_started_unix_nanos: tree.created_unix_nanos(&pods),
                system: system_stats(&tree, &system, clock, &mut history.system),
            }
        })
        .await
    }

    /// Statistics of every running pod; with `brief` only CPU and memory.
    ///
    /// # Errors
    /// FAILED_PRECONDITION: there is no cgroup tree. The error of runtime-shim when it does not list its pods.
    pub(crate) async fn pods(&self, brief: bool) -> Result<Vec<pb::PodStatsResponse>, Status> {
        let tree = self.tree()?;
        let running = self.running().await?;
        let storage = if brief { StorageStats::default() } else { self.storage.stats().await };
        let root = if brief { None } else { self.filesystem_of_root().await };
        self.read(move |clock, history| {
            let old_rates = std::mem::take(&mut history.cgroups);
            let mut reader = Reader { tree: &tree, clock, brief, old_rates, rates: HashMap::new() };
            let stats = running.into_iter().filter_map(|pod| reader.pod(pod));
            let stats = stats.map(|pod| storage.add_to(pod, root)).collect();
            // Rates of cgroups that were not read are dropped.
            history.cgroups = reader.rates;
            stats
        })
        .await
    }

    /// Detailed usage of the cgroups of the node and of every running pod.
    ///
    /// # Errors
    /// FAILED_PRECONDITION: there is no cgroup tree. The error of runtime-shim when it does not list its pods.
    pub(crate) async fn cgroups(&self) -> Result<Vec<pb::CgroupStatsResponse>, Status> {
        let tree = self.tree()?;
        let running = self.running().await?;
        let system = Arc::clone(&self.system);
        self.read(move |_, _| details::cgroup_stats(&tree, &running, &known_system_cgroups(&tree, &system)))
            .await
    }

    fn tree(&self) -> Result<Arc<Tree>, Status> {
        match &*self.tree.borrow() {
            TreeState::Ready(tree) => Ok(Arc::clone(tree)),
            TreeState::Pending(text) | TreeState::Unsupported(text) => {
                Err(error(Code::FailedPrecondition, "NO_CGROUPS", format!("no statistics: {text}")))
            }
        }
    }

    /// Runs `work` on a thread that may block.
    async fn read<T, F>(&self, work: F) -> Result<T, Status>
    where
        T: Send + 'static,
        F: FnOnce(Clock, &mut History) -> T + Send + 'static,
    {
        let mut history = Arc::clone(&self.history).lock_owned().await;
        let clock = Clock(self.origin);
        let reading = tokio::task::spawn_blocking(move || work(clock, &mut history));
        let ended =
            |e| error(Code::Internal, "READ_ENDED", format!("the task that reads statistics has ended: {e}"));
        reading.await.map_err(ended)
    }

    /// The pods that runtime-shim has now.
    pub(crate) async fn running(&self) -> Result<Vec<rt::RuntimePod>, Status> {
        runtime_pods::list(&self.runtime).await
    }

    /// The storage statistics of pods.
    pub(crate) fn storage(&self) -> &Storage {
        &self.storage
    }

    /// The filesystem of the root directory; none when it hangs.
    async fn filesystem_of_root(&self) -> Option<pb::FilesystemUsage> {
        let root = self.root.clone();
        let statfs_lock = Arc::clone(&self.statfs_lock);
        let work = async {
            let guard = statfs_lock.lock_owned().await;
            let measure = move || {
                let found = filesystem(&root);
                drop(guard);
                found
            };
            tokio::task::spawn_blocking(measure).await.ok().flatten()
        };
        tokio::time::timeout(STATFS_TIMEOUT, work).await.ok().flatten()
    }

    /// The filesystems of the root directory and of images.
    async fn filesystems(&self) -> (Option<pb::FilesystemUsage>, Option<pb::FilesystemUsage>) {
        let images = self.images().await;
        let root = self.root.clone();
        let work = async {
            let guard = Arc::clone(&self.statfs_lock).lock_owned().await;
            let measure = move || {
                let both = (filesystem(&root), images.and_then(Images::measure));
                drop(guard);
                both
            };
            tokio::task::spawn_blocking(measure).await.unwrap_or_default()
        };
        tokio::time::timeout(STATFS_TIMEOUT, work).await.unwrap_or_else(|_| {
            let seconds = STATFS_TIMEOUT.as_secs();
            tracing::warn!("no statistics of filesystems: statfs takes longer than {seconds} s");
            (None, None)
        })
    }

    /// Where the runtime stores images and their usage; none when it does not answer in time.
    async fn images(&self) -> Option<Images> {
        let mut request = Request::new(cri::ImageFsInfoRequest {});
        request.set_timeout(IMAGES_TIMEOUT);
        let answer = ImageServiceClient::new(self.runtime.channel()).image_fs_info(request).await;
        let answer =
            answer.inspect_err(|status| tracing::debug!("no statistics of images: {}", status.message()));
        let usage = answer.ok()?.into_inner().image_filesystems.into_iter().next()?;
        Some(Images {
            dir: usage.fs_id?.mountpoint.into(),
            used: usage.used_bytes.map(|bytes| bytes.value),
            inodes_used: usage.inodes_used.map(|inodes| inodes.value),
        })
    }
}

/// The runtime's report about its images.
#[derive(Debug)]
struct Images {
    dir: PathBuf,
    used: Option<u64>,
    inodes_used: Option<u64>,
}

impl Images {
    /// Their filesystem, with the usage of images as its used space (§14.2).
    fn measure(self) -> Option<pb::FilesystemUsage> {
        let whole = filesystem(&self.dir)?;
        Some(pb::FilesystemUsage {
            used: self.used.unwrap_or(whole.used),
            inodes_used: self.inodes_used.unwrap_or(whole.inodes_used),
            ..whole
        })
    }
}

/// A monotonic clock, by its start.
#[derive(Debug, Clone, Copy)]
struct Clock(Instant);

impl Clock {
    fn rate(self, rate: &mut Rate, cpu_nanos: u64) -> Option<u64> {
        let at_nanos = u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX);
        rate.observe(Sample { at_nanos, cpu_nanos })
    }
}

struct Reader<'a> {
    tree: &'a Tree,
    clock: Clock,
    brief: bool,
    old_rates: HashMap<String, Rate>,
    rates: HashMap<String, Rate>,
}

impl Reader<'_> {
    /// None for a pod without running containers, or without a cgroup.
    fn pod(&mut self, pod: rt::RuntimePod) -> Option<pb::PodStatsResponse> {
        let sandbox = pod.sandboxes.iter().find(|sandbox| sandbox.ready);
        let running = runtime_pods::newest_running(&pod.containers);
        if (sandbox.is_none() && running.is_empty()) || !is_usable_uid(&pod.uid) {
            return None;
        }
        let pod_cgroup = self.tree.find_pod(&pod.uid)?;
        let mut processes = 0;
        let mut containers = Vec::with_capacity(running.len());
        for container in running {
            let mut paths = self.tree.layout().containers(&pod_cgroup, &container.id).into_iter();
            let found = paths.find_map(|path| {
                let usage = self.usage(path.clone());
                (usage.cpu_nanos.is_some() || usage.memory.is_some()).then_some((path, usage))
            });
            let Some((path, usage)) = found else { continue };
            if !self.brief {
                processes += self.tree.processes(&path).1;
            }
            containers.push(pb::ContainerStats {
                name: container.name.clone(),
                started_unix_nanos: container.started_unix_nanos,
                usage: Some(usage),
                ..Default::default()
            });
        }
        let mut stats = pb::PodStatsResponse {
            started_unix_nanos: pod.sandboxes.first().map_or(0, |sandbox| sandbox.created_unix_nanos),
            containers,
            ..Default::default()
        };
        if !self.brief {
            let paths = sandbox.map(|sandbox| self.tree.layout().containers(&pod_cgroup, &sandbox.id));
            let mut sandboxes = paths.into_iter().flatten().map(|path| self.tree.processes(&path));
            let (pid, of_sandbox) = sandboxes.find(|(_, count)| *count > 0).unwrap_or((None, 0));
            stats.processes = Some(processes + of_sandbox);
            let own_network = sandbox.is_some_and(|sandbox| !sandbox.host_network);
            let pid = pid.filter(|_| own_network);
            stats.network = pid.and_then(|pid| procfs::network(&format!("/proc/{pid}/net/dev")));
        }
        stats.usage = Some(self.usage(pod_cgroup));
        stats.pod = Some(PodRef { uid: pod.uid, namespace: pod.namespace, name: pod.name });
        Some(stats)
    }

    fn usage(&mut self, path: String) -> pb::Usage {
        let usage = self.tree.usage(&path);
        let mut rate = self.old_rates.remove(&path).unwrap_or_default();
        let converted = wire::usage(usage, now_unix_nanos(), |cpu| self.clock.rate(&mut rate, cpu));
        if usage != Usage::default() {
            self.rates.insert(path, rate);
        }
        converted
    }
}

/// The system cgroups; this process may be moved, so its own cgroup is read each time.
fn known_system_cgroups(tree: &Tree, named: &SystemCgroups) -> Vec<SystemCgroup> {
    let own =
        if named.kubelet.is_empty() { fs::read_to_string("/proc/self/cgroup") } else { Ok(String::new()) };
    let paths = [&named.kubelet, &named.runtime, &named.misc].map(String::as_str);
    system_cgroups(paths, &own.unwrap_or_default(), tree.version())
}

/// The usage of the system cgroups; missing ones are left out.
fn system_stats(
    tree: &Tree,
    named: &SystemCgroups,
    clock: Clock,
    rates: &mut HashMap<&'static str, Rate>,
) -> Vec<pb::ContainerStats> {
    let known = known_system_cgroups(tree, named).into_iter();
    let existing =
        known.map(|cgroup| (tree.usage(&cgroup.path), cgroup)).filter(|(u, _)| *u != Usage::default());
    let stats = existing.map(|(usage, SystemCgroup { name, path })| pb::ContainerStats {
        name: name.to_owned(),
        started_unix_nanos: tree.created_unix_nanos(&path),
        usage: Some(wire::usage(usage, now_unix_nanos(), |cpu| {
            clock.rate(rates.entry(name).or_default(), cpu)
        })),
        ..Default::default()
    });
    stats.collect()
}

fn filesystem(path: &Path) -> Option<pb::FilesystemUsage> {
    match host::filesystem_usage(path) {
        Ok(usage) => Some(usage),
        Err(error) => {
            let text = chain(&error);
            tracing::debug!("no statistics of a filesystem: {text}");
            None
        }
    }
}

fn process_count() -> Option<pb::ProcessCount> {
    let found = host::processes();
    (found.max > 0).then(|| pb::ProcessCount {
        taken_unix_nanos: now_unix_nanos(),
        max: found.max,
        current: found.running,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_hanging_filesystem_has_no_statistics_and_blocks_one_thread() {
        let (_tree, tree) = watch::channel(TreeState::Pending(String::new()));
        let dir = tempfile::tempdir().unwrap();
        let runtime = Peer::service(dir.path(), keelson_config::ServiceName::RuntimeShim);
        let volumes = Peer::service(dir.path(), keelson_config::ServiceName::VolumeManager);
        let storage = Storage::new(runtime.clone(), volumes);
        let root = dir.path().to_owned();
        let statistics = Statistics::new(tree, runtime, storage, root, SystemCgroups::default());
        let hanging = Arc::clone(&statistics.statfs_lock).lock_owned().await;
        assert_eq!(statistics.filesystems().await, (None, None));
        drop(hanging);
        let (root, images) = statistics.filesystems().await;
        assert!(root.unwrap().capacity > 0);
        assert_eq!(images, None);
    }

    #[test]
    fn process_count_and_boot_time_are_available() {
        let count = process_count().unwrap();
        assert!(count.current > 0 && count.current < count.max, "{count:?}");
        let boot = procfs::boot_unix_nanos();
        assert!(boot > 0 && boot < now_unix_nanos(), "{boot}");
    }
}
