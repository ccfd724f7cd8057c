use std::future::Future;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{CommandFactory as _, FromArgMatches as _};
use keelson_config::{Config, ServiceName};
use keelson_proto::descriptors;
use keelson_proto::keelson::admin::v1::admin_server::AdminServer;
use keelson_proto::keelson::events::v1::events_server::EventsServer;
use keelson_telemetry::{FileVerbosity, Telemetry, TelemetryError};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::admin::AdminService;
use crate::context::{Context, ServiceArgs};
use crate::heartbeat::{self, ConfigFile};
use crate::live::Live;
use crate::server::{CallerPolicy, StackLayer, serve};
use crate::{events::EventRing, exit_reason, health, lifeline, metrics::Metrics, progress::Progress};

const EX_USAGE: u8 = 64;
const EX_SOFTWARE: u8 = 70;
const EX_CONFIG: u8 = 78;

/// The parameters by which one service's `main` differs from another's.
#[derive(Debug, Clone, Copy)]
pub struct ServiceSpec {
    /// Which service this is.
    pub name: ServiceName,
    /// One sentence, for `--help`.
    pub about: &'static str,
    /// The version of the binary.
    pub version: &'static str,
    /// The encoded descriptor set of its API, for reflection.
    pub descriptor: Option<&'static [u8]>,
    /// Worker threads; 1 runs everything on the main thread.
    pub threads: usize,
}

