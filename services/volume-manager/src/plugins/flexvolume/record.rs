//! The file next to the global folder of a volume that says what its driver has done, also after the service was killed in the
//! middle of it. The kubelet has no such file and ignores it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use keelson_volume_manager_core::global_folder::side_file;
use serde::{Deserialize, Serialize};

use crate::listing::names_in;
use crate::plugins::host::remove;

/// What the file's name ends with.
const SUFFIX: &str = "flexvolume";

/// What a driver has done for a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Record {
    /// The volume's inner name.
    pub(super) volume: String,
    /// The device that the driver has named; empty if it is not known.
    pub(super) device: String,
    /// This agent has attached the volume, or has begun to, and has not detached it.
    pub(super) is_attached: bool,
}

fn file(folder: &Path) -> PathBuf {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    folder.with_file_name(side_file(&name, SUFFIX))
}

impl Record {
    /// The record of a folder. A file that is not complete was written for nothing: the next call writes it again.
    pub(super) fn read(folder: &Path) -> io::Result<Option<Self>> {
        match fs::read(file(folder)) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes the record of a folder.
    pub(super) fn write(&self, folder: &Path) -> io::Result<()> {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let new = folder.with_file_name(side_file(&name, "flexvolume.new"));
        fs::write(&new, serde_json::to_vec(self)?)?;
        fs::rename(new, file(folder))
    }

    /// Removes the record of a folder.
    pub(super) fn remove(folder: &Path) -> io::Result<()> {
        remove(fs::remove_file(file(folder)))
    }

    /// The volumes with a folder or a record in the folder `mounts` of a driver, sorted.
    pub(super) fn volumes_in(mounts: &Path) -> io::Result<Vec<String>> {
        let mut volumes = Vec::new();
        for name in names_in(mounts)? {
            if !name.starts_with('.') {
                volumes.push(name);
            } else if name.ends_with(&format!(".{SUFFIX}"))
                && let Ok(Self { volume, .. }) = serde_json::from_slice(&fs::read(mounts.join(name))?)
            {
                volumes.push(volume);
            }
        }
        volumes.sort();
        volumes.dedup();
        Ok(volumes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_back_and_its_volume_is_listed_with_the_folders() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", &"x".repeat(250)] {
            let folder = dir.path().join(name);
            assert_eq!(Record::read(&folder).unwrap(), None);
            let record = Record { volume: name.into(), device: "/dev/x".into(), is_attached: true };
            record.write(&folder).unwrap();
            assert_eq!(Record::read(&folder).unwrap(), Some(record));
        }
        fs::create_dir(dir.path().join("b")).unwrap();
        fs::create_dir(dir.path().join("a")).unwrap();
        assert_eq!(Record::volumes_in(dir.path()).unwrap(), ["a".into(), "b".into(), "x".repeat(250)]);
        Record::remove(&dir.path().join("a")).unwrap();
        Record::remove(&dir.path().join("a")).unwrap();
        assert_eq!(Record::read(&dir.path().join("a")).unwrap(), None);
        assert_eq!(Record::volumes_in(&dir.path().join("none")).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_half_written_record_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a");
        for text in ["", "{", "{\"device\": 1}"] {
            fs::write(file(&folder), text).unwrap();
            assert_eq!(Record::read(&folder).unwrap(), None, "{text}");
            assert_eq!(Record::volumes_in(dir.path()).unwrap(), Vec::<String>::new(), "{text}");
        }
    }
}
