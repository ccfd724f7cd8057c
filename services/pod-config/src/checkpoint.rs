//! The last good content of each manifest file, which file's definition of each name counts, when each pod was first
//! seen, and when the control plane was last heard, for the time after a restart (redb).
//!
//! Nothing waits for it: contents are handed over in memory and written by a loop of its own. When the disk is
//! full or the folder cannot be written, the service says so and goes on without. Secrets are never in it.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, OpenOptions};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use keelson_pod_config_core::files::Holders;
use keelson_pod_config_core::sight::Sight;
use keelson_service_kit::{Context, LoopHandle};
use redb::{Database, ReadableDatabase as _, ReadableTable as _, TableDefinition};
use tokio::sync::Notify;

type Table = TableDefinition<'static, &'static str, &'static [u8]>;
const MANIFESTS: Table = TableDefinition::new("manifests");
const PODS: Table = TableDefinition::new("pods");
const HOLDERS: Table = TableDefinition::new("holders");
const HEARD: Table = TableDefinition::new("heard");
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const SCHEMA: u64 = 1;
const FILE_NAME: &str = "checkpoint.redb";
/// The one cache of the store.
const CACHE_BYTES: usize = 1024 * 1024;
/// After the first news, so that a file and its pods are one write.
const GATHER: Duration = Duration::from_millis(20);
/// Between two tries to write after a failure.
const RETRY: Duration = Duration::from_secs(30);
const CONDITION: &str = "checkpoint";

/// Why the checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The folder cannot be made.
    #[error("cannot make the folder {}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The store cannot be opened, read or written.
    #[error("cannot use {}", path.display())]
    Store {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: Box<redb::Error>,
    },
    /// A newer release wrote it.
    #[error("{} has schema version {found}, this binary knows {SCHEMA}; use the newer binaries or remove the file", path.display())]
    TooNew {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u64,
    },
}

/// What a row is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Row {
    /// A manifest, by its path.
    Manifest(String),
    /// A pod, by its UID.
    Pod(String),
    /// The file whose definition counts, by the name that it defines.
    Holder(String),
    /// When a source that may be away was last heard, by its name.
    Heard(String),
}

type RowOf = fn(String) -> Row;

/// The new content of rows, or `None` to forget one.
type Pending = BTreeMap<Row, Option<Vec<u8>>>;

/// What an earlier run of the service has left.
#[derive(Debug, Default)]
pub struct Remembered {
    /// The last good content of each manifest, by path.
    pub manifests: BTreeMap<String, Vec<u8>>,
    /// When each pod was first seen, by UID; what cannot be read is left out.
    pub pods: BTreeMap<String, Sight>,
    /// The file whose definition of a name counts.
    pub holders: Holders,
    /// When a source that may be away was last heard, seconds since 1970, by its name.
    pub heard: BTreeMap<String, i64>,
}

/// The handing-over side.
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
    /// Hash of what is stored or about to be, so that nothing is written twice.
    stored: BTreeMap<Row, u64>,
}

/// The writing side; [`Writer::run`] is its loop.
#[derive(Debug)]
pub struct Writer {
    shared: Checkpoint,
    folder: PathBuf,
    store: Option<Arc<Database>>,
}

