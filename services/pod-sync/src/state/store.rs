//! What outlives this process: one small file per pod, whose last complete line counts.
//!
//! A record is appended, and only now and then replaces the file by rename: a new file for each change would cost an inode each time, and creating a file
//! right after one was deleted is expensive.
//!
//! It is never synced to disk: it has to outlive a killed process, and after a reboot its containers are gone. What is lost is what a kubelet loses at each restart (docs/adr/0002).

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use keelson_files::Replacement;
use keelson_kube_model::pod_ext::API;
use keelson_kube_model::{ContainerPort, PodStatus};
use keelson_pod_sync_core::allocation::Allocation;
use keelson_pod_sync_core::backoff::{BackoffEntry, BackoffKey};
use keelson_pod_sync_core::measure::FirstStart;
use keelson_pod_sync_core::probe::{ProbeKind, ProbeState, ProbeStates};
use keelson_pod_sync_core::resize::ResizeRecord;
use keelson_pod_sync_core::worker::WorkerState;
use serde::{Deserialize, Serialize};

/// The version of the record; a newer one is ignored. An optional field needs no new version, since an
/// older release ignores it. It grows when an older release would misread a record.
const SCHEMA: u32 = 1;

/// A file that would become longer than this many bytes is rewritten.
const MAX_FILE: usize = 64 * 1024;

/// One pod's record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    schema: u32,
    /// Pod UID.
    pub uid: String,
    /// State of its worker.
    pub state: WorkerState,
    /// The status that was published last.
    pub status: PodStatus,
    /// The desired pod as JSON, once it is ending: its source may no longer have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<serde_json::Value>,
    /// The source that the pod came from.
    #[serde(default)]
    pub source: String,
    /// The UID with which the source sends it, if a kubelet had started it under its own (docs/adr/0022).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_uid: Option<String>,
    /// The crash-loop back-offs of its containers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backoffs: Vec<StoredBackoff>,
    /// By container, why its last start failed: waiting reason and message.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failed_starts: BTreeMap<String, (String, String)>,
    /// The results of the probes of its containers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub probes: Vec<StoredProbe>,
    /// Its host ports. If its source does not have it any more after a restart, they stay in use until it has ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub host_ports: Vec<ContainerPort>,
    /// The resources that it is allocated, if it has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocation: Option<Allocation>,
    /// Its resize.
    #[serde(default, skip_serializing_if = "ResizeRecord::is_empty")]
    pub resize: ResizeRecord,
    /// How far its first start has come, for metrics.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<FirstStart>,
}

/// One probe of one container; the pod is that of the record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredProbe {
    container: String,
    kind: ProbeKind,
    #[serde(flatten)]
    state: ProbeState,
}

impl StoredProbe {
    /// The probes that have seen a container.
    pub fn all(states: &ProbeStates) -> Vec<Self> {
        let seen = states.iter().filter(|(_, _, state)| !state.container_id.is_empty());
        seen.map(|(container, kind, state)| Self {
            container: container.to_owned(),
            kind,
            state: state.clone(),
        })
        .collect()
    }

    /// As an entry of [`ProbeStates`].
    pub fn entry(self) -> ((String, ProbeKind), ProbeState) {
        ((self.container, self.kind), self.state)
    }
}

/// The back-off of one container with one spec; the pod is that of the record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredBackoff {
    container: String,
    shape: u64,
    /// Delay and last start.
    #[serde(flatten)]
    pub entry: BackoffEntry,
}

impl StoredBackoff {
    /// As an entry of the back-offs.
    pub fn of(key: &BackoffKey, entry: &BackoffEntry) -> Self {
        Self { container: key.container.clone(), shape: key.shape, entry: *entry }
    }

    /// Its key in the back-offs of all pods.
    pub fn key(&self, uid: &str) -> BackoffKey {
        BackoffKey { uid: uid.into(), container: self.container.clone(), shape: self.shape }
    }
}

