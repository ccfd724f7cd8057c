//! The gRPC API and the building of the service.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use keelson_config::ServiceName;
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::resource_manager::v1::resource_manager_server::{
    ResourceManager, ResourceManagerServer,
};
use keelson_resource_manager_core::desire::Want;
use keelson_resource_manager_core::set::StreamId;
use keelson_service_kit::status::error;
use keelson_service_kit::{CancellationToken, Context, Progress};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::{ReceiverStream, WatchStream};
use tonic::metadata::MetadataMap;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status, Streaming};
use tracing::Instrument as _;

use crate::machine_loop::MachineLoop;
use crate::manager::{Command, Env, Manager, SET_NOT_COMPLETE, Verdict, channel};
use crate::metrics::CgroupMetrics;
use crate::runtime::Runtime;
use crate::tree_loop::{TreeLoop, attempt};
use crate::view::{MachineState, Phase, TreeState, View};
use crate::wire::{self, PodDesireFromWire, usable_uid};

/// How long a call waits for the set to name its pod.
const NAMED_WITHIN: Duration = Duration::from_secs(5);
/// What is left of a caller's deadline for the answer's way back.
const ANSWER_SLACK: Duration = Duration::from_millis(100);

/// Takes stock of the cgroup tree and builds the service. A tree that cannot be set up is a condition, tried
/// again, and no reason to fail.
///
/// # Errors
/// None at present.
pub async fn build(ctx: Context) -> anyhow::Result<Routes> {
    let (tree, found) = attempt(&ctx.config).await;
    tracing::info!(pods = found.len(), "took stock of the cgroup tree");
    let tree = watch::Sender::new(tree);
    let machine = MachineLoop::begin(&ctx.config, ctx.progress.clone(), tree.subscribe()).await;
    let (commands, receiver) = channel();
    let (complete, is_complete) = watch::channel(false);
    let (burstable, burstable_now) = watch::channel(0);
    let metrics = CgroupMetrics::new(&ctx.metrics);
    let env = Arc::new(Env {
        tree: tree.subscribe(),
        runtime: Runtime::new(ctx.peer(ServiceName::RuntimeShim), ctx.progress.clone()),
        metrics: metrics.clone(),
        commands: commands.clone(),
    });
    let service = Service {
        commands: commands.clone(),
        complete: is_complete,
        machine: machine.state(),
        tree: tree.subscribe(),
        driver: ctx.config.runtime.cgroup_driver.clone(),
        progress: ctx.progress.clone(),
        shutdown: ctx.shutdown.clone(),
    };
    let manager = Manager::new(env, machine.state(), complete, burstable, found);
    let handle = ctx.progress.register("pods");
    ctx.spawn("pods", manager.run(receiver, ctx.shutdown.clone(), handle));
    let handle = ctx.progress.register("machine");
    ctx.spawn("machine", machine.run(ctx.shutdown.clone(), handle));
    let handle = ctx.progress.register("cgroups");
    let tree_loop = TreeLoop { ctx: ctx.clone(), state: tree, burstable: burstable_now, commands, metrics };
    ctx.spawn("cgroups", tree_loop.run(handle));
    Ok(Routes::new(ResourceManagerServer::new(service)))
}

struct Service {
    commands: mpsc::Sender<Command>,
    complete: watch::Receiver<bool>,
    machine: watch::Receiver<MachineState>,
    tree: watch::Receiver<TreeState>,
    driver: String,
    progress: Progress,
    shutdown: CancellationToken,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn stopping() -> Status {
    error(Code::Unavailable, "STOPPING", "resource-manager is stopping")
}

fn bad(problem: &wire::WireError) -> Status {
    error(Code::InvalidArgument, "BAD_FIELD", problem.to_string())
}

impl Service {
    async fn send(&self, command: Command) -> Result<(), Status> {
        self.commands.send(command).await.map_err(|_| stopping())
    }

