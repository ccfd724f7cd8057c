//! Graceful node shutdown (node-and-api.md §11): delays a shutdown of the machine until pods have ended.
//!
//! One task follows logind while a grace period is configured. When a shutdown is prepared it publishes orders to end pods, group
//! by group, and releases its inhibitor when the last group has ended or had its time. While logind cannot be reached a condition
//! says so, and nothing else waits. The decisions are in `keelson-resource-manager-core::node_shutdown`.
//!
//! | module | task |
//! |---|---|
//! | `ending` | ends the groups of pods one after another |
//! | `record` | the state file and the metrics |

mod ending;
mod record;
#[cfg(test)]
mod tests;

use std::pin::Pin;
use std::time::Duration;

use keelson_config::{Config, NodeShutdown};
use keelson_resource_manager_core::node_shutdown::periods::{self, GracePeriod, GracePeriods};
use keelson_resource_manager_core::node_shutdown::progress::{Action, Input, Progress};
use keelson_service_kit::status::chain;
use keelson_service_kit::{CancellationToken, Context, LoopHandle, ObjectRef};
use tokio::sync::watch;
use tokio::time::Instant;

pub(crate) use ending::Ending;
pub(crate) use record::Record;

use crate::logind::{Inhibitor, LogindError, Session, Settings};

/// The name of the condition of this task.
const CONDITION: &str = "node-shutdown";
/// The reason of its events on the Node.
const REASON: &str = "Shutdown";
/// Between the end of a session with logind and the next.
const RETRY: Duration = Duration::from_secs(1);

/// The grace periods of a configuration; none when pods end with the machine.
pub(crate) fn grace_periods(config: &NodeShutdown) -> Option<GracePeriods> {
    GracePeriods::from_settings(&settings(config))
}

/// The settings of a configuration.
pub(crate) fn settings(config: &NodeShutdown) -> periods::Settings {
    let by_priority = config.by_priority.iter();
    periods::Settings {
        total_nanos: config.total_nanos,
        critical_nanos: config.critical_nanos,
        by_priority: by_priority
            .map(|period| GracePeriod { priority: period.priority, seconds: period.seconds })
            .collect(),
    }
}

/// The settings of logind that these grace periods need.
pub(crate) fn logind_settings(periods: &GracePeriods, config: &Config) -> Settings {
    let seconds = u64::try_from(periods.total_seconds()).unwrap_or(0);
    let socket = config.resources.system_bus.socket.clone();
    Settings::new(socket, Duration::from_secs(seconds), config.manage_host)
}

/// The groups of pods while they are being ended.
type Groups = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The task.
pub(crate) struct ShutdownLoop {
    ctx: Context,
    logind: Settings,
    ending: Ending,
    record: Record,
    shutting_down: watch::Sender<bool>,
    progress: Progress,
    inhibitor: Option<Inhibitor>,
    groups: Option<Groups>,
}

impl ShutdownLoop {
    /// `shutting_down` is set while pods are being ended, and after that until the machine has stopped; also at the start, when
    /// `record` has a shutdown that was not completed.
    pub(crate) fn new(
        ctx: Context,
        logind: Settings,
        ending: Ending,
        record: Record,
        shutting_down: watch::Sender<bool>,
    ) -> Self {
        // Until logind says that it was cancelled, a shutdown that an earlier process began is under way.
        shutting_down.send_replace(record.is_unfinished());
        let (progress, inhibitor, groups) = (Progress::default(), None, None);
        Self { ctx, logind, ending, record, shutting_down, progress, inhibitor, groups }
    }

