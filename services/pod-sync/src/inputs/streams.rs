//! The two main inputs: the desired pods of pod-config and the observations of runtime-shim.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use keelson_kube_model::{Pod, with_source_annotations};
use keelson_pod_sync_core::resize::report::requested_changes;
use keelson_pod_sync_core::worker::{Input, UpdateKind, WorkerPhase};
use keelson_proto::keelson::pod_config::v1 as config;
use keelson_proto::keelson::pod_config::v1::watch_pods_response::Item as Desired;
use keelson_proto::keelson::runtime::v1 as runtime;
use keelson_proto::keelson::runtime::v1::watch_pods_response::Item as Observation;
use keelson_service_kit::{LoopHandle, ObjectRef, Signal, follow};

use crate::effects::Effects;
use crate::inputs::sources::Sources;
use crate::inputs::{adoption, evictions};
use crate::node::RuntimeView;
use crate::state::observed::{Observed, observation};
use crate::state::pod_state::{Awaited, DesiredPod, PodState, decode_pod};
use crate::state::registry::PodRegistry;
use crate::turn::lifecycle::begin_worker;
use crate::turn::{lifecycle, panic_quarantine};

/// How long a static pod that a kubelet may have started waits for the first answer of the runtime.
const HOLD: Duration = Duration::from_secs(10);

/// Follows the desired pods of pod-config.
pub async fn follow_desired(effects: Arc<Effects>, sources: Arc<Sources>) {
    let context = effects.context.clone();
    let clients = effects.clients.clone();
    let open = move || {
        let mut client = clients.pods();
        async move { client.watch_pods(config::WatchPodsRequest { unannotated: true }).await }
    };
    let on = move |signal: Signal<config::WatchPodsResponse>| {
        match signal {
            Signal::Opened => {
                let mut state = sources.state();
                state.sent.clear();
                state.reported.clear();
                state.complete = false;
                state.held.clear();
            }
            Signal::Message(message) => {
                if let Some(item) = message.item {
                    receive_desired(&effects, &sources, item);
                }
            }
            Signal::Lost(status) => {
                tracing::debug!(
                    error = status.message(),
                    "pod-config is unavailable; the desired pods stay in effect"
                );
            }
        }
        ready(())
    };
    follow("pod-config", &context.progress, &context.shutdown, open, on).await;
}

fn receive_desired(effects: &Arc<Effects>, sources: &Arc<Sources>, item: Desired) {
    match item {
        Desired::Pod(pod) => {
            let pod = adoption::with_own_uid(effects, pod);
            if !sources.ready() && adoption::may_run_already(effects, &pod) {
                let uid = pod.uid.clone();
                sources.state().held.insert(uid.clone(), pod);
                compare_held(effects, sources);
                limit_hold(effects, sources, uid);
            } else {
                receive_pod(effects, sources, pod);
            }
        }
        Desired::GoneUid(source_uid) => {
            sources.state().held.remove(&source_uid);
            let uid = effects.registry.adopted.of_source(&source_uid).unwrap_or_else(|| source_uid.clone());
            sources.state().sent.remove(&uid);
            if sources.ready() {
                effects.registry.adopted.remove(&source_uid);
                lifecycle::remove(effects, &uid);
            } else {
                settle(effects, sources);
            }
        }
        Desired::SourceReady(ready) => {
            let mut state = sources.state();
            state.configured = ready.configured.into_iter().collect();
            state.reported.insert(ready.source);
        }
        Desired::Synced(_) => {
            {
                let mut state = sources.state();
                // An empty list of sources never counts as ready.
                state.complete = !state.configured.is_empty() && state.configured.is_subset(&state.reported);
                state.ready = false;
            }
            settle(effects, sources);
        }
    }
}

/// If every source has reported and no pod is held any more, pods that no source has are ended.
fn settle(effects: &Arc<Effects>, sources: &Sources) {
    let becomes_ready = {
        let mut state = sources.state();
        let becomes_ready = !state.ready && state.complete && state.held.is_empty();
        state.ready |= becomes_ready;
        becomes_ready
    };
    if becomes_ready {
        all_sources_ready(effects, sources);
    }
}

