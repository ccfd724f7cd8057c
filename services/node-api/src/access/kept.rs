//! Answers that are remembered for a while, never more than so many.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use tokio::time::Instant;

/// What a question is known by: a digest, so that neither tokens nor long texts are kept.
pub(crate) type Key = [u8; 32];

/// Answers by question. When there is no room, the one goes that would be forgotten first.
#[derive(Debug)]
pub(crate) struct Kept<T> {
    lasts: Duration,
    most: usize,
    answers: HashMap<Key, (Instant, T)>,
    ends: BTreeSet<(Instant, Key)>,
}

impl<T: Clone> Kept<T> {
    /// At most `most` answers, each for as long as `lasts`; for no time at all nothing is kept.
    pub(crate) fn new(lasts: Duration, most: usize) -> Self {
        Self { lasts, most, answers: HashMap::new(), ends: BTreeSet::new() }
    }

    /// The answer, if it is known at this moment.
    pub(crate) fn get(&self, key: &Key, now: Instant) -> Option<T> {
        self.answers.get(key).filter(|(end, _)| now < *end).map(|(_, answer)| answer.clone())
    }

    /// Remembers an answer that has come at this moment.
    pub(crate) fn put(&mut self, key: Key, answer: T, now: Instant) {
        let Some(end) = now.checked_add(self.lasts).filter(|end| now < *end && self.most > 0) else { return };
        if let Some((former, _)) = self.answers.remove(&key) {
            self.ends.remove(&(former, key));
        }
        while let Some((first, of)) = self.ends.first().copied()
            && (first <= now || self.answers.len() >= self.most)
        {
            self.ends.remove(&(first, of));
            self.answers.remove(&of);
        }
        self.answers.insert(key, (end, answer));
        self.ends.insert((end, key));
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
    fn an_answer_is_known_until_its_time_is_over() {
        let (mut kept, now) = (Kept::new(SECOND, 8), Instant::now());
        kept.put(key(1), "a", now);
        assert_eq!(kept.get(&key(1), now), Some("a"));
        assert_eq!(kept.get(&key(1), now + SECOND - Duration::from_nanos(1)), Some("a"));
        assert_eq!(kept.get(&key(1), now + SECOND), None);
        assert_eq!(kept.get(&key(2), now), None);
        kept.put(key(1), "b", now + SECOND / 2);
        assert_eq!(kept.get(&key(1), now + SECOND), Some("b"), "a new answer has its own time");
        let mut none = Kept::new(Duration::ZERO, 8);
        none.put(key(1), "a", now);
        assert_eq!(none.get(&key(1), now), None);
    }

    #[test]
    fn there_are_never_more_than_so_many_and_the_oldest_goes_first() {
        let (mut kept, now) = (Kept::new(SECOND, 3), Instant::now());
        for n in 0..10 {
            kept.put(key(n), n, now + Duration::from_millis(n.into()));
            assert!(kept.answers.len() <= 3 && kept.answers.len() == kept.ends.len());
        }
        let known: Vec<u8> = (0..10).filter_map(|n| kept.get(&key(n), now + SECOND / 2)).collect();
        assert_eq!(known, [7, 8, 9]);
        kept.put(key(42), 42, now + 2 * SECOND);
        assert_eq!((kept.answers.len(), kept.ends.len()), (1, 1), "what is over makes room");
    }
}
