//! Looks now and then whether pods run in their cgroups.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use keelson_proto::keelson::runtime::v1 as rt;
use keelson_resource_manager_core::desire::Want;
use keelson_resource_manager_core::driver::Choice;
use keelson_resource_manager_core::placement::{Placed, misplaced};
use keelson_service_kit::{CancellationToken, Context, LoopHandle, ObjectRef, now_unix_nanos};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::cgroup::Tree;
use crate::eviction::Active;
use crate::manager::{Ask, Command};
use crate::statistics::Statistics;
use crate::view::TreeState;

/// The name of the condition.
const CONDITION: &str = "pods-in-cgroups";
/// The first look: pods that run already are soon named.
const FIRST: Duration = Duration::from_secs(2);
/// Between two looks, and after one that has missed a pod.
const INTERVAL: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(10);

/// The task.
pub(crate) struct PlacementLoop {
    pub(crate) ctx: Context,
    pub(crate) tree: watch::Receiver<TreeState>,
    pub(crate) choice: watch::Receiver<Choice>,
    pub(crate) statistics: Arc<Statistics>,
    pub(crate) commands: mpsc::Sender<Command>,
}

impl PlacementLoop {
    /// Turns until the shutdown.
    pub(crate) async fn run(self, shutdown: CancellationToken, handle: LoopHandle) {
        let (mut at, mut told) = (Instant::now() + FIRST, false);
        loop {
            // Cancel-safe: both hold nothing.
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = handle.while_at(tokio::time::sleep_until(at)) => {}
            }
            // What cannot be looked at now is looked at the next time.
            let Some(pods) = self.look().await else {
                at = Instant::now() + INTERVAL;
                continue;
            };
            at = Instant::now() + if pods.iter().any(Placed::is_missed) { SOON } else { INTERVAL };
            let Choice::Use(driver, by) = *self.choice.borrow() else { continue };
            let outside = misplaced(&pods, driver.name(), by, now_unix_nanos());
            if let Some(text) = outside.as_ref().filter(|_| !told) {
                let node = ObjectRef::node(&self.ctx.config.node_name);
                self.ctx.events.warning(node, "PodsOutsideCgroups", text.clone());
            }
            told = outside.is_some();
            self.ctx.progress.condition(CONDITION, outside.map_or(Ok(()), Err));
        }
    }

    /// The pods that are to run; none when they cannot be told.
    async fn look(&self) -> Option<Vec<Placed>> {
        let TreeState::Ready(tree) = self.tree.borrow().clone() else { return None };
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Ask(Ask::Active { reply })).await.ok()?;
        let active = answer.await.ok()?;
        let running = self.statistics.running().await.ok()?;
        let look = move || running.iter().filter_map(|pod| placed(pod, &active, &tree)).collect();
        tokio::task::spawn_blocking(look).await.ok()
    }
}

/// A pod that the runtime has and that is to run.
fn placed(pod: &rt::RuntimePod, active: &BTreeMap<String, Active>, tree: &Tree) -> Option<Placed> {
    let desire = active.get(&pod.uid)?.desire.as_ref().filter(|desire| desire.want == Want::Run)?;
    let ready = pod.sandboxes.iter().find(|sandbox| sandbox.ready);
    Some(Placed {
        name: format!("{}/{}", pod.namespace, pod.name),
        ready_since_unix_nanos: ready.map(|sandbox| sandbox.created_unix_nanos),
        inhabited: tree.is_inhabited(&tree.layout().pod(desire.qos, &pod.uid)),
    })
}
