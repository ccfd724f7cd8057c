//! The gRPC API.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use keelson_pod_reconciler::{
    Acks, DESIRED_TIMEOUT, ManagerHandle, View as _, not_desired_error, wait_until,
};
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::resource_manager::v1::resource_manager_server::ResourceManager;
use keelson_resource_manager_core::desire::{Amounts, PodCgroup, PodDesire, Want};
use keelson_service_kit::answer_by;
use keelson_service_kit::status::error;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::WatchStream;
use tonic::{Code, Request, Response, Status, Streaming};
use tracing::Instrument as _;

use crate::admission::{NO_TREE, OLDER_PODS_FIRST, PREEMPTING, SET_NOT_COMPLETE, Verdict};
use crate::commands::{Command, ManagerRequest};
use crate::drain::DrainHandle;
use crate::eviction;
use crate::statistics::Statistics;
use crate::view::{MachineState, Orders, Phase, TreeState, View};
use crate::wire::{self, usable_uid};

/// How long admission waits for the cgroup tree: at the first start the service asks the container runtime for its driver
/// first.
const TREE_TIMEOUT: Duration = Duration::from_secs(1);

/// The gRPC API.
pub(crate) struct Service {
    pub(crate) manager: ManagerHandle<PodDesire, View, ManagerRequest>,
    pub(crate) reservations_known: watch::Receiver<bool>,
    pub(crate) changes: watch::Receiver<u64>,
    pub(crate) orders: Orders,
    pub(crate) machine: watch::Receiver<MachineState>,
    pub(crate) tree: watch::Receiver<TreeState>,
    pub(crate) statistics: Arc<Statistics>,
    pub(crate) drain: DrainHandle,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn bad_field(cause: &wire::WireError) -> Status {
    error(Code::InvalidArgument, "BAD_FIELD", cause.to_string())
}

impl Service {
    /// Waits until the set names the pod with this revision. Fails when it does not, or when the pod should not run.
    async fn wait_until_named(
        &self,
        uid: &str,
        revision: u64,
        until: Instant,
    ) -> Result<watch::Receiver<View>, Status> {
        let mut view = self.manager.watch(uid).await?;
        let until = until.min(Instant::now() + DESIRED_TIMEOUT);
        let want = match timeout_at(until, view.wait_for(|v| v.wanted(revision).is_some())).await {
            Ok(Ok(view)) => view.wanted(revision),
            _ => return Err(not_desired_error(uid, revision)),
        };
        if want != Some(Want::Run) {
            let text = format!("pod {uid} should not run, so nothing is started for it");
            return Err(error(Code::FailedPrecondition, "NOT_WANTED", text));
        }
        Ok(view)
    }

    /// The verdict on a pod of the set. While the reservations of other pods are unknown, only pods that are admitted already
    /// get an answer; pods that wait for other pods are decided on again after each change.
    async fn verdict(&self, uid: &str, until: Instant) -> Result<Verdict, Status> {
        let (mut known, mut changes, mut tree) =
            (self.reservations_known.clone(), self.changes.clone(), self.tree.clone());
        loop {
            changes.mark_unchanged();
            tree.mark_unchanged();
            let admit = |reply| Command::Request(ManagerRequest::Admit { uid: uid.to_owned(), reply });
            let verdict = self.manager.request(admit).await?;
            let is_late = match &verdict {
                Verdict::NotYet { reason: SET_NOT_COMPLETE, .. } => {
                    timeout_at(until, known.wait_for(|known| *known)).await.is_err()
                }
                Verdict::NotYet { reason: OLDER_PODS_FIRST | PREEMPTING, .. } => {
                    timeout_at(until, changes.changed()).await.is_err()
                }
                Verdict::NotYet { reason: NO_TREE, .. } => {
                    let until = until.min(Instant::now() + TREE_TIMEOUT);
                    timeout_at(until, tree.changed()).await.is_err()
                }
                Verdict::Admitted | Verdict::Rejected(_) | Verdict::NotYet { .. } => true,
            };
            if is_late {
                return Ok(verdict);
            }
        }
    }

