//! The loop that maintains the connection to the runtime: its state, its readiness and its events.

use std::time::Duration;

use k8s_cri::v1 as cri;
use keelson_proto::containerd::services::events::v1 as containerd;
use keelson_proto::containerd::services::events::v1::events_client::EventsClient;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_service_kit::{Backoff, Context, LoopHandle, now_unix_nanos};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tonic::{Code, Status, Streaming};

use crate::cri::Cri;
use crate::event_metrics::EventMetrics;
use crate::heartbeat::with_heartbeat;
use crate::observe::{Observer, WatchKey, WatchValue};
use crate::response_checks;
use crate::runtime_config::RuntimeConfig;

/// Interval between two reads of the runtime's conditions (pod-lifecycle.md §1).
const STATUS_PERIOD: Duration = Duration::from_secs(5);
/// The same interval while the runtime is not ready, so that nothing waits longer than necessary.
const STATUS_PERIOD_UNREADY: Duration = Duration::from_secs(1);
/// Interval between two relists if the runtime sends no events.
const RELIST_WITHOUT_EVENTS: Duration = Duration::from_secs(1);
/// Delay of a second relist, which finds changes that happened while the event stream was being opened.
const SECOND_RELIST_DELAY: Duration = Duration::from_secs(1);
const CONDITION: &str = "container runtime";

/// A hint from an event stream.
#[derive(Debug)]
enum Hint {
    /// The process of this container or sandbox has exited.
    Exited(String),
    /// This container or sandbox has changed.
    Changed(String),
    /// The stream has ended.
    Ended(Status),
}

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

/// Sources of observations, in the order in which they are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EventSourceKind {
    /// CRI's own events.
    Cri,
    /// containerd's event service on the same socket.
    Containerd,
    /// No events: relist only.
    Relist,
}

impl EventSourceKind {
    const fn name(self) -> &'static str {
        match self {
            Self::Cri => "cri-events",
            Self::Containerd => "containerd-events",
            Self::Relist => "relist",
        }
    }

    const fn next(self) -> Self {
        match self {
            Self::Cri => Self::Containerd,
            Self::Containerd | Self::Relist => Self::Relist,
        }
    }
}

struct EventSource {
    kind: EventSourceKind,
    hints: Option<mpsc::Receiver<Hint>>,
}

impl EventSource {
    const fn name(&self) -> &'static str {
        self.kind.name()
    }
}

async fn connect(connection: &Connection) -> Result<EventSource, Status> {
    let Connection { cri, observer, .. } = connection;
    let version =
        cri.runtime().version(cri.quick(cri::VersionRequest { version: "0.1.0".into() })).await?.into_inner();
    response_checks::check_version(&version)?;
    let driver = connection.config.query(cri).await?;
    let ready = read_status(cri).await?;
    let source = event_source(connection, EventSourceKind::Cri).await;
    observer.relist().await?;
    set_state(observer, |state| {
        *state = pb::RuntimeState {
            name: version.runtime_name.clone(),
            version: version.runtime_version.clone(),
            observed_by: source.name().to_owned(),
            cgroup_driver: driver.map(|driver| driver.name().to_owned()).unwrap_or_default(),
            ..std::mem::take(state)
        };
        ready.apply(state);
    });
    Ok(source)
}

/// The runtime's two conditions and its features.
struct Conditions {
    ready: bool,
    network_ready: bool,
    message: String,
    handlers: Vec<pb::RuntimeHandler>,
    supplemental_groups_policy: Option<bool>,
}

impl Conditions {
    /// Interval until the next read.
    const fn period(&self) -> Duration {
        if self.ready && self.network_ready { STATUS_PERIOD } else { STATUS_PERIOD_UNREADY }
    }

    fn apply(self, state: &mut pb::RuntimeState) {
        state.unreachable = false;
        state.ready = self.ready;
        state.network_ready = self.network_ready;
        state.message = self.message;
        state.handlers = self.handlers;
        state.supplemental_groups_policy = self.supplemental_groups_policy;
    }
}

fn handler(listed: cri::RuntimeHandler) -> pb::RuntimeHandler {
    let features = listed.features.unwrap_or_default();
    pb::RuntimeHandler {
        name: listed.name,
        recursive_read_only_mounts: features.recursive_read_only_mounts,
        user_namespaces: features.user_namespaces,
    }
}

