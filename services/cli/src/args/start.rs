//! Commands that start an agent.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::human::parse_duration;

#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Folder or file with pod manifests that the agent watches [default: /etc/keelson/manifests where it exists]
    #[arg(long, value_name = "DIR")]
    pub(crate) manifests: Option<PathBuf>,
    /// Name of the node [default: the host name]
    #[arg(long, value_name = "NAME")]
    pub(crate) node_name: Option<String>,
    /// Socket of the container runtime
    #[arg(long, value_name = "ENDPOINT", default_value = "unix:///run/containerd/containerd.sock")]
    pub(crate) runtime_endpoint: String,
    /// Folder for pods and volumes [default: /var/lib/kubelet]
    #[arg(long, value_name = "DIR")]
    pub(crate) root_dir: Option<PathBuf>,
    /// Folder for the agent's own state [default: /var/lib/keelson]
    #[arg(long, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Run in the background, and return when all services are running
    #[arg(long)]
    pub(crate) detach: bool,
    /// With --detach: where the agent's output goes [default: RUN_DIR/keelson.log]
    #[arg(long, value_name = "FILE", requires = "detach")]
    pub(crate) log_file: Option<PathBuf>,
    /// With --detach: how long to wait until all services are running
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = parse_duration)]
    pub(crate) timeout: Duration,
    /// Further arguments for keelson-init, as the kubelet takes them
    #[arg(last = true, value_name = "INIT_ARGS")]
    pub(crate) extra: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Read the manifests once, run their pods, and end
    #[arg(long, required = true)]
    pub(crate) once: bool,
    /// Manifests: a file, a folder, or - for standard input
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,
    /// Name of the node [default: the host name]
    #[arg(long, value_name = "NAME")]
    pub(crate) node_name: Option<String>,
    /// Socket of the container runtime
    #[arg(long, value_name = "ENDPOINT", default_value = "unix:///run/containerd/containerd.sock")]
    pub(crate) runtime_endpoint: String,
    /// Folder for pods and volumes [default: /var/lib/kubelet]
    #[arg(long, value_name = "DIR")]
    pub(crate) root_dir: Option<PathBuf>,
    /// How long a pod may take to start; a running pod has no limit
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = parse_duration)]
    pub(crate) timeout: Duration,
    /// Further arguments for keelson-init, as the kubelet takes them
    #[arg(last = true, value_name = "INIT_ARGS")]
    pub(crate) extra: Vec<OsString>,
}
