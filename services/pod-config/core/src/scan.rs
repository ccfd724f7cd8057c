//! Which files of a folder to read, and when a missing folder counts as empty.

use std::collections::{BTreeMap, BTreeSet};

/// How long a file must be unchanged before it is read without a close event: its writer may have paused, and the beginning of a
/// manifest is often a valid manifest.
pub const QUIET_NANOS: i64 = 10_000_000_000;
/// The same for changes before the source was watched: the writer has probably finished, and people start an agent right after
/// writing a manifest.
const QUIET_AT_START_NANOS: i64 = 1_000_000_000;
/// Resolution of file timestamps: a change may have a timestamp that is this much too early.
const TICK_NANOS: i64 = 20_000_000;
/// How long changing files hold back a source after its start.
const MAX_HOLD_NANOS: i64 = 3 * QUIET_NANOS;
/// Consecutive scans that must find no folder before its pods are removed.
const MISSING_CHECKS: u32 = 2;
/// Delay before the next scan of a path that is missing or unreadable.
const RETRY_NANOS: i64 = 1_000_000_000;

/// Identifies one version of a file.
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

/// The result of listing the path of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listing {
    /// The files, by full path.
    Files(BTreeMap<String, Stamp>),
    /// The path does not exist.
    Missing,
    /// The path cannot be read; the text says why and what to do.
    Unreadable(String),
}

/// What to do after a scan.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Files to read.
    pub read: Vec<String>,
    /// Files that were deleted.
    pub remove: Vec<String>,
    /// Whether the source has been read completely, so that pods that are not in it are not desired.
    pub settled: bool,
    /// Files that may still be written to. Their restored content is used meanwhile.
    pub still_changing: Vec<String>,
    /// Nanoseconds until the next scan; `None` for the regular interval.
    pub rescan_after: Option<i64>,
    /// What is wrong with the path, and what to do.
    pub path_error: Option<String>,
}

/// The versions of the files that were read, and how often the path was missing.
#[derive(Debug, Default)]
pub struct FolderView {
    read: BTreeMap<String, Stamp>,
    /// Files that exist but could not be read.
    unreadable: BTreeSet<String>,
    missing: u32,
    /// When the path was first found.
    started_at: Option<i64>,
    settled: bool,
}

impl FolderView {
    /// Records that a file was read in this version.
    pub fn record_read(&mut self, path: &str, stamp: Stamp) {
        self.unreadable.remove(path);
        self.read.insert(path.to_owned(), stamp);
    }

    /// Records that the file could not be read: the next scan tries again.
    pub fn record_unreadable(&mut self, path: &str) {
        self.read.remove(path);
        self.unreadable.insert(path.to_owned());
    }

    /// Forgets a deleted file.
    pub fn forget(&mut self, path: &str) {
        self.read.remove(path);
        self.unreadable.remove(path);
    }

    /// Nanoseconds until a file whose attributes have changed may be read; 0 for now. An attribute change does not mean that the
    /// writer has finished, but it may have made the file readable.
    pub fn readable_in(&self, path: &str, stamp: &Stamp, now: i64) -> i64 {
        if self.unreadable.contains(path) { 0 } else { quiet_in(stamp, QUIET_NANOS, now) }
    }

