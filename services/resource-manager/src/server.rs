//! The gRPC API and the building of the service.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::{Stream, StreamExt as _, stream};
use keelson_config::ServiceName;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::resource_manager::v1::resource_manager_server::{
    ResourceManager, ResourceManagerServer,
};
use keelson_resource_manager_core::desire::{PodDesire, Want};
use keelson_service_kit::status::error;
use keelson_service_kit::{Context, answer_by};
use keelson_sync_callee::{Acks, Front, NAMED_WITHIN, QUEUE, Runtime, View as _, becomes, not_named};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::WatchStream;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status, Streaming};
use tracing::Instrument as _;

use crate::machine_loop::MachineLoop;
use crate::manager::{Ask, Command, Env, Manager, SET_NOT_COMPLETE, Verdict};
use crate::metrics::CgroupMetrics;
use crate::statistics::Statistics;
use crate::tree_loop::{TreeLoop, attempt};
use crate::view::{MachineState, Phase, TreeState, View};
use crate::wire::{self, usable_uid};

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
    let (commands, receiver) = mpsc::channel(QUEUE);
    let (known, is_known) = watch::channel(false);
    let (burstable, burstable_now) = watch::channel(0);
    let metrics = CgroupMetrics::new(&ctx.metrics);
    let env = Arc::new(Env {
        tree: tree.subscribe(),
        runtime: Runtime::new(ctx.peer(ServiceName::RuntimeShim), ctx.progress.clone(), "cgroups stay"),
        metrics: metrics.clone(),
        commands: commands.clone(),
    });
    let service = Service {
        front: Front::new(&ctx, commands.clone()),
        known: is_known,
        machine: machine.state(),
        tree: tree.subscribe(),
        driver: ctx.config.runtime.cgroup_driver.clone(),
        statistics: Statistics::new(
            tree.subscribe(),
            ctx.peer(ServiceName::RuntimeShim),
            ctx.config.paths.root_dir.clone(),
        ),
    };
    let manager = Manager::new(env, machine.state(), known, burstable, found);
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
    front: Front<PodDesire, View, Ask>,
    known: watch::Receiver<bool>,
    machine: watch::Receiver<MachineState>,
    tree: watch::Receiver<TreeState>,
    driver: String,
    statistics: Statistics,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn bad(problem: &wire::WireError) -> Status {
    error(Code::InvalidArgument, "BAD_FIELD", problem.to_string())
}

impl Service {
    /// Waits until the set names the pod with the revision, and fails when it does not or wants no running pod.
    async fn named(&self, uid: &str, revision: u64, until: Instant) -> Result<watch::Receiver<View>, Status> {
        let mut view = self.front.look(uid).await?;
        let until = until.min(Instant::now() + NAMED_WITHIN);
        let want = match timeout_at(until, view.wait_for(|v| v.wanted(revision).is_some())).await {
            Ok(Ok(view)) => view.wanted(revision),
            _ => return Err(not_named(uid, revision)),
        };
        if want != Some(Want::Run) {
            let text = format!("pod {uid} is not to run, nothing is begun for it");
            return Err(error(Code::FailedPrecondition, "NOT_WANTED", text));
        }
        Ok(view)
    }

    /// The verdict on a pod that the set names. Until the reservations of all others are known, only a pod that is
    /// admitted already is told so.
    async fn verdict(&self, uid: &str, until: Instant) -> Result<Verdict, Status> {
        let mut known = self.known.clone();
        loop {
            let admit = |reply| Command::Ask(Ask::Admit { uid: uid.to_owned(), reply });
            let verdict = self.front.ask(admit).await?;
            let waits = matches!(verdict, Verdict::NotYet { reason: SET_NOT_COMPLETE, .. });
            if !waits || timeout_at(until, known.wait_for(|known| *known)).await.is_err() {
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
    type SyncStream = Acks;
    type WatchMachineStream = Answers<pb::Machine>;
    type PodStatsStream = Answers<pb::PodStatsResponse>;

    async fn node_stats(
        &self,
        request: Request<pb::NodeStatsRequest>,
    ) -> Result<Response<pb::NodeStatsResponse>, Status> {
        let brief = request.into_inner().cpu_and_memory_only;
        Ok(Response::new(self.statistics.node(brief).await?))
    }

    async fn pod_stats(
        &self,
        request: Request<pb::PodStatsRequest>,
    ) -> Result<Response<Self::PodStatsStream>, Status> {
        let brief = request.into_inner().cpu_and_memory_only;
        let pods = self.statistics.pods(brief).await?;
        Ok(Response::new(Box::pin(stream::iter(pods.into_iter().map(Ok)))))
    }

    async fn sync(
        &self,
        request: Request<Streaming<pb::SyncRequest>>,
    ) -> Result<Response<Self::SyncStream>, Status> {
        Ok(Response::new(self.front.sync(request.into_inner(), wire::item).await?))
    }

    async fn admit_pod(
        &self,
        request: Request<pb::AdmitPodRequest>,
    ) -> Result<Response<pb::AdmitPodResponse>, Status> {
        use pb::admit_pod_response::Verdict as Answer;
        let until = answer_by(request.metadata());
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
        let until = answer_by(request.metadata());
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
        let until = answer_by(request.metadata());
        let uid = usable_uid(request.into_inner().uid).map_err(|e| bad(&e))?;
        let mut view = self.front.look(&uid).await?;
        if becomes(&mut view, until, |v| matches!(v.phase, Phase::Unknown | Phase::Gone)).await {
            return Ok(Response::new(pb::ReleasePodResponse {}));
        }
        let view = view.borrow();
        let why = match (&view.named, view.message.as_str()) {
            (Some((_, want)), _) if *want != Want::Forget => "it is not to be forgotten yet",
            (_, "") => "its cgroup is being removed",
            (_, message) => message,
        };
        Err(error(Code::DeadlineExceeded, "NOT_RELEASED", format!("pod {uid}: {why}")))
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
