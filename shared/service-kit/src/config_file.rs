//! Writes the file with the resolved configuration.

use std::io;
use std::path::Path;

use keelson_config::{Config, ConfigError, ConfigExtras};
use keelson_files::Replacement;

/// Members of the operator group read it.
const MODE: u32 = 0o640;

/// Replaces the file at `path` by one with this content; mode 0640. Services notice it and read it again.
///
/// # Errors
/// The file cannot be written. The old one is unchanged then.
pub fn store_config(path: &Path, config: &Config, extras: ConfigExtras<'_>) -> Result<(), ConfigError> {
    let content = config.encode(extras).map_err(io::Error::other);
    let written = content.and_then(|bytes| Replacement::new().mode(MODE).write(path, &bytes));
    written.map_err(|source| ConfigError::Write { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_stored_config_is_read_again_and_has_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        for name in ["one", "two"] {
            let config = Config { node_name: name.into(), ..Config::default() };
            store_config(&path, &config, ConfigExtras::default()).unwrap();
            assert_eq!(Config::load(&path).unwrap(), config);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, MODE);
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn a_config_that_cannot_be_stored_is_an_error_that_names_the_file() {
        let path = Path::new("/nonexistent-keelson/config.json");
        let error = store_config(path, &Config::default(), ConfigExtras::default()).unwrap_err();
        assert!(error.to_string().contains("/nonexistent-keelson/config.json"), "{error}");
    }
}
