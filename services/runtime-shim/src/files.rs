//! The files that runtime-shim owns: etc-hosts, termination files, log folders and the links to logs.
//!
//! Files that a pod may write to are opened beneath the agent's own folder, without following links, and only if they
//! are regular files.

use std::fs::{self, File, Permissions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use k8s_cri::v1 as cri;
use keelson_config::Paths;
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::log;
use keelson_service_kit::status::chain;
use rustix::fs::{FlockOperation, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;

use crate::labels;

/// Maximum bytes read from a termination file (pod-lifecycle.md §11).
const MESSAGE_BYTES: u64 = 4096;
/// Maximum lines and bytes of a log that replace an empty termination file.
const FALLBACK_LINES: usize = 80;
const FALLBACK_BYTES: usize = 2048;
/// File in a pod's log folder that holds the root folder of the agent that created it; no two agents share one.
const OWNER_MARK: &str = ".keelson";
/// In a pod's folder: its hosts file, and the folder of the containers' termination logs.
pub(crate) const HOSTS_FILE: &str = "etc-hosts";
pub(crate) const CONTAINERS: &str = "containers";
/// Maximum length of a link's name without `.log`.
const LINK_NAME: usize = 251;

/// Why a file of a pod could not be written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// A folder cannot be created.
    #[error("cannot create the folder {}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A name that would lead outside its folder.
    #[error("{0:?} is not a valid name of a file or folder")]
    BadName(String),
}

/// The files and folders of the agent that runtime-shim manages.
#[derive(Debug, Clone)]
pub struct Files {
    pub(crate) paths: Paths,
}

impl Files {
    /// Uses the folders of the configuration.
    pub fn new(paths: Paths) -> Self {
        Self { paths }
    }

    /// Creates the folder of the pods' logs.
    pub fn prepare(&self) -> Result<(), FileError> {
        make_dir(&self.paths.pod_logs_dir, 0o755)?;
        keelson_service_kit::spread_below(&self.paths.pod_logs_dir);
        Ok(())
    }

    /// Creates a pod's log folder, the `log_directory` of a sandbox. Does nothing outside the folder of the pods' logs.
    pub fn make_log_dir(&self, dir: &Path) -> Result<(), FileError> {
        if !dir.starts_with(&self.paths.pod_logs_dir) || dir.components().any(|c| c.as_os_str() == "..") {
            return Ok(());
        }
        make_dir(dir, 0o755)?;
        self.mark(dir)
    }

    /// Marks a pod's log folder as created by this agent. Other agents on the machine may have folders next to it.
    fn mark(&self, dir: &Path) -> Result<(), FileError> {
        let mark = dir.join(OWNER_MARK);
        let own = self.paths.root_dir.as_os_str().as_encoded_bytes();
        if dir.parent() != Some(&*self.paths.pod_logs_dir) || fs::read(&mark).is_ok_and(|text| text == own) {
            return Ok(());
        }
        write_file(&mark, own, 0o644)
    }

    /// Whether this agent created a pod's log folder.
    fn is_own(&self, dir: &Path) -> bool {
        fs::read(dir.join(OWNER_MARK))
            .is_ok_and(|text| text == self.paths.root_dir.as_os_str().as_encoded_bytes())
    }

    /// Marks a log folder without a mark that belongs to a pod of this agent. It was created by an older agent version, or
    /// by the kubelet that this agent replaced.
    fn adopt(&self, dir: &Path) {
        if fs::symlink_metadata(dir.join(OWNER_MARK)).is_ok_and(|mark| mark.is_file()) {
            return;
        }
        if let Err(error) = self.mark(dir) {
            tracing::warn!(folder = %dir.display(), error = chain(&error), "cannot mark a pod's log folder as this agent's");
        }
    }

    /// Whether `dir` was a pod's log folder and no longer exists.
    fn was_removed(&self, dir: &Path) -> bool {
        dir.parent() == Some(&*self.paths.pod_logs_dir)
            && fs::symlink_metadata(dir).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }

    /// Creates the log folder, etc-hosts and termination file of a container that is about to be created.
    pub fn write(
        &self,
        pod: &PodRef,
        request: &pb::WriteContainerFilesRequest,
    ) -> Result<pb::WriteContainerFilesResponse, FileError> {
        for name in [&pod.uid, &pod.namespace, &pod.name, &request.container] {
            check_name(name)?;
        }
        let logs = self.paths.pod_log_dir(&pod.namespace, &pod.name, &pod.uid);
        self.make_log_dir(&logs)?;
        let logs = logs.join(&request.container);
        make_dir(&logs, 0o755)?;
        let mut answer =
            pb::WriteContainerFilesResponse { mounts: Vec::new(), next_attempt_by_logs: next_attempt(&logs) };
        let pod_dir = self.paths.pod_dir(&pod.uid);
        if let Some(hosts) = &request.etc_hosts {
            let path = pod_dir.join(HOSTS_FILE);
            write_file(&path, etc_hosts(hosts).as_bytes(), 0o644)?;
            answer.mounts.push(mount("/etc/hosts", &path));
        }
        if !request.termination_message_path.is_empty() {
            let dir = pod_dir.join(CONTAINERS).join(&request.container);
            make_dir(&dir, 0o750)?;
            let path = dir.join(format!("{:08x}", fastrand::u32(..)));
            write_file(&path, b"", 0o666)?;
            answer.mounts.push(mount(&request.termination_message_path, &path));
        }
        Ok(answer)
    }

    /// The termination message of an exited container.
    pub fn termination_message(&self, status: &cri::ContainerStatus) -> String {
        let path = status.annotations.get(labels::MESSAGE_PATH).map(String::as_str).unwrap_or_default();
        let host = status.mounts.iter().find(|m| !path.is_empty() && m.container_path == path);
        let text = host.and_then(|m| {
            let mut file = self.open_beneath(&self.paths.root_dir, Path::new(&m.host_path)).ok()?;
            read_end(&mut file, MESSAGE_BYTES).ok()
        });
        let text = text.map(|t| String::from_utf8_lossy(&t).into_owned()).unwrap_or_default();
        let wants_log =
            status.annotations.get(labels::MESSAGE_POLICY).is_some_and(|p| p == "FallbackToLogsOnError")
                && status.exit_code != 0
                && status.reason != "ContainerCannotRun";
        if !text.is_empty() || !wants_log {
            return text;
        }
        let tail = self.open_log(Path::new(&status.log_path)).and_then(|mut f| read_end(&mut f, 64 << 10));
        tail.map(|t| log::termination_tail(&t, FALLBACK_LINES, FALLBACK_BYTES)).unwrap_or_default()
    }

    /// Opens a container's log for reading.
    pub fn open_log(&self, path: &Path) -> io::Result<File> {
        self.open_beneath(&self.paths.pod_logs_dir, path)
    }

    /// Opens a folder beneath the folder of the pods' logs.
    pub(crate) fn open_log_folder(&self, path: &Path) -> io::Result<OwnedFd> {
        descriptor_beneath(&self.paths.pod_logs_dir, path, OFlags::DIRECTORY)
    }

    fn open_beneath(&self, root: &Path, path: &Path) -> io::Result<File> {
        let file = File::from(descriptor_beneath(root, path, OFlags::NONBLOCK)?);
        if file.metadata()?.is_file() {
            Ok(file)
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))
        }
    }

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
        let mut name = format!("{}_{}_{}-{}", pod.name, pod.namespace, container.name, container.id);
        name.truncate(LINK_NAME);
        self.paths.container_links_dir.join(format!("{name}.log"))
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
            if entry.file_name().to_str().is_some_and(|n| n == base || n.starts_with(&format!("{base}."))) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Removes a pod's log folder. The links into it are removed first, so that a kill in between leaves no dangling link.
    fn remove_logs(&self, dir: &Path) -> bool {
        for entry in fs::read_dir(&self.paths.container_links_dir).into_iter().flatten().flatten() {
            if fs::read_link(entry.path()).is_ok_and(|target| target.starts_with(dir)) {
                let _ = fs::remove_file(entry.path());
            }
        }
        // The mark is removed last: after a kill or an error the folder is still known as this agent's.
        for entry in fs::read_dir(dir).into_iter().flatten().flatten().filter(|e| e.file_name() != OWNER_MARK)
        {
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let path = entry.path();
            let removed = if is_folder { fs::remove_dir_all(path) } else { fs::remove_file(path) };
            if removed.is_err() {
                return false;
            }
        }
        fs::remove_dir_all(dir).is_ok()
    }

    /// Removes this agent's log folders `<namespace>_<name>_<uid>` with a UID that is not `known`, and its links to logs
    /// that no longer exist. Returns the number of removed folders. Folders of other agents on this machine are kept.
    ///
    /// # Errors
    /// The folder of the pods' logs cannot be opened, or another agent is sweeping it.
    pub fn sweep_logs(&self, known: impl Fn(&str) -> bool) -> Result<usize, SweepError> {
        let _lock = self.lock_logs()?;
        let mut removed = 0;
        for entry in fs::read_dir(&self.paths.pod_logs_dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            // A namespace and a name have no underscore; a UID may have some.
            let Some(uid) = name.to_str().and_then(|n| n.splitn(3, '_').nth(2)) else { continue };
            if known(uid) {
                self.adopt(&entry.path());
            } else if self.is_own(&entry.path()) && self.remove_logs(&entry.path()) {
                removed += 1;
            }
        }
        for entry in fs::read_dir(&self.paths.container_links_dir).into_iter().flatten().flatten() {
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            let folder = target.parent().and_then(Path::parent);
            let own = folder.is_some_and(|dir| self.is_own(dir) || self.was_removed(dir));
            if own && fs::metadata(&target).is_err() {
                let _ = fs::remove_file(entry.path());
            }
        }
        Ok(removed)
    }

    /// Locks the folder of the pods' logs for a sweep.
    fn lock_logs(&self) -> Result<File, SweepError> {
        let path = &self.paths.pod_logs_dir;
        let open = |source| SweepError::Open { path: path.clone(), source };
        let folder = File::open(path).map_err(open)?;
        match rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(folder),
            Err(Errno::WOULDBLOCK) => {
                let by = lock_holder_text(&folder.metadata().map_err(open)?);
                Err(SweepError::Held { path: path.clone(), by })
            }
            Err(errno) => Err(open(errno.into())),
        }
    }
}

