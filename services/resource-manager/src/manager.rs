//! The manager: one task that owns the set of desired pods, a slot per pod, and admission. Other tasks send it commands.

use std::collections::BTreeMap;
use std::sync::Arc;

use keelson_pod_reconciler::{PodEvent, Pods};
use keelson_resource_manager_core::admit::{Rejection, admit, resize};
use keelson_resource_manager_core::desire::{Amounts, PodDesire, Want};
use keelson_resource_manager_core::drain;
use keelson_resource_manager_core::eviction::order::Order;
use keelson_resource_manager_core::eviction::preempt::victims;
use keelson_resource_manager_core::layout::Qos;
use keelson_resource_manager_core::node_shutdown::progress::rejection;
use keelson_resource_manager_core::plan::reserves;
use keelson_resource_manager_core::pressure::{check_pressure, check_resize_pressure, must_wait_for_older};
use keelson_service_kit::{CancellationToken, LoopHandle, now_unix_nanos};
use tokio::sync::{mpsc, watch};

use crate::admission::{NO_TREE, OLDER_PODS_FIRST, PREEMPTING, PodAdmission, SET_NOT_COMPLETE, Verdict};
use crate::cgroup::{FoundPods, PodCgroups};
use crate::commands::{Command, KnownPod, ManagerRequest};
use crate::drain::DrainState;
use crate::view::{MachineState, Orders, Phase, TreeState, View};
use crate::worker::{Worker, WorkerEnv};

type Slot = keelson_pod_reconciler::Slot<PodDesire, View, PodAdmission>;

fn reserved(slot: &Slot) -> Option<&PodDesire> {
    slot.desire().filter(|desire| reserves(desire.header.want, slot.note.admitted || slot.note.preempting))
}

/// The channels through which the manager publishes its state.
#[derive(Debug)]
pub(crate) struct ManagerOutputs {
    /// Whether every reservation is known: a set was complete and has named each pod that was found at startup.
    pub(crate) reservations_known: watch::Sender<bool>,
    /// CPU requests of the admitted burstable pods, in millicores.
    pub(crate) burstable: watch::Sender<u64>,
    /// Incremented when a pod was decided on, named by a set or has gone: waiting callers ask again.
    pub(crate) changes: watch::Sender<u64>,
    /// Incremented when a pod is finished.
    pub(crate) finished: watch::Sender<u64>,
    /// Orders to preempt pods.
    pub(crate) preempt: mpsc::Sender<Vec<Order>>,
}

/// Why the node may not start new pods.
#[derive(Debug, Clone)]
pub(crate) struct Closed {
    /// Whether the machine shuts down.
    pub(crate) shutting_down: watch::Receiver<bool>,
    /// Whether the node is drained.
    pub(crate) drain: watch::Receiver<DrainState>,
}

impl Closed {
    /// Why a pod that is not admitted is rejected; none when the node may start it.
    fn rejection(&self, uid: &str) -> Option<Rejection> {
        if *self.shutting_down.borrow() {
            return Some(rejection());
        }
        let drain = self.drain.borrow();
        drain.as_ref().filter(|drain| !drain.admits(uid)).map(|_| drain::rejection())
    }
}

/// The task that owns the set.
pub(crate) struct Manager {
    env: Arc<WorkerEnv>,
    pods: Pods<PodDesire, View, PodAdmission>,
    /// Cgroups without an owner mark: they belong to this agent's pods once a set names those.
    unmarked: PodCgroups,
    machine: watch::Receiver<MachineState>,
    /// Whether the machine shuts down, and whether the node is drained.
    closed: Closed,
    /// A set has been complete since the start, whether or not every source of pods was ready.
    set_complete: bool,
    outputs: ManagerOutputs,
    /// Eviction orders in effect.
    orders: Orders,
}

