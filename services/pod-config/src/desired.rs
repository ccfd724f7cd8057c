//! The desired pods of all sources, merged, and those who watch them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_kube_model::PodFullName;
use keelson_kube_model::pod_ext::API;
use keelson_pod_config_core::files::{Problem, SourceObject, SourceSet};
use keelson_pod_config_core::merge::{Change, Merge, MergedPod, Op, Refused};
use keelson_pod_config_core::object::ObjectKey;
use keelson_pod_config_core::offline::WaitingPod;
use keelson_pod_config_core::sight::Sight;
use keelson_pod_config_core::{ManifestError, ManifestWarning, Why};
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

/// What subscribers watch: pods before sources, so that a replay tells of a source after its pods.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// A pod by its UID.
    Pod(String),
    /// A source by its name.
    Source(String),
}

/// The value behind a [`Key`].
#[derive(Debug, Clone)]
pub enum Entry {
    /// The pod as it goes over the wire.
    Pod(Arc<pb::DesiredPod>),
    /// The source has been read once.
    Ready,
}

/// What the sources say about an object at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// The object as JSON.
    Object(Arc<[u8]>),
    /// No source has it, and all have been read.
    Nothing,
    /// No source that has been read has it; another has not been read yet.
    NotRead,
}

/// The desired state of the node. Cheap to clone; sources publish into it one at a time.
#[derive(Debug, Clone)]
pub struct Desired(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    hub: WatchHub<Key, Entry>,
    state: Mutex<State>,
    checkpoint: Checkpoint,
    events: EventRing,
    metrics: SourceMetrics,
    node_name: String,
    configured: Vec<String>,
    /// Counts how often what [`Desired::object`] answers may have changed.
    objects: watch::Sender<u64>,
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
    problems: BTreeMap<Problem, i64>,
    /// With the moment since when each waits.
    waiting: BTreeMap<WaitingPod, i64>,
    /// By file, with the moment since when each is known.
    warnings: BTreeMap<(String, ManifestWarning), i64>,
}

