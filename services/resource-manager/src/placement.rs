//! Checks periodically that pods run in their cgroups.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use keelson_proto::keelson::runtime::v1 as rt;
use keelson_resource_manager_core::desire::Want;
use keelson_resource_manager_core::driver::DriverChoice;
use keelson_resource_manager_core::placement::{PodPlacement, outside_message};
use keelson_service_kit::{CancellationToken, Context, LoopHandle, ObjectRef, now_unix_nanos};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::cgroup::Tree;
use crate::commands::{Command, KnownPod, ManagerRequest};
use crate::statistics::Statistics;
use crate::view::TreeState;

/// The name of the condition.
const CONDITION: &str = "pods-in-cgroups";
/// Delay of the first check: a set names running pods soon after the start.
const FIRST: Duration = Duration::from_secs(2);
/// Between two checks; shorter after a check that found a pod outside its cgroup.
const INTERVAL: Duration = Duration::from_secs(60);
const RECHECK_INTERVAL: Duration = Duration::from_secs(10);

/// The task that checks pods.
pub(crate) struct PlacementLoop {
    pub(crate) ctx: Context,
    pub(crate) tree: watch::Receiver<TreeState>,
    pub(crate) choice: watch::Receiver<DriverChoice>,
    pub(crate) statistics: Arc<Statistics>,
    pub(crate) commands: mpsc::Sender<Command>,
}

impl PlacementLoop {
    /// Runs until the shutdown.
    pub(crate) async fn run(self, shutdown: CancellationToken, handle: LoopHandle) {
        let (mut at, mut is_reported) = (Instant::now() + FIRST, false);
        loop {
            // Cancel-safe: both hold nothing.
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = handle.while_at(tokio::time::sleep_until(at)) => {}
            }
            // Pods that cannot be read now are checked the next time.
            let Some(pods) = self.read_pods().await else {
                at = Instant::now() + INTERVAL;
                continue;
            };
            at = Instant::now()
                + if pods.iter().any(PodPlacement::is_outside) { RECHECK_INTERVAL } else { INTERVAL };
            let DriverChoice::Use(driver, source) = *self.choice.borrow() else { continue };
            let outside = outside_message(&pods, driver.name(), source, now_unix_nanos());
            if let Some(text) = outside.as_ref().filter(|_| !is_reported) {
                let node = ObjectRef::node(&self.ctx.config.node_name);
                self.ctx.events.warning(node, "PodsOutsideCgroups", text.clone());
            }
            is_reported = outside.is_some();
            self.ctx.progress.condition(CONDITION, outside.map_or(Ok(()), Err));
        }
    }

    /// The pods that should run; none when they cannot be read.
    async fn read_pods(&self) -> Option<Vec<PodPlacement>> {
        let TreeState::Ready(tree) = self.tree.borrow().clone() else { return None };
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Request(ManagerRequest::ListPods { reply })).await.ok()?;
        let known = answer.await.ok()?;
        let running = self.statistics.running().await.ok()?;
        let read = move || running.iter().filter_map(|pod| placement(pod, &known, &tree)).collect();
        tokio::task::spawn_blocking(read).await.ok()
    }
}

/// The placement of a pod of the runtime, if the pod should run.
fn placement(pod: &rt::RuntimePod, known: &BTreeMap<String, KnownPod>, tree: &Tree) -> Option<PodPlacement> {
    let desire = known.get(&pod.uid)?.desire.as_ref().filter(|desire| desire.header.want == Want::Run)?;
    let ready = pod.sandboxes.iter().find(|sandbox| sandbox.ready);
    Some(PodPlacement {
        name: format!("{}/{}", pod.namespace, pod.name),
        ready_since_unix_nanos: ready.map(|sandbox| sandbox.created_unix_nanos),
        has_containers: tree.has_child_cgroups(&tree.layout().pod(desire.qos, &pod.uid)),
    })
}

#[cfg(test)]
mod tests {
    use keelson_resource_manager_core::layout::{Driver, Layout, Qos};
    use keelson_service_kit::pod_cgroup;

    /// Services refuse callers inside pods. They recognise them by the paths that this service makes.
    #[test]
    fn callers_in_a_pods_cgroup_are_recognised_with_each_driver_root_and_qos_class() {
        for driver in [Driver::Cgroupfs, Driver::Systemd] {
            for root in ["/", "/own", "/own/deep"] {
                let layout = Layout::new(driver, root).unwrap();
                for qos in Qos::ALL {
                    let pod = layout.pod(qos, "12-34").to_string();
                    assert_eq!(pod_cgroup(&format!("{pod}/container")), Some(pod.as_str()));
                    assert_eq!(pod_cgroup(&layout.class(qos).to_string()), None, "{driver:?} {root} {qos:?}");
                }
            }
        }
    }
}
