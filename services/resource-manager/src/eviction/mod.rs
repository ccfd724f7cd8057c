//! Node-pressure eviction (runtime-and-resources.md §12).
//!
//! One task evaluates the signals every 10 s, and with `kernelMemcgNotification` also when the kernel notifies about memory. It
//! publishes the pressure conditions of the node and issues at most one order for a shortage at a time. An order is
//! checkpointed before it is published, and is in effect until its pod is finished. The decisions are in
//! `keelson_resource_manager_core::eviction`.

mod checkpoint;
mod notifications;
mod observer;
#[cfg(test)]
mod tests;
mod wire;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use keelson_config::Config;
use keelson_resource_manager_core::desire::{PodDesire, PodRef, Want};
use keelson_resource_manager_core::enforce::{EnforceTarget, enforce_targets};
use keelson_resource_manager_core::eviction::local::{exceeded_limit, has_limits};
use keelson_resource_manager_core::eviction::monitor::{Monitor, reclaim};
use keelson_resource_manager_core::eviction::order::{Order, OrderKind, is_in_effect};
use keelson_resource_manager_core::eviction::rank::rank;
use keelson_resource_manager_core::eviction::signal::{Condition, Observation};
use keelson_resource_manager_core::eviction::threshold::{
    Texts, Threshold, ThresholdError, thresholds, with_derived,
};
use keelson_resource_manager_core::eviction::usage::{Candidate, PodUsage};
use keelson_service_kit::{
    CancellationToken, Context, LoopHandle, NewEvent, ObjectRef, StateFile, now_unix_nanos,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

pub(crate) use checkpoint::{Checkpoint, state_file};
pub(crate) use notifications::MemoryNotifications;
pub(crate) use observer::Observer;
pub(crate) use wire::watch_response;

use crate::commands::{Command, KnownPod, ManagerRequest};
use crate::drain::DrainState;
use crate::metrics::EvictionMetrics;
use crate::view::Orders;

/// Between two passes.
pub(crate) const INTERVAL: Duration = Duration::from_secs(10);
/// The minimum time between a pass and one after a notification: usage may oscillate around a threshold.
const NOTIFICATION_PAUSE: Duration = Duration::from_secs(1);
/// The name of the condition of this task.
const CONDITION: &str = "eviction";
/// The message of `ExceededGracePeriod`, in the kubelet's words.
const OVERDUE: &str = "Container runtime did not kill the pod within specified grace period.";

/// The settings of the configuration.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    thresholds: Vec<Threshold>,
    transition_ms: u64,
    max_grace_seconds: i64,
    local_limits: bool,
}

impl Settings {
    pub(crate) fn new(config: &Config) -> Result<Self, ThresholdError> {
        let eviction = &config.resources.eviction;
        let texts = Texts {
            hard: eviction.hard.clone(),
            soft: eviction.soft.clone(),
            soft_grace_ms: eviction.soft_grace_ms.clone(),
            minimum_reclaim: eviction.minimum_reclaim.clone(),
        };
        let pods_limited =
            enforce_targets(&config.resources.node_allocatable.enforce).contains_key(&EnforceTarget::Pods);
        Ok(Self {
            thresholds: thresholds(&texts, pods_limited)?,
            transition_ms: eviction.pressure_transition_ms,
            max_grace_seconds: eviction.max_pod_grace_seconds,
            local_limits: eviction.local_storage_limits,
        })
    }
}

/// The eviction task.
pub(crate) struct EvictionLoop {
    pub(crate) ctx: Context,
    pub(crate) settings: Settings,
    pub(crate) observer: Observer,
    pub(crate) file: StateFile<Checkpoint>,
    pub(crate) monitor: Monitor,
    pub(crate) orders: Orders,
    pub(crate) conditions: watch::Sender<BTreeSet<Condition>>,
    pub(crate) commands: mpsc::Sender<Command>,
    /// Orders of the manager to preempt pods, and of a shutdown to end them.
    pub(crate) ordered: mpsc::Receiver<Vec<Order>>,
    /// Whether the node is drained.
    pub(crate) drain: watch::Receiver<DrainState>,
    /// The current boot.
    pub(crate) boot_id: String,
    /// Incremented when a pod is finished.
    pub(crate) finished: watch::Receiver<u64>,
    pub(crate) metrics: EvictionMetrics,
    /// Memory notifications of the kernel, if configured.
    pub(crate) notifications: Option<MemoryNotifications>,
    /// Pods whose overdue orders have been reported.
    pub(crate) overdue: BTreeSet<String>,
    /// Between two passes.
    pub(crate) interval: Duration,
}

