//! The database of the checkpoint (redb): its tables and rows. All functions here block.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, OpenOptions};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use redb::{Database, ReadableDatabase as _, ReadableTable as _, TableDefinition};

type Table = TableDefinition<'static, &'static str, &'static [u8]>;
const MANIFESTS: Table = TableDefinition::new("manifests");
const PODS: Table = TableDefinition::new("pods");
const NAME_OWNERS: Table = TableDefinition::new("holders");
const LAST_CONTACT: Table = TableDefinition::new("heard");
/// Which claim each PersistentVolume had, of earlier releases.
const BINDINGS: Table = TableDefinition::new("bindings");
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const SCHEMA: u64 = 1;
/// A row of [`META`]: the bindings are in a file of their own, which was there when the row was written.
const BINDINGS_MOVED: &str = "bindings_moved";
const FILE_NAME: &str = "checkpoint.redb";
/// The file of the bindings, next to the database.
pub const BINDINGS_FILE: &str = "bindings.json";
/// The cache of the database.
const CACHE_BYTES: usize = 1024 * 1024;

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
pub enum Row {
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
pub type Pending = BTreeMap<Row, Option<Vec<u8>>>;

fn store_error<E: Into<redb::Error>>(path: &Path) -> impl Fn(E) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::Store { path: path.clone(), source: Box::new(source.into()) }
}

/// Opens or creates the database in `folder`. A broken one is renamed and replaced by an empty one.
pub fn open(folder: &Path) -> Result<Database, CheckpointError> {
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

/// Reads all rows.
pub fn load(folder: &Path, store: &Database) -> Result<BTreeMap<Row, Vec<u8>>, CheckpointError> {
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

/// What the database says of bindings, which a file of their own has now.
#[derive(Debug)]
pub enum EarlierBindings {
    /// There is no database.
    NoDatabase,
    /// The bindings of an earlier release, by PersistentVolume, encoded.
    Rows(Vec<(String, Vec<u8>)>),
    /// They were in the file of their own when the database was written.
    Moved,
    /// The database is broken.
    Broken,
}

/// Reads what the database in `folder` says of bindings, and changes nothing.
pub fn earlier_bindings(folder: &Path) -> Result<EarlierBindings, CheckpointError> {
    let path = folder.join(FILE_NAME);
    if !path.try_exists().map_err(|source| CheckpointError::Folder { folder: folder.to_owned(), source })? {
        return Ok(EarlierBindings::NoDatabase);
    }
    let store = match redb::Builder::new().set_cache_size(CACHE_BYTES).open(&path) {
        Ok(store) => store,
        Err(error) if is_broken(&error) => return Ok(EarlierBindings::Broken),
        Err(error) => return Err(store_error(&path)(error)),
    };
    let read = || -> Result<EarlierBindings, redb::Error> {
        let transaction = store.begin_read()?;
        match transaction.open_table(META) {
            Ok(meta) if meta.get(BINDINGS_MOVED)?.is_some() => return Ok(EarlierBindings::Moved),
            Ok(_) | Err(redb::TableError::TableDoesNotExist(_)) => {}
            Err(error) => return Err(error.into()),
        }
        let rows = match transaction.open_table(BINDINGS) {
            Ok(rows) => rows,
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(EarlierBindings::Rows(Vec::new())),
            Err(error) => return Err(error.into()),
        };
        let mut found = Vec::new();
        for row in rows.iter()? {
            let (volume, bytes) = row?;
            found.push((volume.value().to_owned(), bytes.value().to_vec()));
        }
        Ok(EarlierBindings::Rows(found))
    };
    read().map_err(store_error(&path))
}

/// Writes rows in one transaction; opens the database if `store` is `None`. Returns it for the next write.
pub fn write(
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
        if folder.join(BINDINGS_FILE).exists() {
            transaction.open_table(META)?.insert(BINDINGS_MOVED, 1)?;
        }
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
