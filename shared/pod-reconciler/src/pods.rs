//! The manager's side: the desired set, and a slot and a worker per pod.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use keelson_desired_set::{Desire, DesireHeader, DesiredSet, PodRef, StreamId, Want};
use keelson_service_kit::{CancellationToken, LoopHandle};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use crate::assignment::{Assignment, Assignments};

/// Capacity of a manager's command queue; further senders wait.
pub const QUEUE: usize = 256;

/// The published state of a pod, for callers that wait. The default is the view of an unknown or removed pod.
pub trait View: Default {
    /// Sets revision and want from the latest stream; `None` when its set does not contain the pod.
    fn set_desired(&mut self, desired: Option<(u64, Want)>);

    /// The last value of [`Self::set_desired`].
    fn desired(&self) -> Option<(u64, Want)>;

    /// The want, when the latest stream has sent this revision or a later one.
    fn wanted(&self, revision: u64) -> Option<Want> {
        self.desired().filter(|(sent, _)| *sent >= revision).map(|(_, want)| want)
    }
}

/// A command to a manager, with the desire `D`, the view `V` and the service's own requests `A`.
#[derive(Debug)]
pub enum Command<D, V, A = Infallible> {
    /// A `Sync` stream begins.
    Open {
        /// Cancelled when a later stream takes over.
        taken_over: CancellationToken,
        /// Gets the stream's id.
        reply: oneshot::Sender<StreamId>,
    },
    /// The set contains a pod.
    Insert {
        /// The stream that sent it.
        stream: StreamId,
        /// The desired state.
        desire: D,
    },
    /// The sender no longer knows a pod.
    Remove {
        /// The stream that sent it.
        stream: StreamId,
        /// The pod's UID.
        uid: String,
    },
    /// The set is complete.
    Complete {
        /// The stream that sent it.
        stream: StreamId,
        /// Every source of pods has reported at least once.
        sources_ready: bool,
        /// Answered when the set is applied.
        reply: oneshot::Sender<()>,
    },
    /// A caller subscribes to a pod's view.
    Watch {
        /// The pod's UID.
        uid: String,
        /// Gets the view.
        reply: oneshot::Sender<watch::Receiver<V>>,
    },
    /// A worker has cleaned up the pod.
    Gone {
        /// The pod's UID.
        uid: String,
        /// The number of the assignment that is done.
        number: u64,
    },
    /// A request of the service's own.
    Request(A),
}

/// What the service must handle after a command.
#[derive(Debug, PartialEq, Eq)]
pub enum PodEvent<D, A> {
    /// The latest stream contains a pod: the service must call [`Pods::assign`].
    Desired(D),
    /// The set of the latest stream is complete.
    Complete {
        /// All sources of pods were ready.
        sources_ready: bool,
    },
    /// The pod with this UID is cleaned up.
    Removed(String),
    /// A request of the service's own.
    Request(A),
}

/// The entry of one pod, with the service's own note `N`.
#[derive(Debug)]
pub struct Slot<D, V, N> {
    assignment: watch::Sender<Option<Assignment<D, N>>>,
    view: watch::Sender<V>,
    number: u64,
    desire: Option<Arc<D>>,
    /// The service's own note; reset when the pod is cleaned up.
    pub note: N,
    /// A worker runs for the pod.
    working: bool,
    /// The desired set no longer contains the pod: the slot is removed after the cleanup.
    swept: bool,
}

impl<D: Desire, V: View, N: Copy + Default> Slot<D, V, N> {
    fn new() -> Self {
        Self {
            assignment: watch::Sender::new(None),
            view: watch::Sender::new(V::default()),
            number: 0,
            desire: None,
            note: N::default(),
            working: false,
            swept: false,
        }
    }

    /// The desire last assigned to the worker.
    pub fn desire(&self) -> Option<&D> {
        self.desire.as_deref()
    }

    /// Assigns the same desire again with the current note. False when there is no desire.
    pub fn reassign(&mut self) -> bool {
        let desire = self.desire.clone();
        desire.map(|desire| self.assign(desire)).is_some()
    }

