//! One task owns the set of wanted pods, a slot per pod, and who is admitted; everybody else sends it commands.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use keelson_resource_manager_core::admit::{Rejection, admit};
use keelson_resource_manager_core::desire::{PodDesire, PodRef};
use keelson_resource_manager_core::layout::{CgroupPath, Qos};
use keelson_resource_manager_core::plan::reserves;
use keelson_resource_manager_core::set::{DesiredSet, StreamId};
use keelson_service_kit::{CancellationToken, LoopHandle};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use crate::metrics::CgroupMetrics;
use crate::runtime::Runtime;
use crate::view::{MachineState, Phase, TreeState, View};
use crate::worker::{Assignment, Worker};

/// Commands that may wait; a sender of more waits itself.
const QUEUE: usize = 256;

/// Why a pod cannot be judged: a set was not complete yet.
pub(crate) const SET_NOT_COMPLETE: &str = "SetNotComplete";

/// The pods that have cgroups, and where.
pub(crate) type Found = BTreeMap<String, BTreeSet<CgroupPath>>;

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
#[derive(Debug)]
pub(crate) enum Command {
    /// A `Sync` stream begins; the token is cancelled when a later one takes over.
    Open { taken_over: CancellationToken, reply: oneshot::Sender<StreamId> },
    /// The set names a pod.
    Name { stream: StreamId, desire: PodDesire },
    /// The sender no longer knows a pod.
    Unname { stream: StreamId, uid: String },
    /// The set is complete.
    Complete { stream: StreamId, sources_ready: bool, reply: oneshot::Sender<()> },
    /// Somebody waits for a pod.
    Look { uid: String, reply: oneshot::Sender<watch::Receiver<View>> },
    /// Somebody asks whether a pod may run.
    Admit { uid: String, reply: oneshot::Sender<Verdict> },
    /// The tree is set up at last, and this is in it.
    TakeStock { found: Found },
    /// A worker has nothing left of the pod, for the assignment of this number.
    Gone { uid: String, number: u64 },
}

/// Makes the channel on which commands reach the manager.
pub(crate) fn channel() -> (mpsc::Sender<Command>, mpsc::Receiver<Command>) {
    mpsc::channel(QUEUE)
}

struct Slot {
    assignment: watch::Sender<Option<Assignment>>,
    view: watch::Sender<View>,
    number: u64,
    desire: Option<Arc<PodDesire>>,
    /// The pod may run.
    admitted: bool,
    /// Its cgroup was there at the start: an earlier run of this service has admitted it.
    found: bool,
    /// A worker runs for it.
    working: bool,
    /// Nobody wants to hear of the pod any more once it is gone.
    swept: bool,
}

impl Slot {
    fn new() -> Self {
        Self {
            assignment: watch::Sender::new(None),
            view: watch::Sender::default(),
            number: 0,
            desire: None,
            admitted: false,
            found: false,
            working: false,
            swept: false,
        }
    }

    fn reserved(&self) -> Option<&PodDesire> {
        self.desire.as_deref().filter(|desire| reserves(desire.want, self.admitted))
    }
}

/// The owner of the set.
pub(crate) struct Manager {
    env: Arc<Env>,
    set: DesiredSet<()>,
    slots: BTreeMap<String, Slot>,
    workers: JoinSet<()>,
    taken_over: CancellationToken,
    machine: watch::Receiver<MachineState>,
    /// A set has been complete since the start: every reservation is known.
    complete: watch::Sender<bool>,
    /// CPU requests of the admitted burstable pods, in millicores.
    burstable: watch::Sender<u64>,
}

impl Manager {
    /// Begins with what was found in the tree; each found pod has a worker that waits for a word about it.
    pub(crate) fn new(
        env: Arc<Env>,
        machine: watch::Receiver<MachineState>,
        complete: watch::Sender<bool>,
        burstable: watch::Sender<u64>,
        found: Found,
    ) -> Self {
        let mut manager = Self {
            env,
            set: DesiredSet::default(),
            slots: BTreeMap::new(),
            workers: JoinSet::new(),
            taken_over: CancellationToken::new(),
            machine,
            complete,
            burstable,
        };
        manager.take_stock(found);
        manager
    }

