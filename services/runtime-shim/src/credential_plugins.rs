//! Exec credential provider plugins (runtime-and-resources.md §6.4): programs that the node's administrator names and
//! that are asked for the credentials of an image.
//!
//! **As whom they run.** As this service does: as root with the capabilities of its row in init's table of privileges and
//! no others, or, below an init that is not root, as init's user. `no_new_privs` holds for them too: set-user-id bits and
//! file capabilities of a plugin do nothing (execve(2)). A plugin may thus read every file and talk to the network, and
//! may neither mount nor change the machine. Its working folder is this service's, its process group its own.
//!
//! **Their environment** is that of init, over it this service's own, over it `env` of the configuration.
//!
//! Credentials are kept in memory for as long as plugins allow, and are in no log, event, error or file. What a plugin
//! writes to its standard error is logged when it fails, at most the last KiB of it.

mod run;

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared, join_all};
use keelson_config::{Paths, ServiceName};
use keelson_runtime_shim_core::credential_config::{ConfigFile, Configured, Problem, Provider, read};
use keelson_runtime_shim_core::credential_plugin::{Auth, BadResponse, Cache, parse_response, request};
use keelson_runtime_shim_core::keyring::{Credential, Keyring, Origin};
use keelson_service_kit::Metrics;
use keelson_service_kit::status::chain;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use serde::Deserialize;

use crate::clock::Clock;
use run::{Program, RunError};

/// How long a plugin may take for an answer (runtime-and-resources.md §6.4).
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
/// Variables of this service that say something to it alone.
const FOR_US: &[&str] = &[
    "KEELSON_LIFELINE_FD",
    "MALLOC_ARENA_MAX",
    "RUST_BACKTRACE",
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
];

/// The plugins of the node.
#[derive(Debug, Clone, Default)]
pub struct Plugins {
    list: Arc<[Arc<Plugin>]>,
    clock: Clock,
}

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
    /// Binaries are missing.
    #[error("credential providers cannot be run: {}", .0.join("; "))]
    Binaries(Vec<String>),
}

/// What init writes.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Handover {
    bin_dir: PathBuf,
    environment: BTreeMap<String, String>,
    files: Vec<ConfigFile>,
}

#[derive(Debug)]
struct Plugin {
    provider: Provider,
    program: Program,
    limit: Duration,
    metrics: PluginMetrics,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    cache: Cache,
    /// Who is asked at the moment, by repository.
    asked: HashMap<String, WeakShared<Asking>>,
}

/// Gives what a plugin has answered; none when it has failed, which is logged and counted.
type Asking = BoxFuture<'static, Option<Auth>>;

