//! One task owns the set of wanted pods, a slot per pod, and who is admitted; everybody else sends it commands.

use std::collections::BTreeMap;
use std::sync::Arc;

use keelson_resource_manager_core::admit::{Rejection, admit};
use keelson_resource_manager_core::desire::{Amounts, PodDesire, Want};
use keelson_resource_manager_core::eviction::order::Order;
use keelson_resource_manager_core::eviction::preempt::victims;
use keelson_resource_manager_core::layout::Qos;
use keelson_resource_manager_core::plan::reserves;
use keelson_resource_manager_core::pressure::{must_wait, refuse};
use keelson_service_kit::{CancellationToken, LoopHandle, now_unix_nanos};
use keelson_sync_callee::{News, Pods, Runtime};
use tokio::sync::{mpsc, oneshot, watch};

use crate::cgroup::{Found, Stock};
use crate::eviction::{Active, Orders};
use crate::metrics::CgroupMetrics;
use crate::view::{MachineState, Phase, TreeState, View};
use crate::worker::Worker;

/// Why a pod cannot be judged: a set was not complete yet.
pub(crate) const SET_NOT_COMPLETE: &str = "SetNotComplete";
/// Why a pod cannot be judged: one that was created before it could take its room, and is judged first.
pub(crate) const NOT_ITS_TURN: &str = "OlderPodsFirst";
/// Why a critical pod has to wait: others end to make room for it.
pub(crate) const PREEMPTING: &str = "Preempting";

/// Why a pod cannot be judged: there is no cgroup tree now.
pub(crate) const NO_TREE: &str = "CgroupsNotReady";

/// What the workers share.
#[derive(Debug)]
pub(crate) struct Env {
    pub(crate) tree: watch::Receiver<TreeState>,
    pub(crate) runtime: Runtime,
    pub(crate) metrics: CgroupMetrics,
    pub(crate) commands: mpsc::Sender<Command>,
}

/// May a pod run here?
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Yes, and its share is reserved.
    Admitted,
    /// No.
    Rejected(Rejection),
    /// That cannot be said now.
    NotYet { reason: &'static str, message: String },
}

/// What the manager is asked to do.
pub(crate) type Command = keelson_sync_callee::Command<PodDesire, View, Ask>;

/// What only this manager is asked.
#[derive(Debug)]
pub(crate) enum Ask {
    /// Somebody asks whether a pod may run.
    Admit { uid: String, reply: oneshot::Sender<Verdict> },
    /// A pod waits for what is not judged here: others may have its room and its turn.
    Defer { uid: String, reply: oneshot::Sender<()> },
    /// The tree is set up at last, and this is in it.
    TakeStock { stock: Stock },
    /// Somebody wants every pod with what is wanted of it.
    Active { reply: oneshot::Sender<BTreeMap<String, Active>> },
}

/// What is noted about a pod.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Note {
    /// The pod may run.
    pub(crate) admitted: bool,
    /// Its cgroup was there at the start: an earlier run of this service has admitted it.
    found: bool,
    /// It was turned away, or waits for what is not judged here.
    rejected: bool,
    /// Room is being made for it, and is nobody else's.
    claims: bool,
}

type Slot = keelson_sync_callee::Slot<PodDesire, View, Note>;

fn reserved(slot: &Slot) -> Option<&PodDesire> {
    slot.desire().filter(|desire| reserves(desire.want, slot.note.admitted || slot.note.claims))
}

/// How others hear of what the manager has done.
#[derive(Debug)]
pub(crate) struct Told {
    /// Every reservation is known: a set was complete and names each pod that was here at the start.
    pub(crate) known: watch::Sender<bool>,
    /// CPU requests of the admitted burstable pods, in millicores.
    pub(crate) burstable: watch::Sender<u64>,
    /// Grows when a pod was judged, named or has gone: who waits for a turn or for room asks again.
    pub(crate) judged: watch::Sender<u64>,
    /// Grows when a pod is finished.
    pub(crate) finished: watch::Sender<u64>,
    /// Pods that are to end to make room.
    pub(crate) preempt: mpsc::Sender<Vec<Order>>,
}

/// The owner of the set.
pub(crate) struct Manager {
    env: Arc<Env>,
    pods: Pods<PodDesire, View, Note>,
    /// Cgroups of which nobody has noted who has made them: they are of this agent's pods when those are named.
    unmarked: Found,
    machine: watch::Receiver<MachineState>,
    /// A set has been complete since the start, whether or not every source of pods was ready.
    set_complete: bool,
    told: Told,
    /// Pods that end already.
    orders: Orders,
}