    /// Takes commands until the shutdown.
    pub(crate) async fn run(
        mut self,
        mut commands: mpsc::Receiver<Command>,
        shutdown: CancellationToken,
        handle: LoopHandle,
    ) {
        loop {
            handle.tick();
            // Cancel-safe: recv and join_next take something only when they return it; the others hold nothing.
            tokio::select! {
                () = shutdown.cancelled() => return,
                command = commands.recv() => match command {
                    Some(command) => self.take(command),
                    None => return,
                },
                Some(end) = self.workers.join_next() => if let Err(error) = end
                    && let Ok(panic) = error.try_into_panic()
                {
                    // A pod without a worker would hang: the process ends, and the next one adopts.
                    std::panic::resume_unwind(panic);
                },
                () = tokio::time::sleep(LoopHandle::HEARTBEAT) => self.forget_lookers(),
            }
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Open { taken_over, reply } => {
                self.taken_over.cancel();
                self.taken_over = taken_over;
                let stream = self.set.open();
                for slot in self.slots.values() {
                    slot.view.send_modify(|view| view.named = None);
                }
                let _ = reply.send(stream);
            }
            Command::Name { stream, desire } => self.name(stream, desire),
            Command::Unname { stream, uid } => {
                if self.set.unname(stream, &uid) {
                    self.sweep(&uid);
                } else if let Some(slot) = self.slots.get(&uid).filter(|_| self.set.is_latest(stream)) {
                    slot.view.send_modify(|view| view.named = None);
                }
            }
            Command::Complete { stream, sources_ready, reply } => {
                let held = self.slots.iter().filter(|(_, s)| s.working).map(|(uid, _)| uid.as_str());
                for uid in self.set.complete(stream, sources_ready, held) {
                    self.sweep(&uid);
                }
                if self.set.is_latest(stream) {
                    self.complete.send_if_modified(|complete| !std::mem::replace(complete, true));
                }
                let _ = reply.send(());
            }
            Command::Look { uid, reply } => {
                let slot = self.slots.entry(uid).or_insert_with(Slot::new);
                let _ = reply.send(slot.view.subscribe());
            }
            Command::Admit { uid, reply } => {
                let _ = reply.send(self.admit(&uid));
            }
            Command::TakeStock { found } => self.take_stock(found),
            Command::Gone { uid, number } => self.gone(&uid, number),
        }
        self.weigh();
    }

    fn name(&mut self, stream: StreamId, desire: PodDesire) {
        let uid = desire.pod.uid.clone();
        if !self.set.name(stream, &uid, ()) {
            return;
        }
        let slot = self.slots.entry(uid.clone()).or_insert_with(Slot::new);
        slot.swept = false;
        slot.admitted |= desire.adopted || slot.found;
        slot.view.send_modify(|view| {
            view.named = Some((desire.revision, desire.want));
            if view.phase == Phase::Unknown {
                view.phase = Phase::Pending;
            }
        });
        self.assign(&uid, Arc::new(desire));
    }

    /// The set does not name the pod: nothing of it is to remain here.
    fn sweep(&mut self, uid: &str) {
        let Some(slot) = self.slots.get_mut(uid) else { return };
        slot.view.send_modify(|view| view.named = None);
        if !slot.working {
            return;
        }
        slot.swept = true;
        let unnamed = PodRef { uid: uid.to_owned(), ..PodRef::default() };
        let pod = slot.desire.as_ref().map_or(unnamed, |desire| desire.pod.clone());
        tracing::info!(uid, pod = pod.name, namespace = pod.namespace, "the pod is no longer wanted");
        self.assign(uid, Arc::new(PodDesire::forget(pod)));
    }

