use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::Notify;

/// The server side of a `Watch…` RPC: a keyed state and its subscribers.
///
/// A subscriber holds the keys that have changed since its last read, not their values: it gets the latest value, and a
/// slow reader costs one key per changed entry.
#[derive(Debug)]
pub struct WatchHub<K, V>(Arc<Mutex<State<K, V>>>);

impl<K, V> Clone for WatchHub<K, V> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

#[derive(Debug)]
struct State<K, V> {
    entries: BTreeMap<K, V>,
    subscribers: Vec<Weak<Slots<K>>>,
    complete: bool,
}

#[derive(Debug)]
struct Slots<K> {
    dirty: Mutex<Dirty<K>>,
    notify: Notify,
}

#[derive(Debug)]
struct Dirty<K> {
    order: VecDeque<K>,
    keys: BTreeSet<K>,
    // Keys of the replay that were not delivered yet; `Synced` follows after the last one.
    replay_left: usize,
    synced_sent: bool,
}

/// One item of a subscription.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WatchItem<K, V> {
    /// The entry was added or changed to this value.
    Set(K, V),
    /// The entry was removed.
    Gone(K),
    /// The replay is complete.
    Synced,
}

/// The reading end of a hub. Dropping it unsubscribes.
#[derive(Debug)]
pub struct Subscription<K, V> {
    hub: WatchHub<K, V>,
    slots: Arc<Slots<K>>,
}

