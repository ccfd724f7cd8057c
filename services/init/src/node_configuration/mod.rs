//! The configuration under this node's key: laid over the files, tried, kept or taken back (architecture §7).
//!
//! pod-config leaves what stands under the key in its state folder, also while etcd is away. The loop
//! `node-configuration` looks at it, has the pure [`Kept`] decide, and carries out: what is remembered is written first,
//! then the configuration, then the services are started again. A start that finds any of it half done does it again.

mod files;
mod ingredients;

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::join_all;
use keelson_config::{AssignedConfiguration, Config, ConfigurationStatus, ServiceName};
use keelson_init_core::{
    Judgement, Kept, Resolved, ServiceState, Step, TrialVerdict, Tried, Wellness, judge_trial, means_the_same,
};
use keelson_service_kit::status::chain;
use keelson_service_kit::{CancellationToken, Context, LoopHandle, Progress, StateFile};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use crate::node_configuration::files::{Stamp, Watch};
use crate::supervisor::{Command, Services};

pub(crate) use crate::node_configuration::files::forget_status;
pub(crate) use crate::node_configuration::ingredients::Ingredients;

/// The condition that says whether what stands under the key can be read and carried out.
const CONDITION: &str = "node configuration";
/// A restart takes at most the time that a service has to end, and a little.
const RESTART_WITHIN: Duration = Duration::from_secs(8);
/// How long the services may take to say how they are, before anything new is tried, at most.
const SETTLE: Duration = Duration::from_secs(30);
/// Why services are started again, as their last message shows it.
const WHY: &str = "for another configuration";

/// What is remembered, as its file has it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(transparent)]
struct Remembered(Kept);

impl keelson_service_kit::Kept for Remembered {
    const VERSION: u64 = 1;
    const WITHOUT: &'static str = "what stands under the node's key is tried anew";
    const UNWRITTEN: &'static str =
        "the node configuration stays as it is; give the file system of the state dir room";
}

/// When a trial began, and how often each service had been started again by then.
#[derive(Debug)]
struct Clock {
    began: Instant,
    restarts: BTreeMap<String, u32>,
}

/// The configuration under this node's key, and what becomes of it.
#[derive(Debug)]
pub(crate) struct NodeConfiguration {
    ingredients: Ingredients,
    file: StateFile<Remembered>,
    kept: Kept,
    /// What the services were started with.
    running: Config,
    /// The content that the written configuration has in it.
    written: Option<AssignedConfiguration>,
    told: Option<ConfigurationStatus>,
    /// The file of pod-config as it was when all of it had been carried out.
    done: Option<Stamp>,
}

impl NodeConfiguration {
    /// What is in force from the start on, before any service runs. `alone` is what the files of the node say.
    ///
    /// # Errors
    /// A newer release has written what is remembered.
    pub(crate) async fn open(ingredients: Ingredients, alone: &Config) -> anyhow::Result<(Self, Resolved)> {
        let paths = &alone.paths;
        let file = StateFile::at(paths.state(ServiceName::Init).join("node-configuration.json"));
        let Remembered(before) = file.load().await?;
        let mut kept = before.clone().started();
        match files::read(&paths.assigned_configuration()) {
            Ok(None) => kept = Kept::default(),
            Ok(Some(_)) => {}
            Err(error) => tracing::warn!(%error, "what was in force goes on"),
        }
        let (kept, resolved) = ingredients.in_force(kept);
        if kept != before
            && let Err(error) = file.store(Remembered(kept.clone())).await
        {
            tracing::warn!(error = chain(&error), "this start is not counted");
        }
        if let Some(why) = kept.refusal() {
            tracing::warn!("what stands under the node's key is not in force: {why}");
        }
        if let Some(active) = kept.active() {
            tracing::info!(revision = active.revision, "the node configuration under the key is in force");
        }
        let mut own = Self {
            ingredients,
            file,
            written: kept.active().cloned(),
            kept,
            running: resolved.config.clone(),
            told: None,
            done: None,
        };
        own.tell();
        Ok((own, resolved))
    }

