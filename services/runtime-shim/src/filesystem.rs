//! How full the file systems of images and containers are, and what each container takes of them
//! (runtime-and-resources.md §14.1): collected in the background, so that no call makes anybody walk a folder.
//!
//! The file systems are looked at each ten seconds. What containers take is collected as often while somebody asks
//! for it, since the runtime reads the cgroups of every container for the same call. Who asks for what logs take only
//! ([`Filesystems::logs`]) has no call made for it.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_cri::v1 as cri;
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_service_kit::{Context, now_unix_nanos};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic::Status;

use crate::cri::Cri;
use crate::files::Files;
use crate::observe::Observer;
use crate::ticking::ticking;

/// Between two collections: the eviction loop's period (runtime-and-resources.md §0.2), which acts only on a sample that
/// is newer than its last.
const PERIOD: Duration = Duration::from_secs(10);
/// After so long without a question the figures of containers are not collected any more.
const INTEREST: Duration = Duration::from_secs(60);
/// How long a file system may take to say how full it is. It is left out until it has.
const LOOK_WITHIN: Duration = Duration::from_secs(5);
/// How long the runtime may take to measure all containers.
const MEASURE_WITHIN: Duration = Duration::from_secs(30);

/// Collects the figures.
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
    /// Somebody asks for the figures of containers after a while without.
    asked: Notify,
    /// Looks that have not come back yet.
    looks: tokio::sync::Mutex<HashMap<PathBuf, JoinHandle<std::io::Result<Look>>>>,
}

#[derive(Debug, Default)]
struct State {
    /// What was told last; `None` before the first answer of the runtime.
    told: Option<pb::FilesystemStatsResponse>,
    pods_asked: Option<Instant>,
    /// What logs took when that was looked at last; `None` while nobody has asked within [`INTEREST`].
    logs: Option<Arc<[LogUse]>>,
    logs_asked: Option<Instant>,
}

/// What the log of a container takes, rotated files included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LogUse {
    pub(crate) pod: PodRef,
    pub(crate) container: String,
    pub(crate) bytes: u64,
}

/// Notes that somebody asks. Whether nobody has for a while.
fn ask(asked: &mut Option<Instant>) -> bool {
    let before = asked.replace(Instant::now());
    !is_recent(before)
}

fn is_recent(asked: Option<Instant>) -> bool {
    asked.is_some_and(|at| at.elapsed() <= INTEREST)
}

/// What a file system says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Look {
    device: u64,
    capacity: u64,
    available: u64,
    inodes: u64,
    inodes_free: u64,
}

/// A folder with its share of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Share {
    /// What its files take on the disk.
    pub bytes: u64,
    /// How many they are.
    pub inodes: u64,
}

/// What a layer takes, and when the runtime measured that.
type Layers = HashMap<String, cri::FilesystemUsage>;