    /// Decides what to do after a listing of the path. `known` are the files whose content is in use, `now` is in nanoseconds
    /// since 1970.
    ///
    /// An unreadable folder removes no pods. A missing one does at the second scan in a row, or at once if no file is known. A
    /// file that may still be written to is left for a later scan; if its content is not known, it holds back a source that has
    /// just started, for at most 30 s. A file from before the first scan is read after one second without a change, a later one
    /// after ten.
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
                    rescan_after: Some(RETRY_NANOS),
                    path_error: Some(format!("{path} does not exist; create it, or correct staticPodPath")),
                    ..Plan::default()
                }
            }
            Listing::Unreadable(message) => {
                self.missing = 0;
                Plan { rescan_after: Some(RETRY_NANOS), path_error: Some(message), ..Plan::default() }
            }
        }
    }

    fn files(&mut self, files: &BTreeMap<String, Stamp>, known: &[String], now: i64) -> Plan {
        let mut plan = Plan::default();
        self.read.retain(|path, _| files.contains_key(path));
        self.unreadable.retain(|path| files.contains_key(path));
        let started_at = *self.started_at.get_or_insert(now);
        for (path, stamp) in files {
            if self.read.get(path) == Some(stamp) {
                continue;
            }
            let changed_before_start = stamp.modified < started_at.saturating_sub(TICK_NANOS);
            let quiet = if changed_before_start { QUIET_AT_START_NANOS } else { QUIET_NANOS };
            match quiet_in(stamp, quiet, now) {
                0 => plan.read.push(path.clone()),
                wait => {
                    plan.rescan_after = Some(plan.rescan_after.map_or(wait, |soonest| soonest.min(wait)));
                    plan.still_changing.push(path.clone());
                }
            }
        }
        plan.remove = known.iter().filter(|path| !files.contains_key(*path)).cloned().collect();
        let is_held_back = now.saturating_sub(started_at) < MAX_HOLD_NANOS
            && plan.still_changing.iter().any(|path| !known.contains(path));
        plan.settled = self.settled || !is_held_back;
        plan
    }
}

/// Nanoseconds until the file has been unchanged for `quiet`; 0 if it has. A timestamp far in the future means that the clock was
/// set back, not that the file is being written.
fn quiet_in(stamp: &Stamp, quiet: i64, now: i64) -> i64 {
    let age = now.saturating_sub(stamp.modified);
    if age.saturating_abs() < quiet { quiet - age } else { 0 }
}

