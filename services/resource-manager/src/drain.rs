//! Drains the node when an operator asks for it: no new pods, and on request the end of those that run.
//!
//! One task owns the state, which is stored before it is answered for and survives restarts and reboots. Orders to end pods are
//! those of evictions; they are removed when the drain is undone. The decisions are in
//! `keelson_resource_manager_core::drain`; [ADR 0025] has the reasons.
//!
//! [ADR 0025]: ../../../docs/adr/0025-a-drain-without-a-cluster.md

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::Arc;

use keelson_config::{Config, ControlPlane, NodeShutdown, ServiceName};
use keelson_proto::keelson::common::v1::PodRef as WirePodRef;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_resource_manager_core::drain::Drain;
use keelson_resource_manager_core::eviction::order::OrderKind;
use keelson_resource_manager_core::node_shutdown::groups::has_ended;
use keelson_resource_manager_core::node_shutdown::periods::GracePeriods;
use keelson_service_kit::status::{chain, error};
use keelson_service_kit::{
    CancellationToken, Context, LoopHandle, ObjectRef, StateFile, StateFileError, StoredState, now_unix_nanos,
};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};
use tonic::{Code, Status};

use crate::commands::{Command, KnownPod, ManagerRequest};
use crate::node_shutdown::{self, Ending};
use crate::view::Orders;

/// The condition for an unwritable state file.
const CONDITION: &str = "drain-state";
/// The capacity of the queue of requests.
const REQUESTS: usize = 4;

/// The drain in effect, if any.
pub(crate) type DrainState = Option<Arc<Drain>>;

/// The state file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct StoredDrain {
    drained: bool,
    since_unix_nanos: i64,
    stop_pods: bool,
    pods: Vec<String>,
}

impl StoredState for StoredDrain {
    const VERSION: u64 = 1;
    const CONSEQUENCE_OF_LOSS: &'static str = "the node then starts pods although it was drained";
    const CONSEQUENCE_OF_WRITE_ERROR: &'static str =
        "nothing was changed: free disk space and make the directory writable";
}

impl From<&DrainState> for StoredDrain {
    fn from(state: &DrainState) -> Self {
        state.as_ref().map_or_else(Self::default, |drain| Self {
            drained: true,
            since_unix_nanos: drain.since_unix_nanos,
            stop_pods: drain.stop_pods,
            pods: drain.pods.iter().cloned().collect(),
        })
    }
}

impl From<StoredDrain> for DrainState {
    fn from(stored: StoredDrain) -> Self {
        let StoredDrain { drained, since_unix_nanos, stop_pods, pods } = stored;
        drained.then(|| Arc::new(Drain { since_unix_nanos, stop_pods, pods: pods.into_iter().collect() }))
    }
}

/// `<state-dir>/resource-manager/drain.json`.
pub(crate) fn state_file(config: &Config) -> StateFile<StoredDrain> {
    StateFile::at(config.paths.state(ServiceName::ResourceManager).join("drain.json"))
}

/// The priorities by which pods are ended in turn.
pub(crate) fn periods(config: &NodeShutdown) -> GracePeriods {
    GracePeriods::for_drain(&node_shutdown::settings(config))
}

/// A request of an operator.
#[derive(Debug)]
struct DrainCommand {
    /// None: undo the drain.
    stop_pods: Option<bool>,
    reply: oneshot::Sender<Result<Change, StateFileError>>,
}

/// The state before and after a request.
#[derive(Debug)]
struct Change {
    before: DrainState,
    after: DrainState,
}

/// The API of the task.
#[derive(Debug, Clone)]
pub(crate) struct DrainHandle {
    requests: mpsc::Sender<DrainCommand>,
    state: watch::Receiver<DrainState>,
    /// The manager, which knows the pods.
    commands: mpsc::Sender<Command>,
    pods_known: watch::Receiver<bool>,
    orders: Orders,
    config: Arc<Config>,
}