async fn read_status(cri: &Cri) -> Result<Conditions, Status> {
    let response = cri.runtime().status(cri.quick(cri::StatusRequest { verbose: false })).await?.into_inner();
    let conditions = response.status.map(|s| s.conditions).unwrap_or_default();
    let find = |kind: &str| conditions.iter().find(|c| c.r#type == kind);
    let text = |prefix: &str, kind: &str| match find(kind) {
        Some(c) if c.status => None,
        Some(c) => Some(format!("{prefix}: {kind}=false reason:{} message:{}", c.reason, c.message)),
        None => Some(format!("{prefix}: the runtime does not report {kind}")),
    };
    let runtime = text("container runtime not ready", "RuntimeReady");
    let network = text("container runtime network not ready", "NetworkReady");
    let mut handlers: Vec<pb::RuntimeHandler> = response.runtime_handlers.into_iter().map(handler).collect();
    handlers.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(Conditions {
        ready: runtime.is_none(),
        network_ready: network.is_none(),
        message: join_errors(runtime, network),
        handlers,
        supplemental_groups_policy: response.features.map(|features| features.supplemental_groups_policy),
    })
}

/// One error as is, two errors in brackets, as in the node's condition (node-and-api.md §9.5).
fn join_errors(runtime: Option<String>, network: Option<String>) -> String {
    match (runtime, network) {
        (Some(runtime), Some(network)) => format!("[{runtime}, {network}]"),
        (one, other) => one.or(other).unwrap_or_default(),
    }
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

/// The first source from `kind` on that the runtime does not refuse at once.
async fn event_source(connection: &Connection, mut kind: EventSourceKind) -> EventSource {
    loop {
        let hints = match kind {
            EventSourceKind::Cri => cri_events(connection).await,
            EventSourceKind::Containerd => containerd_events(connection).await,
            EventSourceKind::Relist => return EventSource { kind, hints: None },
        };
        if hints.is_some() {
            connection.events.opened();
            return EventSource { kind, hints };
        }
        connection.events.failed();
        kind = kind.next();
    }
}

/// How long to wait for a refusal. A Go server responds to a subscription only with the first event, but to an unknown
/// method at once. If the refusal comes later, the next source is used from then on.
const REFUSED_WITHIN: Duration = Duration::from_millis(200);

async fn cri_events(connection: &Connection) -> Option<mpsc::Receiver<Hint>> {
    let (mut client, request) =
        (connection.cri.runtime(), connection.cri.unbounded(cri::GetEventsRequest {}));
    let call = async move { client.get_container_events(request).await.map(tonic::Response::into_inner) };
    let metrics = connection.events.clone();
    subscribe(call, move |event: cri::ContainerEventResponse| {
        metrics.observe_latency(event.created_at);
        let id = event.container_id;
        match cri::ContainerEventType::try_from(event.container_event_type) {
            Ok(cri::ContainerEventType::ContainerStoppedEvent) => Some(Hint::Exited(id)),
            Ok(_) => Some(Hint::Changed(id)),
            Err(_) => None,
        }
    })
    .await
}

async fn containerd_events(connection: &Connection) -> Option<mpsc::Receiver<Hint>> {
    let mut client = EventsClient::new(connection.cri.channel());
    let filter = |topic: &str| format!("topic==\"{topic}\",namespace==k8s.io");
    let request = connection.cri.unbounded(containerd::SubscribeRequest {
        filters: ["/tasks/exit", "/tasks/paused", "/tasks/resumed", "/containers/delete"]
            .into_iter()
            .map(filter)
            .collect(),
    });
    let call = async move { client.subscribe(request).await.map(tonic::Response::into_inner) };
    let metrics = connection.events.clone();
    subscribe(call, move |envelope: containerd::Envelope| {
        let at = envelope
            .timestamp
            .map(|at| at.seconds.saturating_mul(1_000_000_000).saturating_add(at.nanos.into()));
        metrics.observe_latency(at.unwrap_or(0));
        let any = envelope.event?;
        if envelope.topic == "/tasks/exit" {
            let exit = containerd::TaskExit::decode(any.value.as_slice()).ok()?;
            // A process started by exec has its own id.
            return (exit.id == exit.container_id).then_some(Hint::Exited(exit.container_id));
        }
        let named = containerd::ContainerNamed::decode(any.value.as_slice()).ok()?;
        Some(Hint::Changed(named.container_id))
    })
    .await
}

/// Starts a subscription and returns its hints. `None`: the runtime refused it.
async fn subscribe<T, Call, F>(call: Call, hint: F) -> Option<mpsc::Receiver<Hint>>
where
    T: Send + 'static,
    Call: Future<Output = Result<Streaming<T>, Status>> + Send + 'static,
    F: Fn(T) -> Option<Hint> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(1024);
    let (refused, refusal) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        let mut stream = tokio::select! {
            () = sender.closed() => return,
            opened = call => match opened {
                Ok(stream) => stream,
                Err(status) => {
                    let _ = refused.send(status.code());
                    let _ = sender.send(Hint::Ended(status)).await;
                    return;
                }
            },
        };
        loop {
            let next = tokio::select! {
                () = sender.closed() => return,
                next = stream.message() => next,
            };
            let item = match next {
                Ok(Some(event)) => hint(event),
                Ok(None) => Some(Hint::Ended(Status::unavailable("the event stream ended"))),
                Err(status) => Some(Hint::Ended(status)),
            };
            let Some(item) = item else { continue };
            let last = matches!(item, Hint::Ended(_));
            if sender.send(item).await.is_err() || last {
                return;
            }
        }
    });
    match tokio::time::timeout(REFUSED_WITHIN, refusal).await {
        Ok(Ok(Code::Unimplemented)) => None,
        _ => Some(receiver),
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
    let period_of = |source: &EventSource| match source.hints {
        Some(_) => Duration::from_millis(context.config.runtime.relist_period_ms),
        None => RELIST_WITHOUT_EVENTS,
    };
    let mut period = period_of(&source);
    let mut relist_at = Instant::now() + SECOND_RELIST_DELAY.min(period);
    let mut status_at = Instant::now() + STATUS_PERIOD_UNREADY;
    loop {
        progress.tick();
        // Every arm is cancel-safe: timers are absolute, and a hint is taken only when it is returned.
        tokio::select! {
            () = context.shutdown.cancelled() => return Status::cancelled("shutdown"),
            hint = next_hint(&mut source.hints) => match hint {
                Hint::Exited(id) => observer.exited(id),
                Hint::Changed(id) => {
                    if let Some(uid) = observer.owner_of(&id) {
                        observer.refresh(uid);
                    }
                }
                Hint::Ended(status) if status.code() == Code::Unimplemented => {
                    events.failed();
                    source = event_source(connection, source.kind.next()).await;
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
                match read_status(cri).await {
                    Ok(conditions) => {
                        status_at = Instant::now() + conditions.period();
                        set_state(observer, |state| conditions.apply(state));
                    }
                    Err(status) => return status,
                }
            }
        }
    }
}

async fn next_hint(hints: &mut Option<mpsc::Receiver<Hint>>) -> Hint {
    match hints {
        Some(hints) => {
            hints.recv().await.unwrap_or_else(|| Hint::Ended(Status::unavailable("the event stream ended")))
        }
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Answer, FakeRuntime};
    use keelson_config::{Config, ServiceName};
    use keelson_service_kit::{Subscription, WatchItem};

    #[test]
    fn runtime_connection_error_names_endpoint_and_remedy() {
        for (status, part) in [
            (Status::unimplemented(""), "unix:///r.sock is a server that does not speak CRI v1"),
            (Status::unavailable("no such file"), "unix:///r.sock does not answer: no such file"),
            (Status::new(Code::Internal, ""), "unix:///r.sock answers with the error Internal"),
        ] {
            let text = connection_error_message("unix:///r.sock", &status);
            assert!(text.contains(part) && text.contains("containerRuntimeEndpoint"), "{text}");
        }
    }

    fn connect_to(fake: &FakeRuntime) -> Connection {
        Connection::new(fake.cri.clone(), fake.observer.clone())
    }

    fn context() -> Context {
        Context::detached(ServiceName::RuntimeShim, Config::default())
    }

    async fn next_state(states: &mut Subscription<WatchKey, WatchValue>) -> pb::RuntimeState {
        loop {
            if let WatchItem::Set(_, WatchValue::State(state)) = states.next().await {
                return *state;
            }
        }
    }

    #[tokio::test]
    async fn late_refusal_of_events_switches_to_the_next_event_source() {
        let fake = FakeRuntime::start().await;
        fake.answer("GetContainerEvents", Answer::Late(2 * REFUSED_WITHIN, Code::Unimplemented));
        let mut states = fake.observer.hub().subscribe();
        let (context, cri, observer) = (context(), fake.cri.clone(), fake.observer.clone());
        let shutdown = context.shutdown.clone();
        let runs = tokio::spawn(run(context, cri, observer));
        let first = next_state(&mut states).await;
        assert_eq!((first.ready, first.observed_by.as_str()), (true, "cri-events"));
        let second = next_state(&mut states).await;
        assert_eq!((second.unreachable, second.observed_by.as_str()), (false, "relist"));
        shutdown.cancel();
        runs.await.unwrap();
    }

    #[tokio::test]
    async fn runtime_handlers_and_features_are_published_if_reported() {
        let fake = FakeRuntime::start().await;
        let state = async || {
            connect(&connect_to(&fake)).await.map(|source| source.kind).unwrap();
            match fake.observer.hub().get(&WatchKey::State) {
                Some(WatchValue::State(state)) => *state,
                other => panic!("{other:?}"),
            }
        };
        let silent = state().await;
        assert_eq!((silent.handlers, silent.supplemental_groups_policy), (Vec::new(), None));
        fake.set_features(&[("runc", true), ("", false)], true);
        let reported = state().await;
        let handlers: Vec<_> = reported
            .handlers
            .iter()
            .map(|h| (h.name.as_str(), h.recursive_read_only_mounts, h.user_namespaces))
            .collect();
        assert_eq!(handlers, [("", false, true), ("runc", true, true)]);
        assert_eq!(reported.supplemental_groups_policy, Some(true));
    }

    #[tokio::test]
    async fn cgroup_driver_is_queried_per_connection_and_kept_while_the_runtime_is_down() {
        let fake = FakeRuntime::start().await;
        let connection = connect_to(&fake);
        let state = || match fake.observer.hub().get(&WatchKey::State) {
            Some(WatchValue::State(state)) => *state,
            other => panic!("{other:?}"),
        };
        for (driver, reported) in [(None, ""), (Some(0), "systemd"), (Some(1), "cgroupfs")] {
            if driver.is_some() {
                fake.set_cgroup_driver(driver);
            }
            connect(&connection).await.map(|source| source.kind).unwrap();
            assert_eq!((state().name.as_str(), state().cgroup_driver.as_str()), ("fake", reported));
        }
        set_state(&fake.observer, |state| state.unreachable = true);
        fake.answer("RuntimeConfig", Answer::Fail(1, Code::Unavailable));
        assert!(connect(&connection).await.is_err(), "without the cgroup driver there is no connection");
        assert_eq!((state().unreachable, state().cgroup_driver.as_str()), (true, "cgroupfs"));
        assert_eq!(fake.calls("RuntimeConfig").len(), 4);
    }

    #[tokio::test]
    async fn refused_and_broken_event_streams_are_counted() {
        let fake = FakeRuntime::start().await;
        let (context, connection) = (context(), connect_to(&fake));
        connection.events.register(&context.metrics);
        let count = |name: &str| -> u32 {
            let name = format!("kubelet_evented_pleg_connection_{name} ");
            let text = context.metrics.text();
            let line = text.lines().find_map(|line| line.strip_prefix(&name));
            line.unwrap_or_else(|| panic!("{text}")).parse().unwrap()
        };
        // Neither CRI's nor containerd's.
        let source = event_source(&connection, EventSourceKind::Cri).await;
        assert_eq!(
            (source.kind, count("success_count"), count("error_count")),
            (EventSourceKind::Relist, 0, 2)
        );
        fake.answer("GetContainerEvents", Answer::CutOff);
        let source = event_source(&connection, EventSourceKind::Cri).await;
        assert_eq!((source.kind, count("success_count"), count("error_count")), (EventSourceKind::Cri, 1, 2));
        follow(&context, &connection, &context.progress.register("runtime"), source).await;
        assert_eq!((count("success_count"), count("error_count")), (1, 3));
        assert_eq!(count("latency_seconds_count"), 0);
        connection.events.observe_latency(now_unix_nanos() - 2_000_000_000);
        connection.events.observe_latency(0);
        assert_eq!(count("latency_seconds_count"), 1);
        let sum = context.metrics.text();
        let sum =
            sum.lines().find_map(|l| l.strip_prefix("kubelet_evented_pleg_connection_latency_seconds_sum "));
        assert!(sum.unwrap().parse::<f64>().unwrap() >= 2.0, "{sum:?}");
    }

    #[tokio::test]
    async fn unreadable_pod_does_not_make_the_runtime_unreachable() {
        let fake = FakeRuntime::start().await;
        fake.container("c", "u", cri::ContainerState::ContainerRunning);
        fake.answer("ContainerStatus", Answer::Fail(usize::MAX, Code::Unknown));
        connect(&connect_to(&fake)).await.map(|source| source.kind).unwrap();
        let state = fake.observer.hub().get(&WatchKey::State);
        assert!(matches!(state, Some(WatchValue::State(state)) if state.ready && !state.unreachable));
    }

    #[tokio::test]
    async fn runtime_and_network_not_ready_are_two_errors_in_brackets() {
        let fake = FakeRuntime::start().await;
        fake.set_not_ready();
        let conditions = read_status(&fake.cri).await.unwrap();
        let expected = "[container runtime not ready: RuntimeReady=false reason:R message:M, \
                        container runtime network not ready: NetworkReady=false reason:R message:M]";
        assert_eq!(conditions.message, expected);
        assert_eq!(join_errors(None, Some("x".into())), "x");
    }
}
