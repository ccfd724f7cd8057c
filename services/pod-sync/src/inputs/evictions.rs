//! Evictions: pods that end because resource-manager orders it ([`follow`]) or because an operator does ([`evict_by_hand`]).
//!
//! An order is in effect until the pod is finished, which resource-manager learns from its `Sync` stream. A pod that is not known yet when
//! it is ordered to end, as after a restart of this process, ends when its source sends it. The status of the order is stored with the
//! state of the worker, so that the end continues after this process was killed. What a shutdown of the machine has ended starts again
//! after the reboot, unless a controller replaces it. An order of a drain stays in effect after the end of its pod; when it is gone, the
//! pod starts again.

use std::collections::{BTreeMap, BTreeSet};
use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_kube_model::Pod;
use keelson_pod_sync_core::worker::{Input, StatusPatch, UpdateKind, WorkerPhase};
use keelson_proto::keelson::resource_manager::v1 as resource;
use keelson_proto::keelson::resource_manager::v1::watch_evictions_response::Item;
use keelson_service_kit::{Signal, follow as follow_stream};

use crate::effects::Effects;
use crate::publish::StatusFacts;
use crate::publish::objects::{pod_name, pod_object};
use crate::state::pod_state::PodState;
use crate::turn::lifecycle;

/// The event and the status reason of a pod that an operator evicts.
const EVICTED: &str = "Evicted";

/// An order to end a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// What the status of the pod says.
    pub patch: StatusPatch,
    /// Seconds instead of the pod's own grace, if less.
    pub grace_seconds: Option<i64>,
}

/// The orders of resource-manager that are in effect, by UID.
#[derive(Debug, Default)]
pub struct EvictionOrders {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    orders: BTreeMap<String, Order>,
    /// UIDs that the replay has contained so far.
    replayed: BTreeSet<String>,
    /// A replay was complete since the start: a pod without an order has none.
    complete: bool,
}

impl EvictionOrders {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, uid: &str) -> Option<Order> {
        self.state().orders.get(uid).cloned()
    }

    /// Whether it is known that there is no order for the pod.
    fn has_none(&self, uid: &str) -> bool {
        let state = self.state();
        state.complete && !state.orders.contains_key(uid)
    }
}

impl Order {
    fn of(eviction: resource::Eviction, boot_id: &str) -> Self {
        let shutdown_of_boot = if eviction.node_shutdown { boot_id } else { "" };
        Self {
            patch: StatusPatch {
                reason: eviction.reason,
                message: eviction.message,
                disruption_target: !eviction.condition_type.is_empty(),
                condition_message: eviction.condition_message,
                shutdown_of_boot: shutdown_of_boot.to_owned(),
                drained: eviction.node_drain,
            },
            grace_seconds: eviction.grace_period_seconds,
        }
    }

    /// The order of an operator.
    pub fn by_hand(message: String, grace_seconds: Option<i64>) -> Self {
        let message = if message.is_empty() {
            "The pod was evicted by an operator of the node.".to_owned()
        } else {
            message
        };
        let patch = StatusPatch {
            reason: EVICTED.to_owned(),
            message,
            disruption_target: true,
            ..StatusPatch::default()
        };
        Self { patch, grace_seconds }
    }
}

/// Follows the orders of resource-manager.
pub async fn follow(effects: Arc<Effects>, orders: Arc<EvictionOrders>) {
    let context = effects.context.clone();
    let clients = effects.clients.clone();
    let open = move || {
        let mut client = clients.resources();
        async move { client.watch_evictions(resource::WatchEvictionsRequest {}).await }
    };
    let on = move |signal: Signal<resource::WatchEvictionsResponse>| {
        match signal {
            Signal::Opened => orders.state().replayed.clear(),
            Signal::Message(message) => {
                if let Some(item) = message.item {
                    receive(&effects, &orders, item);
                }
            }
            // The orders stay in effect.
            Signal::Lost(_) => {}
        }
        ready(())
    };
    follow_stream("the orders of resource-manager", &context.progress, &context.shutdown, open, on).await;
}

