//! Snapshots of everything on the machine that a run could leave behind.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use keelson_mountinfo::Mount;

use crate::process;
use crate::system::{cgroup_hierarchies, mounts_of};

/// Programs whose processes are listed.
const PROGRAMS: [&str; 3] = ["containerd", "keelson", "runc"];

/// Names of cgroups that hold pods or are ours.
const CGROUPS: [&str; 3] = ["kubepods", "keelson", "k8s.io"];

/// Folders that agents and runtimes share, and whose entries are listed.
const SHARED_FOLDERS: [&str; 8] = [
    "/run/netns",
    "/run/containerd/s",
    "/run/keelson",
    "/var/lib/keelson",
    "/var/lib/cni/networks",
    "/var/lib/cni/results",
    "/var/log/containers",
    "/var/log/pods",
];

/// The machine at one moment: one line for each thing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    things: BTreeSet<String>,
}

impl Snapshot {
    /// Looks at processes, mounts, network namespaces, links, cgroups, iptables rules and shared folders.
    pub fn take() -> Self {
        let mut things = BTreeSet::new();
        things.extend(processes());
        things.extend(mounts());
        things.extend(links());
        things.extend(cgroups());
        things.extend(iptables());
        things.extend(SHARED_FOLDERS.iter().flat_map(|folder| entries(Path::new(folder))));
        Self { things }
    }

    /// The entries that only `later` has (`left: …`) and those that only `self` has (`gone: …`).
    pub fn diff(&self, later: &Self) -> Vec<String> {
        let left = later.things.difference(&self.things).map(|thing| format!("left: {thing}"));
        let gone = self.things.difference(&later.things).map(|thing| format!("gone: {thing}"));
        left.chain(gone).collect()
    }

    /// The entries that only `later` has and that contain one of `marks`, so that other runs on the machine do not disturb.
    pub fn left_of(&self, later: &Self, marks: &[&str]) -> Vec<String> {
        let left = later.things.difference(&self.things);
        left.filter(|thing| marks.iter().any(|mark| thing.contains(mark))).cloned().collect()
    }
}

fn processes() -> Vec<String> {
    let ours = |process: &process::Process| {
        let name = process.exe_name().unwrap_or_default();
        let path = fs::read_to_string(format!("/proc/{}/cgroup", process.id.pid)).unwrap_or_default();
        // The kit's own tests are programs of ours, too.
        PROGRAMS.iter().any(|program| name.starts_with(program)) && process.id.pid != std::process::id()
            || CGROUPS.iter().any(|group| path.contains(&format!("/{group}")))
    };
    let all = process::all();
    let named = |p: &process::Process| format!("process {} {}", p.id.pid, p.args.join(" "));
    all.iter().filter(|p| ours(p)).map(named).collect()
}

fn mounts() -> Vec<String> {
    let line = |m: Mount| format!("mount {} {} {}", m.point.display(), m.fs_type, m.root.display());
    mounts_of("self").into_iter().map(line).collect()
}

fn links() -> Vec<String> {
    let names = fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    names
        .map(|entry| {
            let master = fs::read_link(entry.path().join("master")).unwrap_or_default();
            let master = master.file_name().unwrap_or_default().to_string_lossy().into_owned();
            format!("link {} {master}", entry.file_name().to_string_lossy())
        })
        .collect()
}

fn cgroups() -> Vec<String> {
    let mut found = Vec::new();
    for hierarchy in cgroup_hierarchies() {
        let tops = fs::read_dir(&hierarchy).into_iter().flatten().flatten().map(|entry| entry.path());
        let named = |path: &Path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            path.is_dir() && CGROUPS.iter().any(|group| name.starts_with(group))
        };
        let mut open: Vec<_> = tops.filter(|path| named(path)).collect();
        while let Some(folder) = open.pop() {
            let children = fs::read_dir(&folder).into_iter().flatten().flatten();
            open.extend(children.map(|entry| entry.path()).filter(|path| path.is_dir()));
            found.push(format!("cgroup {}", folder.display()));
        }
    }
    found
}

/// The rules of every table, without counters and comments; none if iptables is not installed.
fn iptables() -> Vec<String> {
    let Ok(program) = crate::find_file("iptables-save") else { return Vec::new() };
    let Ok(output) = Command::new(program).stdin(Stdio::null()).output() else { return Vec::new() };
    let text = String::from_utf8_lossy(&output.stdout);
    let mut table = "";
    let mut rules = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = name;
        } else if line.starts_with('-') {
            rules.push(format!("iptables {table} {line}"));
        } else if let Some((chain, _counters)) = line.strip_prefix(':').and_then(|l| l.split_once(' ')) {
            rules.push(format!("iptables {table} chain {chain}"));
        }
    }
    rules
}

fn entries(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| format!("file {}", entry.path().display())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(things: &[&str]) -> Snapshot {
        Snapshot { things: things.iter().map(|thing| (*thing).to_owned()).collect() }
    }

    #[test]
    fn a_difference_names_added_and_removed_resources() {
        let (before, after) = (snapshot(&["a", "b"]), snapshot(&["b", "mount /tmp/k-1/x"]));
        assert_eq!(before.diff(&after), ["left: mount /tmp/k-1/x", "gone: a"]);
        assert_eq!(before.left_of(&after, &["k-1"]), ["mount /tmp/k-1/x"]);
        assert_eq!(before.left_of(&after, &["k-2"]), Vec::<String>::new());
    }

    #[test]
    fn this_machine_has_a_loopback_link_and_a_root_mount() {
        let things = Snapshot::take().things;
        assert!(things.iter().any(|thing| thing.starts_with("link lo")));
        assert!(things.iter().any(|thing| thing.starts_with("mount / ")));
    }
}