fn receive_pod(effects: &Arc<Effects>, sources: &Sources, pod: config::DesiredPod) {
    sources.state().sent.insert(pod.uid.clone());
    let object = ObjectRef::pod(&pod.namespace, &pod.name, &pod.uid);
    let uid = pod.uid.clone();
    // A panic must not end the loop that all pods arrive through.
    let accepted = panic_quarantine::guard(effects, object, || accept(effects, sources, pod));
    if accepted.is_none() {
        begin_worker(effects, &uid);
    }
    if let Some(Err(error)) = accepted {
        tracing::error!(%error, "cannot decode a pod of pod-config; it is not started");
    }
}

/// Once the runtime was read, each pod that is held either starts or is compared with what runs under its name.
fn compare_held(effects: &Arc<Effects>, sources: &Arc<Sources>) {
    let waiting: Vec<config::DesiredPod> = {
        let state = sources.state();
        if !state.runtime_synced {
            return;
        }
        state.held.values().filter(|pod| !state.comparing.contains(&pod.uid)).cloned().collect()
    };
    for pod in waiting {
        let Some(observed) = adoption::candidate(effects, &pod) else {
            release_held(effects, sources, &pod.uid, None);
            continue;
        };
        sources.state().comparing.insert(pod.uid.clone());
        let (effects, sources) = (Arc::clone(effects), Arc::clone(sources));
        keelson_service_kit::spawn("comparison of a static pod", async move {
            let uid = observed.uid.as_str();
            let keeps_uid = adoption::keeps_uid(&effects, &pod, uid).await;
            sources.state().comparing.remove(&pod.uid);
            release_held(&effects, &sources, &pod.uid, keeps_uid.then(|| uid.to_owned()));
        });
    }
}

/// A pod whose runtime cannot be read is not held for ever: people want to see why it waits. It then keeps its own UID.
fn limit_hold(effects: &Arc<Effects>, sources: &Arc<Sources>, source_uid: String) {
    if !sources.state().held.contains_key(&source_uid) {
        return;
    }
    let (effects, sources) = (Arc::clone(effects), Arc::clone(sources));
    keelson_service_kit::spawn("hold of a static pod", async move {
        tokio::time::sleep(HOLD).await;
        if !sources.state().runtime_synced {
            release_held(&effects, &sources, &source_uid, None);
        }
    });
}

/// A pod is not held any more: it starts, or is adopted with the UID under which it runs.
fn release_held(effects: &Arc<Effects>, sources: &Sources, source_uid: &str, own_uid: Option<String>) {
    let Some(pod) = sources.state().held.remove(source_uid) else { return };
    if let Some(own_uid) = own_uid {
        effects.registry.adopted.insert(source_uid.to_owned(), own_uid);
    }
    receive_pod(effects, sources, adoption::with_own_uid(effects, pod));
    settle(effects, sources);
}

/// Accepts a pod of pod-config: stores it, and wakes or starts its worker. Before every source has reported, what the runtime holds of its UID
/// belongs to the pod itself; what it holds later belongs to an earlier incarnation.
fn accept(
    effects: &Arc<Effects>,
    sources: &Sources,
    sent: config::DesiredPod,
) -> Result<(), serde_json::Error> {
    let uid = sent.uid.clone();
    // The same bytes, whether pod-config has annotated them or not: an upgrade of pod-config changes no pod. Bytes of their own, because
    // those of the message keep its whole receive buffer alive.
    let raw = with_source_annotations(&sent.pod_json, &sent.source, sent.seen_unix_nanos);
    if came_back(effects, &uid, sent.added_unix_nanos) {
        tracing::info!(
            pod = format!("{}/{}", sent.namespace, sent.name),
            uid,
            "the pod was removed from its source and added again; restarting it"
        );
        lifecycle::remove(effects, &uid);
    }
    let known = effects.registry.read(&uid, |e| (e.worker.desired, e.desired.clone()));
    let (is_desired, last) = known.unwrap_or_default();
    // Compared without the lock of all pods.
    if is_desired && last.as_ref().is_some_and(|last| last.raw == raw) {
        return Ok(());
    }
    let before = last.filter(|_| is_desired);
    let pod = decode_pod(&raw)?;
    if pod.is_mirror() {
        // The static pod itself comes from its own source.
        return Ok(());
    }
    let pod = Arc::new(pod);
    let desired = Arc::new(DesiredPod {
        pod: Arc::clone(&pod),
        raw: Bytes::from(raw.into_boxed_slice()),
        source: sent.source,
        traceparent: sent.traceparent,
        revision: sent.revision,
        added_unix_nanos: sent.added_unix_nanos,
    });
    if sources.ready() && lifecycle::await_cleanup(effects, &desired) {
        return Ok(());
    }
    let kind = if is_desired { UpdateKind::Update } else { UpdateKind::Create };
    let observed = effects.registry.unclaimed().remove(&uid);
    if let Some(observed) = &observed
        && !observed.sandboxes.is_empty()
        && observed.any_sandbox_ready()
    {
        effects.registry.adopt_name(&pod);
    }
    begin(effects, sources, &desired, kind, observed);
    count_requested_resizes(effects, before.as_deref(), &pod);
    Ok(())
}

