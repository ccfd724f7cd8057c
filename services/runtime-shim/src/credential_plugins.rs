//! Exec credential provider plugins (runtime-and-resources.md §6.4): programs that the node's administrator names and
//! that are asked for the credentials of an image.
//!
//! **As whom they run.** As this service does: as root with the capabilities of its row in init's table of privileges and
//! no others, or, below an init that is not root, as init's user. `no_new_privs` holds for them too: set-user-id bits and
//! file capabilities of a plugin do nothing (execve(2)). A plugin may thus read every file and talk to the network, and
//! may neither mount nor change the machine. Its working folder is this service's, its process group its own, and its
//! `oom_score_adj` is 0. Four of one plugin run at a time; one that takes long while another pod waits
//! counts no longer.
//!
//! **Their environment** is that of init, over it this service's own, over it `env` of the configuration.
//!
//! Credentials are kept in memory for as long as plugins allow, and are in no log, event, error or file. What a plugin
//! writes to its standard error is logged when it fails, at most the last KiB of it.

mod handover;

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared, join_all};
use keelson_config::Paths;
use keelson_runtime_shim_core::credential_config::{Configured, Provider};
use keelson_runtime_shim_core::credential_plugin::{
    Auth, BadResponse, Cache, Response, parse_response, request,
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
use handover::{Given, NotUsable, handover_path, read_handover};

/// How long a plugin may take for an answer (runtime-and-resources.md §6.4).
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
/// How many processes of one plugin run at a time.
const AT_A_TIME: usize = 4;
/// A plugin that hangs for the images of one pod keeps no other pod waiting for longer than that.
const FAIRNESS: Fairness = Fairness { patience: Duration::from_secs(5), kept: Duration::from_secs(15) };
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
    /// Those that init has handed over; none where it has handed over nothing. A binary that is not there and a file
    /// that cannot be read are conditions of `progress`: images are pulled without them.
    ///
    /// # Errors
    /// Everything that is wrong with the configuration.
    pub async fn load(paths: &Paths, metrics: &Metrics, progress: &Progress) -> Result<Self, NotUsable> {
        let path = handover_path(paths);
        Self::load_by(move || read_handover(&path), metrics, progress).await
    }

    async fn load_by(
        read: impl FnOnce() -> Result<Option<Given>, NotUsable> + Send + 'static,
        metrics: &Metrics,
        progress: &Progress,
    ) -> Result<Self, NotUsable> {
        let read = tokio::task::spawn_blocking(read).await;
        let given = match read.map_err(|source| NotUsable::Lost { source })? {
            Ok(Some(given)) => given,
            Ok(None) => return Ok(Self::default()),
            Err(error @ NotUsable::Read { .. }) => {
                let what_then =
                    "images are pulled without credential providers until runtime-shim is restarted";
                progress.condition("credential providers", Err(format!("{}; {what_then}", chain(&error))));
                return Ok(Self::default());
            }
            Err(error) => return Err(error),
        };
        tell_start(&given.configured);
        Ok(Self::of(given, ANSWERS_WITHIN, metrics, progress))
    }

    fn of(given: Given, limit: Duration, metrics: &Metrics, progress: &Progress) -> Self {
        let Given { bin_dir, environment, configured, mut missing, mut writable } = given;
        let metrics = PluginMetrics::registered(metrics, &configured.hash);
        let environment = merged(&environment);
        let plugin = |provider: Provider| {
            let own = provider.env.iter().map(|(name, value)| (name.into(), value.into()));
            let env = environment.clone().into_iter().chain(own).collect();
            let path = bin_dir.join(&provider.name);
            let program = Program { path, args: provider.args.clone(), env };
            let missing = missing.remove(&provider.name);
            if let Some(file) = writable.remove(&provider.name) {
                let text = format!(
                    "others than root may write {file}, and it is run as root with the agent's environment: give it to root and take the \
                     write permission from group and others"
                );
                progress.condition(&format!("writers of credential provider {}", provider.name), Err(text));
            }
            let (state, metrics, progress) = (Mutex::default(), metrics.clone(), progress.clone());
            let turns = Turns::new(AT_A_TIME, FAIRNESS);
            let plugin = Plugin { provider, program, limit, metrics, progress, turns, state };
            plugin.tell_startable(missing.map_or(Ok(()), Err));
            Arc::new(plugin)
        };
        Self { list: configured.providers.into_iter().map(plugin).collect(), clock: Clock::System }
    }

    /// What the plugins for a repository (`host/path`, without tag and digest) give for it, in the order in which it is
    /// to be tried. They are asked at the same time; one that fails gives nothing.
    pub async fn find(&self, repository: &str, pod: &Arc<str>) -> Vec<(Credential, Origin)> {
        let fitting = self.list.iter().filter(|plugin| plugin.provider.is_for(repository));
        let answers = join_all(fitting.map(|plugin| plugin.credentials(repository, pod, &self.clock))).await;
        let mut keyring = Keyring::default();
        for (key, credential) in answers.iter().flatten().flat_map(|auth| auth.iter()) {
            keyring.insert(key, credential.clone(), Origin::Node);
        }
        keyring.lookup(repository)
    }
}

