//! Applies changed configuration files while the agent runs (architecture §7): `--config`, the files of `--config-dir`,
//! `--keelson-config` and `--image-credential-provider-config`.
//!
//! They are checked with every heartbeat. Errors in them are reported, and the configuration in force stays. Live values are
//! written for the running services. All other changes are pending, and named by the condition, until a restart of an
//! affected service is requested, which also restarts the other affected ones. `config.json` always has the configuration in
//! force, so a service that is restarted for another reason agrees with the others.
//!
//! With a control plane that may assign a configuration, changed files are not applied: they have lower precedence than the
//! key, and only a start of the agent merges both.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use keelson_config::{Config, ConfigExtras, ServiceName, feature_gates, kubelet_configuration};
use keelson_init_core::{
    ActiveConfig, CREDENTIAL_CONFIG_FLAG, PendingChanges, Resolved, ServiceState, apply_live, pending_changes,
};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, LoopHandle, Progress};
use serde_json::{Map, Value};
use tokio::sync::Mutex;

use crate::cli::Cli;
use crate::credential_copies::copy_manifest_headers;
use crate::credential_providers::{self, ProvidersCopy};
use crate::supervisor::Services;
use crate::{StartInputs, drop_ins, log_notes, read_start_inputs, store_config, write_providers_copy};

/// The condition that reports errors in changed files, or pending changes.
const CONDITION: &str = "configuration files";
/// How long files must be unchanged before they are read: an editor writes more than once.
const QUIET_PERIOD: Duration = Duration::from_millis(500);
/// The maximum number of checks for that.
const MAX_CHECKS: u32 = 10;
/// The end of messages about files with errors.
const UNCHANGED: &str = "the previous configuration stays in force";

/// Identifies a state of the files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stamp(Vec<(PathBuf, Option<[i64; 5]>)>);

impl Stamp {
    pub(crate) fn of(cli: &Cli) -> Self {
        let mut files: Vec<PathBuf> = [cli.config(), cli.keelson_config()].into_iter().flatten().collect();
        if let Some(folder) = cli.config_dir() {
            files.extend(drop_ins::files(&folder));
            files.push(folder);
        }
        let providers = cli.image_credential_provider_config().filter(|path| !path.is_empty());
        files.extend(
            providers.into_iter().flat_map(|path| credential_providers::watched_paths(Path::new(&path))),
        );
        let stamp = |path: &Path| {
            let meta = std::fs::metadata(path).ok()?;
            let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
            Some([
                number(meta.ino()),
                number(meta.size()),
                meta.mtime(),
                meta.mtime_nsec(),
                meta.ctime_nsec(),
            ])
        };
        Self(files.into_iter().map(|path| (path.clone(), stamp(&path))).collect())
    }
}

/// The state of the files, and what of them is in force.
#[derive(Debug)]
struct State {
    cli: Arc<Cli>,
    config: Arc<Config>,
    seen: Stamp,
    /// A digest of the configuration of credential providers in force.
    providers: u64,
    /// The content of the files, while parts of it are pending.
    pending: Option<Box<PendingFiles>>,
    /// A digest of the files at the start if a control plane may assign a configuration.
    assigned_digest: Option<u64>,
}

/// Changes that wait for a restart of services.
#[derive(Debug)]
struct PendingFiles {
    resolved: Resolved,
    providers: Option<ProvidersCopy>,
    changes: PendingChanges,
}

/// Watches the files and applies pending changes.
#[derive(Debug, Clone)]
pub(crate) struct Reload {
    context: Context,
    state: Arc<Mutex<State>>,
}

impl Reload {
    /// For an agent that has just started with the files of `cli` in the state `seen`.
    pub(crate) fn new(context: &Context, cli: Cli, seen: Stamp, providers: Option<&ProvidersCopy>) -> Self {
        let (config, providers) = (Arc::clone(&context.config), credential_providers::digest(providers));
        let assigned_digest =
            config.control_plane.may_assign_a_configuration().then(|| digest(&config, providers));
        let state = State { seen, cli: Arc::new(cli), config, providers, pending: None, assigned_digest };
        Self { context: context.clone(), state: Arc::new(Mutex::new(state)) }
    }

