//! The two inputs of pod-sync, desired pods and observations, and what they set in motion.

use std::collections::BTreeSet;
use std::future::ready;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use keelson_kube_model::{Node, Pod};
use keelson_pod_sync_core::allocation::NO_RESIZE;
use keelson_pod_sync_core::worker::{Input, UpdateKind, WorkerPhase};
use keelson_proto::keelson::pod_config::v1 as config;
use keelson_proto::keelson::pod_config::v1::watch_pods_response::Item as Desired;
use keelson_proto::keelson::resource_manager::v1::{Machine, WatchMachineRequest};
use keelson_proto::keelson::runtime::v1 as runtime;
use keelson_proto::keelson::runtime::v1::watch_pods_response::Item as Seen;
use keelson_service_kit::{LoopHandle, ObjectRef, Signal, follow};

use crate::agent::{Agent, Entry, RuntimeView, Wanted, object_of};
use crate::aside;
use crate::observed::{Observed, observation};

/// What the two streams have said so far.
#[derive(Debug, Default)]
pub struct Sources {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// UIDs named since the stream was opened.
    named: BTreeSet<String>,
    reported: BTreeSet<String>,
    configured: BTreeSet<String>,
    /// Every source has reported and its pods have been taken in.
    ready: bool,
    runtime_synced: bool,
    runtime: RuntimeView,
    runtime_named: BTreeSet<String>,
}

