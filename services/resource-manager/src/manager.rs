//! One task owns the set of wanted pods, a slot per pod, and who is admitted; everybody else sends it commands.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use keelson_resource_manager_core::admit::{Rejection, admit};
use keelson_resource_manager_core::desire::PodDesire;
use keelson_resource_manager_core::layout::{CgroupPath, Qos};
use keelson_resource_manager_core::plan::reserves;
use keelson_service_kit::{CancellationToken, LoopHandle};
use keelson_sync_callee::{News, Pods, Runtime};
use tokio::sync::{mpsc, oneshot, watch};

use crate::metrics::CgroupMetrics;
use crate::view::{MachineState, Phase, TreeState, View};
use crate::worker::Worker;

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
pub(crate) type Command = keelson_sync_callee::Command<PodDesire, View, Ask>;

/// What only this manager is asked.
#[derive(Debug)]
pub(crate) enum Ask {
    /// Somebody asks whether a pod may run.
    Admit { uid: String, reply: oneshot::Sender<Verdict> },
    /// The tree is set up at last, and this is in it.
    TakeStock { found: Found },
}

/// What is noted about a pod.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Note {
    /// The pod may run.
    pub(crate) admitted: bool,
    /// Its cgroup was there at the start: an earlier run of this service has admitted it.
    found: bool,
}

type Slot = keelson_sync_callee::Slot<PodDesire, View, Note>;

fn reserved(slot: &Slot) -> Option<&PodDesire> {
    slot.desire().filter(|desire| reserves(desire.want, slot.note.admitted))
}

/// The owner of the set.
pub(crate) struct Manager {
    env: Arc<Env>,
    pods: Pods<PodDesire, View, Note>,
    machine: watch::Receiver<MachineState>,
    /// A set has been complete since the start, whether or not every source of pods was ready.
    set_complete: bool,
    /// Every reservation is known: a set was complete and names each pod that was here at the start.
    known: watch::Sender<bool>,
    /// CPU requests of the admitted burstable pods, in millicores.
    burstable: watch::Sender<u64>,
}

impl Manager {
    /// Begins with what was found in the tree; each found pod has a worker that waits for a word about it.
    pub(crate) fn new(
        env: Arc<Env>,
        machine: watch::Receiver<MachineState>,
        known: watch::Sender<bool>,
        burstable: watch::Sender<u64>,
        found: Found,
    ) -> Self {
        let mut manager = Self { env, pods: Pods::default(), machine, set_complete: false, known, burstable };
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
            Some(News::Asked(Ask::TakeStock { found })) => self.take_stock(found),
            Some(News::Gone(_)) | None => {}
        }
        let known = self.set_complete && self.unnamed() == 0;
        self.known.send_if_modified(|before| std::mem::replace(before, known) != known);
        self.weigh();
    }

    fn name(&mut self, desire: PodDesire) {
        let note = &mut self.pods.slot_or_new(&desire.pod.uid).note;
        note.admitted |= desire.adopted || note.found;
        self.pods.assign(desire, |orders| {
            let nothing = matches!(&*self.env.tree.borrow(), TreeState::Ready(_) | TreeState::Never(_));
            Worker::new(Arc::clone(&self.env), orders, nothing.then(BTreeSet::new)).run()
        });
    }

    /// Workers that run already have looked for themselves.
    fn take_stock(&mut self, found: Found) {
        for (uid, held) in found {
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
                return Verdict::NotYet { reason: "CgroupsNotReady", message: message.clone() };
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
        let others = self.pods.slots().filter(|(other, _)| *other != uid);
        let others = others.filter_map(|(_, slot)| reserved(slot));
        let verdict = admit(
            &self.machine.borrow().allocatable,
            others.map(|other| &other.requests),
            &desire.requests,
            desire.adopted,
        );
        match verdict {
            Ok(()) => {
                if let Some(slot) = self.pods.slot_mut(uid) {
                    slot.note.admitted = true;
                    // Its cgroup is made while the caller goes on.
                    slot.assign_again();
                }
                Verdict::Admitted
            }
            Err(rejection) => Verdict::Rejected(rejection),
        }
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
        self.burstable.send_if_modified(|old| std::mem::replace(old, milli) != milli);
    }
}
