//! Turns of pods at something of which the node does only so much at a time.
//!
//! Whoever has the fewest turns gets the next one, and among equals who has waited longest. A turn has no end of its own: a probe may take
//! as long as its pod's manifest says, and a pull as long as a registry likes. So a pod that has more turns than one that waits loses its
//! oldest after the other has waited for a while, and where all have the same, whoever has had one for long ([`Fairness`]).

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// When a turn is taken from somebody for one who waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fairness {
    /// So long somebody waits before one that has more turns loses one.
    pub patience: Duration,
    /// So long everybody keeps a turn who has no more than the one that waits.
    pub kept: Duration,
}

/// The turns at one thing.
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

/// A turn; whoever waits gets it when this is dropped.
#[derive(Debug)]
pub struct Turn {
    turns: Arc<Turns>,
    number: u64,
    cut: CancellationToken,
}

/// How the turns stand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// How many there are.
    pub places: usize,
    /// How many of them are taken.
    pub taken: usize,
    /// How many wait for one.
    pub waiting: usize,
    /// The longest wait.
    pub longest: Duration,
    /// The pod that has most, and how many.
    pub most: Option<(Arc<str>, usize)>,
}

impl Turns {
    /// So many at the same time.
    pub fn new(places: usize, fairness: Fairness) -> Arc<Self> {
        Arc::new(Self { places: places.max(1), fairness, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn of the pod. Cancel-safe: who does not wait any more gets none.
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
                    // Nobody drops a sender without a turn; if somebody did, this one waits for ever and is seen to.
                    std::future::pending::<()>().await;
                }
                () = tokio::time::sleep(self.fairness.patience) => self.make_room(pod),
            }
        }
    }

    /// Gives what is free to those who wait.
    fn hand_out(self: &Arc<Self>) {
        loop {
            let (given, turn) = {
                let mut state = self.state();
                let Some((number, next)) = state.next_turn(self.places) else { return };
                let cut = state.held.get(&number).map(|held| held.cut.clone()).unwrap_or_default();
                (next, Turn { turns: Arc::clone(self), number, cut })
            };
            // Who does not wait any more gives it back, outside of the lock, and the next one gets it.
            drop(given.send(turn));
        }
    }

    /// Takes a turn from somebody who has more than the pod, or has had one for long.
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

    /// How they stand.
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

    /// Makes the turn of whoever is next, if one is free.
    fn next_turn(&mut self, places: usize) -> Option<(u64, oneshot::Sender<Turn>)> {
        if self.held.len() >= places {
            return None;
        }
        self.waiting.retain(|waiting| !waiting.given.is_closed());
        let counts = self.counts();
        let count = |waiting: &Waiting| counts.get(&waiting.pod).copied().unwrap_or(0);
        // The first of those with the least: they are in the order in which they came.
        let at = (0..self.waiting.len()).min_by_key(|at| count(&self.waiting[*at]))?;
        let Waiting { pod, given, .. } = self.waiting.remove(at)?;
        let number = self.next;
        self.next += 1;
        self.held.insert(number, Held { pod, since: Instant::now(), cut: CancellationToken::new() });
        Some((number, given))
    }
}

impl Turn {
    /// Waits until somebody else is to have the turn. Cancel-safe.
    pub async fn cut(&self) {
        self.cut.cancelled().await;
    }

    /// Does `work`, which cannot be interrupted, to its end; the turn is given back as soon as somebody else is to have it.
    pub async fn work<T>(self, work: impl Future<Output = T>) -> T {
        tokio::pin!(work);
        // Cancel-safe: `work` is pinned outside and goes on below.
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

    /// As many turns as there are, of a pod that keeps them.
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
    async fn who_has_none_comes_before_who_has_some_however_long_that_has_waited() {
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
    async fn among_equals_a_turn_is_kept_for_five_seconds_and_then_goes_round() {
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
    async fn work_that_goes_on_gives_its_turn_to_who_waits() {
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
    async fn a_pods_own_probes_wait_for_each_other_and_cut_nothing() {
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
    async fn a_hundred_greedy_pods_keep_nobody_waiting_for_longer_than_their_turns() {
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
            // A hundred who wait before it, sixteen in each five seconds.
            assert!(begun.elapsed() <= Duration::from_secs(45), "{:?}", begun.elapsed());
        }
        greedy.iter().for_each(tokio::task::JoinHandle::abort);
    }
}
