//! hostPath volumes: the type of the file at the path, and its creation.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use keelson_volume_manager_core::hostpath::{self, CheckResult, FileKind, TypeCheck};

use super::error::{StoreError, io_error};
use crate::mounter::blocking_for;

/// Checks a hostPath as [`check_type`] does, and that it leads not into `run_dir`, the folder of the agent's sockets. Its file
/// system may hang: the check is then abandoned at its deadline, and refused until it has ended.
pub(super) async fn check_host_path(run_dir: &Path, path: &str, kind: &str) -> Result<(), StoreError> {
    let work = {
        let (run_dir, path, kind) = (run_dir.to_owned(), path.to_owned(), kind.to_owned());
        move || Ok(check_type(&path, &kind).and_then(|()| reject_link_into(&run_dir, &path)))
    };
    let checked = blocking_for(&format!("hostPath {path}"), &format!("look at {path}"), work).await;
    checked.map_err(|source| StoreError::CheckHostPath { path: path.to_owned(), source })?
}

fn reject_link_into(run_dir: &Path, path: &str) -> Result<(), StoreError> {
    match fs::canonicalize(path) {
        Ok(resolves) => Ok(hostpath::reject_link_into(run_dir, path, &resolves)?),
        // The path does not exist or cannot be resolved. The runtime creates a folder there or reports an error.
        Err(_) => Ok(()),
    }
}

/// Checks that a hostPath has the type that the volume asks for, and creates what an `…OrCreate` type asks for.
fn check_type(path: &str, kind: &str) -> Result<(), StoreError> {
    if hostpath::type_check(path, kind)? == TypeCheck::Skipped {
        return Ok(());
    }
    match hostpath::check_type(path, kind, file_kind(Path::new(path))?)? {
        CheckResult::Matches => return Ok(()),
        CheckResult::CreateDirectory => fs::DirBuilder::new().recursive(true).mode(0o755).create(path),
        CheckResult::CreateFile => {
            match fs::OpenOptions::new().write(true).create_new(true).mode(0o644).open(path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                other => other.map(drop),
            }
        }
    }
    .map_err(|source| io_error("create", Path::new(path), source))?;
    hostpath::check_type(path, kind, file_kind(Path::new(path))?)?;
    Ok(())
}

fn file_kind(path: &Path) -> Result<FileKind, StoreError> {
    let kind = match fs::metadata(path) {
        Ok(meta) => meta.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(FileKind::Missing),
        Err(source) => return Err(io_error("stat", path, source)),
    };
    Ok(if kind.is_dir() {
        FileKind::Directory
    } else if kind.is_file() {
        FileKind::File
    } else if kind.is_socket() {
        FileKind::Socket
    } else if kind.is_char_device() {
        FileKind::CharDevice
    } else if kind.is_block_device() {
        FileKind::BlockDevice
    } else {
        FileKind::Other
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::mounter::DEADLINE;

    #[tokio::test(start_paused = true)]
    async fn a_host_path_that_hangs_is_refused_and_another_one_is_checked() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let (hanging, healthy) = (at("hanging"), at("healthy"));
        let (_end, ended) = channel::<()>();
        let (key, what) = (format!("hostPath {hanging}"), format!("look at {hanging}"));
        let hung = blocking_for(&key, &what, move || ended.recv().map_err(io::Error::other));
        tokio::pin!(hung);
        assert!(futures_util::poll!(&mut hung).is_pending());
        tokio::time::advance(DEADLINE).await;
        assert!(hung.await.is_err());
        // Past the moment in which its end would be awaited.
        tokio::time::advance(DEADLINE).await;
        let error = check_host_path(dir.path(), &hanging, "").await.unwrap_err();
        assert!(!error.is_permanent() && error.to_string().contains(&hanging), "{error}");
        let why = std::error::Error::source(&error).unwrap().to_string();
        assert!(why.contains("look at") && why.contains("has not ended for"), "{why}");
        let run = dir.path().join("run");
        assert!(check_host_path(&run, &healthy, "DirectoryOrCreate").await.is_ok());
        assert!(Path::new(&healthy).is_dir());
        assert!(matches!(check_host_path(&run, &healthy, "File").await, Err(StoreError::HostPath(_))));
    }
}
