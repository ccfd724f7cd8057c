//! Writes the file with the flags, for node-api's `/flagz`. No service acts on it, so it is not part of the configuration.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use keelson_config::Paths;
use keelson_files::Replacement;

/// `<run-dir>/flags.json`; node-api reads it there.
pub(crate) fn path(paths: &Paths) -> PathBuf {
    paths.run_dir.join("flags.json")
}

/// Replaces the file by rename; mode 0640. It is an object with the value of each flag as text.
pub(crate) fn write(path: &Path, flags: &BTreeMap<&'static str, String>) -> io::Result<()> {
    let mut bytes = serde_json::to_vec_pretty(flags)?;
    bytes.push(b'\n');
    Replacement::new().mode(0o640).write(path, &bytes)
}