impl Manager {
    /// Starts with the pods that were found in the tree; each has a worker that waits for the pod's desired state.
    pub(crate) fn new(
        env: Arc<WorkerEnv>,
        machine: watch::Receiver<MachineState>,
        closed: Closed,
        outputs: ManagerOutputs,
        orders: Orders,
        found: FoundPods,
    ) -> Self {
        let (pods, unmarked) = (Pods::default(), PodCgroups::new());
        let mut manager = Self { env, pods, unmarked, machine, closed, set_complete: false, outputs, orders };
        manager.add_found(found);
        manager
    }

    /// Handles commands until the shutdown.
    pub(crate) async fn run(
        mut self,
        mut commands: mpsc::Receiver<Command>,
        shutdown: CancellationToken,
        handle: LoopHandle,
    ) {
        while let Some(command) = self.pods.next(&mut commands, &shutdown, &handle).await {
            self.handle(command);
        }
    }

    fn handle(&mut self, command: Command) {
        match self.pods.take(command) {
            Some(PodEvent::Desired(desire)) => self.assign(desire),
            Some(PodEvent::Complete { .. }) => self.set_complete = true,
            Some(PodEvent::Request(ManagerRequest::Admit { uid, reply })) => {
                let _ = reply.send(self.admit(&uid));
            }
            Some(PodEvent::Request(ManagerRequest::Resize { uid, revision, requests, reply })) => {
                let _ = reply.send(self.resize(&uid, revision, requests));
            }
            Some(PodEvent::Request(ManagerRequest::Defer { uid, reply })) => {
                self.defer(&uid);
                let _ = reply.send(());
            }
            Some(PodEvent::Request(ManagerRequest::AddFound { found })) => self.add_found(found),
            Some(PodEvent::Request(ManagerRequest::ListPods { reply })) => {
                let _ = reply.send(self.known_pods());
            }
            Some(PodEvent::Removed(_)) => {
                self.outputs.finished.send_modify(|count| *count += 1);
                self.outputs.changes.send_modify(|count| *count += 1);
            }
            None => {}
        }
        let known = self.set_complete && self.unnamed_pods() == 0;
        self.outputs.reservations_known.send_if_modified(|before| std::mem::replace(before, known) != known);
        self.publish_burstable_requests();
    }

    /// Every known pod.
    fn known_pods(&self) -> BTreeMap<String, KnownPod> {
        let known = |slot: &Slot| KnownPod { desire: slot.desire().cloned(), admitted: slot.note.admitted };
        self.pods.slots().map(|(uid, slot)| (uid.to_owned(), known(slot))).collect()
    }

    /// Assigns the desired state of a pod to its worker.
    fn assign(&mut self, desire: PodDesire) {
        if !reserves(desire.header.want, true) {
            self.outputs.finished.send_modify(|count| *count += 1);
        }
        self.outputs.changes.send_modify(|count| *count += 1);
        let cgroups = self.unmarked.remove(&desire.header.pod.uid);
        let note = &mut self.pods.slot_or_new(&desire.header.pod.uid).note;
        note.found_at_start |= cgroups.is_some();
        note.admitted |= desire.adopted || note.found_at_start;
        self.pods.assign(desire, |assignments| {
            let is_known =
                matches!(&*self.env.tree.borrow(), TreeState::Ready(_) | TreeState::Unsupported(_));
            Worker::new(Arc::clone(&self.env), assignments, is_known.then(|| cgroups.unwrap_or_default()))
                .run()
        });
    }

    /// Takes over the pods that were found in the tree. Workers that run already have scanned the tree themselves.
    fn add_found(&mut self, found: FoundPods) {
        let FoundPods { own, unmarked } = found;
        if !unmarked.is_empty() {
            tracing::info!(
                pods = unmarked.len(),
                "found pod cgroups that this agent has not created; those of pods outside its set are left alone"
            );
        }
        let is_named =
            |(uid, _): &(String, _)| self.pods.slot(uid).is_some_and(|slot| slot.desire().is_some());
        let (named, unmarked): (PodCgroups, PodCgroups) = unmarked.into_iter().partition(is_named);
        self.unmarked = unmarked;
        for (uid, cgroups) in own.into_iter().chain(named) {
            let slot = self.pods.slot_or_new(&uid);
            slot.note.found_at_start = true;
            if slot.desire().is_some() {
                slot.note.admitted = true;
                slot.reassign();
                continue;
            }
            let show = |view: &mut View| {
                view.phase = Phase::Pending;
                view.message =
                    "its cgroup was found at startup, and pod-sync has not sent the pod since".to_owned();
            };
            let worker = |assignments| Worker::new(Arc::clone(&self.env), assignments, Some(cgroups)).run();
            self.pods.find(uid, show, worker);
        }
    }

