//! The executable of a process.

use std::fs;
use std::path::{Path, PathBuf};

/// The path of the executable of the process with this folder (`/proc/<pid>`, proc(5)), also when the file was removed or
/// replaced since, for example by an upgrade.
pub fn program(process: &Path) -> Option<PathBuf> {
    let target = fs::read_link(process.join("exe")).ok()?;
    match target.to_str().and_then(|text| text.strip_suffix(" (deleted)")) {
        Some(path) => Some(PathBuf::from(path)),
        None => Some(target),
    }
}