    /// The verdict on other requests for a pod. While the reservations of other pods are unknown, it waits.
    async fn resize_verdict(
        &self,
        uid: &str,
        revision: u64,
        requests: Amounts,
        until: Instant,
    ) -> Result<Verdict, Status> {
        let mut known = self.reservations_known.clone();
        loop {
            let (uid, requests) = (uid.to_owned(), requests.clone());
            let ask = |reply| Command::Request(ManagerRequest::Resize { uid, revision, requests, reply });
            let verdict = self.manager.request(ask).await?;
            let waits = matches!(verdict, Verdict::NotYet { reason: SET_NOT_COMPLETE, .. });
            if !waits || timeout_at(until, known.wait_for(|known| *known)).await.is_err() {
                return Ok(verdict);
            }
        }
    }

    /// Waits until the cgroup exists and, if values are given, until it has these.
    async fn prepare(
        &self,
        uid: &str,
        revision: u64,
        values: Option<PodCgroup>,
        until: Instant,
    ) -> Result<String, Status> {
        let mut view = self.wait_until_named(uid, revision, until).await?;
        let mut tree = self.tree.clone();
        loop {
            // This admits pods again that an earlier run of this service has admitted.
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
                        return Err(not_ready(uid, &message));
                    }
                }
            }
        }
        let mut last = view.clone();
        let is_ready = |v: &View| {
            let has_values = values.is_none() || v.applied == values;
            v.phase == Phase::Ready && v.revision >= revision && has_values
        };
        let refusal = |v: &View| v.refused.clone().filter(|(refused, _)| values.as_ref() == Some(refused));
        let decided = view.wait_for(|v| is_ready(v) || refusal(v).is_some());
        match timeout_at(until, decided).await {
            Ok(Ok(view)) => match refusal(&view) {
                Some((_, text)) => Err(error(Code::FailedPrecondition, "LIMIT_BELOW_USAGE", text)),
                None => Ok(view.cgroup_parent.clone()),
            },
            Ok(Err(_)) => Err(not_ready(uid, "the pod has been removed in the meantime")),
            Err(_) => Err(not_ready(uid, &last.borrow_and_update().message)),
        }
    }
}

fn not_ready(uid: &str, message: &str) -> Status {
    let message = if message.is_empty() { "its cgroup is being created" } else { message };
    error(Code::DeadlineExceeded, "NOT_READY", format!("pod {uid}: {message}"))
}

#[tonic::async_trait]
impl ResourceManager for Service {
    type SyncStream = Acks;
    type WatchMachineStream = Answers<pb::Machine>;
    type PodStatsStream = Answers<pb::PodStatsResponse>;
    type CgroupStatsStream = Answers<pb::CgroupStatsResponse>;
    type WatchEvictionsStream = Answers<pb::WatchEvictionsResponse>;

    async fn watch_evictions(
        &self,
        _: Request<pb::WatchEvictionsRequest>,
    ) -> Result<Response<Self::WatchEvictionsStream>, Status> {
        let items = self.orders.subscribe().into_stream(|item| Ok(eviction::watch_response(item)));
        Ok(Response::new(Box::pin(items)))
    }

    async fn drain(&self, request: Request<pb::DrainRequest>) -> Result<Response<pb::DrainResponse>, Status> {
        Ok(Response::new(self.drain.drain(request.into_inner()).await?))
    }

    async fn uncordon(
        &self,
        _: Request<pb::UncordonRequest>,
    ) -> Result<Response<pb::UncordonResponse>, Status> {
        Ok(Response::new(self.drain.uncordon().await?))
    }

    async fn get_drain(
        &self,
        _: Request<pb::GetDrainRequest>,
    ) -> Result<Response<pb::GetDrainResponse>, Status> {
        Ok(Response::new(self.drain.get().await?))
    }

    async fn node_stats(
        &self,
        request: Request<pb::NodeStatsRequest>,
    ) -> Result<Response<pb::NodeStatsResponse>, Status> {
        let brief = request.into_inner().cpu_and_memory_only;
        Ok(Response::new(self.statistics.node(brief).await?))
    }

