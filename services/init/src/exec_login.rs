//! Runs the exec plugins of kubeconfig users (`users[].user.exec`; docs/adr/0015-who-runs-login-programs.md).
//!
//! The loop `exec-login` runs a plugin when there is no credential yet, shortly before the credential expires, and when a
//! service reports that the API server rejects it. The answer is stored in `<run-dir>/init/exec-credentials.json`, so that a
//! restarted init need not log in again. [`crate::credential_copies`] inserts it into the kubeconfigs of the services.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_config::{Config, ControlPlane, CredentialRefusal, Paths, ServiceName};
use keelson_init_core::{EXEC_INFO, ExecAnswerError, ExecCredential, ExecLogin, FlatKubeconfig, refresh_at};
use keelson_service_kit::plugin::{Program, RunError};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Backoff, Context, LoopHandle, now_unix_nanos};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::credential_copies::{self, CONTROL_PLANE_CLIENTS};
use crate::credential_providers::environment;

/// The timeout of a plugin.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How often the loop checks whether a plugin has to run.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// After a rejection, the same plugin does not run again for this long, in seconds: its new credential may be rejected too.
const MIN_RENEWAL_INTERVAL: i64 = 10;
/// The minimum and maximum delay before a failed plugin is retried.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// The condition that reports a failed plugin.
const CONDITION: &str = "kubeconfig login";

/// Why there is no credential.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoginError {
    /// The plugin is not installed.
    #[error("{field}: executable {command} not found{hint}")]
    Missing { field: String, command: String, hint: String },
    /// It could not be run, timed out, or failed.
    #[error("{field}: {command}")]
    Run { field: String, command: String, source: RunError },
    /// Its answer is not a credential.
    #[error("{field}: {command}")]
    Answer { field: String, command: String, source: ExecAnswerError },
    /// The credential could not be stored.
    #[error("cannot write {}", path.display())]
    Store { path: PathBuf, source: io::Error },
}

/// A stored credential.
#[derive(Clone, Serialize, Deserialize)]
struct StoredCredential {
    /// Nanoseconds since 1970; identifies the credential.
    issued: i64,
    token: Option<String>,
    certificates: Option<String>,
    key: Option<String>,
    /// Seconds since 1970.
    expires: Option<i64>,
}

impl StoredCredential {
    fn new(credential: ExecCredential, issued: i64) -> Self {
        let (certificates, key) = credential.pair.unzip();
        Self { issued, token: credential.token, certificates, key, expires: credential.expires }
    }

    fn credential(&self) -> ExecCredential {
        let pair = self.certificates.clone().zip(self.key.clone());
        ExecCredential { token: self.token.clone(), pair, expires: self.expires }
    }

    fn generation(&self) -> String {
        self.issued.to_string()
    }

    fn issued_seconds(&self) -> i64 {
        self.issued / 1_000_000_000
    }
}

/// A plugin to run, and its request.
pub(crate) struct Login {
    pub(crate) exec: ExecLogin,
    /// The value of [`EXEC_INFO`].
    info: String,
    /// A hash that identifies the plugin with its arguments and cluster.
    key: String,
}

impl Login {
    /// The login of a kubeconfig; `None` if its user has no plugin.
    pub(crate) fn of(flat: &FlatKubeconfig, root: &Map<String, Value>) -> Option<Self> {
        let exec = flat.exec.clone()?;
        let info = exec.info(&flat.document, root);
        let mut hasher = DefaultHasher::new();
        (&exec.command, &exec.args, &exec.env, &info).hash(&mut hasher);
        Some(Self { key: format!("{:016x}", hasher.finish()), info, exec })
    }
}

/// The credentials from plugins.
pub(crate) struct CredentialStore {
    path: PathBuf,
    stored: BTreeMap<String, StoredCredential>,
}

impl CredentialStore {
    /// Reads the credentials in the run dir. Unreadable ones are requested again.
    pub(crate) fn read(paths: &Paths) -> Self {
        let path = paths.socket_dir(ServiceName::Init).join("exec-credentials.json");
        let read = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Self { stored: read.unwrap_or_default(), path }
    }

    /// The credential for a login, and its generation.
    pub(crate) fn get(&self, login: &Login) -> Option<(ExecCredential, String)> {
        let stored = self.stored.get(&login.key)?;
        Some((stored.credential(), stored.generation()))
    }

    /// Stores a credential and removes those of unused logins.
    fn put(&mut self, login: &Login, stored: StoredCredential, in_use: &[Login]) -> Result<(), LoginError> {
        self.stored.insert(login.key.clone(), stored);
        self.stored.retain(|key, _| in_use.iter().any(|login| login.key == *key));
        self.write().map_err(|source| LoginError::Store { path: self.path.clone(), source })
    }

    /// Replaces the file by rename, mode 0600.
    fn write(&self) -> io::Result<()> {
        let temporary = self.path.with_extension("json.new");
        crate::remove_if_exists(&temporary)?;
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(&serde_json::to_vec(&self.stored)?)?;
        fs::rename(&temporary, &self.path)
    }

