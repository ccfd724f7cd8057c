//! Artifacts that are built once, with Debian's tools, and cached below the target folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

use crate::find_file;

/// The mirror to use if nothing names another one.
pub(crate) const MIRROR: &str = "http://deb.debian.org/debian";
/// The keys of Debian's archive.
pub(crate) const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

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

/// Writes the list of sources of [`apt_get`] with the same folder.
pub(crate) fn write_sources(work: &Path, lines: &[String]) -> anyhow::Result<()> {
    for folder in ["lists/partial", "cache/archives/partial"] {
        let folder = work.join(folder);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let path = work.join("sources.list");
    fs::write(&path, lines.join("\n") + "\n").with_context(|| format!("cannot write {}", path.display()))
}

/// `apt-get` with package lists of its own, below `work`. It leaves the machine's as they are.
pub(crate) fn apt_get(work: &Path) -> anyhow::Result<Command> {
    let mut command = Command::new(find_file("apt-get")?);
    let mut option = |name: &str, value: &Path| {
        command.arg("-o").arg(format!("{name}={}", value.display()));
    };
    option("Dir::Etc::sourcelist", &work.join("sources.list"));
    option("Dir::Etc::sourceparts", Path::new("/dev/null"));
    option("Dir::State::lists", &work.join("lists"));
    option("Dir::Cache", &work.join("cache"));
    // The user _apt may not enter the target folder.
    option("APT::Sandbox::User", Path::new("root"));
    command.current_dir(work);
    Ok(command)
}
