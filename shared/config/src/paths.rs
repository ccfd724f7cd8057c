use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::ServiceName;

/// The folders of the agent (architecture §5).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Paths {
    /// Sockets and the resolved configuration, gone with a reboot.
    pub run_dir: PathBuf,
    /// The services' own state, a 0700 folder each.
    pub state_dir: PathBuf,
    /// The kubelet's root: pods, volumes, plugins.
    pub root_dir: PathBuf,
    /// Container logs (`podLogsDir`).
    pub pod_logs_dir: PathBuf,
    /// Links to container logs, named for people.
    pub container_links_dir: PathBuf,
    /// The folder of the services' binaries.
    pub bin_dir: PathBuf,
}

impl Default for Paths {
    fn default() -> Self {
        Self {
            run_dir: "/run/keelson".into(),
            state_dir: "/var/lib/keelson".into(),
            root_dir: "/var/lib/kubelet".into(),
            pod_logs_dir: "/var/log/pods".into(),
            container_links_dir: "/var/log/containers".into(),
            bin_dir: "/usr/libexec/keelson".into(),
        }
    }
}

impl Paths {
    /// The folder that holds the socket of `service`, mode 0750.
    pub fn socket_dir(&self, service: ServiceName) -> PathBuf {
        self.run_dir.join(service.as_str())
    }

    /// `<run-dir>/<service>/<service>.sock`.
    pub fn socket(&self, service: ServiceName) -> PathBuf {
        Self::socket_below(&self.run_dir, service)
    }

    /// The socket of `service` below any run folder.
    pub fn socket_below(run_dir: &Path, service: ServiceName) -> PathBuf {
        run_dir.join(service.as_str()).join(format!("{service}.sock"))
    }

    /// The credentials folder of `service`, which only this service may read; mode 0700.
    pub fn credentials(&self, service: ServiceName) -> PathBuf {
        self.run_dir.join("credentials").join(service.as_str())
    }

    /// The serving certificates of the kubelet API, PEM; written by node-api for the services that publish them.
    pub fn serving_certificate(&self) -> PathBuf {
        self.socket_dir(ServiceName::NodeApi).join("serving.crt")
    }

    /// The folder in node-status's state where it leaves issued certificates for init.
    pub fn issued_certificates(&self) -> PathBuf {
        self.state(ServiceName::NodeStatus).join("certificates")
    }

    /// The state folder of `service`.
    pub fn state(&self, service: ServiceName) -> PathBuf {
        self.state_dir.join(service.as_str())
    }

    /// The resolved configuration.
    pub fn config_file(&self) -> PathBuf {
        self.run_dir.join("config.json")
    }

    /// `<root>/pods/<uid>`.
    pub fn pod_dir(&self, uid: &str) -> PathBuf {
        self.root_dir.join("pods").join(uid)
    }

    /// `<podLogsDir>/<namespace>_<name>_<uid>`.
    pub fn pod_log_dir(&self, namespace: &str, name: &str, uid: &str) -> PathBuf {
        self.pod_logs_dir.join(format!("{namespace}_{name}_{uid}"))
    }
}
