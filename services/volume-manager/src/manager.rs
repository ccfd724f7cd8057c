//! One task owns the set of wanted pods and a slot per pod; everybody else sends it commands.

use std::collections::BTreeMap;
use std::sync::Arc;

use keelson_service_kit::{CancellationToken, EventRing, LoopHandle, WatchHub};
use keelson_volume_manager_core::desire::{PodDesire, PodRef};
use keelson_volume_manager_core::plan::Actual;
use keelson_volume_manager_core::set::{DesiredSet, StreamId};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use crate::runtime::Runtime;
use crate::store::Store;
use crate::view::{Phase, Report, View};
use crate::worker::{Assignment, Worker};

/// Commands that may wait; a sender of more waits itself.
const QUEUE: usize = 256;

/// What the workers share.
#[derive(Debug)]
pub(crate) struct Env {
    pub(crate) store: Arc<Store>,
    pub(crate) runtime: Runtime,
    pub(crate) hub: WatchHub<String, Report>,
    pub(crate) events: EventRing,
    pub(crate) commands: mpsc::Sender<Command>,
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
    pod: PodRef,
    /// A worker runs for it.
    working: bool,
    /// Nobody wants to hear of the pod any more once it is gone.
    swept: bool,
}

impl Slot {
    fn new(uid: &str) -> Self {
        Self {
            assignment: watch::Sender::new(None),
            view: watch::Sender::default(),
            number: 0,
            pod: PodRef { uid: uid.to_owned(), ..PodRef::default() },
            working: false,
            swept: false,
        }
    }
}

/// The owner of the set.
pub(crate) struct Manager {
    env: Arc<Env>,
    set: DesiredSet<()>,
    slots: BTreeMap<String, Slot>,
    workers: JoinSet<()>,
    taken_over: CancellationToken,
}

impl Manager {
    /// Begins with what was found on disk; each found pod has a worker that waits for a word about it.
    pub(crate) fn new(env: Arc<Env>, found: Vec<(String, Actual)>) -> Self {
        let mut manager = Self {
            env,
            set: DesiredSet::default(),
            slots: BTreeMap::new(),
            workers: JoinSet::new(),
            taken_over: CancellationToken::new(),
        };
        for (uid, actual) in found {
            let phase = if actual.held.is_empty() { Phase::Unmounted } else { Phase::Mounted };
            let report =
                Report { phase, mounts: Vec::new(), message: "found at the start, not named since".into() };
            let slot = manager.slots.entry(uid.clone()).or_insert_with(|| Slot::new(&uid));
            slot.view.send_modify(|view| view.report = report.clone());
            manager.env.hub.set(uid.clone(), report);
            manager.start_worker(&uid, actual);
        }
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
                let _ = reply.send(());
            }
            Command::Look { uid, reply } => {
                let slot = self.slots.entry(uid).or_insert_with_key(|uid| Slot::new(uid));
                let _ = reply.send(slot.view.subscribe());
            }
            Command::Gone { uid, number } => self.gone(&uid, number),
        }
    }

    fn name(&mut self, stream: StreamId, desire: PodDesire) {
        let uid = desire.pod.uid.clone();
        if !self.set.name(stream, &uid, ()) {
            return;
        }
        let slot = self.slots.entry(uid.clone()).or_insert_with(|| Slot::new(&uid));
        slot.pod = desire.pod.clone();
        slot.swept = false;
        slot.view.send_modify(|view| {
            view.named = Some((desire.revision, desire.want));
            if view.report.phase == Phase::Unknown {
                view.report.phase = Phase::Pending;
            }
        });
        self.assign(&uid, desire);
    }

    /// The set does not name the pod: nothing of it is to remain here.
    fn sweep(&mut self, uid: &str) {
        let Some(slot) = self.slots.get_mut(uid) else { return };
        slot.view.send_modify(|view| view.named = None);
        if !slot.working {
            return;
        }
        slot.swept = true;
        let pod = slot.pod.clone();
        tracing::info!(uid, pod = pod.name, namespace = pod.namespace, "the pod is no longer wanted");
        self.assign(uid, PodDesire::forget(pod));
    }

    fn assign(&mut self, uid: &str, desire: PodDesire) {
        let Some(slot) = self.slots.get_mut(uid) else { return };
        slot.number += 1;
        let assignment = Assignment { number: slot.number, desire: Arc::new(desire) };
        slot.assignment.send_replace(Some(assignment));
        if !slot.working {
            self.start_worker(uid, Actual::default());
        }
    }

    fn start_worker(&mut self, uid: &str, actual: Actual) {
        let Some(slot) = self.slots.get_mut(uid) else { return };
        slot.working = true;
        let worker =
            Worker::new(Arc::clone(&self.env), slot.assignment.subscribe(), slot.view.clone(), actual, uid);
        self.workers.spawn(worker.run());
    }

    fn gone(&mut self, uid: &str, number: u64) {
        let Some(slot) = self.slots.get(uid) else { return };
        if slot.number == number {
            self.env.hub.remove(&uid.to_owned());
            if slot.swept {
                // The worker ends when its assignment is dropped.
                self.slots.remove(uid);
            }
        }
    }

    /// Slots that were made only because somebody asked.
    fn forget_lookers(&mut self) {
        self.slots.retain(|_, slot| slot.working || slot.view.receiver_count() > 0);
    }
}