    async fn look(&self, uid: &str) -> Result<watch::Receiver<View>, Status> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Look { uid: uid.to_owned(), reply }).await?;
        answer.await.map_err(|_| stopping())
    }

    /// Waits until the set names the pod with the revision, and fails when it does not or wants no running pod.
    async fn named(&self, uid: &str, revision: u64, until: Instant) -> Result<watch::Receiver<View>, Status> {
        let mut view = self.look(uid).await?;
        let until = until.min(Instant::now() + NAMED_WITHIN);
        let named = view.wait_for(|v| v.named.is_some_and(|(r, _)| r >= revision));
        let want = match timeout_at(until, named).await {
            Ok(Ok(view)) => view.named.map(|(_, want)| want),
            _ => {
                let text = format!("pod {uid} revision {revision} is not in the set that pod-sync has sent");
                return Err(error(Code::NotFound, "POD_NOT_NAMED", text));
            }
        };
        if want != Some(Want::Run) {
            let text = format!("pod {uid} is not to run, nothing is begun for it");
            return Err(error(Code::FailedPrecondition, "NOT_WANTED", text));
        }
        Ok(view)
    }

    /// The verdict on a pod that the set names. Before the first complete set the reservations of others are not
    /// known; until then only a pod that is admitted already is told so.
    async fn verdict(&self, uid: &str, until: Instant) -> Result<Verdict, Status> {
        let mut complete = self.complete.clone();
        loop {
            let (reply, answer) = oneshot::channel();
            self.send(Command::Admit { uid: uid.to_owned(), reply }).await?;
            let verdict = answer.await.map_err(|_| stopping())?;
            let waits = matches!(verdict, Verdict::NotYet { reason: SET_NOT_COMPLETE, .. });
            if !waits || timeout_at(until, complete.wait_for(|complete| *complete)).await.is_err() {
                return Ok(verdict);
            }
        }
    }

    async fn prepare(&self, uid: &str, revision: u64, until: Instant) -> Result<String, Status> {
        let mut view = self.named(uid, revision, until).await?;
        let mut tree = self.tree.clone();
        loop {
            // A pod that an earlier run of this service has admitted is admitted again here.
            match self.verdict(uid, until).await? {
                Verdict::Admitted => break,
                Verdict::Rejected(rejection) => {
                    let text = format!("pod {uid} is not admitted: {}", rejection.message);
                    return Err(error(Code::FailedPrecondition, "NOT_ADMITTED", text));
                }
                Verdict::NotYet { reason: "CgroupDriverNotSupported", message } => {
                    return Err(error(Code::FailedPrecondition, "CGROUP_DRIVER", message));
                }
                Verdict::NotYet { message, .. } => {
                    if timeout_at(until, tree.changed()).await.is_err() {
                        return Err(late(uid, &message));
                    }
                }
            }
        }
        let mut last = view.clone();
        let ready = view.wait_for(|v| v.phase == Phase::Ready && v.revision >= revision);
        match timeout_at(until, ready).await {
            Ok(Ok(view)) => Ok(view.cgroup_parent.clone()),
            Ok(Err(_)) => Err(late(uid, "the pod has gone meanwhile")),
            Err(_) => Err(late(uid, &last.borrow_and_update().message)),
        }
    }
}

fn late(uid: &str, message: &str) -> Status {
    let message = if message.is_empty() { "its cgroup is being made" } else { message };
    error(Code::DeadlineExceeded, "NOT_READY", format!("pod {uid}: {message}"))
}

#[tonic::async_trait]
impl ResourceManager for Service {
    type SyncStream = Answers<common::SyncAck>;
    type WatchMachineStream = Answers<pb::Machine>;

