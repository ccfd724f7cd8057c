//! The state of pod-sync: one entry per UID, and the workers that carry out what the core decides.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use keelson_kube_model::{Pod, PodStatus};
use keelson_pod_sync_core::Moment;
use keelson_pod_sync_core::backoff::BackoffBook;
use keelson_pod_sync_core::explain::Ledger;
use keelson_pod_sync_core::observation::PodObservation;
use keelson_pod_sync_core::ordering::{StartBook, may_start};
use keelson_pod_sync_core::worker::{Input, SyncOutcome, Transition, WorkerPhase, WorkerState, step};
use keelson_proto::keelson::resource_manager::v1::Machine;
use keelson_service_kit::{CancellationToken, Context, ObjectRef, WatchHub, now_unix_nanos};
use tokio::sync::{Notify, Semaphore, watch};

use crate::clients::Clients;
use crate::desired::Desired;
use crate::documents::Document;
use crate::observed::{Observed, same};
use crate::store::{Record, Store};

/// A desired pod as pod-config sent it.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// What the decisions work on.
    pub pod: Arc<Pod>,
    /// The whole object, unknown fields included.
    pub raw: Bytes,
    /// `file`, `manifest`, `api`…
    pub source: String,
    /// Where it was read.
    pub origin: String,
    /// Trace of the change.
    pub traceparent: String,
    /// Grows with each change of this UID.
    pub revision: u64,
}

/// One UID.
#[derive(Debug)]
pub struct Entry {
    /// Where its worker stands.
    pub state: WorkerState,
    /// The pod; `None` for what only the runtime knows.
    pub wanted: Option<Wanted>,
    /// What the runtime holds, as far as it was read.
    pub observed: Observed,
    /// The status that was published last.
    pub status: Arc<PodStatus>,
    /// Counts the published documents.
    pub version: u64,
    /// What each step of its life waits for.
    pub ledger: Ledger,
    /// Per container why its last start failed: waiting reason and message.
    pub reasons: BTreeMap<String, (String, String)>,
    /// resource-manager has admitted it.
    pub admitted: bool,
    /// A worker task exists.
    pub worker: bool,
    /// Read back from an earlier process; no source has spoken of it yet.
    pub restored: bool,
    /// What is known of the runtime may be wrong: the next turn begins with a fresh read.
    pub refresh: bool,
    /// It was refused, and its status says why; no other status follows.
    pub rejected: bool,
    /// Wakes the worker.
    pub wake: Arc<Notify>,
    /// Ends what the worker is waiting for.
    pub cancel: CancellationToken,
}

/// What the runtime is able to do now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuntimeView {
    /// `containerd`…
    pub name: String,
    /// Sandboxes and containers can be made.
    pub ready: bool,
    /// Pods with a network of their own can be made.
    pub network_ready: bool,
    /// Why not.
    pub message: String,
}

/// Shared by the loops, the workers and the server.
#[derive(Debug)]
pub struct Agent {
    /// Configuration, events, progress, metrics.
    pub context: Context,
    /// The neighbours.
    pub clients: Clients,
    /// What the callees are to hold.
    pub desired: Desired,
    /// Documents for `WatchPods` and `ListPods`.
    pub documents: WatchHub<String, Arc<Document>>,
    /// Starts at the same time.
    pub gate: Semaphore,
    /// The runtime.
    pub runtime: watch::Sender<RuntimeView>,
    /// The machine as resource-manager tells it; empty until it has.
    pub machine: watch::Sender<Arc<Machine>>,
    /// When this process began.
    pub started_unix_nanos: i64,
    /// DNS of the node, read once per start of this process.
    pub node_dns: keelson_pod_sync_core::config::ResolvConf,
    store: Option<Store>,
    /// No lock is held over an await, and never two of these at once but `entries` before another.
    entries: Mutex<BTreeMap<String, Entry>>,
    order: Mutex<StartBook>,
    loose: Mutex<BTreeMap<String, Observed>>,
    named_anew: Mutex<BTreeMap<String, Wanted>>,
    backoff: Mutex<BackoffBook>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Agent {
    /// An agent that knows no pod yet.
    pub fn new(context: Context, store: Option<Store>) -> Arc<Self> {
        let gate = Semaphore::new(context.config.runtime.start_parallelism.max(1) as usize);
        let node_dns = crate::convert::read_resolv_conf(&context.config.runtime.resolv_conf);
        Arc::new(Self {
            clients: Clients::new(&context),
            desired: Desired::default(),
            documents: WatchHub::incomplete(),
            gate,
            runtime: watch::Sender::new(RuntimeView::default()),
            machine: watch::Sender::new(Arc::default()),
            started_unix_nanos: now_unix_nanos(),
            node_dns,
            store,
            entries: Mutex::default(),
            order: Mutex::default(),
            loose: Mutex::default(),
            named_anew: Mutex::default(),
            backoff: Mutex::new(BackoffBook::default()),
            context,
        })
    }

    /// Now, for the core.
    pub fn moment(&self) -> Moment {
        Moment { now_unix_nanos: now_unix_nanos(), agent_started_unix_nanos: self.started_unix_nanos }
    }

    /// Looks at one entry.
    pub fn with<T>(&self, uid: &str, look: impl FnOnce(&mut Entry) -> T) -> Option<T> {
        lock(&self.entries).get_mut(uid).map(look)
    }

    /// The crash-loop back-offs.
    pub fn backoff(&self) -> MutexGuard<'_, BackoffBook> {
        lock(&self.backoff)
    }

