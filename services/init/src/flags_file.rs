//! Writes the file with the flags, for node-api's `/flagz`. No service acts on it, so it is not part of the configuration.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use keelson_config::Paths;

/// `<run-dir>/flags.json`; node-api reads it there.
pub(crate) fn path(paths: &Paths) -> PathBuf {
    paths.run_dir.join("flags.json")
}

/// Replaces the file by rename; mode 0640. It is an object with the value of each flag as text.
pub(crate) fn write(path: &Path, flags: &BTreeMap<&'static str, String>) -> io::Result<()> {
    let mut bytes = serde_json::to_vec_pretty(flags)?;
    bytes.push(b'\n');
    let temporary = path.with_extension("json.new");
    let mut options = fs::OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o640).open(&temporary)?;
    file.write_all(&bytes)?;
    fs::rename(&temporary, path)
}
