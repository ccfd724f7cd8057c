//! Rotation of the logs of running containers (runtime-and-resources.md §7.5).
//!
//! The size of each log is checked once per `containerLogMonitorInterval`, with a single stat. A log that is too large
//! is renamed and the runtime is asked to open another file. That is quick, and is done for `containerLogMaxWorkers`
//! logs at a time. Compression is slow: one thread of low priority does it for all logs and uses at most a quarter of a
//! processor. If a container writes faster than that, its oldest files are removed, compressed or not, and the rotation
//! of other logs is not delayed.

use std::collections::{BTreeSet, HashSet};
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use keelson_config::ContainerLogs;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::rotation::{Limits, Step, plan_cleanup, plan_rotation};
use keelson_service_kit::{Context, WatchItem, now_unix_nanos};
use tokio::sync::{Notify, oneshot};
use tonic::Status;

use crate::cri::Cri;
use crate::files::Files;
use crate::heartbeat::with_heartbeat;
use crate::log_dir::LogDir;
use crate::observe::{Observer, WatchKey, WatchValue};

/// Bytes compressed at once.
const BLOCK: usize = 256 << 10;
/// Nice value of the compression thread (setpriority(2)).
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
    needs_cleanup: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Whether the logs have been checked since the start.
    checked_once: bool,
    /// Containers whose last rotation failed.
    failing_containers: HashSet<String>,
    /// Logs whose rotated files have to be cleaned up and compressed.
    needs_cleanup: BTreeSet<PathBuf>,
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
    /// Creates a rotator with the limits of the configuration.
    pub fn new(cri: Cri, observer: Observer, files: Files, config: &ContainerLogs) -> Self {
        let mut rotator = Self {
            cri,
            observer,
            files,
            limits: None,
            workers: 1,
            interval: Duration::from_secs(10),
            shared: Arc::default(),
        };
        rotator.configure(config);
        rotator
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

    /// Rotates logs until the shutdown. Begins as soon as the pods are known, and applies changed limits of the
    /// configuration at once.
    pub async fn run(mut self, context: Context) {
        let progress = context.progress.register("log-rotation");
        let mut live = context.live.subscribe();
        let work = async {
            let mut pods = self.observer.hub().subscribe();
            while !matches!(pods.next().await, WatchItem::Synced) {}
            drop(pods);
            loop {
                // Does nothing if rotation is off.
                self.rotate_due().await;
                // Cancel-safe: a change stays visible until it is taken.
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
        // Cancel-safe: the next start completes an interrupted rotation.
        tokio::select! {
            () = context.shutdown.cancelled() => {}
            () = with_heartbeat(&progress, work) => {}
        }
    }

    /// Compresses and cleans up rotated files until the shutdown.
    pub async fn run_cleanup(self, context: Context) {
        let progress = context.progress.register("log-compression");
        let work = async {
            loop {
                // All of them at once, so that a log that is queued again and again waits for the others.
                let logs = std::mem::take(&mut self.state().needs_cleanup);
                if logs.is_empty() {
                    self.shared.needs_cleanup.notified().await;
                    continue;
                }
                let files = self.files.clone();
                if let Err(error) = at_lowest_priority(move || clean_up_all(&files, &logs)).await {
                    tracing::warn!(%error, "cannot compress rotated logs; the next rotation retries");
                }
            }
        };
        // Cancel-safe: the next start removes an incomplete compression.
        tokio::select! {
            () = context.shutdown.cancelled() => {}
            () = with_heartbeat(&progress, work) => {}
        }
    }

    /// Checks every log once and rotates those that are due.
    async fn rotate_due(&self) {
        let Some(limits) = self.limits else { return };
        let state = self.observer.hub().get(&WatchKey::State);
        if matches!(state, Some(WatchValue::State(state)) if state.unreachable) {
            // The runtime could not open another file.
            return;
        }
        let targets = self.targets(|c| c.state() == pb::ContainerState::Running);
        let first = {
            let mut state = self.state();
            state.failing_containers.retain(|id| targets.iter().any(|t| t.id == *id));
            !std::mem::replace(&mut state.checked_once, true)
        };
        if first {
            // An earlier process may have left incomplete files.
            self.queue_cleanup(self.targets(|_| true).into_iter().map(|target| target.path));
        }
        let due = tokio::task::spawn_blocking(move || due_targets(targets, limits)).await.unwrap_or_default();
        stream::iter(due)
            .for_each_concurrent(self.workers, |target| self.rotate_and_log_error(target, limits))
            .await;
    }

    fn targets(&self, wanted: impl Fn(&pb::Container) -> bool) -> Vec<Target> {
        let logs = |c: &&pb::Container| wanted(c) && !c.log_path.is_empty();
        let target = |c: &pb::Container| Target { id: c.id.clone(), path: PathBuf::from(&c.log_path) };
        let pods = self.observer.all();
        pods.iter().flat_map(|pod| pod.containers.iter().filter(logs).map(target)).collect()
    }

    fn queue_cleanup(&self, logs: impl IntoIterator<Item = PathBuf>) {
        self.state().needs_cleanup.extend(logs);
        self.shared.needs_cleanup.notify_one();
    }

    async fn rotate_and_log_error(&self, target: Target, limits: Limits) {
        let (log, container) = (target.path.display().to_string(), target.id.clone());
        match self.rotate(target, limits).await {
            Ok(()) => {
                self.state().failing_containers.remove(&container);
            }
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                if self.state().failing_containers.insert(container.clone()) {
                    tracing::warn!(container, log, %error, cause, "cannot rotate a log, will retry");
                } else {
                    tracing::debug!(container, log, %error, cause, "still cannot rotate a log");
                }
            }
        }
    }

    async fn rotate(&self, target: Target, limits: Limits) -> Result<(), RotateError> {
        let (files, path) = (self.files.clone(), target.path.clone());
        let renamed =
            blocking(move || rename_for_rotation(&files, &path, limits)).await.map_err(RotateError::Files)?;
        let Some(renamed) = renamed else { return Ok(()) };
        if let Err(status) = self.cri.reopen_log(&target.id).await {
            let (files, path) = (self.files.clone(), target.path);
            // If the runtime has opened another file nevertheless, both files are kept.
            let _ = blocking(move || undo_rename(&files, &path, renamed.name.as_deref())).await;
            return Err(RotateError::Reopen(status));
        }
        self.queue_cleanup([target.path]);
        Ok(())
    }
}

/// The targets whose logs are too large, or whose current file is missing because a rotation was interrupted.
fn due_targets(targets: Vec<Target>, limits: Limits) -> Vec<Target> {
    let is_due = |target: &Target| match fs::symlink_metadata(&target.path) {
        Ok(log) => log.len() >= limits.max_bytes.max(1),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    targets.into_iter().filter(is_due).collect()
}

/// A rotation after which the runtime has to open another file.
struct RenamedLog {
    /// New name of the previous file; `None`: an earlier rotation renamed it.
    name: Option<String>,
}

/// Carries out the steps of a rotation before the call to the runtime.
fn rename_for_rotation(files: &Files, path: &Path, limits: Limits) -> io::Result<Option<RenamedLog>> {
    let folder = match LogDir::open(files, path) {
        // The pod is being removed.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut name = None;
    for step in plan_rotation(&folder.current, &folder.list()?, limits, now_unix_nanos() / 1_000_000_000) {
        match step {
            Step::Reopen => return Ok(Some(RenamedLog { name })),
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

/// Renames the log back, unless there is another file with its name.
fn undo_rename(files: &Files, path: &Path, renamed: Option<&str>) -> io::Result<()> {
    let Some(renamed) = renamed else { return Ok(()) };
    let folder = LogDir::open(files, path)?;
    folder.rename(renamed, &folder.current)
}

/// Cleans up and compresses the rotated files of logs, one log after the other.
fn clean_up_all(files: &Files, logs: &BTreeSet<PathBuf>) {
    for log in logs {
        match clean_up(files, log) {
            // The pod is being removed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let log = log.display();
                tracing::warn!(%log, %error, "cannot compress a rotated log; the next rotation retries");
            }
            Ok(()) => {}
        }
    }
}

/// Cleans up and compresses the rotated files of a log.
fn clean_up(files: &Files, path: &Path) -> io::Result<()> {
    let folder = LogDir::open(files, path)?;
    let mut skipped = HashSet::new();
    for step in plan_cleanup(&folder.current, &folder.list()?) {
        match &step {
            Step::Rename { from, .. } if skipped.contains(from) => continue,
            _ => {}
        }
        if !carry_out(&folder, &step)?
            && let Step::Compress { to, .. } = &step
        {
            folder.remove(to)?;
            skipped.insert(to.clone());
        }
    }
    Ok(())
}

/// Carries out a step that concerns only files. Returns whether its source still exists.
fn carry_out(folder: &LogDir, step: &Step) -> io::Result<bool> {
    match step {
        Step::Remove(name) => folder.remove(name)?,
        Step::Rename { from, to } => folder.rename(from, to)?,
        Step::Compress { from, to } => return compress(folder, from, to),
        Step::Reopen => {}
    }
    Ok(true)
}

/// Compresses `from` to `to`. Returns false if `from` was removed in the meantime because of the file limit.
fn compress(folder: &LogDir, from: &str, to: &str) -> io::Result<bool> {
    let mut source = match folder.read(from) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        other => other?,
    };
    let target = folder.create(to, source.metadata()?.mode())?;
    let written = write_compressed(&mut source, target);
    if written.is_err() {
        // For example on a full disk: an incomplete file would take space until the next rotation.
        let _ = folder.remove(to);
    }
    written
}

/// Compresses a file. Returns whether the source existed until the end.
///
/// It sleeps three times as long as it works: the low priority counts only within the cgroup of this service, and the
/// work is for a single container.
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
    // Synced before the source is removed: after a power loss at least one of the two files is complete.
    encoder.finish()?.sync_data()?;
    Ok(source.metadata()?.nlink() > 0)
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

/// Runs `work` in its own thread, with a lower priority than the other threads of this service.
async fn at_lowest_priority(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let (done_sender, done) = oneshot::channel();
    std::thread::Builder::new().name("log-compression".into()).spawn(move || {
        let thread = rustix::thread::gettid();
        // Lowering a priority needs no privilege; if it fails nevertheless, the work is still done.
        let _ = rustix::process::setpriority_process(Some(thread), LOWEST_PRIORITY);
        work();
        let _ = done_sender.send(());
    })?;
    done.await.map_err(io::Error::other)
}

#[cfg(test)]
mod tests;
