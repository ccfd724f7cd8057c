//! Which files of a folder are to be read, and when a folder that is away counts as empty.

use std::collections::{BTreeMap, BTreeSet};

/// How long a file must be unchanged before it is read without a word that it was closed: nobody tells of a writer
/// that pauses, and the beginning of a manifest is often a manifest too.
pub const QUIET_NANOS: i64 = 10_000_000_000;
/// The same for a change from before the source was watched: its writer has most likely ended, and people start an
/// agent right after they have written a manifest.
const QUIET_BEFORE_NANOS: i64 = 1_000_000_000;
/// File systems take their times from a clock that ticks: a change may bear a time that lies so far before it.
const TICK_NANOS: i64 = 20_000_000;
/// How long files that do not come to rest hold back a source that has just been started.
const HOLD_NANOS: i64 = 3 * QUIET_NANOS;
/// Checks in a row that must find no folder before its pods go.
const MISSING_CHECKS: u32 = 2;
/// Between two looks at a path that is missing or cannot be read.
const AGAIN_NANOS: i64 = 1_000_000_000;

/// What tells one version of a file from another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stamp {
    /// Device of the file system.
    pub device: u64,
    /// Inode.
    pub inode: u64,
    /// Bytes.
    pub size: u64,
    /// Last change of the content, nanoseconds since 1970.
    pub modified: i64,
    /// Last change of the inode, nanoseconds since 1970.
    pub changed: i64,
}

/// What a look at the path of a source has found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listing {
    /// The files, by full path.
    Files(BTreeMap<String, Stamp>),
    /// There is nothing at the path.
    Missing,
    /// The path cannot be read; the text says why and what helps.
    Unreadable(String),
}

/// What to do after a look.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Files to read.
    pub read: Vec<String>,
    /// Files that are gone.
    pub remove: Vec<String>,
    /// Whether the source has now said everything, so that what it does not name is not wanted.
    pub settled: bool,
    /// Files that may still be being written. What an earlier run knew of them goes on meanwhile.
    pub unrested: Vec<String>,
    /// In how many nanoseconds to look again; `None`: at the next regular look.
    pub again: Option<i64>,
    /// What is wrong with the path.
    pub trouble: Option<String>,
}

/// The versions of the files that were read, and how often the path was missing.
#[derive(Debug, Default)]
pub struct FolderView {
    read: BTreeMap<String, Stamp>,
    /// Files that were there but could not be read.
    refused: BTreeSet<String>,
    missing: u32,
    /// When the path was first there, until the source has settled.
    begun: Option<i64>,
    settled: bool,
}

impl FolderView {
    /// A file was read in this version.
    pub fn was_read(&mut self, path: &str, stamp: Stamp) {
        self.refused.remove(path);
        self.read.insert(path.to_owned(), stamp);
    }

    /// The file could not be read: the next look tries again.
    pub fn was_refused(&mut self, path: &str) {
        self.read.remove(path);
        self.refused.insert(path.to_owned());
    }

    /// The file is gone.
    pub fn forget(&mut self, path: &str) {
        self.read.remove(path);
        self.refused.remove(path);
    }

    /// In how many nanoseconds a file whose attributes have changed may be read; 0: now. A change of attributes
    /// does not say that the writer has ended, but it may let us read what we could not.
    pub fn readable_in(&self, path: &str, stamp: &Stamp, now: i64) -> i64 {
        if self.refused.contains(path) { 0 } else { rests_in(stamp, QUIET_NANOS, now) }
    }

    /// Decides after a look at the path. `known` are the files whose content is in use, `now` is in nanoseconds
    /// since 1970.
    ///
    /// A folder that cannot be read takes nothing away. One that is missing does so at the second look, unless
    /// there is nothing to lose. A file that may still be being written is left for a later look; while nothing is
    /// known of it, it holds back a source that has just been started, for 30 s at most. What was there before the
    /// first look is read after a second without a change, what changes later after ten.
    pub fn decide(&mut self, path: &str, listing: Listing, known: &[String], now: i64) -> Plan {
        match listing {
            Listing::Files(files) => {
                self.missing = 0;
                let plan = self.files(&files, known, now);
                self.settled |= plan.settled;
                plan
            }
            Listing::Missing => {
                self.missing = self.missing.saturating_add(1);
                let settled = self.missing >= MISSING_CHECKS || known.is_empty();
                if settled {
                    self.read.clear();
                    self.settled = true;
                }
                Plan {
                    remove: if settled { known.to_vec() } else { Vec::new() },
                    settled,
                    again: Some(AGAIN_NANOS),
                    trouble: Some(format!("{path} does not exist; create it, or correct staticPodPath")),
                    ..Plan::default()
                }
            }
            Listing::Unreadable(why) => {
                self.missing = 0;
                Plan { again: Some(AGAIN_NANOS), trouble: Some(why), ..Plan::default() }
            }
        }
    }