    /// Follows the key until the shutdown.
    pub(crate) async fn run(self, context: Context, services: Services, commands: mpsc::Sender<Command>) {
        let folder = self.running.paths.state(ServiceName::PodConfig);
        let restarts = BTreeMap::new();
        let follower = Follower {
            clock: self.kept.trial().map(|_| Clock { began: Instant::now(), restarts }),
            own: self,
            began: Instant::now(),
            services,
            commands,
            progress: context.progress.clone(),
        };
        let turn = context.progress.register("node-configuration");
        follower.run(&context.shutdown, &turn, &Watch::new(folder)).await;
    }

    /// Tells others what became of it, when that is new.
    fn tell(&mut self) {
        let status = self.kept.status();
        if self.told.is_some() && self.told == status {
            return;
        }
        match files::tell(&self.running, status.as_ref()) {
            Ok(()) => self.told = status,
            Err(error) => {
                tracing::warn!(error = format!("{error:#}"), "nobody hears of the node configuration");
            }
        }
    }
}

/// The loop, with the services that it watches.
struct Follower {
    own: NodeConfiguration,
    clock: Option<Clock>,
    began: Instant,
    services: Services,
    commands: mpsc::Sender<Command>,
    progress: Progress,
}

impl Follower {
    async fn run(mut self, shutdown: &CancellationToken, turn: &LoopHandle, watch: &Watch) {
        let mut news = self.services.subscribe();
        loop {
            turn.tick();
            watch.renew();
            let work = async {
                self.look().await;
                self.judge().await;
            };
            // Cancel-safe: what is cut off is done again by the next start, from what is remembered.
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = work => {}
            }
            let (wait, curious) = (self.next_turn(), self.clock.is_some() || !self.settled());
            // Cancel-safe, each of them: the token stays cancelled, the news stay where they are.
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = watch.changed() => {}
                _ = news.next(), if curious => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    fn period(&self) -> Duration {
        Duration::from_millis(self.own.running.node_configuration.trial_period_ms)
    }

    fn settle(&self) -> Duration {
        self.period().min(SETTLE)
    }

    /// Until something is due.
    fn next_turn(&self) -> Duration {
        let period = self.period();
        let due = match &self.clock {
            Some(clock) if clock.began.elapsed() < period => clock.began + period,
            Some(clock) => clock.began + period * 2,
            None => self.began + self.settle(),
        };
        let wait = due.saturating_duration_since(Instant::now());
        if wait.is_zero() { LoopHandle::HEARTBEAT } else { wait.min(LoopHandle::HEARTBEAT) }
    }

    /// Whether it is known how the services are without what is new: right after a start they have not said.
    fn settled(&self) -> bool {
        let all_run = || self.wellness().values().all(|state| *state == ServiceState::Running);
        self.own.kept.trial().is_some() || self.began.elapsed() >= self.settle() || all_run()
    }

    /// Takes what stands under the key now, and does again what could not be done.
    async fn look(&mut self) {
        if self.own.written.as_ref() != self.own.kept.active() {
            self.adopt(self.own.kept.clone()).await;
        }
        let path = self.own.running.paths.assigned_configuration();
        let stamp = files::stamp(&path);
        if self.own.done == Some(stamp) || !self.settled() {
            return;
        }
        let assigned = match files::read(&path) {
            Ok(assigned) => assigned,
            Err(error) => {
                let text = format!("{error}; what is in force goes on");
                self.progress.condition(CONDITION, Err(text));
                return;
            }
        };
        self.progress.condition(CONDITION, Ok(()));
        let carried_out = match (self.own.kept.step(assigned.as_ref()), assigned) {
            (Step::Judge, Some(content)) => self.take(content).await,
            (Step::Withdraw, _) => {
                tracing::info!("nothing stands under the node's key any more: the files of the node alone");
                self.adopt(Kept::default()).await
            }
            (Step::Nothing | Step::Judge, _) => true,
        };
        if carried_out {
            self.own.done = Some(stamp);
        }
    }

    /// Takes a content that was not seen before.
    async fn take(&mut self, content: AssignedConfiguration) -> bool {
        let revision = content.revision;
        let judgement = match self.own.ingredients.with(&content) {
            Ok(resolved) if means_the_same(&resolved.config, &self.own.running) => {
                tracing::info!(revision, "the node configuration under the key changes nothing");
                Judgement::Same
            }
            Ok(_) => {
                tracing::info!(revision, "the node configuration under the key is tried");
                Judgement::Other(self.wellness())
            }
            Err(why) => {
                tracing::warn!(revision, "the node configuration under the key is refused: {why}");
                Judgement::Refused(why)
            }
        };
        self.adopt(self.own.kept.clone().judged(content, judgement)).await
    }

    /// Judges the trial that goes on.
    async fn judge(&mut self) {
        let (Some(trial), Some(clock)) = (self.own.kept.trial(), &self.clock) else { return };
        let now = self.tried(clock);
        match judge_trial(trial.before(), &now, clock.began.elapsed(), self.period()) {
            TrialVerdict::GoesOn => {}
            TrialVerdict::Passed => {
                tracing::info!("the services do well with the node configuration under the key");
                self.adopt(self.own.kept.clone().passed()).await;
            }
            TrialVerdict::Failed(why) => {
                tracing::warn!("the node configuration under the key is taken back: {why}");
                self.adopt(self.own.kept.clone().failed(&why)).await;
            }
        }
    }

    /// Remembers `kept` and makes it so. Whether all of it is done.
    async fn adopt(&mut self, kept: Kept) -> bool {
        let (kept, resolved) = self.own.ingredients.in_force(kept);
        if kept != self.own.kept {
            let stored = self.own.file.store(Remembered(kept.clone())).await;
            self.progress.condition("saved state", stored.as_ref().map_err(|error| chain(error)).copied());
            if stored.is_err() {
                return false;
            }
            self.own.kept = kept;
        }
        if self.own.kept.trial().is_none() {
            self.clock = None;
        }
        let mut restart = false;
        if self.own.written.as_ref() != self.own.kept.active() {
            let written = crate::write_config(&resolved);
            let Resolved { config, notes, .. } = resolved;
            let told = written.as_ref().map_err(|error| format!("{error:#}")).copied();
            self.progress.condition("resolved configuration", told);
            if written.is_err() {
                return false;
            }
            crate::log_notes(&notes);
            restart = !means_the_same(&config, &self.own.running);
            self.own.written = self.own.kept.active().cloned();
            self.own.running = config;
        }
        self.own.tell();
        if restart {
            self.restart_all().await;
        }
        true
    }

    /// Starts all services again, as a start of the agent does; the clock of a trial begins when they have been.
    async fn restart_all(&mut self) {
        let mut answers = Vec::new();
        for service in ServiceName::supervised() {
            let (done, answer) = oneshot::channel();
            // The supervisor has ended when nobody takes it.
            let _ = self.commands.send(Command::Restart { service, why: WHY, done }).await;
            answers.push(timeout(RESTART_WITHIN, answer));
        }
        // Who has not started shows it by its state.
        let _ = join_all(answers).await;
        self.clock = self
            .own
            .kept
            .trial()
            .map(|_| Clock { began: Instant::now(), restarts: self.of_each(|service| service.restarts) });
    }

    fn wellness(&self) -> Wellness {
        self.of_each(|service| ServiceState::of_word(&service.state).unwrap_or(ServiceState::Starting))
    }

    fn tried(&self, clock: &Clock) -> BTreeMap<String, Tried> {
        self.of_each(|service| Tried {
            state: ServiceState::of_word(&service.state).unwrap_or(ServiceState::Starting),
            message: service.message.clone(),
            restarts: service
                .restarts
                .saturating_sub(clock.restarts.get(&service.name).copied().unwrap_or_default()),
        })
    }

    fn of_each<T>(
        &self,
        of: impl Fn(&keelson_proto::keelson::supervisor::v1::Service) -> T,
    ) -> BTreeMap<String, T> {
        let all = self.services.snapshot().into_iter();
        all.filter(|(name, _)| *name != ServiceName::Init).map(|(_, s)| (s.name.clone(), of(&s))).collect()
    }
}