impl Checkpoint {
    /// Opens the store in `folder` and reads what an earlier run has left there. Blocks. A store that cannot be
    /// used gives an empty content and the reason.
    pub fn open(folder: &Path) -> (Self, Writer, Remembered, Option<CheckpointError>) {
        let shared = Self::default();
        let (store, rows, error) = match open(folder).and_then(|store| Ok((load(folder, &store)?, store))) {
            Ok((rows, store)) => (Some(Arc::new(store)), rows, None),
            Err(error) => (None, BTreeMap::new(), Some(error)),
        };
        shared.state().stored = rows.iter().map(|(row, bytes)| (row.clone(), hash(bytes))).collect();
        let writer = Writer { shared: shared.clone(), folder: folder.to_owned(), store };
        (shared, writer, Remembered::of(rows), error)
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers the good content of a file. Returns at once.
    pub fn put(&self, path: &str, bytes: Vec<u8>) {
        self.put_row(Row::Manifest(path.to_owned()), bytes);
    }

    /// Remembers as what a pod was sent. Returns at once.
    pub fn put_pod(&self, uid: &str, sight: &Sight) {
        self.put_row(Row::Pod(uid.to_owned()), sight.encode());
    }

    /// Remembers which file's definition of each name counts. Returns at once.
    pub fn keep_holders(&self, holders: &Holders) {
        let name = |row: &Row| if let Row::Holder(name) = row { Some(name.clone()) } else { None };
        let gone: Vec<String> =
            self.state().stored.keys().filter_map(name).filter(|name| !holders.contains_key(name)).collect();
        gone.into_iter().for_each(|name| self.remove_row(Row::Holder(name)));
        for (name, origin) in holders {
            self.put_row(Row::Holder(name.clone()), origin.clone().into_bytes());
        }
    }

    /// Remembers when a source was last heard, in seconds since 1970. Returns at once.
    pub fn put_heard(&self, source: &str, unix_seconds: i64) {
        self.put_row(Row::Heard(source.to_owned()), unix_seconds.to_be_bytes().to_vec());
    }

    fn put_row(&self, row: Row, bytes: Vec<u8>) {
        let mut state = self.state();
        let hash = hash(&bytes);
        if state.stored.insert(row.clone(), hash) != Some(hash) {
            state.pending.insert(row, Some(bytes));
            self.0.wake.notify_one();
        }
    }

    /// Forgets a file. Returns at once.
    pub fn remove(&self, path: &str) {
        self.remove_row(Row::Manifest(path.to_owned()));
    }

    /// Forgets a pod. Returns at once.
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

    /// The paths that are remembered.
    pub fn paths(&self) -> Vec<String> {
        let path = |row: &Row| if let Row::Manifest(path) = row { Some(path.clone()) } else { None };
        self.state().stored.keys().filter_map(path).collect()
    }

    /// The UIDs that are remembered.
    pub fn pods(&self) -> Vec<String> {
        let uid = |row: &Row| if let Row::Pod(uid) = row { Some(uid.clone()) } else { None };
        self.state().stored.keys().filter_map(uid).collect()
    }
}

impl Remembered {
    fn of(rows: BTreeMap<Row, Vec<u8>>) -> Self {
        let mut own = Self::default();
        for (row, bytes) in rows {
            match row {
                Row::Manifest(path) => drop(own.manifests.insert(path, bytes)),
                Row::Holder(name) => {
                    drop(own.holders.insert(name, String::from_utf8_lossy(&bytes).into_owned()));
                }
                Row::Heard(source) => match bytes.try_into() {
                    Ok(bytes) => drop(own.heard.insert(source, i64::from_be_bytes(bytes))),
                    Err(_) => {
                        tracing::warn!(source, "it is not known any more when this source was last heard")
                    }
                },
                Row::Pod(uid) => match Sight::decode(&bytes) {
                    Some(sight) => drop(own.pods.insert(uid, sight)),
                    None => tracing::warn!(
                        uid,
                        "the entry of this pod in the checkpoint is damaged; it counts as new"
                    ),
                },
            }
        }
        own
    }
}

impl Writer {
    /// Writes what is handed over until the service ends. What fails is tried again.
    pub async fn run(mut self, ctx: Context) {
        let turn = ctx.progress.register("checkpoint");
        let mut retry_at: Option<tokio::time::Instant> = None;
        loop {
            turn.tick();
            let waiting = retry_at.is_some_and(|at| tokio::time::Instant::now() < at);
            // Cancel-safe: nothing is taken while waiting.
            tokio::select! {
                () = ctx.shutdown.cancelled() => break,
                () = self.shared.0.wake.notified(), if !waiting => {}
                () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
            }
            if retry_at.is_some_and(|at| tokio::time::Instant::now() < at) {
                continue;
            }
            if !self.shared.state().pending.is_empty() {
                tokio::time::sleep(GATHER).await;
            }
            retry_at = self.flush(&ctx, &turn).await.err().map(|()| tokio::time::Instant::now() + RETRY);
        }
        // What is handed over but not written is lost only if this takes longer than the service has left.
        let _ = self.flush(&ctx, &turn).await;
    }

    async fn flush(&mut self, ctx: &Context, turn: &LoopHandle) -> Result<(), ()> {
        let pending = std::mem::take(&mut self.shared.state().pending);
        if pending.is_empty() {
            return Ok(());
        }
        let (folder, store) = (self.folder.clone(), self.store.clone());
        let work = tokio::task::spawn_blocking(move || {
            let written = write(&folder, store, &pending);
            (pending, written)
        });
        let Ok((pending, written)) = turn.while_at(work).await else { return Err(()) };
        match written {
            Ok(store) => {
                self.store = Some(store);
                tracing::debug!(rows = pending.len(), "checkpoint written");
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
                ctx.progress.condition(CONDITION, Err(complaint(&error)));
                Err(())
            }
        }
    }
}

/// What a person reads about an unusable checkpoint.
pub fn complaint(error: &CheckpointError) -> String {
    format!(
        "{}; the last good manifests and the ages of pods are not remembered over a restart until the folder can be written",
        keelson_service_kit::status::chain(error)
    )
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

fn failed<E: Into<redb::Error>>(path: &Path) -> impl Fn(E) -> CheckpointError {
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
            return Err(failed(&path)(error));
        }
        // It only repeats what the manifests say; a broken one is put aside for a person to look at.
        tracing::warn!(file = %path.display(), %error, "the checkpoint is broken, starting with an empty one");
        let _ = std::fs::rename(&path, path.with_extension("broken"));
        create().map_err(failed(&path))
    })
}

/// Schema version and contents.
type Stored = (Option<u64>, BTreeMap<Row, Vec<u8>>);

/// Whether the file itself is no good store, rather than the disk or its permissions.
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
    let read = || -> Result<Stored, redb::Error> {
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
        let tables: [(Table, RowOf); 4] =
            [(MANIFESTS, Row::Manifest), (PODS, Row::Pod), (HOLDERS, Row::Holder), (HEARD, Row::Heard)];
        for (table, row_of) in tables {
            let table = match transaction.open_table(table) {
                Ok(table) => table,
                Err(redb::TableError::TableDoesNotExist(_)) => continue,
                Err(error) => return Err(error.into()),
            };
            for row in table.iter()? {
                let (key, bytes) = row?;
                content.insert(row_of(key.value().to_owned()), bytes.value().to_vec());
            }
        }
        Ok((version, content))
    };
    let (version, content) = read().map_err(failed(&path))?;
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
        let mut holders = transaction.open_table(HOLDERS)?;
        let mut heard = transaction.open_table(HEARD)?;
        for (row, content) in pending {
            let (table, key) = match row {
                Row::Manifest(path) => (&mut manifests, path),
                Row::Pod(uid) => (&mut pods, uid),
                Row::Holder(name) => (&mut holders, name),
                Row::Heard(source) => (&mut heard, source),
            };
            match content {
                Some(bytes) => drop(table.insert(key.as_str(), bytes.as_slice())?),
                None => drop(table.remove(key.as_str())?),
            }
        }
        drop((manifests, pods, holders, heard));
        transaction.commit()?;
        Ok(())
    };
    commit().map_err(failed(&path))?;
    Ok(store)
}
