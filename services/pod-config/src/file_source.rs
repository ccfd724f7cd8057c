//! The source `file`: a folder of manifests, or one manifest (pod-lifecycle.md §2.2).
//!
//! inotify says at once which file has changed and only that file is read; a look at everything each
//! `fileCheckFrequency` finds what no event told.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_etcd::keys::NODES;
use keelson_pod_config_core::files::{Holders, SourceFiles};
use keelson_pod_config_core::scan::{FolderView, Listing, Plan, is_ignored};
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_config_core::{ManifestError, Why, parse_file};

use keelson_service_kit::{Context, LoopHandle, now_unix_nanos};
use tokio::time::Instant;

use crate::checkpoint::Checkpoint;
use crate::control_plane::static_rules;
use crate::desired::{Desired, FILE};
use crate::disk::{self, Reading};
use crate::waiting::off_thread;
use crate::watcher::{self, Batch, Watcher};

/// After a look or a watch that failed.
const AGAIN: Duration = Duration::from_secs(1);
const PATH_CONDITION: &str = "static-pod-path";
const INOTIFY_CONDITION: &str = "inotify";
const WRITERS_CONDITION: &str = "writers-of-manifests";
/// So many files that others may write are named.
const NAMED: usize = 3;

/// The source and all that it knows.
#[derive(Debug)]
pub struct FileSource {
    ctx: Context,
    turn: LoopHandle,
    path: PathBuf,
    check: Duration,
    rules: StaticRules,
    desired: Desired,
    checkpoint: Checkpoint,
    /// What an earlier run of the service left, until the path has been read once.
    remembered: BTreeMap<String, Vec<u8>>,
    files: SourceFiles,
    view: FolderView,
    watcher: Option<Watcher>,
    only: Option<String>,
    folder: PathBuf,
    settled: bool,
}

impl FileSource {
    /// A source at `path`; `remembered` and `holders` are of the checkpoint of an earlier run.
    pub fn new(
        ctx: &Context,
        path: &Path,
        desired: Desired,
        checkpoint: Checkpoint,
        remembered: BTreeMap<String, Vec<u8>>,
        holders: Holders,
    ) -> Self {
        let own = |known: &String| Path::new(known) == path || Path::new(known).parent() == Some(path);
        Self {
            ctx: ctx.clone(),
            turn: ctx.progress.register("file-source"),
            path: path.to_owned(),
            check: Duration::from_millis(ctx.config.sources.file_check_ms.max(100)),
            rules: static_rules(&ctx.config),
            desired,
            checkpoint,
            remembered: remembered.into_iter().filter(|(known, _)| own(known)).collect(),
            files: SourceFiles::resuming(holders),
            view: FolderView::default(),
            watcher: None,
            only: None,
            folder: path.to_owned(),
            settled: false,
        }
    }

