//! The files that runtime-shim owns: etc-hosts, termination files, log folders and the links to logs.
//!
//! Files that a pod may write to are opened beneath the agent's own folder, without following links, and only if they
//! are regular files.

mod beneath;
mod links;
mod logs;

use std::fs::{self, File, Permissions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use keelson_config::Paths;
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::{etc_hosts, log, log_names, termination_message};

use crate::cri_objects::TerminationMessageSource;

pub use logs::SweepError;

/// Bytes at the end of a log in which the lines for a termination message are searched.
const LOG_END: u64 = 64 << 10;
/// In a pod's folder: its hosts file, and the folder of the containers' termination logs.
pub(crate) const HOSTS_FILE: &str = "etc-hosts";
pub(crate) const CONTAINERS: &str = "containers";

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
            write_file(&path, etc_hosts_content(hosts).as_bytes(), 0o644)?;
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
    pub fn termination_message(&self, source: &TerminationMessageSource) -> String {
        let message = source.file.as_ref().and_then(|path| {
            let mut file = beneath::open_file(&self.paths.root_dir, path).ok()?;
            read_end(&mut file, termination_message::MAX_BYTES).ok()
        });
        let text = message.map(|t| String::from_utf8_lossy(&t).into_owned()).unwrap_or_default();
        let Some(log_path) = source.fallback_log.as_ref().filter(|_| text.is_empty()) else { return text };
        let end = self.open_log(log_path).and_then(|mut file| read_end(&mut file, LOG_END));
        end.map(|end| {
            log::termination_tail(
                &end,
                termination_message::MAX_LOG_LINES,
                termination_message::MAX_LOG_BYTES,
            )
        })
        .unwrap_or_default()
    }

    /// Opens a container's log for reading.
    pub fn open_log(&self, path: &Path) -> io::Result<File> {
        beneath::open_file(&self.paths.pod_logs_dir, path)
    }

    /// Opens a folder beneath the folder of the pods' logs.
    pub(crate) fn open_log_folder(&self, path: &Path) -> io::Result<OwnedFd> {
        beneath::open_folder(&self.paths.pod_logs_dir, path)
    }

    /// Opens a folder beneath the agent's root folder.
    pub(crate) fn open_root_folder(&self, path: &Path) -> io::Result<OwnedFd> {
        beneath::open_folder(&self.paths.root_dir, path)
    }
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

fn read_end(file: &mut File, bytes: u64) -> io::Result<Vec<u8>> {
    let size = file.metadata()?.len();
    file.seek(SeekFrom::Start(size.saturating_sub(bytes)))?;
    let mut content = Vec::new();
    file.take(bytes).read_to_end(&mut content)?;
    Ok(content)
}

/// The number of the container's next attempt, according to the files of its log folder.
fn next_attempt(dir: &Path) -> u32 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    log_names::next_attempt(names.iter().map(String::as_str))
}

fn etc_hosts_content(hosts: &pb::EtcHosts) -> String {
    let own;
    let base = if hosts.host_network {
        own = fs::read_to_string("/etc/hosts").unwrap_or_default();
        etc_hosts::Base::HostNetwork(&own)
    } else {
        etc_hosts::Base::PodNetwork { ips: &hosts.pod_ips, hostname: &hosts.hostname, domain: &hosts.domain }
    };
    let aliases: Vec<etc_hosts::Alias<'_>> = hosts
        .aliases
        .iter()
        .map(|alias| etc_hosts::Alias { ip: &alias.ip, hostnames: &alias.hostnames })
        .collect();
    etc_hosts::content(&base, &aliases)
}

#[cfg(test)]
mod tests;
