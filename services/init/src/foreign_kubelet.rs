//! Detects a foreign kubelet on the same root folder or container runtime.
//!
//! Two node agents on one runtime treat each other's pods as orphans and kill them, and a kubelet takes no lock that init
//! could check. So init looks for its process: by name, command line and configuration file. Files are compared by inode and
//! not by name, so that a kubelet in a container counts if it shares a folder or socket with this agent, and does not if it
//! only uses the same names.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use keelson_config::Config;

use crate::{host, yaml};

/// A kubelet that conflicts with this agent.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a kubelet (pid {pid}) uses {what}; two agents would kill each other's pods: stop it, or {remedy}")]
pub struct ForeignKubeletError {
    pid: u32,
    what: String,
    remedy: &'static str,
}

/// The kubelet's defaults (KubeletConfiguration v1beta1 and `--root-dir`).
const DEFAULT_ENDPOINT: &str = "unix:///run/containerd/containerd.sock";
const DEFAULT_ROOT: &str = "/var/lib/kubelet";

/// Fails if a kubelet uses the root folder or the runtime of `config`.
pub fn ensure_none(config: &Config) -> Result<(), ForeignKubeletError> {
    let ours = host::exe(std::process::id());
    for pid in kubelets().filter(|pid| host::exe(*pid) != ours) {
        let Some(used) = KubeletUsage::of_process(pid) else { continue };
        let root = &config.paths.root_dir;
        if is_same_file(root, &path_of_process(pid, &used.root)) {
            let what = format!("the root folder {}", root.display());
            return Err(ForeignKubeletError {
                pid,
                what,
                remedy: "give this one another folder with --root-dir",
            });
        }
        let endpoint = &config.runtime.endpoint;
        if is_same_file(socket_of(endpoint), &path_of_process(pid, socket_of(&used.endpoint))) {
            let what = format!("the container runtime at {endpoint}");
            let remedy = "give this one another runtime with --container-runtime-endpoint";
            return Err(ForeignKubeletError { pid, what, remedy });
        }
    }
    Ok(())
}

/// The processes named `kubelet`.
fn kubelets() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()).filter(|pid| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == "kubelet")
    })
}

/// The root folder and runtime of a kubelet, as named in its mount namespace.
#[derive(Debug, PartialEq, Eq)]
struct KubeletUsage {
    root: PathBuf,
    endpoint: String,
}

impl KubeletUsage {
    /// `None` if the process is gone.
    fn of_process(pid: u32) -> Option<Self> {
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let args: Vec<String> =
            line.split(|byte| *byte == 0).map(|arg| String::from_utf8_lossy(arg).into_owned()).collect();
        Some(Self::from_args(&args, |path| {
            let path = path_of_process(pid, Path::new(path));
            let document = yaml::read("--config", &path).ok()?;
            Some(document.root.get("containerRuntimeEndpoint")?.as_str()?.to_owned())
        }))
    }

    /// Reads the command line; `from_file` returns the endpoint of a configuration file.
    fn from_args(args: &[String], from_file: impl Fn(&str) -> Option<String>) -> Self {
        let endpoint = flag(args, "--container-runtime-endpoint")
            .map(ToOwned::to_owned)
            .or_else(|| from_file(flag(args, "--config")?))
            .filter(|endpoint| !endpoint.is_empty());
        Self {
            root: flag(args, "--root-dir").unwrap_or(DEFAULT_ROOT).into(),
            endpoint: endpoint.unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned()),
        }
    }
}

/// The last value of a flag, written `--flag value` or `--flag=value`.
fn flag<'a>(args: &'a [String], name: &str) -> Option<&'a str> {
    args.iter().enumerate().rev().find_map(|(i, arg)| {
        if arg == name {
            return args.get(i + 1).map(String::as_str);
        }
        arg.strip_prefix(name)?.strip_prefix('=')
    })
}

/// The socket path of an endpoint.
fn socket_of(endpoint: &str) -> &Path {
    Path::new(endpoint.strip_prefix("unix://").unwrap_or(endpoint))
}

/// A path of a process as this process reaches it, independent of the mount namespace.
fn path_of_process(pid: u32, path: &Path) -> PathBuf {
    let below = path.strip_prefix("/").unwrap_or(path);
    Path::new("/proc").join(pid.to_string()).join("root").join(below)
}

/// Whether both exist and are the same file.
fn is_same_file(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    id(one).is_some_and(|found| id(other) == Some(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from_args(args: &[&str], file: Option<&str>) -> (String, String) {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        let used = KubeletUsage::from_args(&args, |path| {
            assert_eq!(path, "/c.yaml");
            file.map(ToOwned::to_owned)
        });
        (used.root.to_string_lossy().into_owned(), used.endpoint)
    }

    #[test]
    fn a_foreign_kubelets_flags_override_its_file_and_the_defaults() {
        let text = |root: &str, endpoint: &str| (root.to_owned(), endpoint.to_owned());
        assert_eq!(from_args(&["kubelet"], None), text(DEFAULT_ROOT, DEFAULT_ENDPOINT));
        assert_eq!(
            from_args(&["kubelet", "--config", "/c.yaml"], Some("")),
            text(DEFAULT_ROOT, DEFAULT_ENDPOINT)
        );
        assert_eq!(
            from_args(&["kubelet", "--root-dir=/r", "--config=/c.yaml"], Some("unix:///x.sock")),
            text("/r", "unix:///x.sock")
        );
        assert_eq!(
            from_args(
                &[
                    "kubelet",
                    "--config=/c.yaml",
                    "--container-runtime-endpoint",
                    "/y.sock",
                    "--root-dir",
                    "/r"
                ],
                Some("unix:///x.sock")
            ),
            text("/r", "/y.sock")
        );
    }

    #[test]
    fn files_are_compared_by_inode_and_absent_files_differ() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(is_same_file(&file, &link));
        assert!(is_same_file(&file, &path_of_process(std::process::id(), &file)));
        assert!(!is_same_file(&dir.path().join("none"), &dir.path().join("none")));
    }
}