impl DrainHandle {
    /// Drains the node.
    pub(crate) async fn drain(&self, request: pb::DrainRequest) -> Result<pb::DrainResponse, Status> {
        if matches!(self.config.control_plane, ControlPlane::Kubernetes(_)) {
            let text = format!(
                "the node belongs to a cluster, whose API server decides where pods run: use kubectl drain {}, or kubectl cordon",
                self.config.node_name
            );
            return Err(error(Code::FailedPrecondition, "HAS_API_SERVER", text));
        }
        self.check_pods_known()?;
        let Change { before, after } = self.request(Some(request.stop_pods)).await?;
        Ok(pb::DrainResponse {
            node_name: self.config.node_name.clone(),
            was_drained: before.is_some(),
            stop_pods: after.is_some_and(|drain| drain.stop_pods),
        })
    }

    /// Undoes a drain, also one of a node that has got an API server since.
    pub(crate) async fn uncordon(&self) -> Result<pb::UncordonResponse, Status> {
        let Change { before, .. } = self.request(None).await?;
        let node_name = self.config.node_name.clone();
        Ok(pb::UncordonResponse { node_name, was_drained: before.is_some() })
    }

    /// The state, and the pods that have not ended.
    pub(crate) async fn get(&self) -> Result<pb::GetDrainResponse, Status> {
        self.check_pods_known()?;
        let known = list_pods(&self.commands).await.ok_or_else(ending)?;
        let state = self.state.borrow().clone();
        Ok(pb::GetDrainResponse {
            node_name: self.config.node_name.clone(),
            drained: state.is_some(),
            since_unix_nanos: state.as_ref().map_or(0, |drain| drain.since_unix_nanos),
            stop_pods: state.is_some_and(|drain| drain.stop_pods),
            pods: running(&known, &self.orders),
        })
    }

    async fn request(&self, stop_pods: Option<bool>) -> Result<Change, Status> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(DrainCommand { stop_pods, reply }).await.map_err(|_| ending())?;
        let stored = answer.await.map_err(|_| ending())?;
        stored.map_err(|cause| error(Code::Internal, "NOT_STORED", chain(&cause)))
    }

    /// Only the complete set of pods shows which pods are new, and which still run.
    fn check_pods_known(&self) -> Result<(), Status> {
        if *self.pods_known.borrow() {
            return Ok(());
        }
        let text = "pod-sync has not named all pods since resource-manager started, so it is not known which run; try again";
        Err(error(Code::Unavailable, "PODS_NOT_KNOWN", text.to_owned()))
    }
}

fn ending() -> Status {
    error(Code::Unavailable, "ENDING", "resource-manager is ending".to_owned())
}

/// The pods of the manager; none when the service ends.
async fn list_pods(commands: &mpsc::Sender<Command>) -> Option<BTreeMap<String, KnownPod>> {
    let (reply, answer) = oneshot::channel();
    commands.send(Command::Request(ManagerRequest::ListPods { reply })).await.ok()?;
    answer.await.ok()
}

/// The UIDs of the admitted pods; none when the service ends.
async fn admitted(commands: &mpsc::Sender<Command>) -> Option<BTreeSet<String>> {
    let known = list_pods(commands).await?;
    Some(known.into_iter().filter(|(_, pod)| pod.admitted).map(|(uid, _)| uid).collect())
}

/// The admitted pods that have not ended, by rising priority.
fn running(known: &BTreeMap<String, KnownPod>, orders: &Orders) -> Vec<pb::RunningPod> {
    let admitted = known.values().filter(|pod| pod.admitted).filter_map(|pod| pod.desire.as_ref());
    let mut pods: Vec<pb::RunningPod> = admitted
        .filter(|desire| !has_ended(Some(desire.header.want)))
        .map(|desire| {
            let pod = &desire.header.pod;
            let order = orders.get(&pod.uid);
            pb::RunningPod {
                pod: Some(WirePodRef {
                    uid: pod.uid.clone(),
                    namespace: pod.namespace.clone(),
                    name: pod.name.clone(),
                }),
                priority: desire.priority,
                ending: order.is_some_and(|order| order.kind() == OrderKind::NodeDrain),
                grace_period_seconds: desire.grace_seconds,
            }
        })
        .collect();
    pods.sort_by_key(|pod| pod.priority);
    pods
}

/// The pods while they are being ended.
type Groups = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The task.
pub(crate) struct DrainLoop {
    ctx: Context,
    file: StateFile<StoredDrain>,
    state: watch::Sender<DrainState>,
    requests: mpsc::Receiver<DrainCommand>,
    ending: Ending,
    groups: Option<Groups>,
}