fn receive(effects: &Arc<Effects>, orders: &EvictionOrders, item: Item) {
    match item {
        Item::Eviction(eviction) => {
            let uid = eviction.pod.as_ref().map(|pod| pod.uid.clone()).unwrap_or_default();
            {
                let mut state = orders.state();
                state.replayed.insert(uid.clone());
                state.orders.insert(uid.clone(), Order::of(eviction, &effects.registry.node.host.boot_id));
            }
            carry_out(effects, orders, &uid);
        }
        Item::GoneUid(uid) => {
            orders.state().orders.remove(&uid);
            start_again_after_drain(effects, orders, &uid);
        }
        Item::Synced(_) => {
            {
                let mut state = orders.state();
                let State { orders, replayed, complete } = &mut *state;
                orders.retain(|uid, _| replayed.contains(uid));
                *complete = true;
            }
            for uid in effects.registry.uids() {
                start_again_after_drain(effects, orders, &uid);
            }
        }
    }
}

/// Starts to end a pod if there is an order for it. An order that is being carried out, or has been, changes nothing. A pod that a drain
/// has ended, which was undone, starts again.
pub fn carry_out(effects: &Arc<Effects>, orders: &EvictionOrders, uid: &str) {
    if let Some(order) = orders.get(uid) {
        evict(effects, uid, &order);
    } else {
        start_again_after_drain(effects, orders, uid);
    }
}

/// Starts a pod again if a drain has ended it, or is ending it, and was undone: as if its source had removed it and added it again.
fn start_again_after_drain(effects: &Arc<Effects>, orders: &EvictionOrders, uid: &str) {
    let drained = |state: &PodState| state.desired.clone().filter(|_| state.worker.is_drained());
    let Some(desired) = effects.registry.read(uid, drained).flatten().filter(|_| orders.has_none(uid)) else {
        return;
    };
    tracing::info!(pod = pod_name(&desired.pod), uid, "the node is no longer drained; the pod starts again");
    // With the resources that its source asks for now: those of the run that has ended are free.
    let desired = Arc::new(desired.as_sent());
    lifecycle::remove(effects, uid);
    if lifecycle::await_cleanup(effects, &desired) {
        return;
    }
    let observed = effects.registry.unclaimed().remove(uid);
    lifecycle::set_desired(effects, &desired, UpdateKind::Create, observed);
    effects.publisher.publish_first(uid);
    lifecycle::begin_worker(effects, uid);
}

/// Ends a pod as an order says. Returns whether there is such a pod that has not ended yet.
pub fn evict(effects: &Arc<Effects>, uid: &str, order: &Order) -> bool {
    let known = effects.registry.read(uid, |state| {
        // The order is not for what is left of an earlier incarnation.
        let pod = state
            .desired
            .as_ref()
            .filter(|_| !state.awaits_cleanup())
            .map(|desired| Arc::clone(&desired.pod));
        (pod, state.worker.evicted, state.worker.phase)
    });
    let Some((Some(pod), evicted, phase)) = known else { return false };
    if evicted || phase >= WorkerPhase::Terminated {
        return evicted && phase < WorkerPhase::Finished;
    }
    tracing::warn!(pod = pod_name(&pod), uid, reason = order.patch.reason, "{}", order.patch.message);
    let (grace_seconds, patch) = (order.grace_seconds, Some(order.patch.clone()));
    let begun = lifecycle::apply(effects, uid, &Input::Killed { pod: &pod, grace_seconds, patch });
    if begun.is_some_and(|transition| transition.state.phase == WorkerPhase::Finished) {
        finish_unstarted(effects, uid, &pod);
    }
    true
}

/// A static pod that was still waiting for its name has nothing to stop; it gets its last status.
fn finish_unstarted(effects: &Arc<Effects>, uid: &str, pod: &Pod) {
    effects
        .publisher
        .publish(uid, &StatusFacts { pod_is_terminal: true, finished: true, ..StatusFacts::default() });
    effects.registry.desired_state.sets.volumes.remove(uid);
    effects.registry.desired_state.sets.resources.remove(uid);
    effects.registry.release_name(pod);
}

/// Ends a pod because an operator asks for it, with an event. Returns whether there is such a pod that has not ended yet.
pub fn evict_by_hand(effects: &Arc<Effects>, uid: &str, order: &Order) -> bool {
    let object = effects.registry.read(uid, |state| {
        let is_first = !state.worker.evicted && state.worker.phase < WorkerPhase::Terminated;
        state.desired.as_ref().filter(|_| is_first).map(|desired| pod_object(&desired.pod))
    });
    let evicted = evict(effects, uid, order);
    if let Some(Some(object)) = object.filter(|_| evicted) {
        effects.context.events.warning(object, EVICTED, order.patch.message.clone());
    }
    evicted
}
