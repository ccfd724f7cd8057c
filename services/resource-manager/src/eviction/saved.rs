//! What must not be forgotten when the service is killed: standing orders, and since when the node is short of what.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use keelson_config::{Config, ServiceName};
use keelson_resource_manager_core::desire::PodRef;
use keelson_resource_manager_core::eviction::monitor::Monitor;
use keelson_resource_manager_core::eviction::order::Order;
use keelson_resource_manager_core::eviction::signal::{Condition, Signal};
use serde::{Deserialize, Serialize};

/// A file of a newer version is refused.
const SCHEMA_VERSION: u32 = 1;

/// What is kept.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Saved {
    pub(crate) orders: Vec<Order>,
    pub(crate) monitor: Monitor,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Stored {
    schema_version: u32,
    orders: Vec<StoredOrder>,
    /// Signal, whether the threshold is hard, since when in milliseconds since 1970, whether it is acted on.
    met: Vec<(String, bool, u64, bool)>,
    /// Condition and when it was last seen, in milliseconds since 1970.
    conditions: Vec<(String, u64)>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct StoredOrder {
    uid: String,
    namespace: String,
    name: String,
    reason: String,
    message: String,
    grace_seconds: Option<i64>,
    condition_message: String,
    signal: String,
    since_unix_nanos: i64,
}

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SavedError {
    #[error("{} has schema version {found}, this binary knows {SCHEMA_VERSION}; use the newer release again or remove the file (pods that are being evicted then go on)", path.display())]
    TooNew { path: PathBuf, found: u32 },
    #[error("cannot write {}; standing evictions would be forgotten with a restart: make room, and make the folder writable", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// `<state-dir>/resource-manager/evictions.json`.
#[derive(Debug, Clone)]
pub(crate) struct StateFile {
    path: PathBuf,
}

impl StateFile {
    pub(crate) fn new(config: &Config) -> Self {
        Self { path: config.paths.state(ServiceName::ResourceManager).join("evictions.json") }
    }

    /// What is kept; nothing when there is no file or it is broken.
    pub(crate) async fn load(&self) -> Result<Saved, SavedError> {
        let path = self.path.clone();
        let read = tokio::task::spawn_blocking(move || fs::read(path)).await;
        let bytes = match read.unwrap_or_else(|panic| Err(io::Error::other(panic))) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Saved::default()),
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "cannot read the saved evictions, beginning anew");
                return Ok(Saved::default());
            }
        };
        match serde_json::from_slice::<Stored>(&bytes) {
            Ok(stored) if stored.schema_version > SCHEMA_VERSION => {
                Err(SavedError::TooNew { path: self.path.clone(), found: stored.schema_version })
            }
            Ok(stored) => Ok(stored.into()),
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "the saved evictions are broken, beginning anew");
                Ok(Saved::default())
            }
        }
    }

    /// Replaces the file by rename. It is not synced: with the machine the pods end as well.
    pub(crate) async fn store(&self, saved: Saved) -> Result<(), SavedError> {
        let path = self.path.clone();
        let written = tokio::task::spawn_blocking(move || replace(&path, saved)).await;
        written
            .unwrap_or_else(|panic| Err(io::Error::other(panic)))
            .map_err(|source| SavedError::Write { path: self.path.clone(), source })
    }
}

fn replace(path: &Path, saved: Saved) -> io::Result<()> {
    let bytes = serde_json::to_vec(&Stored::from(saved)).map_err(io::Error::other)?;
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let temporary = path.with_extension("json.new");
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(&bytes)?;
    fs::rename(&temporary, path)
}

impl From<Saved> for Stored {
    fn from(saved: Saved) -> Self {
        let Monitor { met_since, acted_on, last_seen, .. } = saved.monitor;
        let met = met_since
            .into_iter()
            .map(|(key, since)| (key.0.name().to_owned(), key.1, since, acted_on.contains(&key)));
        Self {
            schema_version: SCHEMA_VERSION,
            orders: saved.orders.into_iter().map(StoredOrder::from).collect(),
            met: met.collect(),
            conditions: last_seen.into_iter().map(|(c, last)| (c.name().to_owned(), last)).collect(),
        }
    }
}

impl From<Stored> for Saved {
    fn from(stored: Stored) -> Self {
        let mut monitor = Monitor::default();
        for (signal, hard, since, acted_on) in stored.met {
            let Some(signal) = Signal::parse(&signal) else { continue };
            monitor.met_since.insert((signal, hard), since);
            if acted_on {
                monitor.acted_on.insert((signal, hard));
            }
        }
        let conditions = stored.conditions.into_iter();
        monitor.last_seen =
            conditions.filter_map(|(name, last)| Some((Condition::parse(&name)?, last))).collect();
        let orders = stored.orders.into_iter().filter(|order| !order.uid.is_empty());
        Self { orders: orders.map(Order::from).collect(), monitor }
    }
}

impl From<Order> for StoredOrder {
    fn from(order: Order) -> Self {
        Self {
            uid: order.pod.uid,
            namespace: order.pod.namespace,
            name: order.pod.name,
            reason: order.reason,
            message: order.message,
            grace_seconds: order.grace_seconds,
            condition_message: order.condition_message,
            signal: order.signal,
            since_unix_nanos: order.since_unix_nanos,
        }
    }
}

impl From<StoredOrder> for Order {
    fn from(stored: StoredOrder) -> Self {
        Self {
            pod: PodRef { uid: stored.uid, namespace: stored.namespace, name: stored.name },
            reason: stored.reason,
            message: stored.message,
            grace_seconds: stored.grace_seconds,
            condition_message: stored.condition_message,
            signal: stored.signal,
            since_unix_nanos: stored.since_unix_nanos,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(dir: &Path) -> StateFile {
        StateFile { path: dir.join("resource-manager/evictions.json") }
    }

    #[tokio::test]
    async fn what_is_stored_is_loaded_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = file(dir.path());
        assert_eq!(file.load().await.unwrap(), Saved::default());
        let mut monitor = Monitor::default();
        monitor.met_since.insert((Signal::MemoryAvailable, true), 5);
        monitor.met_since.insert((Signal::PidAvailable, false), 6);
        monitor.acted_on.insert((Signal::MemoryAvailable, true));
        monitor.last_seen.insert(Condition::Memory, 7);
        let order = Order {
            pod: PodRef { uid: "u".into(), namespace: "ns".into(), name: "web".into() },
            reason: "Evicted".into(),
            message: "m".into(),
            grace_seconds: Some(1),
            condition_message: "c".into(),
            signal: "memory.available".into(),
            since_unix_nanos: 9,
        };
        let saved = Saved { orders: vec![order], monitor };
        file.store(saved.clone()).await.unwrap();
        assert_eq!(file.load().await.unwrap(), saved);
    }

    #[tokio::test]
    async fn a_broken_file_is_forgotten_and_a_newer_one_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = file(dir.path());
        fs::create_dir(dir.path().join("resource-manager")).unwrap();
        fs::write(&file.path, "{").unwrap();
        assert_eq!(file.load().await.unwrap(), Saved::default());
        fs::write(&file.path, r#"{"schemaVersion":2}"#).unwrap();
        assert!(file.load().await.unwrap_err().to_string().contains("evictions.json"));
    }

    #[tokio::test]
    async fn a_folder_that_cannot_be_written_is_named_with_the_way_out() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("resource-manager"), "in the way").unwrap();
        let error = file(dir.path()).store(Saved::default()).await.unwrap_err().to_string();
        assert!(error.contains("evictions.json") && error.contains("make room"), "{error}");
    }
}