    /// Watches the files until the shutdown, and publishes the state of init itself in `services`.
    pub(crate) async fn run(self, services: Services) {
        let heartbeat = self.context.progress.register("configuration-files");
        let shutdown = self.context.shutdown.clone();
        loop {
            heartbeat.tick();
            publish_own_state(&services, &self.context.progress);
            // Cancel-safe: it only sleeps.
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
            }
            self.check().await;
        }
    }

    /// Reads the files if they have changed.
    async fn check(&self) {
        let mut state = self.state.lock().await;
        let cli = Arc::clone(&state.cli);
        let mut stamp = stamp(&cli).await;
        if stamp == state.seen {
            return;
        }
        for _ in 0..MAX_CHECKS {
            tokio::time::sleep(QUIET_PERIOD).await;
            let newer = self::stamp(&cli).await;
            if newer == stamp {
                break;
            }
            stamp = newer;
        }
        let read = tokio::task::spawn_blocking(move || read_start_inputs(&cli)).await;
        let Ok(read) = read else { return };
        // Earlier pending changes are outdated.
        let had_pending = state.pending.take().is_some();
        let condition = match read {
            Ok(inputs) => state.apply_files(inputs, &self.context),
            Err(mut errors) => {
                errors.extend(had_pending.then(|| state.clear_pending().err()).flatten());
                Err(format!("{}; {UNCHANGED}", errors.join("; ")))
            }
        };
        // Retry files that could not be applied: the cause may be in another file.
        if condition.is_ok() {
            state.seen = stamp;
        }
        self.context.progress.condition(CONDITION, condition.unwrap_or_else(Err));
    }

    /// Applies the pending changes if a restart of `service` does so. Returns the other services to restart.
    ///
    /// # Errors
    /// The files cannot be written.
    pub(crate) async fn apply_pending(&self, service: ServiceName) -> Result<BTreeSet<ServiceName>, String> {
        let mut state = self.state.lock().await;
        let applies = state.pending.as_ref().is_some_and(|new| new.changes.applies_on_restart_of(service));
        let Some(new) = state.pending.take_if(|_| applies) else { return Ok(BTreeSet::new()) };
        let config = state.stamped(new.resolved.config.clone());
        if let Err(error) = write_pending(&config, &new) {
            state.pending = Some(new);
            return Err(format!("{error:#}; {UNCHANGED}"));
        }
        state.providers = credential_providers::digest(new.providers.as_ref());
        let changes = new.changes;
        tracing::info!("applied changed configuration files: {}", changes.fields.join(", "));
        self.context.live.take(&config);
        self.context.progress.condition(CONDITION, Ok(()));
        let mut others = changes.services;
        others.remove(&service);
        Ok(others)
    }
}

impl State {
    /// Keeps the resolution time, which identifies the start of the agent, although values are newer.
    fn stamped(&self, config: Config) -> Config {
        Config { resolved_unix_nanos: self.config.resolved_unix_nanos, ..config }
    }

    /// Applies valid files; returns the condition.
    ///
    /// # Errors
    /// The configuration in force cannot be read or written.
    fn apply_files(&mut self, inputs: StartInputs, context: &Context) -> Result<Result<(), String>, String> {
        let StartInputs { resolved: new, providers, .. } = inputs;
        let digest_of_providers = credential_providers::digest(providers.as_ref());
        if let Some(at_start) = self.assigned_digest {
            return Ok(if digest(&new.config, digest_of_providers) == at_start {
                Ok(())
            } else {
                Err("the configuration files have changed; restart the agent to apply them".to_owned())
            });
        }
        let before = in_force(&self.config)?;
        let live = apply_live(&before, &new);
        let keelson_path = self.cli.keelson_config().map(|path| path.display().to_string());
        let mut pending = pending_changes(&live, &new, keelson_path.as_deref());
        if digest_of_providers != self.providers {
            pending.fields.push(CREDENTIAL_CONFIG_FLAG.to_owned());
            pending.services.insert(ServiceName::RuntimeShim);
        }
        let config = self.stamped(live.config.clone());
        write(&config, extras(&live, Some(&pending.values)))?;
        // Headers are not part of a field. Those for another URL are pending with it.
        if new.config.sources.static_pod_url == before.config.sources.static_pod_url {
            copy_manifest_headers(&new.config).map_err(|error| format!("{}; {UNCHANGED}", chain(&error)))?;
        }
        log_notes(&new.notes);
        if context.live.take(&config) {
            tracing::info!("applied the live values of changed configuration files");
        }
        let condition = pending.text().map_or(Ok(()), Err);
        self.pending =
            condition.is_err().then(|| Box::new(PendingFiles { resolved: new, providers, changes: pending }));
        Ok(condition)
    }

    /// Removes outdated pending changes from `config.json`.
    fn clear_pending(&self) -> Result<(), String> {
        let in_force = in_force(&self.config)?;
        write(&in_force.config, extras(&in_force, None))
    }
}

/// Writes the pending changes for the services.
fn write_pending(config: &Config, new: &PendingFiles) -> anyhow::Result<()> {
    copy_manifest_headers(config)?;
    write_providers_copy(config, new.providers.as_ref())?;
    store_config(config, new.resolved.config_extras())
}

