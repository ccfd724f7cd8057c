//! Changed files of the configuration while the agent runs (architecture §7): `--config`, the files of `--config-dir`,
//! `--keelson-config` and `--image-credential-provider-config`.
//!
//! They are looked at with every heartbeat. What is wrong with them is told, and what was in force goes on. What services take
//! while they run is written to where they read it; all else waits, named by the condition, until a service that it is about is
//! started again on request, and with it all others that it is about. `config.json` holds what is in force at every moment, so
//! whoever is started again for another reason comes up with what its neighbours have.
//!
//! With a control plane that may assign a configuration nothing is taken from the files: they lie below what the key has, and a
//! start of the agent lays one over the other.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use keelson_config::{Beside, Config, ServiceName, feature_gates, kubelet_configuration};
use keelson_init_core::{
    CREDENTIAL_CONFIG_FLAG, InForce, Resolved, ServiceState, Waiting, waiting, with_live,
};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, LoopHandle, Progress};
use serde_json::{Map, Value};
use tokio::sync::Mutex;

use crate::cli::Cli;
use crate::credential_providers::{self, Handover};
use crate::handed_files::hand_over_headers;
use crate::supervisor::Services;
use crate::{Start, drop_ins, hand_over, log_notes, start, store};

/// The condition that says what is wrong with changed files, or what of them waits.
const CONDITION: &str = "configuration files";
/// How long files must have stood still before they are read: an editor writes more than once.
const STILL: Duration = Duration::from_millis(500);
/// How often they are looked at for that, at most.
const LOOKS: u32 = 10;
/// What goes on while files are wrong.
const GOES_ON: &str = "what was in force goes on";

/// What tells one state of the files from another.
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
        files.extend(providers.into_iter().flat_map(|path| credential_providers::watched(Path::new(&path))));
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

/// The files, and what of them is in force.
#[derive(Debug)]
struct State {
    cli: Arc<Cli>,
    config: Arc<Config>,
    seen: Stamp,
    /// A digest of the configuration of credential providers in force.
    providers: u64,
    /// What the files say, while not all of it is in force.
    new: Option<Box<New>>,
    /// A digest of what files said at the start that lie below what a key has; none where there is no such key.
    below_key: Option<u64>,
}

/// What waits for a start of services.
#[derive(Debug)]
struct New {
    resolved: Resolved,
    providers: Option<Handover>,
    waiting: Waiting,
}

/// Follows the files, and puts in force what waits.
#[derive(Debug, Clone)]
pub(crate) struct Reload {
    context: Context,
    state: Arc<Mutex<State>>,
}

impl Reload {
    /// Of an agent that has just started with what the files of `cli` said when they were as `seen` has them.
    pub(crate) fn new(context: &Context, cli: Cli, seen: Stamp, providers: Option<&Handover>) -> Self {
        let (config, providers) = (Arc::clone(&context.config), credential_providers::digest(providers));
        let below_key = config.control_plane.may_assign_a_configuration().then(|| digest(&config, providers));
        let state = State { seen, cli: Arc::new(cli), config, providers, new: None, below_key };
        Self { context: context.clone(), state: Arc::new(Mutex::new(state)) }
    }

    /// Looks at the files until the shutdown, and has `services` show how init itself is.
    pub(crate) async fn run(self, services: Services) {
        let turn = self.context.progress.register("configuration-files");
        let shutdown = self.context.shutdown.clone();
        loop {
            turn.tick();
            show_own(&services, &self.context.progress);
            // Cancel-safe: nothing is taken while waiting.
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
            }
            self.look().await;
        }
    }

    /// Takes in the files if they are others than before.
    async fn look(&self) {
        let mut state = self.state.lock().await;
        let cli = Arc::clone(&state.cli);
        let mut stamp = stamp(&cli).await;
        if stamp == state.seen {
            return;
        }
        for _ in 0..LOOKS {
            tokio::time::sleep(STILL).await;
            let again = self::stamp(&cli).await;
            if again == stamp {
                break;
            }
            stamp = again;
        }
        let read = tokio::task::spawn_blocking(move || start(&cli)).await;
        let Ok(read) = read else { return };
        // What waited is not what the files say any more.
        let waited = state.new.take().is_some();
        let told = match read {
            Ok(start) => state.take_in(start, &self.context),
            Err(mut problems) => {
                problems.extend(waited.then(|| state.show_none_waiting().err()).flatten());
                Err(format!("{}; {GOES_ON}", problems.join("; ")))
            }
        };
        // What could not be written is tried again, and so is what does not do: what is wrong may be in another file.
        if told.is_ok() {
            state.seen = stamp;
        }
        self.context.progress.condition(CONDITION, told.unwrap_or_else(Err));
    }

    /// Puts in force what waits for a start of `service`, if anything does. Who has to be started again besides.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) async fn put_in_force(&self, service: ServiceName) -> Result<BTreeSet<ServiceName>, String> {
        let mut state = self.state.lock().await;
        let goes = state.new.as_ref().is_some_and(|new| new.waiting.goes_with(service));
        let Some(new) = state.new.take_if(|_| goes) else { return Ok(BTreeSet::new()) };
        let config = state.stamped(new.resolved.config.clone());
        if let Err(error) = put(&config, &new) {
            state.new = Some(new);
            return Err(format!("{error:#}; {GOES_ON}"));
        }
        state.providers = credential_providers::digest(new.providers.as_ref());
        let waiting = new.waiting;
        tracing::info!("changed files of the configuration come into force: {}", waiting.fields.join(", "));
        self.context.live.take(&config);
        self.context.progress.condition(CONDITION, Ok(()));
        let mut others = waiting.services;
        others.remove(&service);
        Ok(others)
    }
}

