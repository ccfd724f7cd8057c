//! hostPath volumes: the type of the file at the path, and its creation.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use keelson_volume_manager_core::hostpath::{self, CheckResult, FileKind, TypeCheck};

use super::error::{StoreError, io_error};

/// Checks that a hostPath has the type that the volume asks for, and creates what an `…OrCreate` type asks for.
pub(super) fn check_host_path(path: &str, kind: &str) -> Result<(), StoreError> {
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
