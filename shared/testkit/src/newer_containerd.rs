//! A newer containerd than Debian 12's, for tests of what that one cannot do: user namespaces, image volumes. It is made
//! once of the packages of a newer Debian and kept below the target folder.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use rustix::fs::{FlockOperation, flock};

use crate::Component;
use crate::build_cache::{KEYRING, MIRROR, apt_get, cache_dir, execute, remove, write_sources};

/// The release of Debian that has it.
const SUITE: &str = "forky";
/// containerd with runc, and the libraries that they need of the same release.
const PACKAGES: [&str; 4] = ["containerd", "runc", "libc6", "libseccomp2"];
/// The programs, below the root of the packages.
const PROGRAMS: [&str; 4] =
    ["usr/bin/containerd", "usr/bin/ctr", "usr/bin/containerd-shim-runc-v2", "usr/sbin/runc"];
/// The folder of the libraries there, and its file that loads them.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const LOADER: &str = "ld-linux-x86-64.so.2";

/// The folder with `containerd`, `ctr`, the shim and `runc`, for [`Options::bin_dir`](crate::Options). They are made the
/// first time, which needs Debian's mirror. Whoever asks meanwhile waits.
///
/// # Errors
/// The mirror does not answer, or a package lacks a program.
pub fn newer_containerd() -> anyhow::Result<PathBuf> {
    let cache = cache_dir()?;
    let folder = cache.join(format!("containerd-{SUITE}"));
    let lock_path = cache.join(format!("containerd-{SUITE}.lock"));
    let lock = File::create(&lock_path).with_context(|| format!("cannot make {}", lock_path.display()))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    let programs = folder.join("bin");
    if !programs.is_dir() {
        make(&folder).with_context(|| format!("cannot make a containerd of Debian {SUITE}"))?;
    }
    Ok(programs)
}

fn make(folder: &Path) -> anyhow::Result<()> {
    let patchelf = Component::Patchelf.find()?;
    let work = folder.with_extension("work");
    // One that was killed has left it.
    remove(&work)?;
    remove(folder)?;
    let mirror = std::env::var("MIRROR").unwrap_or_else(|_| MIRROR.to_owned());
    write_sources(&work, &[format!("deb [signed-by={KEYRING}] {mirror} {SUITE} main")])?;
    execute(apt_get(&work)?.args(["--quiet", "update"]))?;
    execute(apt_get(&work)?.args(["--quiet", "download"]).args(PACKAGES))?;
    let root = work.join("root");
    for entry in fs::read_dir(&work)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            execute(Command::new("dpkg").arg("--extract").arg(&path).arg(&root))?;
        }
    }
    let libraries = folder.join("lib");
    fs::create_dir_all(folder)?;
    fs::rename(root.join(LIBRARIES), &libraries).context("the packages have no libraries")?;
    let unfinished = work.join("bin");
    fs::create_dir(&unfinished)?;
    for program in PROGRAMS {
        let (from, name) =
            (root.join(program), Path::new(program).file_name().context("a program has a name")?);
        ensure!(from.is_file(), "the packages have no {program}");
        let to = unfinished.join(name);
        fs::rename(&from, &to)?;
        let mut patch = Command::new(&patchelf);
        patch.arg("--set-interpreter").arg(libraries.join(LOADER)).arg("--set-rpath").arg(&libraries);
        execute(patch.arg(&to))?;
    }
    fs::rename(&unfinished, folder.join("bin"))?;
    remove(&work)
}
