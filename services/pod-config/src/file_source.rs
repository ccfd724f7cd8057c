//! The source `file`: a folder of manifests, or one manifest (pod-lifecycle.md §2.2).
//!
//! inotify reports which file has changed, and only that file is read. A rescan every `fileCheckFrequency` finds changes without
//! an event.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_etcd::keys::NODES;
use keelson_pod_config_core::files::{NameOwners, SourceFiles};
use keelson_pod_config_core::scan::{FolderView, Listing, Plan, is_ignored};
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_config_core::{ManifestError, ManifestErrorKind, parse_file};

use keelson_service_kit::{Context, LoopHandle, now_unix_nanos};
use tokio::time::Instant;

use crate::blocking::run_blocking;
use crate::checkpoint::Checkpoint;
use crate::control_plane::static_rules;
use crate::desired_state::{DesiredState, FILE};
use crate::disk::{self, Reading};
use crate::watcher::{self, Batch, Watcher};

/// Delay after a failed scan or watch.
const RETRY_DELAY: Duration = Duration::from_secs(1);
const PATH_CONDITION: &str = "static-pod-path";
const INOTIFY_CONDITION: &str = "inotify";
const WRITERS_CONDITION: &str = "writers-of-manifests";
/// How many files that others may write are named in the condition.
const MAX_NAMED: usize = 3;

/// The loop of the source `file` and its state.
#[derive(Debug)]
pub struct FileSource {
    ctx: Context,
    loop_handle: LoopHandle,
    path: PathBuf,
    rescan_interval: Duration,
    rules: StaticRules,
    desired: DesiredState,
    checkpoint: Checkpoint,
    /// Restored content of files, until the path has been read completely.
    restored: BTreeMap<String, Vec<u8>>,
    files: SourceFiles,
    view: FolderView,
    watcher: Option<Watcher>,
    only_name: Option<String>,
    folder: PathBuf,
    settled: bool,
}

impl FileSource {
    /// A source at `path`; `restored` and `name_owners` are from the checkpoint.
    pub fn new(
        ctx: &Context,
        path: &Path,
        desired: DesiredState,
        checkpoint: Checkpoint,
        restored: BTreeMap<String, Vec<u8>>,
        name_owners: NameOwners,
    ) -> Self {
        let is_own = |known: &String| Path::new(known) == path || Path::new(known).parent() == Some(path);
        Self {
            ctx: ctx.clone(),
            loop_handle: ctx.progress.register("file-source"),
            path: path.to_owned(),
            rescan_interval: Duration::from_millis(ctx.config.sources.file_check_ms.max(100)),
            rules: static_rules(&ctx.config),
            desired,
            checkpoint,
            restored: restored.into_iter().filter(|(known, _)| is_own(known)).collect(),
            files: SourceFiles::restore(name_owners),
            view: FolderView::default(),
            watcher: None,
            only_name: None,
            folder: path.to_owned(),
            settled: false,
        }
    }

