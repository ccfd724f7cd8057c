//! The configuration of credential provider plugins, read and handed to runtime-shim.
//!
//! Only the syntax is looked at here, and whether the plugins that are named are there; what else stands in the files is
//! runtime-shim's to judge. Values of `env` may be credentials, so they are none of the resolved configuration, which
//! the operator group may read.

use std::fmt;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use keelson_config::{Paths, ServiceName};
use keelson_init_core::{
    CREDENTIAL_BIN_FLAG, CREDENTIAL_CONFIG_FLAG, CredentialProviderPaths, Document, Sourced,
    credential_config_files, credential_provider_paths,
};
use keelson_service_kit::status;
use serde_json::{Map, Value, json};

use crate::{remove_if_there, yaml};

/// Variables of init that say something to init alone (systemd.exec(5), sd_listen_fds(3)).
const FOR_INIT: &[&str] = &[
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "MAINPID",
];

/// What runtime-shim gets.
#[derive(Clone)]
pub(crate) struct Handover(Value);

impl fmt::Debug for Handover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handover").finish_non_exhaustive()
    }
}

/// What tells one content of the files from another, and keeps nothing of what they say.
pub(crate) fn digest(handover: Option<&Handover>) -> u64 {
    let mut hasher = DefaultHasher::new();
    handover.map(|handover| handover.0.to_string()).hash(&mut hasher);
    hasher.finish()
}

/// Why the files cannot be taken.
#[derive(Debug, thiserror::Error)]
enum ReadError {
    /// There is nothing, or nobody may read it.
    #[error("cannot read {} that {CREDENTIAL_CONFIG_FLAG} names", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("the folder {} that {CREDENTIAL_CONFIG_FLAG} names has no file that ends in .json, .yaml or .yml", path.display())]
    Nothing { path: PathBuf },
    #[error(transparent)]
    File(#[from] yaml::ReadError),
}

/// Reads what the two flags name and looks whether every plugin can be run; nothing where neither flag is given. The
/// errors are lines for people.
pub(crate) fn read(
    config: Option<&str>,
    bin_dir: Option<&str>,
    cwd: &str,
) -> Result<Option<Handover>, Vec<String>> {
    let paths =
        credential_provider_paths(config, bin_dir, cwd).map_err(|problem| vec![problem.to_string()])?;
    let Some(CredentialProviderPaths { config, bin_dir }) = paths else { return Ok(None) };
    let mut errors = Vec::new();
    let mut read = Vec::new();
    for path in files(Path::new(&config)).map_err(|error| vec![status::chain(&error)])? {
        match yaml::read_with_text(CREDENTIAL_CONFIG_FLAG, &path).map_err(ReadError::File) {
            Ok((document, text)) => {
                // These files are decoded strictly, as a kubelet does it.
                let twice = |field: &Sourced<()>| {
                    field
                        .clone()
                        .map(|()| "…")
                        .problem("this stands in the file more than once; leave one of them")
                };
                errors.extend(document.duplicates.iter().map(|field| twice(field).to_string()));
                errors.extend(missing(&document, Path::new(&bin_dir)));
                read.push(handed_over(&document, &text));
            }
            Err(error) => errors.push(status::chain(&error)),
        }
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    let handover = json!({"binDir": bin_dir, "environment": environment(), "files": read});
    Ok(Some(Handover(handover)))
}

/// The file, or those in the folder.
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
        return Err(ReadError::Nothing { path: path.to_owned() });
    }
    Ok(files.into_iter().map(|name| path.join(name)).collect())
}

/// What counts of what [`CREDENTIAL_CONFIG_FLAG`] names: itself and, where it is a folder, the files in it.
pub(crate) fn watched(config: &Path) -> Vec<PathBuf> {
    // What cannot be read is told when it is.
    let mut all = files(config).unwrap_or_default();
    all.push(config.to_owned());
    all
}

fn handed_over(document: &Document, text: &str) -> Value {
    json!({"path": document.file, "text": text, "config": document.root, "lines": document.lines})
}

/// A line for each provider of a file whose binary cannot be run. Names that are none of a file are left to
/// runtime-shim.
fn missing(document: &Document, bin_dir: &Path) -> Vec<String> {
    let providers = document.root.get("providers").and_then(Value::as_array).into_iter().flatten();
    let problem = |(index, provider): (usize, &Value)| {
        let name = provider.get("name")?.as_str().filter(|name| is_file_name(name))?;
        let path = bin_dir.join(name);
        let wrong = cannot_run(&path)?;
        let field = format!("providers[{index}].name");
        let name = Sourced { value: name, origin: document.origin(&field), field };
        let place = format!("{} ({CREDENTIAL_BIN_FLAG}): {wrong}", path.display());
        Some(name.problem(place).to_string())
    };
    providers.enumerate().filter_map(problem).collect()
}

fn is_file_name(name: &str) -> bool {
    !name.contains(['/', '\0']) && !["", ".", ".."].contains(&name)
}

/// Why this cannot be run.
fn cannot_run(path: &Path) -> Option<String> {
    match fs::metadata(path) {
        Err(error) => Some(error.to_string()),
        Ok(found) if !found.is_file() => Some("it is no file".to_owned()),
        Ok(found) if found.permissions().mode() & 0o111 == 0 => Some("it is not executable".to_owned()),
        Ok(_) => None,
    }
}

/// What plugins have in their environment, as those of a kubelet have the kubelet's.
pub(crate) fn environment() -> Map<String, Value> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| !FOR_INIT.contains(&name.as_str()))
        .map(|(name, value)| (name, value.into()))
        .collect()
}

/// `<run-dir>/credentials/runtime-shim/image-credential-providers.json`; runtime-shim knows it by this name.
fn path(paths: &Paths) -> PathBuf {
    paths.credentials(ServiceName::RuntimeShim).join("image-credential-providers.json")
}

/// Replaces the file by rename, mode 0600; without plugins there is none. Its folder is one of
/// [`keelson_init_core::folders`].
///
/// # Errors
/// The run dir cannot be written.
pub(crate) fn hand_over(paths: &Paths, handover: Option<&Handover>) -> io::Result<()> {
    let path = path(paths);
    let temporary = path.with_extension("json.new");
    // An init that was killed may have left it.
    remove_if_there(&temporary)?;
    let Some(Handover(value)) = handover else { return remove_if_there(&path) };
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(&serde_json::to_vec(value)?)?;
    fs::rename(&temporary, path)
}