/// Counts the resources that a source has changed.
fn count_requested_resizes(effects: &Effects, before: Option<&DesiredPod>, pod: &Pod) {
    let Some(Ok(before)) = before.map(|before| decode_pod(&before.raw)) else { return };
    effects.publisher.metrics.resizes.requested(&requested_changes(&before, pod));
}

/// Whether a known pod was removed from its source and added again since it was sent last. pod-config may have sent only the addition.
fn came_back(effects: &Effects, uid: &str, added: i64) -> bool {
    let is_other = |state: &PodState| {
        state.worker.desired && state.desired.as_ref().is_some_and(|known| known.added_unix_nanos != added)
    };
    added != 0 && effects.registry.read(uid, is_other) == Some(true)
}

fn begin(
    effects: &Arc<Effects>,
    sources: &Sources,
    desired: &Arc<DesiredPod>,
    kind: UpdateKind,
    observed: Option<Observed>,
) {
    let uid = desired.pod.metadata.uid.as_str();
    lifecycle::set_desired(effects, desired, kind, observed);
    // It may have been observed before it was put into the registry.
    let late = effects.registry.unclaimed().remove(uid);
    if let Some(late) = late {
        effects.registry.record_observation(uid, late);
    }
    effects.publisher.publish_first(uid);
    begin_worker(effects, uid);
    evictions::carry_out(effects, &sources.orders, uid);
}

/// Every source has reported: pods that none has are ended, and the other services may remove what they do not know.
fn all_sources_ready(effects: &Arc<Effects>, sources: &Sources) {
    let sent = sources.state().sent.clone();
    effects.registry.adopted.retain(|uid| sent.contains(uid));
    for uid in effects.registry.uids().into_iter().filter(|uid| !sent.contains(uid)) {
        let known = effects.registry.with(&uid, |e| {
            let restored = e.end_wait(Awaited::Source);
            e.inbox.wake();
            (e.incarnation, e.worker.clone(), e.desired.is_some(), restored, Arc::clone(&e.runtime.observed))
        });
        let Some((incarnation, state, has_pod, restored, observed)) = known else { continue };
        if state.desired {
            lifecycle::remove(effects, &uid);
        } else if restored && state.phase == WorkerPhase::Finished {
            lifecycle::forget(effects, &uid, incarnation);
        } else if state.phase == WorkerPhase::Sync && !has_pod {
            // The pod left its source while this service was down: what runs of it is an orphan.
            lifecycle::forget_as_orphan(effects, &uid, incarnation, observed);
        }
    }
    effects.publisher.documents.complete();
    effects.registry.desired_state.sets.sources_are_ready();
    effects.registry.resizes.open();
    end_orphans(effects, sources);
}

/// Ends what the runtime runs and no source has. Only after all sources and the runtime have reported everything.
fn end_orphans(effects: &Arc<Effects>, sources: &Sources) {
    let orphans: Vec<(String, Observed)> = {
        let state = sources.state();
        if !state.ready || !state.runtime_synced {
            return;
        }
        drop(state);
        let live = |o: &Observed| o.anything_running() || o.any_sandbox_ready();
        effects
            .registry
            .unclaimed()
            .iter()
            .filter(|(_, o)| live(o))
            .map(|(u, o)| (u.clone(), Arc::clone(o)))
            .collect()
    };
    for (uid, observed) in orphans {
        tracing::info!(uid, pod = observed.name, "ending a pod that runs although no source has it");
        let begun = lifecycle::apply(effects, &uid, &Input::ObservedOrphan { observed: &observed });
        if begun.is_some_and(|transition| transition.work.is_some()) {
            effects.publisher.metrics.pods.orphan();
        }
        effects.registry.unclaimed().remove(&uid);
    }
}

