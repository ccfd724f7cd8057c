//! The file `bindings.json`: which claim each PersistentVolume has. Without an API server this is the only record of it, so that the
//! file is written before anybody sees a binding, and is no part of the checkpoint, which may be lost.
//!
//! [`open`] tells a first start from a loss. A node has lost its records if the file is damaged, or if it is missing although the
//! checkpoint says that it was there, or is broken itself. Then claims are bound by name only
//! ([`Records::lost`](keelson_pod_config_core::binder::Records)).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use keelson_files::{Replacement, create_private_folder};
use keelson_pod_config_core::binder::{Binding, Records, RecordsError};
use keelson_service_kit::status::chain;

use crate::checkpoint_database::{BINDINGS_FILE, CheckpointError, EarlierBindings, earlier_bindings};

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BindingStoreError {
    /// It cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A newer release wrote it.
    #[error("cannot use {}", path.display())]
    TooNew {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: RecordsError,
    },
    /// It does not exist, and the checkpoint, which may have the records of an earlier release, cannot be read.
    #[error("cannot look for the bindings of an earlier release")]
    Checkpoint(#[source] CheckpointError),
    /// It cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// The records at the start.
#[derive(Debug, Default)]
pub struct Opened {
    /// The records.
    pub records: Records,
    /// They are on the disk.
    pub is_stored: bool,
}

/// Reads the records in `folder`. Blocks. Has to be called before the checkpoint is opened, which replaces a broken database.
///
/// # Errors
/// It is not known what the records are. They must neither be used nor replaced.
pub fn open(folder: &Path) -> Result<Opened, BindingStoreError> {
    let path = folder.join(BINDINGS_FILE);
    match fs::read(&path) {
        Ok(bytes) => match Records::decode(&bytes) {
            Ok(records) => return Ok(Opened { records, is_stored: true }),
            Err(source @ RecordsError::TooNew { .. }) => {
                return Err(BindingStoreError::TooNew { path, source });
            }
            Err(error @ RecordsError::Damaged(_)) => {
                log_loss(&format!("{} is {error}", path.display()));
                // A copy for inspection; the file itself stays until it is replaced, so that a crash hides nothing.
                let _ = fs::copy(&path, path.with_extension("broken"));
                return Ok(stored(folder, Records::lost()));
            }
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(source) => return Err(BindingStoreError::Read { path, source }),
    }
    let records = match earlier_bindings(folder).map_err(BindingStoreError::Checkpoint)? {
        EarlierBindings::NoDatabase => Records::default(),
        EarlierBindings::Rows(rows) => from_rows(&rows),
        EarlierBindings::Moved => {
            log_loss(&format!("{} is missing", path.display()));
            Records::lost()
        }
        EarlierBindings::Broken => {
            log_loss(&format!("{} is missing, and the checkpoint is broken", path.display()));
            Records::lost()
        }
    };
    Ok(stored(folder, records))
}

fn log_loss(why: &str) {
    tracing::error!(
        event = "bindings_lost",
        "{why}; claims are bound only to PersistentVolumes that they name, or that name them, until a person has set `lost` to \
         false in {BINDINGS_FILE}"
    );
}

/// The records of an earlier release, which had them in the checkpoint.
fn from_rows(rows: &[(String, Vec<u8>)]) -> Records {
    let mut records = Records::default();
    for (volume, bytes) in rows {
        match Binding::decode(bytes) {
            Some(binding) => drop(records.bindings.insert(volume.clone(), binding)),
            None => {
                log_loss(&format!("the checkpoint's binding of the PersistentVolume {volume} is damaged"));
                records.lost = true;
            }
        }
    }
    records
}

/// Stores new records at once, so that a crash makes nobody take them for something else. An error has to wait: the loop retries.
fn stored(folder: &Path, records: Records) -> Opened {
    let is_stored = write(folder, &records).is_ok();
    Opened { records, is_stored }
}

/// Replaces the file. Blocks until it is on the disk.
///
/// # Errors
/// It cannot be written.
pub fn write(folder: &Path, records: &Records) -> Result<(), BindingStoreError> {
    let path = folder.join(BINDINGS_FILE);
    let written = create_private_folder(folder)
        .and_then(|()| Replacement::new().mode(0o600).durable().write(&path, &records.encode()));
    written.map_err(|source| BindingStoreError::Write { path, source })
}

/// The text of an error for people.
pub fn message(error: &BindingStoreError) -> String {
    chain(error)
}

#[cfg(test)]
mod tests {
    use redb::{Database, TableDefinition};
    use tempfile::TempDir;

    use super::*;
    use crate::checkpoint::Checkpoint;

    const OLD: &[u8] =
        br#"{"claim":{"namespace":"default","name":"c","uid":"u"},"released":false,"volume_uid":"v",
                           "volume_digest":"d","node_local":true}"#;

    fn folder() -> TempDir {
        tempfile::tempdir().unwrap()
    }

    /// The checkpoint of a release that had the bindings in it.
    fn old_checkpoint(folder: &TempDir, row: &[u8]) {
        let store = Database::create(folder.path().join("checkpoint.redb")).unwrap();
        let transaction = store.begin_write().unwrap();
        let meta: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
        transaction.open_table(meta).unwrap().insert("schema", 1).unwrap();
        let bindings: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("bindings");
        transaction.open_table(bindings).unwrap().insert("disk", row).unwrap();
        transaction.commit().unwrap();
    }

    /// A checkpoint that was written while the file of bindings was there.
    fn written_checkpoint(folder: &TempDir) {
        open(folder.path()).unwrap();
        let row = crate::checkpoint_database::Row::Manifest("/m".into());
        let pending = std::collections::BTreeMap::from([(row, Some(b"x".to_vec()))]);
        crate::checkpoint_database::write(folder.path(), None, &pending).unwrap();
    }

    #[test]
    fn a_first_start_has_lost_nothing_and_stores_that_at_once() {
        let folder = folder();
        for _ in 0..2 {
            let opened = open(folder.path()).unwrap();
            assert_eq!((opened.records, opened.is_stored), (Records::default(), true));
            Checkpoint::open(folder.path());
        }
    }

    #[test]
    fn the_bindings_of_an_earlier_release_are_taken_over_once() {
        let folder = folder();
        old_checkpoint(&folder, OLD);
        let first = open(folder.path()).unwrap();
        assert_eq!((first.records.bindings["disk"].claim.name.as_str(), first.records.lost), ("c", false));
        written_checkpoint(&folder);
        assert_eq!(open(folder.path()).unwrap().records, first.records);
        fs::remove_file(folder.path().join(BINDINGS_FILE)).unwrap();
        assert_eq!(open(folder.path()).unwrap().records, Records::lost(), "the rows are out of date");
    }

    #[test]
    fn missing_and_damaged_records_are_lost_and_stay_so() {
        for damage in ["missing", "empty", "half", "with a broken checkpoint", "of an earlier release"] {
            let folder = folder();
            let file = folder.path().join(BINDINGS_FILE);
            let checkpoint = folder.path().join("checkpoint.redb");
            if damage == "of an earlier release" {
                old_checkpoint(&folder, &OLD[1..]);
            } else {
                written_checkpoint(&folder);
            }
            match damage {
                "missing" => fs::remove_file(&file).unwrap(),
                "empty" => fs::write(&file, "").unwrap(),
                "half" => fs::write(&file, &fs::read(&file).unwrap()[..9]).unwrap(),
                "with a broken checkpoint" => {
                    fs::remove_file(&file).unwrap();
                    fs::write(&checkpoint, "garbage that is no database at all").unwrap();
                }
                _ => {}
            }
            for _ in 0..2 {
                let opened = open(folder.path()).unwrap();
                assert!(opened.records.lost && opened.is_stored, "{damage}");
                Checkpoint::open(folder.path());
            }
            let copy = folder.path().join("bindings.broken");
            assert_eq!(copy.exists(), ["empty", "half"].contains(&damage), "{damage}");
        }
    }

    #[test]
    fn a_lost_checkpoint_loses_no_bindings() {
        let folder = folder();
        written_checkpoint(&folder);
        let records = Records {
            bindings: [("disk".to_owned(), Binding::decode(OLD).unwrap())].into(),
            ..Records::default()
        };
        write(folder.path(), &records).unwrap();
        fs::remove_file(folder.path().join("checkpoint.redb")).unwrap();
        assert_eq!(open(folder.path()).unwrap().records, records);
    }

    #[test]
    fn records_of_a_newer_release_and_unreadable_ones_are_neither_used_nor_replaced() {
        let folder = folder();
        let file = folder.path().join(BINDINGS_FILE);
        fs::write(&file, "{\"version\":2}").unwrap();
        let error = message(&open(folder.path()).unwrap_err());
        assert!(error.contains("bindings.json: version 2, and this release knows 1"), "{error}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "{\"version\":2}");
        fs::remove_file(&file).unwrap();
        fs::create_dir(&file).unwrap();
        let error = message(&open(folder.path()).unwrap_err());
        assert!(error.contains("cannot read ") && error.contains("directory"), "{error}");
    }
}
