//! Rotation of the logs of running containers (runtime-and-resources.md §7.5).
//!
//! Each `containerLogMonitorInterval` the size of each log is looked at, a stat each and no more. What has grown too
//! large is renamed and the runtime told to open another file: that is quick, for `containerLogMaxWorkers` logs at the
//! same time. Compression is not: one thread of low priority does it for all and never takes more than a quarter of a
//! processor. A container that writes faster than that has its files removed when there are too many, compressed or not,
//! and delays nobody's rotation.

use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use k8s_cri::v1 as cri;
use keelson_config::ContainerLogs;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::rotation::{Limits, Step, plan_rotation, plan_tidying};
use keelson_service_kit::{Context, WatchItem, now_unix_nanos};
use tokio::sync::{Notify, oneshot};
use tonic::Status;

use crate::cri::Cri;
use crate::files::Files;
use crate::log_dir::LogDir;
use crate::observe::{Observer, WatchKey, WatchValue};
use crate::ticking::ticking;

/// Bytes that are compressed at once.
const BLOCK: usize = 256 << 10;
/// The nice value of the thread that compresses (setpriority(2)).
const LOWEST_PRIORITY: i32 = 19;

/// Rotates logs.
#[derive(Debug, Clone)]
pub struct Rotator {
    cri: Cri,
    observer: Observer,
    files: Files,
    limits: Option<Limits>,
    workers: usize,
    interval: Duration,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    untidy: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Whether there has been a look since the start.
    looked: bool,
    /// Containers whose last rotation failed.
    failing: HashSet<String>,
    /// Logs whose rotated files have to be looked at.
    untidy: BTreeSet<PathBuf>,
}

/// A running container and its log.
#[derive(Debug, Clone)]
struct Target {
    id: String,
    path: PathBuf,
}

/// Why a log could not be rotated.
#[derive(Debug, thiserror::Error)]
enum RotateError {
    #[error("a file of the log cannot be moved or removed")]
    Files(#[source] io::Error),
    #[error("the runtime does not open a new log file: {}", .0.message())]
    Reopen(Status),
}

impl Rotator {
    /// A rotator with the limits of the configuration.
    pub fn new(cri: Cri, observer: Observer, files: Files, config: &ContainerLogs) -> Self {
        let mut own = Self {
            cri,
            observer,
            files,
            limits: None,
            workers: 1,
            interval: Duration::from_secs(10),
            shared: Arc::default(),
        };
        own.configure(config);
        own
    }