impl<K: Ord + Clone, V: Clone> Default for WatchHub<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Ord + Clone, V: Clone> WatchHub<K, V> {
    /// An empty hub whose state is complete from the start.
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(State {
            entries: BTreeMap::new(),
            subscribers: Vec::new(),
            complete: true,
        })))
    }

    /// An empty hub that sends no `Synced` before [`WatchHub::complete`]: its owner has not read everything yet.
    pub fn incomplete() -> Self {
        let hub = Self::new();
        hub.lock().complete = false;
        hub
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State<K, V>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the state as complete: the owner has read everything once.
    pub fn complete(&self) {
        let mut state = self.lock();
        if !state.complete {
            state.complete = true;
            state.each_subscriber(|slots| {
                // Entries set before this belong to the replay, also for subscribers that subscribed earlier.
                let mut dirty = slots.dirty.lock().unwrap_or_else(PoisonError::into_inner);
                dirty.replay_left = dirty.order.len();
                drop(dirty);
                slots.notify.notify_one();
            });
        }
    }

    /// Sets an entry and notifies the subscribers.
    pub fn set(&self, key: K, value: V) {
        let mut state = self.lock();
        state.entries.insert(key.clone(), value);
        state.mark(&key);
    }

    /// Sets an entry unless it equals the current one. Returns whether it was set.
    pub fn set_if_changed(&self, key: K, value: V) -> bool
    where
        V: PartialEq,
    {
        let mut state = self.lock();
        if state.entries.get(&key) == Some(&value) {
            return false;
        }
        state.entries.insert(key.clone(), value);
        state.mark(&key);
        true
    }

    /// Removes an entry and notifies the subscribers. Returns the removed value.
    pub fn remove(&self, key: &K) -> Option<V> {
        let mut state = self.lock();
        let old = state.entries.remove(key);
        if old.is_some() {
            state.mark(key);
        }
        old
    }

    /// The entry now.
    pub fn get(&self, key: &K) -> Option<V> {
        self.lock().entries.get(key).cloned()
    }

    /// Every entry now.
    pub fn snapshot(&self) -> Vec<(K, V)> {
        self.lock().entries.iter().map(|(k, v)| (k.clone(), v.clone())).collect()
    }

    /// Every key now.
    pub fn keys(&self) -> Vec<K> {
        self.lock().entries.keys().cloned().collect()
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.lock().entries.len()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Replays every entry, then `Synced`, then changes.
    pub fn subscribe(&self) -> Subscription<K, V> {
        let mut state = self.lock();
        let keys: BTreeSet<K> = state.entries.keys().cloned().collect();
        let slots = Arc::new(Slots {
            dirty: Mutex::new(Dirty {
                order: keys.iter().cloned().collect(),
                replay_left: keys.len(),
                keys,
                synced_sent: false,
            }),
            notify: Notify::new(),
        });
        state.subscribers.push(Arc::downgrade(&slots));
        Subscription { hub: self.clone(), slots }
    }
}

impl<K: Ord + Clone, V> State<K, V> {
    fn each_subscriber(&mut self, mut f: impl FnMut(&Slots<K>)) {
        self.subscribers.retain(|weak| match weak.upgrade() {
            Some(slots) => {
                f(&slots);
                true
            }
            None => false,
        });
    }

    fn mark(&mut self, key: &K) {
        self.each_subscriber(|slots| {
            let mut dirty = slots.dirty.lock().unwrap_or_else(PoisonError::into_inner);
            if dirty.keys.insert(key.clone()) {
                dirty.order.push_back(key.clone());
            }
            drop(dirty);
            slots.notify.notify_one();
        });
    }
}

impl<K: Ord + Clone, V: Clone> Subscription<K, V> {
    /// The next item; waits until there is one. Cancel-safe: an item is taken only when it is returned.
    pub async fn next(&mut self) -> WatchItem<K, V> {
        loop {
            if let Some(item) = self.try_next() {
                return item;
            }
            self.slots.notify.notified().await;
        }
    }

    /// The next item if there is one.
    pub fn try_next(&mut self) -> Option<WatchItem<K, V>> {
        let state = self.hub.lock();
        let mut dirty = self.slots.dirty.lock().unwrap_or_else(PoisonError::into_inner);
        if dirty.replay_left == 0 && !dirty.synced_sent && state.complete {
            dirty.synced_sent = true;
            return Some(WatchItem::Synced);
        }
        let key = dirty.order.pop_front()?;
        dirty.keys.remove(&key);
        dirty.replay_left = dirty.replay_left.saturating_sub(1);
        Some(match state.entries.get(&key) {
            Some(value) => WatchItem::Set(key, value.clone()),
            None => WatchItem::Gone(key),
        })
    }

    /// The subscription as the stream of a server-streaming RPC.
    pub fn into_stream<T, F>(self, convert: F) -> impl futures_util::Stream<Item = T> + Send
    where
        K: Send + Sync,
        V: Send + Sync,
        T: Send,
        F: FnMut(WatchItem<K, V>) -> T + Send,
    {
        futures_util::stream::unfold((self, convert), |(mut subscription, mut convert)| async move {
            let item = convert(subscription.next().await);
            Some((item, (subscription, convert)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_subscriber_gets_the_replay_then_synced_then_changes() {
        let hub = WatchHub::new();
        hub.set(1, "one");
        hub.set(2, "two");
        let mut sub = hub.subscribe();
        assert_eq!(sub.next().await, WatchItem::Set(1, "one"));
        assert_eq!(sub.next().await, WatchItem::Set(2, "two"));
        assert_eq!(sub.next().await, WatchItem::Synced);
        hub.remove(&1);
        assert_eq!(sub.next().await, WatchItem::Gone(1));
    }

    #[tokio::test]
    async fn a_slow_reader_sees_only_the_latest_value_of_a_key() {
        let hub = WatchHub::new();
        let mut sub = hub.subscribe();
        assert_eq!(sub.next().await, WatchItem::Synced);
        for i in 0..1000 {
            hub.set("k", i);
        }
        assert_eq!(sub.next().await, WatchItem::Set("k", 999));
        assert_eq!(sub.try_next(), None);
    }

    #[tokio::test]
    async fn an_incomplete_hub_says_synced_only_when_its_owner_has_read_everything() {
        let hub: WatchHub<u32, u32> = WatchHub::incomplete();
        let mut sub = hub.subscribe();
        assert_eq!(sub.try_next(), None);
        hub.set(1, 1);
        assert_eq!(sub.next().await, WatchItem::Set(1, 1));
        hub.complete();
        assert_eq!(sub.next().await, WatchItem::Synced);
    }

    #[tokio::test]
    async fn entries_set_before_completion_arrive_before_synced() {
        let hub: WatchHub<u32, u32> = WatchHub::incomplete();
        let mut early = hub.subscribe();
        hub.set(1, 1);
        hub.set(2, 2);
        hub.complete();
        assert_eq!(early.next().await, WatchItem::Set(1, 1));
        assert_eq!(early.next().await, WatchItem::Set(2, 2));
        assert_eq!(early.next().await, WatchItem::Synced);
    }

    #[tokio::test]
    async fn an_entry_removed_during_the_replay_is_reported_before_synced() {
        let hub = WatchHub::new();
        hub.set(1, 1);
        let mut sub = hub.subscribe();
        hub.remove(&1);
        assert_eq!(sub.next().await, WatchItem::Gone(1));
        assert_eq!(sub.next().await, WatchItem::Synced);
    }

    #[test]
    fn a_dropped_subscription_is_forgotten() {
        let hub = WatchHub::new();
        drop(hub.subscribe());
        hub.set(1, 1);
        assert!(hub.lock().subscribers.is_empty());
    }
}
