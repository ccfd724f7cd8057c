//! Exec credential provider plugins (runtime-and-resources.md §6.4): programs that the node's administrator configures
//! and that return credentials for images.
//!
//! **User and privileges.** A plugin runs as this service does: as root with the capabilities of this service's row in
//! init's table of privileges and no others, or as init's user if init is not root. `no_new_privs` applies, so
//! set-user-id bits and file capabilities of a plugin have no effect (execve(2)). A plugin can read every file and use
//! the network, but can neither mount nor change the machine. It has the working folder of this service, its own
//! process group, and an `oom_score_adj` of 0. Four processes of one plugin run at a time; a process that takes long
//! while another pod waits no longer counts.
//!
//! **Environment.** That of init, overridden by that of this service, overridden by `env` of the configuration.
//!
//! Credentials are kept in memory for as long as the plugins allow, and are in no log, event, error or file. When a
//! plugin fails, at most the last KiB of its standard error is logged.

mod handover;

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared, join_all};
use keelson_config::Paths;
use keelson_runtime_shim_core::credential_config::{CredentialProviderConfig, Provider};
use keelson_runtime_shim_core::credential_plugin::{
    Auth, Cache, Response, ResponseError, parse_response, request,
};
use keelson_runtime_shim_core::keyring::{Credential, Keyring, Origin};
use keelson_service_kit::plugin::{Program, RunError};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Fairness, Metrics, Progress, Turns};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::clock::Clock;
use handover::{HandoverError, LoadedProviders, handover_path, read_handover};