    fn configure(&mut self, config: &ContainerLogs) {
        let limits = |max_bytes| Limits { max_bytes, max_files: config.max_files.max(2) as usize };
        self.limits = config.max_size_bytes.map(limits);
        self.workers = config.max_workers.max(1) as usize;
        self.interval = Duration::from_millis(config.monitor_interval_ms.max(1));
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the logs until the shutdown, first as soon as it is known what runs, and with other limits as soon as the
    /// configuration has them.
    pub async fn run(mut self, context: Context) {
        let progress = context.progress.register("log-rotation");
        let mut live = context.live.subscribe();
        let work = async {
            let mut pods = self.observer.hub().subscribe();
            while !matches!(pods.next().await, WatchItem::Synced) {}
            drop(pods);
            loop {
                // Without limits there is nothing to look at.
                self.round().await;
                // Cancel-safe: what has changed is seen until it is taken.
                let changed = tokio::select! {
                    changed = live.changed() => changed.is_ok(),
                    () = tokio::time::sleep(self.interval) => false,
                };
                if changed {
                    let config = live.borrow_and_update().container_logs.clone();
                    self.configure(&config);
                }
            }
        };
        // Cancel-safe: a rotation that is cut off is finished after the next start.
        tokio::select! {
            () = context.shutdown.cancelled() => {}
            () = ticking(&progress, work) => {}
        }
    }

    /// Compresses what was rotated and cleans up, until the shutdown.
    pub async fn run_tidying(self, context: Context) {
        let progress = context.progress.register("log-compression");
        let work = async {
            loop {
                // All at once, so that a log that comes again and again waits for the others.
                let logs = std::mem::take(&mut self.state().untidy);
                if logs.is_empty() {
                    self.shared.untidy.notified().await;
                    continue;
                }
                let files = self.files.clone();
                if let Err(error) = at_lowest_priority(move || tidy_all(&files, &logs)).await {
                    tracing::warn!(%error, "cannot compress rotated logs; the next rotation tries again");
                }
            }
        };
        // Cancel-safe: half of a compression is removed after the next start.
        tokio::select! {
            () = context.shutdown.cancelled() => {}
            () = ticking(&progress, work) => {}
        }
    }

    /// One look at every log, and the rotations that it makes necessary.
    async fn round(&self) {
        let Some(limits) = self.limits else { return };
        let state = self.observer.hub().get(&WatchKey::State);
        if matches!(state, Some(WatchValue::State(state)) if state.unreachable) {
            // Nobody would open another file.
            return;
        }
        let targets = self.targets(|c| c.state() == pb::ContainerState::Running);
        let first = {
            let mut state = self.state();
            state.failing.retain(|id| targets.iter().any(|t| t.id == *id));
            !std::mem::replace(&mut state.looked, true)
        };
        if first {
            // An earlier life of this service may have left something half done.
            self.tidy_soon(self.targets(|_| true).into_iter().map(|target| target.path));
        }
        let due = move || {
            let is_due = |target: &Target| match std::fs::symlink_metadata(&target.path) {
                Ok(log) => log.len() >= limits.max_bytes.max(1),
                Err(error) => error.kind() == io::ErrorKind::NotFound,
            };
            targets.into_iter().filter(is_due).collect::<Vec<_>>()
        };
        let due = tokio::task::spawn_blocking(due).await.unwrap_or_default();
        stream::iter(due)
            .for_each_concurrent(self.workers, |target| self.rotate_and_tell(target, limits))
            .await;
    }

    fn targets(&self, wanted: impl Fn(&pb::Container) -> bool) -> Vec<Target> {
        let logs = |c: &&pb::Container| wanted(c) && !c.log_path.is_empty();
        let target = |c: &pb::Container| Target { id: c.id.clone(), path: PathBuf::from(&c.log_path) };
        let pods = self.observer.all();
        pods.iter().flat_map(|pod| pod.containers.iter().filter(logs).map(target)).collect()
    }

    fn tidy_soon(&self, logs: impl IntoIterator<Item = PathBuf>) {
        self.state().untidy.extend(logs);
        self.shared.untidy.notify_one();
    }

    async fn rotate_and_tell(&self, target: Target, limits: Limits) {
        let (log, container) = (target.path.display().to_string(), target.id.clone());
        match self.rotate(target, limits).await {
            Ok(()) => {
                self.state().failing.remove(&container);
            }
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                if self.state().failing.insert(container.clone()) {
                    tracing::warn!(container, log, %error, cause, "cannot rotate a log, will retry");
                } else {
                    tracing::debug!(container, log, %error, cause, "still cannot rotate a log");
                }
            }
        }
    }

