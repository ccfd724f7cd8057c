//! The merged desired pods of all sources, and their subscribers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_kube_model::PodFullName;
use keelson_kube_model::pod_ext::API;
use keelson_pod_config_core::binder::{ClaimKey, Records, Report};
use keelson_pod_config_core::desired_pod::DesiredPod;
use keelson_pod_config_core::files::{SourceError, SourceSet};
use keelson_pod_config_core::merge::{Change, Merge, MergeError, Op};
use keelson_pod_config_core::object::ObjectKey;
use keelson_pod_config_core::sent_record::SentRecord;
use keelson_pod_config_core::{ManifestError, ManifestErrorKind, ManifestWarning};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_service_kit::{Context, EventRing, ObjectRef, Subscription, WatchHub, now_unix_nanos};
use tokio::sync::watch;

use crate::binding_store::Opened;
use crate::checkpoint::Checkpoint;
use crate::metrics::SourceMetrics;
use crate::sent_pod::SentPod;
use crate::source_state::SourceState;
pub use crate::volume_objects::ObjectLookup;
use crate::volume_objects::{ClaimMessages, VolumeObjects};

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
    Pod(Arc<SentPod>),
    /// The source has been read once.
    Ready,
}

/// The desired state of the node. Cheap to clone; sources publish into it, one at a time.
#[derive(Debug, Clone)]
pub struct DesiredState(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    hub: WatchHub<WatchKey, WatchValue>,
    state: Mutex<State>,
    checkpoint: Checkpoint,
    volumes: VolumeObjects,
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

impl DesiredState {
    /// A state without pods. `sources` are the configured sources with their locations, in order of precedence. `restored` are
    /// the records of the run before the restart, by UID; `checkpoint` stores those of this run. `bindings` are the records of
    /// bindings, or why they are not known.
    pub fn new(
        ctx: &Context,
        sources: &[(&str, String)],
        checkpoint: Checkpoint,
        restored: BTreeMap<String, SentRecord>,
        bindings: Result<Opened, String>,
    ) -> Self {
        let volumes = VolumeObjects::new(&ctx.config, bindings);
        let state =
            |(name, location): &(&str, String)| ((*name).to_owned(), SourceState::new(location.clone()));
        Self(Arc::new(Inner {
            hub: WatchHub::incomplete(),
            state: Mutex::new(State {
                merge: Merge::restore(restored),
                sources: sources.iter().map(state).collect(),
            }),
            checkpoint,
            volumes,
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
        let now = now_unix_nanos();
        let SourceSet { pods, objects, mut errors, waiting, warnings } = set;
        let outcome = state.merge.set(source, pods, now);
        errors.extend(outcome.errors.into_iter().map(merge_error));
        let entry = state.sources.entry(source.to_owned()).or_default();
        let new_errors = entry.replace_errors(source, errors, now);
        entry.replace_waiting(waiting, now);
        let new_warnings = entry.replace_warnings(warnings, now);
        let objects_changed = entry.objects != objects;
        entry.objects = objects;
        // An API server never reuses a UID.
        let added_unix_nanos = if entry.ready && source != API { now } else { 0 };
        let newly_ready = settled && !entry.ready;
        entry.ready |= settled;
        let used = used_claims(&state.merge);
        if objects_changed || newly_ready || self.0.volumes.are_others_used(&used) {
            self.bind_volumes(state, used, now);
            self.0.object_changes.send_modify(|count| *count += 1);
        }
        for change in outcome.changes {
            self.publish_change(source, change, added_unix_nanos);
        }
        if newly_ready {
            self.publish_ready(state, source);
        }
        let total = state.sources.values().map(SourceState::error_count).sum();
        self.0.metrics.set(source, state.merge.count(source), total);
        for source_error in &new_errors {
            self.report_error(&state.merge, source, source_error);
        }
        for (origin, warning) in &new_warnings {
            self.report_warning(&state.merge, source, origin, warning);
        }
    }

    /// Binds the claims and PersistentVolumes of all sources to each other. `used` are the claims that pods use.
    fn bind_volumes(&self, state: &mut State, used: BTreeSet<ClaimKey>, now: i64) {
        let sources: Vec<&SourceState> =
            self.0.configured.iter().filter_map(|source| state.sources.get(source)).collect();
        let complete = sources.iter().all(|source| source.ready);
        let mut objects = BTreeMap::new();
        for object in sources.iter().flat_map(|source| source.objects.values()) {
            if object.key.kind.is_volume_object() {
                objects.entry(object.key.clone()).or_insert_with(|| Arc::clone(object));
            }
        }
        let messages = self.0.volumes.update(objects, used, complete);
        self.warn_of_claims(state, messages, complete, now);
    }

    /// Lets others see the bindings in `records`, which are on the disk now.
    pub fn bindings_stored(&self, records: Records) {
        self.after_bindings(|volumes| volumes.stored(records));
    }

    /// Takes bindings that could not be read at the start.
    pub fn bindings_read(&self, opened: Opened) {
        self.after_bindings(|volumes| volumes.take_records(opened));
    }

    /// Notes that a volume-manager has begun to report the claims in use. Returns the number of its stream.
    pub fn begin_claim_reports(&self) -> u64 {
        let mut number = 0;
        self.after_bindings(|volumes| {
            let (stream, messages) = volumes.begin_reports();
            number = stream;
            messages
        });
        number
    }

    /// Takes a report of the claims in use. Returns whether it counts: there is no newer stream.
    pub fn report_claims(&self, stream: u64, report: Report) -> bool {
        let mut guard = self.state();
        let Some(messages) = self.0.volumes.take_report(stream, report) else { return false };
        self.show_bindings(&mut guard, messages);
        true
    }

    /// Shows why bindings could not be stored or read.
    pub fn bindings_failed(&self, error: &str) {
        self.after_bindings(|volumes| volumes.failed(error));
    }

    fn after_bindings(&self, change: impl FnOnce(&VolumeObjects) -> ClaimMessages) {
        let mut guard = self.state();
        let messages = change(&self.0.volumes);
        self.show_bindings(&mut guard, messages);
    }

    fn show_bindings(&self, state: &mut State, messages: ClaimMessages) {
        let complete = state.sources.values().all(|source| source.ready);
        self.warn_of_claims(state, messages, complete, now_unix_nanos());
        self.0.object_changes.send_modify(|count| *count += 1);
    }

    fn warn_of_claims(&self, state: &mut State, mut warnings: ClaimMessages, complete: bool, now: i64) {
        // A warning belongs to the source whose claim is used.
        for source in &self.0.configured {
            let Some(source_state) = state.sources.get_mut(source) else { continue };
            let own = source_state.objects.iter().filter_map(|(key, object)| {
                let message = warnings.remove(key)?;
                let warning = ManifestWarning { line: object.line, pod: None, message };
                Some((object.origin.clone(), warning))
            });
            let own: Vec<_> = own.collect();
            // At the start each claim is pending for a moment.
            for (origin, warning) in source_state.replace_claim_warnings(own, now).iter().filter(|_| complete)
            {
                self.report_warning(&state.merge, source, origin, warning);
            }
        }
    }

    /// Sends that `source` has been read; after the last source also that the state is complete.
    fn publish_ready(&self, state: &mut State, source: &str) {
        let pods = state.merge.count(source);
        tracing::info!(event = "source_ready", source, pods, "the source has been read");
        self.0.hub.set(WatchKey::Source(source.to_owned()), WatchValue::Ready);
        if state.sources.values().all(|source| source.ready) {
            self.forget_restored(&mut state.merge);
            self.0.hub.complete();
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
        let Change { op, pod, mut sent, restored_traceparent } = change;
        log_change(op, source, &pod);
        if op == Op::Remove {
            self.0.checkpoint.remove_pod(&pod.uid);
            self.0.hub.remove(&WatchKey::Pod(pod.uid.clone()));
            return;
        }
        let before = self.pod(&pod.uid);
        let added_unix_nanos = if op == Op::Add {
            added_unix_nanos
        } else {
            before.as_ref().map_or(0, |before| before.added_unix_nanos)
        };
        sent.traceparent = match (restored_traceparent, op) {
            (Some(restored), _) => restored,
            (None, Op::Add | Op::Update) => new_trace(source, &pod),
            // Another change belongs to the trace that was sent with the pod last.
            (None, Op::Delete | Op::Reconcile | Op::Remove) => {
                before.map(|before| before.record.traceparent.clone()).unwrap_or_default()
            }
        };
        self.0.checkpoint.put_pod(&pod.uid, &sent);
        let key = WatchKey::Pod(pod.uid.clone());
        let sent = SentPod { pod, source: source.to_owned(), record: sent, added_unix_nanos };
        self.0.hub.set(key, WatchValue::Pod(Arc::new(sent)));
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
    pub fn pod(&self, uid: &str) -> Option<Arc<SentPod>> {
        match self.0.hub.get(&WatchKey::Pod(uid.to_owned())) {
            Some(WatchValue::Pod(pod)) => Some(pod),
            Some(WatchValue::Ready) | None => None,
        }
    }

    /// The PersistentVolumes and claims of the sources, as they are bound to each other.
    pub fn volume_objects(&self) -> VolumeObjects {
        self.0.volumes.clone()
    }

    /// Looks up an object other than a pod in the sources, in order of precedence.
    pub fn object(&self, key: &ObjectKey) -> ObjectLookup {
        if key.kind.is_volume_object() {
            return self.0.volumes.get(key.kind.as_str(), &key.namespace, &key.name);
        }
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

    /// The origin of an object other than a pod in `source`.
    pub fn object_origin(&self, source: &str, key: &ObjectKey) -> Option<String> {
        self.state().sources.get(source)?.objects.get(key).map(|object| object.origin.clone())
    }

    /// The response of `ListSources`.
    pub fn sources(&self) -> Vec<pb::Source> {
        let state = self.state();
        let one = |name: &String| Some(state.sources.get(name)?.to_wire(name, state.merge.count(name)));
        self.0.configured.iter().filter_map(one).collect()
    }
}

/// The claims that pods use.
fn used_claims(merge: &Merge) -> BTreeSet<ClaimKey> {
    let key = |(namespace, name): (&str, &str)| ClaimKey { namespace: namespace.into(), name: name.into() };
    merge.used_claims().map(key).collect()
}

/// The trace context of a new trace for a new or updated pod; empty when traces are off.
fn new_trace(source: &str, pod: &DesiredPod) -> String {
    let span = tracing::info_span!(
        target: keelson_telemetry::TRACE_TARGET,
        parent: None,
        "pod seen",
        k8s.pod.name = pod.name,
        k8s.namespace.name = pod.namespace,
        k8s.pod.uid = pod.uid,
        source,
    );
    keelson_telemetry::traceparent_of(&span).unwrap_or_default()
}

fn log_change(op: Op, source: &str, pod: &DesiredPod) {
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
    SourceError { origin: pod.origin.clone(), error, kept_pods: Vec::new() }
}
