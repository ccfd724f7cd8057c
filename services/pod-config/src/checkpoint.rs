//! What the service restores after a restart (redb): the last good content of each manifest file, which file owns each name, when
//! each pod was first seen, and the last contact with the control plane.
//!
//! Nothing waits for it: rows are passed in memory and written by a loop of its own. If the disk is full or the folder cannot be
//! written, a condition says so and the service continues. Secrets are never stored.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use keelson_pod_config_core::files::NameOwners;
use keelson_pod_config_core::sent_record::SentRecord;
use keelson_service_kit::{Context, LoopHandle};
use redb::Database;
use tokio::sync::Notify;

use crate::checkpoint_database::{CheckpointError, Pending, Row, load, open, write};

/// Prefix of the keys of everything that was read from an API server.
pub const API_KEY_PREFIX: &str = "api:";

/// Delay after the first change, so that a file and its pods are one write.
const BATCH_DELAY: Duration = Duration::from_millis(20);
/// Delay before a failed write is retried.
const RETRY: Duration = Duration::from_secs(30);
const CONDITION: &str = "checkpoint";

/// The state of the run before the restart.
#[derive(Debug, Default)]
pub struct Restored {
    /// The last good content of each manifest, by path.
    pub manifests: BTreeMap<String, Vec<u8>>,
    /// The records of sent pods, by UID; damaged ones are left out.
    pub pods: BTreeMap<String, SentRecord>,
    /// The file that owns each name.
    pub name_owners: NameOwners,
    /// The last contact with each control plane, in seconds since 1970, by source.
    pub last_contact: BTreeMap<String, i64>,
}

/// Passes rows to the writer. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Checkpoint(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct State {
    pending: Pending,
    /// Hashes of stored and pending rows, so that nothing is written twice.
    stored: BTreeMap<Row, u64>,
}

/// Writes rows to the database; [`Writer::run`] is its loop.
#[derive(Debug)]
pub struct Writer {
    shared: Checkpoint,
    folder: PathBuf,
    store: Option<Arc<Database>>,
}