fn extras<'a>(in_force: &'a ActiveConfig, waiting: Option<&'a Map<String, Value>>) -> ConfigExtras<'a> {
    ConfigExtras {
        kubelet_configuration: Some(&in_force.kubelet_configuration),
        feature_gates: &in_force.feature_gates,
        waiting: waiting.filter(|values| !values.is_empty()),
    }
}

async fn stamp(cli: &Arc<Cli>) -> Stamp {
    let (cli, none) = (Arc::clone(cli), Stamp(Vec::new()));
    tokio::task::spawn_blocking(move || Stamp::of(&cli)).await.unwrap_or(none)
}

/// A digest of all inputs, including headers, which are not part of a field.
fn digest(config: &Config, providers: u64) -> u64 {
    let comparable = Config { provenance: Default::default(), resolved_unix_nanos: 0, ..config.clone() };
    let headers = comparable.sources.static_pod_url_headers.encode();
    let mut hasher = DefaultHasher::new();
    (serde_json::to_string(&comparable).unwrap_or_default(), headers, providers).hash(&mut hasher);
    hasher.finish()
}

/// The configuration that services are started with now.
fn in_force(config: &Config) -> Result<ActiveConfig, String> {
    let path = config.paths.config_file();
    let fail = |error| format!("{}; {UNCHANGED}", chain(&error));
    Ok(ActiveConfig {
        config: Config::load(&path).map_err(fail)?,
        kubelet_configuration: kubelet_configuration(&path).map_err(fail)?.unwrap_or_default(),
        feature_gates: feature_gates(&path).map_err(fail)?,
    })
}

fn write(config: &Config, extras: ConfigExtras<'_>) -> Result<(), String> {
    store_config(config, extras).map_err(|error| format!("{error:#}; {UNCHANGED}"))
}

/// Publishes the state of init from its conditions.
fn publish_own_state(services: &Services, progress: &Progress) {
    let report = progress.report("");
    let errors: Vec<String> = report
        .conditions
        .into_iter()
        .filter(|condition| !condition.ok)
        .map(|condition| condition.message)
        .collect();
    let state = if errors.is_empty() { ServiceState::Running } else { ServiceState::Degraded };
    let Some(mut own) = services.get(&ServiceName::Init) else { return };
    let (before, message) = (own.clone(), errors.join("; "));
    if own.state != state.as_str() {
        let now = keelson_service_kit::now_unix_nanos();
        own.not_running_since_unix_nanos = if errors.is_empty() { 0 } else { now };
    }
    (own.state, own.message) = (state.as_str().to_owned(), message);
    if own != before {
        services.set(ServiceName::Init, own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_of_a_configuration_file_changes_the_stamp() {
        let dir = tempfile::tempdir().unwrap();
        let (main, folder) = (dir.path().join("k.yaml"), dir.path().join("k.d"));
        std::fs::create_dir(&folder).unwrap();
        let providers = dir.path().join("providers");
        let arguments = [
            format!("--config={}", main.display()),
            format!("--config-dir={}", folder.display()),
            format!("--image-credential-provider-config={}", providers.display()),
        ];
        let cli = Cli::parse(&arguments, "/").unwrap();
        let mut stamps = vec![Stamp::of(&cli)];
        let mut changed = |what: &str| {
            let now = Stamp::of(&cli);
            assert!(!stamps.contains(&now), "{what}");
            assert_eq!(now, Stamp::of(&cli));
            stamps.push(now);
        };
        std::fs::write(&main, "a: 1").unwrap();
        changed("the file exists");
        std::fs::write(&main, "a: 12").unwrap();
        changed("it is longer");
        std::fs::write(folder.join("10.conf"), "b: 1").unwrap();
        changed("a file more");
        std::fs::create_dir(folder.join("sub")).unwrap();
        std::fs::write(folder.join("sub/20.conf"), "c: 1").unwrap();
        changed("one below");
        std::fs::remove_file(folder.join("10.conf")).unwrap();
        changed("one less");
        std::fs::create_dir(&providers).unwrap();
        changed("a folder of credential providers");
        std::fs::write(providers.join("a.yaml"), "kind: x").unwrap();
        changed("a file in it");
        std::fs::write(providers.join("a.yaml"), "kind: xy").unwrap();
        changed("it is longer");
    }

    #[test]
    fn headers_and_credential_providers_are_part_of_the_digest() {
        let mut config = Config::default();
        let before = digest(&config, 1);
        assert_eq!(digest(&Config { resolved_unix_nanos: 7, ..config.clone() }, 1), before);
        assert_ne!(digest(&config, 2), before, "credential providers");
        let headers = keelson_config::UrlHeaders(vec![("X".to_owned(), "y".to_owned())]);
        config.sources.static_pod_url_headers = headers;
        assert_ne!(digest(&config, 1), before);
    }
}
