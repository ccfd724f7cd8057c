//! Runs the exec plugins of kubeconfig users (`users[].user.exec`; docs/adr/0015-who-runs-login-programs.md).
//!
//! The loop `exec-login` runs a plugin when there is no credential yet, shortly before the credential expires, and when a
//! service reports that the API server rejects it. The answer is stored in `<run-dir>/init/exec-credentials.json`, so that a
//! restarted init need not log in again. [`crate::kubeconfig`] inserts it into the kubeconfigs of the services.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::time::Duration;

use keelson_config::{Config, ControlPlane, CredentialRefusal, Paths};
use keelson_init_core::{EXEC_INFO, ExecAnswerError, ExecCredential};
use keelson_service_kit::plugin::{Program, RunError};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Backoff, Context, LoopHandle, now_unix_nanos};
use serde_json::Value;

use crate::credential_copies::{self, CONTROL_PLANE_CLIENTS};
use crate::credential_providers::environment;
use crate::exec_credentials::{CredentialStore, Login, StoreCredentialError, StoredCredential};
use crate::kubeconfig;

/// The timeout of a plugin.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How often the loop checks whether a plugin has to run.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
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
    #[error(transparent)]
    Store(#[from] StoreCredentialError),
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
    let one = |(flag, path): (&'static str, Option<&Path>)| kubeconfig::login(flag, path?).ok().flatten();
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
