//! The loop that maintains the connection to the runtime: its state, its readiness and its events.

mod events;

use std::time::Duration;

use keelson_proto::keelson::runtime::v1 as pb;
use keelson_service_kit::{Backoff, Context, LoopHandle, now_unix_nanos};
use tokio::time::{Instant, sleep_until};
use tonic::{Code, Status};

use crate::cri::Cri;
use crate::cri_objects::RuntimeStatus;
use crate::event_metrics::EventMetrics;
use crate::heartbeat::with_heartbeat;
use crate::observe::{Observer, WatchKey, WatchValue};
use crate::runtime_config::RuntimeConfig;
use events::{EventSource, EventSourceKind, Hint};

/// Interval between two reads of the runtime's conditions (pod-lifecycle.md §1).
const STATUS_PERIOD: Duration = Duration::from_secs(5);
/// The same interval while the runtime is not ready, so that nothing waits longer than necessary.
const STATUS_PERIOD_UNREADY: Duration = Duration::from_secs(1);
/// Interval between two relists if the runtime sends no events.
const RELIST_WITHOUT_EVENTS: Duration = Duration::from_secs(1);
/// Delay of a second relist, which finds changes that happened while the event stream was being opened.
const SECOND_RELIST_DELAY: Duration = Duration::from_secs(1);
const CONDITION: &str = "container runtime";

/// The connection to the runtime, with what observes it.
struct Connection {
    cri: Cri,
    observer: Observer,
    config: RuntimeConfig,
    events: EventMetrics,
}

impl Connection {
    fn new(cri: Cri, observer: Observer) -> Self {
        Self { cri, observer, config: RuntimeConfig::default(), events: EventMetrics::new() }
    }
}

/// Connects, relists and follows events; reconnects after a loss, until the shutdown.
pub async fn run(context: Context, cri: Cri, observer: Observer) {
    let connection = Connection::new(cri, observer);
    connection.config.register(&context.metrics);
    connection.events.register(&context.metrics);
    let progress = context.progress.register("runtime");
    let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));
    loop {
        progress.tick();
        let error = match with_heartbeat(&progress, connect(&connection)).await {
            Ok(kind) => {
                backoff.reset();
                context.progress.condition(CONDITION, Ok(()));
                tracing::info!(observed_by = kind.name(), "connected to the container runtime");
                follow(&context, &connection, &progress, kind).await
            }
            Err(status) => status,
        };
        if context.shutdown.is_cancelled() {
            return;
        }
        let message = connection_error_message(&context.config.runtime.endpoint, &error);
        context.progress.condition(CONDITION, Err(message.clone()));
        set_state(&connection.observer, |state| {
            state.ready = false;
            state.network_ready = false;
            state.unreachable = true;
            state.message = message;
        });
        tokio::select! {
            () = context.shutdown.cancelled() => return,
            () = tokio::time::sleep(backoff.next_delay()) => {}
        }
    }
}

/// The message for a runtime that cannot be used: the error and what to do.
fn connection_error_message(endpoint: &str, error: &Status) -> String {
    let what = match (error.code(), error.message()) {
        (Code::Unimplemented, _) => "is a server that does not speak CRI v1".to_owned(),
        (code, "") => format!("answers with the error {code:?}"),
        (_, text) => format!("does not answer: {text}"),
    };
    format!("the container runtime at {endpoint} {what}; start it, or set containerRuntimeEndpoint; retrying")
}

async fn connect(connection: &Connection) -> Result<EventSource, Status> {
    let Connection { cri, observer, events, config } = connection;
    let version = cri.version().await?;
    let driver = config.query(cri).await?;
    let status = cri.status().await?;
    let source = EventSource::open(cri, events, EventSourceKind::Cri).await;
    observer.relist().await?;
    set_state(observer, |state| {
        *state = pb::RuntimeState {
            name: version.name,
            version: version.version,
            observed_by: source.name().to_owned(),
            cgroup_driver: driver.map(|driver| driver.name().to_owned()).unwrap_or_default(),
            ..std::mem::take(state)
        };
        apply_status(state, status);
    });
    Ok(source)
}

/// Interval until the next read of the runtime's status.
const fn status_period(status: &RuntimeStatus) -> Duration {
    if status.readiness.runtime && status.readiness.network { STATUS_PERIOD } else { STATUS_PERIOD_UNREADY }
}

fn apply_status(state: &mut pb::RuntimeState, status: RuntimeStatus) {
    state.unreachable = false;
    state.ready = status.readiness.runtime;
    state.network_ready = status.readiness.network;
    state.message = status.readiness.message;
    state.handlers = status.handlers;
    state.supplemental_groups_policy = status.supplemental_groups_policy;
}

fn set_state(observer: &Observer, change: impl FnOnce(&mut pb::RuntimeState)) {
    let before = match observer.hub().get(&WatchKey::State) {
        Some(WatchValue::State(state)) => *state,
        _ => pb::RuntimeState::default(),
    };
    let mut after = before.clone();
    change(&mut after);
    if before.ready != after.ready || after.since_unix_nanos == 0 {
        after.since_unix_nanos = now_unix_nanos();
    }
    if after != before {
        observer.hub().set(WatchKey::State, WatchValue::State(Box::new(after)));
    }
}

/// Follows events, relists and reads the status until the connection is lost. Returns the error.
async fn follow(
    context: &Context,
    connection: &Connection,
    progress: &LoopHandle,
    mut source: EventSource,
) -> Status {
    let Connection { cri, observer, events, .. } = connection;
    let period_of = |source: &EventSource| {
        if source.has_events() {
            Duration::from_millis(context.config.runtime.relist_period_ms)
        } else {
            RELIST_WITHOUT_EVENTS
        }
    };
    let mut period = period_of(&source);
    let mut relist_at = Instant::now() + SECOND_RELIST_DELAY.min(period);
    let mut status_at = Instant::now() + STATUS_PERIOD_UNREADY;
    loop {
        progress.tick();
        // Every arm is cancel-safe: timers are absolute, and a hint is taken only when it is returned.
        tokio::select! {
            () = context.shutdown.cancelled() => return Status::cancelled("shutdown"),
            hint = source.next_hint() => match hint {
                Hint::Exited(id) => observer.exited(id),
                Hint::Changed(id) => {
                    if let Some(uid) = observer.owner_of(&id) {
                        observer.refresh(uid);
                    }
                }
                Hint::Ended(status) if status.code() == Code::Unimplemented => {
                    events.failed();
                    source = EventSource::open(cri, events, source.kind.next()).await;
                    period = period_of(&source);
                    tracing::info!(observed_by = source.name(), "the container runtime does not support these events");
                    set_state(observer, |state| state.observed_by = source.name().to_owned());
                    // Changes in the meantime were not reported.
                    relist_at = Instant::now();
                }
                Hint::Ended(status) => {
                    events.failed();
                    return status;
                }
            },
            () = sleep_until(relist_at) => {
                if let Err(status) = with_heartbeat(progress, observer.relist()).await {
                    return status;
                }
                relist_at = Instant::now() + period;
            }
            () = sleep_until(status_at) => {
                match cri.status().await {
                    Ok(status) => {
                        status_at = Instant::now() + status_period(&status);
                        set_state(observer, |state| apply_status(state, status));
                    }
                    Err(status) => return status,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
