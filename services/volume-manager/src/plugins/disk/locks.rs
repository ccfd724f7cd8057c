//! Locks by name.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::OwnedMutexGuard;

/// Locks by name, such as one per target. Names that nobody uses take no space.
#[derive(Debug, Default)]
pub(crate) struct Locks(Mutex<BTreeMap<String, Weak<tokio::sync::Mutex<()>>>>);

impl Locks {
    /// Waits for the lock of `name`.
    pub(crate) async fn lock(&self, name: &str) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            locks.retain(|_, lock| lock.strong_count() > 0);
            match locks.get(name).and_then(Weak::upgrade) {
                Some(lock) => lock,
                None => {
                    let lock = Arc::default();
                    locks.insert(name.to_owned(), Arc::downgrade(&lock));
                    lock
                }
            }
        };
        lock.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lock_is_held_by_name_and_forgotten_when_nobody_uses_it() {
        let locks = Locks::default();
        let held = locks.lock("a").await;
        let other = locks.lock("b").await;
        assert!(futures_util::FutureExt::now_or_never(locks.lock("a")).is_none());
        drop((held, other));
        drop(locks.lock("a").await);
        locks.lock("c").await;
        assert_eq!(locks.0.lock().unwrap().len(), 1);
    }
}