    fn files(&mut self, files: &BTreeMap<String, Stamp>, known: &[String], now: i64) -> Plan {
        let mut plan = Plan::default();
        self.read.retain(|path, _| files.contains_key(path));
        self.refused.retain(|path| files.contains_key(path));
        let begun = *self.begun.get_or_insert(now);
        for (path, stamp) in files {
            if self.read.get(path) == Some(stamp) {
                continue;
            }
            let before = stamp.modified < begun.saturating_sub(TICK_NANOS);
            let quiet = if before { QUIET_BEFORE_NANOS } else { QUIET_NANOS };
            match rests_in(stamp, quiet, now) {
                0 => plan.read.push(path.clone()),
                wait => {
                    plan.again = Some(plan.again.map_or(wait, |soonest| soonest.min(wait)));
                    plan.unrested.push(path.clone());
                }
            }
        }
        plan.remove = known.iter().filter(|path| !files.contains_key(*path)).cloned().collect();
        let held =
            now.saturating_sub(begun) < HOLD_NANOS && plan.unrested.iter().any(|path| !known.contains(path));
        plan.settled = self.settled || !held;
        plan
    }
}

/// Nanoseconds until the file has been unchanged for so long; 0 when it has. A time of change far in the future says
/// that the clock was set back, not that somebody writes.
fn rests_in(stamp: &Stamp, quiet: i64, now: i64) -> i64 {
    let age = now.saturating_sub(stamp.modified);
    if age.saturating_abs() < quiet { quiet - age } else { 0 }
}