impl Manager {
    /// Begins with what was found in the tree; each found pod has a worker that waits for a word about it.
    pub(crate) fn new(
        env: Arc<Env>,
        machine: watch::Receiver<MachineState>,
        told: Told,
        orders: Orders,
        stock: Stock,
    ) -> Self {
        let (pods, unmarked) = (Pods::default(), Found::new());
        let mut manager = Self { env, pods, unmarked, machine, set_complete: false, told, orders };
        manager.take_stock(stock);
        manager
    }

    /// Takes commands until the shutdown.
    pub(crate) async fn run(
        mut self,
        mut commands: mpsc::Receiver<Command>,
        shutdown: CancellationToken,
        handle: LoopHandle,
    ) {
        while let Some(command) = self.pods.next(&mut commands, &shutdown, &handle).await {
            self.take(command);
        }
    }

    fn take(&mut self, command: Command) {
        match self.pods.take(command) {
            Some(News::Named(desire)) => self.name(desire),
            Some(News::Complete) => self.set_complete = true,
            Some(News::Asked(Ask::Admit { uid, reply })) => {
                let _ = reply.send(self.admit(&uid));
            }
            Some(News::Asked(Ask::Defer { uid, reply })) => {
                self.defer(&uid);
                let _ = reply.send(());
            }
            Some(News::Asked(Ask::TakeStock { stock })) => self.take_stock(stock),
            Some(News::Asked(Ask::Active { reply })) => {
                let _ = reply.send(self.active());
            }
            Some(News::Gone(_)) => {
                self.told.finished.send_modify(|count| *count += 1);
                self.told.judged.send_modify(|count| *count += 1);
            }
            None => {}
        }
        let known = self.set_complete && self.unnamed() == 0;
        self.told.known.send_if_modified(|before| std::mem::replace(before, known) != known);
        self.weigh();
    }

    /// Every pod of which something is known.
    fn active(&self) -> BTreeMap<String, Active> {
        let active = |slot: &Slot| Active { desire: slot.desire().cloned(), admitted: slot.note.admitted };
        self.pods.slots().map(|(uid, slot)| (uid.to_owned(), active(slot))).collect()
    }

    fn name(&mut self, desire: PodDesire) {
        if !reserves(desire.want, true) {
            self.told.finished.send_modify(|count| *count += 1);
        }
        self.told.judged.send_modify(|count| *count += 1);
        let held = self.unmarked.remove(&desire.pod.uid);
        let note = &mut self.pods.slot_or_new(&desire.pod.uid).note;
        note.found |= held.is_some();
        note.admitted |= desire.adopted || note.found;
        self.pods.assign(desire, |orders| {
            let is_known = matches!(&*self.env.tree.borrow(), TreeState::Ready(_) | TreeState::Never(_));
            Worker::new(Arc::clone(&self.env), orders, is_known.then(|| held.unwrap_or_default())).run()
        });
    }

    /// Workers that run already have looked for themselves.
    fn take_stock(&mut self, stock: Stock) {
        let Stock { own, unmarked } = stock;
        if !unmarked.is_empty() {
            tracing::info!(
                pods = unmarked.len(),
                "found cgroups of pods that this agent has not made; those that it is not told of are left alone"
            );
        }
        let is_named =
            |(uid, _): &(String, _)| self.pods.slot(uid).is_some_and(|slot| slot.desire().is_some());
        let (named, unmarked): (Found, Found) = unmarked.into_iter().partition(is_named);
        self.unmarked = unmarked;
        for (uid, held) in own.into_iter().chain(named) {
            let slot = self.pods.slot_or_new(&uid);
            slot.note.found = true;
            if slot.desire().is_some() {
                slot.note.admitted = true;
                slot.assign_again();
                continue;
            }
            let show = |view: &mut View| {
                view.phase = Phase::Pending;
                view.message = "its cgroup was found at the start, it was not named since".to_owned();
            };
            let worker = |orders| Worker::new(Arc::clone(&self.env), orders, Some(held)).run();
            self.pods.find(uid, show, worker);
        }
    }

