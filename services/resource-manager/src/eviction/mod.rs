//! Ends pods when the machine is short of something (runtime-and-resources.md §12).
//!
//! One task looks at the signals every 10 s, and with `kernelMemcgNotification` when the kernel tells that memory becomes
//! short. It tells which conditions the node has, and gives at most one order for a shortage at a time. An order is written
//! down before anybody sees it, and stands until its pod is finished. The decisions are in
//! `keelson_resource_manager_core::eviction`.

mod look;
mod notices;
mod saved;
#[cfg(test)]
mod tests;
mod wire;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use keelson_config::Config;
use keelson_resource_manager_core::desire::{PodDesire, PodRef, Want};
use keelson_resource_manager_core::enforce::{Part, parts};
use keelson_resource_manager_core::eviction::local::{breach, has_limits};
use keelson_resource_manager_core::eviction::monitor::{Monitor, reclaim};
use keelson_resource_manager_core::eviction::order::{Order, stands};
use keelson_resource_manager_core::eviction::rank::rank;
use keelson_resource_manager_core::eviction::signal::{Condition, Observation};
use keelson_resource_manager_core::eviction::threshold::{
    Texts, Threshold, ThresholdError, thresholds, with_derived,
};
use keelson_resource_manager_core::eviction::usage::{Candidate, PodUsage};
use keelson_service_kit::{
    CancellationToken, Context, LoopHandle, NewEvent, ObjectRef, StateFile, WatchHub, now_unix_nanos,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

pub(crate) use look::Look;
pub(crate) use notices::Notices;
pub(crate) use saved::{Saved, state_file};
pub(crate) use wire::answer;

use crate::manager::{Ask, Command};
use crate::metrics::EvictionMetrics;

/// Between two looks at the signals.
pub(crate) const INTERVAL: Duration = Duration::from_secs(10);
/// Between a look and one that the kernel asks for: usage may go up and down around a line.
const QUIET: Duration = Duration::from_secs(1);
/// The name of the condition that says what is wrong with this task.
const CONDITION: &str = "eviction";
/// The message of `ExceededGracePeriod`, in the kubelet's words.
const OVERDUE: &str = "Container runtime did not kill the pod within specified grace period.";

/// The standing orders, by the UIDs of their pods.
pub(crate) type Orders = WatchHub<String, Arc<Order>>;

/// A pod as the manager has it.
#[derive(Debug, Clone)]
pub(crate) struct Active {
    /// What is wanted of it; none when nobody has named it since the start.
    pub(crate) desire: Option<PodDesire>,
    /// It may run.
    pub(crate) admitted: bool,
}

/// What the configuration says.
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
        let bound = parts(&config.resources.node_allocatable.enforce).contains_key(&Part::Pods);
        Ok(Self {
            thresholds: thresholds(&texts, bound)?,
            transition_ms: eviction.pressure_transition_ms,
            max_grace_seconds: eviction.max_pod_grace_seconds,
            local_limits: eviction.local_storage_limits,
        })
    }
}

/// The task.
pub(crate) struct EvictionLoop {
    pub(crate) ctx: Context,
    pub(crate) settings: Settings,
    pub(crate) look: Look,
    pub(crate) file: StateFile<Saved>,
    pub(crate) monitor: Monitor,
    pub(crate) orders: Orders,
    pub(crate) conditions: watch::Sender<BTreeSet<Condition>>,
    pub(crate) commands: mpsc::Sender<Command>,
    /// Orders of the manager, for pods that make room.
    pub(crate) wanted: mpsc::Receiver<Vec<Order>>,
    /// Grows when a pod is finished.
    pub(crate) finished: watch::Receiver<u64>,
    pub(crate) metrics: EvictionMetrics,
    /// What the kernel tells between two looks, when it is to.
    pub(crate) notices: Option<Notices>,
    /// Pods of orders of which it was told that they take too long.
    pub(crate) overdue: BTreeSet<String>,
    /// Between two looks.
    pub(crate) interval: Duration,
}

