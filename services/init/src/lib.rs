//! Starts and supervises the other services.
//!
//! init reads flags, a KubeletConfiguration and a KeelsonConfiguration, reports all errors in them, and writes the result to
//! `<run-dir>/config.json`, where every service reads it. It creates the folders with their owners, starts each service as
//! its own user with minimal privileges ([`keelson_init_core::privileges`]), polls its health, and restarts it when it ends
//! or hangs.
//!
//! init is the parent of no container. When it dies, the services end with it (each holds the read end of a pipe, the
//! lifeline); the next init kills what is left ([`leftover_processes`]), takes the locks ([`lock`]) at once and
//! starts the services, which adopt the running containers.

mod certificates;
mod cli;
mod credential_copies;
mod credential_providers;
mod dirs;
mod drop_ins;
mod exec_credentials;
mod exec_login;
mod flags_file;
mod foreign_kubelet;
mod host;
mod kubeconfig;
pub mod launch;
pub mod leftover_processes;
pub mod lock;
mod lock_file;
mod node_configuration;
mod poller;
mod reload;
mod resolve_only;
mod server;
mod signals;
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
use keelson_config::{Config, ConfigExtras, ControlPlane, ServiceName};
use keelson_init_core::{
    Level, Note, Resolved, configuration_line, folders, load_error, merge_error, startup_error,
};
use keelson_proto::descriptors;
use keelson_proto::keelson::supervisor::v1::supervisor_server::SupervisorServer;
use keelson_service_kit::{
    Built, CancellationToken, Context, ServiceSpec, now_unix_nanos, run_with_config, status,
};
use serde_json::{Map, Value};
use tokio::sync::oneshot;
use tonic::service::Routes;

use crate::cli::Cli;
use crate::credential_copies::{CopyError, CopyReport};
use crate::credential_providers::ProvidersCopy;
use crate::kubeconfig::KubeconfigFileError;
use crate::launch::Launcher;
use crate::lock::Locks;
use crate::node_configuration::{ConfigInputs, NodeConfiguration};
use crate::reload::{Reload, Stamp};
use crate::server::SupervisorService;
use crate::supervisor::{Supervisor, Timing};

const EX_USAGE: u8 = 64;
const EX_SOFTWARE: u8 = 70;
const EX_CONFIG: u8 = 78;

const SPEC: ServiceSpec = ServiceSpec {
    name: ServiceName::Init,
    about: "Starts and supervises the services of a Keelson node agent",
    version: env!("CARGO_PKG_VERSION"),
    descriptor: Some(descriptors::SUPERVISOR),
    threads: 1,
};

/// The whole of `main`. Under the name `kubelet` the exit codes are the kubelet's: 0 and 1.
pub fn main() -> ExitCode {
    signals::block();
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
            eprintln!(
                "{}",
                startup_error_line(is_kubelet, &format!("failed to parse kubelet flag: {error}"))
            );
            return ExitCode::from(EX_USAGE);
        }
    };
    if let Some(text) = cli.early_output(program, is_kubelet) {
        let _ = std::io::stdout().write_all(text.as_bytes());
        return ExitCode::SUCCESS;
    }
    // Units and scripts for a kubelet look for these lines; under its own name, the agent's flags are not deprecated.
    for warning in cli.warnings().iter().filter(|_| is_kubelet) {
        eprintln!("{warning}");
    }
    if cli.prepare_host() || cli.resolve_only() {
        return resolve_only::run(&cli, is_kubelet);
    }
    let start = match read_start_inputs(&cli) {
        Ok(start) => start,
        Err(lines) => {
            for line in lines {
                eprintln!("{}", startup_error_line(is_kubelet, &line));
            }
            return ExitCode::from(EX_CONFIG);
        }
    };
    let config = start.resolved.config.clone();
    run_with_config(SPEC, config, |context| async move {
        let built = build(context, start, cli).await;
        if let (Err(error), true) = (&built, is_kubelet) {
            // The log formats this line as a kubelet does. Before there is a log, `startup_error_line` does that.
            tracing::error!(error = format!("{error:#}"), "command failed");
        }
        built
    })
}