    fn admit(&mut self, uid: &str) -> Verdict {
        match &*self.env.tree.borrow() {
            TreeState::Ready(_) => {}
            TreeState::NotYet(message) => {
                return Verdict::NotYet { reason: NO_TREE, message: message.clone() };
            }
            TreeState::Never(message) => {
                return Verdict::NotYet { reason: "CgroupDriverNotSupported", message: message.clone() };
            }
        }
        let Some((slot, desire)) = self.pods.slot(uid).and_then(|slot| Some((slot, slot.desire()?))) else {
            let message = format!("pod {uid} is not in the set that pod-sync has sent");
            return Verdict::NotYet { reason: "PodNotNamed", message };
        };
        if slot.note.admitted {
            return Verdict::Admitted;
        }
        if !self.set_complete {
            let message = "pod-sync has not completed its set since resource-manager started".to_owned();
            return Verdict::NotYet { reason: SET_NOT_COMPLETE, message };
        }
        if let unnamed @ 1.. = self.unnamed() {
            let message = format!(
                "pods that run here and that no source has named yet: {unnamed}; what they need is not known before that"
            );
            return Verdict::NotYet { reason: SET_NOT_COMPLETE, message };
        }
        let verdict = self.judge(desire);
        if let Some(slot) = self.pods.slot_mut(uid) {
            match &verdict {
                Verdict::Admitted => {
                    slot.note = Note { admitted: true, claims: false, ..slot.note };
                    // Its cgroup is made while the caller goes on.
                    slot.assign_again();
                }
                Verdict::Rejected(_) => slot.note = Note { rejected: true, claims: false, ..slot.note },
                Verdict::NotYet { reason, .. } => slot.note.claims |= *reason == PREEMPTING,
            }
        }
        if !matches!(verdict, Verdict::NotYet { .. }) {
            self.told.judged.send_modify(|count| *count += 1);
        }
        verdict
    }

    /// A pod that runs already keeps its room.
    fn defer(&mut self, uid: &str) {
        let Some(slot) = self.pods.slot_mut(uid) else { return };
        if slot.desire().is_none_or(|desire| desire.adopted || desire.want != Want::Run) {
            return;
        }
        slot.note = Note { rejected: true, ..Note::default() };
        slot.assign_again();
        self.told.judged.send_modify(|count| *count += 1);
    }

    /// Whether a pod that is named, and not admitted, may run: in the order of pod-lifecycle.md §15.
    fn judge(&self, desire: &PodDesire) -> Verdict {
        let machine = self.machine.borrow();
        if let Err(rejection) = refuse(&machine.conditions, desire) {
            return Verdict::Rejected(rejection);
        }
        let others = || self.pods.slots().filter(|(other, _)| *other != desire.pod.uid);
        let admitted: Vec<&PodDesire> = others().filter_map(|(_, slot)| reserved(slot)).collect();
        let requests = admitted.iter().map(|other| &other.requests);
        match admit(&machine.allocatable, requests, &desire.requests, desire.adopted) {
            Ok(()) => {}
            Err(rejection) => return self.make_room(&machine.allocatable, &admitted, desire, rejection),
        }
        let is_unjudged = |slot: &Slot| !slot.note.admitted && !slot.note.rejected && !slot.note.claims;
        let unjudged: Vec<&PodDesire> = others()
            .filter(|(_, slot)| is_unjudged(slot))
            .filter_map(|(_, slot)| slot.desire())
            .filter(|other| other.want == Want::Run)
            .collect();
        if must_wait(&machine.allocatable, &admitted, &unjudged, desire) {
            let message =
                "a pod that was created before it is judged first, and may take its room".to_owned();
            return Verdict::NotYet { reason: NOT_ITS_TURN, message };
        }
        Verdict::Admitted
    }

    /// A critical pod that does not fit has others end, when that helps.
    fn make_room(
        &self,
        allocatable: &Amounts,
        admitted: &[&PodDesire],
        desire: &PodDesire,
        rejection: Rejection,
    ) -> Verdict {
        let ends = |other: &PodDesire| other.want != Want::Run || self.orders.get(&other.pod.uid).is_some();
        let Some(chosen) = victims(allocatable, admitted, desire, ends) else {
            return Verdict::Rejected(rejection);
        };
        let now = now_unix_nanos();
        let orders: Vec<Order> = chosen.iter().map(|victim| Order::for_preemption(victim, now)).collect();
        if !orders.is_empty() && self.told.preempt.try_send(orders).is_err() {
            // The next question asks for them again.
            tracing::warn!(
                uid = desire.pod.uid,
                "too many pods are being ended at once to make room for one more"
            );
        }
        let message = format!("room is being made for it: {}", rejection.message);
        Verdict::NotYet { reason: PREEMPTING, message }
    }

    /// How many pods were here at the start and are not named yet: neither by a set nor, once all sources are
    /// ready, as ones to be forgotten.
    fn unnamed(&self) -> usize {
        self.pods.slots().filter(|(_, slot)| slot.note.found && slot.desire().is_none()).count()
    }

    /// Tells the tree loop what the burstable pods request together.
    fn weigh(&self) {
        let milli = self
            .pods
            .slots()
            .filter_map(|(_, slot)| reserved(slot))
            .filter(|desire| desire.qos == Qos::Burstable)
            .filter_map(|desire| u64::try_from(*desire.requests.get("cpu")?).ok())
            .fold(0_u64, u64::saturating_add);
        self.told.burstable.send_if_modified(|old| std::mem::replace(old, milli) != milli);
    }
}
