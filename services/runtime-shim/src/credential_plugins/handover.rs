//! The file from init: the configuration of the plugins, their environment and the folder of their binaries.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use keelson_config::{Paths, ServiceName};
use keelson_runtime_shim_core::credential_config::{
    ConfigError, ConfigFile, CredentialProviderConfig, validate,
};
use keelson_service_kit::writable_by_others;
use serde::Deserialize;
use tokio::task::JoinError;

/// Why the plugins cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum HandoverError {
    /// The file from init cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file has another format. The decoder's error is dropped, because it may repeat a part of the text.
    #[error("{} is not what keelson-init writes; use the binaries of one release", path.display())]
    Decode {
        /// The file.
        path: PathBuf,
    },
    /// The configuration is not valid.
    #[error("the configuration of credential providers is not valid: {}", join(.0))]
    Config(Vec<ConfigError>),
    /// The blocking task that reads the file panicked or was cancelled.
    #[error("reading the configuration of credential providers was aborted")]
    Lost {
        /// The cause.
        source: JoinError,
    },
}

/// The format of the file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Handover {
    bin_dir: PathBuf,
    environment: BTreeMap<String, String>,
    files: Vec<ConfigFile>,
}

/// The validated content of the file.
pub(super) struct LoadedProviders {
    /// The folder of the binaries.
    pub bin_dir: PathBuf,
    /// The environment of init.
    pub environment: BTreeMap<String, String>,
    /// The plugins.
    pub config: CredentialProviderConfig,
    /// Plugins that cannot be run, by name, with the reason.
    pub missing: BTreeMap<String, String>,
    /// Plugins whose binary or folder users other than root may write, by name, with the file.
    pub writable: BTreeMap<String, String>,
}

fn join(problems: &[ConfigError]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// The path of the file: `<run-dir>/credentials/runtime-shim/image-credential-providers.json`.
pub(super) fn handover_path(paths: &Paths) -> PathBuf {
    let folder = paths.run_dir.join("credentials").join(ServiceName::RuntimeShim.as_str());
    folder.join("image-credential-providers.json")
}

/// Reads and validates the file; `None` if it does not exist. Blocks.
///
/// # Errors
/// See [`HandoverError`].
pub(super) fn read_handover(path: &Path) -> Result<Option<LoadedProviders>, HandoverError> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(|source| HandoverError::Read { path: path.to_owned(), source })?,
    };
    let Handover { bin_dir, environment, files } =
        serde_json::from_slice(&text).map_err(|_| HandoverError::Decode { path: path.to_owned() })?;
    let config = validate(&files).map_err(HandoverError::Config)?;
    let names = config.providers.iter().map(|provider| &provider.name);
    let for_each_name = |of: &dyn Fn(&Path) -> Option<String>| {
        names.clone().filter_map(|name| Some((name.clone(), of(&bin_dir.join(name))?))).collect()
    };
    let missing = for_each_name(&not_runnable_reason);
    let writable = for_each_name(&|path| writable_by_others(path).or_else(|| writable_by_others(&bin_dir)));
    Ok(Some(LoadedProviders { bin_dir, environment, config, missing, writable }))
}

/// Why a binary cannot be run; `None` if it can.
fn not_runnable_reason(path: &Path) -> Option<String> {
    let reason = match fs::metadata(path) {
        Err(error) => error.to_string(),
        Ok(found) if !found.is_file() => "it is not a file".to_owned(),
        Ok(found) if found.permissions().mode() & 0o111 == 0 => "it is not executable".to_owned(),
        Ok(_) => return None,
    };
    Some(format!("{} (--image-credential-provider-bin-dir): {reason}", path.display()))
}