/// A plugin that gave no credentials.
#[derive(Debug, thiserror::Error)]
enum PluginError {
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Answer(#[from] BadResponse),
}

#[derive(Debug, Clone)]
struct PluginMetrics {
    errors: Family<NameLabel, Counter>,
    seconds: Family<NameLabel, Histogram>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NameLabel {
    plugin_name: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HashLabel {
    hash: String,
}

impl PluginMetrics {
    fn registered(metrics: &Metrics, hash: &str) -> Self {
        let histogram = || Histogram::new([0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]);
        let new = Self {
            errors: Family::default(),
            seconds: Family::new_with_constructor(histogram as fn() -> Histogram),
        };
        let help = "Times that a credential provider plugin gave no answer";
        metrics.register("kubelet_credential_provider_plugin_errors", help, new.errors.clone());
        let help = "Seconds that a credential provider plugin took";
        metrics.register("kubelet_credential_provider_plugin_duration", help, new.seconds.clone());
        let info: Family<HashLabel, Gauge> = Family::default();
        info.get_or_create(&HashLabel { hash: hash.to_owned() }).set(1);
        let help = "The configuration of credential providers that is in use, by its hash";
        metrics.register("kubelet_credential_provider_config_info", help, info);
        new
    }
}

fn join(problems: &[Problem]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// `<run-dir>/credentials/runtime-shim/image-credential-providers.json`, as init writes it.
fn handover_path(paths: &Paths) -> PathBuf {
    let folder = paths.run_dir.join("credentials").join(ServiceName::RuntimeShim.as_str());
    folder.join("image-credential-providers.json")
}

impl Plugins {
    /// Those that init has handed over; none where it has handed over nothing.
    ///
    /// # Errors
    /// Everything that is wrong with the configuration, or every binary that is missing.
    pub async fn load(paths: &Paths, metrics: &Metrics) -> Result<Self, NotUsable> {
        let path = handover_path(paths);
        let read = tokio::task::spawn_blocking(move || read_handover(&path));
        let Some((handover, configured)) = read.await.unwrap_or(Ok(None))? else {
            return Ok(Self::default());
        };
        for name in &configured.left_out {
            tracing::warn!(
                plugin = name,
                "this credential provider is not used: it requires a service account, and pods have none without an API server"
            );
        }
        let names: Vec<&str> = configured.providers.iter().map(|provider| provider.name.as_str()).collect();
        tracing::info!(
            plugins = names.join(", "),
            hash = configured.hash,
            "credential providers are configured"
        );
        Ok(Self::of(configured, &handover, ANSWERS_WITHIN, metrics))
    }

    fn of(configured: Configured, handover: &Handover, limit: Duration, metrics: &Metrics) -> Self {
        let metrics = PluginMetrics::registered(metrics, &configured.hash);
        let environment = environment(&handover.environment);
        let plugin = |provider: Provider| {
            let own = provider.env.iter().map(|(name, value)| (name.into(), value.into()));
            let env = environment.clone().into_iter().chain(own).collect();
            let path = handover.bin_dir.join(&provider.name);
            let program = Program { path, args: provider.args.clone(), env };
            let (state, metrics) = (Mutex::default(), metrics.clone());
            Arc::new(Plugin { provider, program, limit, metrics, state })
        };
        Self { list: configured.providers.into_iter().map(plugin).collect(), clock: Clock::System }
    }

    /// What the plugins for a repository (`host/path`, without tag and digest) give for it, in the order in which it is
    /// to be tried. They are asked at the same time; one that fails gives nothing.
    pub async fn find(&self, repository: &str) -> Vec<(Credential, Origin)> {
        let fitting = self.list.iter().filter(|plugin| plugin.provider.is_for(repository));
        let answers = join_all(fitting.map(|plugin| plugin.credentials(repository, &self.clock))).await;
        let mut keyring = Keyring::default();
        for (key, credential) in answers.iter().flatten().flat_map(|auth| auth.iter()) {
            keyring.insert(key, credential.clone(), Origin::Node);
        }
        keyring.lookup(repository)
    }
}

fn read_handover(path: &Path) -> Result<Option<(Handover, Configured)>, NotUsable> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(|source| NotUsable::Read { path: path.to_owned(), source })?,
    };
    let handover: Handover =
        serde_json::from_slice(&text).map_err(|_| NotUsable::Decode { path: path.to_owned() })?;
    let configured = read(&handover.files).map_err(NotUsable::Config)?;
    let missing: Vec<String> = configured
        .providers
        .iter()
        .filter_map(|provider| cannot_run(&handover.bin_dir.join(&provider.name)))
        .collect();
    if missing.is_empty() { Ok(Some((handover, configured))) } else { Err(NotUsable::Binaries(missing)) }
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

/// The environment of all plugins: `inits`, over it this service's own.
fn environment(inits: &BTreeMap<String, String>) -> BTreeMap<OsString, OsString> {
    let own = std::env::vars_os().filter(|(name, _)| FOR_US.iter().all(|ours| name != ours));
    inits.iter().map(|(name, value)| (name.into(), value.into())).chain(own).collect()
}

impl Plugin {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known for a repository, or else what the plugin answers. Whoever asks for the same while it is asked gets
    /// the same answer; when nobody waits for it any more the plugin is ended.
    async fn credentials(self: &Arc<Self>, repository: &str, clock: &Clock) -> Option<Auth> {
        let asking = {
            let mut state = self.state();
            if let Some(auth) = state.cache.get(repository, clock.read().boot_nanos) {
                return Some(auth);
            }
            self.join(&mut state, repository, clock)
        };
        asking.await
    }

    fn join(self: &Arc<Self>, state: &mut State, repository: &str, clock: &Clock) -> Shared<Asking> {
        let running = state.asked.get(repository).and_then(WeakShared::upgrade);
        if let Some(running) = running.filter(|running| running.peek().is_none()) {
            return running;
        }
        let (plugin, asked, clock) = (Arc::clone(self), repository.to_owned(), clock.clone());
        let asking = async move { plugin.answer(&asked, &clock).await }.boxed().shared();
        state.asked.retain(|_, asking| asking.upgrade().is_some());
        if let Some(weak) = asking.downgrade() {
            state.asked.insert(repository.to_owned(), weak);
        }
        asking
    }

    /// Asks the plugin and keeps its answer.
    async fn answer(&self, repository: &str, clock: &Clock) -> Option<Auth> {
        let label = NameLabel { plugin_name: self.provider.name.clone() };
        let begun = Instant::now();
        let answer = self.ask(repository).await;
        self.metrics.seconds.get_or_create(&label).observe(begun.elapsed().as_secs_f64());
        match answer {
            Ok(response) => {
                let now = clock.read().boot_nanos;
                self.state().cache.put(repository, &response, self.provider.default_cache, now);
                Some(response.auth)
            }
            Err(error) => {
                self.metrics.errors.get_or_create(&label).inc();
                tracing::warn!(
                    plugin = self.provider.name,
                    image = repository,
                    error = chain(&error),
                    "a credential provider gives no credentials"
                );
                None
            }
        }
    }

    async fn ask(
        &self,
        repository: &str,
    ) -> Result<keelson_runtime_shim_core::credential_plugin::Response, PluginError> {
        let version = self.provider.api_version;
        let answer = self.program.run(&request(version, repository), self.limit).await?;
        Ok(parse_response(version, &answer)?)
    }
}

#[cfg(test)]
mod tests;
