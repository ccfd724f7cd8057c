//! Where the drain of each service's event ring stands.

use serde::{Deserialize, Serialize};

/// The last event that was taken from one ring. Kept across restarts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Cursor {
    /// Names the start of the service whose ring this is.
    pub ring_id: String,
    /// Sequence of the last event that was taken.
    pub sequence: u64,
}

/// What one read of a ring gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<'a> {
    /// Names the start of the service that answered.
    pub ring_id: &'a str,
    /// Sequence of the newest event in the ring.
    pub last_sequence: u64,
    /// Events that were overwritten before this read, as the service counts them.
    pub lost: u64,
}

/// The outcome of a read: where to go on, and what is known to be missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// Where the next read goes on.
    pub next: Cursor,
    /// Events that nobody will ever see.
    pub lost: u64,
    /// The service was started anew since the last read. Events that it had recorded before are gone with
    /// it; how many, nobody knows.
    pub restarted: bool,
}

impl Cursor {
    /// Moves past a page. Depends only on the arguments; the caller keeps `next` once the events are handed on.
    pub fn advance(&self, page: &Page<'_>) -> Taken {
        let restarted = !self.ring_id.is_empty() && self.ring_id != page.ring_id;
        Taken {
            next: Self { ring_id: page.ring_id.to_owned(), sequence: page.last_sequence },
            lost: page.lost,
            restarted,
        }
    }
}
