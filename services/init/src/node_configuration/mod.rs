//! The configuration under this node's key: merged over the files, tried, kept or rolled back (architecture §7).
//!
//! pod-config leaves the content of the key in its state folder, where it stays while etcd is down. The loop
//! `node-configuration` reads it, lets the pure [`ConfigurationCheckpoint`] decide, and carries out the decision: it writes
//! the checkpoint, then the configuration, and then restarts the services. After a crash the next start repeats the
//! unfinished steps.

mod files;
mod inputs;

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::join_all;
use keelson_config::{AssignedConfiguration, Config, ConfigurationStatus, ServiceName};
use keelson_init_core::{
    ConfigurationCheckpoint, KeyAction, Resolution, Resolved, ServiceInTrial, ServiceState, ServiceStates,
    TrialVerdict, is_equivalent, judge_trial,
};
use keelson_service_kit::status::chain;
use keelson_service_kit::{CancellationToken, Context, LoopHandle, Progress, StateFile};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use crate::node_configuration::files::{Stamp, Watch};
use crate::supervisor::{Command, Services};

pub(crate) use crate::node_configuration::files::remove_status;
pub(crate) use crate::node_configuration::inputs::ConfigInputs;

/// The condition that says whether the content of the key can be read.
const CONDITION: &str = "node configuration";
/// A restart takes at most the time that a service has to end, and some more.
const RESTART_WITHIN: Duration = Duration::from_secs(8);
/// The maximum time that services have to report their state before something new is tried.
const MAX_SETTLE_TIME: Duration = Duration::from_secs(30);
/// The reason of the restarts, as shown in the services' last message.
const RESTART_REASON: &str = "for another configuration";

/// The checkpoint, as stored in its file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(transparent)]
struct StoredCheckpoint(ConfigurationCheckpoint);

impl keelson_service_kit::StoredState for StoredCheckpoint {
    const VERSION: u64 = 1;
    const CONSEQUENCE_OF_LOSS: &'static str = "the content of the node's key is tried again";
    const CONSEQUENCE_OF_WRITE_ERROR: &'static str =
        "the node configuration stays as it is; free space on the file system of the state dir";
}

/// When a trial began, and the restarts of each service at that time.
#[derive(Debug)]
struct TrialClock {
    started: Instant,
    restarts: BTreeMap<String, u32>,
}

/// The configuration under this node's key and its state.
#[derive(Debug)]
pub(crate) struct NodeConfiguration {
    inputs: ConfigInputs,
    file: StateFile<StoredCheckpoint>,
    checkpoint: ConfigurationCheckpoint,
    /// The configuration that the services run with.
    running: Config,
    /// The content that is part of the written configuration.
    written: Option<AssignedConfiguration>,
    reported: Option<ConfigurationStatus>,
    /// The stamp of pod-config's file when it was last handled completely.
    handled: Option<Stamp>,
}

impl NodeConfiguration {
    /// Determines the configuration at the start, before any service runs. `files` is what the files of the node resolve to.
    ///
    /// # Errors
    /// A newer release has written the checkpoint.
    pub(crate) async fn open(
        inputs: ConfigInputs,
        files_config: &Config,
    ) -> anyhow::Result<(Self, Resolved)> {
        let paths = &files_config.paths;
        let file = StateFile::at(paths.state(ServiceName::Init).join("node-configuration.json"));
        let StoredCheckpoint(before) = file.load().await?;
        let mut checkpoint = before.clone().init_started();
        match files::read(&paths.assigned_configuration()) {
            Ok(None) => checkpoint = ConfigurationCheckpoint::default(),
            Ok(Some(_)) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot read the node configuration; the previous one stays in force")
            }
        }
        let (checkpoint, resolved) = inputs.resolve_active(checkpoint);
        if checkpoint != before
            && let Err(error) = file.store(StoredCheckpoint(checkpoint.clone())).await
        {
            tracing::warn!(
                error = chain(&error),
                "cannot store the checkpoint: this start does not count for the trial"
            );
        }
        if let Some(why) = checkpoint.error() {
            tracing::warn!("the configuration under the node's key is not in force: {why}");
        }
        if let Some(active) = checkpoint.active() {
            tracing::info!(revision = active.revision, "the node configuration under the key is in force");
        }
        let mut own = Self {
            inputs,
            file,
            written: checkpoint.active().cloned(),
            checkpoint,
            running: resolved.config.clone(),
            reported: None,
            handled: None,
        };
        own.publish_status();
        Ok((own, resolved))
    }

    /// Follows the key until the shutdown.
    pub(crate) async fn run(self, context: Context, services: Services, commands: mpsc::Sender<Command>) {
        let folder = self.running.paths.state(ServiceName::PodConfig);
        let restarts = BTreeMap::new();
        let reconciler = Reconciler {
            clock: self.checkpoint.trial().map(|_| TrialClock { started: Instant::now(), restarts }),
            own: self,
            started: Instant::now(),
            services,
            commands,
            progress: context.progress.clone(),
        };
        let heartbeat = context.progress.register("node-configuration");
        reconciler.run(&context.shutdown, &heartbeat, &Watch::new(folder)).await;
    }

    /// Publishes the status if it has changed.
    fn publish_status(&mut self) {
        let status = self.checkpoint.status();
        if self.reported.is_some() && self.reported == status {
            return;
        }
        match files::write_status(&self.running, status.as_ref()) {
            Ok(()) => self.reported = status,
            Err(error) => {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "cannot publish the status of the node configuration"
                );
            }
        }
    }
}