impl Filesystems {
    /// Has no figures until [`Self::run`].
    pub fn new(cri: Cri, observer: Observer, files: Files) -> Self {
        Self { cri, observer, files, shared: Arc::default() }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The figures as they were collected last; `None` before the runtime's first answer.
    pub fn stats(&self, filesystems_only: bool) -> Option<pb::FilesystemStatsResponse> {
        let mut state = self.state();
        if !filesystems_only && ask(&mut state.pods_asked) {
            self.shared.asked.notify_one();
        }
        let told = state.told.as_ref()?;
        let without = || pb::FilesystemStatsResponse {
            images: told.images.clone(),
            containers: told.containers.clone(),
            ..Default::default()
        };
        Some(if filesystems_only { without() } else { told.clone() })
    }

    /// What the logs of containers took when they were looked at last; nothing at the first question after a while
    /// without, with which they are looked at again.
    pub(crate) fn logs(&self) -> Arc<[LogUse]> {
        let mut state = self.state();
        if ask(&mut state.logs_asked) {
            self.shared.asked.notify_one();
        }
        state.logs.clone().unwrap_or_default()
    }

    /// Collects until the shutdown.
    pub async fn run(self, context: Context) {
        let progress = context.progress.register("filesystems");
        let work = async {
            loop {
                self.collect().await;
                // Both are cancel-safe: a notification that is not taken here stays for the next turn.
                tokio::select! {
                    () = tokio::time::sleep(PERIOD) => {}
                    () = self.shared.asked.notified() => {}
                }
            }
        };
        // Cancel-safe: nothing of it outlives the service.
        tokio::select! {
            () = context.shutdown.cancelled() => {}
            () = ticking(&progress, work) => {}
        }
    }

    /// One collection; what cannot be had keeps its last figures.
    pub(crate) async fn collect(&self) {
        match self.filesystems().await {
            Ok((images, containers)) => {
                let mut state = self.state();
                let told = state.told.get_or_insert_default();
                (told.images, told.containers) = (images, containers);
            }
            Err(status) => {
                tracing::debug!(error = status.message(), "no figures of the file systems, will retry");
                return;
            }
        }
        let (of_pods, of_logs) = {
            let mut state = self.state();
            let asked = (is_recent(state.pods_asked), is_recent(state.logs_asked));
            if !asked.1 {
                state.logs = None;
            }
            asked
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
                    let told = state.told.get_or_insert_default();
                    (told.pods, told.pods_taken_unix_nanos) = (pods, now_unix_nanos());
                }
            }
            Err(status) => {
                tracing::debug!(error = status.message(), "no figures of the containers, will retry");
            }
        }
    }

    /// The file systems of images, and those of layers that are others.
    async fn filesystems(&self) -> Result<(Vec<pb::FilesystemFigures>, Vec<pb::FilesystemFigures>), Status> {
        let request = self.cri.quick(cri::ImageFsInfoRequest {});
        let answer = self.cri.images().image_fs_info(request).await?.into_inner();
        let mut devices = BTreeSet::new();
        let images = self.figures(answer.image_filesystems, &mut devices).await;
        let containers = self.figures(answer.container_filesystems, &mut devices).await;
        Ok((images, containers))
    }

    /// The figures of those that are on none of `devices`, to which theirs are added.
    async fn figures(
        &self,
        usages: Vec<cri::FilesystemUsage>,
        devices: &mut BTreeSet<u64>,
    ) -> Vec<pb::FilesystemFigures> {
        let mut figures = Vec::new();
        for usage in usages {
            let mountpoint = usage.fs_id.map(|id| id.mountpoint).unwrap_or_default();
            let Some(look) = self.look(Path::new(&mountpoint)).await else { continue };
            if !devices.insert(look.device) {
                continue;
            }
            figures.push(pb::FilesystemFigures {
                mountpoint,
                capacity_bytes: look.capacity,
                available_bytes: look.available,
                used_bytes: usage.used_bytes.map(|v| v.value),
                inodes: look.inodes,
                inodes_free: look.inodes_free,
                inodes_used: usage.inodes_used.map(|v| v.value),
                taken_unix_nanos: now_unix_nanos(),
            });
        }
        figures
    }

    /// How full a file system is. One that hangs is asked by one thread only, however often it is looked at.
    async fn look(&self, folder: &Path) -> Option<Look> {
        let mut looks = self.shared.looks.lock().await;
        let at = folder.to_owned();
        let begin = || tokio::task::spawn_blocking(move || look_at(&at));
        let task = looks.entry(folder.to_owned()).or_insert_with(begin);
        let result = match tokio::time::timeout(LOOK_WITHIN, task).await {
            Ok(Ok(result)) => result,
            Ok(Err(error)) => Err(std::io::Error::other(error)),
            Err(_) => {
                tracing::warn!(folder = %folder.display(), "the file system does not say how full it is");
                return None;
            }
        };
        looks.remove(folder);
        result
            .inspect_err(
                |error| tracing::debug!(folder = %folder.display(), %error, "cannot look at a file system"),
            )
            .ok()
    }

    /// What the containers of all pods take; of their layers only `with_layers`, for which the runtime is asked.
    async fn pods(&self, with_layers: bool) -> Result<Vec<pb::PodFilesystemFigures>, Status> {
        let layers = if with_layers { self.layers().await? } else { Layers::new() };
        let (pods, files) = (self.observer.all(), self.files.clone());
        let measure = move || pods.iter().map(|pod| figures_of(pod, &layers, &files)).collect();
        tokio::task::spawn_blocking(measure).await.map_err(|error| Status::internal(error.to_string()))
    }

    async fn layers(&self) -> Result<Layers, Status> {
        let request = cri::ListContainerStatsRequest { filter: None };
        let request = self.cri.within(MEASURE_WITHIN, request);
        let stats = self.cri.runtime().list_container_stats(request).await?.into_inner().stats;
        Ok(stats.into_iter().filter_map(|s| Some((s.attributes?.id, s.writable_layer?))).collect())
    }
}

fn look_at(folder: &Path) -> std::io::Result<Look> {
    let stat = rustix::fs::statvfs(folder)?;
    Ok(Look {
        device: rustix::fs::stat(folder)?.st_dev,
        capacity: stat.f_blocks.saturating_mul(stat.f_frsize),
        available: stat.f_bavail.saturating_mul(stat.f_frsize),
        inodes: stat.f_files,
        inodes_free: stat.f_ffree,
    })
}