    fn assign(&mut self, desire: Arc<D>) {
        self.number += 1;
        self.desire = Some(Arc::clone(&desire));
        let assignment = Assignment { number: self.number, desire, note: self.note };
        self.assignment.send_replace(Some(assignment));
    }

    fn set_desired(&self, desired: Option<(u64, Want)>) {
        self.view.send_modify(|view| view.set_desired(desired));
    }
}

/// The desired set, a slot per pod, and the workers.
#[derive(Debug)]
pub struct Pods<D, V, N = ()> {
    set: DesiredSet<()>,
    slots: BTreeMap<String, Slot<D, V, N>>,
    workers: JoinSet<()>,
    taken_over: CancellationToken,
}

impl<D, V, N> Default for Pods<D, V, N> {
    fn default() -> Self {
        Self {
            set: DesiredSet::default(),
            slots: BTreeMap::new(),
            workers: JoinSet::new(),
            taken_over: CancellationToken::new(),
        }
    }
}

impl<D: Desire, V: View, N: Copy + Default> Pods<D, V, N> {
    /// The next command; `None` at shutdown. Meanwhile it propagates worker panics and removes unused slots.
    pub async fn next<A>(
        &mut self,
        commands: &mut mpsc::Receiver<Command<D, V, A>>,
        shutdown: &CancellationToken,
        handle: &LoopHandle,
    ) -> Option<Command<D, V, A>> {
        loop {
            handle.tick();
            // Cancel-safe: recv and join_next consume an item only when they return it; the others hold no state.
            tokio::select! {
                () = shutdown.cancelled() => return None,
                command = commands.recv() => return command,
                Some(end) = self.workers.join_next() => if let Err(error) = end
                    && let Ok(panic) = error.try_into_panic()
                {
                    // A pod without a worker would hang: the process ends, and its successor adopts the pods.
                    std::panic::resume_unwind(panic);
                },
                () = tokio::time::sleep(LoopHandle::HEARTBEAT) => self.remove_unwatched_slots(),
            }
        }
    }

    /// Applies a command. Returns what the service must handle itself.
    pub fn take<A>(&mut self, command: Command<D, V, A>) -> Option<PodEvent<D, A>> {
        match command {
            Command::Open { taken_over, reply } => {
                let _ = reply.send(self.open(taken_over));
                None
            }
            Command::Insert { stream, desire } => {
                self.insert(stream, &desire).then_some(PodEvent::Desired(desire))
            }
            Command::Remove { stream, uid } => {
                self.remove(stream, &uid);
                None
            }
            Command::Complete { stream, sources_ready, reply } => {
                let held = self.slots.iter().filter(|(_, s)| s.working).map(|(uid, _)| uid.as_str());
                for uid in self.set.complete(stream, sources_ready, held) {
                    self.sweep(&uid);
                }
                let _ = reply.send(());
                self.set.is_latest(stream).then_some(PodEvent::Complete { sources_ready })
            }
            Command::Watch { uid, reply } => {
                let _ = reply.send(self.slot_or_new(&uid).view.subscribe());
                None
            }
            Command::Gone { uid, number } => self.gone(&uid, number).then_some(PodEvent::Removed(uid)),
            Command::Request(ask) => Some(PodEvent::Request(ask)),
        }
    }

