//! The manager's side: the set of wanted pods, a slot and a worker per pod.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use keelson_desired_set::{Desire, DesiredSet, PodRef, StreamId, Want};
use keelson_service_kit::{CancellationToken, LoopHandle};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use crate::orders::{Assignment, Orders};

/// Commands to a manager that may wait; a sender of more waits itself.
pub const QUEUE: usize = 256;

/// What those see who wait for a pod. Its default is that of a pod of which nothing is known or here.
pub trait View: Default {
    /// Takes revision and wish as the latest stream names them; none when it does not name the pod.
    fn set_named(&mut self, named: Option<(u64, Want)>);

    /// What [`Self::set_named`] has taken last.
    fn named(&self) -> Option<(u64, Want)>;

    /// What is wanted, when the latest stream names this revision or a later one.
    fn wanted(&self, revision: u64) -> Option<Want> {
        self.named().filter(|(named, _)| *named >= revision).map(|(_, want)| want)
    }
}

/// What a manager is asked to do: with a desire `D`, a view `V`, and with what only this service is asked, `A`.
#[derive(Debug)]
pub enum Command<D, V, A = Infallible> {
    /// A `Sync` stream begins.
    Open {
        /// Cancelled when a later stream takes over.
        taken_over: CancellationToken,
        /// Gets the stream's id.
        reply: oneshot::Sender<StreamId>,
    },
    /// The set names a pod.
    Name {
        /// The stream that says so.
        stream: StreamId,
        /// What it says.
        desire: D,
    },
    /// The sender no longer knows a pod.
    Unname {
        /// The stream that says so.
        stream: StreamId,
        /// Whose UID.
        uid: String,
    },
    /// The set is complete.
    Complete {
        /// The stream that says so.
        stream: StreamId,
        /// Every source of pods has reported at least once.
        sources_ready: bool,
        /// Told when that is taken.
        reply: oneshot::Sender<()>,
    },
    /// Somebody waits for a pod.
    Look {
        /// Whose UID.
        uid: String,
        /// Gets what is seen of it.
        reply: oneshot::Sender<watch::Receiver<V>>,
    },
    /// A worker has nothing left of the pod.
    Gone {
        /// Whose UID.
        uid: String,
        /// The assignment for which it says so.
        number: u64,
    },
    /// What only this service is asked.
    Ask(A),
}

/// What a command leaves to the service itself.
#[derive(Debug, PartialEq, Eq)]
pub enum News<D, A> {
    /// The latest stream names a pod: [`Pods::assign`] is to follow.
    Named(D),
    /// The set of the latest stream is complete, whether or not all sources were ready.
    Complete,
    /// Nothing is left of the pod with this UID.
    Gone(String),
    /// What only this service is asked.
    Asked(A),
}

/// The place of one pod, with what the service itself notes about it, `N`.
#[derive(Debug)]
pub struct Slot<D, V, N> {
    assignment: watch::Sender<Option<Assignment<D, N>>>,
    view: watch::Sender<V>,
    number: u64,
    desire: Option<Arc<D>>,
    /// What the service itself notes; forgotten when nothing is left of the pod.
    pub note: N,
    /// A worker runs for it.
    working: bool,
    /// Nobody wants to hear of the pod any more once it is gone.
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

    /// What its worker was assigned last.
    pub fn desire(&self) -> Option<&D> {
        self.desire.as_deref()
    }

    /// Gives the worker its desire once more, with the present note. False when it has none.
    pub fn assign_again(&mut self) -> bool {
        let desire = self.desire.clone();
        desire.map(|desire| self.assign(desire)).is_some()
    }

    fn assign(&mut self, desire: Arc<D>) {
        self.number += 1;
        self.desire = Some(Arc::clone(&desire));
        let assignment = Assignment { number: self.number, desire, note: self.note };
        self.assignment.send_replace(Some(assignment));
    }

    fn set_named(&self, named: Option<(u64, Want)>) {
        self.view.send_modify(|view| view.set_named(named));
    }
}