/// Whether a file of this name is no manifest but an editor's backup, swap or temporary file.
pub fn is_ignored(name: &str) -> bool {
    name.starts_with('.')
        || name.ends_with('~')
        || [".bak", ".swp", ".tmp"].iter().any(|suffix| name.ends_with(suffix))
        || (name.len() > 1 && name.starts_with('#') && name.ends_with('#'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000_000;

    fn files(list: &[(&str, i64)]) -> Listing {
        Listing::Files(list.iter().map(|(p, at)| ((*p).to_owned(), stamp(*at))).collect())
    }

    fn stamp(at: i64) -> Stamp {
        Stamp { modified: at, ..Stamp::default() }
    }

    fn paths(list: &[&str]) -> Vec<String> {
        list.iter().map(|p| (*p).to_owned()).collect()
    }

    #[test]
    fn only_what_changed_and_rests_is_read() {
        let mut view = FolderView::default();
        let plan = view.decide("/m", files(&[("a", 89 * SECOND), ("b", 0)]), &[], 99 * SECOND);
        assert_eq!((plan.read, plan.settled, plan.again), (paths(&["a", "b"]), true, None));
        view.was_read("a", stamp(89 * SECOND));
        view.was_read("b", stamp(0));
        let known = paths(&["a", "b"]);
        let plan = view.decide("/m", files(&[("a", 89 * SECOND), ("b", 0)]), &known, 200 * SECOND);
        assert_eq!(plan, Plan { settled: true, ..Plan::default() });
        let now = 200 * SECOND;
        let changed = files(&[("a", now - QUIET_NANOS), ("b", now - QUIET_NANOS + 7)]);
        let plan = view.decide("/m", changed, &known, now);
        assert_eq!((plan.read, plan.unrested, plan.again), (paths(&["a"]), paths(&["b"]), Some(7)));
        assert!(plan.settled, "what was settled stays so");
        let future = files(&[("a", now + QUIET_NANOS), ("b", now + SECOND)]);
        let plan = view.decide("/m", future, &known, now);
        assert_eq!((plan.read, plan.again), (paths(&["a"]), Some(11 * SECOND)));
    }

    #[test]
    fn a_file_that_does_not_rest_holds_back_a_new_source_unless_something_is_known_of_it_and_not_for_ever() {
        let look = |view: &mut FolderView, known: &[&str], now: i64| {
            let plan = view.decide("/m", files(&[("a", now - SECOND / 2)]), &paths(known), now);
            assert_eq!((plan.read, plan.unrested), (paths(&[]), paths(&["a"])));
            plan.settled
        };
        let mut view = FolderView::default();
        assert!(!look(&mut view, &[], 100 * SECOND));
        assert!(!look(&mut view, &[], 129 * SECOND));
        assert!(look(&mut view, &[], 130 * SECOND));
        assert!(look(&mut FolderView::default(), &["a"], 100 * SECOND));
    }

    #[test]
    fn what_was_written_just_before_the_start_is_read_after_a_second() {
        let mut view = FolderView::default();
        let mut look = |now: i64| {
            let plan = view.decide("/m", files(&[("a", 100 * SECOND - 2 * TICK_NANOS)]), &[], now);
            (plan.read, plan.again)
        };
        assert_eq!(look(100 * SECOND), (paths(&[]), Some(SECOND - 2 * TICK_NANOS)));
        let rested = 101 * SECOND - 2 * TICK_NANOS;
        assert_eq!(look(rested - 1), (paths(&[]), Some(1)));
        assert_eq!(look(rested), (paths(&["a"]), None));
        // What changes under the watch rests longer.
        let plan = view.decide("/m", files(&[("b", 101 * SECOND)]), &paths(&["b"]), 103 * SECOND);
        assert_eq!((plan.read, plan.again), (paths(&[]), Some(8 * SECOND)));
    }

    #[test]
    fn a_change_of_attributes_waits_for_the_writer_unless_the_file_could_not_be_read() {
        let mut view = FolderView::default();
        assert_eq!(view.readable_in("a", &stamp(98 * SECOND), 100 * SECOND), 8 * SECOND);
        assert_eq!(view.readable_in("a", &stamp(90 * SECOND), 100 * SECOND), 0);
        view.was_refused("a");
        assert_eq!(view.readable_in("a", &stamp(98 * SECOND), 100 * SECOND), 0);
        view.was_read("a", stamp(98 * SECOND));
        assert_eq!(view.readable_in("a", &stamp(98 * SECOND), 100 * SECOND), 8 * SECOND);
    }

    #[test]
    fn a_file_that_is_gone_is_removed_and_read_again_when_it_comes_back() {
        let mut view = FolderView::default();
        view.was_read("a", stamp(1));
        let plan = view.decide("/m", files(&[]), &paths(&["a"]), 19 * SECOND);
        assert_eq!(plan.remove, paths(&["a"]));
        assert_eq!(view.decide("/m", files(&[("a", 1)]), &[], 19 * SECOND).read, paths(&["a"]));
    }

    #[test]
    fn a_file_that_could_not_be_read_is_tried_again() {
        let mut view = FolderView::default();
        view.was_read("a", stamp(1));
        view.was_refused("a");
        assert_eq!(view.decide("/m", files(&[("a", 1)]), &[], 19 * SECOND).read, paths(&["a"]));
    }

    #[test]
    fn a_missing_folder_takes_its_pods_only_at_the_second_look() {
        let mut view = FolderView::default();
        let known = paths(&["a"]);
        let plan = view.decide("/m", Listing::Missing, &known, 0);
        assert!(plan.remove.is_empty() && !plan.settled && plan.again.is_some());
        assert!(plan.trouble.unwrap().contains("/m does not exist"));
        let plan = view.decide("/m", Listing::Missing, &known, 0);
        assert_eq!((plan.remove, plan.settled), (known, true));
    }

    #[test]
    fn the_looks_at_a_missing_folder_must_follow_each_other() {
        let mut view = FolderView::default();
        let known = paths(&["a"]);
        view.decide("/m", Listing::Missing, &known, 0);
        view.decide("/m", Listing::Unreadable("no".into()), &known, 0);
        assert!(!view.decide("/m", Listing::Missing, &known, 0).settled);
        view.decide("/m", files(&[("a", 0)]), &known, 0);
        assert!(!view.decide("/m", Listing::Missing, &known, 0).settled);
    }

    #[test]
    fn a_missing_folder_with_nothing_to_lose_is_an_empty_source_at_once() {
        assert!(FolderView::default().decide("/m", Listing::Missing, &[], 0).settled);
    }

    #[test]
    fn an_unreadable_folder_takes_nothing_away_and_settles_nothing() {
        let mut view = FolderView::default();
        for _ in 0..3 {
            let plan = view.decide("/m", Listing::Unreadable("locked".into()), &paths(&["a"]), 0);
            assert_eq!(
                plan,
                Plan { again: Some(AGAIN_NANOS), trouble: Some("locked".into()), ..Plan::default() }
            );
        }
    }

    #[test]
    fn editors_leftovers_are_no_manifests() {
        for name in [".a.yaml.swp", "a.yaml~", "a.bak", "a.yaml.swp", "a.tmp", ".hidden", "#a.yaml#"] {
            assert!(is_ignored(name), "{name}");
        }
        for name in ["a.yaml", "a.json", "a", "a.bak.yaml", "tmp", "#"] {
            assert!(!is_ignored(name), "{name}");
        }
    }
}
