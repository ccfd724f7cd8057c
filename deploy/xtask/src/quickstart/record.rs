//! The record of a running quickstart, kept for `down` and for a second `quickstart`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use keelson_testkit::process::ProcessId;
use serde::{Deserialize, Serialize};

/// The processes, ports and folders of one quickstart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// init; `None` until it has started.
    pub init: Option<ProcessId>,
    /// containerd; `None` until it has started.
    pub containerd: Option<ProcessId>,
    /// The port of the kubelet API on loopback.
    pub port: u16,
    /// The port of `/healthz` on loopback.
    pub healthz_port: u16,
    /// The folders that did not exist before. `down` removes those that are empty.
    pub made: Vec<PathBuf>,
}

impl Record {
    /// Reads a record; `None` if the file is missing or invalid.
    pub fn load(path: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }

    /// Writes the record.
    pub fn store(&self, path: &Path) -> anyhow::Result<()> {
        fs::write(path, serde_json::to_vec_pretty(self)?)
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_record_loads_and_an_invalid_one_does_not() {
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