    /// Whether the plugin has to run at `now`, in seconds since 1970; `refused` are the generations that services report as
    /// rejected.
    fn is_due(&self, login: &Login, refused: &[String], now: i64) -> bool {
        let Some(stored) = self.stored.get(&login.key) else { return true };
        let ends = refresh_at(stored.issued_seconds(), stored.expires).is_some_and(|at| at <= now);
        let is_refused = refused.contains(&stored.generation());
        // A clock that was set back must not delay a renewal.
        let age = now - stored.issued_seconds();
        ends || (is_refused && !(0..MIN_RENEWAL_INTERVAL).contains(&age))
    }
}

/// The generations of credentials that services report as rejected.
fn refused(paths: &Paths) -> Vec<String> {
    CONTROL_PLANE_CLIENTS.into_iter().filter_map(|service| CredentialRefusal::read(paths, service)).collect()
}

/// The logins in the kubeconfigs of the configuration. Errors in these files are reported by the module that copies them.
fn logins(config: &Config) -> Vec<Login> {
    let ControlPlane::Kubernetes(api) = &config.control_plane else { return Vec::new() };
    let bootstrap = api.certificates.bootstrap_kubeconfig.as_deref();
    let files = [("--kubeconfig", Some(api.kubeconfig.as_path())), ("--bootstrap-kubeconfig", bootstrap)];
    let one =
        |(flag, path): (&'static str, Option<&Path>)| credential_copies::login(flag, path?).ok().flatten();
    files.into_iter().filter_map(one).collect()
}

/// Runs a plugin and reads its answer.
async fn log_in(login: &Login) -> Result<ExecCredential, LoginError> {
    let Login { exec, info, .. } = login;
    let (field, command) = (exec.field.clone(), exec.command.clone());
    let text = |(name, value): (String, Value)| {
        Some((OsString::from(name), OsString::from(value.as_str()?.to_owned())))
    };
    let mut env: BTreeMap<OsString, OsString> = environment().into_iter().filter_map(text).collect();
    env.extend(exec.env.iter().map(|(name, value)| (name.into(), value.into())));
    env.insert(EXEC_INFO.into(), info.into());
    let program = Program { path: command.clone().into(), args: exec.args.clone(), env };
    let output = match program.run(&[], TIMEOUT).await {
        Ok(output) => output,
        Err(RunError::Start { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            let hint = match exec.install_hint.trim() {
                "" => String::new(),
                hint => format!(": {hint}"),
            };
            return Err(LoginError::Missing { field, command, hint });
        }
        Err(source) => return Err(LoginError::Run { field, command, source }),
    };
    exec.read_answer(&output).map_err(|source| LoginError::Answer { field, command, source })
}

/// Runs the plugins that are due; returns whether there is a new credential.
async fn run_due_plugins(
    config: &Config,
    in_use: &[Login],
    heartbeat: &LoopHandle,
) -> Result<bool, LoginError> {
    let mut credentials = CredentialStore::read(&config.paths);
    let (refused, mut any) = (refused(&config.paths), false);
    for login in in_use {
        if !credentials.is_due(login, &refused, now_unix_nanos() / 1_000_000_000) {
            continue;
        }
        let credential = heartbeat.while_at(log_in(login)).await?;
        credentials.put(login, StoredCredential::new(credential, now_unix_nanos()), in_use)?;
        tracing::info!(
            event = "exec_login",
            command = login.exec.command,
            "logged in to the API server with an exec plugin"
        );
        any = true;
    }
    Ok(any)
}

/// Keeps the credentials valid until the shutdown.
pub(crate) async fn run(context: Context) {
    let heartbeat = context.progress.register("exec-login");
    let mut backoff = Backoff::new(RETRY.0, RETRY.1);
    let mut wait = Duration::ZERO;
    loop {
        heartbeat.tick();
        // Cancel-safe: it only sleeps.
        tokio::select! {
            () = context.shutdown.cancelled() => return,
            () = heartbeat.while_at(tokio::time::sleep(wait)) => {}
        }
        let config = std::sync::Arc::clone(&context.config);
        let Ok(in_use) = tokio::task::spawn_blocking(move || logins(&config)).await else { return };
        if in_use.is_empty() {
            context.progress.condition(CONDITION, Ok(()));
            wait = LoopHandle::HEARTBEAT;
            continue;
        }
        // Cancel-safe: dropping the future kills the plugin.
        let done = tokio::select! {
            () = context.shutdown.cancelled() => return,
            done = run_due_plugins(&context.config, &in_use, &heartbeat) => done,
        };
        wait = match done {
            Ok(any) => {
                backoff.reset();
                context.progress.condition(CONDITION, Ok(()));
                if any {
                    let config = std::sync::Arc::clone(&context.config);
                    let Ok(report) =
                        tokio::task::spawn_blocking(move || credential_copies::update_copies(&config)).await
                    else {
                        return;
                    };
                    report.publish(&context);
                }
                CHECK_INTERVAL
            }
            Err(error) => {
                let text = chain(&error);
                tracing::warn!(
                    event = "exec_login_failed",
                    error = text,
                    "cannot log in to the API server; will retry"
                );
                context.progress.condition(CONDITION, Err(text));
                backoff.next_delay()
            }
        };
    }
}

#[cfg(test)]
#[path = "exec_login_tests.rs"]
mod tests;
