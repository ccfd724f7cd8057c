//! What a process runs.

use std::fs;
use std::path::{Path, PathBuf};

/// The program of the process with this folder (`/proc/<pid>`, proc(5)), also when its file was removed or replaced since, as by
/// an upgrade.
pub fn program(process: &Path) -> Option<PathBuf> {
    let target = fs::read_link(process.join("exe")).ok()?;
    match target.to_str().and_then(|text| text.strip_suffix(" (deleted)")) {
        Some(path) => Some(PathBuf::from(path)),
        None => Some(target),
    }
}
