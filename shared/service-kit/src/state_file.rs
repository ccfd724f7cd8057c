//! A small JSON file (checkpoint) with the state of a service that must survive a restart.

use std::fs;
use std::io;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use keelson_files::Replacement;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

const VERSION_KEY: &str = "schemaVersion";

/// Why a state file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateFileError {
    /// The file was written by a newer release.
    #[error("{} has schema version {found}, this binary knows {known}; use the newer release again or remove the file ({without})", path.display())]
    TooNew {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The newest version that this binary supports.
        known: u64,
        /// What happens without the file.
        without: &'static str,
    },
    /// It cannot be written.
    #[error("cannot write {}; {way_out}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What follows from it and what to do.
        way_out: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// The stored state: one JSON object with the schema version next to its fields.
pub trait StoredState: Serialize + DeserializeOwned + Default + Send + 'static {
    /// Schema version. Raised with each change that an older binary would misread; a file of a newer version is refused.
    const VERSION: u64;
    /// What happens without the file, for people.
    const CONSEQUENCE_OF_LOSS: &'static str;
    /// What follows when it cannot be written and what to do, for people.
    const CONSEQUENCE_OF_WRITE_ERROR: &'static str;
}

/// A file of the state folder.
#[derive(Debug)]
pub struct StateFile<T> {
    path: PathBuf,
    kept: PhantomData<fn() -> T>,
}

impl<T> StateFile<T> {
    /// The file at this path; it need not exist.
    pub const fn at(path: PathBuf) -> Self {
        Self { path, kept: PhantomData }
    }
}

impl<T: StoredState> StateFile<T> {
    /// Loads the state. The default when there is no file, or (logged) when it cannot be read or parsed.
    ///
    /// # Errors
    /// [`StateFileError::TooNew`].
    pub async fn load(&self) -> Result<T, StateFileError> {
        let path = self.path.clone();
        let read = tokio::task::spawn_blocking(move || fs::read(path)).await;
        let read = read.unwrap_or_else(|panic| Err(io::Error::other(panic)));
        if matches!(&read, Err(error) if error.kind() == io::ErrorKind::NotFound) {
            return Ok(T::default());
        }
        let parsed = read.and_then(|bytes| Ok(serde_json::from_slice::<Value>(&bytes)?)).and_then(|json| {
            let found = json[VERSION_KEY].as_u64().unwrap_or(0);
            if found > T::VERSION { Ok(Err(found)) } else { Ok(Ok(serde_json::from_value::<T>(json)?)) }
        });
        match parsed {
            Ok(Ok(kept)) => Ok(kept),
            Ok(Err(found)) => {
                let (path, known) = (self.path.clone(), T::VERSION);
                Err(StateFileError::TooNew { path, found, known, without: T::CONSEQUENCE_OF_LOSS })
            }
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "cannot use the state file; starting with an empty state");
                Ok(T::default())
            }
        }
    }

    /// Replaces the file by rename. Without fsync: after a crash of the machine the pods are gone, too.
    ///
    /// # Errors
    /// [`StateFileError::Write`].
    pub async fn store(&self, kept: T) -> Result<(), StateFileError> {
        let path = self.path.clone();
        let written = tokio::task::spawn_blocking(move || replace(&path, &kept)).await;
        written.unwrap_or_else(|panic| Err(io::Error::other(panic))).map_err(|source| StateFileError::Write {
            path: self.path.clone(),
            way_out: T::CONSEQUENCE_OF_WRITE_ERROR,
            source,
        })
    }
}

fn replace<T: StoredState>(path: &Path, kept: &T) -> io::Result<()> {
    let mut json = serde_json::to_value(kept)?;
    json[VERSION_KEY] = T::VERSION.into();
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    Replacement::new().mode(0o600).write(path, &serde_json::to_vec(&json)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
    #[serde(default)]
    struct Notes {
        names: Vec<String>,
    }

    impl StoredState for Notes {
        const VERSION: u64 = 2;
        const CONSEQUENCE_OF_LOSS: &'static str = "the names are forgotten";
        const CONSEQUENCE_OF_WRITE_ERROR: &'static str = "make room";
    }

    fn file(dir: &Path) -> StateFile<Notes> {
        StateFile::at(dir.join("service/notes.json"))
    }

    #[tokio::test]
    async fn stored_state_is_reloaded_and_readable_by_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let file = file(dir.path());
        assert_eq!(file.load().await.unwrap(), Notes::default());
        for names in [vec!["a".to_owned(), "b".to_owned()], Vec::new()] {
            let notes = Notes { names };
            file.store(notes.clone()).await.unwrap();
            assert_eq!(file.load().await.unwrap(), notes);
        }
        assert_eq!(fs::read_to_string(&file.path).unwrap(), r#"{"names":[],"schemaVersion":2}"#);
        assert_eq!(fs::metadata(&file.path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn older_schemas_load_broken_files_reset_and_newer_schemas_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = file(dir.path());
        fs::create_dir(dir.path().join("service")).unwrap();
        let old = Notes { names: vec!["a".to_owned()] };
        for (text, kept) in [
            (r#"{"names":["a"]}"#, old.clone()),
            (r#"{"names":["a"],"schemaVersion":1}"#, old),
            ("{", Notes::default()),
            ("[]", Notes::default()),
            (r#"{"names":3,"schemaVersion":2}"#, Notes::default()),
        ] {
            fs::write(&file.path, text).unwrap();
            assert_eq!(file.load().await.unwrap(), kept, "{text}");
        }
        fs::write(&file.path, r#"{"names":3,"schemaVersion":3}"#).unwrap();
        let said = file.load().await.unwrap_err().to_string();
        for part in ["notes.json", "version 3", "knows 2", "the names are forgotten"] {
            assert!(said.contains(part), "{said}");
        }
    }

    #[tokio::test]
    async fn write_error_names_the_file_and_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("service"), "in the way").unwrap();
        let said = file(dir.path()).store(Notes::default()).await.unwrap_err().to_string();
        assert!(said.contains("notes.json") && said.contains("make room"), "{said}");
    }
}