    fn admit(&mut self, uid: &str) -> Verdict {
        match &*self.env.tree.borrow() {
            TreeState::Ready(_) => {}
            TreeState::Pending(message) => {
                return Verdict::NotYet { reason: NO_TREE, message: message.clone() };
            }
            TreeState::Unsupported(message) => {
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
        let closed = self.closed.rejection(uid);
        if closed.is_none()
            && let Some(wait) = self.wait_for_set()
        {
            return wait;
        }
        let verdict = closed.map_or_else(|| self.decide(desire), Verdict::Rejected);
        if let Some(slot) = self.pods.slot_mut(uid) {
            match &verdict {
                Verdict::Admitted => {
                    slot.note = PodAdmission { admitted: true, preempting: false, ..slot.note };
                    // Its cgroup is created while the caller continues.
                    slot.reassign();
                }
                Verdict::Rejected(_) => {
                    slot.note = PodAdmission { rejected: true, preempting: false, ..slot.note }
                }
                Verdict::NotYet { reason, .. } => slot.note.preempting |= *reason == PREEMPTING,
            }
        }
        if !matches!(verdict, Verdict::NotYet { .. }) {
            self.outputs.changes.send_modify(|count| *count += 1);
        }
        verdict
    }

    /// Decides whether an admitted pod may have these requests. If it may, they count at once. A newer version of the pod says itself what
    /// it requests, so an older one is not decided on.
    fn resize(&mut self, uid: &str, revision: u64, requests: Amounts) -> Verdict {
        if let TreeState::Pending(message) = &*self.env.tree.borrow() {
            return Verdict::NotYet { reason: NO_TREE, message: message.clone() };
        }
        let known = self.pods.slot(uid).filter(|slot| slot.note.admitted).and_then(Slot::desire);
        let Some(desire) = known.filter(|desire| desire.header.want == Want::Run) else {
            let message = format!("pod {uid} is not among the pods that run");
            return Verdict::NotYet { reason: "PodNotAdmitted", message };
        };
        if desire.header.revision != revision {
            let message = format!("pod {uid} has changed since; its version is {}", desire.header.revision);
            return Verdict::NotYet { reason: "PodChanged", message };
        }
        if *self.closed.shutting_down.borrow() {
            return Verdict::Rejected(rejection());
        }
        if let Some(wait) = self.wait_for_set() {
            return wait;
        }
        let machine = self.machine.borrow();
        let others = self.pods.slots().filter(|(other, _)| *other != uid);
        let others = others.filter_map(|(_, slot)| reserved(slot)).map(|other| &other.requests);
        let decided = check_resize_pressure(&machine.conditions, desire, &requests)
            .and_then(|()| resize(&machine.allocatable, others, &desire.requests, &requests));
        let resized = PodDesire { requests, ..desire.clone() };
        drop(machine);
        match decided {
            Ok(()) => {
                self.assign(resized);
                Verdict::Admitted
            }
            Err(rejection) => Verdict::Rejected(rejection),
        }
    }

    /// Why no pod is decided on yet; none when the requests of all pods are known.
    fn wait_for_set(&self) -> Option<Verdict> {
        let message = match (self.set_complete, self.unnamed_pods()) {
            (true, 0) => return None,
            (false, _) => "pod-sync has not completed its set since resource-manager started".to_owned(),
            (true, unnamed) => format!(
                "running pods that no source has named yet: {unnamed}; their requests are not known before that"
            ),
        };
        Some(Verdict::NotYet { reason: SET_NOT_COMPLETE, message })
    }

    /// Defers a pod; a pod that runs already keeps its resources.
    fn defer(&mut self, uid: &str) {
        let Some(slot) = self.pods.slot_mut(uid) else { return };
        if slot.desire().is_none_or(|desire| desire.adopted || desire.header.want != Want::Run) {
            return;
        }
        slot.note = PodAdmission { rejected: true, ..PodAdmission::default() };
        slot.reassign();
        self.outputs.changes.send_modify(|count| *count += 1);
    }

    /// Decides whether a pod of the set that is not admitted yet may run, in the order of pod-lifecycle.md §15.
    fn decide(&self, desire: &PodDesire) -> Verdict {
        let machine = self.machine.borrow();
        if let Err(rejection) = check_pressure(&machine.conditions, desire) {
            return Verdict::Rejected(rejection);
        }
        let others = || self.pods.slots().filter(|(other, _)| *other != desire.header.pod.uid);
        let admitted: Vec<&PodDesire> = others().filter_map(|(_, slot)| reserved(slot)).collect();
        let requests = admitted.iter().map(|other| &other.requests);
        match admit(&machine.allocatable, requests, &desire.requests, desire.adopted) {
            Ok(()) => {}
            Err(rejection) => return self.preempt(&machine.allocatable, &admitted, desire, rejection),
        }
        let is_undecided = |slot: &Slot| !slot.note.admitted && !slot.note.rejected && !slot.note.preempting;
        let undecided: Vec<&PodDesire> = others()
            .filter(|(_, slot)| is_undecided(slot))
            .filter_map(|(_, slot)| slot.desire())
            .filter(|other| other.header.want == Want::Run)
            .collect();
        if must_wait_for_older(&machine.allocatable, &admitted, &undecided, desire) {
            let message = "an older pod is decided on first, and may take its resources".to_owned();
            return Verdict::NotYet { reason: OLDER_PODS_FIRST, message };
        }
        Verdict::Admitted
    }

    /// Preempts other pods for a critical pod that does not fit, if that frees enough.
    fn preempt(
        &self,
        allocatable: &Amounts,
        admitted: &[&PodDesire],
        desire: &PodDesire,
        rejection: Rejection,
    ) -> Verdict {
        let is_ending = |other: &PodDesire| {
            other.header.want != Want::Run || self.orders.get(&other.header.pod.uid).is_some()
        };
        let Some(victims) = victims(allocatable, admitted, desire, is_ending) else {
            return Verdict::Rejected(rejection);
        };
        let now = now_unix_nanos();
        let orders: Vec<Order> = victims.iter().map(|victim| Order::for_preemption(victim, now)).collect();
        if !orders.is_empty() && self.outputs.preempt.try_send(orders).is_err() {
            // The next request sends them again.
            tracing::warn!(
                uid = desire.header.pod.uid,
                "cannot preempt pods for the pod now: too many preemptions are queued; will retry"
            );
        }
        let message = format!("other pods are being preempted for it: {}", rejection.message);
        Verdict::NotYet { reason: PREEMPTING, message }
    }

    /// The number of pods that were found at startup and that no set has named yet, nor marked as forgotten once all sources
    /// were ready.
    fn unnamed_pods(&self) -> usize {
        self.pods.slots().filter(|(_, slot)| slot.note.found_at_start && slot.desire().is_none()).count()
    }

    /// Publishes the CPU requests of all burstable pods to the tree loop.
    fn publish_burstable_requests(&self) {
        let milli = self
            .pods
            .slots()
            .filter_map(|(_, slot)| reserved(slot))
            .filter(|desire| desire.qos == Qos::Burstable)
            .filter_map(|desire| u64::try_from(*desire.requests.get("cpu")?).ok())
            .fold(0_u64, u64::saturating_add);
        self.outputs.burstable.send_if_modified(|old| std::mem::replace(old, milli) != milli);
    }
}