    async fn rotate(&self, target: Target, limits: Limits) -> Result<(), RotateError> {
        let (files, path) = (self.files.clone(), target.path.clone());
        let moved = blocking(move || move_away(&files, &path, limits)).await.map_err(RotateError::Files)?;
        let Some(moved) = moved else { return Ok(()) };
        let request = cri::ReopenContainerLogRequest { container_id: target.id };
        let reopened = self.cri.runtime().reopen_container_log(self.cri.quick(request)).await;
        if let Err(status) = reopened {
            let (files, path) = (self.files.clone(), target.path);
            // If the runtime has opened another file all the same, that one stays where it is.
            let _ = blocking(move || take_back(&files, &path, moved.name.as_deref())).await;
            return Err(RotateError::Reopen(status));
        }
        self.tidy_soon([target.path]);
        Ok(())
    }
}

/// The runtime has to open another file.
struct Moved {
    /// The name that the one before has now; `None`: it was moved by an earlier rotation.
    name: Option<String>,
}

/// Carries a rotation out up to the call of the runtime.
fn move_away(files: &Files, path: &Path, limits: Limits) -> io::Result<Option<Moved>> {
    let folder = match LogDir::open(files, path) {
        // The pod goes.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut name = None;
    for step in plan_rotation(&folder.current, &folder.list()?, limits, now_unix_nanos() / 1_000_000_000) {
        match step {
            Step::Reopen => return Ok(Some(Moved { name })),
            Step::Rename { from, to } => {
                folder.rename(&from, &to)?;
                name = Some(to);
            }
            other => {
                carry_out(&folder, &other)?;
            }
        }
    }
    Ok(None)
}

/// Gives the log its name back, unless there is another file of that name.
fn take_back(files: &Files, path: &Path, moved: Option<&str>) -> io::Result<()> {
    let Some(moved) = moved else { return Ok(()) };
    let folder = LogDir::open(files, path)?;
    folder.rename(moved, &folder.current)
}

/// Brings the rotated files of logs into order, one log after the other.
fn tidy_all(files: &Files, logs: &BTreeSet<PathBuf>) {
    for log in logs {
        match tidy(files, log) {
            // The pod goes.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let log = log.display();
                tracing::warn!(%log, %error, "cannot compress a rotated log; the next rotation tries again");
            }
            Ok(()) => {}
        }
    }
}

/// Brings the rotated files of a log into order.
fn tidy(files: &Files, path: &Path) -> io::Result<()> {
    let folder = LogDir::open(files, path)?;
    let mut given_up = HashSet::new();
    for step in plan_tidying(&folder.current, &folder.list()?) {
        match &step {
            Step::Rename { from, .. } if given_up.contains(from) => continue,
            _ => {}
        }
        if !carry_out(&folder, &step)?
            && let Step::Compress { to, .. } = &step
        {
            folder.remove(to)?;
            given_up.insert(to.clone());
        }
    }
    Ok(())
}

/// Carries out a step that concerns files only. Whether what it works on is still there.
fn carry_out(folder: &LogDir, step: &Step) -> io::Result<bool> {
    match step {
        Step::Remove(name) => folder.remove(name)?,
        Step::Rename { from, to } => folder.rename(from, to)?,
        Step::Compress { from, to } => return compress(folder, from, to),
        Step::Reopen => {}
    }
    Ok(true)
}

/// Writes `from` compressed to `to`. False when `from` has been removed meanwhile: there was no room for it.
fn compress(folder: &LogDir, from: &str, to: &str) -> io::Result<bool> {
    let mut source = match folder.read(from) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        other => other?,
    };
    let target = folder.create(to, source.metadata()?.mode())?;
    let written = write_compressed(&mut source, target);
    if written.is_err() {
        // A full disk, for one: half a file would take room until the next rotation.
        let _ = folder.remove(to);
    }
    written
}

/// Whether the source was there until the end.
///
/// It rests three times as long as it works: a low priority counts among the processes of this service only, and what
/// it works for is a single container.
fn write_compressed(source: &mut File, target: File) -> io::Result<bool> {
    let mut encoder = flate2::write::GzEncoder::new(target, flate2::Compression::fast());
    let mut block = vec![0u8; BLOCK];
    loop {
        let began = Instant::now();
        let n = source.read(&mut block)?;
        if n == 0 {
            break;
        }
        encoder.write_all(&block[..n])?;
        if source.metadata()?.nlink() == 0 {
            return Ok(false);
        }
        std::thread::sleep(began.elapsed() * 3);
    }
    // Before the lines that it holds are removed elsewhere: a machine that loses power keeps one of the two.
    encoder.finish()?.sync_data()?;
    Ok(source.metadata()?.nlink() > 0)
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

/// Runs `work` in a thread of its own that gives way to the others of this service.
async fn at_lowest_priority(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let (tell, told) = oneshot::channel();
    std::thread::Builder::new().name("log-compression".into()).spawn(move || {
        let thread = rustix::thread::gettid();
        // Anybody may lower a priority; if not, the work is done all the same.
        let _ = rustix::process::setpriority_process(Some(thread), LOWEST_PRIORITY);
        work();
        let _ = tell.send(());
    })?;
    told.await.map_err(io::Error::other)
}

#[cfg(test)]
mod tests;
