//! Turns of pods at work that the node does only a limited amount of at a time.
//!
//! The pod with the fewest turns gets the next one; among equals, the one that has waited longest. A turn has no time limit
//! of its own: a probe may take as long as the pod's manifest allows, and a pull as long as the registry needs. So a pod
//! that has more turns than a waiting pod loses its oldest turn after the other has waited for a while. Where all pods have
//! the same number, a pod loses a turn that it has had for long ([`Fairness`]).

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// When a turn is taken from a pod for one that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fairness {
    /// How long a pod waits before a pod with more turns loses one.
    pub patience: Duration,
    /// How long a pod keeps a turn when it has no more turns than the waiting pod.
    pub kept: Duration,
}

/// The turns for one kind of work.
#[derive(Debug)]
pub struct Turns {
    places: usize,
    fairness: Fairness,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    held: BTreeMap<u64, Held>,
    waiting: VecDeque<Waiting>,
}

#[derive(Debug)]
struct Held {
    pod: Arc<str>,
    since: Instant,
    cut: CancellationToken,
}

#[derive(Debug)]
struct Waiting {
    pod: Arc<str>,
    since: Instant,
    given: oneshot::Sender<Turn>,
}

/// A turn. Dropping it gives the turn to the next waiting pod.
#[derive(Debug)]
pub struct Turn {
    turns: Arc<Turns>,
    number: u64,
    cut: CancellationToken,
}

/// A snapshot of the turns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// Total number of turns.
    pub places: usize,
    /// Number of turns in use.
    pub taken: usize,
    /// Number of waiting requests.
    pub waiting: usize,
    /// The longest wait.
    pub longest: Duration,
    /// The pod with the most turns, and their number.
    pub most: Option<(Arc<str>, usize)>,
}

