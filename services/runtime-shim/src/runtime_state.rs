//! The loop that keeps the connection to the runtime: is it there, is it ready, what does it tell.

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
use crate::observe::{Observer, WatchKey, WatchValue};
use crate::runtime_config::RuntimeConfig;
use crate::ticking::ticking;
use crate::whole;

/// Between two looks at the runtime's own conditions (pod-lifecycle.md §1).
const STATUS_PERIOD: Duration = Duration::from_secs(5);
/// The same while they are not all met: whoever waits for them waits no longer than need be.
const STATUS_PERIOD_UNREADY: Duration = Duration::from_secs(1);
/// Between two relists where the runtime tells nothing by itself.
const RELIST_WITHOUT_EVENTS: Duration = Duration::from_secs(1);
/// A second relist soon after the first finds what happened while the event stream was being opened.
const SECOND_LOOK: Duration = Duration::from_secs(1);
const CONDITION: &str = "container runtime";

/// What an event stream says.
#[derive(Debug)]
enum Hint {
    /// A process of this container or sandbox has ended.
    Exited(String),
    /// Something of this container or sandbox has changed.
    Changed(String),
    /// The stream has ended.
    Ended(Status),
}

/// The runtime, and what is found out about it.
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

/// Runs for ever: connect, relist, follow events, and again after a loss.
pub async fn run(context: Context, cri: Cri, observer: Observer) {
    let to = Connection::new(cri, observer);
    to.config.register(&context.metrics);
    to.events.register(&context.metrics);
    let progress = context.progress.register("runtime");
    let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));
    loop {
        progress.tick();
        let lost = match ticking(&progress, connect(&to)).await {
            Ok(kind) => {
                backoff.reset();
                context.progress.condition(CONDITION, Ok(()));
                tracing::info!(observed_by = kind.name(), "connected to the container runtime");
                follow(&context, &to, &progress, kind).await
            }
            Err(status) => status,
        };
        if context.shutdown.is_cancelled() {
            return;
        }
        let message = trouble(&context.config.runtime.endpoint, &lost);
        context.progress.condition(CONDITION, Err(message.clone()));
        set_state(&to.observer, |state| {
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

/// What is wrong with the runtime, and the way out.
fn trouble(endpoint: &str, lost: &Status) -> String {
    let what = match (lost.code(), lost.message()) {
        (Code::Unimplemented, _) => "is a server that does not speak CRI v1".to_owned(),
        (code, "") => format!("answers with the error {code:?}"),
        (_, text) => format!("does not answer: {text}"),
    };
    format!("the container runtime at {endpoint} {what}; start it, or set containerRuntimeEndpoint; retrying")
}

/// How observations are made, in the order in which they are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// CRI's own events.
    Cri,
    /// containerd's event service on the same socket.
    Containerd,
    /// No events.
    Relist,
}

impl Kind {
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
    kind: Kind,
    hints: Option<mpsc::Receiver<Hint>>,
}

impl EventSource {
    const fn name(&self) -> &'static str {
        self.kind.name()
    }
}

async fn connect(to: &Connection) -> Result<EventSource, Status> {
    let Connection { cri, observer, .. } = to;
    let version =
        cri.runtime().version(cri.quick(cri::VersionRequest { version: "0.1.0".into() })).await?.into_inner();
    whole::version(&version)?;
    let driver = to.config.ask(cri).await?;
    let ready = read_status(cri).await?;
    let source = event_source(to, Kind::Cri).await;
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

/// The runtime's two conditions, and what it says that it can do.
struct Conditions {
    ready: bool,
    network_ready: bool,
    message: String,
    handlers: Vec<pb::RuntimeHandler>,
    supplemental_groups_policy: Option<bool>,
}

impl Conditions {
    /// Until they are looked at again.
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

fn handler(told: cri::RuntimeHandler) -> pb::RuntimeHandler {
    let features = told.features.unwrap_or_default();
    pb::RuntimeHandler {
        name: told.name,
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
        message: joined(runtime, network),
        handlers,
        supplemental_groups_policy: response.features.map(|features| features.supplemental_groups_policy),
    })
}

/// One error as it stands, two in brackets, as in the node's condition (node-and-api.md §9.5).
fn joined(runtime: Option<String>, network: Option<String>) -> String {
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

/// The first of `kind` and those after it that the runtime does not refuse at once.
async fn event_source(to: &Connection, mut kind: Kind) -> EventSource {
    loop {
        let hints = match kind {
            Kind::Cri => cri_events(to).await,
            Kind::Containerd => containerd_events(to).await,
            Kind::Relist => return EventSource { kind, hints: None },
        };
        if hints.is_some() {
            to.events.opened();
            return EventSource { kind, hints };
        }
        to.events.failed();
        kind = kind.next();
    }
}

/// A server in Go answers a subscription with its first event only, but a method that it lacks at once. One
/// that takes longer to refuse is left for the next source when it does.
const REFUSED_WITHIN: Duration = Duration::from_millis(200);

async fn cri_events(to: &Connection) -> Option<mpsc::Receiver<Hint>> {
    let (mut client, request) = (to.cri.runtime(), to.cri.unbounded(cri::GetEventsRequest {}));
    let call = async move { client.get_container_events(request).await.map(tonic::Response::into_inner) };
    let metrics = to.events.clone();
    subscribe(call, move |event: cri::ContainerEventResponse| {
        metrics.arrived(event.created_at);
        let id = event.container_id;
        match cri::ContainerEventType::try_from(event.container_event_type) {
            Ok(cri::ContainerEventType::ContainerStoppedEvent) => Some(Hint::Exited(id)),
            Ok(_) => Some(Hint::Changed(id)),
            Err(_) => None,
        }
    })
    .await
}

async fn containerd_events(to: &Connection) -> Option<mpsc::Receiver<Hint>> {
    let mut client = EventsClient::new(to.cri.channel());
    let filter = |topic: &str| format!("topic==\"{topic}\",namespace==k8s.io");
    let request = to.cri.unbounded(containerd::SubscribeRequest {
        filters: ["/tasks/exit", "/tasks/paused", "/tasks/resumed", "/containers/delete"]
            .into_iter()
            .map(filter)
            .collect(),
    });
    let call = async move { client.subscribe(request).await.map(tonic::Response::into_inner) };
    let metrics = to.events.clone();
    subscribe(call, move |envelope: containerd::Envelope| {
        let at = envelope
            .timestamp
            .map(|at| at.seconds.saturating_mul(1_000_000_000).saturating_add(at.nanos.into()));
        metrics.arrived(at.unwrap_or(0));
        let any = envelope.event?;
        if envelope.topic == "/tasks/exit" {
            let exit = containerd::TaskExit::decode(any.value.as_slice()).ok()?;
            // A process that was executed in a container has an id of its own.
            return (exit.id == exit.container_id).then_some(Hint::Exited(exit.container_id));
        }
        let named = containerd::ContainerNamed::decode(any.value.as_slice()).ok()?;
        Some(Hint::Changed(named.container_id))
    })
    .await
}

/// Starts a subscription and hands its hints over. `None`: the runtime refused it.
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

/// Follows the runtime until it is lost.
async fn follow(
    context: &Context,
    to: &Connection,
    progress: &LoopHandle,
    mut source: EventSource,
) -> Status {
    let Connection { cri, observer, events, .. } = to;
    let period_of = |source: &EventSource| match source.hints {
        Some(_) => Duration::from_millis(context.config.runtime.relist_period_ms),
        None => RELIST_WITHOUT_EVENTS,
    };
    let mut period = period_of(&source);
    let mut relist_at = Instant::now() + SECOND_LOOK.min(period);
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
                    source = event_source(to, source.kind.next()).await;
                    period = period_of(&source);
                    tracing::info!(observed_by = source.name(), "the container runtime has no such events");
                    set_state(observer, |state| state.observed_by = source.name().to_owned());
                    // What happened meanwhile was told by nobody.
                    relist_at = Instant::now();
                }
                Hint::Ended(status) => {
                    events.failed();
                    return status;
                }
            },
            () = sleep_until(relist_at) => {
                if let Err(status) = ticking(progress, observer.relist()).await {
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
    fn what_is_wrong_with_the_runtime_is_said_with_endpoint_and_way_out() {
        for (status, part) in [
            (Status::unimplemented(""), "unix:///r.sock is a server that does not speak CRI v1"),
            (Status::unavailable("no such file"), "unix:///r.sock does not answer: no such file"),
            (Status::new(Code::Internal, ""), "unix:///r.sock answers with the error Internal"),
        ] {
            let text = trouble("unix:///r.sock", &status);
            assert!(text.contains(part) && text.contains("containerRuntimeEndpoint"), "{text}");
        }
    }

    fn connection(fake: &FakeRuntime) -> Connection {
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
    async fn a_late_refusal_of_events_leads_to_the_next_source_and_not_to_a_lost_runtime() {
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
    async fn what_the_runtime_can_do_is_told_by_name_and_nothing_where_it_does_not_say() {
        let fake = FakeRuntime::start().await;
        let state = async || {
            connect(&connection(&fake)).await.map(|source| source.kind).unwrap();
            match fake.observer.hub().get(&WatchKey::State) {
                Some(WatchValue::State(state)) => *state,
                other => panic!("{other:?}"),
            }
        };
        let silent = state().await;
        assert_eq!((silent.handlers, silent.supplemental_groups_policy), (Vec::new(), None));
        fake.can(&[("runc", true), ("", false)], true);
        let told = state().await;
        let handlers: Vec<_> = told
            .handlers
            .iter()
            .map(|h| (h.name.as_str(), h.recursive_read_only_mounts, h.user_namespaces))
            .collect();
        assert_eq!(handlers, [("", false, true), ("runc", true, true)]);
        assert_eq!(told.supplemental_groups_policy, Some(true));
    }

    #[tokio::test]
    async fn the_cgroup_driver_is_asked_for_with_each_connection_and_stands_while_the_runtime_is_away() {
        let fake = FakeRuntime::start().await;
        let to = connection(&fake);
        let state = || match fake.observer.hub().get(&WatchKey::State) {
            Some(WatchValue::State(state)) => *state,
            other => panic!("{other:?}"),
        };
        for (driver, told) in [(None, ""), (Some(0), "systemd"), (Some(1), "cgroupfs")] {
            if driver.is_some() {
                fake.drives_cgroups(driver);
            }
            connect(&to).await.map(|source| source.kind).unwrap();
            assert_eq!((state().name.as_str(), state().cgroup_driver.as_str()), ("fake", told));
        }
        set_state(&fake.observer, |state| state.unreachable = true);
        fake.answer("RuntimeConfig", Answer::Fail(1, Code::Unavailable));
        assert!(connect(&to).await.is_err(), "without an answer there is no connection");
        assert_eq!((state().unreachable, state().cgroup_driver.as_str()), (true, "cgroupfs"));
        assert_eq!(fake.calls("RuntimeConfig").len(), 4);
    }

    #[tokio::test]
    async fn streams_of_events_that_are_refused_or_break_are_counted() {
        let fake = FakeRuntime::start().await;
        let (context, to) = (context(), connection(&fake));
        to.events.register(&context.metrics);
        let count = |name: &str| -> u32 {
            let name = format!("kubelet_evented_pleg_connection_{name} ");
            let text = context.metrics.text();
            let line = text.lines().find_map(|line| line.strip_prefix(&name));
            line.unwrap_or_else(|| panic!("{text}")).parse().unwrap()
        };
        // Neither CRI's nor containerd's.
        let source = event_source(&to, Kind::Cri).await;
        assert_eq!((source.kind, count("success_count"), count("error_count")), (Kind::Relist, 0, 2));
        fake.answer("GetContainerEvents", Answer::CutOff);
        let source = event_source(&to, Kind::Cri).await;
        assert_eq!((source.kind, count("success_count"), count("error_count")), (Kind::Cri, 1, 2));
        follow(&context, &to, &context.progress.register("runtime"), source).await;
        assert_eq!((count("success_count"), count("error_count")), (1, 3));
        assert_eq!(count("latency_seconds_count"), 0);
        to.events.arrived(now_unix_nanos() - 2_000_000_000);
        to.events.arrived(0);
        assert_eq!(count("latency_seconds_count"), 1);
        let sum = context.metrics.text();
        let sum =
            sum.lines().find_map(|l| l.strip_prefix("kubelet_evented_pleg_connection_latency_seconds_sum "));
        assert!(sum.unwrap().parse::<f64>().unwrap() >= 2.0, "{sum:?}");
    }

    #[tokio::test]
    async fn one_pod_that_cannot_be_read_does_not_make_the_runtime_unreachable() {
        let fake = FakeRuntime::start().await;
        fake.container("c", "u", cri::ContainerState::ContainerRunning);
        fake.answer("ContainerStatus", Answer::Fail(usize::MAX, Code::Unknown));
        connect(&connection(&fake)).await.map(|source| source.kind).unwrap();
        let state = fake.observer.hub().get(&WatchKey::State);
        assert!(matches!(state, Some(WatchValue::State(state)) if state.ready && !state.unreachable));
    }

    #[tokio::test]
    async fn a_runtime_and_a_network_that_are_both_not_ready_are_two_errors_in_brackets() {
        let fake = FakeRuntime::start().await;
        fake.not_ready();
        let conditions = read_status(&fake.cri).await.unwrap();
        let expected = "[container runtime not ready: RuntimeReady=false reason:R message:M, \
                        container runtime network not ready: NetworkReady=false reason:R message:M]";
        assert_eq!(conditions.message, expected);
        assert_eq!(joined(None, Some("x".into())), "x");
    }
}
