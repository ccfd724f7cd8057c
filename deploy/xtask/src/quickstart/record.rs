//! The record of a running quickstart, kept for `down` and for a second `quickstart`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use keelson_testkit::process::ProcessId;
use serde::{Deserialize, Serialize};

/// What one quickstart has started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// init, with its start time.
    pub init: Option<ProcessId>,
    /// containerd, with its start time.
    pub containerd: Option<ProcessId>,
    /// Port of the kubelet API on loopback.
    pub port: u16,
    /// Port of `/healthz` on loopback.
    pub healthz_port: u16,
    /// Folders that were not there before; removed by `down` when they are empty.
    pub made: Vec<PathBuf>,
}

impl Record {
    /// Reads it; `None` when there is none or it is broken.
    pub fn load(path: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }

    /// Writes it.
    pub fn store(&self, path: &Path) -> anyhow::Result<()> {
        fs::write(path, serde_json::to_vec_pretty(self)?)
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stored_is_loaded_and_what_is_broken_is_not() {
        let scratch = keelson_testkit::Scratch::new().unwrap();
        let path = scratch.path().join("record.json");
        assert_eq!(Record::load(&path), None);
        let init = Some(ProcessId { pid: 7, start_time: 9 });
        let record = Record { init, containerd: None, port: 1, healthz_port: 2, made: vec!["/x".into()] };
        record.store(&path).unwrap();
        assert_eq!(Record::load(&path), Some(record));
        fs::write(&path, "{").unwrap();
        assert_eq!(Record::load(&path), None);
    }
}
