//! Keeps the other services running.
//!
//! init reads flags, a KubeletConfiguration and a KeelsonConfiguration, says everything that is wrong with
//! them, and writes the result to `<run-dir>/config.json`, where every service reads it. It makes the folders
//! with their owners, starts each service as its own user with what it needs and no more
//! ([`keelson_init_core::privileges`]), asks each how it is, and starts again what ends or hangs.
//!
//! It is the parent of no container. When it dies, the services end with it (each holds the reading end of a
//! pipe, the lifeline); the next init kills what was left ([`stale`]), takes over its locks ([`lock`]) at once
//! and starts the services, which adopt what runs.

mod certificates;
mod cli;
mod credential_providers;
mod dirs;
mod drop_ins;
mod exec_login;
mod flags_file;
mod handed_files;
mod host;
mod kubelet;
pub mod launch;
pub mod lock;
mod lock_file;
mod node_configuration;
mod poller;
mod reload;
mod resolve_only;
mod server;
mod signals;
pub mod stale;
pub mod supervisor;
mod systemd;
mod unit;
mod without_init;
mod yaml;

use std::io::Write as _;
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use keelson_config::{Beside, Config, ControlPlane, ServiceName};
use keelson_init_core::{Level, Note, Resolved, configuration_line, folders, not_loaded, not_merged, told};
use keelson_proto::descriptors;
use keelson_proto::keelson::supervisor::v1::supervisor_server::SupervisorServer;
use keelson_service_kit::{
    Built, CancellationToken, Context, ServiceSpec, now_unix_nanos, run_with_config, status,
};
use serde_json::{Map, Value};
use tokio::sync::oneshot;
use tonic::service::Routes;

use crate::cli::Cli;
use crate::credential_providers::Handover;
use crate::handed_files::{HandoverError, Looked};
use crate::launch::Launcher;
use crate::node_configuration::{Ingredients, NodeConfiguration};
use crate::reload::{Reload, Stamp};
use crate::server::SupervisorService;
use crate::supervisor::{Supervisor, Timing};

const EX_USAGE: u8 = 64;
const EX_SOFTWARE: u8 = 70;
const EX_CONFIG: u8 = 78;

const SPEC: ServiceSpec = ServiceSpec {
    name: ServiceName::Init,
    about: "Keeps the services of a Keelson node agent running",
    version: env!("CARGO_PKG_VERSION"),
    descriptor: Some(descriptors::SUPERVISOR),
    threads: 1,
};

/// The whole of `main`. Under the name `kubelet` the exit codes are the kubelet's: 0 and 1.
pub fn main() -> ExitCode {
    signals::hold_back();
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let code = run();
    if host::invoked_as("kubelet") && code != ExitCode::SUCCESS { ExitCode::FAILURE } else { code }
}

fn run() -> ExitCode {
    let is_kubelet = host::invoked_as("kubelet");
    let program = if is_kubelet { "kubelet" } else { "keelson-init" };
    let arguments: Vec<String> =
        std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned()).collect();
    let cwd = std::env::current_dir().unwrap_or_default();
    let cli = match Cli::parse(&arguments, &cwd.to_string_lossy()) {
        Ok(cli) => cli,
        Err(error) => {
            eprintln!("{}", why_no_start(is_kubelet, &format!("failed to parse kubelet flag: {error}")));
            return ExitCode::from(EX_USAGE);
        }
    };
    if let Some(text) = cli.instead(program, is_kubelet) {
        let _ = std::io::stdout().write_all(text.as_bytes());
        return ExitCode::SUCCESS;
    }
    // Units and scripts of a kubelet look for these lines; under its own name the agent has these flags by choice.
    for warning in cli.warnings().iter().filter(|_| is_kubelet) {
        eprintln!("{warning}");
    }
    if cli.prepare_host() || cli.resolve_only() {
        return resolve_only::run(&cli, is_kubelet);
    }
    let start = match start(&cli) {
        Ok(start) => start,
        Err(lines) => {
            for line in lines {
                eprintln!("{}", why_no_start(is_kubelet, &line));
            }
            return ExitCode::from(EX_CONFIG);
        }
    };
    let config = start.resolved.config.clone();
    run_with_config(SPEC, config, |context| async move {
        let built = build(context, start, cli).await;
        if let (Err(error), true) = (&built, is_kubelet) {
            tracing::error!("{}", why_no_start(is_kubelet, &format!("{error:#}")));
        }
        built
    })
}