/// The set of wanted pods, a slot per pod, and the workers.
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
    /// The next command; none at the shutdown. Meanwhile it sees to the workers and forgets slots that nobody
    /// needs.
    pub async fn next<A>(
        &mut self,
        commands: &mut mpsc::Receiver<Command<D, V, A>>,
        shutdown: &CancellationToken,
        handle: &LoopHandle,
    ) -> Option<Command<D, V, A>> {
        loop {
            handle.tick();
            // Cancel-safe: recv and join_next take something only when they return it; the others hold nothing.
            tokio::select! {
                () = shutdown.cancelled() => return None,
                command = commands.recv() => return command,
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

    /// Takes a command; what is left for the service to do.
    pub fn take<A>(&mut self, command: Command<D, V, A>) -> Option<News<D, A>> {
        match command {
            Command::Open { taken_over, reply } => {
                let _ = reply.send(self.open(taken_over));
                None
            }
            Command::Name { stream, desire } => self.name(stream, &desire).then_some(News::Named(desire)),
            Command::Unname { stream, uid } => {
                self.unname(stream, &uid);
                None
            }
            Command::Complete { stream, sources_ready, reply } => {
                let held = self.slots.iter().filter(|(_, s)| s.working).map(|(uid, _)| uid.as_str());
                for uid in self.set.complete(stream, sources_ready, held) {
                    self.sweep(&uid);
                }
                let _ = reply.send(());
                self.set.is_latest(stream).then_some(News::Complete)
            }
            Command::Look { uid, reply } => {
                let _ = reply.send(self.slot_or_new(&uid).view.subscribe());
                None
            }
            Command::Gone { uid, number } => self.gone(&uid, number).then_some(News::Gone(uid)),
            Command::Ask(ask) => Some(News::Asked(ask)),
        }
    }

    /// Gives a pod that was just named to its worker, which `worker` makes when there is none yet.
    pub fn assign<F>(&mut self, desire: D, worker: impl FnOnce(Orders<D, V, N>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let uid = desire.pod().uid.clone();
        let slot = self.slot_or_new(&uid);
        slot.assign(Arc::new(desire));
        if !slot.working {
            self.start(uid, worker);
        }
    }

    /// A pod of which something was found on the node. Its worker, which `worker` makes, waits for a word about
    /// it, unless the set says already that nothing of it is to remain; `show` tells those who wait for it.
    pub fn find<F>(
        &mut self,
        uid: String,
        show: impl FnOnce(&mut V),
        worker: impl FnOnce(Orders<D, V, N>) -> F,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        self.slot_or_new(&uid).view.send_modify(show);
        self.start(uid.clone(), worker);
        if self.set.sweeps(&uid) {
            self.sweep(&uid);
        }
    }

    /// Every slot by the UID of its pod.
    pub fn slots(&self) -> impl Iterator<Item = (&str, &Slot<D, V, N>)> + Clone {
        self.slots.iter().map(|(uid, slot)| (uid.as_str(), slot))
    }

    /// The slot of a pod.
    pub fn slot(&self, uid: &str) -> Option<&Slot<D, V, N>> {
        self.slots.get(uid)
    }

    /// The slot of a pod, to be changed.
    pub fn slot_mut(&mut self, uid: &str) -> Option<&mut Slot<D, V, N>> {
        self.slots.get_mut(uid)
    }

    /// The slot of a pod, made when there is none.
    pub fn slot_or_new(&mut self, uid: &str) -> &mut Slot<D, V, N> {
        self.slots.entry(uid.to_owned()).or_insert_with(Slot::new)
    }

    fn open(&mut self, taken_over: CancellationToken) -> StreamId {
        self.taken_over.cancel();
        self.taken_over = taken_over;
        for slot in self.slots.values() {
            slot.set_named(None);
        }
        self.set.open()
    }

    fn name(&mut self, stream: StreamId, desire: &D) -> bool {
        let uid = &desire.pod().uid;
        let taken = self.set.name(stream, uid, ());
        if taken {
            let slot = self.slot_or_new(uid);
            slot.swept = false;
            slot.set_named(Some((desire.revision(), desire.want())));
        }
        taken
    }

    fn unname(&mut self, stream: StreamId, uid: &str) {
        if self.set.unname(stream, uid) {
            self.sweep(uid);
        } else if let Some(slot) = self.slots.get(uid).filter(|_| self.set.is_latest(stream)) {
            slot.set_named(None);
        }
    }

    /// The set does not name the pod: nothing of it is to remain here.
    fn sweep(&mut self, uid: &str) {
        let Some(slot) = self.slots.get_mut(uid) else { return };
        slot.set_named(None);
        if !slot.working {
            return;
        }
        slot.swept = true;
        let unnamed = || PodRef { uid: uid.to_owned(), ..PodRef::default() };
        let pod = slot.desire().map_or_else(unnamed, |desire| desire.pod().clone());
        tracing::info!(uid, pod = pod.name, namespace = pod.namespace, "the pod is no longer wanted");
        slot.assign(Arc::new(D::forget(pod)));
    }

    fn start<F>(&mut self, uid: String, worker: impl FnOnce(Orders<D, V, N>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let Some(slot) = self.slots.get_mut(&uid) else { return };
        slot.working = true;
        let orders = Orders::new(uid, slot.assignment.subscribe(), slot.view.clone());
        self.workers.spawn(worker(orders));
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

    /// Slots that were made only because somebody asked.
    fn forget_lookers(&mut self) {
        self.slots.retain(|_, slot| slot.working || slot.view.receiver_count() > 0);
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;
    use crate::orders::Next;

    #[derive(Debug, Clone, PartialEq, Eq)]
    struct Wish {
        pod: PodRef,
        revision: u64,
        want: Want,
    }

    impl Desire for Wish {
        fn pod(&self) -> &PodRef {
            &self.pod
        }

        fn revision(&self) -> u64 {
            self.revision
        }

        fn want(&self) -> Want {
            self.want
        }

        fn forget(pod: PodRef) -> Self {
            Self { pod, revision: 0, want: Want::Forget }
        }
    }

    #[derive(Debug, Default)]
    struct Seen(Option<(u64, Want)>);

    impl View for Seen {
        fn set_named(&mut self, named: Option<(u64, Want)>) {
            self.0 = named;
        }

        fn named(&self) -> Option<(u64, Want)> {
            self.0
        }
    }

    type TestPods = Pods<Wish, Seen, u8>;
    type TestCommand = Command<Wish, Seen>;

    fn run(uid: &str) -> Wish {
        let pod = PodRef { uid: uid.into(), namespace: "ns".into(), name: "n".into() };
        Wish { pod, revision: 1, want: Want::Run }
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
        assert_eq!(pods.take(command), Some(News::Complete));
    }

    /// Names a pod; what its worker would have if it were made now.
    fn name(pods: &mut TestPods, stream: StreamId, uid: &str) -> Option<Orders<Wish, Seen, u8>> {
        let command: TestCommand = Command::Name { stream, desire: run(uid) };
        let Some(News::Named(desire)) = pods.take(command) else { panic!("{uid} was not taken") };
        let mut orders = None;
        pods.assign(desire, |made| {
            orders = Some(made);
            pending()
        });
        orders
    }

    fn gone(pods: &mut TestPods, uid: &str, number: u64) -> bool {
        let command: TestCommand = Command::Gone { uid: uid.into(), number };
        pods.take(command).is_some()
    }

    #[tokio::test]
    async fn a_pod_has_one_worker_which_gets_the_latest_desire_and_note() {
        let mut pods = TestPods::default();
        let (stream, _) = open(&mut pods);
        let mut orders = name(&mut pods, stream, "a").unwrap();
        let first = orders.present().await.unwrap().assignment;
        assert_eq!((first.number, first.note), (1, 0));
        assert!(name(&mut pods, stream, "a").is_none());
        let slot = pods.slot_mut("a").unwrap();
        slot.note = 7;
        assert!(slot.assign_again());
        let latest = orders.present().await.unwrap().assignment;
        assert_eq!((latest.number, latest.note), (3, 7));
        assert_eq!(*latest.desire, run("a"));
    }

    #[tokio::test]
    async fn a_swept_pod_is_to_be_forgotten_and_its_slot_goes_with_the_word_for_that_assignment_only() {
        let mut pods = TestPods::default();
        let (first, _) = open(&mut pods);
        let mut orders = name(&mut pods, first, "a").unwrap();
        let (second, _) = open(&mut pods);
        complete(&mut pods, second);
        let turn = orders.present().await.unwrap();
        assert_eq!(*turn.assignment.desire, Wish::forget(run("a").pod));
        assert_eq!(orders.view.borrow().named(), None);
        assert!(!gone(&mut pods, "a", 1));
        assert!(pods.slot("a").is_some());
        assert!(gone(&mut pods, "a", 2));
        assert!(pods.slot("a").is_none());
        assert!(!orders.wait(Next::WhenChanged, pending()).await);
    }

    #[tokio::test]
    async fn a_swept_pod_that_is_named_again_keeps_its_slot_when_nothing_is_left_of_it() {
        let mut pods = TestPods::default();
        let (stream, _) = open(&mut pods);
        complete(&mut pods, stream);
        let _orders = name(&mut pods, stream, "a");
        let unname: TestCommand = Command::Unname { stream, uid: "a".into() };
        assert_eq!(pods.take(unname), None);
        assert_eq!(pods.slot("a").unwrap().desire().unwrap().want, Want::Forget);
        assert!(name(&mut pods, stream, "a").is_none());
        assert!(gone(&mut pods, "a", 3));
        assert!(pods.slot("a").is_some());
    }

    #[tokio::test]
    async fn a_pod_that_is_gone_and_still_named_keeps_its_slot_but_no_note() {
        let mut pods = TestPods::default();
        let (stream, _) = open(&mut pods);
        let _orders = name(&mut pods, stream, "a");
        pods.slot_mut("a").unwrap().note = 7;
        assert!(gone(&mut pods, "a", 1));
        assert_eq!(pods.slot("a").unwrap().note, 0);
    }

    #[tokio::test]
    async fn a_later_stream_takes_over_and_the_earlier_one_is_not_listened_to() {
        let mut pods = TestPods::default();
        let (first, taken_over) = open(&mut pods);
        let orders = name(&mut pods, first, "a").unwrap();
        assert_eq!(orders.view.borrow().wanted(1), Some(Want::Run));
        assert_eq!(orders.view.borrow().wanted(2), None);
        let (second, _) = open(&mut pods);
        assert!(taken_over.is_cancelled());
        assert_eq!(orders.view.borrow().named(), None);
        let late: [TestCommand; 3] = [
            Command::Name { stream: first, desire: run("a") },
            Command::Unname { stream: first, uid: "a".into() },
            Command::Complete { stream: first, sources_ready: true, reply: oneshot::channel().0 },
        ];
        for command in late {
            assert_eq!(pods.take(command), None);
        }
        assert!(name(&mut pods, second, "a").is_none());
        complete(&mut pods, second);
        assert_eq!(orders.view.borrow().wanted(1), Some(Want::Run));
    }

    #[tokio::test]
    async fn what_is_found_waits_for_a_word_and_goes_at_once_when_the_set_is_complete_without_it() {
        let mut pods = TestPods::default();
        let mut orders = None;
        let take = |made| {
            orders = Some(made);
            pending()
        };
        pods.find("early".into(), |view| view.set_named(Some((9, Want::Stop))), take);
        assert_eq!(orders.take().unwrap().view.borrow().wanted(9), Some(Want::Stop));
        assert!(pods.slot("early").unwrap().desire().is_none());
        let (stream, _) = open(&mut pods);
        complete(&mut pods, stream);
        assert_eq!(pods.slot("early").unwrap().desire().unwrap().want, Want::Forget);
        pods.find("late".into(), |_| {}, |_| pending());
        assert_eq!(pods.slot("late").unwrap().desire().unwrap().want, Want::Forget);
    }

    #[tokio::test]
    async fn a_slot_that_was_made_for_a_look_goes_with_the_last_who_looks() {
        let mut pods = TestPods::default();
        let (reply, mut answer) = oneshot::channel();
        let command: TestCommand = Command::Look { uid: "a".into(), reply };
        assert_eq!(pods.take(command), None);
        let view = answer.try_recv().unwrap();
        pods.forget_lookers();
        assert!(pods.slot("a").is_some());
        drop(view);
        pods.forget_lookers();
        assert!(pods.slot("a").is_none());
    }

    #[tokio::test]
    async fn a_worker_that_panics_ends_the_manager_and_one_that_returns_does_not() {
        let manager = tokio::spawn(async {
            let mut pods = TestPods::default();
            let (stream, _) = open(&mut pods);
            for uid in ["returns", "panics"] {
                let command: TestCommand = Command::Name { stream, desire: run(uid) };
                let Some(News::Named(desire)) = pods.take(command) else { panic!("{uid} was not taken") };
                pods.assign(desire, |_| async move { assert_ne!(uid, "panics", "a worker has no word") });
            }
            let (_commands, mut receiver) = mpsc::channel::<TestCommand>(1);
            let handle = keelson_service_kit::Progress::default().register("pods");
            pods.next(&mut receiver, &CancellationToken::new(), &handle).await
        });
        let end = manager.await.unwrap_err().into_panic();
        assert!(end.downcast_ref::<String>().unwrap().contains("a worker has no word"));
        let mut pods = TestPods::default();
        pods.find("a".into(), |_| {}, |_| ready(()));
        let (commands, mut receiver) = mpsc::channel::<TestCommand>(1);
        commands.try_send(Command::Gone { uid: "a".into(), number: 0 }).unwrap();
        let handle = keelson_service_kit::Progress::default().register("pods");
        assert!(pods.next(&mut receiver, &CancellationToken::new(), &handle).await.is_some());
    }
}
