//! What a worker has been told and has not answered yet, for the duration of its turns.

use keelson_pod_sync_core::measure::Operation;
use tokio::time::Instant;

/// The kind of what came last and the moment of what came first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct News(Option<(Operation, Instant)>);

impl News {
    /// The worker is told something.
    pub fn came(&mut self, operation: Operation, at: Instant) {
        let first = self.0.map_or(at, |(_, first)| first);
        self.0 = Some((operation, first));
    }

    /// The turn that begins now answers all of it.
    pub fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    /// The turn that took this could not answer it.
    pub fn left(&mut self, taken: Self) {
        let Some((operation, first)) = taken.0 else { return };
        self.0 = Some((self.0.map_or(operation, |(newer, _)| newer), first));
    }

    /// What the worker was told.
    pub fn operation(self) -> Option<Operation> {
        self.0.map(|(operation, _)| operation)
    }

    /// From when a turn counts that began at `began` and comes to this. A look without news, and one whose news are of
    /// an earlier process, count for themselves.
    pub fn since(self, counted: Operation, began: Instant) -> Instant {
        self.0.filter(|_| counted != Operation::Sync).map_or(began, |(_, first)| first)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use Operation::{Create, Kill, Sync, Update};

    #[test]
    fn the_kind_is_that_of_the_newest_and_the_moment_that_of_the_oldest() {
        let at = Instant::now();
        let later = |seconds| at + Duration::from_secs(seconds);
        let mut news = News::default();
        assert_eq!((news.operation(), news.since(Kill, later(3))), (None, later(3)));
        news.came(Create, at);
        news.came(Update, later(1));
        let taken = news.take();
        assert_eq!(news, News::default());
        assert_eq!((taken.operation(), taken.since(Update, later(3))), (Some(Update), at));
        assert_eq!(taken.since(Sync, later(3)), later(3));
        // A turn that could do nothing leaves them to the next one.
        news.left(taken);
        assert_eq!(news, taken);
        let taken = news.take();
        news.came(Kill, later(2));
        news.left(taken);
        assert_eq!((news.operation(), news.since(Kill, later(3))), (Some(Kill), at));
    }
}