/// Why logs could not be swept.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// The folder of the pods' logs cannot be opened.
    #[error("cannot open {}", path.display())]
    Open {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Another process holds the lock.
    #[error("{} is being swept by {by}; set another podLogsDir for one of the two agents", path.display())]
    Held {
        /// The folder.
        path: PathBuf,
        /// The process, if known.
        by: String,
    },
}

/// A text for the process that has locked a folder.
fn lock_holder_text(folder: &fs::Metadata) -> String {
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let Some(pid) = flock_holder(&locks, folder.dev(), folder.ino()) else {
        return "another process".to_owned();
    };
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!("process {pid} ({})", name.trim())
}

/// The process that has locked a file by flock(2), from a list in the format of proc_locks(5). Some file systems report
/// another device to stat(2) than in this list; then the result is `None`.
fn flock_holder(locks: &str, device: u64, inode: u64) -> Option<u32> {
    let file = format!("{:02x}:{:02x}:{inode}", rustix::fs::major(device), rustix::fs::minor(device));
    locks.lines().find_map(|line| {
        // `1: FLOCK ADVISORY WRITE 712 08:01:131 0 EOF`; a waiting process has `->` before the kind.
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, pid, locked, ..] = fields[..] else { return None };
        (locked == file).then(|| pid.parse().ok()).flatten()
    })
}

