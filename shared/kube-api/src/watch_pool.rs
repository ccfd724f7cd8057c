//! The pool of connections for watches.
//!
//! A server limits the streams of one HTTP/2 connection (100 by default), and each watch holds one for as long as it lasts. A
//! request above the limit waits until another one ends, and later requests wait behind it. So watches are spread over several
//! connections, separate from the connection for calls.

use std::sync::{Arc, Mutex, PoisonError};

use kube::Client;

use crate::dialer::Dialer;

/// The most watches on a connection: somewhat below the servers' limit.
const MAX_WATCHES: usize = 80;

/// Connections for watches, opened as needed.
#[derive(Debug)]
pub(crate) struct WatchPool {
    dialer: Dialer,
    max_watches: usize,
    connections: Mutex<Vec<PooledConnection>>,
}

/// A connection for watches.
struct PooledConnection {
    client: Client,
    /// Also held by each watch of the connection.
    slots: Arc<()>,
    /// The server has not answered a watch while others were on the connection: it may have no free stream.
    is_full: bool,
}

impl std::fmt::Debug for PooledConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PooledConnection").field("watches", &self.watches()).finish_non_exhaustive()
    }
}

impl PooledConnection {
    fn watches(&self) -> usize {
        Arc::strong_count(&self.slots) - 1
    }
}

/// The place of a watch on a connection; it is free again when this is dropped.
#[derive(Debug)]
pub(crate) struct StreamSlot(Arc<()>);

impl WatchPool {
    /// An empty pool.
    pub(crate) fn new(dialer: Dialer) -> Self {
        Self { dialer, max_watches: MAX_WATCHES, connections: Mutex::default() }
    }

    /// A place for one more watch, on the fullest connection with room, so that others become empty.
    ///
    /// # Errors
    /// The kubeconfig is invalid.
    pub(crate) fn acquire(&self) -> Result<(Client, StreamSlot), String> {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.retain(|connection| !connection.is_full || connection.watches() > 0);
        let with_room = connections
            .iter()
            .filter(|connection| !connection.is_full && connection.watches() < self.max_watches);
        if let Some(connection) = with_room.max_by_key(|connection| connection.watches()) {
            return Ok((connection.client.clone(), StreamSlot(Arc::clone(&connection.slots))));
        }
        let connection =
            PooledConnection { client: self.dialer.client()?, slots: Arc::new(()), is_full: false };
        let taken = (connection.client.clone(), StreamSlot(Arc::clone(&connection.slots)));
        connections.push(connection);
        Ok(taken)
    }

    /// Reports that a watch got no answer. Unless it is alone on its connection, that connection gets no more watches.
    pub(crate) fn mark_full(&self, slot: &StreamSlot) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(connection) =
            connections.iter_mut().find(|connection| Arc::ptr_eq(&connection.slots, &slot.0))
        {
            connection.is_full = connection.watches() > 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::RestMetrics;

    const KUBECONFIG: &str = r#"{"current-context": "c", "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {}}], "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}]}"#;

    async fn new_pool(max_watches: usize) -> WatchPool {
        let dialer = Dialer::new(KUBECONFIG, &RestMetrics::default()).await.unwrap();
        WatchPool { max_watches, ..WatchPool::new(dialer) }
    }

    fn counts(pool: &WatchPool) -> Vec<usize> {
        pool.connections.lock().unwrap().iter().map(PooledConnection::watches).collect()
    }

    #[tokio::test]
    async fn watches_fill_connections_in_turn_and_reuse_freed_places() {
        let pool = new_pool(2).await;
        let mut slots: Vec<StreamSlot> = (0..5).map(|_| pool.acquire().unwrap().1).collect();
        assert_eq!(counts(&pool), [2, 2, 1]);
        slots.remove(0);
        slots.remove(0);
        assert_eq!(counts(&pool), [0, 2, 1]);
        slots.push(pool.acquire().unwrap().1);
        assert_eq!(counts(&pool), [0, 2, 2], "the fullest one that has room");
        slots.push(pool.acquire().unwrap().1);
        assert_eq!(counts(&pool), [1, 2, 2]);
        assert_eq!(WatchPool::new(pool.dialer).max_watches, 80);
    }

    #[tokio::test]
    async fn full_connection_gets_no_more_watches_and_closes_with_its_last() {
        let pool = new_pool(9).await;
        let (first, second) = (pool.acquire().unwrap().1, pool.acquire().unwrap().1);
        pool.mark_full(&second);
        drop(second);
        let third = pool.acquire().unwrap().1;
        assert_eq!(counts(&pool), [1, 1]);
        // The watch was alone on its connection, so a lack of room was not the cause.
        pool.mark_full(&third);
        let fourth = pool.acquire().unwrap().1;
        assert_eq!(counts(&pool), [1, 2]);
        drop(first);
        let _fifth = pool.acquire().unwrap().1;
        assert_eq!(counts(&pool), [3]);
        drop((third, fourth));
    }
}