impl EvictionLoop {
    /// Runs until the shutdown; the first pass is immediate.
    pub(crate) async fn run(mut self, shutdown: CancellationToken, handle: LoopHandle) {
        let mut next = Instant::now();
        let mut not_before = next;
        loop {
            handle.tick();
            // Cancel-safe: `recv` takes nothing, `changed` marks nothing and `notified` takes nothing before they return; the
            // others hold nothing.
            tokio::select! {
                () = shutdown.cancelled() => return,
                Some(orders) = self.ordered.recv() => self.issue(orders).await,
                changed = self.finished.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    if !self.orders.is_empty() {
                        let _ = self.remove_fulfilled().await;
                    }
                }
                Ok(()) = self.drain.changed() => self.remove_orders_of_ended_drain().await,
                () = notified(self.notifications.as_ref(), not_before) => next = Instant::now(),
                () = tokio::time::sleep_until(next) => {}
            }
            if next <= Instant::now() {
                let result = self.pass(&handle).await;
                self.ctx.progress.condition(CONDITION, result);
                next = Instant::now() + self.interval;
                not_before = Instant::now() + NOTIFICATION_PAUSE;
            }
        }
    }

    /// Whether the node is drained and its pods are ended.
    fn drain_ends_pods(&self) -> bool {
        self.drain.borrow().as_ref().is_some_and(|drain| drain.stop_pods)
    }

    /// Removes the orders of a drain that was undone; their pods start again.
    async fn remove_orders_of_ended_drain(&mut self) {
        if self.drain_ends_pods() {
            return;
        }
        let (over, remaining): (Vec<_>, Vec<_>) =
            self.orders.snapshot().into_iter().partition(|(_, order)| order.kind() == OrderKind::NodeDrain);
        if over.is_empty() {
            return;
        }
        self.write(remaining.into_iter().map(|(_, order)| (*order).clone()).collect()).await;
        for (uid, _) in over {
            tracing::info!(uid, "the drain was undone; the pod starts again");
            self.orders.remove(&uid);
        }
    }

    async fn pass(&mut self, handle: &LoopHandle) -> Result<(), String> {
        let snapshot = self.observer.observe().await?;
        let thresholds = with_derived(&self.settings.thresholds, snapshot.layout);
        let now_ms = u64::try_from(now_unix_nanos() / 1_000_000).unwrap_or(0);
        self.renew_notifications(&thresholds, &snapshot).await;
        let before = self.monitor.clone();
        let transition_ms = self.settings.transition_ms;
        let evaluation = self.monitor.evaluate(&thresholds, &snapshot.signals, now_ms, transition_ms);
        self.conditions.send_if_modified(|conditions| {
            let changed = *conditions != evaluation.conditions;
            conditions.clone_from(&evaluation.conditions);
            changed
        });
        if self.monitor != before {
            self.write_checkpoint().await;
        }
        if evaluation.act.is_none() && !self.settings.local_limits && self.orders.is_empty() {
            return Ok(());
        }
        let Some(known) = self.remove_fulfilled().await else { return Ok(()) };
        self.report_overdue(&known);
        if self.settings.local_limits && self.enforce_limits(&known).await {
            return Ok(());
        }
        match evaluation.act {
            Some(threshold) => self.reclaim_or_evict(threshold, snapshot, &known, handle).await,
            None => Ok(()),
        }
    }

    /// Registers kernel notifications for the memory thresholds, from the last observations.
    async fn renew_notifications(&mut self, thresholds: &[Threshold], snapshot: &observer::Snapshot) {
        let Some(notifications) = &mut self.notifications else { return };
        let tree = self.observer.tree.borrow().clone();
        if let Err(error) = notifications.renew(tree, thresholds, &snapshot.signals).await {
            let (text, seconds) = (keelson_service_kit::status::chain(&error), self.interval.as_secs());
            tracing::warn!(
                "no kernel notifications about memory, which is checked every {seconds} s only: {text}"
            );
        }
    }

    /// Reports each order whose pod should have ended by now once; the order stays in effect.
    fn report_overdue(&mut self, known: &BTreeMap<String, KnownPod>) {
        let orders = self.orders.snapshot();
        self.overdue.retain(|uid| orders.iter().any(|(ordered, _)| ordered == uid));
        for (uid, order) in orders {
            let Some(desire) = known.get(&uid).and_then(|pod| pod.desire.as_ref()) else { continue };
            if !order.is_overdue(desire.grace_seconds, now_unix_nanos()) || !self.overdue.insert(uid) {
                continue;
            }
            let PodRef { namespace, name, uid } = &order.pod;
            let seconds = order.expected_seconds(desire.grace_seconds);
            tracing::warn!(pod = name, namespace, uid, "the pod has not ended within {seconds} s as ordered");
            self.ctx.events.warning(ObjectRef::pod(namespace, name, uid), "ExceededGracePeriod", OVERDUE);
        }
    }

    /// Gets the pods of the manager and removes the orders whose pods are finished. None at the shutdown.
    async fn remove_fulfilled(&mut self) -> Option<BTreeMap<String, KnownPod>> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Request(ManagerRequest::ListPods { reply })).await.ok()?;
        let known = answer.await.ok()?;
        let is_fulfilled = |uid: &String| {
            let pod = known.get(uid);
            !pod.map(|pod| pod.desire.as_ref().map(|desire| desire.header.want)).is_some_and(is_in_effect)
        };
        let (fulfilled, remaining): (Vec<_>, Vec<_>) =
            self.orders.snapshot().into_iter().partition(|(uid, order)| {
                // That of a drain keeps its pod from starting again.
                order.kind() != OrderKind::NodeDrain && is_fulfilled(uid)
            });
        if !fulfilled.is_empty() {
            // Checkpointed before it is published, as the order was: a kill in between restores no removed order.
            let orders = remaining.into_iter().map(|(_, order)| (*order).clone()).collect();
            self.write(orders).await;
        }
        for (uid, _) in fulfilled {
            tracing::info!(uid, "the order to end the pod is fulfilled");
            self.orders.remove(&uid);
        }
        Some(known)
    }

    /// Evicts every pod that has exceeded a local storage limit. True when there was one.
    async fn enforce_limits(&mut self, known: &BTreeMap<String, KnownPod>) -> bool {
        let limited: Vec<&PodDesire> = self.candidates(known).filter(|desire| has_limits(desire)).collect();
        if limited.is_empty() {
            return false;
        }
        let storage = self.observer.storage().await;
        let now = now_unix_nanos();
        let orders: Vec<Order> = limited
            .into_iter()
            .filter_map(|desire| {
                let exceeded_limit = exceeded_limit(desire, &storage.usage(&desire.header.pod.uid))?;
                Some(Order::for_exceeded_limit(desire, exceeded_limit, now))
            })
            .collect();
        let any = !orders.is_empty();
        self.issue(orders).await;
        any
    }

    /// The pods that may be evicted: those that run or start, and have no order yet.
    fn candidates<'a>(&self, known: &'a BTreeMap<String, KnownPod>) -> impl Iterator<Item = &'a PodDesire> {
        let ordered: BTreeSet<String> = self.orders.keys().into_iter().collect();
        known
            .iter()
            .filter(move |(uid, pod)| pod.admitted && !ordered.contains(*uid))
            .filter_map(|(_, pod)| pod.desire.as_ref())
            .filter(|desire| desire.header.want == Want::Run)
    }

    /// Reclaims unused node resources; if that is not enough, evicts one pod.
    async fn reclaim_or_evict(
        &mut self,
        threshold: Threshold,
        mut snapshot: observer::Snapshot,
        known: &BTreeMap<String, KnownPod>,
        handle: &LoopHandle,
    ) -> Result<(), String> {
        handle.tick();
        let (signal, resource) = (threshold.signal, threshold.signal.resource());
        let node = ObjectRef::node(&self.ctx.config.node_name);
        let text = format!("Attempting to reclaim {}", resource.name());
        self.ctx.events.warning(node, "EvictionThresholdMet", text);
        let observed = snapshot.signals.get(&signal);
        tracing::warn!(signal = signal.name(), left = ?observed, "the node has met an eviction threshold");
        let reclaim = reclaim(signal, snapshot.layout);
        if reclaim.containers || reclaim.images {
            match self.observer.reclaim(reclaim.images).await {
                Ok(what) => {
                    tracing::info!(signal = signal.name(), "reclaimed node resources: removed {what}")
                }
                Err(why) => tracing::warn!(signal = signal.name(), "cannot reclaim node resources: {why}"),
            }
            handle.tick();
            snapshot = self.observer.observe().await?;
            if snapshot.signals.get(&signal).is_some_and(|now| !threshold.is_met(now, true)) {
                return Ok(());
            }
        }
        let now = now_unix_nanos();
        if self.orders.snapshot().iter().any(|(_, order)| order.blocks_the_next(now)) {
            return Ok(());
        }
        let candidates: Vec<&PodDesire> = self.candidates(known).collect();
        if candidates.iter().all(|desire| desire.critical) {
            return Err(format!(
                "the threshold of {} is met, and no pod may be evicted for it",
                signal.name()
            ));
        }
        let usages = self.observer.usages().await?;
        let unmeasured = PodUsage::default();
        let candidates: Vec<Candidate<'_>> = candidates
            .into_iter()
            .map(|desire| Candidate {
                desire,
                usage: usages.get(&desire.header.pod.uid).unwrap_or(&unmeasured),
            })
            .collect();
        let order = rank(signal, snapshot.layout, &candidates).first().map(|first| {
            let observed = snapshot.signals.get(&signal).copied().unwrap_or_else(Observation::default);
            let grace = self.settings.max_grace_seconds;
            Order::for_shortage(&candidates[*first], &threshold, &observed, grace, now)
        });
        self.metrics.age(snapshot.age());
        self.issue(order.into_iter().collect()).await;
        Ok(())
    }

    /// Checkpoints orders and then publishes them.
    async fn issue(&mut self, orders: Vec<Order>) {
        // A drain may have been undone since it sent the orders.
        let is_void = |order: &Order| order.kind() == OrderKind::NodeDrain && !self.drain_ends_pods();
        let new: Vec<Order> = orders
            .into_iter()
            .filter(|order| self.orders.get(&order.pod.uid).is_none() && !is_void(order))
            .collect();
        if new.is_empty() {
            return;
        }
        let existing = self.orders.snapshot().into_iter().map(|(_, order)| (*order).clone());
        let all = existing.chain(new.iter().cloned()).collect();
        self.write(all).await;
        for order in new {
            let pod = &order.pod;
            tracing::warn!(
                pod = pod.name,
                namespace = pod.namespace,
                uid = pod.uid,
                signal = order.signal,
                grace_seconds = order.grace_seconds,
                "ending the pod: {}",
                order.message
            );
            // A shutdown has an event on the Node, and none on each pod, as in a kubelet; so has a drain.
            if !matches!(order.kind(), OrderKind::NodeShutdown | OrderKind::NodeDrain) {
                let object = ObjectRef::pod(&pod.namespace, &pod.name, &pod.uid);
                let (reason, message) = (order.reason.clone(), order.message.clone());
                let event = NewEvent { warning: true, reason, message, object };
                self.ctx.events.record_annotated(event, order.annotations.clone());
            }
            self.metrics.count(&order);
            self.orders.set(pod.uid.clone(), Arc::new(order));
        }
    }

    async fn write_checkpoint(&self) {
        let orders = self.orders.snapshot().into_iter().map(|(_, order)| (*order).clone()).collect();
        self.write(orders).await;
    }

    /// Writes the checkpoint with these orders. Orders are issued even if that fails: the disk may be what is full.
    async fn write(&self, orders: Vec<Order>) {
        let checkpoint = Checkpoint { orders, monitor: self.monitor.clone(), boot_id: self.boot_id.clone() };
        let written = self.file.store(checkpoint).await;
        let result = written.map_err(|error| keelson_service_kit::status::chain(&error));
        self.ctx.progress.condition("eviction-state", result);
    }
}

/// Waits for a notification of the kernel, and not before `from`; forever when none is registered.
async fn notified(notifications: Option<&MemoryNotifications>, from: Instant) {
    let Some(notifications) = notifications else { return std::future::pending().await };
    tokio::time::sleep_until(from).await;
    notifications.notified().await;
}