    /// Assigns a desire to the pod's worker, which `worker` creates if there is none.
    pub fn assign<F>(&mut self, desire: D, worker: impl FnOnce(Assignments<D, V, N>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let uid = desire.header().pod.uid.clone();
        let slot = self.slot_or_new(&uid);
        slot.assign(Arc::new(desire));
        if !slot.working {
            self.start(uid, worker);
        }
    }

    /// Adds a pod that was found on the node, with the worker that `worker` creates. The worker waits until the set is
    /// known to contain the pod, or gets `forget` at once if a complete set lacks it. `show` updates the view.
    pub fn find<F>(
        &mut self,
        uid: String,
        show: impl FnOnce(&mut V),
        worker: impl FnOnce(Assignments<D, V, N>) -> F,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        self.slot_or_new(&uid).view.send_modify(show);
        self.start(uid.clone(), worker);
        if self.set.must_sweep(&uid) {
            self.sweep(&uid);
        }
    }

    /// All slots by pod UID.
    pub fn slots(&self) -> impl Iterator<Item = (&str, &Slot<D, V, N>)> + Clone {
        self.slots.iter().map(|(uid, slot)| (uid.as_str(), slot))
    }

    /// The slot of a pod.
    pub fn slot(&self, uid: &str) -> Option<&Slot<D, V, N>> {
        self.slots.get(uid)
    }

    /// The slot of a pod, mutable.
    pub fn slot_mut(&mut self, uid: &str) -> Option<&mut Slot<D, V, N>> {
        self.slots.get_mut(uid)
    }

    /// The slot of a pod, created if there is none.
    pub fn slot_or_new(&mut self, uid: &str) -> &mut Slot<D, V, N> {
        self.slots.entry(uid.to_owned()).or_insert_with(Slot::new)
    }

    fn open(&mut self, taken_over: CancellationToken) -> StreamId {
        self.taken_over.cancel();
        self.taken_over = taken_over;
        for slot in self.slots.values() {
            slot.set_desired(None);
        }
        self.set.open()
    }

    fn insert(&mut self, stream: StreamId, desire: &D) -> bool {
        let DesireHeader { pod, revision, want } = desire.header();
        let taken = self.set.insert(stream, &pod.uid, ());
        if taken {
            let slot = self.slot_or_new(&pod.uid);
            slot.swept = false;
            slot.set_desired(Some((*revision, *want)));
        }
        taken
    }

    fn remove(&mut self, stream: StreamId, uid: &str) {
        if self.set.remove(stream, uid) {
            self.sweep(uid);
        } else if let Some(slot) = self.slots.get(uid).filter(|_| self.set.is_latest(stream)) {
            slot.set_desired(None);
        }
    }

    /// The desired set does not contain the pod: its worker must clean up everything.
    fn sweep(&mut self, uid: &str) {
        let Some(slot) = self.slots.get_mut(uid) else { return };
        slot.set_desired(None);
        if !slot.working {
            return;
        }
        slot.swept = true;
        let unnamed = || PodRef { uid: uid.to_owned(), ..PodRef::default() };
        let pod = slot.desire().map_or_else(unnamed, |desire| desire.header().pod.clone());
        tracing::info!(uid, pod = pod.name, namespace = pod.namespace, "the pod is no longer wanted");
        slot.assign(Arc::new(D::forget(pod)));
    }

    fn start<F>(&mut self, uid: String, worker: impl FnOnce(Assignments<D, V, N>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let Some(slot) = self.slots.get_mut(&uid) else { return };
        slot.working = true;
        let assignments = Assignments::new(uid, slot.assignment.subscribe(), slot.view.clone());
        self.workers.spawn(worker(assignments));
    }

    fn gone(&mut self, uid: &str, number: u64) -> bool {
        let Some(slot) = self.slots.get_mut(uid).filter(|slot| slot.number == number) else { return false };
        slot.note = N::default();
        if slot.swept {
            // The worker ends when its assignment is dropped.
            self.slots.remove(uid);
        }
        true
    }

    /// Removes slots that exist only for a watch that has ended.
    fn remove_unwatched_slots(&mut self) {
        self.slots.retain(|_, slot| slot.working || slot.view.receiver_count() > 0);
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;
    use crate::assignment::Next;

    /// A desire without fields of its own.
    #[derive(Debug, Clone, PartialEq, Eq)]
    struct Wish(DesireHeader);

    impl From<DesireHeader> for Wish {
        fn from(header: DesireHeader) -> Self {
            Self(header)
        }
    }

    impl Desire for Wish {
        fn header(&self) -> &DesireHeader {
            &self.0
        }
    }

    #[derive(Debug, Default)]
    struct Seen(Option<(u64, Want)>);

    impl View for Seen {
        fn set_desired(&mut self, desired: Option<(u64, Want)>) {
            self.0 = desired;
        }

        fn desired(&self) -> Option<(u64, Want)> {
            self.0
        }
    }

    type TestPods = Pods<Wish, Seen, u8>;
    type TestCommand = Command<Wish, Seen>;

    fn run(uid: &str) -> Wish {
        let pod = PodRef { uid: uid.into(), namespace: "ns".into(), name: "n".into() };
        Wish(DesireHeader { pod, revision: 1, want: Want::Run })
    }

    fn open(pods: &mut TestPods) -> (StreamId, CancellationToken) {
        let (taken_over, (reply, mut stream)) = (CancellationToken::new(), oneshot::channel());
        let command: TestCommand = Command::Open { taken_over: taken_over.clone(), reply };
        assert_eq!(pods.take(command), None);
        (stream.try_recv().unwrap(), taken_over)
    }

    fn complete(pods: &mut TestPods, stream: StreamId) {
        let command: TestCommand =
            Command::Complete { stream, sources_ready: true, reply: oneshot::channel().0 };
        assert_eq!(pods.take(command), Some(PodEvent::Complete { sources_ready: true }));
    }

    /// Names a pod; what its worker would have if it were made now.
    fn name(pods: &mut TestPods, stream: StreamId, uid: &str) -> Option<Assignments<Wish, Seen, u8>> {
        let command: TestCommand = Command::Insert { stream, desire: run(uid) };
        let Some(PodEvent::Desired(desire)) = pods.take(command) else { panic!("{uid} was not taken") };
        let mut assignments = None;
        pods.assign(desire, |made| {
            assignments = Some(made);
            pending()
        });
        assignments
    }

    fn gone(pods: &mut TestPods, uid: &str, number: u64) -> bool {
        let command: TestCommand = Command::Gone { uid: uid.into(), number };
        pods.take(command).is_some()
    }

    #[tokio::test]
    async fn pod_has_one_worker_that_gets_the_latest_desire_and_note() {
        let mut pods = TestPods::default();
        let (stream, _) = open(&mut pods);
        let mut assignments = name(&mut pods, stream, "a").unwrap();
        let first = assignments.present().await.unwrap().assignment;
        assert_eq!((first.number, first.note), (1, 0));
        assert!(name(&mut pods, stream, "a").is_none());
        let slot = pods.slot_mut("a").unwrap();
        slot.note = 7;
        assert!(slot.reassign());
        let latest = assignments.present().await.unwrap().assignment;
        assert_eq!((latest.number, latest.note), (3, 7));
        assert_eq!(*latest.desire, run("a"));
    }

    #[tokio::test]
    async fn removed_pod_gets_forget_and_its_slot_ends_only_with_that_assignment() {
        let mut pods = TestPods::default();
        let (first, _) = open(&mut pods);
        let mut assignments = name(&mut pods, first, "a").unwrap();
        let (second, _) = open(&mut pods);
        complete(&mut pods, second);
        let turn = assignments.present().await.unwrap();
        assert_eq!(*turn.assignment.desire, Wish::forget(run("a").0.pod));
        assert_eq!(assignments.view.borrow().desired(), None);
        assert!(!gone(&mut pods, "a", 1));
        assert!(pods.slot("a").is_some());
        assert!(gone(&mut pods, "a", 2));
        assert!(pods.slot("a").is_none());
        assert!(!assignments.wait(Next::WhenChanged, pending()).await);
    }

    #[tokio::test]
    async fn removed_pod_that_is_desired_again_keeps_its_slot_after_cleanup() {
        let mut pods = TestPods::default();
        let (stream, _) = open(&mut pods);
        complete(&mut pods, stream);
        let _assignments = name(&mut pods, stream, "a");
        let remove: TestCommand = Command::Remove { stream, uid: "a".into() };
        assert_eq!(pods.take(remove), None);
        assert_eq!(pods.slot("a").unwrap().desire().unwrap().0.want, Want::Forget);
        assert!(name(&mut pods, stream, "a").is_none());
        assert!(gone(&mut pods, "a", 3));
        assert!(pods.slot("a").is_some());
    }

    #[tokio::test]
    async fn cleaned_up_pod_that_is_still_desired_keeps_its_slot_but_not_its_note() {
        let mut pods = TestPods::default();
        let (stream, _) = open(&mut pods);
        let _assignments = name(&mut pods, stream, "a");
        pods.slot_mut("a").unwrap().note = 7;
        assert!(gone(&mut pods, "a", 1));
        assert_eq!(pods.slot("a").unwrap().note, 0);
    }

    #[tokio::test]
    async fn later_sync_stream_takes_over_and_the_earlier_one_is_ignored() {
        let mut pods = TestPods::default();
        let (first, taken_over) = open(&mut pods);
        let assignments = name(&mut pods, first, "a").unwrap();
        assert_eq!(assignments.view.borrow().wanted(1), Some(Want::Run));
        assert_eq!(assignments.view.borrow().wanted(2), None);
        let (second, _) = open(&mut pods);
        assert!(taken_over.is_cancelled());
        assert_eq!(assignments.view.borrow().desired(), None);
        let late: [TestCommand; 3] = [
            Command::Insert { stream: first, desire: run("a") },
            Command::Remove { stream: first, uid: "a".into() },
            Command::Complete { stream: first, sources_ready: true, reply: oneshot::channel().0 },
        ];
        for command in late {
            assert_eq!(pods.take(command), None);
        }
        assert!(name(&mut pods, second, "a").is_none());
        complete(&mut pods, second);
        assert_eq!(assignments.view.borrow().wanted(1), Some(Want::Run));
    }

    #[tokio::test]
    async fn found_pod_waits_for_the_set_and_is_forgotten_when_the_complete_set_lacks_it() {
        let mut pods = TestPods::default();
        let mut assignments = None;
        let take = |made| {
            assignments = Some(made);
            pending()
        };
        pods.find("early".into(), |view| view.set_desired(Some((9, Want::Stop))), take);
        assert_eq!(assignments.take().unwrap().view.borrow().wanted(9), Some(Want::Stop));
        assert!(pods.slot("early").unwrap().desire().is_none());
        let (stream, _) = open(&mut pods);
        complete(&mut pods, stream);
        assert_eq!(pods.slot("early").unwrap().desire().unwrap().0.want, Want::Forget);
        pods.find("late".into(), |_| {}, |_| pending());
        assert_eq!(pods.slot("late").unwrap().desire().unwrap().0.want, Want::Forget);
    }

    #[tokio::test]
    async fn slot_created_by_a_watch_is_removed_with_its_last_watcher() {
        let mut pods = TestPods::default();
        let (reply, mut answer) = oneshot::channel();
        let command: TestCommand = Command::Watch { uid: "a".into(), reply };
        assert_eq!(pods.take(command), None);
        let view = answer.try_recv().unwrap();
        pods.remove_unwatched_slots();
        assert!(pods.slot("a").is_some());
        drop(view);
        pods.remove_unwatched_slots();
        assert!(pods.slot("a").is_none());
    }

    #[tokio::test]
    async fn worker_panic_ends_the_manager_and_worker_return_does_not() {
        let manager = tokio::spawn(async {
            let mut pods = TestPods::default();
            let (stream, _) = open(&mut pods);
            for uid in ["returns", "panics"] {
                let command: TestCommand = Command::Insert { stream, desire: run(uid) };
                let Some(PodEvent::Desired(desire)) = pods.take(command) else {
                    panic!("{uid} was not taken")
                };
                pods.assign(desire, |_| async move { assert_ne!(uid, "panics", "the worker panics") });
            }
            let (_commands, mut receiver) = mpsc::channel::<TestCommand>(1);
            let handle = keelson_service_kit::Progress::default().register("pods");
            pods.next(&mut receiver, &CancellationToken::new(), &handle).await
        });
        let end = manager.await.unwrap_err().into_panic();
        assert!(end.downcast_ref::<String>().unwrap().contains("the worker panics"));
        let mut pods = TestPods::default();
        pods.find("a".into(), |_| {}, |_| ready(()));
        let (commands, mut receiver) = mpsc::channel::<TestCommand>(1);
        commands.try_send(Command::Gone { uid: "a".into(), number: 0 }).unwrap();
        let handle = keelson_service_kit::Progress::default().register("pods");
        assert!(pods.next(&mut receiver, &CancellationToken::new(), &handle).await.is_some());
    }
}