impl Turns {
    /// Allows `places` turns at the same time.
    pub fn new(places: usize, fairness: Fairness) -> Arc<Self> {
        Arc::new(Self { places: places.max(1), fairness, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn for the pod. Cancel-safe: a cancelled wait gets no turn.
    pub async fn take(self: &Arc<Self>, pod: &Arc<str>) -> Turn {
        let mut given = {
            let (given, mine) = oneshot::channel();
            let since = Instant::now();
            self.state().waiting.push_back(Waiting { pod: Arc::clone(pod), since, given });
            mine
        };
        self.hand_out();
        loop {
            // Cancel-safe: the receiver keeps what was sent.
            tokio::select! {
                biased;
                turn = &mut given => {
                    if let Ok(turn) = turn {
                        return turn;
                    }
                    // A sender is never dropped without sending a turn; if it were, this would wait for ever, visibly.
                    std::future::pending::<()>().await;
                }
                () = tokio::time::sleep(self.fairness.patience) => self.make_room(pod),
            }
        }
    }

    /// Gives the free turns to waiting pods.
    fn hand_out(self: &Arc<Self>) {
        loop {
            let (given, turn) = {
                let mut state = self.state();
                let Some((number, next)) = state.next_turn(self.places) else { return };
                let cut = state.held.get(&number).map(|held| held.cut.clone()).unwrap_or_default();
                (next, Turn { turns: Arc::clone(self), number, cut })
            };
            // A cancelled receiver gives its turn back, outside of the lock, and the next pod gets it.
            drop(given.send(turn));
        }
    }

    /// Takes a turn from a pod that has more turns than `pod`, or has had one for long.
    fn make_room(&self, pod: &Arc<str>) {
        let mut state = self.state();
        state.waiting.retain(|waiting| !waiting.given.is_closed());
        let leaving = state.held.values().filter(|held| held.cut.is_cancelled()).count();
        if leaving >= state.waiting.len() {
            return;
        }
        let counts = state.counts();
        let own = counts.get(pod).copied().unwrap_or(0);
        let most =
            counts.iter().max_by_key(|(_, count)| **count).map(|(pod, count)| (Arc::clone(pod), *count));
        let now = Instant::now();
        let mut kept = state.held.values().filter(|held| !held.cut.is_cancelled());
        let loses = match most {
            Some((most, count)) if count > own + 1 => kept.find(|held| held.pod == most),
            _ => kept.find(|held| {
                held.pod != *pod && now.saturating_duration_since(held.since) >= self.fairness.kept
            }),
        };
        if let Some(held) = loses {
            held.cut.cancel();
        }
    }

    /// A snapshot for health and metrics.
    pub fn look(&self) -> Look {
        let state = self.state();
        let counts = state.counts();
        let most =
            counts.iter().max_by_key(|(_, count)| **count).map(|(pod, count)| (Arc::clone(pod), *count));
        let waiting = || state.waiting.iter().filter(|waiting| !waiting.given.is_closed());
        Look {
            places: self.places,
            taken: state.held.len(),
            waiting: waiting().count(),
            longest: waiting().map(|waiting| waiting.since.elapsed()).max().unwrap_or_default(),
            most,
        }
    }
}

impl State {
    fn counts(&self) -> BTreeMap<Arc<str>, usize> {
        let mut counts = BTreeMap::new();
        for held in self.held.values() {
            *counts.entry(Arc::clone(&held.pod)).or_default() += 1;
        }
        counts
    }

    /// Creates a turn for the next waiting pod, if one is free.
    fn next_turn(&mut self, places: usize) -> Option<(u64, oneshot::Sender<Turn>)> {
        if self.held.len() >= places {
            return None;
        }
        self.waiting.retain(|waiting| !waiting.given.is_closed());
        let counts = self.counts();
        let count = |waiting: &Waiting| counts.get(&waiting.pod).copied().unwrap_or(0);
        // The first of those with the fewest turns: they are in order of arrival.
        let at = (0..self.waiting.len()).min_by_key(|at| count(&self.waiting[*at]))?;
        let Waiting { pod, given, .. } = self.waiting.remove(at)?;
        let number = self.next;
        self.next += 1;
        self.held.insert(number, Held { pod, since: Instant::now(), cut: CancellationToken::new() });
        Some((number, given))
    }
}

impl Turn {
    /// Waits until the turn is needed for another pod. Cancel-safe.
    pub async fn cut(&self) {
        self.cut.cancelled().await;
    }

    /// Runs `work`, which cannot be interrupted, to its end; gives the turn back as soon as another pod needs it.
    pub async fn work<T>(self, work: impl Future<Output = T>) -> T {
        tokio::pin!(work);
        // Cancel-safe: `work` is pinned outside and continues below.
        tokio::select! {
            done = &mut work => return done,
            () = self.cut() => {}
        }
        drop(self);
        work.await
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.state().held.remove(&self.number);
        self.turns.hand_out();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(1);
    const KEPT: Duration = Duration::from_secs(5);

    fn turns(places: usize) -> Arc<Turns> {
        Turns::new(places, Fairness { patience: PATIENCE, kept: KEPT })
    }

    fn pod(name: &str) -> Arc<str> {
        name.into()
    }

    /// Takes all turns for one pod, which keeps them.
    async fn all(turns: &Arc<Turns>, name: &str) -> Vec<Turn> {
        let mut held = Vec::new();
        for _ in 0..turns.places {
            held.push(turns.take(&pod(name)).await);
        }
        held
    }

    /// Gives a turn back as soon as it is cut, as a probe does; how long that took.
    fn until_cut(turn: Turn) -> tokio::task::JoinHandle<Duration> {
        let begun = Instant::now();
        tokio::spawn(async move {
            turn.cut().await;
            begun.elapsed()
        })
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_with_many_turns_loses_one_after_a_second_and_not_more_than_is_needed() {
        let turns = turns(4);
        let mut tasks: Vec<_> = all(&turns, "greedy").await.into_iter().map(until_cut).collect();
        let begun = Instant::now();
        let victim = turns.take(&pod("victim")).await;
        assert_eq!(begun.elapsed(), PATIENCE);
        assert_eq!(tasks.remove(0).await.unwrap(), PATIENCE, "the oldest");
        let look = turns.look();
        assert_eq!((look.taken, look.waiting, look.most), (4, 0, Some((pod("greedy"), 3))));
        tokio::time::sleep(Duration::from_secs(3600)).await;
        assert!(tasks.iter().all(|task| !task.is_finished()), "nobody waits");
        drop(victim);
        assert_eq!(turns.look().taken, 3);
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }

    #[tokio::test(start_paused = true)]
    async fn pods_without_a_turn_go_first_regardless_of_waiting_time() {
        let turns = turns(2);
        let mut held = all(&turns, "greedy").await;
        let more = {
            let turns = Arc::clone(&turns);
            tokio::spawn(async move { turns.take(&pod("greedy")).await })
        };
        tokio::time::sleep(Duration::from_millis(100)).await;
        let begun = Instant::now();
        let victim = {
            let turns = Arc::clone(&turns);
            tokio::spawn(async move { turns.take(&pod("victim")).await })
        };
        tokio::time::sleep(Duration::from_millis(100)).await;
        held.pop();
        let victim = victim.await.unwrap();
        assert_eq!(begun.elapsed(), Duration::from_millis(100));
        assert!(!more.is_finished());
        held.pop();
        drop((victim, more.await.unwrap()));
        assert_eq!(turns.look().taken, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn among_equals_a_turn_rotates_after_five_seconds() {
        let turns = turns(2);
        let (one, other) = (turns.take(&pod("one")).await, turns.take(&pod("other")).await);
        let tasks = [until_cut(one), until_cut(other)];
        let begun = Instant::now();
        let third = turns.take(&pod("third")).await;
        assert_eq!(begun.elapsed(), KEPT);
        let fourth = turns.take(&pod("fourth")).await;
        assert!(begun.elapsed() <= KEPT + PATIENCE, "{:?}", begun.elapsed());
        for task in tasks {
            task.await.unwrap();
        }
        drop((third, fourth));
    }

    #[tokio::test(start_paused = true)]
    async fn running_work_yields_its_turn_to_a_waiting_pod() {
        let turns = turns(1);
        let (end, ended) = oneshot::channel::<u8>();
        let turn = turns.take(&pod("slow")).await;
        let slow = tokio::spawn(turn.work(ended));
        let begun = Instant::now();
        let other = turns.take(&pod("other")).await;
        assert_eq!(begun.elapsed(), KEPT);
        assert!(!slow.is_finished());
        end.send(7).unwrap();
        assert_eq!(slow.await.unwrap(), Ok(7));
        assert_eq!(turns.look().taken, 1, "nothing is given back twice");
        assert_eq!(other.work(async { 8 }).await, 8);
        assert_eq!(turns.look().taken, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn probes_of_one_pod_wait_for_each_other_and_cut_no_turn() {
        let turns = turns(2);
        let held = all(&turns, "alone").await;
        let more = tokio::time::timeout(Duration::from_secs(60), turns.take(&pod("alone"))).await;
        assert!(more.is_err());
        assert!(held.iter().all(|turn| !turn.cut.is_cancelled()));
        assert_eq!(turns.look().waiting, 0, "who has given up does not wait");
        drop(held);
        assert_eq!(turns.look().taken, 0);
        drop(turns.take(&pod("alone")).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_pod_waits_for_at_most_one_turn_of_each_of_a_hundred_greedy_pods() {
        let turns = turns(16);
        let greedy: Vec<_> = (0..100)
            .map(|n| {
                let turns = Arc::clone(&turns);
                tokio::spawn(async move {
                    loop {
                        let turn = turns.take(&pod(&format!("greedy-{n}"))).await;
                        turn.cut().await;
                    }
                })
            })
            .collect();
        tokio::time::sleep(Duration::from_secs(120)).await;
        for _ in 0..5 {
            let begun = Instant::now();
            drop(turns.take(&pod("victim")).await);
            // A hundred pods wait before it, and sixteen get a turn in each five seconds.
            assert!(begun.elapsed() <= Duration::from_secs(45), "{:?}", begun.elapsed());
        }
        greedy.iter().for_each(tokio::task::JoinHandle::abort);
    }
}