    /// Runs until the service ends, which releases the inhibitor.
    pub(crate) async fn run(mut self, shutdown: CancellationToken, handle: LoopHandle) {
        // Cancel-safe: each arm runs until then, and what it holds is not used any more.
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = self.follow() => {}
            () = heartbeat(handle) => {}
        }
    }

    async fn follow(&mut self) {
        loop {
            let connected = connect(&self.logind, &self.ctx);
            // Cancel-safe: a connection that is not complete is opened again, and the groups stay.
            let (session, preparing) = tokio::select! {
                connected = connected => connected,
                () = ended(&mut self.groups) => {
                    self.groups_ended().await;
                    continue;
                }
            };
            let Err(error) = self.serve(session, preparing).await;
            report(&self.ctx, &error);
            let until = Instant::now() + RETRY;
            // Cancel-safe: the groups stay, and a timer holds nothing.
            tokio::select! {
                () = tokio::time::sleep_until(until) => {}
                () = ended(&mut self.groups) => self.groups_ended().await,
            }
        }
    }

    /// Follows one session with logind until it ends.
    async fn serve(
        &mut self,
        mut session: Session,
        preparing: bool,
    ) -> Result<std::convert::Infallible, LogindError> {
        let unfinished = self.record.is_unfinished();
        self.apply(Input::Connected { preparing, unfinished }, Some(&session)).await?;
        self.ctx.progress.condition(CONDITION, Ok(()));
        loop {
            // Cancel-safe: signals that were not taken stay in the session, and the groups stay.
            let input = tokio::select! {
                preparing = session.next() => Input::Preparing(preparing?),
                () = ended(&mut self.groups) => Input::GroupsEnded,
            };
            self.apply(input, Some(&session)).await?;
        }
    }

    async fn groups_ended(&mut self) {
        if let Err(error) = self.apply(Input::GroupsEnded, None).await {
            report(&self.ctx, &error);
        }
    }

    /// Carries out what follows from an input. Without a session no inhibitor is taken; the next session takes it.
    async fn apply(&mut self, input: Input, session: Option<&Session>) -> Result<(), LogindError> {
        let (next, actions) = self.progress.step(input);
        if next != self.progress {
            tracing::info!(event = "node_shutdown", before = ?self.progress, now = ?next, "the state of the shutdown of the machine has changed");
        }
        self.progress = next;
        let now = next.is_shutting_down();
        self.shutting_down.send_if_modified(|before| std::mem::replace(before, now) != now);
        for action in actions {
            if let Some(message) = action.event_message() {
                self.ctx.events.normal(ObjectRef::node(&self.ctx.config.node_name), REASON, message);
            }
            match action {
                Action::Inhibit => {
                    if let Some(session) = session {
                        self.inhibitor = Some(session.inhibit().await?);
                    }
                }
                Action::Release => self.inhibitor = None,
                Action::StoreStart => self.record.start().await,
                Action::StoreEnd => self.record.end().await,
                Action::EndGroups => self.groups = Some(Box::pin(self.ending.clone().run())),
                Action::StopEnding => self.groups = None,
                // Their events are recorded above.
                Action::RecordShutdown | Action::RecordCancellation => {}
            }
        }
        Ok(())
    }
}

/// Opens a session with logind, and asks it whether a shutdown is being prepared; tries again until both succeed. Cancel-safe.
async fn connect(settings: &Settings, ctx: &Context) -> (Session, bool) {
    loop {
        let session = Session::open_with_retry(settings, |error| report(ctx, error)).await;
        match session.is_preparing().await {
            Ok(preparing) => return (session, preparing),
            Err(error) => report(ctx, &error),
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Waits until the groups have ended, and removes them; forever when none are being ended. Cancel-safe.
async fn ended(groups: &mut Option<Groups>) {
    match groups {
        Some(ending) => ending.as_mut().await,
        None => std::future::pending().await,
    }
    *groups = None;
}

fn report(ctx: &Context, error: &LogindError) {
    let text = format!(
        "{}; until then pods end with the machine, and shutdownGracePeriod has no effect",
        chain(error)
    );
    ctx.progress.condition(CONDITION, Err(text));
}

/// No work here can block, so it is enough that a timer wakes the task.
async fn heartbeat(handle: LoopHandle) {
    loop {
        handle.tick();
        tokio::time::sleep(LoopHandle::HEARTBEAT).await;
    }
}
