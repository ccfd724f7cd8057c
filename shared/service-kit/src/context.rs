use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Parser;
use keelson_config::{Config, Logging, ServiceName};
use keelson_telemetry::{Telemetry, TelemetryError};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::events::EventRing;
use crate::live::Live;
use crate::metrics::Metrics;
use crate::peer::Peer;
use crate::progress::Progress;

/// The command line of every service but init.
#[derive(Debug, Parser)]
#[command(version, about)]
pub struct ServiceArgs {
    /// The resolved configuration, as keelson-init writes it.
    #[arg(long, value_name = "FILE", default_value = "/run/keelson/config.json")]
    pub config: PathBuf,
    /// Ask the running service for its health, and exit: 0 when it is healthy, 69 when it is not.
    #[arg(long)]
    pub health: bool,
}

/// What a service is built from.
#[derive(Debug, Clone)]
pub struct Context {
    /// Which service this is.
    pub service: ServiceName,
    /// The version of the binary.
    pub version: &'static str,
    /// The resolved configuration, as it was at the start.
    pub config: Arc<Config>,
    /// The configuration with the current values of settings that may change while the service runs.
    pub live: Live,
    /// Events to be reported.
    pub events: EventRing,
    /// Loops and conditions.
    pub progress: Progress,
    /// The metrics registry.
    pub metrics: Metrics,
    /// Cancelled when the service is to end.
    pub shutdown: CancellationToken,
    pub(crate) fatal: mpsc::Sender<String>,
    /// The log and the traces of this process; `None` outside of [`crate::run`].
    pub(crate) telemetry: Option<Arc<Telemetry>>,
}

impl Context {
    /// A context outside [`crate::run`], for tests and tools.
    pub fn detached(service: ServiceName, config: Config) -> Self {
        let (fatal, _) = mpsc::channel(1);
        let config = Arc::new(config);
        Self {
            service,
            version: env!("CARGO_PKG_VERSION"),
            live: Live::new(Arc::clone(&config)),
            config,
            events: EventRing::default(),
            progress: Progress::default(),
            metrics: Metrics::new(),
            shutdown: CancellationToken::new(),
            fatal,
            telemetry: None,
        }
    }

    /// Sets the verbosity of the log of this process, as `PUT /debug/flags/v` does (node-and-api.md §8.2): 4 shows details, 6
    /// every step. It stays until the process ends, or the configured level changes. Without effect outside of [`crate::run`].
    ///
    /// # Errors
    /// The log is not set up; this does not happen in a service.
    pub fn set_log_verbosity(&self, verbosity: i32) -> Result<(), TelemetryError> {
        let Some(telemetry) = &self.telemetry else { return Ok(()) };
        let level = Logging::level_of_verbosity(verbosity);
        let previous = telemetry.set_filter(level)?;
        tracing::info!(
            event = "log_verbosity_set",
            verbosity,
            filter = level,
            previous,
            "log verbosity changed"
        );
        Ok(())
    }

    /// Ends the process at once with this exit code. Buffered lines of the log are written; nothing else is ended in order.
    pub fn exit(&self, code: i32) -> ! {
        self.telemetry.iter().for_each(|telemetry| telemetry.close_log());
        std::process::exit(code)
    }

    /// Another service that this one may call (architecture §2).
    pub fn peer(&self, name: ServiceName) -> Peer {
        debug_assert!(self.service.callees().contains(&name), "{} may not call {name}", self.service);
        Peer::service(&self.config.paths.run_dir, name)
    }

    /// Ends the service with exit code 70, after an error that it cannot recover from.
    pub fn fail(&self, reason: String) {
        // A full channel already holds an earlier reason.
        let _ = self.fatal.try_send(reason);
    }

    /// Runs a loop of the service concurrently with its server. A loop that ends before the shutdown, by return or by
    /// panic, ends the service with exit code 70.
    pub fn spawn<F>(&self, name: &'static str, work: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let fatal = self.fatal.clone();
        let shutdown = self.shutdown.clone();
        let task = crate::task::spawn(name, work);
        crate::task::spawn("end of a loop", async move {
            let end = task.await;
            if !shutdown.is_cancelled() {
                let how = end.err().map_or_else(|| "returned".to_owned(), |e| e.to_string());
                let _ = fatal.send(format!("the loop {name} has ended: {how}")).await;
            }
        });
    }
}
