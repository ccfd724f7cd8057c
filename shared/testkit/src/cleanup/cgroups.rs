//! Cgroup trees in every hierarchy (cgroups(7)).

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::cgroup_hierarchies;
use crate::process::ProcessId;

/// A cgroup stays busy for a moment after its last process has ended.
const LIMIT: Duration = Duration::from_secs(5);

/// The living processes in the cgroup `root` and below it, in any hierarchy.
pub(super) fn processes(root: &str) -> Vec<ProcessId> {
    let mut pids: Vec<u32> = folders(root)
        .iter()
        .flat_map(|folder| tree(folder))
        .filter_map(|group| fs::read_to_string(group.join("cgroup.procs")).ok())
        .flat_map(|text| text.lines().filter_map(|line| line.parse().ok()).collect::<Vec<u32>>())
        .collect();
    pids.sort_unstable();
    pids.dedup();
    pids.into_iter().filter_map(ProcessId::of).collect()
}

/// Removes the cgroup `root` and all below it from every hierarchy.
pub(super) fn remove(root: &str) -> Vec<String> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let problems: Vec<String> = folders(root).iter().filter_map(|folder| remove_tree(folder)).collect();
        if problems.is_empty() || Instant::now() >= deadline {
            return problems;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The folders of the cgroup `root` in each hierarchy that has it; never a hierarchy's own root.
fn folders(root: &str) -> Vec<PathBuf> {
    let relative = Path::new(root.trim_matches('/'));
    let plain = |path: &Path| {
        let mut parts = path.components().peekable();
        parts.peek().is_some() && parts.all(|part| matches!(part, std::path::Component::Normal(_)))
    };
    if !plain(relative) {
        return Vec::new();
    }
    cgroup_hierarchies().iter().map(|point| point.join(relative)).filter(|path| path.is_dir()).collect()
}

/// `folder` and all folders below it, the deepest first.
fn tree(folder: &Path) -> Vec<PathBuf> {
    let mut all = vec![folder.to_owned()];
    let mut next = 0;
    while let Some(parent) = all.get(next) {
        next += 1;
        let Ok(entries) = fs::read_dir(parent) else { continue };
        let children = entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
        let children: Vec<PathBuf> = children.map(|entry| entry.path()).collect();
        all.extend(children);
    }
    all.reverse();
    all
}

fn remove_tree(folder: &Path) -> Option<String> {
    for group in tree(folder) {
        match fs::remove_dir(&group) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Some(format!("the cgroup {} cannot be removed: {error}", group.display()));
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hierarchys_root_is_never_touched() {
        for root in ["", "/", "//", "..", "/a/../..", "."] {
            assert_eq!(folders(root), Vec::<PathBuf>::new(), "{root:?}");
        }
    }

    #[test]
    fn the_deepest_folder_comes_first() {
        let scratch = crate::Scratch::new().unwrap();
        fs::create_dir_all(scratch.path().join("a/b")).unwrap();
        fs::create_dir_all(scratch.path().join("c")).unwrap();
        let tree = tree(scratch.path());
        let at = |name: &str| tree.iter().position(|path| path.ends_with(name)).unwrap();
        assert!(at("a/b") < at("a"));
        assert_eq!(tree.last().unwrap(), scratch.path());
    }
}
