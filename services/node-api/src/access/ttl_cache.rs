//! A bounded cache whose entries expire.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use tokio::time::Instant;

/// A SHA-256 digest, so that the cache keeps neither tokens nor long texts.
pub(crate) type Key = [u8; 32];

/// A cache with one TTL for all entries. A full cache evicts the entry that expires first.
#[derive(Debug)]
pub(crate) struct TtlCache<T> {
    ttl: Duration,
    capacity: usize,
    entries: HashMap<Key, (Instant, T)>,
    expiries: BTreeSet<(Instant, Key)>,
}

impl<T: Clone> TtlCache<T> {
    /// A cache of at most `capacity` entries; a `ttl` of zero disables it.
    pub(crate) fn new(ttl: Duration, capacity: usize) -> Self {
        Self { ttl, capacity, entries: HashMap::new(), expiries: BTreeSet::new() }
    }

    /// The value of `key`, unless it has expired at `now`.
    pub(crate) fn get(&self, key: &Key, now: Instant) -> Option<T> {
        self.entries.get(key).filter(|(expiry, _)| now < *expiry).map(|(_, value)| value.clone())
    }

    /// Stores a value; its TTL begins at `now`.
    pub(crate) fn insert(&mut self, key: Key, value: T, now: Instant) {
        let Some(expiry) = now.checked_add(self.ttl).filter(|expiry| now < *expiry && self.capacity > 0)
        else {
            return;
        };
        if let Some((former, _)) = self.entries.remove(&key) {
            self.expiries.remove(&(former, key));
        }
        while let Some((first, of)) = self.expiries.first().copied()
            && (first <= now || self.entries.len() >= self.capacity)
        {
            self.expiries.remove(&(first, of));
            self.entries.remove(&of);
        }
        self.entries.insert(key, (expiry, value));
        self.expiries.insert((expiry, key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn key(n: u8) -> Key {
        [n; 32]
    }

    #[test]
    fn entry_expires_after_its_ttl() {
        let (mut cache, now) = (TtlCache::new(SECOND, 8), Instant::now());
        cache.insert(key(1), "a", now);
        assert_eq!(cache.get(&key(1), now), Some("a"));
        assert_eq!(cache.get(&key(1), now + SECOND - Duration::from_nanos(1)), Some("a"));
        assert_eq!(cache.get(&key(1), now + SECOND), None);
        assert_eq!(cache.get(&key(2), now), None);
        cache.insert(key(1), "b", now + SECOND / 2);
        assert_eq!(cache.get(&key(1), now + SECOND), Some("b"), "a new value has a new TTL");
        let mut disabled = TtlCache::new(Duration::ZERO, 8);
        disabled.insert(key(1), "a", now);
        assert_eq!(disabled.get(&key(1), now), None);
    }

    #[test]
    fn full_cache_evicts_the_oldest_entry_first() {
        let (mut cache, now) = (TtlCache::new(SECOND, 3), Instant::now());
        for n in 0..10 {
            cache.insert(key(n), n, now + Duration::from_millis(n.into()));
            assert!(cache.entries.len() <= 3 && cache.entries.len() == cache.expiries.len());
        }
        let cached: Vec<u8> = (0..10).filter_map(|n| cache.get(&key(n), now + SECOND / 2)).collect();
        assert_eq!(cached, [7, 8, 9]);
        cache.insert(key(42), 42, now + 2 * SECOND);
        assert_eq!((cache.entries.len(), cache.expiries.len()), (1, 1), "expired entries are removed");
    }
}