/// The logs that there are: containers of one name share one, and one of them has its figures.
fn logs_of(pods: &[pb::PodFilesystemFigures]) -> Arc<[LogUse]> {
    let of = |pod: &pb::PodFilesystemFigures| {
        let name = pod.pod.clone().unwrap_or_default();
        let there = pod.containers.iter().filter(|container| container.log_inodes > 0);
        let logs = there.map(move |container| LogUse {
            pod: name.clone(),
            container: container.name.clone(),
            bytes: container.log_bytes,
        });
        logs.collect::<Vec<_>>()
    };
    pods.iter().flat_map(of).collect()
}

/// What the containers of a pod take; those of one name are listed newest first.
fn figures_of(pod: &pb::RuntimePod, layers: &Layers, files: &Files) -> pb::PodFilesystemFigures {
    let mut named = BTreeSet::new();
    let containers = pod.containers.iter().map(|container| {
        let layer = layers.get(&container.id);
        // The files of a name are its newest container's. No folder, no files.
        let newest = named.insert(container.name.as_str());
        let log = Path::new(&container.log_path).parent().filter(|_| newest);
        let log = log.and_then(|folder| files.log_share(folder).ok()).unwrap_or_default();
        let messages = newest.then(|| files.termination_log_share(&pod.uid, &container.name).ok());
        let messages = messages.flatten().unwrap_or_default();
        pb::ContainerFilesystemFigures {
            name: container.name.clone(),
            id: container.id.clone(),
            running: container.state() == pb::ContainerState::Running,
            layer_bytes: layer.and_then(|l| l.used_bytes.as_ref()).map(|v| v.value),
            layer_inodes: layer.and_then(|l| l.inodes_used.as_ref()).map(|v| v.value),
            layer_taken_unix_nanos: layer.map_or(0, |l| l.timestamp),
            log_bytes: log.bytes,
            log_inodes: log.inodes,
            log_taken_unix_nanos: now_unix_nanos(),
            termination_log_bytes: messages.bytes,
            termination_log_inodes: messages.inodes,
        }
    });
    let hosts = files.hosts_file_share(&pod.uid).unwrap_or_default();
    pb::PodFilesystemFigures {
        pod: Some(PodRef { uid: pod.uid.clone(), namespace: pod.namespace.clone(), name: pod.name.clone() }),
        containers: containers.collect(),
        hosts_file_bytes: hosts.bytes,
        hosts_file_inodes: hosts.inodes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Answer, FakeRuntime, until};
    use k8s_cri::v1::ContainerState::{ContainerExited, ContainerRunning};
    use keelson_config::ServiceName;
    use tonic::Code;

    fn filesystems(fake: &FakeRuntime) -> Filesystems {
        Filesystems::new(fake.cri.clone(), fake.observer.clone(), fake.files.clone())
    }

    fn usage(mountpoint: &str, bytes: u64) -> cri::FilesystemUsage {
        cri::FilesystemUsage {
            timestamp: 7,
            fs_id: Some(cri::FilesystemIdentifier { mountpoint: mountpoint.into() }),
            used_bytes: Some(cri::UInt64Value { value: bytes }),
            inodes_used: Some(cri::UInt64Value { value: 3 }),
        }
    }

    /// A pod `u` whose container `c` logs two files and whose older namesake is dead.
    async fn pod(fake: &FakeRuntime) {
        fake.sandbox("s-u", "u", true);
        fake.container("c", "u", ContainerRunning);
        fake.container("old", "u", ContainerExited);
        fake.named("old", "c");
        let folder = fake.dir.path().join("logs/default_u_u/c");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("0.log"), vec![b'x'; 8_192]).unwrap();
        std::fs::write(folder.join("0.log.1"), b"y").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", folder.join("link")).unwrap();
        let own = fake.dir.path().join("root/pods/u");
        std::fs::create_dir_all(own.join("containers/c")).unwrap();
        std::fs::write(own.join("etc-hosts"), vec![b'h'; 20_000]).unwrap();
        for attempt in ["11111111", "22222222"] {
            std::fs::write(own.join("containers/c").join(attempt), vec![b'm'; 40_000]).unwrap();
        }
        std::os::unix::fs::symlink("/etc/passwd", own.join("containers/c/link")).unwrap();
        for container in ["c", "old"] {
            fake.logs_to(container, &folder.join("0.log"));
            fake.layer(container, usage("/", 100));
        }
        fake.observer.read("u").await.unwrap();
    }

    #[tokio::test]
    async fn nothing_is_known_before_the_runtimes_first_answer_and_then_the_last_figures_stand() {
        let fake = FakeRuntime::start().await;
        let figures = filesystems(&fake);
        assert_eq!(figures.stats(true), None);
        fake.answer("ImageFsInfo", Answer::Fail(1, Code::Unavailable));
        figures.collect().await;
        assert_eq!(figures.stats(true), None);
        figures.collect().await;
        let first = figures.stats(true).unwrap();
        let image = &first.images[0];
        assert!(image.capacity_bytes > 1 << 20 && image.capacity_bytes >= image.available_bytes, "{image:?}");
        assert!(image.taken_unix_nanos > 0 && image.mountpoint == fake.dir.path().to_str().unwrap());
        fake.answer("ImageFsInfo", Answer::Fail(9, Code::Unavailable));
        figures.collect().await;
        assert_eq!(figures.stats(true), Some(first));
    }

    #[tokio::test]
    async fn a_container_has_its_layer_and_all_files_of_its_log_which_its_older_namesake_has_not() {
        let fake = FakeRuntime::start().await;
        pod(&fake).await;
        let figures = filesystems(&fake);
        figures.collect().await;
        let before = figures.stats(false).unwrap();
        assert!(before.pods.is_empty() && before.pods_taken_unix_nanos == 0, "nobody had asked");
        figures.collect().await;
        let told = figures.stats(false).unwrap();
        assert!(told.pods_taken_unix_nanos > 0);
        let [pod] = told.pods.as_slice() else { panic!("{told:?}") };
        assert_eq!(pod.pod.as_ref().unwrap().name, "u");
        let of = |id: &str| pod.containers.iter().find(|c| c.id == id).unwrap();
        let (new, old) = (of("c"), of("old"));
        assert!(new.running && !old.running && old.name == "c");
        assert_eq!((new.layer_bytes, new.layer_inodes, new.layer_taken_unix_nanos), (Some(100), Some(3), 7));
        assert_eq!(old.layer_bytes, Some(100));
        let (with, without) = if new.log_inodes > 0 { (new, old) } else { (old, new) };
        // What a file takes on the disk depends on the disk; a link and what it leads to is no log.
        assert!(with.log_bytes >= 8_192 && with.log_bytes < 1 << 20 && with.log_inodes == 2, "{with:?}");
        assert_eq!((without.log_bytes, without.log_inodes), (0, 0));
        assert!((80_000..1 << 20).contains(&with.termination_log_bytes), "{with:?}");
        assert_eq!((with.termination_log_inodes, without.termination_log_bytes), (2, 0));
        assert!((20_000..1 << 20).contains(&pod.hosts_file_bytes), "{pod:?}");
        assert_eq!(pod.hosts_file_inodes, 1);
        assert!(figures.stats(true).unwrap().pods.is_empty());
    }

    #[tokio::test]
    async fn layers_on_the_file_system_of_the_images_are_not_told_twice() {
        let fake = FakeRuntime::start().await;
        let figures = filesystems(&fake);
        let here = fake.dir.path().to_str().unwrap().to_owned();
        fake.container_filesystem(usage(&here, 1));
        figures.collect().await;
        assert!(figures.stats(true).unwrap().containers.is_empty());
        fake.container_filesystem(usage("/proc", 1));
        figures.collect().await;
        let told = figures.stats(true).unwrap();
        assert_eq!((told.containers.len(), told.containers[0].used_bytes), (1, Some(1)));
        fake.container_filesystem(usage("/nowhere/at/all", 1));
        figures.collect().await;
        assert!(figures.stats(true).unwrap().containers.is_empty(), "what cannot be looked at is left out");
    }

    #[tokio::test]
    async fn containers_are_measured_only_while_somebody_asks() {
        let fake = FakeRuntime::start().await;
        pod(&fake).await;
        let figures = filesystems(&fake);
        let context = Context::detached(ServiceName::RuntimeShim, keelson_config::Config::default());
        let run = tokio::spawn(figures.clone().run(context.clone()));
        until("the file systems are known", || figures.stats(true).is_some()).await;
        assert!(fake.calls("ListContainerStats").is_empty());
        // The first question is answered without waiting and wakes the collection.
        figures.stats(false).unwrap();
        until("the pods are known", || {
            figures.stats(true).is_some() && figures.state().told.as_ref().unwrap().pods.len() == 1
        })
        .await;
        context.shutdown.cancel();
        run.await.unwrap();
        figures.state().pods_asked = Instant::now().checked_sub(INTEREST * 2);
        let measured = fake.calls("ListContainerStats").len();
        figures.collect().await;
        assert_eq!(fake.calls("ListContainerStats").len(), measured);
    }
}
