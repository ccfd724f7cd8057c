//! Records the requests that a fake has received, in order.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

/// How long a test waits for a call before it fails.
const LIMIT: Duration = Duration::from_secs(60);

/// An ordered record of values. Clones share it.
#[derive(Debug)]
pub struct Recorder<T>(Arc<watch::Sender<Vec<T>>>);

impl<T> Clone for Recorder<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Default for Recorder<T> {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(Vec::new())))
    }
}

impl<T> Recorder<T> {
    /// Appends a value.
    pub fn record(&self, value: T) {
        self.0.send_modify(|values| values.push(value));
    }

    /// How many values there are.
    pub fn len(&self) -> usize {
        self.0.borrow().len()
    }

    /// Whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all values and returns them.
    pub fn take(&self) -> Vec<T> {
        let mut taken = Vec::new();
        self.0.send_modify(|values| taken = std::mem::take(values));
        taken
    }
}

impl<T: Clone> Recorder<T> {
    /// All values so far.
    pub fn all(&self) -> Vec<T> {
        self.0.borrow().clone()
    }

    /// The newest value.
    pub fn last(&self) -> Option<T> {
        self.0.borrow().last().cloned()
    }
}

impl<T: Clone + Debug> Recorder<T> {
    /// Waits until the record satisfies `predicate`, and returns it.
    ///
    /// # Panics
    /// It does not within 60 s. The message has the record.
    pub async fn until(&self, predicate: impl Fn(&[T]) -> bool) -> Vec<T> {
        let mut values = self.0.subscribe();
        let found = values.wait_for(|values| predicate(values));
        match tokio::time::timeout(LIMIT, found).await {
            Ok(Ok(values)) => values.clone(),
            _ => panic!("the expected calls were not made within {LIMIT:?}: {:?}", self.all()),
        }
    }

    /// Waits until at least `count` values were recorded, and returns all of them.
    ///
    /// # Panics
    /// Fewer were recorded within 60 s. The message has the record.
    pub async fn until_len(&self, count: usize) -> Vec<T> {
        self.until(|values| values.len() >= count).await
    }

    /// [`Recorder::until`] for a test without an async runtime.
    ///
    /// # Panics
    /// Like [`Recorder::until`], but can also be called from within an async runtime.
    pub fn until_blocking(&self, predicate: impl Fn(&[T]) -> bool) -> Vec<T> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.expect("a runtime for one thread can always be made");
        runtime.block_on(self.until(predicate))
    }
}
