//! The files of the source `manifest`. All functions here block.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use keelson_files::{Replacement, create_private_folder};
use keelson_pod_config_core::manifest::Kind;

/// The file of an object.
pub fn file_name(kind: Kind, namespace: &str, name: &str) -> String {
    match kind {
        Kind::Pod => format!("{namespace}_{name}.json"),
        // Names have no underscore, so these never collide with the file of a pod.
        Kind::Secret => format!("{namespace}_{name}_secret.json"),
        Kind::ConfigMap => format!("{namespace}_{name}_configmap.json"),
        Kind::PersistentVolumeClaim => format!("{namespace}_{name}_persistentvolumeclaim.json"),
        // It has no namespace: the name begins with an underscore, as that of no other object.
        Kind::PersistentVolume => format!("_{name}_persistentvolume.json"),
    }
}

/// Replaces the file by rename after fsync. Returns `created`, `configured` or `unchanged`.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<&'static str> {
    let result = match fs::read(path) {
        Ok(old) if old == bytes => return Ok("unchanged"),
        Ok(_) => "configured",
        Err(error) if error.kind() == ErrorKind::NotFound => "created",
        Err(error) => return Err(error),
    };
    create_private_folder(path.parent().unwrap_or(Path::new(".")))?;
    // A name that is ignored as a manifest, in case the service dies before the rename, and short, because that of a manifest
    // may have the maximum length. Manifests are stored one at a time.
    Replacement::new().mode(0o600).durable().temporary_name(".manifest.tmp").write(path, bytes)?;
    Ok(result)
}

/// Removes the file, also over a crash of the machine. A missing one is no error.
pub fn remove(path: &Path) -> Result<(), (PathBuf, io::Error)> {
    let removed = match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => {
            File::open(path.parent().unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all())
        }
    };
    removed.map_err(|error| (path.to_owned(), error))
}
