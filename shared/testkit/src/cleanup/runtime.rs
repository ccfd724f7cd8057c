//! The files that containerd's shims leave outside of containerd's own folders.

use std::fs;
use std::path::{Path, PathBuf};

/// A task whose folder is still in containerd's state.
#[derive(Debug)]
pub(super) struct Task {
    namespace: String,
    id: String,
    /// The shim's socket, as the shim wrote it into the task's folder.
    shim_socket: Option<PathBuf>,
}

/// The tasks below containerd's state folders.
pub(super) fn tasks(states: &[PathBuf]) -> Vec<Task> {
    let mut tasks = Vec::new();
    for namespace in states.iter().flat_map(|s| folders(&s.join("io.containerd.runtime.v2.task"))) {
        for bundle in folders(&namespace) {
            let shim_socket = fs::read_to_string(bundle.join("address"))
                .ok()
                .and_then(|address| address.trim().strip_prefix("unix://").map(PathBuf::from));
            if let (Some(namespace), Some(id)) = (name(&namespace), name(&bundle)) {
                tasks.push(Task { namespace, id, shim_socket });
            }
        }
    }
    tasks
}

/// Removes the sockets of shims that were killed: they lie in a folder that all containerds share.
pub(super) fn remove_shim_sockets(tasks: &[Task]) {
    for socket in tasks.iter().filter_map(|task| task.shim_socket.as_ref()) {
        // Containers of one pod share their shim, so most are gone already.
        let _ = fs::remove_file(socket);
    }
}

/// The cgroups of containers for which the caller named no parent: runc's `/<namespace>/<id>`.
pub(super) fn default_cgroups(tasks: &[Task]) -> Vec<String> {
    tasks.iter().map(|task| format!("/{}/{}", task.namespace, task.id)).collect()
}

fn folders(path: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(path) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

fn name(path: &Path) -> Option<String> {
    path.file_name()?.to_str().map(str::to_owned)
}