impl Record {
    /// A record of the current schema.
    pub fn new(uid: &str, state: WorkerState, status: PodStatus) -> Self {
        Self {
            schema: SCHEMA,
            uid: uid.to_owned(),
            state,
            status,
            pod: None,
            source: String::new(),
            source_uid: None,
            backoffs: Vec::new(),
            failed_starts: BTreeMap::new(),
            probes: Vec::new(),
            host_ports: Vec::new(),
            allocation: None,
            resize: ResizeRecord::default(),
            start: None,
        }
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
    written: Mutex<Written>,
}

/// Each pod's file, by UID. Files that this process has not written, or not completely, are missing.
type Written = BTreeMap<String, WrittenFile>;

/// A file that this process has written.
#[derive(Debug, Clone, Copy)]
struct WrittenFile {
    size: usize,
    /// When a back-off of the pod was last advanced according to the last record in the file, unix nanoseconds.
    backoff_advance: Option<i64>,
}

impl Store {
    /// Makes the folder if it is missing.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn open(state_dir: &Path) -> Result<Self, StoreError> {
        let dir = state_dir.join("pods");
        fs::create_dir_all(&dir).map_err(|source| StoreError { path: dir.clone(), source })?;
        Ok(Self { dir, written: Mutex::default() })
    }

    /// Every record that can be read. A file without a readable record is removed.
    pub fn load(&self) -> Vec<Record> {
        let mut records = Vec::new();
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_none_or(|e| e != "json") {
                // Left by a process that was killed between writing and renaming.
                let _ = fs::remove_file(&path);
                continue;
            }
            match fs::read(&path).ok().and_then(|bytes| last_of(&bytes)) {
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

    /// Every record that still counts in this boot. What a shutdown of an earlier boot has ended starts again, as static pods of a
    /// kubelet do; only pods of the API are replaced by their controllers instead.
    pub fn load_in_boot(&self, boot_id: &str) -> Vec<Record> {
        let (over, records): (Vec<_>, Vec<_>) = self
            .load()
            .into_iter()
            .partition(|record| record.source != API && record.state.is_of_earlier_boot(boot_id));
        for record in over {
            tracing::info!(uid = record.uid, "a shutdown of the machine has ended the pod; it starts again");
            self.remove_unless(&record.uid, || false);
        }
        records
    }

    /// Replaces the record of a pod with what `record` returns, under the lock of the store; `None` writes nothing.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn put_latest(&self, record: impl FnOnce() -> Option<Record>) -> Result<(), StoreError> {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        record().map_or(Ok(()), |record| self.put(&record, &mut written))
    }

    /// Appends a record of a pod, or replaces its file.
    ///
    /// # Errors
    /// The file cannot be written.
    fn put(&self, record: &Record, written: &mut Written) -> Result<(), StoreError> {
        let Some(path) = self.path(&record.uid) else { return Ok(()) };
        let fail = |source| StoreError { path: path.clone(), source };
        let mut line = serde_json::to_vec(record).map_err(|e| fail(io::Error::other(e)))?;
        line.push(b'\n');
        // What fails half-way is not built upon: the next record replaces the file.
        let longer = written.remove(&record.uid).map(|file| file.size + line.len());
        let appended = longer.filter(|size| *size <= MAX_FILE && append(&path, &line).is_ok());
        let size = match appended {
            Some(size) => size,
            None => {
                let temporary = format!("{}.new", record.uid);
                Replacement::new().temporary_name(&temporary).write(&path, &line).map_err(fail)?;
                line.len()
            }
        };
        let advances = record.backoffs.iter().map(|backoff| backoff.entry.last_advanced_unix_nanos);
        written.insert(record.uid.clone(), WrittenFile { size, backoff_advance: advances.max() });
        Ok(())
    }

    /// Whether the last record that this process has stored of a pod says that its back-offs were last advanced at that time,
    /// unix nanoseconds.
    pub fn has_backoff_advance(&self, uid: &str, unix_nanos: i64) -> bool {
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.get(uid).is_some_and(|file| file.backoff_advance == Some(unix_nanos))
    }

    /// Removes the record of a pod, unless the UID is in use again. Decided under the lock of the store.
    pub fn remove_unless(&self, uid: &str, in_use: impl FnOnce() -> bool) {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(path) = self.path(uid).filter(|_| !in_use()) {
            written.remove(uid);
            let _ = fs::remove_file(path);
        }
    }

    fn path(&self, uid: &str) -> Option<PathBuf> {
        let safe = !uid.is_empty() && !uid.starts_with('.') && !uid.contains(['/', '\0']);
        safe.then(|| self.dir.join(format!("{uid}.json")))
    }
}

fn append(path: &Path, line: &[u8]) -> io::Result<()> {
    fs::OpenOptions::new().append(true).open(path)?.write_all(line)
}

/// The last record of a file; an incomplete last line is ignored.
fn last_of(bytes: &[u8]) -> Option<Record> {
    bytes.rsplit(|byte| *byte == b'\n').find_map(|line| serde_json::from_slice(line).ok())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    fn put(store: &Store, record: &Record) {
        store.put_latest(|| Some(record.clone())).unwrap();
    }

    #[test]
    fn a_stored_record_is_loaded_by_the_next_process() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let mut record = Record::new("u1", WorkerState::default(), PodStatus::default());
        record.state.kill_deadline_unix_nanos = Some(42);
        record.failed_starts = [("a".to_owned(), ("ErrImagePull".to_owned(), "gone".to_owned()))].into();
        let key = BackoffKey { uid: "u1".into(), container: "a".to_owned(), shape: u64::MAX };
        let entry = BackoffEntry { delay_seconds: 40, last_advanced_unix_nanos: 7 };
        record.backoffs = vec![StoredBackoff::of(&key, &entry)];
        let mut state = ProbeState::new(ProbeKind::Liveness);
        "c1".clone_into(&mut state.container_id);
        let states: ProbeStates = [(("a".to_owned(), ProbeKind::Liveness), state)].into_iter().collect();
        record.probes = StoredProbe::all(&states);
        put(&store, &record);
        let loaded = Store::open(dir.path()).unwrap().load();
        assert_eq!(loaded, [record]);
        assert_eq!((loaded[0].backoffs[0].key("u1"), loaded[0].backoffs[0].entry), (key, entry));
        assert_eq!(loaded[0].probes.iter().cloned().map(StoredProbe::entry).collect::<ProbeStates>(), states);
        store.remove_unless("u1", || true);
        assert_eq!(store.load().len(), 1, "in use");
        store.remove_unless("u1", || false);
        assert!(store.load().is_empty());
    }