/// The message of a failed start. Tools that watch a kubelet look for these words (node-and-api.md §1.1).
fn startup_error_line(is_kubelet: bool, line: &str) -> String {
    if is_kubelet { format!("\"command failed\" err={line:?}") } else { format!("keelson-init: {line}") }
}

/// The inputs from the command line and the files.
struct StartInputs {
    /// The state of the files before they were read.
    stamp: Stamp,
    resolved: Resolved,
    providers: Option<ProvidersCopy>,
    inputs: ConfigInputs,
}

/// Reads the files and resolves the configuration; the errors are lines for operators.
fn read_start_inputs(cli: &Cli) -> Result<StartInputs, Vec<String>> {
    let stamp = Stamp::of(cli);
    let mut errors = Vec::new();
    let mut read_document = |flag: &'static str, path: &Option<std::path::PathBuf>| {
        let read = |path: &std::path::PathBuf| {
            yaml::read(flag, path).map_err(|error| match (flag, status::chain(&error)) {
                ("--config", error) => load_error(&path.display().to_string(), &error),
                (_, error) => error,
            })
        };
        path.as_ref().map(read).transpose().unwrap_or_else(|error| {
            errors.push(error);
            None
        })
    };
    let kubelet = read_document("--config", &cli.config());
    let keelson = read_document("--keelson-config", &cli.keelson_config());
    let drop_ins = cli.config_dir().map_or_else(|| Ok((Vec::new(), Vec::new())), |dir| drop_ins::read(&dir));
    let (drop_ins, ignored) = drop_ins.unwrap_or_else(|unread| {
        errors.extend(unread.iter().map(|error| merge_error(&status::chain(error))));
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
    let mut inputs =
        ConfigInputs { flags, kubelet, drop_ins, keelson, host, resolved_unix_nanos: now_unix_nanos() };
    let folder = cli.config_dir().map(|folder| folder.display().to_string());
    let resolved = inputs.resolve_files().map_err(|errors| {
        let files = inputs.config_files(folder.as_deref());
        errors.iter().map(|error| startup_error(error, files)).collect::<Vec<_>>()
    });
    match (resolved, providers) {
        (Ok(mut resolved), Ok(providers)) => {
            resolved.notes.extend(drop_ins::ignored_note(&ignored));
            let missing = credential_copies::startup_errors(&resolved.config);
            if !missing.is_empty() {
                return Err(missing);
            }
            if !resolved.config.control_plane.may_assign_a_configuration() {
                inputs = ConfigInputs::default();
            }
            Ok(StartInputs { stamp, resolved, providers, inputs })
        }
        (resolved, providers) => {
            Err([resolved.err(), providers.err()].into_iter().flatten().flatten().collect())
        }
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Switches to the operator group, so that it owns the files that init creates from here on: the socket and the resolved
/// configuration.
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

/// Writes the resolved configuration, readable by the operator group, and separately the part for one service only.
fn write_config(resolved: &Resolved) -> anyhow::Result<()> {
    credential_copies::copy_manifest_headers(&resolved.config)?;
    store_config(&resolved.config, resolved.config_extras())
}

/// Writes the file alone, without the part for one service only.
fn store_config(config: &Config, extras: ConfigExtras<'_>) -> anyhow::Result<()> {
    let path = config.paths.config_file();
    keelson_service_kit::store_config(&path, config, extras)
        .context("the run dir must be writable and have free space; set another one with --run-dir")?;
    give_to_operators(config, &path)
}

/// Writes the configuration of credential provider plugins for runtime-shim.
fn write_providers_copy(config: &Config, providers: Option<&ProvidersCopy>) -> anyhow::Result<()> {
    credential_providers::write_copy(&config.paths, providers)
        .context("cannot write the configuration of credential providers below the run dir; set another one with --run-dir")
}

/// Copies the credentials for the services and prints errors that do not prevent a start; there is no log in
/// `--resolve-only`.
fn copy_credentials_and_report(config: &Config) -> anyhow::Result<()> {
    let report = copy_credentials(config)?;
    for line in report.lines().iter().chain(&report.unused_pair) {
        eprintln!("keelson-init: {line}");
    }
    Ok(())
}

/// Copies the credentials for the services.
fn copy_credentials(config: &Config) -> anyhow::Result<CopyReport> {
    let mut report = credential_copies::update_copies(config);
    match report.errors.iter().position(CopyError::prevents_start) {
        Some(fatal) => Err(report.errors.swap_remove(fatal).into()),
        None => Ok(report),
    }
}

/// Copies the credentials, logs errors that do not prevent a start, and keeps the copies up to date.
fn maintain_copies(context: &Context) -> anyhow::Result<()> {
    let report = copy_credentials(&context.config)?;
    // All other errors are reported by the condition. A plugin that has not answered yet needs no operator.
    let is_pending_login =
        |error: &&CopyError| matches!(error, CopyError::Kubeconfig(KubeconfigFileError::Login { .. }));
    for error in report.errors.iter().filter(|error| error.is_kubeconfig_error() && !is_pending_login(error))
    {
        tracing::error!("{}", status::chain(error));
    }
    if let Some(why) = &report.unused_pair {
        tracing::warn!("{why}");
    }
    if credential_copies::any_needed(&context.config) {
        report.publish(context);
        context.spawn("credential-copies", credential_copies::run(context.clone(), report));
    }
    if matches!(context.config.control_plane, ControlPlane::Kubernetes(_)) {
        context.spawn("exec-login", exec_login::run(context.clone()));
    }
    Ok(())
}

/// Writes the flags for node-api.
fn write_flags(config: &Config, cli: &Cli) -> anyhow::Result<()> {
    let path = flags_file::path(&config.paths);
    flags_file::write(&path, &cli.all_flags()).with_context(|| format!("cannot write {}", path.display()))?;
    give_to_operators(config, &path)
}

fn give_to_operators(config: &Config, path: &Path) -> anyhow::Result<()> {
    if is_root() {
        chown(path, Some(0), Some(config.users.operator_gid))
            .with_context(|| format!("cannot give {} to the operator group", path.display()))?;
    }
    Ok(())
}

/// `logging.verbosity` of the KubeletConfiguration in force, including flags.
fn verbosity(kubelet_configuration: &Map<String, Value>) -> i64 {
    let logging = kubelet_configuration.get("logging");
    logging.and_then(|logging| logging.get("verbosity")).and_then(Value::as_i64).unwrap_or(0)
}

fn log_notes(notes: &[Note]) {
    for Note { level, event, text } in notes {
        match level {
            Level::Info => tracing::info!(event, "{text}"),
            Level::Warn => tracing::warn!(event, "{text}"),
            Level::Error => tracing::error!(event, "{text}"),
        }
    }
}

/// Prepares the machine, takes the locks, kills what an earlier init left, and starts the supervisor.
async fn build(
    context: Context,
    start: StartInputs,
    cli: Cli,
) -> anyhow::Result<Built<impl Future<Output = ()>>> {
    let force = CancellationToken::new();
    let listener = signals::Listener::new().context("cannot listen for signals")?;
    keelson_service_kit::spawn("signals", listener.run(context.shutdown.clone(), force.clone()));
    let StartInputs { stamp, resolved, providers, inputs } = start;
    let config = &*context.config;
    log_start(config, &cli, &resolved);
    let lock_file = lock_file(&context, &cli).await?;
    join_operator_group(config)?;
    dirs::prepare(&folders(config, is_root()))?;
    warn_about_closed_parents(config);
    let locks = replace_earlier_agent(config).await?;
    write_providers_copy(config, providers.as_ref())?;
    maintain_copies(&context)?;
    let (node_configuration, resolved) = match config.control_plane {
        ControlPlane::None | ControlPlane::Kubernetes(_) => {
            node_configuration::remove_status(&config.paths)?;
            (None, resolved)
        }
        ControlPlane::Etcd(_) => {
            let (own, in_force) = NodeConfiguration::open(inputs, config).await?;
            (Some(own), in_force)
        }
    };
    write_config(&resolved)?;
    write_flags(config, &cli)?;
    drop(resolved);
    let reload = Reload::new(&context, cli, stamp, providers.as_ref());
    drop(providers);
    set_process_limits(config);
    let (launcher, lifeline) = Launcher::new(config, is_root(), host::effective_capabilities())
        .context("cannot create the lifeline of the services")?;
    if is_root() && !launcher.can_lower() {
        tracing::warn!("CAP_SETPCAP is missing: the bounding sets of the services are not lowered");
    }
    let (supervisor, services, commands) = Supervisor::new(&context, launcher, Timing::default(), force)
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
        // An error means that the supervisor panicked: there is nothing to wait for.
        let _ = finished.await;
        drop((locks, lifeline, lock_file));
    };
    Ok(Built { routes: Routes::new(SupervisorServer::new(api)), finish, announces_ready: true })
}

/// Logs the flags, the configuration and the notes on it, as a kubelet does at its start.
fn log_start(config: &Config, cli: &Cli, resolved: &Resolved) {
    let verbosity = verbosity(&resolved.kubelet_configuration);
    let configuration = configuration_line(&resolved.kubelet_configuration, verbosity);
    for line in cli.log_lines(verbosity).into_iter().chain(configuration) {
        // As a kubelet, without quotes around the line.
        tracing::info!(target: keelson_service_kit::UNSTRUCTURED_TARGET, "{line}");
    }
    log_notes(&resolved.notes);
    tracing::info!(version = config.own_processes.kubelet_version, "Kubelet version");
    if config.control_plane == ControlPlane::None {
        tracing::info!("Standalone mode, no API client");
        tracing::info!("No API server defined - no node status update will be sent");
    }
}

/// Takes the locks of the agent, and ends or refuses whatever else manages this node's pods.
async fn replace_earlier_agent(config: &Config) -> anyhow::Result<Locks> {
    let locks = lock::agent(config)?;
    foreign_kubelet::ensure_none(config)?;
    let killed = leftover_processes::kill_all(&leftover_processes::file(&config.paths.run_dir));
    if !killed.is_empty() {
        tracing::warn!("killed what an earlier init left: {}", killed.join(", "));
    }
    without_init::ensure_none_running(&config.paths).await?;
    without_init::forbid(&config.paths)
        .context("the run dir must be writable; set another one with --run-dir")?;
    Ok(locks)
}

/// Sets the oom score and the number of open files of this process.
fn set_process_limits(config: &Config) {
    let own = &config.own_processes;
    if let Err(error) = host::set_oom_score(own.oom_score_adj) {
        tracing::warn!(
            event = "oom_score_not_set",
            %error,
            score = own.oom_score_adj,
            "cannot set the oom score of the agent: when memory runs out, the kernel may kill it like any process"
        );
    }
    if let Err(error) = host::allow_open_files(own.max_open_files) {
        tracing::warn!("{error}");
    }
}

/// Waits for the lock of `--lock-file`, and with `--exit-on-lock-contention` shuts init down when another process wants it.
///
/// If a shutdown is requested while it waits, the process exits here, since nothing has been started yet.
async fn lock_file(
    context: &Context,
    cli: &Cli,
) -> anyhow::Result<Option<std::sync::Arc<lock_file::FileLock>>> {
    let Some(lock_file_option) = cli.lock_file() else { return Ok(None) };
    let Some(held) = lock_file_option.acquire(&context.shutdown).await? else {
        tracing::info!("shutdown was requested while waiting for the file lock");
        context.exit(0);
    };
    let held = std::sync::Arc::new(held);
    let (watched_lock, shutdown) = (std::sync::Arc::clone(&held), context.shutdown.clone());
    context.spawn("lock-file", async move {
        // Cancel-safe: both only wait.
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = watched_lock.contended() => {
                tracing::info!("another process wants the file lock: the agent shuts down, and its pods keep running");
                shutdown.cancel();
            }
        }
    });
    Ok(Some(held))
}

/// Warns of folders that other users cannot traverse: services without root cannot reach their sockets through them.
fn warn_about_closed_parents(config: &Config) {
    if config.users.uids.is_empty() {
        return;
    }
    for folder in [&config.paths.run_dir, &config.paths.state_dir] {
        if let Some(parent) = dirs::closed_parent(folder) {
            tracing::warn!(
                "{} cannot be traversed by the users of the services, which need {}: allow it for others (chmod o+x) or set another folder",
                parent.display(),
                folder.display()
            );
        }
    }
}
