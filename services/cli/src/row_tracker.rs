//! Tracks the rows that a watch has shown, so that it shows only changes.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// How an object changed, in the words of a Kubernetes watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Added,
    Modified,
    Deleted,
}

impl Change {
    /// The word in `--output-watch-events`.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Added => "ADDED",
            Self::Modified => "MODIFIED",
            Self::Deleted => "DELETED",
        }
    }
}

/// An object as a table row and as a document.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Row {
    /// The values whose change counts as a change of the row; without those that only grow with time, such as an age.
    pub(crate) mark: String,
    /// For a table.
    pub(crate) cells: Vec<String>,
    /// For a document.
    pub(crate) document: Value,
}

/// The objects that a watch has shown, also across restarts of the service that reports them.
#[derive(Debug, Default)]
pub(crate) struct RowTracker {
    rows: BTreeMap<String, Row>,
    /// The keys in the current replay; `None` outside of one.
    replayed: Option<BTreeSet<String>>,
}

impl RowTracker {
    /// Begins a replay of all objects.
    pub(crate) fn begin_replay(&mut self) {
        self.replayed = Some(BTreeSet::new());
    }

    /// Stores the current row of an object. `None`: it was shown already and has not changed.
    pub(crate) fn set(&mut self, key: &str, row: &Row) -> Option<Change> {
        if let Some(replayed) = &mut self.replayed {
            replayed.insert(key.to_owned());
        }
        let before = self.rows.insert(key.to_owned(), row.clone());
        match before {
            None => Some(Change::Added),
            Some(before) if before.mark == row.mark => None,
            Some(_) => Some(Change::Modified),
        }
    }

    /// Removes an object that no longer exists and returns its last row. `None`: it was never shown.
    pub(crate) fn remove(&mut self, key: &str) -> Option<Row> {
        self.rows.remove(key)
    }

    /// Ends a replay and removes the objects that it did not contain; returns their last rows.
    pub(crate) fn end_replay(&mut self) -> Vec<Row> {
        let Some(replayed) = self.replayed.take() else { return Vec::new() };
        let gone: Vec<String> = self.rows.keys().filter(|key| !replayed.contains(*key)).cloned().collect();
        gone.iter().filter_map(|key| self.rows.remove(key)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(mark: &str) -> Row {
        Row { mark: mark.into(), ..Row::default() }
    }

    #[test]
    fn a_change_is_returned_once() {
        let mut tracker = RowTracker::default();
        assert_eq!(tracker.set("a", &row("1")), Some(Change::Added));
        assert_eq!(tracker.set("a", &row("1")), None);
        assert_eq!(tracker.set("a", &row("2")), Some(Change::Modified));
        assert_eq!(tracker.remove("a"), Some(row("2")));
        assert_eq!(tracker.remove("a"), None);
        assert_eq!(tracker.set("a", &row("2")), Some(Change::Added));
    }

    #[test]
    fn second_replay_returns_only_changes_and_deletions() {
        let mut tracker = RowTracker::default();
        tracker.begin_replay();
        for key in ["a", "b", "c"] {
            tracker.set(key, &row("1"));
        }
        assert_eq!(tracker.end_replay(), Vec::<Row>::new());
        tracker.begin_replay();
        assert_eq!(tracker.set("a", &row("1")), None);
        assert_eq!(tracker.set("c", &row("2")), Some(Change::Modified));
        assert_eq!(tracker.end_replay(), [row("1")], "b is gone");
    }

    #[test]
    fn broken_replay_deletes_no_rows() {
        let mut tracker = RowTracker::default();
        tracker.begin_replay();
        tracker.set("a", &row("1"));
        tracker.set("b", &row("1"));
        tracker.end_replay();
        tracker.begin_replay();
        tracker.set("a", &row("1"));
        // The stream breaks before it ends the replay.
        tracker.begin_replay();
        tracker.set("a", &row("1"));
        tracker.set("b", &row("1"));
        assert_eq!(tracker.end_replay(), Vec::<Row>::new());
    }
}