    #[test]
    fn older_records_are_loaded_and_newer_versions_are_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let mut json =
            serde_json::to_value(Record::new("u1", WorkerState::default(), PodStatus::default())).unwrap();
        assert!(["backoffs", "failed_starts", "probes"].iter().all(|field| json.get(field).is_none()));
        let path = dir.path().join("pods/u1.json");
        fs::write(&path, json.to_string()).unwrap();
        assert_eq!(store.load().len(), 1);
        json["schema"] = (SCHEMA + 1).into();
        fs::write(&path, json.to_string()).unwrap();
        assert!(store.load().is_empty());
        assert!(path.exists());
    }

    #[test]
    fn the_last_complete_record_is_loaded_and_a_new_process_rewrites_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pods/u1.json");
        let inode = || fs::metadata(&path).unwrap().ino();
        let lines = || fs::read_to_string(&path).unwrap().lines().count();
        let mut record = Record::new("u1", WorkerState::default(), PodStatus::default());
        let store = Store::open(dir.path()).unwrap();
        put(&store, &record);
        let first = inode();
        for grace in 1..=3 {
            record.state.grace_seconds = Some(grace);
            put(&store, &record);
        }
        assert_eq!((inode(), lines()), (first, 4));
        fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"schema\":1,").unwrap();
        let next = Store::open(dir.path()).unwrap();
        assert_eq!(next.load(), [record.clone()]);
        put(&next, &record);
        assert_eq!(lines(), 1, "what stood behind the torn line is not built upon");
        fs::remove_file(&path).unwrap();
        put(&next, &record);
        assert_eq!(next.load(), [record], "a file that somebody has removed is made again");
    }

    #[test]
    fn a_record_file_does_not_exceed_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let mut record = Record::new("u1", WorkerState::default(), PodStatus::default());
        record.source = "x".repeat(MAX_FILE / 5);
        let mut longest = 0;
        for grace in 0..12 {
            record.state.grace_seconds = Some(grace);
            put(&store, &record);
            longest = longest.max(fs::metadata(dir.path().join("pods/u1.json")).unwrap().len());
        }
        assert!(longest > 2 * record.source.len() as u64 && longest <= MAX_FILE as u64, "{longest}");
        assert_eq!(store.load(), [record]);
    }

    #[test]
    fn an_incomplete_record_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        fs::write(dir.path().join("pods/u.json"), "{\"schema\":1,").unwrap();
        assert!(store.load().is_empty());
        assert!(!dir.path().join("pods/u.json").exists());
    }

    #[test]
    fn a_uid_that_contains_a_path_is_not_stored() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        put(&store, &Record::new("../x", WorkerState::default(), PodStatus::default()));
        assert!(!dir.path().join("x.json").exists());
    }
}
