//! What the service restores after a restart (redb): the last good content of each manifest file, which file owns each name, when
//! each pod was first seen, and the last contact with the control plane.
//!
//! Nothing waits for it: rows are passed in memory and written by a loop of its own. If the disk is full or the folder cannot be
//! written, a condition says so and the service continues. Secrets are never stored.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, OpenOptions};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use keelson_pod_config_core::files::NameOwners;
use keelson_pod_config_core::sent_record::SentRecord;
use keelson_service_kit::{Context, LoopHandle};
use redb::{Database, ReadableDatabase as _, ReadableTable as _, TableDefinition};
use tokio::sync::Notify;

/// Prefix of the keys of everything that was read from an API server.
pub const API_KEY_PREFIX: &str = "api:";

type Table = TableDefinition<'static, &'static str, &'static [u8]>;
const MANIFESTS: Table = TableDefinition::new("manifests");
const PODS: Table = TableDefinition::new("pods");
const NAME_OWNERS: Table = TableDefinition::new("holders");
const LAST_CONTACT: Table = TableDefinition::new("heard");
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const SCHEMA: u64 = 1;
const FILE_NAME: &str = "checkpoint.redb";
/// The cache of the database.
const CACHE_BYTES: usize = 1024 * 1024;
/// Delay after the first change, so that a file and its pods are one write.
const BATCH_DELAY: Duration = Duration::from_millis(20);
/// Delay before a failed write is retried.
const RETRY: Duration = Duration::from_secs(30);
const CONDITION: &str = "checkpoint";

/// Why the checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The folder cannot be created.
    #[error("cannot create the folder {}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The database cannot be opened, read or written.
    #[error("cannot use {}", path.display())]
    Store {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: Box<redb::Error>,
    },
    /// It was written by a newer release.
    #[error("{} has schema version {found}, this binary knows {SCHEMA}; use the newer binaries or remove the file", path.display())]
    TooNew {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u64,
    },
}

/// The key of a row.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Row {
    /// A manifest, by its path.
    Manifest(String),
    /// A pod, by its UID.
    Pod(String),
    /// The file that owns a name, by the name.
    NameOwner(String),
    /// The last contact with a control plane, by source.
    LastContact(String),
}

type RowConstructor = fn(String) -> Row;

/// New contents of rows; `None` deletes a row.
type Pending = BTreeMap<Row, Option<Vec<u8>>>;

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

fn store_error<E: Into<redb::Error>>(path: &Path) -> impl Fn(E) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::Store { path: path.clone(), source: Box::new(source.into()) }
}

fn open(folder: &Path) -> Result<Database, CheckpointError> {
    let no_folder = |source| CheckpointError::Folder { folder: folder.to_owned(), source };
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(no_folder)?;
    let path = folder.join(FILE_NAME);
    let create = || {
        let options =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = options.map_err(|error| redb::DatabaseError::Storage(error.into()))?;
        redb::Builder::new().set_cache_size(CACHE_BYTES).create_file(file)
    };
    create().or_else(|error| {
        if !is_broken(&error) {
            return Err(store_error(&path)(error));
        }
        // The manifests have everything that matters; a broken file is kept for inspection.
        tracing::warn!(file = %path.display(), %error, "the checkpoint is broken; starting with an empty one");
        let _ = std::fs::rename(&path, path.with_extension("broken"));
        create().map_err(store_error(&path))
    })
}

/// Schema version and rows.
type Contents = (Option<u64>, BTreeMap<Row, Vec<u8>>);

/// Whether the file itself is broken, rather than the disk or its permissions.
fn is_broken(error: &redb::DatabaseError) -> bool {
    match error {
        redb::DatabaseError::Storage(redb::StorageError::Corrupted(_)) => true,
        redb::DatabaseError::Storage(redb::StorageError::Io(io)) => {
            io.kind() == std::io::ErrorKind::InvalidData
        }
        redb::DatabaseError::RepairAborted | redb::DatabaseError::UpgradeRequired(_) => true,
        _ => false,
    }
}

fn load(folder: &Path, store: &Database) -> Result<BTreeMap<Row, Vec<u8>>, CheckpointError> {
    let path = folder.join(FILE_NAME);
    let read = || -> Result<Contents, redb::Error> {
        let transaction = store.begin_read()?;
        let version = match transaction.open_table(META) {
            Ok(meta) => meta.get("schema")?.map(|v| v.value()),
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok((None, BTreeMap::new())),
            Err(error) => return Err(error.into()),
        };
        if version.is_some_and(|found| found > SCHEMA) {
            return Ok((version, BTreeMap::new()));
        }
        let mut content = BTreeMap::new();
        let tables: [(Table, RowConstructor); 4] = [
            (MANIFESTS, Row::Manifest),
            (PODS, Row::Pod),
            (NAME_OWNERS, Row::NameOwner),
            (LAST_CONTACT, Row::LastContact),
        ];
        for (table, constructor) in tables {
            let table = match transaction.open_table(table) {
                Ok(table) => table,
                Err(redb::TableError::TableDoesNotExist(_)) => continue,
                Err(error) => return Err(error.into()),
            };
            for row in table.iter()? {
                let (key, bytes) = row?;
                content.insert(constructor(key.value().to_owned()), bytes.value().to_vec());
            }
        }
        Ok((version, content))
    };
    let (version, content) = read().map_err(store_error(&path))?;
    match version {
        Some(found) if found > SCHEMA => Err(CheckpointError::TooNew { path, found }),
        _ => Ok(content),
    }
}

fn write(
    folder: &Path,
    store: Option<Arc<Database>>,
    pending: &Pending,
) -> Result<Arc<Database>, CheckpointError> {
    let store = match store {
        Some(store) => store,
        None => {
            let store = open(folder)?;
            load(folder, &store)?;
            Arc::new(store)
        }
    };
    let path = folder.join(FILE_NAME);
    let commit = || -> Result<(), redb::Error> {
        let transaction = store.begin_write()?;
        transaction.open_table(META)?.insert("schema", SCHEMA)?;
        let mut manifests = transaction.open_table(MANIFESTS)?;
        let mut pods = transaction.open_table(PODS)?;
        let mut name_owners = transaction.open_table(NAME_OWNERS)?;
        let mut last_contact = transaction.open_table(LAST_CONTACT)?;
        for (row, content) in pending {
            let (table, key) = match row {
                Row::Manifest(path) => (&mut manifests, path),
                Row::Pod(uid) => (&mut pods, uid),
                Row::NameOwner(name) => (&mut name_owners, name),
                Row::LastContact(source) => (&mut last_contact, source),
            };
            match content {
                Some(bytes) => drop(table.insert(key.as_str(), bytes.as_slice())?),
                None => drop(table.remove(key.as_str())?),
            }
        }
        drop((manifests, pods, name_owners, last_contact));
        transaction.commit()?;
        Ok(())
    };
    commit().map_err(store_error(&path))?;
    Ok(store)
}