    /// Reads and follows the path until the service shuts down.
    pub async fn run(mut self) {
        let shutdown = self.ctx.shutdown.clone();
        let mut rescan_at = Instant::now();
        loop {
            self.loop_handle.tick();
            let now = Instant::now();
            if now >= rescan_at {
                rescan_at = now + self.rescan().await;
            }
            let heartbeat = now + LoopHandle::HEARTBEAT;
            let wake = rescan_at.min(heartbeat);
            // Cancel-safe: events that are not returned stay in the kernel's queue.
            tokio::select! {
                () = shutdown.cancelled() => return,
                batch = next_batch(&mut self.watcher) => match batch {
                    Ok(batch) => {
                        let rescan = batch.rescan;
                        let soonest = self.apply_batch(batch).await;
                        let retry_in = if rescan { Some(Duration::ZERO) } else { soonest };
                        rescan_at = retry_in.map_or(rescan_at, |retry_in| rescan_at.min(Instant::now() + retry_in));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "inotify failed; opening a new instance");
                        self.watcher = None;
                        rescan_at = Instant::now() + RETRY_DELAY;
                    }
                },
                () = tokio::time::sleep_until(wake) => {}
            }
        }
    }

    /// Runs `work` on a blocking thread. `None` if the service shuts down meanwhile.
    async fn blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        run_blocking(&self.ctx, &self.loop_handle, PATH_CONDITION, &self.path, work).await
    }

    /// Scans the path. Returns the delay before the next scan.
    async fn rescan(&mut self) -> Duration {
        let Some(listing) = self.watch_and_list().await else { return RETRY_DELAY };
        let mut known: Vec<String> = self.files.paths().map(ToOwned::to_owned).collect();
        known.extend(self.restored.keys().filter(|path| self.files.content(path).is_none()).cloned());
        let unreadable = matches!(listing, Listing::Unreadable(_));
        let plan = self.view.decide(&self.path.to_string_lossy(), listing, &known, now_unix_nanos());
        let Plan { read, remove, still_changing, settled, rescan_after, path_error } = plan;
        let mut dirty = !read.is_empty();
        for path in still_changing {
            dirty |= self.restore(&path);
        }
        for path in remove {
            dirty |= self.forget(&path);
        }
        for path in self.read(read).await {
            dirty |= self.forget(&path);
        }
        if unreadable && !self.settled {
            // After a restart: restored pods keep running, although the source is not ready.
            dirty |= self.restore_all();
        }
        self.ctx.progress.condition(PATH_CONDITION, path_error.map_or(Ok(()), Err));
        let first = settled && !self.settled;
        self.settled |= settled;
        if first {
            self.restored.clear();
            self.prune_checkpoint();
            self.files.forget_unread_owners();
        }
        if dirty || first {
            self.publish();
        }
        rescan_after
            .map_or(self.rescan_interval, |retry_in| at_least_one_milli(retry_in).min(self.rescan_interval))
    }

    /// Sets the watch before listing, so that no change is missed in between.
    async fn watch_and_list(&mut self) -> Option<Listing> {
        if self.watcher.is_none() {
            match Watcher::new() {
                Ok(watcher) => self.watcher = Some(watcher),
                Err(error) => self.report_inotify_error(&error),
            }
        }
        let watches = self.watcher.as_ref().map(Watcher::watches);
        let path = self.path.clone();
        let (folder, only_name, watched, listing, writable) = self
            .blocking(move || {
                let (folder, only_name) = watcher::folder_of(&path);
                let watched = watches.map(|mut watches| watcher::watch(&mut watches, &folder));
                let listing = disk::list(&path);
                let writable = disk::paths_writable_by_others(&path, &listing);
                (folder, only_name, watched, listing, writable)
            })
            .await?;
        self.ctx.progress.condition(WRITERS_CONDITION, writers_condition(&writable));
        match watched {
            Some(Ok(watched)) => {
                (self.folder, self.only_name) = (folder, only_name);
                if let Some(watcher) = &mut self.watcher {
                    watcher.use_watch(watched);
                }
                self.ctx.progress.condition(INOTIFY_CONDITION, Ok(()));
            }
            Some(Err(error)) if matches!(listing, Listing::Files(_)) => self.report_inotify_error(&error),
            // The listing reports what is wrong with the path.
            Some(Err(_)) | None => {}
        }
        Some(listing)
    }

    fn report_inotify_error(&self, error: &std::io::Error) {
        let text = format!(
            "cannot watch {} ({error}); manifests are read every {} s instead. Raise fs.inotify.max_user_instances or \
             fs.inotify.max_user_watches",
            self.path.display(),
            self.rescan_interval.as_secs_f32(),
        );
        self.ctx.progress.condition(INOTIFY_CONDITION, Err(text));
    }

    /// Applies a batch of inotify events. Returns the delay after which to rescan for files that may not be read yet.
    async fn apply_batch(&mut self, batch: Batch) -> Option<Duration> {
        let is_relevant = |name: &String| {
            !is_ignored(name) && self.only_name.as_ref().is_none_or(|only_name| only_name == name)
        };
        let full_path = |name: String| self.folder.join(name).to_str().map(ToOwned::to_owned);
        let paths = |names: std::collections::BTreeSet<String>| -> Vec<String> {
            names.into_iter().filter(is_relevant).filter_map(full_path).collect()
        };
        let (mut changed, created, removed) =
            (paths(batch.changed), paths(batch.created), paths(batch.removed));
        let mut attributes_changed = paths(batch.attributes_changed);
        attributes_changed.retain(|path| !changed.contains(path));
        // A file that is deleted and written again, however soon, is a removal and an addition (pod-lifecycle.md §2.2).
        let mut dirty = false;
        for path in removed {
            dirty |= self.forget(&path);
        }
        if dirty {
            self.publish();
        }
        if !created.is_empty() {
            // Most new files are still being written, and a close event follows.
            let links = self.blocking(|| {
                created.into_iter().filter(|path| disk::is_link(Path::new(path))).collect::<Vec<_>>()
            });
            changed.extend(links.await.unwrap_or_default());
        }
        let retry_in = self.select_readable(attributes_changed, &mut changed).await;
        if !changed.is_empty() {
            for path in self.read(changed).await {
                self.forget(&path);
            }
            self.publish();
        }
        retry_in
    }

    /// Adds the files that may be read to `changed`. Returns the delay before the others are scanned.
    async fn select_readable(
        &mut self,
        attributes_changed: Vec<String>,
        changed: &mut Vec<String>,
    ) -> Option<Duration> {
        if attributes_changed.is_empty() {
            return None;
        }
        let stamps = self.blocking(|| {
            let stamped = |path: String| disk::stamp_of(Path::new(&path)).map(|stamp| (path, stamp));
            attributes_changed.into_iter().filter_map(stamped).collect::<Vec<_>>()
        });
        let mut retry_in = None;
        for (path, stamp) in stamps.await.unwrap_or_default() {
            match self.view.readable_in(&path, &stamp, now_unix_nanos()) {
                0 => changed.push(path),
                wait => retry_in = Some(retry_in.map_or(wait, |soonest: i64| soonest.min(wait))),
            }
        }
        retry_in.map(at_least_one_milli)
    }

    /// Reads and parses files. Returns those that do not exist.
    async fn read(&mut self, mut paths: Vec<String>) -> Vec<String> {
        let mut missing = Vec::new();
        while !paths.is_empty() {
            let Some((done, rest)) = self.blocking(move || disk::read_batch(paths)).await else {
                return missing;
            };
            paths = rest;
            for (path, reading) in done {
                match reading {
                    Reading::Missing => missing.push(path),
                    Reading::Bytes(bytes, stamp) => {
                        self.view.record_read(&path, stamp);
                        self.apply_content(&path, &bytes);
                    }
                    Reading::Failed(error) => {
                        self.view.record_unreadable(&path);
                        let text = format!(
                            "cannot be read: {error}; grant read access to the user of keelson-pod-config"
                        );
                        self.files.update(
                            &path,
                            Err(vec![ManifestError::file(ManifestErrorKind::Unreadable, text)]),
                        );
                        self.restore(&path);
                    }
                }
            }
        }
        missing
    }

    fn apply_content(&mut self, path: &str, bytes: &[u8]) {
        match parse_file(bytes, path, &self.rules) {
            Ok(mut content) => {
                match std::mem::take(&mut content.checkpoint) {
                    none if none.is_empty() => self.checkpoint.remove(path),
                    some => self.checkpoint.put(path, some),
                }
                self.files.update(path, Ok(content));
            }
            Err(errors) => {
                self.files.update(path, Err(errors));
                self.restore(path);
            }
        }
    }

    /// Restores the content of a file from the checkpoint. Returns whether there was any.
    fn restore(&mut self, path: &str) -> bool {
        let Some(bytes) = self.restored.remove(path) else { return false };
        match parse_file(&bytes, path, &self.rules) {
            Ok(content) => {
                tracing::info!(file = path, "the last good version from before the restart stays in effect");
                self.files.restore_content(path, content);
                true
            }
            Err(errors) => {
                tracing::warn!(event = "checkpoint_row_invalid", file = path, error = %errors[0], "the version in the checkpoint is no longer valid");
                false
            }
        }
    }

    fn restore_all(&mut self) -> bool {
        let paths: Vec<String> = self.restored.keys().cloned().collect();
        let mut any = false;
        for path in &paths {
            any |= self.restore(path);
        }
        any
    }

    fn forget(&mut self, path: &str) -> bool {
        self.view.forget(path);
        self.checkpoint.remove(path);
        self.restored.remove(path);
        self.files.remove(path)
    }

    fn prune_checkpoint(&self) {
        self.checkpoint.retain(|path| !is_file_key(path) || self.files.content(path).is_some());
    }

    fn publish(&mut self) {
        self.desired.publish(FILE, self.files.assemble(), self.settled);
        // Written after the pods were sent, like everything in the checkpoint.
        self.checkpoint.put_name_owners(self.files.name_owners());
    }
}

/// Whether a checkpoint key is a file; the keys of URLs and of control planes look different.
fn is_file_key(key: &str) -> bool {
    key.starts_with('/') && !key.starts_with(NODES)
}

/// At least a millisecond, so that the loop never spins when the clock is behind.
fn at_least_one_milli(nanos: i64) -> Duration {
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(0)).max(Duration::from_millis(1))
}

/// The condition that names manifests which others may write.
fn writers_condition(writable: &[String]) -> Result<(), String> {
    if writable.is_empty() {
        return Ok(());
    }
    let named = writable.iter().take(MAX_NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = writable.len().saturating_sub(MAX_NAMED);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    Err(format!(
        "others than root may write {named}{more}, and can thereby run any pod as root: make root the owner and remove the write \
         permission of group and others, or restrict such pods with sourceLimits.file"
    ))
}

async fn next_batch(watcher: &mut Option<Watcher>) -> std::io::Result<Batch> {
    match watcher {
        Some(watcher) => watcher.next().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
