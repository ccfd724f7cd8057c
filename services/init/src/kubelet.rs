//! A kubelet that is not ours on the same root folder or the same runtime.
//!
//! Two node agents on one runtime take each other's pods for orphans and end them, and a kubelet takes no lock
//! that could tell us. So its process is looked for: by its name, its command line and its configuration file.
//! Files are compared by what they are and not by their names, so that a kubelet in a container counts when it
//! shares a folder or socket with us, and does not when it only uses the same names.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use keelson_config::Config;

use crate::{host, yaml};

/// A kubelet that would fight with us.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a kubelet (pid {pid}) uses {what}; two agents would end each other's pods: stop it, or {way_out}")]
pub struct Kubelet {
    pid: u32,
    what: String,
    way_out: &'static str,
}

/// Where a kubelet finds these when nothing says so (KubeletConfiguration v1beta1 and `--root-dir`).
const DEFAULT_ENDPOINT: &str = "unix:///run/containerd/containerd.sock";
const DEFAULT_ROOT: &str = "/var/lib/kubelet";

/// Refuses when a kubelet uses the root folder or the runtime of `config`.
pub fn refuse(config: &Config) -> Result<(), Kubelet> {
    let ours = host::exe(std::process::id());
    for pid in kubelets().filter(|pid| host::exe(*pid) != ours) {
        let Some(used) = Used::by(pid) else { continue };
        let root = &config.paths.root_dir;
        if same(root, &seen_by(pid, &used.root)) {
            let what = format!("the root folder {}", root.display());
            return Err(Kubelet { pid, what, way_out: "give this one another folder with --root-dir" });
        }
        let endpoint = &config.runtime.endpoint;
        if same(socket_of(endpoint), &seen_by(pid, socket_of(&used.endpoint))) {
            let what = format!("the container runtime at {endpoint}");
            let way_out = "give this one another runtime with --container-runtime-endpoint";
            return Err(Kubelet { pid, what, way_out });
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

/// What a kubelet uses, by the names that it uses.
#[derive(Debug, PartialEq, Eq)]
struct Used {
    root: PathBuf,
    endpoint: String,
}

impl Used {
    /// None when the process is gone.
    fn by(pid: u32) -> Option<Self> {
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let args: Vec<String> =
            line.split(|byte| *byte == 0).map(|arg| String::from_utf8_lossy(arg).into_owned()).collect();
        Some(Self::told(&args, |path| {
            let path = seen_by(pid, Path::new(path));
            let document = yaml::read("--config", &path).ok()?;
            Some(document.root.get("containerRuntimeEndpoint")?.as_str()?.to_owned())
        }))
    }

    /// What these arguments say; `from_file` reads the endpoint of a configuration file.
    fn told(args: &[String], from_file: impl Fn(&str) -> Option<String>) -> Self {
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

/// The socket that an endpoint names.
fn socket_of(endpoint: &str) -> &Path {
    Path::new(endpoint.strip_prefix("unix://").unwrap_or(endpoint))
}

/// A path of a process as we reach it, whatever its mount namespace.
fn seen_by(pid: u32, path: &Path) -> PathBuf {
    let below = path.strip_prefix("/").unwrap_or(path);
    Path::new("/proc").join(pid.to_string()).join("root").join(below)
}

/// Whether both are there and the same file.
fn same(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    id(one).is_some_and(|found| id(other) == Some(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(args: &[&str], file: Option<&str>) -> (String, String) {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        let used = Used::told(&args, |path| {
            assert_eq!(path, "/c.yaml");
            file.map(ToOwned::to_owned)
        });
        (used.root.to_string_lossy().into_owned(), used.endpoint)
    }

    #[test]
    fn flags_go_before_the_file_and_the_file_before_the_defaults() {
        let text = |root: &str, endpoint: &str| (root.to_owned(), endpoint.to_owned());
        assert_eq!(told(&["kubelet"], None), text(DEFAULT_ROOT, DEFAULT_ENDPOINT));
        assert_eq!(told(&["kubelet", "--config", "/c.yaml"], Some("")), text(DEFAULT_ROOT, DEFAULT_ENDPOINT));
        assert_eq!(
            told(&["kubelet", "--root-dir=/r", "--config=/c.yaml"], Some("unix:///x.sock")),
            text("/r", "unix:///x.sock")
        );
        assert_eq!(
            told(
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
    fn a_file_is_the_same_under_another_name_and_absent_files_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(same(&file, &link));
        assert!(same(&file, &seen_by(std::process::id(), &file)));
        assert!(!same(&dir.path().join("none"), &dir.path().join("none")));
    }
}