impl Sources {
    /// What runtime-shim replays is remembered until the replay is over.
    fn replayed(&self, uid: &str) {
        let mut state = self.state();
        if !state.runtime_synced {
            state.runtime_named.insert(uid.to_owned());
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether every source of pods has reported.
    pub fn ready(&self) -> bool {
        self.state().ready
    }
}

/// Follows pod-config.
pub async fn follow_desired(agent: Arc<Agent>, sources: Arc<Sources>) {
    let context = agent.context.clone();
    let clients = agent.clients.clone();
    let open = move || {
        let mut client = clients.pods();
        async move { client.watch_pods(config::WatchPodsRequest {}).await }
    };
    let on = move |signal: Signal<config::WatchPodsResponse>| {
        match signal {
            Signal::Opened => {
                let mut state = sources.state();
                state.named.clear();
                state.reported.clear();
            }
            Signal::Message(message) => {
                if let Some(item) = message.item {
                    desired(&agent, &sources, item);
                }
            }
            Signal::Lost(status) => {
                tracing::debug!(error = status.message(), "pod-config is away; running pods go on");
            }
        }
        ready(())
    };
    follow("pod-config", &context.progress, &context.shutdown, open, on).await;
}

fn desired(agent: &Arc<Agent>, sources: &Sources, item: Desired) {
    match item {
        Desired::Pod(pod) => {
            sources.state().named.insert(pod.uid.clone());
            let object = ObjectRef::pod(&pod.namespace, &pod.name, &pod.uid);
            // One pod must not end the loop that all of them come through.
            let taken = aside::guard(agent, object, || take_in(agent, pod, sources.ready()));
            if let Some(Err(error)) = taken {
                tracing::error!(%error, "pod-config sent a pod that does not decode; it is not started");
            }
        }
        Desired::GoneUid(uid) => {
            sources.state().named.remove(&uid);
            if sources.ready() {
                removed(agent, &uid);
            }
        }
        Desired::SourceReady(ready) => {
            let mut state = sources.state();
            state.configured = ready.configured.into_iter().collect();
            state.reported.insert(ready.source);
        }
        Desired::Synced(_) => {
            let ready = {
                let mut state = sources.state();
                // Who has not told of any source has not told of all of them.
                state.ready = !state.configured.is_empty() && state.configured.is_subset(&state.reported);
                state.ready
            };
            if ready {
                all_sources_ready(agent, sources);
            }
        }
    }
}

/// A pod of pod-config: stores it, and wakes or begins its worker. Before every source has reported, what the
/// runtime holds of it is its own; what is found of a UID later is left of an earlier life.
fn take_in(
    agent: &Arc<Agent>,
    sent: config::DesiredPod,
    sources_ready: bool,
) -> Result<(), serde_json::Error> {
    let uid = sent.uid.clone();
    let raw = sent.pod_json;
    if came_back(agent, &uid, sent.added_unix_nanos) {
        tracing::info!(
            pod = format!("{}/{}", sent.namespace, sent.name),
            uid,
            "the pod has left its source and come back: it is started anew"
        );
        removed(agent, &uid);
    }
    let known = agent.with(&uid, |e| (e.state.desired, e.wanted.as_ref().is_some_and(|w| w.raw == raw)));
    if known == Some((true, true)) {
        return Ok(());
    }
    let mut pod: Pod = serde_json::from_slice(&raw)?;
    if pod.is_mirror() {
        // The API's picture of a static pod, which comes from its own source.
        return Ok(());
    }
    pod.shrink_to_fit();
    let pod = Arc::new(pod);
    let wanted = Wanted {
        pod: Arc::clone(&pod),
        // A copy, because the message's bytes are a slice that keeps its whole receive buffer alive.
        raw: Bytes::copy_from_slice(&raw),
        source: sent.source,
        origin: sent.origin,
        traceparent: sent.traceparent,
        revision: sent.revision,
        added_unix_nanos: sent.added_unix_nanos,
    };
    if sources_ready && agent.waits_for_removal(&wanted) {
        return Ok(());
    }
    let kind =
        if known.is_some_and(|(desired, _)| desired) { UpdateKind::Update } else { UpdateKind::Create };
    let observed = agent.loose().remove(&uid);
    if let Some(observed) = &observed
        && !observed.sandboxes.is_empty()
        && observed.any_sandbox_ready()
    {
        agent.adopt_name(&pod);
    }
    begin(agent, &wanted, kind, observed);
    tell_refused_resize(agent, &wanted);
    Ok(())
}

/// Whether a pod that is known has left its source and come back since it was named here last, which only the second of the two
/// may have been told of.
fn came_back(agent: &Agent, uid: &str, added: i64) -> bool {
    let is_other = |entry: &mut Entry| {
        entry.state.desired && entry.wanted.as_ref().is_some_and(|known| known.added_unix_nanos != added)
    };
    added != 0 && agent.with(uid, is_other) == Some(true)
}

/// A change of resources that is not made is an event, once for each generation of the pod.
pub fn tell_refused_resize(agent: &Agent, wanted: &Wanted) {
    let is_news = |entry: &mut Entry| std::mem::take(&mut entry.resize_news);
    if agent.with(&wanted.pod.metadata.uid, is_news) == Some(true) {
        agent.context.events.warning(object_of(&wanted.pod), "ResizeInfeasible", NO_RESIZE.to_owned());
    }
}

fn begin(agent: &Arc<Agent>, wanted: &Wanted, kind: UpdateKind, observed: Option<Observed>) {
    let uid = wanted.pod.metadata.uid.as_str();
    agent.named(wanted, kind, observed);
    // It may have been observed between the look above and the making of the entry.
    let late = agent.loose().remove(uid);
    if let Some(late) = late {
        agent.observed(uid, late);
    }
    crate::worker::publish_first(agent, uid);
    agent.begin_worker(uid);
    crate::evictions::obey(agent, uid);
}

/// No source names the UID any more.
pub fn removed(agent: &Arc<Agent>, uid: &str) {
    let known = agent.with(uid, |e| (e.life, e.wanted.as_ref().map(|w| Arc::clone(&w.pod))));
    let Some((life, pod)) = known else { return };
    let transition = agent.apply(uid, &Input::Removed { pod: pod.as_deref() });
    if transition.is_some_and(|t| t.forget) {
        agent.forget(uid, life);
    }
}

/// Every source has reported: what nobody named goes, and the callees may sweep.
fn all_sources_ready(agent: &Arc<Agent>, sources: &Sources) {
    let named = sources.state().named.clone();
    for uid in agent.uids().into_iter().filter(|uid| !named.contains(uid)) {
        let known = agent.with(&uid, |e| {
            let restored = std::mem::take(&mut e.restored);
            e.wake.notify_one();
            (e.life, e.state.clone(), e.wanted.is_some(), restored, Arc::clone(&e.observed))
        });
        let Some((life, state, has_pod, restored, observed)) = known else { continue };
        if state.desired {
            removed(agent, &uid);
        } else if restored && state.phase == WorkerPhase::Finished {
            agent.forget(&uid, life);
        } else if state.phase == WorkerPhase::Sync && !has_pod {
            // A record of a pod that left its source while this service was down: what runs of it is an orphan.
            agent.forget_as_orphan(&uid, life, observed);
        }
    }
    agent.documents.complete();
    agent.desired.sources_are_ready();
    end_orphans(agent, sources);
}

/// Ends what the runtime runs and nobody wants. Only with all sources ready and a whole look at the runtime.
fn end_orphans(agent: &Arc<Agent>, sources: &Sources) {
    let orphans: Vec<(String, Observed)> = {
        let state = sources.state();
        if !state.ready || !state.runtime_synced {
            return;
        }
        drop(state);
        let live = |o: &Observed| o.anything_running() || o.any_sandbox_ready();
        agent.loose().iter().filter(|(_, o)| live(o)).map(|(u, o)| (u.clone(), Arc::clone(o))).collect()
    };
    for (uid, observed) in orphans {
        tracing::info!(uid, pod = observed.name, "the runtime runs a pod that no source names, ending it");
        let begun = agent.apply(&uid, &Input::ObservedOrphan { observed: &observed });
        if begun.is_some_and(|transition| transition.work.is_some()) {
            agent.metrics.pods.orphan();
        }
        agent.loose().remove(&uid);
    }
}

/// Follows runtime-shim.
pub async fn follow_runtime(agent: Arc<Agent>, sources: Arc<Sources>) {
    let context = agent.context.clone();
    let clients = agent.clients.clone();
    let open = move || {
        let mut client = clients.runtime();
        async move { client.watch_pods(runtime::WatchPodsRequest::default()).await }
    };
    let on = move |signal: Signal<runtime::WatchPodsResponse>| {
        match signal {
            Signal::Opened => {
                let mut state = sources.state();
                state.runtime_synced = false;
                state.runtime_named.clear();
            }
            Signal::Message(message) => {
                if let Some(item) = message.item {
                    seen(&agent, &sources, item);
                }
            }
            Signal::Lost(status) => {
                let message = format!("runtime-shim is away: {}", status.message());
                sources.state().runtime_synced = false;
                agent.runtime.send_modify(|view| {
                    view.ready = false;
                    view.message = message;
                });
            }
        }
        ready(())
    };
    follow("runtime-shim", &context.progress, &context.shutdown, open, on).await;
}

fn seen(agent: &Arc<Agent>, sources: &Sources, item: Seen) {
    match item {
        Seen::Pod(pod) => {
            let uid = pod.uid.clone();
            sources.replayed(&uid);
            looked_at(agent, sources, &uid, observation(pod));
        }
        Seen::GoneUid(uid) => gone(agent, &uid),
        Seen::State(state) => {
            sources.state().runtime = RuntimeView {
                name: state.name,
                version: state.version,
                ready: state.ready,
                network_ready: state.network_ready,
                message: state.message,
                // Every pod runs with the default handler: there are no runtime classes yet.
                recursive_read_only: state
                    .handlers
                    .iter()
                    .any(|handler| handler.name.is_empty() && handler.recursive_read_only_mounts),
            };
            publish_runtime(agent, sources);
        }
        Seen::Synced(_) => {
            let missing: Vec<String> = {
                let mut state = sources.state();
                state.runtime_synced = true;
                let named = std::mem::take(&mut state.runtime_named);
                agent.loose().retain(|uid, _| named.contains(uid));
                agent.uids().into_iter().filter(|uid| !named.contains(uid)).collect()
            };
            for uid in missing {
                gone(agent, &uid);
            }
            publish_runtime(agent, sources);
            end_orphans(agent, sources);
        }
    }
}

/// Nothing of the pod is left in the runtime, as the stream says. What is known here may be newer than that, so
/// a fresh read decides.
fn gone(agent: &Arc<Agent>, uid: &str) {
    agent.with(uid, |entry| {
        if entry.again {
            entry.wake.notify_one();
        } else if entry.leaves_something() || entry.freshness.due().is_some() {
            // Also while a read is on its way: it may still have found what is gone by now.
            entry.freshness.ask();
            entry.wake.notify_one();
        }
        entry.gone = true;
    });
    // In this order: whoever forgets the UID between the two puts it here.
    agent.loose().remove(uid);
}

fn looked_at(agent: &Arc<Agent>, sources: &Sources, uid: &str, observed: Observed) {
    if agent.observed(uid, Arc::clone(&observed)) {
        return;
    }
    agent.loose().insert(uid.to_owned(), Arc::clone(&observed));
    // An entry may have been made between the two.
    if agent.observed(uid, observed) {
        agent.loose().remove(uid);
        return;
    }
    end_orphans(agent, sources);
}

fn publish_runtime(agent: &Agent, sources: &Sources) {
    let view = {
        let state = sources.state();
        RuntimeView { ready: state.runtime.ready && state.runtime_synced, ..state.runtime.clone() }
    };
    agent.runtime.send_if_modified(|current| {
        let changed = *current != view;
        *current = view;
        changed
    });
}

/// Follows the Node object.
pub async fn follow_node(agent: Arc<Agent>) {
    let context = agent.context.clone();
    let clients = agent.clients.clone();
    let open = move || {
        let mut client = clients.pods();
        async move { client.watch_node(config::WatchNodeRequest {}).await }
    };
    let on = move |signal: Signal<config::WatchNodeResponse>| {
        if let Signal::Message(message) = signal {
            match serde_json::from_slice::<Node>(&message.node_json) {
                Ok(node) => {
                    agent.node.send_replace(Some(Arc::new(node)));
                }
                Err(error) => tracing::error!(%error, "pod-config sent a Node that does not decode"),
            }
        }
        ready(())
    };
    follow("the Node of pod-config", &context.progress, &context.shutdown, open, on).await;
}

/// Follows what resource-manager tells of the machine.
pub async fn follow_machine(agent: Arc<Agent>) {
    let context = agent.context.clone();
    let clients = agent.clients.clone();
    let open = move || {
        let mut client = clients.resources();
        async move { client.watch_machine(WatchMachineRequest {}).await }
    };
    let on = move |signal: Signal<Machine>| {
        if let Signal::Message(machine) = signal {
            agent.machine.send_replace(Arc::new(machine));
        }
        ready(())
    };
    follow("resource-manager", &context.progress, &context.shutdown, open, on).await;
}

/// Shows that the process turns, and counts what there is.
pub async fn heartbeat(agent: Arc<Agent>, progress: LoopHandle, gauge: impl Fn(&Agent) + Send) {
    loop {
        progress.tick();
        gauge(&agent);
        tokio::select! {
            () = agent.context.shutdown.cancelled() => return,
            () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keelson_config::{Config, ServiceName};
    use keelson_service_kit::Context;

    #[tokio::test]
    async fn what_runtime_shim_names_is_remembered_only_while_it_replays() {
        let context = Context::detached(ServiceName::PodSync, Config::default());
        let (agent, sources) = (Agent::new(context, None), Sources::default());
        let pod = |uid: &str| Seen::Pod(runtime::RuntimePod { uid: uid.into(), ..Default::default() });
        seen(&agent, &sources, pod("replayed"));
        assert_eq!(sources.state().runtime_named.len(), 1);
        seen(&agent, &sources, Seen::Synced(Default::default()));
        seen(&agent, &sources, pod("later"));
        assert!(sources.state().runtime_named.is_empty());
        assert!(agent.loose().contains_key("replayed"), "the replay named it");
    }
}
