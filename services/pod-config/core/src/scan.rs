//! Which files of a folder are to be read, and when a folder that is away counts as empty.

use std::collections::BTreeMap;

/// How long a file that is met while it changes must rest before it is read without a word that it was closed.
pub const QUIET_NANOS: i64 = 1_000_000_000;
/// Checks in a row that must find no folder before its pods go.
const MISSING_CHECKS: u32 = 2;

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
    /// Whether to look again soon.
    pub again: bool,
    /// What is wrong with the path.
    pub trouble: Option<String>,
}

/// The versions of the files that were read, and how often the path was missing.
#[derive(Debug, Default)]
pub struct FolderView {
    read: BTreeMap<String, Stamp>,
    missing: u32,
    looked: bool,
}

impl FolderView {
    /// A file was read in this version.
    pub fn was_read(&mut self, path: &str, stamp: Stamp) {
        self.read.insert(path.to_owned(), stamp);
    }

    /// The file could not be read or is gone: the next look tries again.
    pub fn forget(&mut self, path: &str) {
        self.read.remove(path);
    }

    /// Decides after a look at the path. `known` are the files whose content is in use, `now` is in nanoseconds
    /// since 1970.
    ///
    /// A folder that cannot be read takes nothing away. One that is missing does so at the second look, unless
    /// there is nothing to lose.
    pub fn decide(&mut self, path: &str, listing: Listing, known: &[String], now: i64) -> Plan {
        match listing {
            Listing::Files(files) => {
                self.missing = 0;
                let first = !std::mem::replace(&mut self.looked, true);
                self.files(&files, known, now, first)
            }
            Listing::Missing => {
                self.missing = self.missing.saturating_add(1);
                let settled = self.missing >= MISSING_CHECKS || known.is_empty();
                if settled {
                    self.read.clear();
                }
                Plan {
                    remove: if settled { known.to_vec() } else { Vec::new() },
                    settled,
                    again: true,
                    trouble: Some(format!("{path} does not exist; create it, or correct staticPodPath")),
                    ..Plan::default()
                }
            }
            Listing::Unreadable(why) => {
                self.missing = 0;
                Plan { again: true, trouble: Some(why), ..Plan::default() }
            }
        }
    }

    fn files(&mut self, files: &BTreeMap<String, Stamp>, known: &[String], now: i64, first: bool) -> Plan {
        let mut plan = Plan { settled: true, ..Plan::default() };
        self.read.retain(|path, _| files.contains_key(path));
        for (path, stamp) in files {
            if self.read.get(path) == Some(stamp) {
                continue;
            }
            let age = now.saturating_sub(stamp.modified);
            if !first && (0..QUIET_NANOS).contains(&age) {
                plan.again = true;
            } else {
                plan.read.push(path.clone());
            }
        }
        plan.remove = known.iter().filter(|path| !files.contains_key(*path)).cloned().collect();
        plan
    }
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
    fn the_first_look_reads_everything_and_the_next_only_what_changed_and_rests() {
        let mut view = FolderView::default();
        let plan = view.decide("/m", files(&[("a", 99 * SECOND), ("b", 0)]), &[], 99 * SECOND);
        assert_eq!((plan.read, plan.settled, plan.again), (paths(&["a", "b"]), true, false));
        view.was_read("a", stamp(99 * SECOND));
        view.was_read("b", stamp(0));
        let known = paths(&["a", "b"]);
        let plan = view.decide("/m", files(&[("a", 99 * SECOND), ("b", 0)]), &known, 200 * SECOND);
        assert_eq!(plan, Plan { settled: true, ..Plan::default() });
        let now = 200 * SECOND;
        let changed = files(&[("a", now - SECOND), ("b", now - 1)]);
        let plan = view.decide("/m", changed, &known, now);
        assert_eq!((plan.read, plan.again), (paths(&["a"]), true));
        let future = files(&[("a", 99 * SECOND), ("b", now + 9 * SECOND)]);
        assert_eq!(view.decide("/m", future, &known, now).read, paths(&["b"]));
    }

    #[test]
    fn a_file_that_is_gone_is_removed_and_read_again_when_it_comes_back() {
        let mut view = FolderView::default();
        view.was_read("a", stamp(1));
        let plan = view.decide("/m", files(&[]), &paths(&["a"]), 9 * SECOND);
        assert_eq!(plan.remove, paths(&["a"]));
        assert_eq!(view.decide("/m", files(&[("a", 1)]), &[], 9 * SECOND).read, paths(&["a"]));
    }

    #[test]
    fn a_file_that_could_not_be_read_is_tried_again() {
        let mut view = FolderView::default();
        view.was_read("a", stamp(1));
        view.forget("a");
        assert_eq!(view.decide("/m", files(&[("a", 1)]), &[], 9 * SECOND).read, paths(&["a"]));
    }

    #[test]
    fn a_missing_folder_takes_its_pods_only_at_the_second_look() {
        let mut view = FolderView::default();
        let known = paths(&["a"]);
        let plan = view.decide("/m", Listing::Missing, &known, 0);
        assert!(plan.remove.is_empty() && !plan.settled && plan.again);
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
            assert_eq!(plan, Plan { again: true, trouble: Some("locked".into()), ..Plan::default() });
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