/// Says which plugins there are.
fn tell_start(configured: &Configured) {
    for name in &configured.left_out {
        tracing::warn!(
            plugin = name,
            "this credential provider is not used: it requires a service account, and pods have none without an API server"
        );
    }
    let names: Vec<&str> = configured.providers.iter().map(|provider| provider.name.as_str()).collect();
    tracing::info!(plugins = names.join(", "), hash = configured.hash, "credential providers are configured");
}

/// The environment of all plugins: `inits`, over it this service's own.
fn merged(inits: &BTreeMap<String, String>) -> BTreeMap<OsString, OsString> {
    let own = std::env::vars_os().filter(|(name, _)| FOR_US.iter().all(|ours| name != ours));
    inits.iter().map(|(name, value)| (name.into(), value.into())).chain(own).collect()
}

impl Plugin {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it can be started, and else why not.
    fn tell_startable(&self, state: Result<(), String>) {
        let what_then =
            "images are pulled without its credentials, and it is tried again with the next of them";
        let name = format!("credential provider {}", self.provider.name);
        self.progress.condition(&name, state.map_err(|why| format!("{why}; {what_then}")));
    }

    /// What is known for a repository, or else what the plugin answers. Whoever asks for the same while it is asked gets
    /// the same answer; when nobody waits for it any more the plugin is ended.
    async fn credentials(self: &Arc<Self>, repository: &str, pod: &Arc<str>, clock: &Clock) -> Option<Auth> {
        let asking = {
            let mut state = self.state();
            if let Some(auth) = state.cache.get(repository, clock.read().boot_nanos) {
                return Some(auth);
            }
            self.join(&mut state, repository, pod, clock)
        };
        asking.await
    }

    fn join(
        self: &Arc<Self>,
        state: &mut State,
        repository: &str,
        pod: &Arc<str>,
        clock: &Clock,
    ) -> Shared<Asking> {
        let running = state.asked.get(repository).and_then(WeakShared::upgrade);
        if let Some(running) = running.filter(|running| running.peek().is_none()) {
            return running;
        }
        let (plugin, asked, clock) = (Arc::clone(self), repository.to_owned(), clock.clone());
        let pod = Arc::clone(pod);
        let asking = async move { plugin.answer_in_turn(&asked, &pod, &clock).await }.boxed().shared();
        state.asked.retain(|_, asking| asking.upgrade().is_some());
        if let Some(weak) = asking.downgrade() {
            state.asked.insert(repository.to_owned(), weak);
        }
        asking
    }

    /// Asks the plugin when it is the turn of the first pod that needs the answer.
    async fn answer_in_turn(&self, repository: &str, pod: &Arc<str>, clock: &Clock) -> Option<Auth> {
        let turn = self.turns.take(pod).await;
        turn.work(self.answer(repository, clock)).await
    }

    /// Asks the plugin and keeps its answer.
    async fn answer(&self, repository: &str, clock: &Clock) -> Option<Auth> {
        // Another answer may have come meanwhile that is for this repository too.
        let known = self.state().cache.get(repository, clock.read().boot_nanos);
        if known.is_some() {
            return known;
        }
        let label = NameLabel { plugin_name: self.provider.name.clone() };
        let begun = Instant::now();
        let answer = self.ask(repository).await;
        self.metrics.seconds.get_or_create(&label).observe(begun.elapsed().as_secs_f64());
        self.tell_startable(match &answer {
            Err(PluginError::Run(error @ RunError::Start { .. })) => Err(chain(error)),
            _ => Ok(()),
        });
        match answer {
            Ok(response) => {
                let now = clock.read().boot_nanos;
                self.state().cache.put(repository, &response, self.provider.default_cache, now);
                Some(response.auth)
            }
            Err(error) => {
                // An answer that is none is no failed run.
                if let PluginError::Run(_) = error {
                    self.metrics.errors.get_or_create(&label).inc();
                }
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

    async fn ask(&self, repository: &str) -> Result<Response, PluginError> {
        let version = self.provider.api_version;
        let answer = self.program.run(&request(version, repository), self.limit).await?;
        Ok(parse_response(version, &answer)?)
    }
}

#[cfg(test)]
mod tests;
