//! What node-status remembers across restarts.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use keelson_config::{Config, ServiceName};
use keelson_kube_model::NodeCondition;
use keelson_node_status_core::Cursor;
use serde::{Deserialize, Serialize};

/// A file of a newer version is refused.
const SCHEMA_VERSION: u32 = 1;

/// The content of the state file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Saved {
    pub(crate) schema_version: u32,
    /// Of the last boot that was seen.
    pub(crate) boot_id: String,
    /// Of the last Node, without heartbeat times.
    pub(crate) conditions: Vec<NodeCondition>,
    /// Per service: the last event that was taken.
    pub(crate) cursors: BTreeMap<String, Cursor>,
}

/// Why the state file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SavedError {
    #[error("{} has schema version {found}, this binary knows {SCHEMA_VERSION}; use the newer release again or remove the file (some events are then reported twice)", path.display())]
    TooNew { path: PathBuf, found: u32 },
    #[error("cannot write {}; the folder must be writable by the user of node-status", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// `<state-dir>/node-status/report.json`.
#[derive(Debug, Clone)]
pub(crate) struct StateFile {
    path: PathBuf,
}

impl StateFile {
    pub(crate) fn new(config: &Config) -> Self {
        Self { path: config.paths.state(ServiceName::NodeStatus).join("report.json") }
    }

    /// The file's content; empty when there is none or it is broken.
    pub(crate) async fn load(&self) -> Result<Saved, SavedError> {
        let path = self.path.clone();
        let read = tokio::task::spawn_blocking(move || fs::read(path));
        let bytes = match read.await.unwrap_or_else(|panic| Err(io::Error::other(panic))) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Saved::default()),
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "cannot read the saved state, beginning anew");
                return Ok(Saved::default());
            }
        };
        match serde_json::from_slice::<Saved>(&bytes) {
            Ok(saved) if saved.schema_version > SCHEMA_VERSION => {
                Err(SavedError::TooNew { path: self.path.clone(), found: saved.schema_version })
            }
            Ok(saved) => Ok(saved),
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "the saved state is broken, beginning anew");
                Ok(Saved::default())
            }
        }
    }

    /// Replaces the file by rename. It is not synced: what it holds may be lost with the machine.
    pub(crate) async fn store(&self, saved: Saved) -> Result<(), SavedError> {
        let path = self.path.clone();
        let written = tokio::task::spawn_blocking(move || replace(&path, saved)).await;
        written
            .unwrap_or_else(|panic| Err(io::Error::other(panic)))
            .map_err(|source| SavedError::Write { path: self.path.clone(), source })
    }
}

fn replace(path: &Path, mut saved: Saved) -> io::Result<()> {
    saved.schema_version = SCHEMA_VERSION;
    let bytes = serde_json::to_vec(&saved).map_err(io::Error::other)?;
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let temporary = path.with_extension("json.new");
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(&bytes)?;
    fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(dir: &Path) -> StateFile {
        StateFile { path: dir.join("node-status/report.json") }
    }

    #[tokio::test]
    async fn what_is_stored_is_loaded_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = file(dir.path());
        assert_eq!(file.load().await.unwrap(), Saved::default());
        let mut saved = Saved { boot_id: "b".into(), schema_version: 1, ..Saved::default() };
        saved.cursors.insert("pod-sync".into(), Cursor { ring_id: "r".into(), sequence: 9 });
        file.store(saved.clone()).await.unwrap();
        assert_eq!(file.load().await.unwrap(), saved);
    }

    #[tokio::test]
    async fn a_broken_file_is_forgotten_and_a_newer_one_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = file(dir.path());
        fs::create_dir(dir.path().join("node-status")).unwrap();
        fs::write(&file.path, "{").unwrap();
        assert_eq!(file.load().await.unwrap(), Saved::default());
        fs::write(&file.path, r#"{"schemaVersion":2}"#).unwrap();
        assert!(file.load().await.unwrap_err().to_string().contains("report.json"));
    }
}