impl EvictionLoop {
    /// Turns until the shutdown; the first time at once.
    pub(crate) async fn run(mut self, shutdown: CancellationToken, handle: LoopHandle) {
        let mut next = Instant::now();
        let mut quiet_until = next;
        loop {
            handle.tick();
            // Cancel-safe: `recv` takes nothing, `changed` marks nothing and `told` takes nothing before they return;
            // the others hold nothing.
            tokio::select! {
                () = shutdown.cancelled() => return,
                Some(orders) = self.wanted.recv() => self.give(orders).await,
                changed = self.finished.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    if !self.orders.is_empty() {
                        let _ = self.settle().await;
                    }
                }
                () = told(self.notices.as_ref(), quiet_until) => next = Instant::now(),
                () = tokio::time::sleep_until(next) => {}
            }
            if next <= Instant::now() {
                let told = self.turn(&handle).await;
                self.ctx.progress.condition(CONDITION, told);
                next = Instant::now() + self.interval;
                quiet_until = Instant::now() + QUIET;
            }
        }
    }

    async fn turn(&mut self, handle: &LoopHandle) -> Result<(), String> {
        let seen = self.look.observe().await?;
        let list = with_derived(&self.settings.thresholds, seen.layout);
        let now_ms = u64::try_from(now_unix_nanos() / 1_000_000).unwrap_or(0);
        self.ask_the_kernel(&list, &seen).await;
        let before = self.monitor.clone();
        let look = self.monitor.look(&list, &seen.signals, now_ms, self.settings.transition_ms);
        self.conditions.send_if_modified(|conditions| {
            let changed = *conditions != look.conditions;
            conditions.clone_from(&look.conditions);
            changed
        });
        if self.monitor != before {
            self.save().await;
        }
        if look.act.is_none() && !self.settings.local_limits && self.orders.is_empty() {
            return Ok(());
        }
        let Some(active) = self.settle().await else { return Ok(()) };
        self.tell_overdue(&active);
        if self.settings.local_limits && self.enforce_limits(&active).await {
            return Ok(());
        }
        match look.act {
            Some(threshold) => self.relieve(threshold, seen, &active, handle).await,
            None => Ok(()),
        }
    }

    /// Has the kernel tell when what was seen of memory comes to a threshold.
    async fn ask_the_kernel(&mut self, list: &[Threshold], seen: &look::Seen) {
        let Some(notices) = &mut self.notices else { return };
        let tree = self.look.tree.borrow().clone();
        if let Err(error) = notices.renew(tree, list, &seen.signals).await {
            let (text, seconds) = (keelson_service_kit::status::chain(&error), self.interval.as_secs());
            tracing::warn!("memory is looked at every {seconds} s and not when the kernel tells: {text}");
        }
    }

    /// Tells once of each order whose pod should have ended by now; it is still waited for.
    fn tell_overdue(&mut self, active: &BTreeMap<String, Active>) {
        let standing = self.orders.snapshot();
        self.overdue.retain(|uid| standing.iter().any(|(standing, _)| standing == uid));
        for (uid, order) in standing {
            let Some(desire) = active.get(&uid).and_then(|pod| pod.desire.as_ref()) else { continue };
            if !order.is_overdue(desire.grace_seconds, now_unix_nanos()) || !self.overdue.insert(uid) {
                continue;
            }
            let PodRef { namespace, name, uid } = &order.pod;
            let seconds = order.expected_seconds(desire.grace_seconds);
            tracing::warn!(pod = name, namespace, uid, "the pod was to end within {seconds} s and has not");
            self.ctx.events.warning(ObjectRef::pod(namespace, name, uid), "ExceededGracePeriod", OVERDUE);
        }
    }

    /// Asks the manager for its pods and takes back the orders whose pods are finished. None at the shutdown.
    async fn settle(&mut self) -> Option<BTreeMap<String, Active>> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Ask(Ask::Active { reply })).await.ok()?;
        let active = answer.await.ok()?;
        let fulfilled = |uid: &String| {
            let pod = active.get(uid);
            !pod.map(|pod| pod.desire.as_ref().map(|desire| desire.want)).is_some_and(stands)
        };
        let (over, standing): (Vec<_>, Vec<_>) =
            self.orders.snapshot().into_iter().partition(|(uid, _)| fulfilled(uid));
        if !over.is_empty() {
            // Written before anybody sees it, as the order was: a kill between the two brings no order back.
            let orders = standing.into_iter().map(|(_, order)| (*order).clone()).collect();
            self.write(Saved { orders, monitor: self.monitor.clone() }).await;
        }
        for (uid, _) in over {
            tracing::info!(uid, "the order to end the pod is fulfilled");
            self.orders.remove(&uid);
        }
        Some(active)
    }

    /// Ends every pod that has exceeded a limit of local storage. True when there was one.
    async fn enforce_limits(&mut self, active: &BTreeMap<String, Active>) -> bool {
        let limited: Vec<&PodDesire> = self.candidates(active).filter(|desire| has_limits(desire)).collect();
        if limited.is_empty() {
            return false;
        }
        let figures = self.look.figures().await;
        let now = now_unix_nanos();
        let orders: Vec<Order> = limited
            .into_iter()
            .filter_map(|desire| {
                let breach = breach(desire, &figures.usage(&desire.pod.uid))?;
                Some(Order::for_breach(desire, breach, now))
            })
            .collect();
        let any = !orders.is_empty();
        self.give(orders).await;
        any
    }

    /// The pods that may be ended: those that run, or begin to, and have no order yet.
    fn candidates<'a>(&self, active: &'a BTreeMap<String, Active>) -> impl Iterator<Item = &'a PodDesire> {
        let ordered: BTreeSet<String> = self.orders.keys().into_iter().collect();
        active
            .iter()
            .filter(move |(uid, pod)| pod.admitted && !ordered.contains(*uid))
            .filter_map(|(_, pod)| pod.desire.as_ref())
            .filter(|desire| desire.want == Want::Run)
    }

    /// Has the node give back what nobody uses; if that is not enough, ends one pod.
    async fn relieve(
        &mut self,
        threshold: Threshold,
        mut seen: look::Seen,
        active: &BTreeMap<String, Active>,
        handle: &LoopHandle,
    ) -> Result<(), String> {
        handle.tick();
        let (signal, resource) = (threshold.signal, threshold.signal.resource());
        let node = ObjectRef::node(&self.ctx.config.node_name);
        let text = format!("Attempting to reclaim {}", resource.name());
        self.ctx.events.warning(node, "EvictionThresholdMet", text);
        tracing::warn!(signal = signal.name(), left = ?seen.signals.get(&signal), "the node is short of something");
        let give_back = reclaim(signal, seen.layout);
        if give_back.containers || give_back.images {
            match self.look.reclaim(give_back.images).await {
                Ok(what) => tracing::info!(signal = signal.name(), "removed {what} to make room"),
                Err(why) => tracing::warn!(signal = signal.name(), "nothing was removed to make room: {why}"),
            }
            handle.tick();
            seen = self.look.observe().await?;
            if seen.signals.get(&signal).is_some_and(|now| !threshold.is_met(now, true)) {
                return Ok(());
            }
        }
        let now = now_unix_nanos();
        if self.orders.snapshot().iter().any(|(_, order)| order.is_waited_for(now)) {
            return Ok(());
        }
        let candidates: Vec<&PodDesire> = self.candidates(active).collect();
        if candidates.iter().all(|desire| desire.critical) {
            return Err(format!("{} is short, and there is no pod that may be ended for it", signal.name()));
        }
        let usages = self.look.usages().await?;
        let nothing = PodUsage::default();
        let candidates: Vec<Candidate<'_>> = candidates
            .into_iter()
            .map(|desire| Candidate { desire, usage: usages.get(&desire.pod.uid).unwrap_or(&nothing) })
            .collect();
        let order = rank(signal, seen.layout, &candidates).first().map(|first| {
            let left = seen.signals.get(&signal).copied().unwrap_or_else(Observation::default);
            let grace = self.settings.max_grace_seconds;
            Order::for_shortage(&candidates[*first], &threshold, &left, grace, now)
        });
        self.metrics.age(seen.age());
        self.give(order.into_iter().collect()).await;
        Ok(())
    }

    /// Writes orders down and then shows them.
    async fn give(&mut self, orders: Vec<Order>) {
        let new: Vec<Order> =
            orders.into_iter().filter(|order| self.orders.get(&order.pod.uid).is_none()).collect();
        if new.is_empty() {
            return;
        }
        let standing = self.orders.snapshot().into_iter().map(|(_, order)| (*order).clone());
        let all = standing.chain(new.iter().cloned()).collect();
        self.write(Saved { orders: all, monitor: self.monitor.clone() }).await;
        for order in new {
            let pod = &order.pod;
            tracing::warn!(
                pod = pod.name,
                namespace = pod.namespace,
                uid = pod.uid,
                signal = order.signal,
                grace_seconds = order.grace_seconds,
                "the pod is to end: {}",
                order.message
            );
            let object = ObjectRef::pod(&pod.namespace, &pod.name, &pod.uid);
            let (reason, message) = (order.reason.clone(), order.message.clone());
            let event = NewEvent { warning: true, reason, message, object };
            self.ctx.events.record_annotated(event, order.annotations.clone());
            self.metrics.count(&order);
            self.orders.set(pod.uid.clone(), Arc::new(order));
        }
    }

    async fn save(&self) {
        let orders = self.orders.snapshot().into_iter().map(|(_, order)| (*order).clone()).collect();
        self.write(Saved { orders, monitor: self.monitor.clone() }).await;
    }

    /// An order that cannot be written down is given all the same: the disk may be what is short.
    async fn write(&self, saved: Saved) {
        let written = self.file.store(saved).await;
        let told = written.map_err(|error| keelson_service_kit::status::chain(&error));
        self.ctx.progress.condition("eviction-state", told);
    }
}

/// Waits until the kernel tells something, and not before `from`; for ever when it was not asked.
async fn told(notices: Option<&Notices>, from: Instant) {
    let Some(notices) = notices else { return std::future::pending().await };
    tokio::time::sleep_until(from).await;
    notices.told().await;
}