impl State {
    /// A start of the agent is what its configuration was resolved for, also when values are younger.
    fn stamped(&self, config: Config) -> Config {
        Config { resolved_unix_nanos: self.config.resolved_unix_nanos, ..config }
    }

    /// What there is to say of files that are well.
    ///
    /// # Errors
    /// What is in force cannot be read or written.
    fn take_in(&mut self, start: Start, context: &Context) -> Result<Result<(), String>, String> {
        let Start { resolved: new, providers, .. } = start;
        let digest_of_providers = credential_providers::digest(providers.as_ref());
        if let Some(at_start) = self.below_key {
            return Ok(if digest(&new.config, digest_of_providers) == at_start {
                Ok(())
            } else {
                Err("the files of the configuration have changed; a restart of the agent takes them"
                    .to_owned())
            });
        }
        let before = in_force(&self.config)?;
        let taken = with_live(&before, &new);
        let ours = self.cli.keelson_config().map(|path| path.display().to_string());
        let mut waiting = waiting(&taken, &new, ours.as_deref());
        if digest_of_providers != self.providers {
            waiting.fields.push(CREDENTIAL_CONFIG_FLAG.to_owned());
            waiting.services.insert(ServiceName::RuntimeShim);
        }
        let config = self.stamped(taken.config.clone());
        write(&config, beside(&taken, Some(&waiting.values)))?;
        // They stand in no field that could differ. Those of another URL wait with it.
        if new.config.sources.static_pod_url == before.config.sources.static_pod_url {
            hand_over_headers(&new.config).map_err(|error| format!("{}; {GOES_ON}", chain(&error)))?;
        }
        log_notes(&new.notes);
        if context.live.take(&config) {
            tracing::info!(
                "changed files of the configuration are in force as far as services take them while they run"
            );
        }
        let told = waiting.text().map_or(Ok(()), Err);
        self.new = told.is_err().then(|| Box::new(New { resolved: new, providers, waiting }));
        Ok(told)
    }

    /// Takes what waited out of what people are shown.
    fn show_none_waiting(&self) -> Result<(), String> {
        let in_force = in_force(&self.config)?;
        write(&in_force.config, beside(&in_force, None))
    }
}

/// Writes what waited to where services read it.
fn put(config: &Config, new: &New) -> anyhow::Result<()> {
    hand_over_headers(config)?;
    hand_over(config, new.providers.as_ref())?;
    store(config, new.resolved.beside())
}

fn beside<'a>(in_force: &'a InForce, waiting: Option<&'a Map<String, Value>>) -> Beside<'a> {
    Beside {
        kubelet_configuration: Some(&in_force.kubelet_configuration),
        feature_gates: &in_force.feature_gates,
        waiting: waiting.filter(|values| !values.is_empty()),
    }
}

async fn stamp(cli: &Arc<Cli>) -> Stamp {
    let (cli, none) = (Arc::clone(cli), Stamp(Vec::new()));
    tokio::task::spawn_blocking(move || Stamp::of(&cli)).await.unwrap_or(none)
}

/// Of all that files say, headers included, which stand in no field.
fn digest(config: &Config, providers: u64) -> u64 {
    let bare = Config { provenance: Default::default(), resolved_unix_nanos: 0, ..config.clone() };
    let headers = bare.sources.static_pod_url_headers.encode();
    let mut hasher = DefaultHasher::new();
    (serde_json::to_string(&bare).unwrap_or_default(), headers, providers).hash(&mut hasher);
    hasher.finish()
}

/// What services are started with now.
fn in_force(config: &Config) -> Result<InForce, String> {
    let path = config.paths.config_file();
    let fail = |error| format!("{}; {GOES_ON}", chain(&error));
    Ok(InForce {
        config: Config::load(&path).map_err(fail)?,
        kubelet_configuration: kubelet_configuration(&path).map_err(fail)?.unwrap_or_default(),
        feature_gates: feature_gates(&path).map_err(fail)?,
    })
}

fn write(config: &Config, beside: Beside<'_>) -> Result<(), String> {
    store(config, beside).map_err(|error| format!("{error:#}; {GOES_ON}"))
}

/// Has the list of services show init as its conditions have it.
fn show_own(services: &Services, progress: &Progress) {
    let report = progress.report("");
    let problems: Vec<String> = report
        .conditions
        .into_iter()
        .filter(|condition| !condition.ok)
        .map(|condition| condition.message)
        .collect();
    let state = if problems.is_empty() { ServiceState::Running } else { ServiceState::Degraded };
    let Some(mut own) = services.get(&ServiceName::Init) else { return };
    let (before, message) = (own.clone(), problems.join("; "));
    if own.state != state.as_str() {
        let now = keelson_service_kit::now_unix_nanos();
        own.not_running_since_unix_nanos = if problems.is_empty() { 0 } else { now };
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
    fn every_file_that_counts_and_every_change_of_one_is_another_stamp() {
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
        changed("the file is there");
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
    fn what_stands_in_no_field_counts_as_a_change_as_well() {
        let mut config = Config::default();
        let before = digest(&config, 1);
        assert_eq!(digest(&Config { resolved_unix_nanos: 7, ..config.clone() }, 1), before);
        assert_ne!(digest(&config, 2), before, "credential providers");
        let headers = keelson_config::UrlHeaders(vec![("X".to_owned(), "y".to_owned())]);
        config.sources.static_pod_url_headers = headers;
        assert_ne!(digest(&config, 1), before);
    }
}