pub(crate) fn descriptor_beneath(root: &Path, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let relative = path.strip_prefix(root).map_err(|_| {
        io::Error::new(io::ErrorKind::PermissionDenied, "the file is not below the agent's folder")
    })?;
    let relative = if relative.as_os_str().is_empty() { Path::new(".") } else { relative };
    let root = File::open(root)?;
    let flags = flags | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    Ok(openat2(&root, relative, flags, Mode::empty(), resolve)?)
}

pub(crate) fn check_name(name: &str) -> Result<(), FileError> {
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
        return Err(FileError::BadName(name.to_owned()));
    }
    Ok(())
}

fn make_dir(path: &Path, mode: u32) -> Result<(), FileError> {
    match fs::DirBuilder::new().recursive(true).mode(mode).create(path) {
        Ok(()) => Ok(()),
        Err(source) => Err(FileError::Folder { path: path.to_owned(), source }),
    }
}

/// Writes a file with exactly this mode. It is written in place, because a container that has the file mounted
/// keeps its inode and would not see a replacement.
fn write_file(path: &Path, content: &[u8], mode: u32) -> Result<(), FileError> {
    let fail = |source| FileError::Write { path: path.to_owned(), source };
    fs::write(path, content).map_err(fail)?;
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(fail)
}

fn mount(container_path: &str, host_path: &Path) -> pb::FileMount {
    pb::FileMount {
        container_path: container_path.to_owned(),
        host_path: host_path.to_string_lossy().into_owned(),
        read_only: false,
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

fn read_end(file: &mut File, bytes: u64) -> io::Result<Vec<u8>> {
    let size = file.metadata()?.len();
    file.seek(SeekFrom::Start(size.saturating_sub(bytes)))?;
    let mut content = Vec::new();
    file.take(bytes).read_to_end(&mut content)?;
    Ok(content)
}

/// One more than the highest `<n>.log…` in a container's log folder; 0 if there is none.
fn next_attempt(dir: &Path) -> u32 {
    let number = |e: fs::DirEntry| e.file_name().to_str()?.split_once(".log")?.0.parse::<u32>().ok();
    fs::read_dir(dir).into_iter().flatten().flatten().filter_map(number).max().map_or(0, |n| n + 1)
}

/// The content of /etc/hosts (runtime-and-resources.md §3.5).
fn etc_hosts(hosts: &pb::EtcHosts) -> String {
    let mut text = if hosts.host_network {
        let own = fs::read_to_string("/etc/hosts").unwrap_or_default();
        format!("# Kubernetes-managed hosts file (host network).\n{own}")
    } else {
        let mut text = String::from(
            "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n\
             fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n",
        );
        for ip in &hosts.pod_ips {
            if hosts.domain.is_empty() {
                text.push_str(&format!("{ip}\t{}\n", hosts.hostname));
            } else {
                text.push_str(&format!("{ip}\t{0}.{1}\t{0}\n", hosts.hostname, hosts.domain));
            }
        }
        text
    };
    if !hosts.aliases.is_empty() {
        text.push_str("\n# Entries added by HostAliases.\n");
        for alias in &hosts.aliases {
            text.push_str(&format!("{}\t{}\n", alias.ip, alias.hostnames.join("\t")));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(dir: &Path) -> Files {
        let paths = Paths {
            root_dir: dir.join("root"),
            pod_logs_dir: dir.join("logs"),
            container_links_dir: dir.join("links"),
            ..Paths::default()
        };
        fs::create_dir_all(paths.pod_dir("u")).unwrap();
        fs::create_dir_all(&paths.pod_logs_dir).unwrap();
        Files::new(paths)
    }

    fn pod() -> PodRef {
        PodRef { uid: "u".into(), namespace: "default".into(), name: "web".into() }
    }

    fn status(path: &str) -> cri::ContainerStatus {
        cri::ContainerStatus {
            annotations: [(labels::MESSAGE_PATH.to_owned(), "/dev/termination-log".to_owned())].into(),
            mounts: vec![cri::Mount {
                container_path: "/dev/termination-log".into(),
                host_path: path.into(),
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    #[test]
    fn pod_log_folder_is_spread_over_block_groups() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        fs::remove_dir(dir.path().join("logs")).unwrap();
        files.prepare().unwrap();
        files.prepare().unwrap();
        assert!(keelson_service_kit::is_spread(&dir.path().join("logs")));
    }

    #[test]
    fn container_gets_etc_hosts_and_a_world_writable_termination_file() {
        let dir = tempfile::tempdir().unwrap();
        let request = pb::WriteContainerFilesRequest {
            container: "c".into(),
            termination_message_path: "/dev/termination-log".into(),
            etc_hosts: Some(pb::EtcHosts {
                pod_ips: vec!["10.0.0.2".into()],
                hostname: "web".into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let answer = files(dir.path()).write(&pod(), &request).unwrap();
        let hosts = fs::read_to_string(&answer.mounts[0].host_path).unwrap();
        assert!(hosts.ends_with("10.0.0.2\tweb\n"), "{hosts}");
        let mode = fs::metadata(&answer.mounts[1].host_path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o666);
    }

    #[test]
    fn container_name_with_path_traversal_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let request = pb::WriteContainerFilesRequest { container: "../x".into(), ..Default::default() };
        assert!(matches!(files(dir.path()).write(&pod(), &request), Err(FileError::BadName(_))));
    }

    #[test]
    fn termination_message_is_the_last_4096_bytes_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        let path = dir.path().join("root/pods/u/message");
        fs::write(&path, format!("{}end", "x".repeat(5000))).unwrap();
        let message = files.termination_message(&status(path.to_str().unwrap()));
        assert_eq!(message.len(), 4096);
        assert!(message.ends_with("end"));
    }

    #[test]
    fn symlink_as_termination_file_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        let path = dir.path().join("root/pods/u/message");
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        assert_eq!(files.termination_message(&status(path.to_str().unwrap())), "");
        assert_eq!(files.termination_message(&status("/etc/passwd")), "");
    }

    #[test]
    fn next_attempt_follows_the_highest_log_number() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(next_attempt(dir.path()), 0);
        fs::write(dir.path().join("0.log"), "").unwrap();
        fs::write(dir.path().join("4.log.20260101-000000"), "").unwrap();
        assert_eq!(next_attempt(dir.path()), 5);
    }

    fn make(files: &Files, name: &str) {
        files.make_log_dir(&files.paths.pod_logs_dir.join(name)).unwrap();
    }

    #[test]
    fn log_folders_of_unknown_pods_are_removed_and_others_kept() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        make(&files, "default_web_u");
        make(&files, "default_old_v");
        assert_eq!(files.sweep_logs(|uid| uid == "u").unwrap(), 1);
        assert!(dir.path().join("logs/default_web_u").exists());
    }

    #[test]
    fn a_uid_with_an_underscore_keeps_its_logs() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        make(&files, "default_web_u_1");
        assert_eq!(files.sweep_logs(|uid| uid == "u_1").unwrap(), 0);
        assert_eq!(files.sweep_logs(|uid| uid == "1").unwrap(), 1);
    }

    #[test]
    fn log_folders_of_other_agents_are_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let own = files(dir.path());
        let other = Files::new(Paths { root_dir: dir.path().join("other"), ..own.paths.clone() });
        let (logs, links) = (dir.path().join("logs"), dir.path().join("links"));
        fs::create_dir_all(&links).unwrap();
        make(&own, "default_own_1");
        make(&other, "default_other_2");
        fs::create_dir(logs.join("default_kubelets_3")).unwrap();
        for (name, pod) in
            [("own", "default_own_1"), ("other", "default_other_2"), ("kubelets", "default_kubelets_3")]
        {
            std::os::unix::fs::symlink(logs.join(pod).join("c/0.log"), links.join(name)).unwrap();
        }
        assert_eq!(own.sweep_logs(|_| false).unwrap(), 1);
        let names = |dir: &Path| {
            let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(names(&logs), ["default_kubelets_3", "default_other_2"]);
        assert_eq!(names(&links), ["kubelets", "other"]);
    }

    #[test]
    fn log_folder_of_an_interrupted_removal_is_still_removed_later() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        make(&files, "default_old_v");
        let folder = dir.path().join("logs/default_old_v");
        fs::create_dir(folder.join("c")).unwrap();
        fs::write(folder.join("c/0.log"), "").unwrap();
        // A container's folder that cannot be removed because something is mounted on it.
        rustix::mount::mount_bind(folder.join("c"), folder.join("c")).unwrap();
        let first = files.sweep_logs(|_| false).unwrap();
        rustix::mount::unmount(folder.join("c"), rustix::mount::UnmountFlags::DETACH).unwrap();
        assert_eq!(first, 0);
        assert!(folder.join(OWNER_MARK).exists());
        assert_eq!(files.sweep_logs(|_| false).unwrap(), 1);
        assert!(!folder.exists());
    }

    #[test]
    fn dangling_log_link_is_removed_if_its_folder_is_this_agents() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        make(&files, "default_web_u");
        let (logs, links) = (dir.path().join("logs"), dir.path().join("links"));
        fs::create_dir_all(logs.join("default_web_u/c")).unwrap();
        fs::create_dir_all(&links).unwrap();
        fs::write(logs.join("default_web_u/c/1.log"), "").unwrap();
        for n in [0, 1] {
            let target = logs.join(format!("default_web_u/c/{n}.log"));
            std::os::unix::fs::symlink(target, links.join(n.to_string())).unwrap();
        }
        assert_eq!(files.sweep_logs(|uid| uid == "u").unwrap(), 0);
        assert!(fs::symlink_metadata(links.join("0")).is_err() && links.join("1").exists());
    }

    #[test]
    fn log_folder_of_an_adopted_pod_is_marked_as_this_agents() {
        let dir = tempfile::tempdir().unwrap();
        let own = files(dir.path());
        let other = Files::new(Paths { root_dir: dir.path().join("other"), ..own.paths.clone() });
        let logs = dir.path().join("logs");
        fs::create_dir_all(logs.join("default_web_u")).unwrap();
        make(&other, "default_others_v");
        assert_eq!(own.sweep_logs(|_| true).unwrap(), 0);
        assert_eq!(own.sweep_logs(|_| false).unwrap(), 1);
        assert!(!logs.join("default_web_u").exists() && other.is_own(&logs.join("default_others_v")));
    }

    #[test]
    fn dangling_log_links_are_removed_and_links_outside_kept() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        let (logs, links) = (dir.path().join("logs"), dir.path().join("links"));
        fs::create_dir_all(&logs).unwrap();
        fs::create_dir_all(&links).unwrap();
        let target = |name: &str| logs.join(name).join("c/0.log");
        std::os::unix::fs::symlink(target("default_web_u"), links.join("gone")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("elsewhere/default_web_u/c/0.log"), links.join("other"))
            .unwrap();
        assert_eq!(files.sweep_logs(|_| false).unwrap(), 0);
        let left = |name: &str| fs::symlink_metadata(links.join(name)).is_ok();
        assert_eq!((left("gone"), left("other")), (false, true));
    }

    #[test]
    fn flock_holder_is_found_by_device_and_inode() {
        let locks = "\
            1: POSIX  ADVISORY  WRITE 10 08:01:131 0 EOF\n\
            2: FLOCK  ADVISORY  WRITE 11 08:02:131 0 EOF\n\
            3: FLOCK  ADVISORY  WRITE 12 08:01:1131 0 EOF\n\
            4: FLOCK  ADVISORY  WRITE 13 08:01:131 0 EOF\n\
            4: -> FLOCK  ADVISORY  WRITE 14 08:01:131 0 EOF\n";
        assert_eq!(flock_holder(locks, rustix::fs::makedev(8, 1), 131), Some(13));
        assert_eq!(flock_holder(locks, rustix::fs::makedev(8, 3), 131), None);
    }

    #[test]
    fn log_folders_are_kept_while_another_process_holds_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        make(&files, "default_old_v");
        let logs = dir.path().join("logs");
        // A flock(2) lock belongs to the open file description, so this one acts like another process's.
        let held = File::open(&logs).unwrap();
        rustix::fs::flock(&held, FlockOperation::LockExclusive).unwrap();
        let error = files.sweep_logs(|_| false).unwrap_err().to_string();
        let holders = [format!("process {} (", std::process::id()), "another process".to_owned()];
        assert!(holders.iter().any(|by| error.contains(&format!("is being swept by {by}"))), "{error}");
        assert!(error.contains("set another podLogsDir"), "{error}");
        assert!(logs.join("default_old_v").exists());
        drop(held);
        assert_eq!(files.sweep_logs(|_| false).unwrap(), 1);
    }
}