impl Desired {
    /// No pods yet; `sources` are the configured ones, by name and location, in the order of their precedence.
    /// `earlier` is what an earlier run of the service has sent, by UID; `checkpoint` keeps it for the next one.
    pub fn new(
        ctx: &Context,
        sources: &[(&str, String)],
        checkpoint: Checkpoint,
        earlier: BTreeMap<String, Sight>,
    ) -> Self {
        let state = |(name, location): &(&str, String)| {
            ((*name).to_owned(), SourceState { location: location.clone(), ..SourceState::default() })
        };
        Self(Arc::new(Inner {
            hub: WatchHub::incomplete(),
            state: Mutex::new(State {
                merge: Merge::resuming(earlier),
                sources: sources.iter().map(state).collect(),
            }),
            checkpoint,
            events: ctx.events.clone(),
            metrics: SourceMetrics::register(&ctx.metrics),
            node_name: ctx.config.node_name.clone(),
            configured: sources.iter().map(|(name, _)| (*name).to_owned()).collect(),
            objects: watch::Sender::new(0),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names of the configured sources.
    pub fn configured(&self) -> &[String] {
        &self.0.configured
    }

    /// Replay, then changes.
    pub fn subscribe(&self) -> Subscription<Key, Entry> {
        self.0.hub.subscribe()
    }

    /// Takes the whole set of `source`. With `settled` the source counts as read; once all are, watchers are told
    /// that the replay is over.
    pub fn publish(&self, source: &str, set: SourceSet, settled: bool) {
        let mut guard = self.state();
        let state = &mut *guard;
        let SourceSet { pods, objects, mut problems, waiting, warnings } = set;
        let outcome = state.merge.set(source, pods, now_unix_nanos());
        problems.extend(outcome.refused.into_iter().map(refused));
        let news = Self::take_problems(state, source, problems);
        let entry = state.sources.entry(source.to_owned()).or_default();
        let other_objects = entry.objects != objects;
        entry.objects = objects;
        let (since, now) = (std::mem::take(&mut entry.waiting), now_unix_nanos());
        entry.waiting = waiting
            .into_iter()
            .map(|pod| {
                let since = since.get(&pod).copied().unwrap_or(now);
                (pod, since)
            })
            .collect();
        let mut warned = Vec::new();
        let known = std::mem::take(&mut entry.warnings);
        for warning in warnings {
            let since = known.get(&warning).copied();
            if since.is_none() {
                warned.push(warning.clone());
            }
            entry.warnings.insert(warning, since.unwrap_or(now));
        }
        // A UID of an API server never comes back.
        let added = if entry.ready && source != API { now } else { 0 };
        let newly_ready = settled && !entry.ready;
        entry.ready |= settled;
        if other_objects || newly_ready {
            self.0.objects.send_modify(|count| *count += 1);
        }
        for change in outcome.changes {
            self.tell(source, change, added);
        }
        if newly_ready {
            tracing::info!(source, pods = state.merge.count(source), "the source has been read");
            self.0.hub.set(Key::Source(source.to_owned()), Entry::Ready);
        }
        if newly_ready && state.sources.values().all(|source| source.ready) {
            self.forget_earlier(&mut state.merge);
            self.0.hub.complete();
        }
        let total = state.sources.values().map(|s| s.problems.len()).sum();
        self.0.metrics.set(source, state.merge.count(source), total);
        for problem in &news {
            self.report(&state.merge, source, problem);
        }
        for (origin, warning) in &warned {
            self.warn(&state.merge, source, origin, warning);
        }
    }

    /// Says what of a manifest is not used as it was written.
    fn warn(&self, merge: &Merge, source: &str, origin: &str, warning: &ManifestWarning) {
        let message = format!("{origin}:{}: {}", warning.line, warning.message);
        tracing::warn!(event = "manifest_warning", source, "{message}");
        if let Some(name) = &warning.pod {
            let uid = merge.find(source, name).map_or("", |(uid, _)| uid);
            let pod = ObjectRef::pod(&name.namespace, &name.name, uid);
            self.0.events.warning(pod, "ManifestWarning", message);
        }
    }

    /// Every source has spoken: what they do not name is not kept any longer.
    fn forget_earlier(&self, merge: &mut Merge) {
        merge.forget_earlier();
        let checkpoint = &self.0.checkpoint;
        checkpoint.pods().iter().filter(|uid| !merge.knows(uid)).for_each(|uid| checkpoint.remove_pod(uid));
    }

    /// `added` is what is sent as `added_unix_nanos` of a pod that is new.
    fn tell(&self, source: &str, change: Change, added: i64) {
        let Change { op, pod } = change;
        let added =
            if op == Op::Add { added } else { self.pod(&pod.uid).map_or(0, |sent| sent.added_unix_nanos) };
        log(op, source, &pod);
        match op {
            Op::Remove => {
                self.0.checkpoint.remove_pod(&pod.uid);
                self.0.hub.remove(&Key::Pod(pod.uid));
            }
            Op::Add | Op::Update if pod.resumed.is_none() => {
                let span = tracing::info_span!(
                    target: keelson_telemetry::TRACE_TARGET,
                    parent: None,
                    "pod seen",
                    k8s.pod.name = pod.name,
                    k8s.namespace.name = pod.namespace,
                    k8s.pod.uid = pod.uid,
                    source,
                );
                self.set(source, pod, keelson_telemetry::traceparent_of(&span).unwrap_or_default(), added);
            }
            Op::Add | Op::Update | Op::Delete | Op::Reconcile => {
                let traceparent = pod.resumed.clone().unwrap_or_else(|| self.trace_of(&pod.uid));
                self.set(source, pod, traceparent, added);
            }
        }
    }

    /// The trace of what was sent of the pod last: a change that begins nothing belongs to it.
    fn trace_of(&self, uid: &str) -> String {
        self.pod(uid).map(|sent| sent.traceparent.clone()).unwrap_or_default()
    }

    fn set(&self, source: &str, pod: MergedPod, traceparent: String, added_unix_nanos: i64) {
        self.0.checkpoint.put_pod(&pod.uid, &pod.sight(&traceparent));
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
        self.0.hub.set(Key::Pod(pod.uid), Entry::Pod(Arc::new(desired)));
    }

    /// Replaces the problems of a source; the ones that are new. Each is told once, and so is its end.
    fn take_problems(state: &mut State, source: &str, problems: Vec<Problem>) -> Vec<Problem> {
        let entry = state.sources.entry(source.to_owned()).or_default();
        let old = std::mem::take(&mut entry.problems);
        let now = now_unix_nanos();
        let mut news = Vec::new();
        for problem in problems {
            let since = old.get(&problem).copied();
            if since.is_none() {
                news.push(problem.clone());
            }
            entry.problems.insert(problem, since.unwrap_or(now));
        }
        let bad: BTreeSet<&str> = entry.problems.keys().map(|p| p.origin.as_str()).collect();
        let mended: BTreeSet<&str> =
            old.keys().map(|p| p.origin.as_str()).filter(|origin| !bad.contains(origin)).collect();
        for origin in mended {
            tracing::info!(source, origin, "the manifest has no problem any more");
        }
        news
    }

    fn report(&self, merge: &Merge, source: &str, problem: &Problem) {
        let mut message = problem.error.at(&problem.origin);
        if !problem.kept.is_empty() {
            message.push_str("; its last good version goes on");
        }
        tracing::warn!(source, "{message}");
        let events = &self.0.events;
        let about_pod = matches!(problem.error.why, Why::Invalid | Why::Duplicate);
        match problem.error.pod.as_ref().filter(|_| about_pod) {
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
        for name in problem.kept.iter().filter(|name| !about_pod || problem.error.pod.as_ref() != Some(name))
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

    /// UID and origin of the pod that `source` has under this name.
    pub fn find(&self, source: &str, name: &PodFullName) -> Option<(String, String)> {
        self.state().merge.find(source, name).map(|(uid, origin)| (uid.to_owned(), origin.to_owned()))
    }

    /// The pod with this UID.
    pub fn pod(&self, uid: &str) -> Option<Arc<pb::DesiredPod>> {
        match self.0.hub.get(&Key::Pod(uid.to_owned())) {
            Some(Entry::Pod(pod)) => Some(pod),
            Some(Entry::Ready) | None => None,
        }
    }

    /// A Secret or ConfigMap of the sources, the first configured source first.
    pub fn object(&self, key: &ObjectKey) -> Found {
        let state = self.state();
        let sources = || self.0.configured.iter().filter_map(|source| state.sources.get(source));
        match sources().find_map(|source| source.objects.get(key)) {
            Some(object) => Found::Object(Arc::clone(&object.json)),
            None if sources().all(|source| source.ready) => Found::Nothing,
            None => Found::NotRead,
        }
    }

    /// Tells that [`Self::object`] may have another answer than before.
    pub fn objects_change(&self) -> watch::Receiver<u64> {
        self.0.objects.subscribe()
    }

    /// The origin of a Secret or ConfigMap in one source.
    pub fn object_origin(&self, source: &str, key: &ObjectKey) -> Option<String> {
        self.state().sources.get(source)?.objects.get(key).map(|object| object.origin.clone())
    }

    /// What `ListSources` answers.
    pub fn sources(&self) -> Vec<pb::Source> {
        let state = self.state();
        let one = |name: &String| {
            let source = state.sources.get(name)?;
            Some(pb::Source {
                name: name.clone(),
                location: source.location.clone(),
                ready: source.ready,
                pods: u32::try_from(state.merge.count(name)).unwrap_or(u32::MAX),
                problems: source.problems.iter().map(|(problem, since)| wire(problem, *since)).collect(),
                waiting: source.waiting.iter().map(|(pod, since)| waiting(name, pod, *since)).collect(),
                warnings: source.warnings.iter().map(|(warning, since)| warned(warning, *since)).collect(),
            })
        };
        self.0.configured.iter().filter_map(one).collect()
    }
}

fn log(op: Op, source: &str, pod: &MergedPod) {
    let name = format!("{}/{}", pod.namespace, pod.name);
    let (uid, origin) = (pod.uid.as_str(), pod.origin.as_str());
    match op {
        Op::Add => tracing::info!(pod = name, uid, source, origin, "pod added"),
        Op::Update => tracing::info!(pod = name, uid, source, origin, "pod changed"),
        Op::Delete => tracing::info!(pod = name, uid, source, origin, "pod is to be deleted"),
        Op::Remove => tracing::info!(pod = name, uid, source, origin, "pod removed"),
        Op::Reconcile => tracing::debug!(pod = name, uid, source, origin, "pod status changed"),
    }
}

fn refused(refused: Refused) -> Problem {
    let error = ManifestError {
        pod: Some(refused.pod.full_name()),
        ..ManifestError::file(Why::Duplicate, refused.message)
    };
    Problem { origin: refused.pod.origin, error, kept: Vec::new() }
}

fn waiting(source: &str, pod: &WaitingPod, since: i64) -> pb::WaitingPod {
    let who = if source == API { "the API server" } else { source };
    pb::WaitingPod {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        origin: pod.origin.clone(),
        message: format!("since the reboot the pod waits for {who}, which does not answer: {}", pod.why),
        since_unix_nanos: since,
    }
}

fn warned((origin, warning): &(String, ManifestWarning), since: i64) -> pb::SourceWarning {
    let full = |name: &PodFullName| format!("{}/{}", name.namespace, name.name);
    pb::SourceWarning {
        origin: origin.clone(),
        line: warning.line,
        pod: warning.pod.as_ref().map(full).unwrap_or_default(),
        message: warning.message.clone(),
        since_unix_nanos: since,
    }
}

fn wire(problem: &Problem, since: i64) -> pb::SourceProblem {
    pb::SourceProblem {
        origin: problem.origin.clone(),
        line: problem.error.line,
        column: problem.error.column,
        message: problem.error.to_string(),
        since_unix_nanos: since,
        kept_pods: problem.kept.iter().map(|name| format!("{}/{}", name.namespace, name.name)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use keelson_pod_config_core::offline::WaitsFor;

    use super::*;

    #[test]
    fn a_pod_that_waits_says_for_whom() {
        let pod = WaitingPod {
            namespace: "default".into(),
            name: "db".into(),
            origin: "api".into(),
            why: WaitsFor::Any,
        };
        for (source, who) in [("etcd", "etcd"), (API, "the API server")] {
            let message = waiting(source, &pod, 7).message;
            assert!(message.contains(&format!("waits for {who}, which does not answer: offline")));
        }
    }
}
