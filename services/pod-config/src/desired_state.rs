//! The merged desired pods of all sources, and their subscribers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_kube_model::PodFullName;
use keelson_kube_model::pod_ext::API;
use keelson_pod_config_core::files::{SourceError, SourceObject, SourceSet};
use keelson_pod_config_core::merge::{Change, Merge, MergeError, MergedPod, Op};
use keelson_pod_config_core::object::ObjectKey;
use keelson_pod_config_core::offline::WaitingPod;
use keelson_pod_config_core::sent_record::SentRecord;
use keelson_pod_config_core::{ManifestError, ManifestErrorKind, ManifestWarning};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_service_kit::{Context, EventRing, ObjectRef, Subscription, WatchHub, now_unix_nanos};
use tokio::sync::watch;

use crate::checkpoint::Checkpoint;
use crate::metrics::SourceMetrics;

/// Name of the source that `staticPodPath` configures.
pub const FILE: &str = "file";
/// Name of the source that `staticPodURL` configures.
pub const HTTP: &str = "http";
/// Name of the source that `ApplyManifest` fills.
pub const MANIFEST: &str = "manifest";

/// The key of an item that subscribers watch. Pods sort before sources, so that a replay sends a source after its pods.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum WatchKey {
    /// A pod by its UID.
    Pod(String),
    /// A source by its name.
    Source(String),
}

/// The value of a [`WatchKey`].
#[derive(Debug, Clone)]
pub enum WatchValue {
    /// The pod as sent to subscribers.
    Pod(Arc<pb::DesiredPod>),
    /// The source has been read once.
    Ready,
}

/// The result of looking up an object in the sources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectLookup {
    /// The object as JSON.
    Object(Arc<[u8]>),
    /// All sources have been read, and none has the object.
    NotFound,
    /// No source has the object so far, and some have not been read yet.
    SourcesNotRead,
}

/// The desired state of the node. Cheap to clone; sources publish into it, one at a time.
#[derive(Debug, Clone)]
pub struct DesiredState(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    hub: WatchHub<WatchKey, WatchValue>,
    state: Mutex<State>,
    checkpoint: Checkpoint,
    events: EventRing,
    metrics: SourceMetrics,
    node_name: String,
    configured: Vec<String>,
    /// Incremented when [`DesiredState::object`] may return something else.
    object_changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    merge: Merge,
    sources: BTreeMap<String, SourceState>,
}

#[derive(Debug, Default)]
struct SourceState {
    location: String,
    ready: bool,
    objects: BTreeMap<ObjectKey, SourceObject>,
    errors: BTreeMap<SourceError, i64>,
    /// Waiting pods, each with the time since when it waits.
    waiting: BTreeMap<WaitingPod, i64>,
    /// Warnings with their files, each with the time since when it is known.
    warnings: BTreeMap<(String, ManifestWarning), i64>,
}

