//! What a watch has shown already, so that it shows what has changed and nothing else.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// What has become of an object, in the words of a Kubernetes watch.
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

/// An object as it is shown.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Row {
    /// What counts as a change; what merely grows with time, as an age, is not in it.
    pub(crate) mark: String,
    /// For a table.
    pub(crate) cells: Vec<String>,
    /// For a document.
    pub(crate) document: Value,
}

/// The objects that a watch has shown, through the restarts of whoever tells them.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    rows: BTreeMap<String, Row>,
    /// The keys that the replay has named which goes on now.
    replayed: Option<BTreeSet<String>>,
}

impl Seen {
    /// A replay of everything begins.
    pub(crate) fn opened(&mut self) {
        self.replayed = Some(BTreeSet::new());
    }

    /// An object is so now. `None`: it has been shown so.
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

    /// An object is no more: how it was last. `None`: it was never shown.
    pub(crate) fn gone(&mut self, key: &str) -> Option<Row> {
        self.rows.remove(key)
    }

    /// The replay is whole: the objects that are gone since it was last.
    pub(crate) fn synced(&mut self) -> Vec<Row> {
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
    fn a_change_is_shown_once() {
        let mut seen = Seen::default();
        assert_eq!(seen.set("a", &row("1")), Some(Change::Added));
        assert_eq!(seen.set("a", &row("1")), None);
        assert_eq!(seen.set("a", &row("2")), Some(Change::Modified));
        assert_eq!(seen.gone("a"), Some(row("2")));
        assert_eq!(seen.gone("a"), None);
        assert_eq!(seen.set("a", &row("2")), Some(Change::Added));
    }

    #[test]
    fn a_second_replay_shows_only_what_is_new_and_what_is_gone() {
        let mut seen = Seen::default();
        seen.opened();
        for key in ["a", "b", "c"] {
            seen.set(key, &row("1"));
        }
        assert_eq!(seen.synced(), Vec::<Row>::new());
        seen.opened();
        assert_eq!(seen.set("a", &row("1")), None);
        assert_eq!(seen.set("c", &row("2")), Some(Change::Modified));
        assert_eq!(seen.synced(), [row("1")], "b is gone");
    }

    #[test]
    fn a_replay_that_breaks_takes_nothing_away() {
        let mut seen = Seen::default();
        seen.opened();
        seen.set("a", &row("1"));
        seen.set("b", &row("1"));
        seen.synced();
        seen.opened();
        seen.set("a", &row("1"));
        // The stream breaks before it says synced.
        seen.opened();
        seen.set("a", &row("1"));
        seen.set("b", &row("1"));
        assert_eq!(seen.synced(), Vec::<Row>::new());
    }
}