/// The loop, with the services that it observes.
struct Reconciler {
    own: NodeConfiguration,
    clock: Option<TrialClock>,
    started: Instant,
    services: Services,
    commands: mpsc::Sender<Command>,
    progress: Progress,
}

impl Reconciler {
    async fn run(mut self, shutdown: &CancellationToken, heartbeat: &LoopHandle, watch: &Watch) {
        let mut updates = self.services.subscribe();
        loop {
            heartbeat.tick();
            watch.renew();
            let work = async {
                self.check_key().await;
                self.check_trial().await;
            };
            // Cancel-safe: the next start repeats unfinished work from the checkpoint.
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = work => {}
            }
            let (wait, watches_services) = (self.next_check(), self.clock.is_some() || !self.settled());
            // Cancel-safe: the token stays cancelled, and updates stay in the subscription.
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = watch.changed() => {}
                _ = updates.next(), if watches_services => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    fn period(&self) -> Duration {
        Duration::from_millis(self.own.running.node_configuration.trial_period_ms)
    }

    fn settle_time(&self) -> Duration {
        self.period().min(MAX_SETTLE_TIME)
    }

    /// The time until the next step is due.
    fn next_check(&self) -> Duration {
        let period = self.period();
        let due = match &self.clock {
            Some(clock) if clock.started.elapsed() < period => clock.started + period,
            Some(clock) => clock.started + period * 2,
            None => self.started + self.settle_time(),
        };
        let wait = due.saturating_duration_since(Instant::now());
        if wait.is_zero() { LoopHandle::HEARTBEAT } else { wait.min(LoopHandle::HEARTBEAT) }
    }

    /// Whether the state of the services before a new configuration is known: right after a start they have not answered yet.
    fn settled(&self) -> bool {
        let all_run = || self.service_states().values().all(|state| *state == ServiceState::Running);
        self.own.checkpoint.trial().is_some() || self.started.elapsed() >= self.settle_time() || all_run()
    }

    /// Handles the current content of the key, and retries what failed.
    async fn check_key(&mut self) {
        if self.own.written.as_ref() != self.own.checkpoint.active() {
            self.apply(self.own.checkpoint.clone()).await;
        }
        let path = self.own.running.paths.assigned_configuration();
        let stamp = files::stamp(&path);
        if self.own.handled == Some(stamp) || !self.settled() {
            return;
        }
        let assigned = match files::read(&path) {
            Ok(assigned) => assigned,
            Err(error) => {
                let text = format!("{error}; the current configuration stays in force");
                self.progress.condition(CONDITION, Err(text));
                return;
            }
        };
        self.progress.condition(CONDITION, Ok(()));
        let is_handled = match (self.own.checkpoint.action_for(assigned.as_ref()), assigned) {
            (KeyAction::Resolve, Some(content)) => self.resolve_content(content).await,
            (KeyAction::Withdraw, _) => {
                tracing::info!("the node's key does not exist any more; using the files of the node alone");
                self.apply(ConfigurationCheckpoint::default()).await
            }
            (KeyAction::Keep | KeyAction::Resolve, _) => true,
        };
        if is_handled {
            self.own.handled = Some(stamp);
        }
    }

    /// Resolves a content that is new; returns whether it was handled completely.
    async fn resolve_content(&mut self, content: AssignedConfiguration) -> bool {
        let revision = content.revision;
        let resolution = match self.own.inputs.resolve_assigned_content(&content) {
            Ok(resolved) if is_equivalent(&resolved.config, &self.own.running) => {
                tracing::info!(revision, "the new node configuration changes nothing");
                Resolution::Unchanged
            }
            Ok(_) => {
                tracing::info!(revision, "starting a trial of the new node configuration");
                Resolution::Changed(self.service_states())
            }
            Err(why) => {
                tracing::warn!(revision, "refused the new node configuration: {why}");
                Resolution::Failed(why)
            }
        };
        self.apply(self.own.checkpoint.clone().with_resolution(content, resolution)).await
    }

    /// Checks the current trial.
    async fn check_trial(&mut self) {
        let (Some(trial), Some(clock)) = (self.own.checkpoint.trial(), &self.clock) else { return };
        let now = self.trial_states(clock);
        match judge_trial(trial.before(), &now, clock.started.elapsed(), self.period()) {
            TrialVerdict::Pending => {}
            TrialVerdict::Passed => {
                tracing::info!("the node configuration has passed its trial");
                self.apply(self.own.checkpoint.clone().trial_passed()).await;
            }
            TrialVerdict::Failed(why) => {
                tracing::warn!("rolled back the node configuration: {why}");
                self.apply(self.own.checkpoint.clone().trial_failed(&why)).await;
            }
        }
    }

    /// Stores `checkpoint` and applies it. Returns whether all steps succeeded.
    async fn apply(&mut self, checkpoint: ConfigurationCheckpoint) -> bool {
        let (checkpoint, resolved) = self.own.inputs.resolve_active(checkpoint);
        if checkpoint != self.own.checkpoint {
            let stored = self.own.file.store(StoredCheckpoint(checkpoint.clone())).await;
            self.progress.condition("saved state", stored.as_ref().map_err(|error| chain(error)).copied());
            if stored.is_err() {
                return false;
            }
            self.own.checkpoint = checkpoint;
        }
        if self.own.checkpoint.trial().is_none() {
            self.clock = None;
        }
        let mut needs_restart = false;
        if self.own.written.as_ref() != self.own.checkpoint.active() {
            let written = crate::write_config(&resolved);
            let Resolved { config, notes, .. } = resolved;
            let reported = written.as_ref().map_err(|error| format!("{error:#}")).copied();
            self.progress.condition("resolved configuration", reported);
            if written.is_err() {
                return false;
            }
            crate::log_notes(&notes);
            needs_restart = !is_equivalent(&config, &self.own.running);
            self.own.written = self.own.checkpoint.active().cloned();
            self.own.running = config;
        }
        self.own.publish_status();
        if needs_restart {
            self.restart_all().await;
        }
        true
    }

    /// Restarts all services, as at a start of the agent; then the clock of a trial begins.
    async fn restart_all(&mut self) {
        let mut answers = Vec::new();
        for service in ServiceName::supervised() {
            let (done, answer) = oneshot::channel();
            // The send fails only if the supervisor has ended.
            let _ = self.commands.send(Command::Restart { service, why: RESTART_REASON, done }).await;
            answers.push(timeout(RESTART_WITHIN, answer));
        }
        // A service that has not started shows that by its state.
        let _ = join_all(answers).await;
        self.clock = self.own.checkpoint.trial().map(|_| TrialClock {
            started: Instant::now(),
            restarts: self.map_services(|service| service.restarts),
        });
    }

    fn service_states(&self) -> ServiceStates {
        self.map_services(|service| {
            ServiceState::parse_name(&service.state).unwrap_or(ServiceState::Starting)
        })
    }

    fn trial_states(&self, clock: &TrialClock) -> BTreeMap<String, ServiceInTrial> {
        self.map_services(|service| ServiceInTrial {
            state: ServiceState::parse_name(&service.state).unwrap_or(ServiceState::Starting),
            message: service.message.clone(),
            restarts: service
                .restarts
                .saturating_sub(clock.restarts.get(&service.name).copied().unwrap_or_default()),
        })
    }

    fn map_services<T>(
        &self,
        of: impl Fn(&keelson_proto::keelson::supervisor::v1::Service) -> T,
    ) -> BTreeMap<String, T> {
        let all = self.services.snapshot().into_iter();
        all.filter(|(name, _)| *name != ServiceName::Init).map(|(_, s)| (s.name.clone(), of(&s))).collect()
    }
}