/// Follows the observations of runtime-shim.
pub async fn follow_runtime(effects: Arc<Effects>, sources: Arc<Sources>) {
    let context = effects.context.clone();
    let clients = effects.clients.clone();
    let open = move || {
        let mut client = clients.runtime();
        async move { client.watch_pods(runtime::WatchPodsRequest::default()).await }
    };
    let on = move |signal: Signal<runtime::WatchPodsResponse>| {
        match signal {
            Signal::Opened => {
                let mut state = sources.state();
                state.runtime_synced = false;
                state.replayed.clear();
            }
            Signal::Message(message) => {
                if let Some(item) = message.item {
                    receive_observation(&effects, &sources, item);
                }
            }
            Signal::Lost(status) => {
                let message = format!("runtime-shim is unavailable: {}", status.message());
                sources.state().runtime_synced = false;
                effects.registry.node.runtime.send_modify(|view| {
                    view.ready = false;
                    view.message = message;
                });
            }
        }
        ready(())
    };
    follow("runtime-shim", &context.progress, &context.shutdown, open, on).await;
}

fn receive_observation(effects: &Arc<Effects>, sources: &Arc<Sources>, item: Observation) {
    match item {
        Observation::Pod(pod) => {
            let uid = pod.uid.clone();
            sources.record_replayed(&uid);
            record(effects, sources, &uid, observation(pod));
        }
        Observation::GoneUid(uid) => gone(effects, &uid),
        Observation::State(state) => {
            sources.state().runtime = RuntimeView {
                name: state.name,
                version: state.version,
                ready: state.ready,
                network_ready: state.network_ready,
                message: state.message,
                // Of the default handler; handlers of runtime classes are not looked at.
                recursive_read_only: state
                    .handlers
                    .iter()
                    .any(|handler| handler.name.is_empty() && handler.recursive_read_only_mounts),
                user_namespace_handlers: state
                    .handlers
                    .into_iter()
                    .filter_map(|handler| handler.user_namespaces.then_some(handler.name))
                    .collect(),
            };
            publish_runtime(effects, sources);
        }
        Observation::Synced(_) => {
            let missing: Vec<String> = {
                let mut state = sources.state();
                state.runtime_synced = true;
                let replayed = std::mem::take(&mut state.replayed);
                effects.registry.unclaimed().retain(|uid, _| replayed.contains(uid));
                effects.registry.uids().into_iter().filter(|uid| !replayed.contains(uid)).collect()
            };
            for uid in missing {
                gone(effects, &uid);
            }
            publish_runtime(effects, sources);
            compare_held(effects, sources);
            end_orphans(effects, sources);
        }
    }
}

/// The runtime has nothing of the pod any more. What is known here may be newer than this message, so a fresh read decides.
fn gone(effects: &Arc<Effects>, uid: &str) {
    effects.registry.with(uid, |state| {
        if state.awaits_cleanup() {
            state.inbox.wake();
        } else if state.runtime.may_have_leftovers() {
            // During a read too, which may still have found what is gone by now.
            state.runtime.freshness.invalidate();
            state.inbox.wake();
        }
        state.runtime.gone = true;
    });
    // The order matters: if the UID is forgotten between the two, it is added to `unclaimed`.
    effects.registry.unclaimed().remove(uid);
}

fn record(effects: &Arc<Effects>, sources: &Sources, uid: &str, observed: Observed) {
    if effects.registry.record_observation(uid, Arc::clone(&observed)) {
        return;
    }
    effects.registry.unclaimed().insert(uid.to_owned(), Arc::clone(&observed));
    // The UID may have arrived between the two.
    if effects.registry.record_observation(uid, observed) {
        effects.registry.unclaimed().remove(uid);
        return;
    }
    end_orphans(effects, sources);
}

fn publish_runtime(effects: &Effects, sources: &Sources) {
    let view = {
        let state = sources.state();
        RuntimeView { ready: state.runtime.ready && state.runtime_synced, ..state.runtime.clone() }
    };
    effects.registry.node.runtime.send_if_modified(|current| {
        let changed = *current != view;
        *current = view;
        changed
    });
}

