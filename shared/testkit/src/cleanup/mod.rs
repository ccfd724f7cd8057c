//! Removing what a private containerd and its agent have made, also when half of it is already gone.
//!
//! Only names are trusted that one run alone has: its folders, sockets, bridges and cgroup roots.

mod cgroups;
mod network;
mod processes;
mod runtime;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rustix::mount::{UnmountFlags, unmount};
use serde::{Deserialize, Serialize};

use crate::mounts_below;
use crate::process::ProcessId;

/// Everything that one run may have left on the machine. Removing it is idempotent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Remains {
    /// Processes that the run started itself: init, containerd.
    pub processes: Vec<ProcessId>,
    /// Run folders: `keelson-…` processes that name one in their arguments belong to the run.
    pub run_dirs: Vec<PathBuf>,
    /// Sockets of private containerds: shims with such an `-address` belong to the run.
    pub containerd_sockets: Vec<PathBuf>,
    /// State folders of private containerds.
    pub containerd_states: Vec<PathBuf>,
    /// Bridges, with all interfaces attached to them.
    pub bridges: Vec<String>,
    /// Names of CNI networks.
    pub cni_networks: Vec<String>,
    /// Cgroups such as `/keelson-test-x`, removed in every hierarchy with all below them and in them.
    pub cgroup_roots: Vec<String>,
    /// Folders, removed with all that is mounted below them.
    pub dirs: Vec<PathBuf>,
}

impl Remains {
    /// Merges `other` into this.
    pub fn merge(&mut self, other: &Self) {
        fn add<T: Clone + PartialEq>(to: &mut Vec<T>, from: &[T]) {
            for item in from {
                if !to.contains(item) {
                    to.push(item.clone());
                }
            }
        }
        add(&mut self.processes, &other.processes);
        add(&mut self.run_dirs, &other.run_dirs);
        add(&mut self.containerd_sockets, &other.containerd_sockets);
        add(&mut self.containerd_states, &other.containerd_states);
        add(&mut self.bridges, &other.bridges);
        add(&mut self.cni_networks, &other.cni_networks);
        add(&mut self.cgroup_roots, &other.cgroup_roots);
        add(&mut self.dirs, &other.dirs);
    }

    /// Removes everything; returns a sentence for each thing that could not be removed.
    pub fn remove(&self) -> Vec<String> {
        let mut problems = processes::kill(self);
        let tasks = runtime::tasks(&self.containerd_states);
        problems.extend(self.dirs.iter().flat_map(|dir| unmount_below(dir)));
        problems.extend(self.bridges.iter().flat_map(|bridge| network::remove_bridge(bridge)));
        network::remove_cni_results(&self.cni_networks);
        runtime::remove_shim_sockets(&tasks);
        let mut roots = self.cgroup_roots.clone();
        roots.extend(runtime::default_cgroups(&tasks));
        problems.extend(roots.iter().flat_map(|root| cgroups::remove(root)));
        problems.extend(self.dirs.iter().filter_map(|dir| remove_dir(dir)));
        // A killed init leaves the lock of its runtime behind; no process can hold it any more.
        for socket in &self.containerd_sockets {
            let name = keelson_config::endpoint_lock_name(&socket.to_string_lossy());
            let _ = std::fs::remove_file(Path::new("/run/lock").join(name));
        }
        problems
    }
}

/// Unmounts everything at or below `dir`.
fn unmount_below(dir: &Path) -> Vec<String> {
    // Mounts may be stacked on one point; each round takes off at least one of each.
    for _ in 0..32 {
        let points = mounts_below(dir);
        if points.is_empty() {
            return Vec::new();
        }
        for point in points {
            // Mounts that cannot be unmounted are reported at the end.
            let _ = unmount(&point, UnmountFlags::DETACH);
        }
    }
    mounts_below(dir).iter().map(|point| format!("{} cannot be unmounted", point.display())).collect()
}

/// Removes `dir` unless something is mounted in it: what is mounted there may be anyone's.
fn remove_dir(dir: &Path) -> Option<String> {
    if !mounts_below(dir).is_empty() {
        return Some(format!("{} is kept, because something is mounted in it", dir.display()));
    }
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Some(format!("{} cannot be removed: {error}", dir.display()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_keeps_each_thing_once() {
        let mut one = Remains { bridges: vec!["a".into()], ..Remains::default() };
        let two =
            Remains { bridges: vec!["a".into(), "b".into()], dirs: vec!["/x".into()], ..Remains::default() };
        one.merge(&two);
        assert_eq!(one.bridges, ["a", "b"]);
        assert_eq!(one.dirs, [PathBuf::from("/x")]);
    }

    #[test]
    fn removing_missing_resources_succeeds() {
        let remains = Remains {
            processes: vec![ProcessId { pid: u32::MAX, start_time: 1 }],
            run_dirs: vec!["/nonexistent/keelson/run".into()],
            containerd_sockets: vec!["/nonexistent/keelson/c.sock".into()],
            containerd_states: vec!["/nonexistent/keelson/state".into()],
            bridges: vec!["kbnone".into()],
            cni_networks: vec!["keelson-none".into()],
            cgroup_roots: vec!["/keelson-none".into()],
            dirs: vec!["/nonexistent/keelson".into()],
        };
        assert_eq!(remains.remove(), Vec::<String>::new());
    }

    #[test]
    fn an_old_record_without_some_fields_is_read() {
        let remains: Remains = serde_json::from_str(r#"{"bridges": ["kb1"]}"#).unwrap();
        assert_eq!(remains.bridges, ["kb1"]);
    }
}
