//! When pods were last ended before a shutdown: the kubelet's state file, and its metrics.

use std::io;
use std::path::{Path, PathBuf};

use keelson_files::Replacement;
use keelson_resource_manager_core::node_shutdown::times::{FILE_MODE, FILE_NAME, ShutdownTimes, TimesError};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, Progress, now_unix_nanos};

use crate::metrics::ShutdownMetrics;
use crate::procfs;

/// The condition for an unwritable state file.
const CONDITION: &str = "node-shutdown-state";

/// Why the state file cannot be used.
#[derive(Debug, thiserror::Error)]
enum FileError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot use {}: the next shutdown replaces it", path.display())]
    Content { path: PathBuf, source: TimesError },
    #[error(
        "cannot write {}: a restart of resource-manager would forget that a shutdown is under way; free disk space and \
         make the directory writable",
        path.display()
    )]
    Write { path: PathBuf, source: io::Error },
}

/// The times of the last shutdown, as in the state file.
pub(crate) struct Record {
    path: PathBuf,
    times: ShutdownTimes,
    metrics: ShutdownMetrics,
    progress: Progress,
}

impl Record {
    /// Reads the state file of the root directory. A file that cannot be used counts as missing.
    pub(crate) async fn load(ctx: &Context, metrics: ShutdownMetrics) -> Self {
        let path = ctx.config.paths.root_dir.join(FILE_NAME);
        let file = path.clone();
        let read = tokio::task::spawn_blocking(move || read(&file)).await;
        let times = match read {
            Ok(Ok(times)) => times,
            Ok(Err(error)) => {
                tracing::warn!("{}", chain(&error));
                ShutdownTimes::default()
            }
            Err(_) => ShutdownTimes::default(),
        };
        metrics.show(times);
        Self { path, times, metrics, progress: ctx.progress.clone() }
    }

    /// Whether this agent began to end pods since the machine was booted, and did not complete it.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.times.is_unfinished(procfs::boot_unix_nanos().into())
    }

    /// Stores that pods are being ended since now.
    pub(crate) async fn start(&mut self) {
        self.store(ShutdownTimes { start: Some(now_unix_nanos().into()), end: None }).await;
    }

    /// Stores that their end was completed, or stopped, now.
    pub(crate) async fn end(&mut self) {
        self.store(ShutdownTimes { end: Some(now_unix_nanos().into()), ..self.times }).await;
    }

    async fn store(&mut self, times: ShutdownTimes) {
        self.times = times;
        self.metrics.show(times);
        let path = self.path.clone();
        let written = tokio::task::spawn_blocking(move || write(&path, times)).await;
        let result = written.unwrap_or_else(|panic| Err(io::Error::other(panic)));
        let result = result.map_err(|source| FileError::Write { path: self.path.clone(), source });
        self.progress.condition(CONDITION, result.map_err(|error| chain(&error)));
    }
}

fn read(path: &Path) -> Result<ShutdownTimes, FileError> {
    match std::fs::read(path) {
        Ok(content) => ShutdownTimes::parse(&content)
            .map_err(|source| FileError::Content { path: path.to_owned(), source }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(ShutdownTimes::default()),
        Err(source) => Err(FileError::Read { path: path.to_owned(), source }),
    }
}

fn write(path: &Path, times: ShutdownTimes) -> io::Result<()> {
    let content = times.to_json().map_err(io::Error::other)?;
    Replacement::new().mode(FILE_MODE).write(path, content.as_bytes())
}