    /// Every UID that has an entry.
    pub fn uids(&self) -> Vec<String> {
        lock(&self.entries).keys().cloned().collect()
    }

    /// How many workers stand in which phase.
    pub fn phases(&self) -> BTreeMap<&'static str, i64> {
        let mut counts = BTreeMap::new();
        for entry in lock(&self.entries).values() {
            *counts.entry(entry.state.phase.as_str()).or_insert(0) += 1;
        }
        counts
    }

    /// Takes back what an earlier process stored of pods that were ending or running.
    pub fn restore(self: &Arc<Self>, record: Record) {
        let uid = record.uid.clone();
        let mut entry = new_entry(&uid, record.state.read_back());
        entry.status = Arc::new(record.status);
        if let Some(value) = record.pod {
            let raw = Bytes::from(value.to_string());
            if let Ok(pod) = serde_json::from_slice::<Pod>(&raw) {
                entry.wanted = Some(Wanted {
                    pod: Arc::new(pod),
                    raw,
                    source: record.source,
                    origin: String::new(),
                    traceparent: String::new(),
                    revision: 0,
                });
            }
        }
        // Whether it is desired is for its source to say, and what runs of it for the runtime.
        entry.state.desired = false;
        (entry.restored, entry.refresh) = (true, true);
        lock(&self.entries).insert(uid, entry);
    }

    /// Something happened to a UID: asks the core, and does what it says. A worker is begun for a UID that
    /// has none.
    pub fn apply(self: &Arc<Self>, uid: &str, input: &Input<'_>) -> Option<Transition> {
        self.apply_in(uid, input, None)
    }

    /// What a turn came to. A turn that was begun in another phase than the UID stands in now says nothing
    /// about this one: it counts as cancelled.
    pub fn apply_outcome(
        self: &Arc<Self>,
        uid: &str,
        begun_in: WorkerPhase,
        outcome: SyncOutcome,
        pod: Option<&Pod>,
    ) -> Option<Transition> {
        self.apply_in(uid, &Input::Outcome { outcome, pod }, Some(begun_in))
    }

    fn apply_in(
        self: &Arc<Self>,
        uid: &str,
        input: &Input<'_>,
        begun_in: Option<WorkerPhase>,
    ) -> Option<Transition> {
        let at = self.moment();
        let mut entries = lock(&self.entries);
        let before = entries.get(uid).map(|e| e.state.clone());
        if begun_in.is_some() && before.is_none() {
            return None;
        }
        let outdated = Input::Outcome { outcome: SyncOutcome::Cancelled, pod: None };
        let moved_on = begun_in.is_some_and(|phase| before.as_ref().is_some_and(|b| b.phase != phase));
        let input = if moved_on { &outdated } else { input };
        let first = before.is_none();
        let transition = step(before.as_ref(), input, &at);
        if first && (transition.forget || transition.work.is_none()) {
            return Some(transition);
        }
        if first {
            let mut entry = new_entry(uid, transition.state.clone());
            if let Input::ObservedOrphan { observed } = input {
                entry.observed = Arc::new((*observed).clone());
            }
            entries.insert(uid.to_owned(), entry);
        }
        let entry = entries.get_mut(uid)?;
        let changed = entry.state != transition.state;
        entry.state = transition.state.clone();
        if transition.cancel_running {
            std::mem::take(&mut entry.cancel).cancel();
        }
        if !matches!(input, Input::Outcome { .. } | Input::Started) {
            entry.wake.notify_one();
        }
        drop(entries);
        if changed || first {
            self.keep(uid);
        }
        if first {
            self.begin_worker(uid);
        }
        Some(transition)
    }

    /// Starts the worker of a UID that has an entry and no worker yet.
    pub fn begin_worker(self: &Arc<Self>, uid: &str) {
        if self.with(uid, |e| std::mem::replace(&mut e.worker, true)) != Some(false) {
            return;
        }
        let (agent, uid) = (Arc::clone(self), uid.to_owned());
        let context = self.context.clone();
        tokio::spawn(async move {
            let name = uid.clone();
            if let Err(error) = tokio::spawn(Box::pin(crate::worker::run(agent, uid))).await
                && error.is_panic()
            {
                // A pod whose worker is gone would stand still and nobody would say so.
                context.fail(format!("the worker of pod {name} has panicked"));
            }
        });
    }

    /// Nothing of the pod is left to do here: its callees drop it, its documents end. If the same UID was
    /// named anew meanwhile, it begins again once the runtime has nothing left of it.
    pub fn forget(self: &Arc<Self>, uid: &str) {
        let again = {
            let mut entries = lock(&self.entries);
            let Some(entry) = entries.remove(uid) else { return };
            let again =
                (entry.state.restart_requested && entry.state.desired).then_some(entry.wanted).flatten();
            // Under the lock of the entries, so that a UID is never without an entry and a place here.
            if let Some(wanted) = &again {
                lock(&self.named_anew).insert(uid.to_owned(), wanted.clone());
            }
            again.is_some()
        };
        self.release_names_of(uid);
        self.desired.forget(uid);
        self.documents.remove(&uid.to_owned());
        self.backoff().forget_pod(&uid.into());
        if let Some(store) = &self.store {
            store.remove(uid);
        }
        if again {
            let (agent, uid) = (Arc::clone(self), uid.to_owned());
            tokio::spawn(async move { crate::manager::begin_again(agent, uid).await });
        }
    }

    /// A UID that is to begin again: with this pod instead, or with `None` not at all. Whether it is one.
    pub fn rename_anew(&self, uid: &str, wanted: Option<Wanted>) -> bool {
        let mut anew = lock(&self.named_anew);
        if !anew.contains_key(uid) {
            return false;
        }
        match wanted {
            Some(wanted) => anew.insert(uid.to_owned(), wanted),
            None => anew.remove(uid),
        };
        true
    }

    /// Of the UIDs that are to begin again only those that a source still names.
    pub fn retain_anew(&self, named: impl Fn(&str) -> bool) {
        lock(&self.named_anew).retain(|uid, _| named(uid));
    }

    /// The pod that a UID is to begin again with, if it still is.
    pub fn take_anew(&self, uid: &str) -> Option<Wanted> {
        lock(&self.named_anew).remove(uid)
    }

    /// May this pod start now? Of static pods one per full name.
    pub fn may_start(&self, pod: &Pod) -> bool {
        !pod.is_static() || may_start(&pod.full_name(), &pod.uid(), &mut lock(&self.order))
    }

    /// The pod found running at the start of this process holds its name.
    pub fn adopt_name(&self, pod: &Pod) -> bool {
        !pod.is_static() || lock(&self.order).adopt(&pod.full_name(), &pod.uid())
    }

    /// The pod has ended; who waits for its name is woken.
    pub fn release_name(&self, pod: &Pod) {
        let next = lock(&self.order).release(&pod.full_name(), &pod.uid());
        if let Some(uid) = next {
            self.wake(uid.as_str());
        }
    }

    /// The UID is gone; whatever names it held or waited for are free.
    fn release_names_of(&self, uid: &str) {
        let woken = lock(&self.order).release_all(&uid.into());
        for uid in woken {
            self.wake(uid.as_str());
        }
    }

    /// What the runtime holds of UIDs that have no entry.
    pub fn loose(&self) -> MutexGuard<'_, BTreeMap<String, Observed>> {
        lock(&self.loose)
    }

    /// Something that no source names, or names no more, still runs under the name of this static pod.
    pub fn orphan_holds_name(&self, pod: &Pod) -> bool {
        let meta = &pod.metadata;
        let holds = |o: &Observed| {
            o.name == meta.name
                && o.namespace == meta.namespace
                && o.uid.as_str() != meta.uid
                && (o.anything_running() || o.any_sandbox_ready())
        };
        if !pod.is_static() {
            return false;
        }
        let loose = self.loose().values().any(holds);
        loose || lock(&self.entries).values().any(|e| e.wanted.is_none() && holds(&e.observed))
    }

    /// Wakes a worker.
    pub fn wake(&self, uid: &str) {
        self.with(uid, |entry| entry.wake.notify_one());
    }

    /// A read of the runtime. Older ones than what is known are dropped; the worker is woken when it shows
    /// something new. Whether the UID is known here.
    pub fn observed(&self, uid: &str, observed: Observed) -> bool {
        self.with(uid, |entry| {
            if observed.observed_unix_nanos < entry.observed.observed_unix_nanos {
                return;
            }
            let news = !same(&entry.observed, &observed);
            entry.observed = observed;
            if news {
                entry.wake.notify_one();
            }
        })
        .is_some()
    }

    /// Stores the record of a UID as it is now, if there is a store.
    pub fn keep(&self, uid: &str) {
        let Some(store) = &self.store else { return };
        // The store is locked before the entry is looked at, so that what is written last is newest.
        let result = store.put_latest(|| self.with(uid, |entry| record_of(uid, entry)));
        self.context
            .progress
            .condition("state folder", result.map_err(|e| keelson_service_kit::status::chain(&e)));
    }

    /// Notes a step of the pod's life for `ExplainPod`.
    pub fn note<T>(&self, uid: &str, note: impl FnOnce(&mut Ledger, &Moment) -> T) -> Option<T> {
        let at = self.moment();
        self.with(uid, |entry| note(&mut entry.ledger, &at))
    }
}

