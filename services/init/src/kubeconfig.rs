//! Reads the kubeconfigs of the configuration.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use keelson_config::Paths;
use keelson_init_core::{Document, KubeconfigError, flatten_kubeconfig, set_exec_credential};
use serde_json::Value;

use crate::exec_credentials::{CredentialStore, Login};
use crate::yaml;

/// A kubeconfig that cannot be used or written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KubeconfigFileError {
    /// It is not a valid kubeconfig, or names something unavailable.
    #[error("invalid kubeconfig: {}", path.display())]
    Invalid { path: PathBuf, source: KubeconfigError },
    /// Its user has an exec plugin that has not returned a credential yet.
    #[error("invalid kubeconfig: {}: {field}: {command} has returned no credential yet", path.display())]
    Login { path: PathBuf, field: String, command: String },
    /// It is not YAML.
    #[error("invalid kubeconfig")]
    Yaml(#[source] yaml::ReadError),
    /// The kubeconfig for a requested certificate cannot be written.
    #[error("cannot write the kubeconfig {}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// The kubeconfig in the file of `flag`.
pub(crate) fn kubeconfig_document(flag: &'static str, path: &Path) -> Result<Document, KubeconfigFileError> {
    yaml::read(flag, path).map_err(KubeconfigFileError::Yaml)
}

/// A self-contained kubeconfig, and the exec plugin of its user.
fn flat_and_login(flag: &'static str, path: &Path) -> Result<(Value, Option<Login>), KubeconfigFileError> {
    let document = kubeconfig_document(flag, path)?;
    let mut from_disk = |path: &Path| fs::read(path).map_err(|error| error.to_string());
    let flat = flatten_kubeconfig(&document.root, Path::new(&document.folder), &mut from_disk)
        .map_err(|source| KubeconfigFileError::Invalid { path: path.to_owned(), source })?;
    let login = Login::of(&flat, &document.root);
    Ok((flat.document, login))
}

/// The exec plugin of the user of a kubeconfig, if it has one.
pub(crate) fn login(flag: &'static str, path: &Path) -> Result<Option<Login>, KubeconfigFileError> {
    flat_and_login(flag, path).map(|(_, login)| login)
}

/// A self-contained kubeconfig, with the credential from its exec plugin.
pub(crate) fn flat_kubeconfig(
    paths: &Paths,
    flag: &'static str,
    path: &Path,
) -> Result<Value, KubeconfigFileError> {
    let (mut flat, login) = flat_and_login(flag, path)?;
    let Some(login) = login else { return Ok(flat) };
    let Some((credential, generation)) = CredentialStore::read(paths).get(&login) else {
        let (field, command) = (login.exec.field, login.exec.command);
        return Err(KubeconfigFileError::Login { path: path.to_owned(), field, command });
    };
    set_exec_credential(&mut flat, &credential, &generation);
    Ok(flat)
}