impl Checkpoint {
    /// Opens the database in `folder` and reads it. Blocks. If it cannot be used, the restored state is empty and the error is
    /// returned.
    pub fn open(folder: &Path) -> (Self, Writer, Restored, Option<CheckpointError>) {
        let shared = Self::default();
        let (store, rows, error) = match open(folder).and_then(|store| Ok((load(folder, &store)?, store))) {
            Ok((rows, store)) => (Some(Arc::new(store)), rows, None),
            Err(error) => (None, BTreeMap::new(), Some(error)),
        };
        shared.state().stored = rows.iter().map(|(row, bytes)| (row.clone(), hash(bytes))).collect();
        let writer = Writer { shared: shared.clone(), folder: folder.to_owned(), store };
        (shared, writer, Restored::from_rows(rows), error)
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the last good content of a file. Returns at once.
    pub fn put(&self, path: &str, bytes: Vec<u8>) {
        self.put_row(Row::Manifest(path.to_owned()), bytes);
    }

    /// Stores the record of a sent pod. Returns at once.
    pub fn put_pod(&self, uid: &str, record: &SentRecord) {
        self.put_row(Row::Pod(uid.to_owned()), record.encode());
    }

    /// Stores which file owns each name. Returns at once.
    pub fn put_name_owners(&self, name_owners: &NameOwners) {
        let name = |row: &Row| if let Row::NameOwner(name) = row { Some(name.clone()) } else { None };
        let removed: Vec<String> = self
            .state()
            .stored
            .keys()
            .filter_map(name)
            .filter(|name| !name_owners.contains_key(name))
            .collect();
        removed.into_iter().for_each(|name| self.remove_row(Row::NameOwner(name)));
        for (name, origin) in name_owners {
            self.put_row(Row::NameOwner(name.clone()), origin.clone().into_bytes());
        }
    }

    /// Stores the last contact with a source, in seconds since 1970. Returns at once.
    pub fn put_last_contact(&self, source: &str, unix_seconds: i64) {
        self.put_row(Row::LastContact(source.to_owned()), unix_seconds.to_be_bytes().to_vec());
    }

    fn put_row(&self, row: Row, bytes: Vec<u8>) {
        let mut state = self.state();
        let hash = hash(&bytes);
        if state.stored.insert(row.clone(), hash) != Some(hash) {
            state.pending.insert(row, Some(bytes));
            self.0.wake.notify_one();
        }
    }

    /// Deletes the content of a file. Returns at once.
    pub fn remove(&self, path: &str) {
        self.remove_row(Row::Manifest(path.to_owned()));
    }

    /// Deletes the record of a pod. Returns at once.
    pub fn remove_pod(&self, uid: &str) {
        self.remove_row(Row::Pod(uid.to_owned()));
    }

    fn remove_row(&self, row: Row) {
        let mut state = self.state();
        if state.stored.remove(&row).is_some() {
            state.pending.insert(row, None);
            self.0.wake.notify_one();
        }
    }

    /// Deletes the contents of all files for which `keep` returns false. Returns at once.
    pub fn retain(&self, keep: impl Fn(&str) -> bool) {
        self.paths().iter().filter(|path| !keep(path)).for_each(|path| self.remove(path));
    }

    /// The paths of all stored contents.
    pub fn paths(&self) -> Vec<String> {
        let path = |row: &Row| if let Row::Manifest(path) = row { Some(path.clone()) } else { None };
        self.state().stored.keys().filter_map(path).collect()
    }

    /// The UIDs of all stored pods.
    pub fn pods(&self) -> Vec<String> {
        let uid = |row: &Row| if let Row::Pod(uid) = row { Some(uid.clone()) } else { None };
        self.state().stored.keys().filter_map(uid).collect()
    }
}

impl Restored {
    fn from_rows(rows: BTreeMap<Row, Vec<u8>>) -> Self {
        let mut restored = Self::default();
        for (row, bytes) in rows {
            match row {
                Row::Manifest(path) => drop(restored.manifests.insert(path, bytes)),
                Row::NameOwner(name) => {
                    drop(restored.name_owners.insert(name, String::from_utf8_lossy(&bytes).into_owned()));
                }
                Row::LastContact(source) => match bytes.try_into() {
                    Ok(bytes) => drop(restored.last_contact.insert(source, i64::from_be_bytes(bytes))),
                    Err(_) => {
                        tracing::warn!(
                            source,
                            "the checkpoint's last contact with this source is damaged and is ignored"
                        )
                    }
                },
                Row::Pod(uid) => match SentRecord::decode(&bytes) {
                    Some(record) => drop(restored.pods.insert(uid, record)),
                    None => tracing::warn!(
                        uid,
                        "the checkpoint's record of this pod is damaged; the pod counts as new"
                    ),
                },
            }
        }
        restored
    }
}

impl Writer {
    /// Writes pending rows until the service shuts down. Retries after errors.
    pub async fn run(mut self, ctx: Context) {
        let loop_handle = ctx.progress.register("checkpoint");
        let mut retry_at: Option<tokio::time::Instant> = None;
        loop {
            loop_handle.tick();
            let waiting = retry_at.is_some_and(|at| tokio::time::Instant::now() < at);
            // Cancel-safe: neither arm holds state.
            tokio::select! {
                () = ctx.shutdown.cancelled() => break,
                () = self.shared.0.wake.notified(), if !waiting => {}
                () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
            }
            if retry_at.is_some_and(|at| tokio::time::Instant::now() < at) {
                continue;
            }
            if !self.shared.state().pending.is_empty() {
                tokio::time::sleep(BATCH_DELAY).await;
            }
            retry_at =
                self.flush(&ctx, &loop_handle).await.err().map(|()| tokio::time::Instant::now() + RETRY);
        }
        // Pending rows are lost only if this takes longer than the drain time of the service.
        let _ = self.flush(&ctx, &loop_handle).await;
    }

    async fn flush(&mut self, ctx: &Context, loop_handle: &LoopHandle) -> Result<(), ()> {
        let pending = std::mem::take(&mut self.shared.state().pending);
        if pending.is_empty() {
            return Ok(());
        }
        let (folder, store) = (self.folder.clone(), self.store.clone());
        let work = tokio::task::spawn_blocking(move || {
            let written = write(&folder, store, &pending);
            (pending, written)
        });
        let Ok((pending, written)) = loop_handle.while_at(work).await else { return Err(()) };
        match written {
            Ok(store) => {
                self.store = Some(store);
                tracing::debug!(event = "checkpoint_written", rows = pending.len(), "checkpoint written");
                ctx.progress.condition(CONDITION, Ok(()));
                Ok(())
            }
            Err(error) => {
                self.store = None;
                let mut state = self.shared.state();
                for (row, content) in pending {
                    state.pending.entry(row).or_insert(content);
                }
                drop(state);
                ctx.progress.condition(CONDITION, Err(condition_message(&error)));
                Err(())
            }
        }
    }
}

/// The condition's message for an unusable checkpoint.
pub fn condition_message(error: &CheckpointError) -> String {
    format!(
        "{}; the last good manifests and the ages of pods are lost in a restart until the folder can be written",
        keelson_service_kit::status::chain(error)
    )
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}
