//! Artifacts that are built once, with Debian's tools, and cached below the target folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

/// The target folder, which this program was built into.
pub(crate) fn cache_dir() -> anyhow::Result<PathBuf> {
    let exe = std::env::current_exe().context("this program has no path")?;
    // A test is in target/<profile>/deps, a tool in target/<profile>.
    let profile = exe.ancestors().skip(1).find(|folder| !folder.ends_with("deps"));
    let target = profile.and_then(Path::parent).context("this program is in no target folder")?;
    Ok(target.to_owned())
}

/// Removes a folder that may be there.
pub(crate) fn remove(folder: &Path) -> anyhow::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Runs a command to its end; what it has printed.
pub(crate) fn execute(command: &mut Command) -> anyhow::Result<String> {
    command.env("LC_ALL", "C").stdin(Stdio::null());
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    ensure!(output.status.success(), "{command:?} failed with {}:\n{stdout}{stderr}", output.status);
    Ok(stdout)
}
