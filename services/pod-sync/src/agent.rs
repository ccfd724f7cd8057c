//! The state of pod-sync: one entry per UID, and the workers that carry out what the core decides.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_kube_model::{Node, Pod};
use keelson_pod_sync_core::Moment;
use keelson_pod_sync_core::admission::Denial;
use keelson_pod_sync_core::backoff::BackoffBook;
use keelson_pod_sync_core::explain::Ledger;
use keelson_pod_sync_core::measure::Operation;
use keelson_pod_sync_core::ordering::{StartBook, may_start};
use keelson_pod_sync_core::worker::{Input, SyncOutcome, Transition, UpdateKind, WorkerPhase, step};
use keelson_proto::keelson::resource_manager::v1::Machine;
use keelson_service_kit::{Context, ObjectRef, WatchHub, now_unix_nanos};
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

use crate::admission::Host;
use crate::clients::Clients;
use crate::desired::Desired;
use crate::desires;
use crate::documents::Document;
pub use crate::entry::{Entry, RuntimeView, Wanted};
use crate::metrics::Metrics;
use crate::observed::{Observed, is_older, same};
use crate::store::{Record, Store};

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
    /// Probes at the same time.
    pub probing: crate::probes::Probing,
    /// The runtime.
    pub runtime: watch::Sender<RuntimeView>,
    /// The machine as resource-manager tells it; empty until it has.
    pub machine: watch::Sender<Arc<Machine>>,
    /// The Node object; `None` until pod-config has told it.
    pub node: watch::Sender<Option<Arc<Node>>>,
    /// What of the machine does not change.
    pub host: Host,
    /// What is counted.
    pub metrics: Metrics,
    /// What resource-manager has ordered to end.
    pub orders: crate::evictions::Orders,
    /// When this process began.
    pub started_unix_nanos: i64,
    store: Option<Store>,
    /// No lock is held over an await, and never two of these at once but `entries` before another, and `loose` before `holders`.
    entries: Mutex<BTreeMap<String, Entry>>,
    order: Mutex<StartBook>,
    loose: Mutex<BTreeMap<String, Observed>>,
    /// Of those, pods that hold the ports of the node that they were known to hold.
    holders: Mutex<BTreeMap<String, Arc<Pod>>>,
    backoff: Mutex<BackoffBook>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Agent {
    /// An agent that knows no pod yet.
    pub fn new(context: Context, store: Option<Store>) -> Arc<Self> {
        let max_backoff =
            i64::try_from(context.config.pods.max_restart_backoff_ms / 1000).unwrap_or(i64::MAX);
        let gate = Semaphore::new(context.config.runtime.start_parallelism.max(1) as usize);
        Arc::new(Self {
            clients: Clients::new(&context),
            desired: Desired::default(),
            documents: WatchHub::incomplete(),
            gate,
            probing: crate::probes::Probing::default(),
            runtime: watch::Sender::new(RuntimeView::default()),
            machine: watch::Sender::new(Arc::default()),
            node: watch::Sender::new(None),
            host: Host::read(&context.config.users),
            metrics: Metrics::register(&context.metrics),
            orders: crate::evictions::Orders::default(),
            started_unix_nanos: now_unix_nanos(),
            store,
            entries: Mutex::default(),
            order: Mutex::default(),
            loose: Mutex::default(),
            holders: Mutex::default(),
            backoff: Mutex::new(BackoffBook::new(max_backoff)),
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

    /// Looks at one entry if it is still this life of the UID.
    pub fn with_life<T>(&self, uid: &str, life: u64, look: impl FnOnce(&mut Entry) -> T) -> Option<T> {
        lock(&self.entries).get_mut(uid).filter(|e| e.life == life).map(look)
    }

    /// Looks at every entry.
    pub fn each(&self, look: impl FnMut(&Entry)) {
        lock(&self.entries).values().for_each(look);
    }

    /// An entry as a test wants it.
    #[cfg(test)]
    pub fn insert(&self, uid: &str, entry: Entry) {
        lock(&self.entries).insert(uid.to_owned(), entry);
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
        let (uid, at) = (record.uid.clone(), self.moment());
        for stored in &record.backoffs {
            self.backoff().restore(stored.key(&uid), stored.entry, &at);
        }
        lock(&self.entries).insert(uid, Entry::restored(record));
    }

    /// Something happened to a UID: asks the core, and does what it says. A worker is begun for a UID that
    /// has none.
    pub fn apply(self: &Arc<Self>, uid: &str, input: &Input<'_>) -> Option<Transition> {
        self.apply_in(uid, input, None, |_| {})
    }

    /// A source names the pod: the core is asked, and the entry holds the pod, what was observed of it, and
    /// what the callees are to hold, all at once.
    pub fn named(
        self: &Arc<Self>,
        wanted: &Wanted,
        kind: UpdateKind,
        observed: Option<Observed>,
    ) -> Option<Transition> {
        let pod = &wanted.pod;
        let input = Input::Update { kind, pod, observed: observed.as_deref() };
        self.apply_in(pod.metadata.uid.as_str(), &input, None, |entry| {
            entry.want(wanted.clone());
            (entry.restored, entry.aside) = (false, false);
            if let Some(observed) = observed.clone() {
                // What an earlier process began may not be in it yet.
                entry.freshness.ask();
                entry.observed = observed;
            }
            desires::want(self, entry);
        })
    }

    /// What a turn of this life came to. A turn that was begun in another phase than the UID stands in now says
    /// nothing about this one: it counts as cancelled.
    pub fn apply_outcome(
        self: &Arc<Self>,
        uid: &str,
        (life, begun_in): (u64, WorkerPhase),
        outcome: SyncOutcome,
        pod: Option<&Pod>,
    ) -> Option<Transition> {
        self.apply_in(uid, &Input::Outcome { outcome, pod }, Some((life, begun_in)), |_| {})
    }

    fn apply_in(
        self: &Arc<Self>,
        uid: &str,
        input: &Input<'_>,
        turn: Option<(u64, WorkerPhase)>,
        also: impl FnOnce(&mut Entry),
    ) -> Option<Transition> {
        let at = self.moment();
        let mut entries = lock(&self.entries);
        let before = entries.get(uid).map(|e| e.state.clone());
        if turn.is_some_and(|(life, _)| entries.get(uid).is_none_or(|e| e.life != life)) {
            return None;
        }
        let outdated = Input::Outcome { outcome: SyncOutcome::Cancelled, pod: None };
        let moved_on = turn.is_some_and(|(_, phase)| before.as_ref().is_some_and(|b| b.phase != phase));
        let input = if moved_on { &outdated } else { input };
        let first = before.is_none();
        let transition = step(before.as_ref(), input, &at);
        if first && (transition.forget || transition.work.is_none()) {
            return Some(transition);
        }
        if first {
            let mut entry = Entry::new(uid, transition.state.clone());
            if let Input::ObservedOrphan { observed } = input {
                entry.observed = Arc::new((*observed).clone());
                entry.holder = lock(&self.holders).remove(uid);
            }
            entries.insert(uid.to_owned(), entry);
        }
        let entry = entries.get_mut(uid)?;
        let changed = entry.state != transition.state;
        entry.state = transition.state.clone();
        if let Some(told) = Operation::of(input).filter(|_| transition.work.is_some()) {
            entry.news.came(told, Instant::now());
        }
        if transition.cancel_running {
            std::mem::take(&mut entry.cancel).cancel();
            entry.aside = false;
        }
        also(entry);
        if !matches!(input, Input::Outcome { .. } | Input::Started) {
            entry.wake.notify_one();
        }
        let freed = changed && matches!(entry.state.phase, WorkerPhase::Terminated | WorkerPhase::Finished);
        drop(entries);
        if freed {
            self.wake_held();
        }
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
        let first = self.with(uid, |e| (!std::mem::replace(&mut e.worker, true)).then_some(e.life));
        if let Some(Some(life)) = first {
            tokio::spawn(crate::aside::supervise(Arc::clone(self), uid.to_owned(), life, crate::worker::run));
        }
    }

    /// Nothing of this life of the UID is left to do here: its callees drop it, its documents end. If the UID
    /// was named anew meanwhile, it begins again once the runtime has nothing left of it.
    pub fn forget(self: &Arc<Self>, uid: &str, life: u64) {
        let (woken, again) = {
            let mut entries = lock(&self.entries);
            if entries.get(uid).is_none_or(|e| e.life != life) {
                return;
            }
            let Some(entry) = entries.remove(uid) else { return };
            entry.cancel.cancel();
            entry.wake.notify_one();
            // All under the lock of the entries: who names the UID anew finds all of the old life or nothing.
            self.desired.forget(uid);
            self.documents.remove(&uid.to_owned());
            lock(&self.backoff).forget_pod(&uid.into());
            let woken = lock(&self.order).release_all(&uid.into());
            if entry.leaves_something() || entry.freshness.due().is_some() {
                lock(&self.loose).entry(uid.to_owned()).or_insert_with(|| Arc::clone(&entry.observed));
            }
            let anew = entry.state.restart_requested && entry.state.desired;
            let wanted = entry.wanted.filter(|_| anew);
            let again = wanted.is_some();
            if let Some(wanted) = wanted {
                entries.insert(uid.to_owned(), Entry::waiting(uid, wanted, &self.moment()));
            }
            (woken, again)
        };
        for uid in woken {
            self.wake(uid.as_str());
        }
        self.wake_held();
        if again {
            self.show_waiting(uid);
        } else if let Some(store) = &self.store {
            store.remove_unless(uid, || self.with(uid, |_| ()).is_some());
        }
    }

    /// A source names a pod of whose UID an earlier life has left something in the runtime, which would be taken
    /// for its own: it becomes an entry that waits for the removal, or replaces the pod that waits already.
    /// False: nothing is left, or the earlier life has not come to its end here.
    pub fn waits_for_removal(self: &Arc<Self>, wanted: &Wanted) -> bool {
        let uid = wanted.pod.metadata.uid.as_str();
        {
            let mut entries = lock(&self.entries);
            match entries.get_mut(uid) {
                Some(entry) if entry.again => entry.wanted = Some(wanted.clone()),
                Some(_) => return false,
                None => {
                    let live = |o: &Observed| o.anything_running() || o.any_sandbox_ready();
                    // It stays there: the pod may be removed and named once more before it is gone.
                    if lock(&self.loose).get(uid).is_none_or(live) {
                        return false;
                    }
                    entries.insert(uid.to_owned(), Entry::waiting(uid, wanted.clone(), &self.moment()));
                }
            }
        }
        self.show_waiting(uid);
        true
    }

    fn show_waiting(self: &Arc<Self>, uid: &str) {
        self.keep(uid);
        crate::worker::publish_first(self, uid);
        self.begin_worker(uid);
    }

    /// The runtime has nothing left of the earlier life of a UID that waits for that: it begins. Whether it does.
    pub fn begin_again(self: &Arc<Self>, uid: &str, life: u64) -> bool {
        let at = self.moment();
        let begun = self.with_life(uid, life, |entry| {
            let wanted = entry.wanted.clone().filter(|_| std::mem::take(&mut entry.again))?;
            let input = Input::Update { kind: UpdateKind::Create, pod: &wanted.pod, observed: None };
            let transition = step(None, &input, &at);
            entry.state = transition.state;
            entry.ledger = Ledger::default();
            (entry.stopped, entry.released) = (false, false);
            desires::want(self, entry);
            lock(&self.loose).remove(uid);
            if transition.work.is_some() {
                entry.news.came(Operation::Create, Instant::now());
                self.metrics.pods.restarted(&wanted.pod);
            }
            Some(transition.work.is_some())
        });
        match begun.flatten() {
            None => return false,
            Some(false) => {
                self.forget(uid, life);
                return false;
            }
            Some(true) => {}
        }
        self.keep(uid);
        crate::worker::publish_first(self, uid);
        true
    }

    /// Something of a UID that waits for the removal of its earlier life came to life after its end: it is ended
    /// as an orphan is, and then the removal is awaited anew.
    pub fn end_first(self: &Arc<Self>, uid: &str, life: u64, left: Observed) {
        let at = self.moment();
        self.with_life(uid, life, |entry| {
            if !std::mem::take(&mut entry.again) {
                return;
            }
            let mut state = step(None, &Input::ObservedOrphan { observed: &left }, &at).state;
            (state.restart_requested, state.desired) = (true, true);
            (entry.state, entry.observed) = (state, left);
        });
        self.keep(uid);
    }

    /// May this pod start now? One per full name, where the source does not see to that.
    pub fn may_start(&self, pod: &Pod) -> bool {
        !pod.starts_in_turn() || may_start(&pod.full_name(), &pod.uid(), &mut lock(&self.order))
    }

    /// The pod found running at the start of this process holds its name.
    pub fn adopt_name(&self, pod: &Pod) -> bool {
        !pod.starts_in_turn() || lock(&self.order).adopt(&pod.full_name(), &pod.uid())
    }

    /// The pod has ended; who waits for its name is woken.
    pub fn release_name(&self, pod: &Pod) {
        let next = lock(&self.order).release(&pod.full_name(), &pod.uid());
        if let Some(uid) = next {
            self.wake(uid.as_str());
        }
    }

    /// Judges a pod against those that have their place on the node, and gives it none.
    pub fn look_for_place(
        &self,
        uid: &str,
        judge: impl FnOnce(&mut dyn Iterator<Item = &Pod>) -> Option<Denial>,
    ) -> Option<Denial> {
        let entries = lock(&self.entries);
        judge(&mut self.placed(&entries, uid).iter().map(|pod| &**pod))
    }

    /// The pods that have their place on the node beside `uid`.
    fn placed(&self, entries: &BTreeMap<String, Entry>, uid: &str) -> Vec<Arc<Pod>> {
        let placed = entries.iter().filter(|(other, entry)| *other != uid && entry.has_its_place());
        let mut pods: Vec<Arc<Pod>> = placed.filter_map(|(_, entry)| entry.as_judged()).collect();
        let loose = lock(&self.loose);
        let live =
            |uid: &String| loose.get(uid).is_some_and(|o| o.anything_running() || o.any_sandbox_ready());
        pods.extend(lock(&self.holders).iter().filter(|(uid, _)| live(uid)).map(|(_, pod)| Arc::clone(pod)));
        pods
    }

    /// What is left of a pod that left its source while this service was down: an orphan, which is ended. It holds its ports of
    /// the node until then.
    pub fn forget_as_orphan(self: &Arc<Self>, uid: &str, life: u64, observed: Observed) {
        if let Some(holder) = self.with_life(uid, life, |entry| entry.holder.take()).flatten() {
            lock(&self.holders).insert(uid.to_owned(), holder);
        }
        self.forget(uid, life);
        lock(&self.loose).insert(uid.to_owned(), observed);
    }

    /// Judges a pod against those that have their place on the node, and gives it its own unless it is denied: both
    /// at once, so that of two pods that want the same only one gets it.
    pub fn take_place(
        &self,
        uid: &str,
        pod: &Pod,
        judge: impl FnOnce(&mut dyn Iterator<Item = &Pod>) -> Option<Denial>,
    ) -> Option<Denial> {
        let mut entries = lock(&self.entries);
        let denial = judge(&mut self.placed(&entries, uid).iter().map(|pod| &**pod));
        if denial.is_none()
            && let Some(entry) = entries.get_mut(uid)
        {
            entry.admit(pod);
            if entry.resize_refused {
                // What its source asked for meanwhile was passed on.
                desires::want(self, entry);
            }
        }
        denial
    }

    /// What the runtime holds of UIDs that have no entry.
    pub fn loose(&self) -> MutexGuard<'_, BTreeMap<String, Observed>> {
        lock(&self.loose)
    }

    /// Something that no source names, or names no more, still runs under the name of this pod.
    pub fn orphan_holds_name(&self, pod: &Pod) -> bool {
        let meta = &pod.metadata;
        let holds = |o: &Observed| {
            o.name == meta.name
                && o.namespace == meta.namespace
                && o.uid.as_str() != meta.uid
                && (o.anything_running() || o.any_sandbox_ready())
        };
        if !pod.starts_in_turn() {
            return false;
        }
        let loose = self.loose().values().any(holds);
        loose || lock(&self.entries).values().any(|e| e.wanted.is_none() && holds(&e.observed))
    }

    /// What a pod had on the node is free: whoever waits for admission asks again.
    fn wake_held(&self) {
        lock(&self.entries).values().filter(|e| e.held.is_some()).for_each(|e| e.wake.notify_one());
    }

    /// Wakes a worker.
    pub fn wake(&self, uid: &str) {
        self.with(uid, |entry| entry.wake.notify_one());
    }

    /// A read of the runtime. Older ones than what is known are dropped; the worker is woken when it shows
    /// something new. Whether the UID is known here.
    pub fn observed(&self, uid: &str, observed: Observed) -> bool {
        self.with(uid, |entry| {
            if entry.again {
                // It is of the earlier life; the worker looks whether anything of that is left.
                entry.wake.notify_one();
                return;
            }
            if is_older(&observed, &entry.observed) {
                return;
            }
            let news = !same(&entry.observed, &observed);
            entry.observed = observed;
            entry.gone = false;
            if news {
                entry.wake.notify_one();
                entry.probes.wake();
            }
        })
        .is_some()
    }

    /// Stores the record of a UID as it is now, if there is a store.
    pub fn keep(&self, uid: &str) {
        let Some(store) = &self.store else { return };
        // The store is locked before the entry is looked at, so that what is written last is newest.
        let result = store.put_latest(|| self.with(uid, |entry| entry.record(uid, &lock(&self.backoff))));
        self.context
            .progress
            .condition("state folder", result.map_err(|e| keelson_service_kit::status::chain(&e)));
    }

    /// Stores the record of a UID if one of its back-offs was advanced since it was stored last.
    pub fn keep_backoff(&self, uid: &str) {
        let last = self.backoff().last_advanced_unix_nanos(&uid.into());
        if self.with(uid, |entry| entry.kept_advance != last) == Some(true) {
            self.keep(uid);
        }
    }

    /// Ends the back-offs of a UID, because a person asked to try now.
    pub fn retry(&self, uid: &str) {
        self.backoff().forget_pod(&uid.into());
        self.keep_backoff(uid);
        self.with(uid, |entry| {
            entry.aside = false;
            entry.wake.notify_one();
        });
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

#[cfg(test)]
mod tests;