/// The whole of a service's `main`: arguments, configuration, telemetry, build, bind, serve, drain.
///
/// `build` makes the service's routes and spawns its loops; if it returns an error, the process exits with code 78.
pub fn run<B, F>(spec: ServiceSpec, build: B) -> ExitCode
where
    B: FnOnce(Context) -> F,
    F: Future<Output = anyhow::Result<Routes>>,
{
    let args = match parse(spec) {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EX_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let (file, config) = match ConfigFile::load(&args.config) {
        Ok(loaded) => loaded,
        Err(error) => {
            eprintln!("keelson-{}: {}", spec.name, crate::status::chain(&error));
            return ExitCode::from(EX_CONFIG);
        }
    };
    if args.health {
        return health::ask(spec.name, &config.paths.socket(spec.name));
    }
    let built = |context| async move {
        let routes = build(context).await?;
        Ok(Built { routes, finish: std::future::ready(()), announces_ready: false })
    };
    run_on_runtime(spec, config, Some(file), built)
}

/// What `build` returns in a service that resolves its configuration itself (init).
#[derive(Debug)]
pub struct Built<D> {
    /// Its API.
    pub routes: Routes,
    /// Awaited after the server has ended, before the process does.
    pub finish: D,
    /// Whether the service itself reports to systemd that it is ready; otherwise readiness is reported when its socket is
    /// bound.
    pub announces_ready: bool,
}

/// [`run`] with a configuration that is not read from the file that `--config` names.
pub fn run_with_config<B, F, D>(spec: ServiceSpec, config: Config, build: B) -> ExitCode
where
    B: FnOnce(Context) -> F,
    F: Future<Output = anyhow::Result<Built<D>>>,
    D: Future<Output = ()>,
{
    run_on_runtime(spec, config, None, build)
}

fn run_on_runtime<B, F, D>(spec: ServiceSpec, config: Config, file: Option<ConfigFile>, build: B) -> ExitCode
where
    B: FnOnce(Context) -> F,
    F: Future<Output = anyhow::Result<Built<D>>>,
    D: Future<Output = ()>,
{
    if let Err(error) = hide_from_same_user() {
        eprintln!(
            "keelson-{}: cannot keep others of the same user from reading its memory: {error}",
            spec.name
        );
        return ExitCode::from(EX_SOFTWARE);
    }
    let runtime = match spec.threads {
        0 | 1 => tokio::runtime::Builder::new_current_thread().enable_all().build(),
        n => tokio::runtime::Builder::new_multi_thread().worker_threads(n).enable_all().build(),
    };
    match runtime {
        Ok(runtime) => {
            let code = runtime.block_on(serve_service(spec, config, file, build));
            runtime.shutdown_timeout(Duration::from_millis(500));
            code
        }
        Err(error) => {
            eprintln!("keelson-{}: cannot start the async runtime: {error}", spec.name);
            ExitCode::from(EX_SOFTWARE)
        }
    }
}

/// Keeps processes of the same user from reading this one's memory, environment and files in `/proc` (prctl(2),
/// `PR_SET_DUMPABLE`), unless they may trace every process. No core dump is written. A pod with `hostPID` may have the user
/// of a service.
fn hide_from_same_user() -> std::io::Result<()> {
    use rustix::process::{DumpableBehavior, set_dumpable_behavior};
    // rustix reads it once, before Linux 6.4 from /proc/self/auxv, which from here on belongs to root.
    rustix::param::page_size();
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(Into::into)
}

fn parse(spec: ServiceSpec) -> Result<ServiceArgs, clap::Error> {
    let command = ServiceArgs::command().name(spec.name.binary()).version(spec.version).about(spec.about);
    ServiceArgs::from_arg_matches(&command.try_get_matches()?)
}

async fn serve_service<B, F, D>(
    spec: ServiceSpec,
    config: Config,
    file: Option<ConfigFile>,
    build: B,
) -> ExitCode
where
    B: FnOnce(Context) -> F,
    F: Future<Output = anyhow::Result<Built<D>>>,
    D: Future<Output = ()>,
{
    let telemetry = match set_up_telemetry(spec.name, &config) {
        Ok(telemetry) => Arc::new(telemetry),
        Err(error) => {
            eprintln!("keelson-{}: {}", spec.name, crate::status::chain(&error));
            return ExitCode::from(EX_CONFIG);
        }
    };
    let shutdown = CancellationToken::new();
    lifeline::watch(shutdown.clone());
    let (fatal, mut fatal_seen) = mpsc::channel(1);
    let config = Arc::new(config);
    let context = Context {
        service: spec.name,
        version: spec.version,
        live: Live::new(Arc::clone(&config)),
        config,
        events: EventRing::default(),
        progress: Progress::default(),
        metrics: Metrics::new(),
        shutdown: shutdown.clone(),
        fatal,
        telemetry: Some(Arc::clone(&telemetry)),
    };
    let code = match build(context.clone()).await {
        Err(error) => {
            tracing::error!("cannot start: {error:#}");
            exit_reason::write(&context.config.paths, spec.name, &format!("cannot start: {error:#}"));
            ExitCode::from(EX_CONFIG)
        }
        Ok(Built { routes, finish, announces_ready }) => {
            let routes = with_common(routes, spec, &context, &telemetry, file).await;
            let server = serve_until_signal(routes, &context, !announces_ready);
            // Cancel-safe: the process exits whichever branch completes first.
            let code = tokio::select! {
                code = server => code,
                Some(reason) = fatal_seen.recv() => {
                    tracing::error!("{reason}");
                    exit_reason::write(&context.config.paths, spec.name, &reason.to_string());
                    ExitCode::from(EX_SOFTWARE)
                }
            };
            shutdown.cancel();
            finish.await;
            code
        }
    };
    shutdown.cancel();
    let _ = tokio::task::spawn_blocking(move || telemetry.shutdown()).await;
    code
}

fn set_up_telemetry(service: ServiceName, config: &Config) -> Result<Telemetry, TelemetryError> {
    let output = &config.logging.output;
    keelson_telemetry::init(&keelson_telemetry::Options {
        service: service.as_str(),
        node: &config.node_name,
        format: &config.logging.format,
        level: &config.logging.level,
        files: &file_verbosities(config),
        output: keelson_telemetry::Output {
            split_stream: output.split_stream,
            buffer_bytes: usize::try_from(output.info_buffer_bytes).unwrap_or(usize::MAX),
            flush_every: Duration::from_millis(output.flush_ms),
        },
        otlp: config.tracing.as_ref().map(|t| (t.endpoint.as_str(), t.sampling_rate_per_million)),
    })
}

fn file_verbosities(config: &Config) -> Vec<FileVerbosity> {
    let vmodule = config.logging.vmodule.iter();
    vmodule.map(|one| FileVerbosity { pattern: one.file_pattern.clone(), verbosity: one.verbosity }).collect()
}

/// Health, reflection, events and admin: the same on every socket.
async fn with_common(
    routes: Routes,
    spec: ServiceSpec,
    context: &Context,
    telemetry: &Arc<Telemetry>,
    file: Option<ConfigFile>,
) -> Routes {
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_service_status("", tonic_health::ServingStatus::Serving).await;
    crate::task::spawn("heartbeat", heartbeat::run(context.clone(), health, file));
    crate::task::spawn("log level", follow_level(context.clone(), Arc::clone(telemetry)));
    let mut reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(descriptors::ADMIN)
        .register_encoded_file_descriptor_set(descriptors::EVENTS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET);
    if let Some(own) = spec.descriptor {
        reflection = reflection.register_encoded_file_descriptor_set(own);
    }
    let admin = AdminService { context: context.clone(), telemetry: Arc::clone(telemetry) };
    let routes = routes
        .add_service(health_service)
        .add_service(EventsServer::new(context.events.clone()))
        .add_service(AdminServer::new(admin));
    match reflection.build_v1() {
        Ok(service) => routes.add_service(service),
        Err(error) => {
            tracing::warn!(%error, "no reflection");
            routes
        }
    }
}

/// Sets the log level and the verbosity of single files again whenever the configuration changes them.
async fn follow_level(context: Context, telemetry: Arc<Telemetry>) {
    let mut live = context.live.subscribe();
    let mut level = context.config.logging.level.clone();
    let mut files = file_verbosities(&context.config);
    // Runs until the process exits.
    while live.changed().await.is_ok() {
        let (now, files_now) = {
            let config = live.borrow_and_update();
            (config.logging.level.clone(), file_verbosities(&config))
        };
        if files_now != files {
            match telemetry.set_files(&files_now) {
                Ok(()) => {
                    tracing::info!("the log verbosity of single files was changed to the configured one")
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot change the log verbosity of single files; the previous one stays in effect")
                }
            }
            files = files_now;
        }
        if now != level {
            match telemetry.set_filter(&now) {
                Ok(_) => tracing::info!(level = now, "the log level was changed to the configured one"),
                Err(error) => {
                    tracing::warn!(level = now, %error, "cannot change the log level; the previous one stays in effect")
                }
            }
            level = now;
        }
    }
}

async fn serve_until_signal(routes: Routes, context: &Context, announce: bool) -> ExitCode {
    let socket = context.config.paths.socket(context.service);
    let stack = StackLayer::new(CallerPolicy::new(&context.config), context.metrics.clone());
    let shutdown = context.shutdown.clone();
    let signals = shutdown.clone();
    crate::task::spawn("signals", async move {
        if let Err(error) = termination_signal().await {
            tracing::warn!(%error, "cannot listen for signals");
            return;
        }
        signals.cancel();
    });
    let served = serve(&socket, routes, stack, shutdown, || {
        let (service, version) = (context.service.as_str(), context.version);
        tracing::info!(event = "service_ready", service, version, "{service} is ready");
        if announce {
            let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        }
    })
    .await;
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(event = "serve_failed", "cannot serve: {error:#}");
            exit_reason::write(&context.config.paths, context.service, &format!("cannot serve: {error:#}"));
            ExitCode::from(EX_SOFTWARE)
        }
    }
}

async fn termination_signal() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}