/// The object of a pod's events.
pub fn object_of(pod: &Pod) -> ObjectRef {
    ObjectRef::pod(&pod.metadata.namespace, &pod.metadata.name, pod.uid().as_str())
}

/// What is stored of an entry; the pod itself only once it is ending.
pub fn record_of(uid: &str, entry: &Entry) -> Record {
    let mut record = Record::new(uid, entry.state.clone(), (*entry.status).clone());
    if entry.state.phase != WorkerPhase::Sync
        && let Some(wanted) = &entry.wanted
    {
        record.pod = serde_json::from_slice(&wanted.raw).ok();
        record.source.clone_from(&wanted.source);
    }
    record
}

fn new_entry(uid: &str, state: WorkerState) -> Entry {
    Entry {
        state,
        wanted: None,
        observed: Arc::new(PodObservation { uid: uid.into(), ..PodObservation::default() }),
        status: Arc::default(),
        version: 0,
        ledger: Ledger::default(),
        reasons: BTreeMap::new(),
        admitted: false,
        worker: false,
        restored: false,
        refresh: false,
        rejected: false,
        wake: Arc::default(),
        cancel: CancellationToken::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keelson_config::{Config, ServiceName};
    use keelson_pod_sync_core::worker::UpdateKind;

    fn pod() -> Pod {
        let json = serde_json::json!({
            "metadata": {"name": "web", "namespace": "default", "uid": "u"},
            "spec": {"terminationGracePeriodSeconds": 5, "containers": [{"name": "main", "image": "i:1"}]},
        });
        serde_json::from_value(json).unwrap()
    }

    fn phase(agent: &Agent) -> WorkerPhase {
        agent.with("u", |e| e.state.phase).unwrap()
    }

    /// A pod that was removed while its containers were being started has not ended because the start is done.
    #[tokio::test]
    async fn the_outcome_of_a_start_says_nothing_about_the_end_that_was_asked_for_meanwhile() {
        let context = Context::detached(ServiceName::PodSync, Config::default());
        context.shutdown.cancel();
        let agent = Agent::new(context, None);
        let pod = pod();
        agent.apply("u", &Input::Update { kind: UpdateKind::Create, pod: &pod, observed: None });
        agent.apply("u", &Input::Started);
        agent.apply("u", &Input::Removed { pod: Some(&pod) });
        assert_eq!(phase(&agent), WorkerPhase::Terminating);
        agent.apply_outcome("u", WorkerPhase::Sync, SyncOutcome::Done, Some(&pod));
        assert_eq!(phase(&agent), WorkerPhase::Terminating);
        agent.apply_outcome("u", WorkerPhase::Terminating, SyncOutcome::Done, Some(&pod));
        assert_eq!(phase(&agent), WorkerPhase::Terminated);
    }
}
