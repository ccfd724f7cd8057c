//! What pod-sync keeps across its own death: one small file per pod, replaced by rename.
//!
//! It is never synced to disk: it has to outlive a killed process, and after a reboot the processes that it
//! speaks of are gone. What is lost is what a kubelet loses at each restart (docs/adr/0002).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use keelson_kube_model::PodStatus;
use keelson_pod_sync_core::worker::WorkerState;
use serde::{Deserialize, Serialize};

/// The version of the record; a newer one is ignored.
const SCHEMA: u32 = 1;

/// One pod's record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    schema: u32,
    /// Pod UID.
    pub uid: String,
    /// Where its worker stands.
    pub state: WorkerState,
    /// The status that was published last.
    pub status: PodStatus,
    /// The desired pod as JSON, once it is ending: its source may no longer have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<serde_json::Value>,
    /// The source that the pod came from.
    #[serde(default)]
    pub source: String,
}

impl Record {
    /// A record of the current schema.
    pub fn new(uid: &str, state: WorkerState, status: PodStatus) -> Self {
        Self { schema: SCHEMA, uid: uid.to_owned(), state, status, pod: None, source: String::new() }
    }
}

/// Why the store cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the state folder {}: pods go on, but a restart of pod-sync forgets start times and deadlines", path.display())]
pub struct StoreError {
    path: PathBuf,
    source: io::Error,
}

/// The folder of records.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    writing: Mutex<()>,
}

impl Store {
    /// Makes the folder if it is missing.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn open(state_dir: &Path) -> Result<Self, StoreError> {
        let dir = state_dir.join("pods");
        fs::create_dir_all(&dir).map_err(|source| StoreError { path: dir.clone(), source })?;
        Ok(Self { dir, writing: Mutex::new(()) })
    }

    /// Every record that can be read. A torn or foreign file is removed: it says nothing.
    pub fn load(&self) -> Vec<Record> {
        let mut records = Vec::new();
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_none_or(|e| e != "json") {
                // Left by a process that was killed between writing and renaming.
                let _ = fs::remove_file(&path);
                continue;
            }
            let record = fs::read(&path).ok().and_then(|b| serde_json::from_slice::<Record>(&b).ok());
            match record {
                Some(record) if record.schema <= SCHEMA => records.push(record),
                Some(_) => {
                    tracing::warn!(file = %path.display(), "a newer release wrote this record, ignored")
                }
                None => {
                    let _ = fs::remove_file(&path);
                }
            }
        }
        records
    }

    /// Replaces the record of a pod with what `record` gives once nobody else writes; `None` writes nothing.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn put_latest(&self, record: impl FnOnce() -> Option<Record>) -> Result<(), StoreError> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        record().map_or(Ok(()), |record| self.put(&record))
    }

    /// Replaces the record of a pod.
    ///
    /// # Errors
    /// The file cannot be written.
    fn put(&self, record: &Record) -> Result<(), StoreError> {
        let Some(path) = self.path(&record.uid) else { return Ok(()) };
        let fail = |source| StoreError { path: path.clone(), source };
        let bytes = serde_json::to_vec(record).map_err(|e| fail(io::Error::other(e)))?;
        let temporary = path.with_extension("new");
        fs::write(&temporary, bytes).map_err(fail)?;
        fs::rename(&temporary, &path).map_err(fail)
    }

    /// Removes the record of a pod.
    pub fn remove(&self, uid: &str) {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(path) = self.path(uid) {
            let _ = fs::remove_file(path);
        }
    }

    fn path(&self, uid: &str) -> Option<PathBuf> {
        let safe = !uid.is_empty() && !uid.starts_with('.') && !uid.contains(['/', '\0']);
        safe.then(|| self.dir.join(format!("{uid}.json")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_is_loaded_by_the_next_process() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let mut record = Record::new("u1", WorkerState::default(), PodStatus::default());
        record.state.kill_deadline_unix_nanos = Some(42);
        store.put(&record).unwrap();
        assert_eq!(Store::open(dir.path()).unwrap().load(), [record]);
        store.remove("u1");
        assert!(store.load().is_empty());
    }

    #[test]
    fn a_torn_record_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        fs::write(dir.path().join("pods/u.json"), "{\"schema\":1,").unwrap();
        assert!(store.load().is_empty());
        assert!(!dir.path().join("pods/u.json").exists());
    }

    #[test]
    fn a_uid_that_is_a_path_is_not_stored() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.put(&Record::new("../x", WorkerState::default(), PodStatus::default())).unwrap();
        assert!(!dir.path().join("x.json").exists());
    }
}
