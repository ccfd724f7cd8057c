//! The configuration file of a private containerd (containerd-config.toml(5), version 2; newer releases
//! migrate it themselves).

use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::{PAUSE_IMAGE, has_cap_sys_resource};

/// Plugins that a node does not need; some only log errors where their tools are missing.
const DISABLED_PLUGINS: [&str; 8] = [
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
    "io.containerd.internal.v1.tracing",
    "io.containerd.tracing.processor.v1.otlp",
    "io.containerd.nri.v1.nri",
];

/// The paths of one private containerd.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// The folder that holds all the others.
    pub dir: PathBuf,
    /// The gRPC socket.
    pub socket: PathBuf,
    /// Images, snapshots, metadata.
    pub root: PathBuf,
    /// Running tasks, network namespaces, mounts.
    pub state: PathBuf,
    /// The configuration file.
    pub config: PathBuf,
    /// Standard output and error of containerd.
    pub log: PathBuf,
    /// The CNI configuration.
    pub cni_conf: PathBuf,
    /// The leases of host-local.
    pub cni_leases: PathBuf,
}

/// The settings that [`render`] needs in addition to the layout.
pub(crate) struct Settings<'a> {
    pub runc: &'a Path,
    pub cni_plugins: &'a Path,
    pub snapshotter: &'a str,
    pub systemd_cgroup: bool,
    pub max_log_line: i64,
}

impl Layout {
    pub(crate) fn below(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            socket: dir.join("c.sock"),
            root: dir.join("root"),
            state: dir.join("state"),
            config: dir.join("config.toml"),
            log: dir.join("containerd.log"),
            cni_conf: dir.join("cni/conf"),
            cni_leases: dir.join("cni/leases"),
        }
    }
}

/// The configuration as TOML.
pub(crate) fn render(layout: &Layout, settings: &Settings<'_>) -> String {
    let disabled: Vec<String> = DISABLED_PLUGINS.iter().map(|id| format!("  {},", quote(id))).collect();
    format!(
        r#"version = 2
root = {root}
state = {state}
oom_score = 0
disabled_plugins = [
{disabled}
]

[grpc]
  address = {socket}

[ttrpc]
  address = {ttrpc}

[debug]
  address = ""
  level = "info"

[metrics]
  address = ""

[plugins."io.containerd.internal.v1.opt"]
  path = {opt}

{cri}"#,
        cri = render_cri(layout, settings),
        root = quote_path(&layout.root),
        state = quote_path(&layout.state),
        disabled = disabled.join("\n"),
        socket = quote_path(&layout.socket),
        ttrpc = quote_path(&layout.dir.join("c.ttrpc")),
        opt = quote_path(&layout.dir.join("opt")),
    )
}

/// The part about CRI.
fn render_cri(layout: &Layout, settings: &Settings<'_>) -> String {
    format!(
        r#"[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = {sandbox_image}
  restrict_oom_score_adj = {restrict_oom}
  max_container_log_line_size = {max_log_line}
  netns_mounts_under_state_dir = true
  disable_tcp_service = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  tolerate_missing_hugetlb_controller = true

[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = {cni_plugins}
  conf_dir = {cni_conf}

[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = {snapshotter}
  default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  BinaryName = {runc}
  Root = {runc_root}
  SystemdCgroup = {systemd_cgroup}
"#,
        sandbox_image = quote(PAUSE_IMAGE),
        restrict_oom = !has_cap_sys_resource(),
        max_log_line = settings.max_log_line,
        cni_plugins = quote_path(settings.cni_plugins),
        cni_conf = quote_path(&layout.cni_conf),
        snapshotter = quote(settings.snapshotter),
        runc = quote_path(settings.runc),
        runc_root = quote_path(&layout.dir.join("runc")),
        systemd_cgroup = settings.systemd_cgroup,
    )
}

/// A TOML basic string: its escapes are JSON's.
fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn quote_path(path: &Path) -> String {
    quote(&path.to_string_lossy())
}

/// `overlayfs`, or `native` where an overlay cannot be mounted in `dir`.
pub(crate) fn usable_snapshotter(dir: &Path) -> &'static str {
    if can_overlay(&dir.join("probe")) { "overlayfs" } else { "native" }
}

fn can_overlay(probe: &Path) -> bool {
    let folder = |name: &str| probe.join(name);
    let (lower, upper, work, merged) = (folder("lower"), folder("upper"), folder("work"), folder("merged"));
    if [&lower, &upper, &work, &merged].into_iter().any(|path| fs::create_dir_all(path).is_err()) {
        return false;
    }
    let options =
        format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    let mounted = CString::new(options).is_ok_and(|options| {
        mount("overlay", &merged, "overlay", MountFlags::empty(), options.as_c_str()).is_ok()
    });
    if mounted && unmount(&merged, UnmountFlags::DETACH).is_err() {
        return false;
    }
    // Left-overs are removed with the folder that they are in.
    let _ = fs::remove_dir_all(probe);
    mounted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_is_in_the_private_folder_but_the_programs() {
        let layout = Layout::below(Path::new("/tmp/k-x/c"));
        let settings = Settings {
            runc: Path::new("/usr/sbin/runc"),
            cni_plugins: Path::new("/usr/lib/cni"),
            snapshotter: "overlayfs",
            systemd_cgroup: false,
            max_log_line: 16384,
        };
        let text = render(&layout, &settings);
        let paths = text.lines().filter_map(|line| line.split_once("= \"/")).map(|(_, path)| path);
        let outside: Vec<&str> = paths.filter(|path| !path.starts_with("tmp/k-x/c/")).collect();
        assert_eq!(outside, ["usr/lib/cni\"", "usr/sbin/runc\""]);
        assert!(text.contains("\"io.containerd.snapshotter.v1.zfs\","), "{text}");
    }

    #[test]
    fn quotes_are_escaped() {
        assert_eq!(quote(r#"a"b\c"#), r#""a\"b\\c""#);
    }
}