/// The line by which a start ends. Who watches a kubelet looks for these words (node-and-api.md §1.1).
fn why_no_start(is_kubelet: bool, line: &str) -> String {
    if is_kubelet { format!("\"command failed\" err={line:?}") } else { format!("keelson-init: {line}") }
}

/// What the command line and the files say.
struct Start {
    /// The files as they were before they were read.
    stamp: Stamp,
    resolved: Resolved,
    providers: Option<Handover>,
    ingredients: Ingredients,
}

/// Reads the files and resolves; the errors are lines for people.
fn start(cli: &Cli) -> Result<Start, Vec<String>> {
    let stamp = Stamp::of(cli);
    let mut errors = Vec::new();
    let mut document = |flag: &'static str, path: &Option<std::path::PathBuf>| {
        let read = |path: &std::path::PathBuf| {
            yaml::read(flag, path).map_err(|error| match (flag, status::chain(&error)) {
                ("--config", error) => not_loaded(&path.display().to_string(), &error),
                (_, error) => error,
            })
        };
        path.as_ref().map(read).transpose().unwrap_or_else(|error| {
            errors.push(error);
            None
        })
    };
    let kubelet = document("--config", &cli.config());
    let keelson = document("--keelson-config", &cli.keelson_config());
    let drop_ins = cli.config_dir().map_or_else(|| Ok((Vec::new(), Vec::new())), |dir| drop_ins::read(&dir));
    let (drop_ins, passed_over) = drop_ins.unwrap_or_else(|unread| {
        errors.extend(unread.iter().map(|error| not_merged(&status::chain(error))));
        Default::default()
    });
    if !errors.is_empty() {
        return Err(errors);
    }
    let flags = cli.flags();
    let default_root = Config::default().paths.root_dir;
    let host = host::facts(flags.root_dir.as_deref().map_or(&default_root, Path::new));
    let providers = credential_providers::read(
        cli.image_credential_provider_config().as_deref(),
        cli.image_credential_provider_bin_dir().as_deref(),
        &host.cwd,
    );
    let mut ingredients =
        Ingredients { flags, kubelet, drop_ins, keelson, host, resolved_unix_nanos: now_unix_nanos() };
    let folder = cli.config_dir().map(|folder| folder.display().to_string());
    let resolved = ingredients.alone().map_err(|problems| {
        let files = ingredients.files(folder.as_deref());
        problems.iter().map(|problem| told(problem, files)).collect::<Vec<_>>()
    });
    match (resolved, providers) {
        (Ok(mut resolved), Ok(providers)) => {
            resolved.notes.extend(drop_ins::note(&passed_over));
            let missing = handed_files::missing(&resolved.config);
            if !missing.is_empty() {
                return Err(missing);
            }
            if !resolved.config.control_plane.may_assign_a_configuration() {
                ingredients = Ingredients::default();
            }
            Ok(Start { stamp, resolved, providers, ingredients })
        }
        (resolved, providers) => {
            Err([resolved.err(), providers.err()].into_iter().flatten().flatten().collect())
        }
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Removes a file that may not be there.
fn remove_if_there(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Makes what init creates from here on the operator group's: its socket and the resolved configuration.
fn join_operator_group(config: &Config) -> anyhow::Result<()> {
    if !is_root() {
        return Ok(());
    }
    // SAFETY: takes a plain number; glibc changes all threads.
    if unsafe { libc::setegid(config.users.operator_gid) } != 0 {
        return Err(std::io::Error::last_os_error()).context("init needs CAP_SETGID to run the services");
    }
    Ok(())
}

/// Writes the resolved configuration, for the operator group to read, and what of it only one service may know.
fn write_config(resolved: &Resolved) -> anyhow::Result<()> {
    handed_files::hand_over_headers(&resolved.config)?;
    store(&resolved.config, resolved.beside())
}

/// The file alone; a `config` that was read from it has nothing of what only one service may know.
fn store(config: &Config, beside: Beside<'_>) -> anyhow::Result<()> {
    let path = config.paths.config_file();
    config
        .store_with(&path, beside)
        .context("the run dir must be writable and have room; --run-dir names another one")?;
    give_to_operators(config, &path)
}

/// Writes the configuration of credential provider plugins, for runtime-shim.
fn hand_over(config: &Config, providers: Option<&Handover>) -> anyhow::Result<()> {
    credential_providers::hand_over(&config.paths, providers)
        .context("cannot write the configuration of credential providers below the run dir; --run-dir names another one")
}

/// Hands each service what it may not read itself, and says what of it ends no start: not in the log, `--resolve-only` has none.
fn hand_over_files(config: &Config) -> anyhow::Result<()> {
    let looked = handed(config)?;
    for line in looked.lines().iter().chain(&looked.left_alone) {
        eprintln!("keelson-init: {line}");
    }
    Ok(())
}

/// Hands each service what it may not read itself.
fn handed(config: &Config) -> anyhow::Result<Looked> {
    let mut looked = handed_files::hand_over(config);
    match looked.errors.iter().position(HandoverError::ends_a_start) {
        Some(fatal) => Err(looked.errors.swap_remove(fatal).into()),
        None => Ok(looked),
    }
}

/// Hands over, says what ends no start, and keeps at it while the agent runs.
fn keep_handed(context: &Context) -> anyhow::Result<()> {
    let looked = handed(&context.config)?;
    // All else is told by the condition.
    // A program that has yet to answer is nothing that an operator has to mend.
    let is_login = |error: &&HandoverError| matches!(error, HandoverError::Login { .. });
    for error in looked.errors.iter().filter(|error| error.is_of_kubeconfig() && !is_login(error)) {
        tracing::error!("{}", status::chain(error));
    }
    if let Some(why) = &looked.left_alone {
        tracing::warn!("{why}");
    }
    if handed_files::any(&context.config) {
        looked.show(context);
        context.spawn("handed-files", handed_files::run(context.clone(), looked));
    }
    if matches!(context.config.control_plane, ControlPlane::Kubernetes(_)) {
        context.spawn("exec-login", exec_login::run(context.clone()));
    }
    Ok(())
}

/// Writes the flags, for node-api.
fn write_flags(config: &Config, cli: &Cli) -> anyhow::Result<()> {
    let path = flags_file::path(&config.paths);
    flags_file::write(&path, &cli.shown()).with_context(|| format!("cannot write {}", path.display()))?;
    give_to_operators(config, &path)
}

fn give_to_operators(config: &Config, path: &Path) -> anyhow::Result<()> {
    if is_root() {
        chown(path, Some(0), Some(config.users.operator_gid))
            .with_context(|| format!("cannot give {} to the operator group", path.display()))?;
    }
    Ok(())
}

/// `logging.verbosity` of the KubeletConfiguration in force, flags included.
fn verbosity(kubelet_configuration: &Map<String, Value>) -> i64 {
    let logging = kubelet_configuration.get("logging");
    logging.and_then(|logging| logging.get("verbosity")).and_then(Value::as_i64).unwrap_or(0)
}

fn log_notes(notes: &[Note]) {
    for note in notes {
        match note.level {
            Level::Info => tracing::info!("{}", note.text),
            Level::Warn => tracing::warn!("{}", note.text),
            Level::Error => tracing::error!("{}", note.text),
        }
    }
}

/// Prepares the machine, takes the locks, ends what an earlier init left, and starts the supervisor.
async fn build(context: Context, start: Start, cli: Cli) -> anyhow::Result<Built<impl Future<Output = ()>>> {
    let hurry = CancellationToken::new();
    let listener = signals::Listener::new().context("cannot listen for signals")?;
    tokio::spawn(listener.run(context.shutdown.clone(), hurry.clone()));
    let Start { stamp, resolved, providers, ingredients } = start;
    let verbosity = verbosity(&resolved.kubelet_configuration);
    let configuration = configuration_line(&resolved.kubelet_configuration, verbosity);
    for line in cli.lines(verbosity).into_iter().chain(configuration) {
        tracing::info!("{line}");
    }
    log_notes(&resolved.notes);
    let config = &*context.config;
    tracing::info!(version = config.own_processes.kubelet_version, "Kubelet version");
    if config.control_plane == ControlPlane::None {
        tracing::info!("Standalone mode, no API client");
        tracing::info!("No API server defined - no node status update will be sent");
    }
    let lock_file = lock_file(&context, &cli).await?;
    join_operator_group(config)?;
    dirs::prepare(&folders(config, is_root()))?;
    warn_of_closed_parents(config);
    let locks = lock::agent(config)?;
    kubelet::refuse(config)?;
    let left = stale::end_all(&stale::file(&config.paths.run_dir));
    if !left.is_empty() {
        tracing::warn!("ended what an earlier init left: {}", left.join(", "));
    }
    without_init::refuse(&config.paths).await?;
    without_init::forbid(&config.paths)
        .context("the run dir must be writable; --run-dir names another one")?;
    hand_over(config, providers.as_ref())?;
    keep_handed(&context)?;
    let (node_configuration, resolved) = match config.control_plane {
        ControlPlane::None | ControlPlane::Kubernetes(_) => {
            node_configuration::forget_status(&config.paths)?;
            (None, resolved)
        }
        ControlPlane::Etcd(_) => {
            let (own, in_force) = NodeConfiguration::open(ingredients, config).await?;
            (Some(own), in_force)
        }
    };
    write_config(&resolved)?;
    write_flags(config, &cli)?;
    drop(resolved);
    let reload = Reload::new(&context, cli, stamp, providers.as_ref());
    drop(providers);
    let own = &config.own_processes;
    if let Err(error) = host::set_oom_score(own.oom_score_adj) {
        tracing::warn!(
            %error,
            score = own.oom_score_adj,
            "cannot set the oom score of the agent: on a full machine it may be ended like any process"
        );
    }
    if let Err(error) = host::allow_open_files(own.max_open_files) {
        tracing::warn!("{error}");
    }
    let (launcher, lifeline) = Launcher::new(config, is_root(), host::effective_capabilities())
        .context("cannot make the lifeline of the services")?;
    if is_root() && !launcher.can_lower() {
        tracing::warn!("CAP_SETPCAP is missing: the bounding sets of the services are not lowered");
    }
    let (supervisor, services, commands) = Supervisor::new(&context, launcher, Timing::default(), hurry)
        .context("cannot listen for the ends of services")?;
    if let Some(own) = node_configuration {
        let run = own.run(context.clone(), services.clone(), commands.clone());
        context.spawn("node-configuration", run);
    }
    let api = SupervisorService::new(services.clone(), commands, now_unix_nanos()).with_files(reload.clone());
    context.spawn("configuration-files", reload.run(services));
    let (done, finished) = oneshot::channel();
    context.spawn("supervisor", async move {
        supervisor.run().await;
        let _ = done.send(());
    });
    let finish = async move {
        // An error means that the loop has panicked: nothing is left to wait for.
        let _ = finished.await;
        drop((locks, lifeline, lock_file));
    };
    Ok(Built { routes: Routes::new(SupervisorServer::new(api)), finish, announces_ready: true })
}

/// Waits for the lock of `--lock-file`, and sees to it that init ends when somebody else wants it, where that is asked for.
///
/// Told to end while it waits, the process ends here: nothing is there yet that would have to end in order.
async fn lock_file(context: &Context, cli: &Cli) -> anyhow::Result<Option<std::sync::Arc<lock_file::Held>>> {
    let Some(asked) = cli.lock_file() else { return Ok(None) };
    let Some(held) = asked.take(&context.shutdown).await? else {
        tracing::info!("told to end before the file lock was free");
        std::process::exit(0);
    };
    let held = std::sync::Arc::new(held);
    let (watched, shutdown) = (std::sync::Arc::clone(&held), context.shutdown.clone());
    context.spawn("lock-file", async move {
        // Cancel-safe: both only wait.
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = watched.contended() => {
                tracing::info!("another process wants the file lock: this agent ends, and its pods run on");
                shutdown.cancel();
            }
        }
    });
    Ok(Some(held))
}

/// A service without root cannot reach its socket through a folder that only its owner may pass.
fn warn_of_closed_parents(config: &Config) {
    if config.users.uids.is_empty() {
        return;
    }
    for folder in [&config.paths.run_dir, &config.paths.state_dir] {
        if let Some(parent) = dirs::closed_parent(folder) {
            tracing::warn!(
                "{} cannot be passed by the users of the services, which need {}: allow others to pass (chmod o+x) or name another folder",
                parent.display(),
                folder.display()
            );
        }
    }
}
