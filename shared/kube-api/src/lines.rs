//! The connections on which watches are.
//!
//! A server takes only so many streams of one HTTP/2 connection (100 by default), and each watch is one for as long as it lasts. A
//! request above that waits until another ends, and what comes after it waits with it. So watches are spread over
//! connections, and none of them is that of calls.

use std::sync::{Arc, Mutex, PoisonError};

use kube::Client;

use crate::dialer::Dialer;

/// Watches on a connection: some below what servers take.
const MOST: usize = 80;

/// Connections for watches, made as they are needed.
#[derive(Debug)]
pub(crate) struct Lines {
    dialer: Dialer,
    most: usize,
    lines: Mutex<Vec<Line>>,
}

/// A connection.
struct Line {
    client: Client,
    /// Held by each of its watches, too.
    seats: Arc<()>,
    /// The server has not answered a watch while others were on it: it may take no more of them.
    given_up: bool,
}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Line").field("watches", &self.watches()).finish_non_exhaustive()
    }
}

impl Line {
    fn watches(&self) -> usize {
        Arc::strong_count(&self.seats) - 1
    }
}

/// The place of a watch on a connection; it is free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Seat(Arc<()>);

impl Lines {
    /// None yet.
    pub(crate) fn new(dialer: Dialer) -> Self {
        Self { dialer, most: MOST, lines: Mutex::default() }
    }

    /// A place for one more watch: on the connection that has most of them and room, so that others become empty.
    ///
    /// # Errors
    /// What the kubeconfig says does not make a client.
    pub(crate) fn seat(&self) -> Result<(Client, Seat), String> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.retain(|line| !line.given_up || line.watches() > 0);
        let with_room = lines.iter().filter(|line| !line.given_up && line.watches() < self.most);
        if let Some(line) = with_room.max_by_key(|line| line.watches()) {
            return Ok((line.client.clone(), Seat(Arc::clone(&line.seats))));
        }
        let line = Line { client: self.dialer.client()?, seats: Arc::new(()), given_up: false };
        let taken = (line.client.clone(), Seat(Arc::clone(&line.seats)));
        lines.push(line);
        Ok(taken)
    }

    /// Says that a watch got no answer. If it is not alone on its connection, no more come to that one.
    pub(crate) fn give_up(&self, seat: &Seat) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = lines.iter_mut().find(|line| Arc::ptr_eq(&line.seats, &seat.0)) {
            line.given_up = line.watches() > 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counted::RestMetrics;

    const KUBECONFIG: &str = r#"{"current-context": "c", "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {}}], "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}]}"#;

    async fn lines(most: usize) -> Lines {
        let dialer = Dialer::new(KUBECONFIG, &RestMetrics::default()).await.unwrap();
        Lines { most, ..Lines::new(dialer) }
    }

    fn counts(lines: &Lines) -> Vec<usize> {
        lines.lines.lock().unwrap().iter().map(Line::watches).collect()
    }

    #[tokio::test]
    async fn watches_fill_one_connection_after_the_other_and_take_the_place_of_those_that_end() {
        let lines = lines(2).await;
        let mut seats: Vec<Seat> = (0..5).map(|_| lines.seat().unwrap().1).collect();
        assert_eq!(counts(&lines), [2, 2, 1]);
        seats.remove(0);
        seats.remove(0);
        assert_eq!(counts(&lines), [0, 2, 1]);
        seats.push(lines.seat().unwrap().1);
        assert_eq!(counts(&lines), [0, 2, 2], "the fullest one that has room");
        seats.push(lines.seat().unwrap().1);
        assert_eq!(counts(&lines), [1, 2, 2]);
        assert_eq!(Lines::new(lines.dialer).most, 80);
    }

    #[tokio::test]
    async fn a_connection_that_takes_no_more_gets_none_and_goes_with_its_last_watch() {
        let lines = lines(9).await;
        let (first, second) = (lines.seat().unwrap().1, lines.seat().unwrap().1);
        lines.give_up(&second);
        drop(second);
        let third = lines.seat().unwrap().1;
        assert_eq!(counts(&lines), [1, 1]);
        // Alone on its connection it was not for want of room.
        lines.give_up(&third);
        let fourth = lines.seat().unwrap().1;
        assert_eq!(counts(&lines), [1, 2]);
        drop(first);
        let _fifth = lines.seat().unwrap().1;
        assert_eq!(counts(&lines), [3]);
        drop((third, fourth));
    }
}