impl DrainLoop {
    /// `state` has the drain that was stored. `ending` ends pods; its orders are void unless `state` says that pods are ended.
    pub(crate) fn new(
        ctx: &Context,
        state: watch::Sender<DrainState>,
        ending: Ending,
    ) -> (Self, DrainHandle) {
        let (requests, received) = mpsc::channel(REQUESTS);
        let handle = DrainHandle {
            requests,
            state: state.subscribe(),
            commands: ending.commands.clone(),
            pods_known: ending.pods_known.clone(),
            orders: ending.orders.clone(),
            config: Arc::clone(&ctx.config),
        };
        let file = state_file(&ctx.config);
        let mut own = Self { ctx: ctx.clone(), file, state, requests: received, ending, groups: None };
        own.begin_or_end_groups();
        (own, handle)
    }

    /// Runs until the service ends.
    pub(crate) async fn run(mut self, shutdown: CancellationToken, handle: LoopHandle) {
        loop {
            handle.tick();
            // Cancel-safe: `recv` takes nothing before it returns, the groups stay, and a timer holds nothing.
            tokio::select! {
                () = shutdown.cancelled() => return,
                Some(command) = self.requests.recv() => {
                    if let Some(result) = self.carry_out(command.stop_pods).await {
                        let _ = command.reply.send(result);
                    }
                }
                () = ended(&mut self.groups) => {}
                () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
            }
        }
    }

    /// Stores the new state, and then publishes it. None when the service ends.
    async fn carry_out(&mut self, stop_pods: Option<bool>) -> Option<Result<Change, StateFileError>> {
        let before = self.state.borrow().clone();
        let after = match (stop_pods, &before) {
            (None, _) => None,
            (Some(stop_pods), Some(drain)) => Some(Arc::new(Drain::clone(drain).requested_again(stop_pods))),
            (Some(stop_pods), None) => Some(Arc::new(self.close(stop_pods).await?)),
        };
        if after == before {
            return Some(Ok(Change { before, after }));
        }
        let stored = self.file.store(StoredDrain::from(&after)).await;
        self.ctx.progress.condition(CONDITION, stored.as_ref().copied().map_err(|error| chain(error)));
        if let Err(error) = stored {
            self.state.send_replace(before);
            return Some(Err(error));
        }
        self.state.send_replace(after.clone());
        self.begin_or_end_groups();
        self.report(&before, &after);
        Some(Ok(Change { before, after }))
    }

    /// Closes the node for new pods, and then lists those that run: none is admitted between the list and the drain. The drain is not
    /// stored yet. None when the service ends.
    async fn close(&mut self, stop_pods: bool) -> Option<Drain> {
        let since_unix_nanos = now_unix_nanos();
        let pods = admitted(&self.ending.commands).await?;
        self.state.send_replace(Some(Arc::new(Drain { since_unix_nanos, stop_pods: false, pods })));
        let pods = admitted(&self.ending.commands).await;
        if pods.is_none() {
            self.state.send_replace(None);
        }
        Some(Drain { since_unix_nanos, stop_pods, pods: pods? })
    }

    fn begin_or_end_groups(&mut self) {
        let ends_pods = self.state.borrow().as_ref().is_some_and(|drain| drain.stop_pods);
        if ends_pods && self.groups.is_none() {
            self.groups = Some(Box::pin(self.ending.clone().run_drain()));
        } else if !ends_pods {
            self.groups = None;
        }
    }

    /// Logs the change, and records the event of `kubectl cordon` or `kubectl uncordon` on the Node.
    fn report(&self, before: &DrainState, after: &DrainState) {
        let stop_pods = after.as_ref().is_some_and(|drain| drain.stop_pods);
        tracing::info!(
            event = "node_drain",
            drained = after.is_some(),
            stop_pods,
            "an operator has changed whether the node is drained"
        );
        if before.is_some() != after.is_some() {
            let reason = if after.is_some() { "NodeNotSchedulable" } else { "NodeSchedulable" };
            let name = &self.ctx.config.node_name;
            let text = format!("Node {name} status is now: {reason}");
            self.ctx.events.normal(ObjectRef::node(name), reason, text);
        }
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

#[cfg(test)]
mod tests;