impl DesiredState {
    /// A state without pods. `sources` are the configured sources with their locations, in order of precedence. `restored` are
    /// the records of the run before the restart, by UID; `checkpoint` stores those of this run.
    pub fn new(
        ctx: &Context,
        sources: &[(&str, String)],
        checkpoint: Checkpoint,
        restored: BTreeMap<String, SentRecord>,
    ) -> Self {
        let state = |(name, location): &(&str, String)| {
            ((*name).to_owned(), SourceState { location: location.clone(), ..SourceState::default() })
        };
        Self(Arc::new(Inner {
            hub: WatchHub::incomplete(),
            state: Mutex::new(State {
                merge: Merge::restore(restored),
                sources: sources.iter().map(state).collect(),
            }),
            checkpoint,
            events: ctx.events.clone(),
            metrics: SourceMetrics::register(&ctx.metrics),
            node_name: ctx.config.node_name.clone(),
            configured: sources.iter().map(|(name, _)| (*name).to_owned()).collect(),
            object_changes: watch::Sender::new(0),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names of the configured sources.
    pub fn configured(&self) -> &[String] {
        &self.0.configured
    }

    /// Subscribes to a replay of the current state, followed by changes.
    pub fn subscribe(&self) -> Subscription<WatchKey, WatchValue> {
        self.0.hub.subscribe()
    }

    /// Replaces the complete set of `source`. With `settled` the source is ready; once all sources are, subscribers get `synced`.
    pub fn publish(&self, source: &str, set: SourceSet, settled: bool) {
        let mut guard = self.state();
        let state = &mut *guard;
        let SourceSet { pods, objects, mut errors, waiting, warnings } = set;
        let outcome = state.merge.set(source, pods, now_unix_nanos());
        errors.extend(outcome.errors.into_iter().map(merge_error));
        let new_errors = Self::replace_errors(state, source, errors);
        let entry = state.sources.entry(source.to_owned()).or_default();
        let objects_changed = entry.objects != objects;
        entry.objects = objects;
        let (since, now) = (std::mem::take(&mut entry.waiting), now_unix_nanos());
        entry.waiting = waiting
            .into_iter()
            .map(|pod| {
                let since = since.get(&pod).copied().unwrap_or(now);
                (pod, since)
            })
            .collect();
        let mut new_warnings = Vec::new();
        let known = std::mem::take(&mut entry.warnings);
        for warning in warnings {
            let since = known.get(&warning).copied();
            if since.is_none() {
                new_warnings.push(warning.clone());
            }
            entry.warnings.insert(warning, since.unwrap_or(now));
        }
        // An API server never reuses a UID.
        let added_unix_nanos = if entry.ready && source != API { now } else { 0 };
        let newly_ready = settled && !entry.ready;
        entry.ready |= settled;
        if objects_changed || newly_ready {
            self.0.object_changes.send_modify(|count| *count += 1);
        }
        for change in outcome.changes {
            self.publish_change(source, change, added_unix_nanos);
        }
        if newly_ready {
            tracing::info!(
                event = "source_ready",
                source,
                pods = state.merge.count(source),
                "the source has been read"
            );
            self.0.hub.set(WatchKey::Source(source.to_owned()), WatchValue::Ready);
        }
        if newly_ready && state.sources.values().all(|source| source.ready) {
            self.forget_restored(&mut state.merge);
            self.0.hub.complete();
        }
        let total = state.sources.values().map(|source| source.errors.len()).sum();
        self.0.metrics.set(source, state.merge.count(source), total);
        for source_error in &new_errors {
            self.report_error(&state.merge, source, source_error);
        }
        for (origin, warning) in &new_warnings {
            self.report_warning(&state.merge, source, origin, warning);
        }
    }

    /// Logs a manifest warning and sends it as an event.
    fn report_warning(&self, merge: &Merge, source: &str, origin: &str, warning: &ManifestWarning) {
        let message = format!("{origin}:{}: {}", warning.line, warning.message);
        tracing::warn!(event = "manifest_warning", source, "{message}");
        if let Some(name) = &warning.pod {
            let uid = merge.find(source, name).map_or("", |(uid, _)| uid);
            let pod = ObjectRef::pod(&name.namespace, &name.name, uid);
            self.0.events.warning(pod, "ManifestWarning", message);
        }
    }

    /// Drops what the checkpoint restored of pods that no source has, once all sources have been read.
    fn forget_restored(&self, merge: &mut Merge) {
        merge.forget_restored();
        let checkpoint = &self.0.checkpoint;
        checkpoint
            .pods()
            .iter()
            .filter(|uid| !merge.contains(uid))
            .for_each(|uid| checkpoint.remove_pod(uid));
    }

    /// Sends a change to subscribers. `added_unix_nanos` is used for new pods.
    fn publish_change(&self, source: &str, change: Change, added_unix_nanos: i64) {
        let Change { op, pod } = change;
        let added_unix_nanos = if op == Op::Add {
            added_unix_nanos
        } else {
            self.pod(&pod.uid).map_or(0, |sent| sent.added_unix_nanos)
        };
        log_change(op, source, &pod);
        match op {
            Op::Remove => {
                self.0.checkpoint.remove_pod(&pod.uid);
                self.0.hub.remove(&WatchKey::Pod(pod.uid));
            }
            Op::Add | Op::Update if pod.restored_traceparent.is_none() => {
                let span = tracing::info_span!(
                    target: keelson_telemetry::TRACE_TARGET,
                    parent: None,
                    "pod seen",
                    k8s.pod.name = pod.name,
                    k8s.namespace.name = pod.namespace,
                    k8s.pod.uid = pod.uid,
                    source,
                );
                self.set(
                    source,
                    pod,
                    keelson_telemetry::traceparent_of(&span).unwrap_or_default(),
                    added_unix_nanos,
                );
            }
            Op::Add | Op::Update | Op::Delete | Op::Reconcile => {
                let traceparent = pod.restored_traceparent.clone().unwrap_or_else(|| self.trace_of(&pod.uid));
                self.set(source, pod, traceparent, added_unix_nanos);
            }
        }
    }

    /// The trace context that was sent with the pod last; a change that starts no new trace belongs to it.
    fn trace_of(&self, uid: &str) -> String {
        self.pod(uid).map(|sent| sent.traceparent.clone()).unwrap_or_default()
    }

    fn set(&self, source: &str, pod: MergedPod, traceparent: String, added_unix_nanos: i64) {
        self.0.checkpoint.put_pod(&pod.uid, &pod.sent_record(&traceparent));
        let desired = pb::DesiredPod {
            uid: pod.uid.clone(),
            namespace: pod.namespace,
            name: pod.name,
            source: source.to_owned(),
            pod_json: pod.json.into(),
            revision: pod.revision,
            traceparent,
            origin: pod.origin,
            seen_unix_nanos: pod.seen_unix_nanos,
            added_unix_nanos,
        };
        self.0.hub.set(WatchKey::Pod(pod.uid), WatchValue::Pod(Arc::new(desired)));
    }

    /// Replaces the errors of a source and returns the new ones. Each error is reported once, and once more when it is fixed.
    fn replace_errors(state: &mut State, source: &str, errors: Vec<SourceError>) -> Vec<SourceError> {
        let entry = state.sources.entry(source.to_owned()).or_default();
        let old = std::mem::take(&mut entry.errors);
        let now = now_unix_nanos();
        let mut new_errors = Vec::new();
        for source_error in errors {
            let since = old.get(&source_error).copied();
            if since.is_none() {
                new_errors.push(source_error.clone());
            }
            entry.errors.insert(source_error, since.unwrap_or(now));
        }
        let failing: BTreeSet<&str> = entry.errors.keys().map(|p| p.origin.as_str()).collect();
        let fixed: BTreeSet<&str> =
            old.keys().map(|p| p.origin.as_str()).filter(|origin| !failing.contains(origin)).collect();
        for origin in fixed {
            tracing::info!(event = "manifest_fixed", source, origin, "all errors of the manifest are fixed");
        }
        new_errors
    }

    fn report_error(&self, merge: &Merge, source: &str, source_error: &SourceError) {
        let mut message = source_error.error.at(&source_error.origin);
        if !source_error.kept_pods.is_empty() {
            message.push_str("; its last good version stays in effect");
        }
        tracing::warn!(event = "manifest_error", source, "{message}");
        let events = &self.0.events;
        let about_pod =
            matches!(source_error.error.kind, ManifestErrorKind::Invalid | ManifestErrorKind::Duplicate);
        match source_error.error.pod.as_ref().filter(|_| about_pod) {
            Some(name) => {
                let uid = merge.find(source, name).map_or("", |(uid, _)| uid);
                events.warning(
                    ObjectRef::pod(&name.namespace, &name.name, uid),
                    "FailedValidation",
                    message.clone(),
                );
            }
            None => events.warning(ObjectRef::node(&self.0.node_name), "InvalidManifest", message.clone()),
        }
        for name in source_error
            .kept_pods
            .iter()
            .filter(|name| !about_pod || source_error.error.pod.as_ref() != Some(name))
        {
            if let Some((uid, _)) = merge.find(source, name) {
                events.warning(
                    ObjectRef::pod(&name.namespace, &name.name, uid),
                    "InvalidManifest",
                    message.clone(),
                );
            }
        }
    }

    /// Whether every configured source has been read.
    pub fn is_ready(&self) -> bool {
        self.state().sources.values().all(|source| source.ready)
    }

    /// UID and origin of the pod with this name in `source`.
    pub fn find(&self, source: &str, name: &PodFullName) -> Option<(String, String)> {
        self.state().merge.find(source, name).map(|(uid, origin)| (uid.to_owned(), origin.to_owned()))
    }

    /// The pod with this UID.
    pub fn pod(&self, uid: &str) -> Option<Arc<pb::DesiredPod>> {
        match self.0.hub.get(&WatchKey::Pod(uid.to_owned())) {
            Some(WatchValue::Pod(pod)) => Some(pod),
            Some(WatchValue::Ready) | None => None,
        }
    }

    /// Looks up a Secret or ConfigMap in the sources, in order of precedence.
    pub fn object(&self, key: &ObjectKey) -> ObjectLookup {
        let state = self.state();
        let sources = || self.0.configured.iter().filter_map(|source| state.sources.get(source));
        match sources().find_map(|source| source.objects.get(key)) {
            Some(object) => ObjectLookup::Object(Arc::clone(&object.json)),
            None if sources().all(|source| source.ready) => ObjectLookup::NotFound,
            None => ObjectLookup::SourcesNotRead,
        }
    }

    /// Notifies when [`Self::object`] may return something else.
    pub fn subscribe_objects(&self) -> watch::Receiver<u64> {
        self.0.object_changes.subscribe()
    }

    /// The origin of a Secret or ConfigMap in `source`.
    pub fn object_origin(&self, source: &str, key: &ObjectKey) -> Option<String> {
        self.state().sources.get(source)?.objects.get(key).map(|object| object.origin.clone())
    }

    /// The response of `ListSources`.
    pub fn sources(&self) -> Vec<pb::Source> {
        let state = self.state();
        let one = |name: &String| {
            let source = state.sources.get(name)?;
            Some(pb::Source {
                name: name.clone(),
                location: source.location.clone(),
                ready: source.ready,
                pods: u32::try_from(state.merge.count(name)).unwrap_or(u32::MAX),
                problems: source.errors.iter().map(|(error, since)| source_problem(error, *since)).collect(),
                waiting: source.waiting.iter().map(|(pod, since)| waiting_pod(name, pod, *since)).collect(),
                warnings: source
                    .warnings
                    .iter()
                    .map(|(warning, since)| source_warning(warning, *since))
                    .collect(),
            })
        };
        self.0.configured.iter().filter_map(one).collect()
    }
}

fn log_change(op: Op, source: &str, pod: &MergedPod) {
    let name = format!("{}/{}", pod.namespace, pod.name);
    let (uid, origin) = (pod.uid.as_str(), pod.origin.as_str());
    match op {
        Op::Add => tracing::info!(event = "pod_added", pod = name, uid, source, origin, "pod added"),
        Op::Update => tracing::info!(event = "pod_changed", pod = name, uid, source, origin, "pod changed"),
        Op::Delete => {
            tracing::info!(event = "pod_deleting", pod = name, uid, source, origin, "pod deletion requested")
        }
        Op::Remove => tracing::info!(event = "pod_removed", pod = name, uid, source, origin, "pod removed"),
        Op::Reconcile => tracing::debug!(
            event = "pod_status_changed",
            pod = name,
            uid,
            source,
            origin,
            "pod status changed"
        ),
    }
}

fn merge_error(MergeError { pod, message }: MergeError) -> SourceError {
    let error = ManifestError {
        pod: Some(pod.full_name()),
        ..ManifestError::file(ManifestErrorKind::Duplicate, message)
    };
    SourceError { origin: pod.origin, error, kept_pods: Vec::new() }
}

fn waiting_pod(source: &str, pod: &WaitingPod, since: i64) -> pb::WaitingPod {
    let who = if source == API { "the API server" } else { source };
    pb::WaitingPod {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        origin: pod.origin.clone(),
        message: format!("since the reboot the pod waits for {who}, which does not answer: {}", pod.reason),
        since_unix_nanos: since,
    }
}

fn source_warning((origin, warning): &(String, ManifestWarning), since: i64) -> pb::SourceWarning {
    let full = |name: &PodFullName| format!("{}/{}", name.namespace, name.name);
    pb::SourceWarning {
        origin: origin.clone(),
        line: warning.line,
        pod: warning.pod.as_ref().map(full).unwrap_or_default(),
        message: warning.message.clone(),
        since_unix_nanos: since,
    }
}

fn source_problem(source_error: &SourceError, since: i64) -> pb::SourceProblem {
    pb::SourceProblem {
        origin: source_error.origin.clone(),
        line: source_error.error.line,
        column: source_error.error.column,
        message: source_error.error.to_string(),
        since_unix_nanos: since,
        kept_pods: source_error
            .kept_pods
            .iter()
            .map(|name| format!("{}/{}", name.namespace, name.name))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use keelson_pod_config_core::offline::WaitReason;

    use super::*;

    #[test]
    fn a_waiting_pod_names_the_control_plane_it_waits_for() {
        let pod = WaitingPod {
            namespace: "default".into(),
            name: "db".into(),
            origin: "api".into(),
            reason: WaitReason::Policy,
        };
        for (source, who) in [("etcd", "etcd"), (API, "the API server")] {
            let message = waiting_pod(source, &pod, 7).message;
            assert!(message.contains(&format!("waits for {who}, which does not answer: offline")));
        }
    }
}
