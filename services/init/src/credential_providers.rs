//! Reads the configuration of credential provider plugins and copies it for runtime-shim.
//!
//! This module only checks the syntax and that the plugins exist; runtime-shim validates the rest. Values of `env` may be
//! credentials, so they are not part of the resolved configuration, which the operator group can read.

use std::fmt;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use keelson_config::{Paths, ServiceName};
use keelson_files::Replacement;
use keelson_init_core::{
    CREDENTIAL_BIN_FLAG, CREDENTIAL_CONFIG_FLAG, CredentialProviderPaths, Document, Sourced,
    credential_config_files, credential_provider_paths,
};
use keelson_service_kit::status;
use serde_json::{Map, Value, json};

use crate::yaml;

/// Environment variables that are only meant for init (systemd.exec(5), sd_listen_fds(3)).
const INIT_ONLY: &[&str] = &[
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "MAINPID",
];

/// The content of the copy for runtime-shim.
#[derive(Clone)]
pub(crate) struct ProvidersCopy(Value);

impl fmt::Debug for ProvidersCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handover").finish_non_exhaustive()
    }
}

/// A digest of the files' content, without the content itself.
pub(crate) fn digest(copy: Option<&ProvidersCopy>) -> u64 {
    let mut hasher = DefaultHasher::new();
    copy.map(|copy| copy.0.to_string()).hash(&mut hasher);
    hasher.finish()
}

/// Why the files cannot be read.
#[derive(Debug, thiserror::Error)]
enum ReadError {
    /// The path does not exist or is not readable.
    #[error("cannot read {} that {CREDENTIAL_CONFIG_FLAG} names", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("the folder {} that {CREDENTIAL_CONFIG_FLAG} names has no file that ends in .json, .yaml or .yml", path.display())]
    NoFiles { path: PathBuf },
    #[error(transparent)]
    File(#[from] yaml::ReadError),
}

/// Reads the files in the two flags and checks that every plugin is executable; `None` if neither flag is given. The errors
/// are lines for operators.
pub(crate) fn read(
    config: Option<&str>,
    bin_dir: Option<&str>,
    cwd: &str,
) -> Result<Option<ProvidersCopy>, Vec<String>> {
    let paths = credential_provider_paths(config, bin_dir, cwd).map_err(|error| vec![error.to_string()])?;
    let Some(CredentialProviderPaths { config, bin_dir }) = paths else { return Ok(None) };
    let mut errors = Vec::new();
    let mut read = Vec::new();
    for path in files(Path::new(&config)).map_err(|error| vec![status::chain(&error)])? {
        match yaml::read_with_text(CREDENTIAL_CONFIG_FLAG, &path).map_err(ReadError::File) {
            Ok((document, text)) => {
                // These files are decoded strictly, as by a kubelet.
                let duplicate = |field: &Sourced<()>| {
                    field
                        .clone()
                        .map(|()| "…")
                        .error("this field occurs more than once in the file; keep one of them")
                };
                errors.extend(document.duplicates.iter().map(|field| duplicate(field).to_string()));
                errors.extend(missing_binaries(&document, Path::new(&bin_dir)));
                read.push(file_copy(&document, &text));
            }
            Err(error) => errors.push(status::chain(&error)),
        }
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    let copy = json!({"binDir": bin_dir, "environment": environment(), "files": read});
    Ok(Some(ProvidersCopy(copy)))
}

/// The file, or the files in the folder.
fn files(path: &Path) -> Result<Vec<PathBuf>, ReadError> {
    let fail = |source| ReadError::Read { path: path.to_owned(), source };
    if !fs::metadata(path).map_err(fail)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        if let (false, Ok(name)) = (entry.path().is_dir(), entry.file_name().into_string()) {
            names.push(name);
        }
    }
    let files = credential_config_files(names);
    if files.is_empty() {
        return Err(ReadError::NoFiles { path: path.to_owned() });
    }
    Ok(files.into_iter().map(|name| path.join(name)).collect())
}

/// The paths to watch for [`CREDENTIAL_CONFIG_FLAG`]: the path itself and, if it is a folder, its files.
pub(crate) fn watched_paths(config: &Path) -> Vec<PathBuf> {
    // Read errors are reported by `read`.
    let mut all = files(config).unwrap_or_default();
    all.push(config.to_owned());
    all
}

fn file_copy(document: &Document, text: &str) -> Value {
    json!({"path": document.file, "text": text, "config": document.root, "lines": document.lines})
}

/// A line for each provider whose binary cannot be run. runtime-shim reports names that cannot be file names.
fn missing_binaries(document: &Document, bin_dir: &Path) -> Vec<String> {
    let providers = document.root.get("providers").and_then(Value::as_array).into_iter().flatten();
    let error = |(index, provider): (usize, &Value)| {
        let name = provider.get("name")?.as_str().filter(|name| is_file_name(name))?;
        let path = bin_dir.join(name);
        let wrong = cannot_run(&path)?;
        let field = format!("providers[{index}].name");
        let name = Sourced { value: name, origin: document.origin(&field), field };
        let place = format!("{} ({CREDENTIAL_BIN_FLAG}): {wrong}", path.display());
        Some(name.error(place).to_string())
    };
    providers.enumerate().filter_map(error).collect()
}

fn is_file_name(name: &str) -> bool {
    !name.contains(['/', '\0']) && !["", ".", ".."].contains(&name)
}

/// Why this file cannot be run.
fn cannot_run(path: &Path) -> Option<String> {
    match fs::metadata(path) {
        Err(error) => Some(error.to_string()),
        Ok(found) if !found.is_file() => Some("it is not a file".to_owned()),
        Ok(found) if found.permissions().mode() & 0o111 == 0 => Some("it is not executable".to_owned()),
        Ok(_) => None,
    }
}

/// The environment for plugins, like the kubelet's own environment for a kubelet's plugins.
pub(crate) fn environment() -> Map<String, Value> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| !INIT_ONLY.contains(&name.as_str()))
        .map(|(name, value)| (name, value.into()))
        .collect()
}

/// `<run-dir>/credentials/runtime-shim/image-credential-providers.json`; runtime-shim reads it there.
fn path(paths: &Paths) -> PathBuf {
    paths.credentials(ServiceName::RuntimeShim).join("image-credential-providers.json")
}

/// Replaces the file by rename, mode 0600; removes it if there are no plugins. Its folder is one of
/// [`keelson_init_core::folders`].
///
/// # Errors
/// The run dir is not writable.
pub(crate) fn write_copy(paths: &Paths, copy: Option<&ProvidersCopy>) -> io::Result<()> {
    let (path, replacement) = (path(paths), Replacement::new().mode(0o600));
    match copy {
        Some(ProvidersCopy(value)) => replacement.write(&path, &serde_json::to_vec(value)?),
        None => replacement.remove(&path),
    }
}
