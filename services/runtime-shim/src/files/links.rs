//! The links to container logs, and what is removed with a pod or a container.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::log_names::{is_part_of_log, link_name};

use super::{Files, check_name};

impl Files {
    /// Creates links for containers that have started and removes those of containers that no longer exist.
    pub fn link_logs(&self, before: Option<&pb::RuntimePod>, after: &pb::RuntimePod) {
        let new = |c: &&pb::Container| {
            c.started_unix_nanos > 0
                && !before
                    .is_some_and(|b| b.containers.iter().any(|o| o.id == c.id && o.started_unix_nanos > 0))
        };
        for container in after.containers.iter().filter(new) {
            let target = Path::new(&container.log_path);
            if !target.is_absolute() || fs::symlink_metadata(target).is_err() {
                continue;
            }
            let link = self.link_of(after, container);
            if let Err(error) = make_link(target, &link) {
                tracing::warn!(link = %link.display(), %error, "cannot link a container's log");
            }
        }
        let Some(before) = before else { return };
        let gone = |c: &&pb::Container| !after.containers.iter().any(|a| a.id == c.id);
        for container in before.containers.iter().filter(gone) {
            let _ = fs::remove_file(self.link_of(before, container));
        }
    }

    fn link_of(&self, pod: &pb::RuntimePod, container: &pb::Container) -> PathBuf {
        let name = link_name(&pod.name, &pod.namespace, &container.name, &container.id);
        self.paths.container_links_dir.join(name)
    }

    /// Removes a pod's links and its log folder.
    pub fn forget(&self, pod: &pb::RuntimePod) {
        for container in &pod.containers {
            let _ = fs::remove_file(self.link_of(pod, container));
        }
        if [&pod.namespace, &pod.name, &pod.uid].into_iter().all(|n| check_name(n).is_ok()) {
            self.remove_logs(&self.paths.pod_log_dir(&pod.namespace, &pod.name, &pod.uid));
        }
    }

    /// Removes the log file of one container and its rotated files.
    pub fn forget_container(&self, pod: &pb::RuntimePod, container: &pb::Container) {
        let _ = fs::remove_file(self.link_of(pod, container));
        let path = Path::new(&container.log_path);
        let (Some(dir), Some(base)) = (path.parent(), path.file_name().and_then(|n| n.to_str())) else {
            return;
        };
        if !dir.starts_with(&self.paths.pod_logs_dir) {
            return;
        }
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_name().to_str().is_some_and(|name| is_part_of_log(base, name)) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

fn make_link(target: &Path, link: &Path) -> io::Result<()> {
    if let Some(dir) = link.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
    }
    match std::os::unix::fs::symlink(target, link) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}