    async fn sync(
        &self,
        request: Request<Streaming<pb::SyncRequest>>,
    ) -> Result<Response<Self::SyncStream>, Status> {
        let taken_over = CancellationToken::new();
        let (reply, answer) = oneshot::channel();
        self.send(Command::Open { taken_over: taken_over.clone(), reply }).await?;
        let stream = answer.await.map_err(|_| stopping())?;
        let (acks, receiver) = mpsc::channel(4);
        let reader = SyncReader {
            commands: self.commands.clone(),
            progress: self.progress.clone(),
            stream,
            acks: acks.clone(),
        };
        let shutdown = self.shutdown.clone();
        tokio::spawn(async move {
            // Cancel-safe: an abandoned stream is replaced by a whole new set.
            let end = tokio::select! {
                end = reader.read(request.into_inner()) => end,
                () = taken_over.cancelled() => Err(error(
                    Code::Aborted,
                    "SYNC_TAKEN_OVER",
                    "a later Sync stream has begun; this one is ignored",
                )),
                () = shutdown.cancelled() => Err(stopping()),
            };
            if let Err(status) = end {
                let _ = acks.try_send(Err(status));
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn admit_pod(
        &self,
        request: Request<pb::AdmitPodRequest>,
    ) -> Result<Response<pb::AdmitPodResponse>, Status> {
        use pb::admit_pod_response::Verdict as Answer;
        let until = deadline(request.metadata());
        let request = request.into_inner();
        let uid = usable_uid(request.uid).map_err(|e| bad(&e))?;
        self.named(&uid, request.revision, until).await?;
        let verdict = match self.verdict(&uid, until).await? {
            Verdict::Admitted => Answer::Admitted(pb::Admitted {}),
            Verdict::Rejected(r) => Answer::Rejected(pb::Rejected { reason: r.reason, message: r.message }),
            Verdict::NotYet { reason, message } => {
                Answer::NotYet(pb::NotYet { reason: reason.to_owned(), message })
            }
        };
        Ok(Response::new(pb::AdmitPodResponse { verdict: Some(verdict) }))
    }

    async fn prepare_pod(
        &self,
        request: Request<pb::PreparePodRequest>,
    ) -> Result<Response<pb::PreparePodResponse>, Status> {
        let until = deadline(request.metadata());
        let request = request.into_inner();
        let uid = usable_uid(request.uid).map_err(|e| bad(&e))?;
        let span = tracing::info_span!(target: keelson_telemetry::TRACE_TARGET, "wait for cgroup", uid);
        let cgroup_parent = self.prepare(&uid, request.revision, until).instrument(span).await?;
        Ok(Response::new(pb::PreparePodResponse { cgroup_parent }))
    }

    async fn release_pod(
        &self,
        request: Request<pb::ReleasePodRequest>,
    ) -> Result<Response<pb::ReleasePodResponse>, Status> {
        let until = deadline(request.metadata());
        let uid = usable_uid(request.into_inner().uid).map_err(|e| bad(&e))?;
        let mut view = self.look(&uid).await?;
        let mut last = view.clone();
        let done = view.wait_for(|v| matches!(v.phase, Phase::Unknown | Phase::Gone));
        match timeout_at(until, done).await {
            // The sender is gone with the pod's slot, and the slot goes only when nothing is left.
            Ok(Ok(_) | Err(_)) => Ok(Response::new(pb::ReleasePodResponse {})),
            Err(_) => {
                let view = last.borrow_and_update();
                let why = match (&view.named, view.message.as_str()) {
                    (Some((_, want)), _) if *want != Want::Forget => "it is not to be forgotten yet",
                    (_, "") => "its cgroup is being removed",
                    (_, message) => message,
                };
                Err(error(Code::DeadlineExceeded, "NOT_RELEASED", format!("pod {uid}: {why}")))
            }
        }
    }

    async fn watch_machine(
        &self,
        _: Request<pb::WatchMachineRequest>,
    ) -> Result<Response<Self::WatchMachineStream>, Status> {
        let driver = self.driver.clone();
        let states = WatchStream::new(self.machine.clone());
        Ok(Response::new(Box::pin(states.map(move |state| Ok(wire::machine(state, &driver))))))
    }
}

/// When the caller's deadline ends, less the answer's way back; in a day without one.
fn deadline(metadata: &MetadataMap) -> Instant {
    let parse = |text: &str| {
        let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
        let amount: u64 = digits.parse().ok()?;
        Some(match unit {
            "H" => Duration::from_secs(amount.saturating_mul(3600)),
            "M" => Duration::from_secs(amount.saturating_mul(60)),
            "S" => Duration::from_secs(amount),
            "m" => Duration::from_millis(amount),
            "u" => Duration::from_micros(amount),
            _ => Duration::from_nanos(amount),
        })
    };
    let day = Duration::from_secs(86_400);
    let given = metadata.get("grpc-timeout").and_then(|v| v.to_str().ok()).and_then(parse);
    Instant::now() + given.map_or(day, |d| d.saturating_sub(ANSWER_SLACK.min(d / 4)).min(day))
}

/// Reads one `Sync` stream.
struct SyncReader {
    commands: mpsc::Sender<Command>,
    progress: Progress,
    stream: StreamId,
    acks: mpsc::Sender<Result<common::SyncAck, Status>>,
}

impl SyncReader {
    async fn read(self, mut messages: Streaming<pb::SyncRequest>) -> Result<(), Status> {
        use pb::sync_request::Item;
        let stream = self.stream;
        self.progress.condition("sync", Ok(()));
        let send = |command| async { self.commands.send(command).await.map_err(|_| stopping()) };
        while let Some(message) = messages.message().await? {
            match message.item {
                Some(Item::Pod(pod)) => match PodDesireFromWire::try_from(pod) {
                    Ok(PodDesireFromWire(desire)) => send(Command::Name { stream, desire }).await?,
                    // One bad pod must not stand in the way of all others.
                    Err(problem) => self
                        .progress
                        .condition("sync", Err(format!("a pod of the set cannot be taken: {problem}"))),
                },
                Some(Item::DroppedUid(uid)) => send(Command::Unname { stream, uid }).await?,
                Some(Item::Complete(set)) => {
                    let (reply, taken) = oneshot::channel();
                    let sources_ready = set.sources_ready;
                    send(Command::Complete { stream, sources_ready, reply }).await?;
                    taken.await.map_err(|_| stopping())?;
                    let _ = self.acks.send(Ok(common::SyncAck { epoch: set.epoch })).await;
                }
                None => {}
            }
        }
        Ok(())
    }
}