/// Reports progress at each heartbeat and updates the gauges.
pub async fn heartbeat(effects: Arc<Effects>, progress: LoopHandle, gauge: impl Fn(&PodRegistry) + Send) {
    loop {
        progress.tick();
        gauge(&effects.registry);
        tokio::select! {
            () = effects.context.shutdown.cancelled() => return,
            () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keelson_config::{Config, ServiceName};
    use keelson_kube_model::Pod;
    use keelson_service_kit::Context;

    #[tokio::test]
    async fn a_pod_is_the_same_whether_pod_config_has_annotated_it_or_not() {
        const PLAIN: &str = r#"{"kind":"Pod","metadata":{"name":"web","namespace":"shop","uid":"u","annotations":{"kubernetes.io/config.hash":"u"}},"spec":{"containers":[{"name":"c","image":"i:1"}]}}"#;
        const ANNOTATED: &str = r#"{"kind":"Pod","metadata":{"name":"web","namespace":"shop","uid":"u","annotations":{"kubernetes.io/config.hash":"u","kubernetes.io/config.source":"file","kubernetes.io/config.seen":"1970-01-01T00:00:05.000000001Z"}},"spec":{"containers":[{"name":"c","image":"i:1"}]}}"#;
        let sent = |json: &'static str| {
            Desired::Pod(config::DesiredPod {
                uid: "u".into(),
                namespace: "shop".into(),
                name: "web".into(),
                source: "file".into(),
                pod_json: Bytes::from_static(json.as_bytes()),
                revision: 7,
                seen_unix_nanos: 5_000_000_001,
                ..config::DesiredPod::default()
            })
        };
        for (first, second) in [(PLAIN, ANNOTATED), (ANNOTATED, PLAIN)] {
            let context = Context::detached(ServiceName::PodSync, Config::default());
            let (effects, sources) = (Effects::new(context, None), Arc::new(Sources::default()));
            let accepted = |json| {
                receive_desired(&effects, &sources, sent(json));
                effects.registry.with("u", |state| state.desired.clone()).flatten().unwrap()
            };
            let before = accepted(first);
            assert_eq!(before.raw, ANNOTATED, "as a pod-config of the release before has sent it");
            assert_eq!(*before.pod, serde_json::from_str::<Pod>(ANNOTATED).unwrap());
            assert!(before.pod.is_static());
            let after = accepted(second);
            assert!(Arc::ptr_eq(&after.pod, &before.pod), "an upgrade of pod-config is no change");
            let (_, document) = effects.publisher.documents.snapshot().remove(0);
            assert_eq!(document.separate_message(true).pod_json, ANNOTATED);
            let shown: Pod = serde_json::from_slice(&document.complete_message().pod_json).unwrap();
            assert_eq!(shown.metadata.annotations, before.pod.metadata.annotations);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_static_pod_is_shown_although_the_runtime_does_not_answer() {
        let uid = "00000000000000000000000000000001";
        let context = Context::detached(ServiceName::PodSync, Config::default());
        let (effects, sources) = (Effects::new(context, None), Arc::new(Sources::default()));
        let pod = config::DesiredPod {
            uid: uid.into(),
            name: "web".into(),
            namespace: "default".into(),
            source: "file".into(),
            pod_json: format!(r#"{{"metadata":{{"uid":"{uid}","name":"web"}},"spec":{{"containers":[]}}}}"#)
                .into_bytes()
                .into(),
            ..config::DesiredPod::default()
        };
        receive_desired(&effects, &sources, Desired::Pod(pod));
        assert!(effects.registry.read(uid, |_| ()).is_none(), "a kubelet may have started it");
        tokio::time::sleep(HOLD + Duration::from_secs(1)).await;
        assert!(effects.registry.read(uid, |_| ()).is_some());
        assert!(sources.state().held.is_empty());
    }

    #[tokio::test]
    async fn uids_of_runtime_shim_are_recorded_only_during_its_replay() {
        let context = Context::detached(ServiceName::PodSync, Config::default());
        let (effects, sources) = (Effects::new(context, None), Arc::new(Sources::default()));
        let pod = |uid: &str| Observation::Pod(runtime::RuntimePod { uid: uid.into(), ..Default::default() });
        receive_observation(&effects, &sources, pod("replayed"));
        assert_eq!(sources.state().replayed.len(), 1);
        receive_observation(&effects, &sources, Observation::Synced(Default::default()));
        receive_observation(&effects, &sources, pod("later"));
        assert!(sources.state().replayed.is_empty());
        assert!(effects.registry.unclaimed().contains_key("replayed"), "the replay contained it");
    }
}