    async fn cgroup_stats(
        &self,
        _: Request<pb::CgroupStatsRequest>,
    ) -> Result<Response<Self::CgroupStatsStream>, Status> {
        let cgroups = self.statistics.cgroups().await?;
        Ok(Response::new(Box::pin(stream::iter(cgroups.into_iter().map(Ok)))))
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
        Ok(Response::new(self.manager.sync(request.into_inner(), wire::item).await?))
    }

    async fn admit_pod(
        &self,
        request: Request<pb::AdmitPodRequest>,
    ) -> Result<Response<pb::AdmitPodResponse>, Status> {
        use pb::admit_pod_response::Verdict as Answer;
        let until = answer_by(request.metadata());
        let request = request.into_inner();
        let uid = usable_uid(request.uid).map_err(|e| bad_field(&e))?;
        self.wait_until_named(&uid, request.revision, until).await?;
        let verdict = match self.verdict(&uid, until).await? {
            Verdict::Admitted => Answer::Admitted(pb::Admitted {}),
            Verdict::Rejected(r) => {
                Answer::Rejected(pb::Rejected { reason: r.reason, message: r.message, passing: r.temporary })
            }
            Verdict::NotYet { reason, message } => {
                Answer::NotYet(pb::NotYet { reason: reason.to_owned(), message })
            }
        };
        Ok(Response::new(pb::AdmitPodResponse { verdict: Some(verdict) }))
    }

    async fn resize_pod(
        &self,
        request: Request<pb::ResizePodRequest>,
    ) -> Result<Response<pb::ResizePodResponse>, Status> {
        use pb::resize_pod_response::Verdict as Answer;
        let until = answer_by(request.metadata());
        let request = request.into_inner();
        let uid = usable_uid(request.uid).map_err(|e| bad_field(&e))?;
        self.wait_until_named(&uid, request.revision, until).await?;
        let requests = request.requests.into_iter().collect();
        let verdict = match self.resize_verdict(&uid, request.revision, requests, until).await? {
            Verdict::Admitted => Answer::Accepted(pb::Admitted {}),
            Verdict::Rejected(r) => {
                Answer::Rejected(pb::Rejected { reason: r.reason, message: r.message, passing: r.temporary })
            }
            Verdict::NotYet { reason, message } => {
                Answer::NotYet(pb::NotYet { reason: reason.to_owned(), message })
            }
        };
        Ok(Response::new(pb::ResizePodResponse { verdict: Some(verdict) }))
    }

    async fn defer_pod(
        &self,
        request: Request<pb::DeferPodRequest>,
    ) -> Result<Response<pb::DeferPodResponse>, Status> {
        let until = answer_by(request.metadata());
        let request = request.into_inner();
        let uid = usable_uid(request.uid).map_err(|e| bad_field(&e))?;
        self.wait_until_named(&uid, request.revision, until).await?;
        self.manager.request(|reply| Command::Request(ManagerRequest::Defer { uid, reply })).await?;
        Ok(Response::new(pb::DeferPodResponse {}))
    }

    async fn prepare_pod(
        &self,
        request: Request<pb::PreparePodRequest>,
    ) -> Result<Response<pb::PreparePodResponse>, Status> {
        let until = answer_by(request.metadata());
        let request = request.into_inner();
        let uid = usable_uid(request.uid).map_err(|e| bad_field(&e))?;
        let values = request.cgroup.map(wire::pod_cgroup);
        let span = tracing::info_span!(target: keelson_telemetry::TRACE_TARGET, "wait for cgroup", uid);
        let cgroup_parent = self.prepare(&uid, request.revision, values, until).instrument(span).await?;
        Ok(Response::new(pb::PreparePodResponse { cgroup_parent }))
    }

    async fn release_pod(
        &self,
        request: Request<pb::ReleasePodRequest>,
    ) -> Result<Response<pb::ReleasePodResponse>, Status> {
        let until = answer_by(request.metadata());
        let uid = usable_uid(request.into_inner().uid).map_err(|e| bad_field(&e))?;
        let mut view = self.manager.watch(&uid).await?;
        if wait_until(&mut view, until, |v| matches!(v.phase, Phase::Unknown | Phase::Gone)).await {
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
        let states = WatchStream::new(self.machine.clone());
        Ok(Response::new(Box::pin(states.map(move |state| Ok(wire::machine(state))))))
    }
}