/// Whether a file of this name is hidden, or a backup, swap or temporary file of an editor.
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
    fn only_changed_files_that_are_quiet_are_read() {
        let mut view = FolderView::default();
        let plan = view.decide("/m", files(&[("a", 89 * SECOND), ("b", 0)]), &[], 99 * SECOND);
        assert_eq!((plan.read, plan.settled, plan.rescan_after), (paths(&["a", "b"]), true, None));
        view.record_read("a", stamp(89 * SECOND));
        view.record_read("b", stamp(0));
        let known = paths(&["a", "b"]);
        let plan = view.decide("/m", files(&[("a", 89 * SECOND), ("b", 0)]), &known, 200 * SECOND);
        assert_eq!(plan, Plan { settled: true, ..Plan::default() });
        let now = 200 * SECOND;
        let changed = files(&[("a", now - QUIET_NANOS), ("b", now - QUIET_NANOS + 7)]);
        let plan = view.decide("/m", changed, &known, now);
        assert_eq!(
            (plan.read, plan.still_changing, plan.rescan_after),
            (paths(&["a"]), paths(&["b"]), Some(7))
        );
        assert!(plan.settled, "a settled source stays settled");
        let future = files(&[("a", now + QUIET_NANOS), ("b", now + SECOND)]);
        let plan = view.decide("/m", future, &known, now);
        assert_eq!((plan.read, plan.rescan_after), (paths(&["a"]), Some(11 * SECOND)));
    }

    #[test]
    fn a_changing_file_holds_back_a_new_source_for_30_s_unless_its_content_is_known() {
        let scan = |view: &mut FolderView, known: &[&str], now: i64| {
            let plan = view.decide("/m", files(&[("a", now - SECOND / 2)]), &paths(known), now);
            assert_eq!((plan.read, plan.still_changing), (paths(&[]), paths(&["a"])));
            plan.settled
        };
        let mut view = FolderView::default();
        assert!(!scan(&mut view, &[], 100 * SECOND));
        assert!(!scan(&mut view, &[], 129 * SECOND));
        assert!(scan(&mut view, &[], 130 * SECOND));
        assert!(scan(&mut FolderView::default(), &["a"], 100 * SECOND));
    }

    #[test]
    fn a_file_written_just_before_the_start_is_read_after_one_second() {
        let mut view = FolderView::default();
        let mut scan = |now: i64| {
            let plan = view.decide("/m", files(&[("a", 100 * SECOND - 2 * TICK_NANOS)]), &[], now);
            (plan.read, plan.rescan_after)
        };
        assert_eq!(scan(100 * SECOND), (paths(&[]), Some(SECOND - 2 * TICK_NANOS)));
        let quiet_at = 101 * SECOND - 2 * TICK_NANOS;
        assert_eq!(scan(quiet_at - 1), (paths(&[]), Some(1)));
        assert_eq!(scan(quiet_at), (paths(&["a"]), None));
        // Changes after the watch was set must be quiet for longer.
        let plan = view.decide("/m", files(&[("b", 101 * SECOND)]), &paths(&["b"]), 103 * SECOND);
        assert_eq!((plan.read, plan.rescan_after), (paths(&[]), Some(8 * SECOND)));
    }

    #[test]
    fn an_attribute_change_waits_for_the_writer_unless_the_file_was_unreadable() {
        let mut view = FolderView::default();
        assert_eq!(view.readable_in("a", &stamp(98 * SECOND), 100 * SECOND), 8 * SECOND);
        assert_eq!(view.readable_in("a", &stamp(90 * SECOND), 100 * SECOND), 0);
        view.record_unreadable("a");
        assert_eq!(view.readable_in("a", &stamp(98 * SECOND), 100 * SECOND), 0);
        view.record_read("a", stamp(98 * SECOND));
        assert_eq!(view.readable_in("a", &stamp(98 * SECOND), 100 * SECOND), 8 * SECOND);
    }

    #[test]
    fn a_deleted_file_is_removed_and_read_again_when_it_returns() {
        let mut view = FolderView::default();
        view.record_read("a", stamp(1));
        let plan = view.decide("/m", files(&[]), &paths(&["a"]), 19 * SECOND);
        assert_eq!(plan.remove, paths(&["a"]));
        assert_eq!(view.decide("/m", files(&[("a", 1)]), &[], 19 * SECOND).read, paths(&["a"]));
    }

    #[test]
    fn an_unreadable_file_is_retried() {
        let mut view = FolderView::default();
        view.record_read("a", stamp(1));
        view.record_unreadable("a");
        assert_eq!(view.decide("/m", files(&[("a", 1)]), &[], 19 * SECOND).read, paths(&["a"]));
    }

    #[test]
    fn a_missing_folder_removes_its_pods_only_at_the_second_scan() {
        let mut view = FolderView::default();
        let known = paths(&["a"]);
        let plan = view.decide("/m", Listing::Missing, &known, 0);
        assert!(plan.remove.is_empty() && !plan.settled && plan.rescan_after.is_some());
        assert!(plan.path_error.unwrap().contains("/m does not exist"));
        let plan = view.decide("/m", Listing::Missing, &known, 0);
        assert_eq!((plan.remove, plan.settled), (known, true));
    }

    #[test]
    fn a_missing_folder_must_be_missing_in_consecutive_scans() {
        let mut view = FolderView::default();
        let known = paths(&["a"]);
        view.decide("/m", Listing::Missing, &known, 0);
        view.decide("/m", Listing::Unreadable("no".into()), &known, 0);
        assert!(!view.decide("/m", Listing::Missing, &known, 0).settled);
        view.decide("/m", files(&[("a", 0)]), &known, 0);
        assert!(!view.decide("/m", Listing::Missing, &known, 0).settled);
    }

    #[test]
    fn a_missing_folder_without_known_files_settles_the_source_at_once() {
        assert!(FolderView::default().decide("/m", Listing::Missing, &[], 0).settled);
    }

    #[test]
    fn an_unreadable_folder_removes_no_pods_and_does_not_settle_the_source() {
        let mut view = FolderView::default();
        for _ in 0..3 {
            let plan = view.decide("/m", Listing::Unreadable("locked".into()), &paths(&["a"]), 0);
            assert_eq!(
                plan,
                Plan {
                    rescan_after: Some(RETRY_NANOS),
                    path_error: Some("locked".into()),
                    ..Plan::default()
                }
            );
        }
    }

    #[test]
    fn hidden_and_backup_files_are_ignored() {
        for name in [".a.yaml.swp", "a.yaml~", "a.bak", "a.yaml.swp", "a.tmp", ".hidden", "#a.yaml#"] {
            assert!(is_ignored(name), "{name}");
        }
        for name in ["a.yaml", "a.json", "a", "a.bak.yaml", "tmp", "#"] {
            assert!(!is_ignored(name), "{name}");
        }
    }
}
