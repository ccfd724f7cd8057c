//! Ends the groups of pods one after another, before a shutdown of the machine or for a drain of the node.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use keelson_resource_manager_core::drain;
use keelson_resource_manager_core::eviction::order::Order;
use keelson_resource_manager_core::node_shutdown::groups::{Group, groups, has_ended};
use keelson_resource_manager_core::node_shutdown::periods::GracePeriods;
use keelson_service_kit::now_unix_nanos;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{timeout, timeout_at};

use crate::commands::{Command, KnownPod, ManagerRequest};
use crate::view::Orders;

/// How long to wait after a restart of this service for the complete set of pods. Then the pods that are known are ended.
const SET_TIMEOUT: Duration = Duration::from_secs(10);

/// What is needed to end pods.
#[derive(Clone)]
pub(crate) struct Ending {
    pub(crate) periods: GracePeriods,
    /// The manager, which knows the pods.
    pub(crate) commands: mpsc::Sender<Command>,
    /// Incremented when the desired state of a pod has changed or a pod has gone.
    pub(crate) changes: watch::Receiver<u64>,
    /// Whether the manager knows all pods.
    pub(crate) pods_known: watch::Receiver<bool>,
    /// The eviction task, which stores and publishes orders.
    pub(crate) issue: mpsc::Sender<Vec<Order>>,
    /// The orders in effect.
    pub(crate) orders: Orders,
}

impl Ending {
    /// Returns when the last group has ended or had its time. May be dropped: pods that have an order still end.
    pub(crate) async fn run(mut self) {
        if timeout(SET_TIMEOUT, self.pods_known.wait_for(|known| *known)).await.is_err() {
            let seconds = SET_TIMEOUT.as_secs();
            tracing::warn!(
                "pod-sync has not named all pods within {seconds} s; those that are known are ended before the shutdown"
            );
        }
        let Some(pods) = self.pods().await else { return };
        // A pod that is not admitted has no processes.
        let admitted = pods.values().filter(|pod| pod.admitted).filter_map(|pod| pod.desire.as_ref());
        for group in groups(&self.periods, admitted, now_unix_nanos()) {
            if self.end(group, "before the machine shuts down").await.is_none() {
                return;
            }
        }
    }

    /// Ends the pods of a drained node, also those that become known later. Returns when the service ends; may be dropped.
    pub(crate) async fn run_drain(mut self) {
        // After a restart, also pods with an order are waited for, so that groups stay in their order.
        let mut is_first = true;
        loop {
            if self.pods_known.wait_for(|known| *known).await.is_err() {
                return;
            }
            self.changes.mark_unchanged();
            let Some(pods) = self.pods().await else { return };
            let admitted = || pods.values().filter(|pod| pod.admitted).filter_map(|pod| pod.desire.as_ref());
            let groups = drain::groups(&self.periods, admitted(), now_unix_nanos());
            let is_ordered = |order: &Order| self.orders.get(&order.pod.uid).is_some();
            let all_ordered = groups.iter().flat_map(|group| &group.orders).all(is_ordered);
            if all_ordered && !is_first {
                if self.changes.changed().await.is_err() {
                    return;
                }
                continue;
            }
            is_first = false;
            for group in groups {
                if self.end(group, "because the node is drained").await.is_none() {
                    return;
                }
            }
        }
    }

    /// Ends a group. None when the service ends.
    async fn end(&mut self, group: Group, cause: &'static str) -> Option<()> {
        let earlier: Vec<Arc<Order>> = self.orders.snapshot().into_iter().map(|(_, order)| order).collect();
        let left = group.left_nanos(earlier.iter().map(|order| &**order), now_unix_nanos());
        let until = tokio::time::Instant::now() + Duration::from_nanos(left);
        let uids: Vec<String> = group.orders.iter().map(|order| order.pod.uid.clone()).collect();
        tracing::info!(
            event = "node_shutdown_group",
            priority = group.priority,
            pods = uids.len(),
            seconds = group.seconds,
            "ending pods {cause}"
        );
        self.issue.send(group.orders).await.ok()?;
        match timeout_at(until, self.until_ended(&uids)).await {
            Ok(ended) => ended,
            Err(_) => {
                tracing::warn!(
                    priority = group.priority,
                    seconds = group.seconds,
                    "pods have not ended in the time for their priority, {cause}"
                );
                Some(())
            }
        }
    }

    async fn until_ended(&mut self, uids: &[String]) -> Option<()> {
        loop {
            self.changes.mark_unchanged();
            let pods = self.pods().await?;
            let want = |uid: &String| Some(pods.get(uid)?.desire.as_ref()?.header.want);
            if uids.iter().all(|uid| has_ended(want(uid))) {
                return Some(());
            }
            self.changes.changed().await.ok()?;
        }
    }

    /// The pods of the manager; none when the service ends.
    async fn pods(&self) -> Option<BTreeMap<String, KnownPod>> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Request(ManagerRequest::ListPods { reply })).await.ok()?;
        answer.await.ok()
    }
}