    fn assign(&mut self, uid: &str, desire: Arc<PodDesire>) {
        let Some(slot) = self.slots.get_mut(uid) else { return };
        slot.number += 1;
        slot.desire = Some(Arc::clone(&desire));
        let assignment = Assignment { number: slot.number, desire, admitted: slot.admitted };
        slot.assignment.send_replace(Some(assignment));
        if !slot.working {
            let nothing = matches!(&*self.env.tree.borrow(), TreeState::Ready(_) | TreeState::Never(_));
            self.start_worker(uid, nothing.then(BTreeSet::new));
        }
    }

    /// `held` is none when nobody knows yet what is in the tree.
    fn start_worker(&mut self, uid: &str, held: Option<BTreeSet<CgroupPath>>) {
        let Some(slot) = self.slots.get_mut(uid) else { return };
        slot.working = true;
        let worker =
            Worker::new(Arc::clone(&self.env), slot.assignment.subscribe(), slot.view.clone(), held, uid);
        self.workers.spawn(worker.run());
    }

    /// Workers that run already have looked for themselves.
    fn take_stock(&mut self, found: Found) {
        for (uid, held) in found {
            let slot = self.slots.entry(uid.clone()).or_insert_with(Slot::new);
            slot.found = true;
            if let Some(desire) = slot.desire.clone() {
                slot.admitted = true;
                self.assign(&uid, desire);
                continue;
            }
            slot.view.send_modify(|view| {
                view.phase = Phase::Pending;
                view.message = "its cgroup was found at the start, it was not named since".to_owned();
            });
            self.start_worker(&uid, Some(held));
            if self.set.sweeps(&uid) {
                self.sweep(&uid);
            }
        }
    }

    fn admit(&mut self, uid: &str) -> Verdict {
        match &*self.env.tree.borrow() {
            TreeState::Ready(_) => {}
            TreeState::NotYet(message) => {
                return Verdict::NotYet { reason: "CgroupsNotReady", message: message.clone() };
            }
            TreeState::Never(message) => {
                return Verdict::NotYet { reason: "CgroupDriverNotSupported", message: message.clone() };
            }
        }
        let Some((slot, desire)) = self.slots.get(uid).and_then(|slot| Some((slot, slot.desire.clone()?)))
        else {
            let message = format!("pod {uid} is not in the set that pod-sync has sent");
            return Verdict::NotYet { reason: "PodNotNamed", message };
        };
        if slot.admitted {
            return Verdict::Admitted;
        }
        if !*self.complete.borrow() {
            let message = "pod-sync has not completed its set since resource-manager started".to_owned();
            return Verdict::NotYet { reason: SET_NOT_COMPLETE, message };
        }
        let others =
            self.slots.iter().filter(|(other, _)| *other != uid).filter_map(|(_, slot)| slot.reserved());
        let verdict = admit(
            &self.machine.borrow().allocatable,
            others.map(|other| &other.requests),
            &desire.requests,
            desire.adopted,
        );
        match verdict {
            Ok(()) => {
                if let Some(slot) = self.slots.get_mut(uid) {
                    slot.admitted = true;
                }
                // Its cgroup is made while the caller goes on.
                self.assign(uid, desire);
                Verdict::Admitted
            }
            Err(rejection) => Verdict::Rejected(rejection),
        }
    }

    fn gone(&mut self, uid: &str, number: u64) {
        let Some(slot) = self.slots.get_mut(uid).filter(|slot| slot.number == number) else { return };
        slot.admitted = false;
        slot.found = false;
        if slot.swept {
            // The worker ends when its assignment is dropped.
            self.slots.remove(uid);
        }
    }

    /// Slots that were made only because somebody asked.
    fn forget_lookers(&mut self) {
        self.slots.retain(|_, slot| slot.working || slot.view.receiver_count() > 0);
    }

    /// Tells the tree loop what the burstable pods request together.
    fn weigh(&self) {
        let milli = self
            .slots
            .values()
            .filter_map(Slot::reserved)
            .filter(|desire| desire.qos == Qos::Burstable)
            .filter_map(|desire| u64::try_from(*desire.requests.get("cpu")?).ok())
            .fold(0_u64, u64::saturating_add);
        self.burstable.send_if_modified(|old| std::mem::replace(old, milli) != milli);
    }
}
