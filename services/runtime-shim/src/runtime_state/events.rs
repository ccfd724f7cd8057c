//! The runtime's events: which containers and sandboxes to read.

use std::time::Duration;

use k8s_cri::v1;
use keelson_proto::containerd::services::events::v1 as containerd;
use keelson_proto::containerd::services::events::v1::events_client::EventsClient;
use prost::Message as _;
use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};

use crate::cri::Cri;
use crate::event_metrics::EventMetrics;

/// How long to wait for a refusal. A Go server responds to a subscription only with the first event, but to an unknown
/// method at once. If the refusal comes later, the next source is used from then on.
pub(super) const REFUSED_WITHIN: Duration = Duration::from_millis(200);

/// A hint from an event stream.
#[derive(Debug)]
pub(super) enum Hint {
    /// The process of this container or sandbox has exited.
    Exited(String),
    /// This container or sandbox has changed.
    Changed(String),
    /// The stream has ended.
    Ended(Status),
}

/// Sources of observations, in the order in which they are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventSourceKind {
    /// CRI's own events.
    Cri,
    /// containerd's event service on the same socket.
    Containerd,
    /// No events: relist only.
    Relist,
}

impl EventSourceKind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Cri => "cri-events",
            Self::Containerd => "containerd-events",
            Self::Relist => "relist",
        }
    }

    pub(super) const fn next(self) -> Self {
        match self {
            Self::Cri => Self::Containerd,
            Self::Containerd | Self::Relist => Self::Relist,
        }
    }
}

/// The source in use.
pub(super) struct EventSource {
    pub(super) kind: EventSourceKind,
    hints: Option<mpsc::Receiver<Hint>>,
}

impl EventSource {
    /// Opens the first source from `kind` on that the runtime does not refuse at once.
    pub(super) async fn open(cri: &Cri, metrics: &EventMetrics, mut kind: EventSourceKind) -> Self {
        loop {
            let hints = match kind {
                EventSourceKind::Cri => cri_events(cri, metrics).await,
                EventSourceKind::Containerd => containerd_events(cri, metrics).await,
                EventSourceKind::Relist => return Self { kind, hints: None },
            };
            if hints.is_some() {
                metrics.opened();
                return Self { kind, hints };
            }
            metrics.failed();
            kind = kind.next();
        }
    }

    pub(super) const fn name(&self) -> &'static str {
        self.kind.name()
    }

    /// Whether it sends events.
    pub(super) const fn has_events(&self) -> bool {
        self.hints.is_some()
    }

    /// The next hint; never ends without events. Cancel-safe: a hint is taken only when it is returned.
    pub(super) async fn next_hint(&mut self) -> Hint {
        match &mut self.hints {
            Some(hints) => hints
                .recv()
                .await
                .unwrap_or_else(|| Hint::Ended(Status::unavailable("the event stream ended"))),
            None => std::future::pending().await,
        }
    }
}

async fn cri_events(cri: &Cri, metrics: &EventMetrics) -> Option<mpsc::Receiver<Hint>> {
    let (mut client, request) = (cri.runtime(), cri.unbounded(v1::GetEventsRequest {}));
    let call = async move { client.get_container_events(request).await.map(tonic::Response::into_inner) };
    let metrics = metrics.clone();
    subscribe(call, move |event: v1::ContainerEventResponse| {
        metrics.observe_latency(event.created_at);
        let id = event.container_id;
        match v1::ContainerEventType::try_from(event.container_event_type) {
            Ok(v1::ContainerEventType::ContainerStoppedEvent) => Some(Hint::Exited(id)),
            Ok(_) => Some(Hint::Changed(id)),
            Err(_) => None,
        }
    })
    .await
}

async fn containerd_events(cri: &Cri, metrics: &EventMetrics) -> Option<mpsc::Receiver<Hint>> {
    let mut client = EventsClient::new(cri.channel());
    let filter = |topic: &str| format!("topic==\"{topic}\",namespace==k8s.io");
    let request = cri.unbounded(containerd::SubscribeRequest {
        filters: ["/tasks/exit", "/tasks/paused", "/tasks/resumed", "/containers/delete"]
            .into_iter()
            .map(filter)
            .collect(),
    });
    let call = async move { client.subscribe(request).await.map(tonic::Response::into_inner) };
    let metrics = metrics.clone();
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
    keelson_service_kit::spawn("runtime events", async move {
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
