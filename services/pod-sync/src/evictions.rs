//! Pods that are to end for the node's sake, or because a person wants them off it.
//!
//! resource-manager orders ([`follow`]); an order stands until the pod is finished, which it learns from the set of
//! what it is to hold. A pod that is ordered to end and that is not known here yet, as after a start of this
//! process, ends when its source names it. What an order writes into the status is stored with the worker's state,
//! so that the end goes on where it was when this process is killed.

use std::collections::{BTreeMap, BTreeSet};
use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_kube_model::Pod;
use keelson_pod_sync_core::worker::{Input, StatusPatch, WorkerPhase};
use keelson_proto::keelson::resource_manager::v1 as resource;
use keelson_proto::keelson::resource_manager::v1::watch_evictions_response::Item;
use keelson_service_kit::{Signal, follow as follow_stream};

use crate::agent::{Agent, object_of};
use crate::worker::{Facts, name_of, publish};

/// The event and the status reason of a pod that a person ends.
const EVICTED: &str = "Evicted";

/// One order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// What goes into the status.
    pub patch: StatusPatch,
    /// Seconds instead of the pod's own grace, if less.
    pub grace_seconds: Option<i64>,
}

/// The orders that stand, by UID.
#[derive(Debug, Default)]
pub struct Orders {
    state: Mutex<Standing>,
}

#[derive(Debug, Default)]
struct Standing {
    orders: BTreeMap<String, Order>,
    /// UIDs of the replay that is on its way.
    replayed: BTreeSet<String>,
}

impl Orders {
    fn state(&self) -> MutexGuard<'_, Standing> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, uid: &str) -> Option<Order> {
        self.state().orders.get(uid).cloned()
    }
}

impl Order {
    fn of(eviction: resource::Eviction) -> Self {
        Self {
            patch: StatusPatch {
                reason: eviction.reason,
                message: eviction.message,
                disruption_target: !eviction.condition_type.is_empty(),
                condition_message: eviction.condition_message,
            },
            grace_seconds: eviction.grace_period_seconds,
        }
    }

    /// What a person orders.
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
            condition_message: String::new(),
        };
        Self { patch, grace_seconds }
    }
}

/// Follows the orders of resource-manager.
pub async fn follow(agent: Arc<Agent>) {
    let context = agent.context.clone();
    let clients = agent.clients.clone();
    let open = move || {
        let mut client = clients.resources();
        async move { client.watch_evictions(resource::WatchEvictionsRequest {}).await }
    };
    let on = move |signal: Signal<resource::WatchEvictionsResponse>| {
        match signal {
            Signal::Opened => agent.orders.state().replayed.clear(),
            Signal::Message(message) => {
                if let Some(item) = message.item {
                    hear(&agent, item);
                }
            }
            // What was ordered stands.
            Signal::Lost(_) => {}
        }
        ready(())
    };
    follow_stream("the orders of resource-manager", &context.progress, &context.shutdown, open, on).await;
}

fn hear(agent: &Arc<Agent>, item: Item) {
    match item {
        Item::Eviction(eviction) => {
            let uid = eviction.pod.as_ref().map(|pod| pod.uid.clone()).unwrap_or_default();
            {
                let mut state = agent.orders.state();
                state.replayed.insert(uid.clone());
                state.orders.insert(uid.clone(), Order::of(eviction));
            }
            obey(agent, &uid);
        }
        Item::GoneUid(uid) => {
            agent.orders.state().orders.remove(&uid);
        }
        Item::Synced(_) => {
            let mut state = agent.orders.state();
            let Standing { orders, replayed } = &mut *state;
            orders.retain(|uid, _| replayed.contains(uid));
        }
    }
}

/// Begins to end the pod if an order about it stands. An order that is being carried out, or has been, changes
/// nothing.
pub fn obey(agent: &Arc<Agent>, uid: &str) {
    if let Some(order) = agent.orders.get(uid) {
        evict(agent, uid, &order);
    }
}

/// Ends a pod as an order says. Whether there is such a pod that has not ended yet.
pub fn evict(agent: &Arc<Agent>, uid: &str, order: &Order) -> bool {
    let known = agent.with(uid, |entry| {
        // What is left of an earlier life is not what the order is about.
        let pod = entry.wanted.as_ref().filter(|_| !entry.again).map(|wanted| Arc::clone(&wanted.pod));
        (pod, entry.state.evicted, entry.state.phase)
    });
    let Some((Some(pod), evicted, phase)) = known else { return false };
    if evicted || phase >= WorkerPhase::Terminated {
        return evicted && phase < WorkerPhase::Finished;
    }
    tracing::warn!(pod = name_of(&pod), uid, reason = order.patch.reason, "{}", order.patch.message);
    let (grace_seconds, patch) = (order.grace_seconds, Some(order.patch.clone()));
    let begun = agent.apply(uid, &Input::Killed { pod: &pod, grace_seconds, patch });
    if begun.is_some_and(|transition| transition.state.phase == WorkerPhase::Finished) {
        never_started(agent, uid, &pod);
    }
    true
}

/// A static pod that still waited for its name has nothing to end; its status says what became of it.
fn never_started(agent: &Arc<Agent>, uid: &str, pod: &Pod) {
    publish(agent, uid, &Facts { pod_is_terminal: true, finished: true, ..Facts::default() });
    agent.desired.volumes.drop_pod(uid);
    agent.desired.resources.drop_pod(uid);
    agent.release_name(pod);
}

/// Ends a pod because a person wants it off the node; an event says so. Whether there is such a pod that has not
/// ended yet.
pub fn evict_by_hand(agent: &Arc<Agent>, uid: &str, order: &Order) -> bool {
    let object = agent.with(uid, |entry| {
        let first = !entry.state.evicted && entry.state.phase < WorkerPhase::Terminated;
        entry.wanted.as_ref().filter(|_| first).map(|wanted| object_of(&wanted.pod))
    });
    let evicted = evict(agent, uid, order);
    if let Some(Some(object)) = object.filter(|_| evicted) {
        agent.context.events.warning(object, EVICTED, order.patch.message.clone());
    }
    evicted
}
