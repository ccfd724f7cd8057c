//! What init hands over: the configuration of the plugins, their environment and where their binaries are.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use keelson_config::{Paths, ServiceName};
use keelson_runtime_shim_core::credential_config::{ConfigFile, Configured, Problem, read};
use keelson_service_kit::writable_by_others;
use serde::Deserialize;
use tokio::task::JoinError;

/// Why the plugins cannot be used as they are configured.
#[derive(Debug, thiserror::Error)]
pub enum NotUsable {
    /// What init has written cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Init writes something else. The decoder's error may repeat a part of the text.
    #[error("{} is not what keelson-init writes; use the binaries of one release", path.display())]
    Decode {
        /// The file.
        path: PathBuf,
    },
    /// Something in the configuration does not do.
    #[error("the configuration of credential providers is not usable: {}", join(.0))]
    Config(Vec<Problem>),
    /// Reading it has come to no end.
    #[error("the configuration of credential providers was not read to its end")]
    Lost {
        /// The cause.
        source: JoinError,
    },
}

/// What init writes.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Handover {
    bin_dir: PathBuf,
    environment: BTreeMap<String, String>,
    files: Vec<ConfigFile>,
}

/// What init has written, once it was found good.
pub(super) struct Given {
    /// The folder of the binaries.
    pub bin_dir: PathBuf,
    /// The environment of init.
    pub environment: BTreeMap<String, String>,
    /// The plugins.
    pub configured: Configured,
    /// Why those whose binaries are not there cannot be run, by their names.
    pub missing: BTreeMap<String, String>,
    /// Which binaries others may write, themselves or by way of their folder, by their names.
    pub writable: BTreeMap<String, String>,
}

fn join(problems: &[Problem]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// `<run-dir>/credentials/runtime-shim/image-credential-providers.json`, as init writes it.
pub(super) fn handover_path(paths: &Paths) -> PathBuf {
    let folder = paths.run_dir.join("credentials").join(ServiceName::RuntimeShim.as_str());
    folder.join("image-credential-providers.json")
}

/// Reads what init has written; `None` where it has written nothing. Blocks.
///
/// # Errors
/// It cannot be read, is none of init's, or something in it does not do.
pub(super) fn read_handover(path: &Path) -> Result<Option<Given>, NotUsable> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(|source| NotUsable::Read { path: path.to_owned(), source })?,
    };
    let Handover { bin_dir, environment, files } =
        serde_json::from_slice(&text).map_err(|_| NotUsable::Decode { path: path.to_owned() })?;
    let configured = read(&files).map_err(NotUsable::Config)?;
    let names = configured.providers.iter().map(|provider| &provider.name);
    let of_each = |of: &dyn Fn(&Path) -> Option<String>| {
        names.clone().filter_map(|name| Some((name.clone(), of(&bin_dir.join(name))?))).collect()
    };
    let missing = of_each(&cannot_run);
    let writable = of_each(&|path| writable_by_others(path).or_else(|| writable_by_others(&bin_dir)));
    Ok(Some(Given { bin_dir, environment, configured, missing, writable }))
}

/// Why this cannot be run.
fn cannot_run(path: &Path) -> Option<String> {
    let wrong = match fs::metadata(path) {
        Err(error) => error.to_string(),
        Ok(found) if !found.is_file() => "it is no file".to_owned(),
        Ok(found) if found.permissions().mode() & 0o111 == 0 => "it is not executable".to_owned(),
        Ok(_) => return None,
    };
    Some(format!("{} (--image-credential-provider-bin-dir): {wrong}", path.display()))
}