    /// Reads and follows the path until the service ends.
    pub async fn run(mut self) {
        let shutdown = self.ctx.shutdown.clone();
        let mut rescan_at = Instant::now();
        loop {
            self.turn.tick();
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
                        let everything = batch.everything;
                        let soonest = self.take(batch).await;
                        let again = if everything { Some(Duration::ZERO) } else { soonest };
                        rescan_at = again.map_or(rescan_at, |again| rescan_at.min(Instant::now() + again));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "the inotify instance has failed; opening another one");
                        self.watcher = None;
                        rescan_at = Instant::now() + AGAIN;
                    }
                },
                () = tokio::time::sleep_until(wake) => {}
            }
        }
    }

    /// Runs `work` where it may block. `None` when the service ends meanwhile.
    async fn blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        off_thread(&self.ctx, &self.turn, PATH_CONDITION, &self.path, work).await
    }

    /// Looks at everything. The time to the next look.
    async fn rescan(&mut self) -> Duration {
        let Some(listing) = self.look().await else { return AGAIN };
        let mut known: Vec<String> = self.files.paths().map(ToOwned::to_owned).collect();
        known.extend(self.remembered.keys().filter(|path| self.files.content(path).is_none()).cloned());
        let unreadable = matches!(listing, Listing::Unreadable(_));
        let plan = self.view.decide(&self.path.to_string_lossy(), listing, &known, now_unix_nanos());
        let Plan { read, remove, unrested, settled, again, trouble } = plan;
        let mut dirty = !read.is_empty();
        for path in unrested {
            dirty |= self.recall(&path);
        }
        for path in remove {
            dirty |= self.forget(&path);
        }
        for path in self.read(read).await {
            dirty |= self.forget(&path);
        }
        if unreadable && !self.settled {
            // After a restart: what ran goes on, although the source cannot count as read.
            dirty |= self.recall_all();
        }
        self.ctx.progress.condition(PATH_CONDITION, trouble.map_or(Ok(()), Err));
        let first = settled && !self.settled;
        self.settled |= settled;
        if first {
            self.remembered.clear();
            self.prune_checkpoint();
            self.files.all_are_known();
        }
        if dirty || first {
            self.publish();
        }
        again.map_or(self.check, |again| soon(again).min(self.check))
    }

    /// Sets the watch and then lists, so that no change falls between the two.
    async fn look(&mut self) -> Option<Listing> {
        if self.watcher.is_none() {
            match Watcher::new() {
                Ok(watcher) => self.watcher = Some(watcher),
                Err(error) => self.no_inotify(&error),
            }
        }
        let watches = self.watcher.as_ref().map(Watcher::watches);
        let path = self.path.clone();
        let (folder, only, watched, listing, of_others) = self
            .blocking(move || {
                let (folder, only) = watcher::folder_of(&path);
                let watched = watches.map(|mut watches| watcher::watch(&mut watches, &folder));
                let listing = disk::list(&path);
                let of_others = disk::of_others(&path, &listing);
                (folder, only, watched, listing, of_others)
            })
            .await?;
        self.ctx.progress.condition(WRITERS_CONDITION, writers(&of_others));
        match watched {
            Some(Ok(watched)) => {
                (self.folder, self.only) = (folder, only);
                if let Some(watcher) = &mut self.watcher {
                    watcher.follow(watched);
                }
                self.ctx.progress.condition(INOTIFY_CONDITION, Ok(()));
            }
            Some(Err(error)) if matches!(listing, Listing::Files(_)) => self.no_inotify(&error),
            // The listing says what is wrong with the path.
            Some(Err(_)) | None => {}
        }
        Some(listing)
    }

    fn no_inotify(&self, error: &std::io::Error) {
        let text = format!(
            "cannot watch {} ({error}); manifests are read every {} s instead. Raise fs.inotify.max_user_instances or \
             fs.inotify.max_user_watches",
            self.path.display(),
            self.check.as_secs_f32(),
        );
        self.ctx.progress.condition(INOTIFY_CONDITION, Err(text));
    }

    /// Takes what inotify has told. In how long to look again for files that may not be read yet.
    async fn take(&mut self, batch: Batch) -> Option<Duration> {
        let counts = |name: &String| !is_ignored(name) && self.only.as_ref().is_none_or(|only| only == name);
        let full = |name: String| self.folder.join(name).to_str().map(ToOwned::to_owned);
        let paths = |names: std::collections::BTreeSet<String>| -> Vec<String> {
            names.into_iter().filter(counts).filter_map(full).collect()
        };
        let (mut changed, created, gone) = (paths(batch.changed), paths(batch.created), paths(batch.gone));
        let mut touched = paths(batch.touched);
        touched.retain(|path| !changed.contains(path));
        // A file that is removed and written again, however soon, is a removal and an addition (pod-lifecycle.md §2.2).
        let mut dirty = false;
        for path in gone {
            dirty |= self.forget(&path);
        }
        if dirty {
            self.publish();
        }
        if !created.is_empty() {
            // Most are still being written and tell when they are closed.
            let whole = self.blocking(|| {
                created.into_iter().filter(|path| disk::came_whole(Path::new(path))).collect::<Vec<_>>()
            });
            changed.extend(whole.await.unwrap_or_default());
        }
        let again = self.take_touched(touched, &mut changed).await;
        if !changed.is_empty() {
            for path in self.read(changed).await {
                self.forget(&path);
            }
            self.publish();
        }
        again
    }

    /// Adds to `changed` the files that may be read, and says when to look for the others.
    async fn take_touched(&mut self, touched: Vec<String>, changed: &mut Vec<String>) -> Option<Duration> {
        if touched.is_empty() {
            return None;
        }
        let stamps = self.blocking(|| {
            let stamped = |path: String| disk::stamp_of(Path::new(&path)).map(|stamp| (path, stamp));
            touched.into_iter().filter_map(stamped).collect::<Vec<_>>()
        });
        let mut again = None;
        for (path, stamp) in stamps.await.unwrap_or_default() {
            match self.view.readable_in(&path, &stamp, now_unix_nanos()) {
                0 => changed.push(path),
                wait => again = Some(again.map_or(wait, |soonest: i64| soonest.min(wait))),
            }
        }
        again.map(soon)
    }

    /// Reads files and takes what they say; those that are not there come back.
    async fn read(&mut self, mut paths: Vec<String>) -> Vec<String> {
        let mut missing = Vec::new();
        while !paths.is_empty() {
            let Some((done, rest)) = self.blocking(move || disk::read_all(paths)).await else {
                return missing;
            };
            paths = rest;
            for (path, reading) in done {
                match reading {
                    Reading::Gone => missing.push(path),
                    Reading::Bytes(bytes, stamp) => {
                        self.view.was_read(&path, stamp);
                        self.take_bytes(&path, &bytes);
                    }
                    Reading::Failed(error) => {
                        self.view.was_refused(&path);
                        let text =
                            format!("cannot be read: {error}; let the user of keelson-pod-config read it");
                        self.files.read(&path, Err(vec![ManifestError::file(Why::Unreadable, text)]));
                        self.recall(&path);
                    }
                }
            }
        }
        missing
    }

    fn take_bytes(&mut self, path: &str, bytes: &[u8]) {
        match parse_file(bytes, path, &self.rules) {
            Ok(mut content) => {
                match std::mem::take(&mut content.checkpoint) {
                    none if none.is_empty() => self.checkpoint.remove(path),
                    some => self.checkpoint.put(path, some),
                }
                self.files.read(path, Ok(content));
            }
            Err(errors) => {
                self.files.read(path, Err(errors));
                self.recall(path);
            }
        }
    }

    /// Brings back what an earlier run knew of a file.
    fn recall(&mut self, path: &str) -> bool {
        let Some(bytes) = self.remembered.remove(path) else { return false };
        match parse_file(&bytes, path, &self.rules) {
            Ok(content) => {
                tracing::info!(file = path, "the version that was good before the restart goes on");
                self.files.remember(path, content);
                true
            }
            Err(errors) => {
                tracing::warn!(file = path, error = %errors[0], "the remembered version is not valid any more");
                false
            }
        }
    }

    fn recall_all(&mut self) -> bool {
        let paths: Vec<String> = self.remembered.keys().cloned().collect();
        let mut any = false;
        for path in &paths {
            any |= self.recall(path);
        }
        any
    }

    fn forget(&mut self, path: &str) -> bool {
        self.view.forget(path);
        self.checkpoint.remove(path);
        self.remembered.remove(path);
        self.files.remove(path)
    }

    fn prune_checkpoint(&self) {
        for path in self.checkpoint.paths() {
            if is_of_files(&path) && self.files.content(&path).is_none() {
                self.checkpoint.remove(&path);
            }
        }
    }

    fn publish(&mut self) {
        self.desired.publish(FILE, self.files.assemble(), self.settled);
        // Behind the pods' way, as all of the checkpoint.
        self.checkpoint.keep_holders(self.files.holders());
    }
}

/// Whether a row of the checkpoint is of a file: rows of URLs and of an API server have other names.
fn is_of_files(key: &str) -> bool {
    key.starts_with('/') && !key.starts_with(NODES)
}

/// At least a millisecond, so that a clock that is behind never makes the loop spin.
fn soon(nanos: i64) -> Duration {
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(0)).max(Duration::from_millis(1))
}

/// Says which manifests others may write.
fn writers(of_others: &[String]) -> Result<(), String> {
    if of_others.is_empty() {
        return Ok(());
    }
    let named = of_others.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = of_others.len().saturating_sub(NAMED);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    Err(format!(
        "others than root may write {named}{more}, and with that run any pod as root: give them to root and take the write \
         permission from group and others, or limit what such pods may with sourceLimits.file"
    ))
}

async fn next_batch(watcher: &mut Option<Watcher>) -> std::io::Result<Batch> {
    match watcher {
        Some(watcher) => watcher.next().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rows_of_files_are_this_sources_to_forget() {
        assert!(is_of_files("/etc/kubernetes/manifests/web.yaml"));
        for other in ["https://h/pods", "api:pods/default/web", "api:node", &format!("{NODES}n/pods/a/b")] {
            assert!(!is_of_files(other), "{other}");
        }
    }
}
