//! The position in each service's event ring.

use serde::{Deserialize, Serialize};

/// The last event read from a ring. Saved across restarts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Cursor {
    /// Identifies the start of the service that owns the ring.
    pub ring_id: String,
    /// Sequence of the last event read.
    pub sequence: u64,
}

/// The result of one read of a ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<'a> {
    /// Identifies the start of the service that answered.
    pub ring_id: &'a str,
    /// Sequence of the newest event in the ring.
    pub last_sequence: u64,
    /// Events that were overwritten before this read, as the service counts them.
    pub lost: u64,
}

/// The cursor after a read, and the events that are missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CursorUpdate {
    /// Where the next read continues.
    pub next: Cursor,
    /// Events that are lost.
    pub lost: u64,
    /// The service has restarted since the last read. Events that it recorded before are lost; their number is unknown.
    pub restarted: bool,
}

impl Cursor {
    /// Moves past a page. Depends only on the arguments; the caller stores `next` once the events are written.
    pub fn advance(&self, page: &Page<'_>) -> CursorUpdate {
        let restarted = !self.ring_id.is_empty() && self.ring_id != page.ring_id;
        CursorUpdate {
            next: Self { ring_id: page.ring_id.to_owned(), sequence: page.last_sequence },
            lost: page.lost,
            restarted,
        }
    }
}