/// Timeout of a plugin (runtime-and-resources.md §6.4).
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum concurrent processes of one plugin.
const MAX_CONCURRENT: usize = 4;
/// A plugin that hangs for the images of one pod makes other pods wait no longer than this.
const FAIRNESS: Fairness = Fairness { patience: Duration::from_secs(5), kept: Duration::from_secs(15) };
/// Environment variables that are for this service only.
const OWN_VARIABLES: &[&str] = &[
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

#[derive(Debug)]
struct Plugin {
    provider: Provider,
    program: Program,
    limit: Duration,
    metrics: PluginMetrics,
    progress: Progress,
    turns: Arc<Turns>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    cache: Cache,
    /// Running requests, by repository.
    requested: HashMap<String, WeakShared<PendingResponse>>,
}

/// Resolves to the plugin's credentials, or to `None` if it failed, which is logged and counted.
type PendingResponse = BoxFuture<'static, Option<Auth>>;

/// Why a plugin returned no credentials.
#[derive(Debug, thiserror::Error)]
enum PluginError {
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Answer(#[from] ResponseError),
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
        let help = "Runs of a credential provider plugin that failed";
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

impl Plugins {
    /// Loads the plugins that init has handed over; none if init has handed over nothing. A missing binary and an
    /// unreadable file are reported as conditions of `progress`, and images are pulled without them.
    ///
    /// # Errors
    /// All errors of the configuration.
    pub async fn load(paths: &Paths, metrics: &Metrics, progress: &Progress) -> Result<Self, HandoverError> {
        let path = handover_path(paths);
        Self::load_by(move || read_handover(&path), metrics, progress).await
    }

    async fn load_by(
        read: impl FnOnce() -> Result<Option<LoadedProviders>, HandoverError> + Send + 'static,
        metrics: &Metrics,
        progress: &Progress,
    ) -> Result<Self, HandoverError> {
        let read = tokio::task::spawn_blocking(read).await;
        let loaded = match read.map_err(|source| HandoverError::Lost { source })? {
            Ok(Some(loaded)) => loaded,
            Ok(None) => return Ok(Self::default()),
            Err(error @ HandoverError::Read { .. }) => {
                let consequence =
                    "images are pulled without credential providers until runtime-shim is restarted";
                progress.condition("credential providers", Err(format!("{}; {consequence}", chain(&error))));
                return Ok(Self::default());
            }
            Err(error) => return Err(error),
        };
        log_providers(&loaded.config);
        Ok(Self::of(loaded, ANSWER_TIMEOUT, metrics, progress))
    }

    fn of(loaded: LoadedProviders, limit: Duration, metrics: &Metrics, progress: &Progress) -> Self {
        let LoadedProviders { bin_dir, environment, config, mut missing, mut writable } = loaded;
        let metrics = PluginMetrics::registered(metrics, &config.hash);
        let environment = merge_environment(&environment);
        let plugin = |provider: Provider| {
            let own = provider.env.iter().map(|(name, value)| (name.into(), value.into()));
            let env = environment.clone().into_iter().chain(own).collect();
            let path = bin_dir.join(&provider.name);
            let program = Program { path, args: provider.args.clone(), env };
            let missing = missing.remove(&provider.name);
            if let Some(file) = writable.remove(&provider.name) {
                let text = format!(
                    "users other than root may write {file}, which is run as root with the agent's environment: make root its owner and remove the \
                     write permission from group and others"
                );
                progress.condition(&format!("writers of credential provider {}", provider.name), Err(text));
            }
            let (state, metrics, progress) = (Mutex::default(), metrics.clone(), progress.clone());
            let turns = Turns::new(MAX_CONCURRENT, FAIRNESS);
            let plugin = Plugin { provider, program, limit, metrics, progress, turns, state };
            plugin.report_startable(missing.map_or(Ok(()), Err));
            Arc::new(plugin)
        };
        Self { list: config.providers.into_iter().map(plugin).collect(), clock: Clock::System }
    }

    /// The credentials of the plugins for a repository (`host/path`, without tag and digest), in the order in which to try
    /// them. The plugins run concurrently; a failed one contributes nothing.
    pub async fn find(&self, repository: &str, pod: &Arc<str>) -> Vec<(Credential, Origin)> {
        let fitting = self.list.iter().filter(|plugin| plugin.provider.matches_image(repository));
        let answers = join_all(fitting.map(|plugin| plugin.credentials(repository, pod, &self.clock))).await;
        let mut keyring = Keyring::default();
        for (key, credential) in answers.iter().flatten().flat_map(|auth| auth.iter()) {
            keyring.insert(key, credential.clone(), Origin::Node);
        }
        keyring.lookup(repository)
    }
}

/// Logs the configured plugins.
fn log_providers(config: &CredentialProviderConfig) {
    for name in &config.skipped {
        tracing::warn!(
            plugin = name,
            "this credential provider is not used: it requires a service account, and pods have none without an API server"
        );
    }
    let names: Vec<&str> = config.providers.iter().map(|provider| provider.name.as_str()).collect();
    tracing::info!(plugins = names.join(", "), hash = config.hash, "credential providers are configured");
}

/// The environment of all plugins: that of init, overridden by this service's own.
fn merge_environment(init_environment: &BTreeMap<String, String>) -> BTreeMap<OsString, OsString> {
    let own = std::env::vars_os().filter(|(name, _)| OWN_VARIABLES.iter().all(|ours| name != ours));
    init_environment.iter().map(|(name, value)| (name.into(), value.into())).chain(own).collect()
}

impl Plugin {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports as a condition whether the plugin can be started.
    fn report_startable(&self, state: Result<(), String>) {
        let consequence = "images are pulled without its credentials; the next pull tries it again";
        let name = format!("credential provider {}", self.provider.name);
        self.progress.condition(&name, state.map_err(|why| format!("{why}; {consequence}")));
    }

    /// The cached credentials for a repository, or the plugin's response. Concurrent requests for the same repository share
    /// one run; when no request waits for it any more, the plugin is ended.
    async fn credentials(self: &Arc<Self>, repository: &str, pod: &Arc<str>, clock: &Clock) -> Option<Auth> {
        let pending = {
            let mut state = self.state();
            if let Some(auth) = state.cache.get(repository, clock.read().boot_nanos) {
                return Some(auth);
            }
            self.join_or_start(&mut state, repository, pod, clock)
        };
        pending.await
    }

    fn join_or_start(
        self: &Arc<Self>,
        state: &mut State,
        repository: &str,
        pod: &Arc<str>,
        clock: &Clock,
    ) -> Shared<PendingResponse> {
        let running = state.requested.get(repository).and_then(WeakShared::upgrade);
        if let Some(running) = running.filter(|running| running.peek().is_none()) {
            return running;
        }
        let (plugin, requested, clock) = (Arc::clone(self), repository.to_owned(), clock.clone());
        let pod = Arc::clone(pod);
        let pending = async move { plugin.run_in_turn(&requested, &pod, &clock).await }.boxed().shared();
        state.requested.retain(|_, pending| pending.upgrade().is_some());
        if let Some(weak) = pending.downgrade() {
            state.requested.insert(repository.to_owned(), weak);
        }
        pending
    }

    /// Runs the plugin when it is the turn of the first pod that needs the response.
    async fn run_in_turn(&self, repository: &str, pod: &Arc<str>, clock: &Clock) -> Option<Auth> {
        let turn = self.turns.take(pod).await;
        turn.work(self.run_and_cache(repository, clock)).await
    }

    /// Runs the plugin and caches its response.
    async fn run_and_cache(&self, repository: &str, clock: &Clock) -> Option<Auth> {
        // Another response received in the meantime may be valid for this repository as well.
        let known = self.state().cache.get(repository, clock.read().boot_nanos);
        if known.is_some() {
            return known;
        }
        let label = NameLabel { plugin_name: self.provider.name.clone() };
        let begun = Instant::now();
        let response = self.run_plugin(repository).await;
        self.metrics.seconds.get_or_create(&label).observe(begun.elapsed().as_secs_f64());
        self.report_startable(match &response {
            Err(PluginError::Run(error @ RunError::Start { .. })) => Err(chain(error)),
            _ => Ok(()),
        });
        match response {
            Ok(response) => {
                let now = clock.read().boot_nanos;
                self.state().cache.put(repository, &response, self.provider.default_cache, now);
                Some(response.auth)
            }
            Err(error) => {
                // A response that is not valid does not count as a failed run.
                if let PluginError::Run(_) = error {
                    self.metrics.errors.get_or_create(&label).inc();
                }
                tracing::warn!(
                    plugin = self.provider.name,
                    image = repository,
                    error = chain(&error),
                    "a credential provider returned no credentials"
                );
                None
            }
        }
    }

    async fn run_plugin(&self, repository: &str) -> Result<Response, PluginError> {
        let version = self.provider.api_version;
        let response = self.program.run(&request(version, repository), self.limit).await?;
        Ok(parse_response(version, &response)?)
    }
}

#[cfg(test)]
mod tests;
