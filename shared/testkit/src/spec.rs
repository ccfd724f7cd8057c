//! How an agent is set up: its folders, its configuration files and the command that starts it.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use keelson_config::ServiceName;
use serde_json::{Map, Value, json};

use crate::{PAUSE_IMAGE, Remains};

/// Names the folder with the binaries, when they are not where this program was built.
const BIN_DIR_VARIABLE: &str = "KEELSON_BIN_DIR";

/// The binary of the person's tool.
const CLI: &str = "keelson";

/// All settings of an agent at its start.
#[derive(Debug, Clone)]
pub struct AgentSpec {
    /// The folder of the two configuration files.
    pub config_dir: PathBuf,
    /// The folder of the binaries; it and they must be open to the users of the services.
    pub bin_dir: PathBuf,
    /// Sockets (`runDir`).
    pub run_dir: PathBuf,
    /// The services' own state (`stateDir`).
    pub state_dir: PathBuf,
    /// `--root-dir`.
    pub root_dir: PathBuf,
    /// `staticPodPath`.
    pub manifest_dir: PathBuf,
    /// `podLogsDir`.
    pub pod_logs_dir: PathBuf,
    /// `containerLinksDir`.
    pub links_dir: PathBuf,
    /// `--hostname-override`.
    pub node_name: String,
    /// `containerRuntimeEndpoint`.
    pub runtime_endpoint: String,
    /// `cgroupRoot`, such as `/keelson-test-x`.
    pub cgroup_root: String,
    /// `cgroupDriver`.
    pub cgroup_driver: String,
    /// Port of the kubelet API on loopback.
    pub port: u16,
    /// Port of `/healthz` on loopback.
    pub healthz_port: u16,
    /// `maxPods`.
    pub max_pods: u32,
    /// Pods started at the same time (`startParallelism`); `None`: the default.
    pub start_parallelism: Option<u32>,
    /// The first of the services' user ids (`uidBase`); `None`: the default.
    pub uid_base: Option<u32>,
    /// A trace collector, all traces sampled.
    pub trace_endpoint: Option<String>,
    /// A log level or filter.
    pub log_level: String,
    /// More fields of the KubeletConfiguration, or other values for those above.
    pub kubelet: Map<String, Value>,
    /// More fields of the KeelsonConfiguration, or other values for those above.
    pub keelson: Map<String, Value>,
    /// More flags.
    pub flags: Vec<String>,
}

impl AgentSpec {
    /// An agent with every folder below `dir`.
    pub fn below(dir: &Path, bin_dir: PathBuf, node_name: &str, runtime_endpoint: String) -> Self {
        Self {
            config_dir: dir.to_owned(),
            bin_dir,
            run_dir: dir.join("run"),
            state_dir: dir.join("state"),
            root_dir: dir.join("kubelet"),
            manifest_dir: dir.join("manifests"),
            pod_logs_dir: dir.join("logs"),
            links_dir: dir.join("links"),
            node_name: node_name.to_owned(),
            runtime_endpoint,
            cgroup_root: format!("/keelson-{node_name}"),
            cgroup_driver: "cgroupfs".to_owned(),
            port: 10250,
            healthz_port: 10248,
            max_pods: 500,
            start_parallelism: None,
            uid_base: None,
            trace_endpoint: None,
            log_level: "info".to_owned(),
            kubelet: Map::new(),
            keelson: Map::new(),
            flags: Vec::new(),
        }
    }

    /// An agent that ignores the usage of the machine's disk: neither evictions nor image garbage collection depend on
    /// other files there. The memory threshold stays the kubelet's.
    #[must_use]
    pub fn whatever_the_disk_holds(mut self) -> Self {
        self.kubelet.insert("evictionHard".to_owned(), json!({"memory.available": "100Mi"}));
        // Never above 100 %.
        self.kubelet.insert("imageGCHighThresholdPercent".to_owned(), json!(100));
        self
    }

    /// The KubeletConfiguration file.
    pub fn kubelet_file(&self) -> PathBuf {
        self.config_dir.join("kubelet.yaml")
    }

    /// The KeelsonConfiguration file.
    pub fn keelson_file(&self) -> PathBuf {
        self.config_dir.join("keelson.yaml")
    }

    /// Makes the manifest folder and writes both configuration files.
    pub fn write(&self) -> anyhow::Result<()> {
        for folder in [&self.config_dir, &self.manifest_dir] {
            fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        for (path, value) in
            [(self.kubelet_file(), self.kubelet_config()), (self.keelson_file(), self.keelson_config())]
        {
            // JSON is YAML, too.
            fs::write(&path, serde_json::to_vec_pretty(&value)?)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    /// The command that starts init.
    pub fn command(&self) -> Command {
        let mut command = Command::new(self.bin_dir.join(ServiceName::Init.binary()));
        command.arg("--config").arg(self.kubelet_file());
        command.arg("--keelson-config").arg(self.keelson_file());
        command.arg("--root-dir").arg(&self.root_dir);
        command.arg("--hostname-override").arg(&self.node_name);
        command.args(&self.flags);
        command
    }

    /// The `keelson` command for this agent.
    pub fn cli(&self) -> Command {
        let mut command = Command::new(self.bin_dir.join(CLI));
        command.arg("--run-dir").arg(&self.run_dir);
        command
    }

    /// Everything that the agent leaves; its logs only if they are in a folder of its own.
    pub fn remains(&self) -> Remains {
        let run_dirs = vec![self.run_dir.clone(), self.kubelet_file()];
        let own = [&self.run_dir, &self.state_dir, &self.root_dir, &self.config_dir];
        let dirs = own.into_iter().cloned().collect();
        Remains { run_dirs, cgroup_roots: vec![self.cgroup_root.clone()], dirs, ..Remains::default() }
    }

    fn kubelet_config(&self) -> Value {
        let mut config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "staticPodPath": self.manifest_dir,
            "containerRuntimeEndpoint": self.runtime_endpoint,
            "fileCheckFrequency": "20s",
            "address": "127.0.0.1",
            "port": self.port,
            "healthzBindAddress": "127.0.0.1",
            "healthzPort": self.healthz_port,
            "cgroupDriver": self.cgroup_driver,
            "cgroupRoot": self.cgroup_root,
            "podLogsDir": self.pod_logs_dir,
            "maxPods": self.max_pods,
            "failCgroupV1": false,
            "failSwapOn": false,
        });
        set_all(&mut config, &self.kubelet);
        config
    }

    fn keelson_config(&self) -> Value {
        let mut config = json!({
            "apiVersion": "keelson/v1",
            "kind": "KeelsonConfiguration",
            "runDir": self.run_dir,
            "stateDir": self.state_dir,
            "containerLinksDir": self.links_dir,
            "binDir": self.bin_dir,
            "sandboxImage": PAUSE_IMAGE,
            "manageHost": false,
            "logging": {"format": "text", "level": self.log_level},
        });
        if let Some(uid) = self.uid_base {
            config["uidBase"] = uid.into();
        }
        if let Some(count) = self.start_parallelism {
            config["startParallelism"] = count.into();
        }
        if let Some(endpoint) = &self.trace_endpoint {
            config["tracing"] = json!({"endpoint": endpoint, "samplingRatePerMillion": 1_000_000});
        }
        set_all(&mut config, &self.keelson);
        config
    }
}

fn set_all(config: &mut Value, fields: &Map<String, Value>) {
    for (name, value) in fields {
        config[name] = value.clone();
    }
}

/// Every binary of the agent: init, the services, the person's tool.
pub fn binary_names() -> Vec<&'static str> {
    ServiceName::ALL.iter().map(|service| service.binary()).chain([CLI]).collect()
}

/// The folder with the agent's binaries: `KEELSON_BIN_DIR`, or where this program was built.
pub fn built_binaries() -> anyhow::Result<PathBuf> {
    let folder = match std::env::var_os(BIN_DIR_VARIABLE) {
        Some(folder) => std::path::absolute(folder)?,
        None => {
            let exe = std::env::current_exe().context("this program has no path")?;
            // A test is in target/<profile>/deps, a tool in target/<profile>.
            let mut folders = exe.ancestors().skip(1).take(2);
            let found = folders.find(|folder| folder.join(ServiceName::Init.binary()).is_file());
            let Some(found) = found else {
                bail!(
                    "the agent's binaries are not near {}; run: cargo build --workspace --bins",
                    exe.display()
                );
            };
            found.to_owned()
        }
    };
    for name in binary_names() {
        ensure!(
            folder.join(name).is_file(),
            "{} has no {name}; run: cargo build --workspace --bins",
            folder.display()
        );
    }
    Ok(folder)
}

/// `folder`, or where the services' users cannot enter it (a checkout below /root) a copy of its
/// binaries in `copies`.
pub fn reachable_binaries(folder: &Path, copies: &Path) -> anyhow::Result<PathBuf> {
    let open = |path: &Path| fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o001 != 0);
    if folder.ancestors().all(open) {
        return Ok(folder.to_owned());
    }
    copy_binaries(folder, copies)?;
    Ok(copies.to_owned())
}

/// Copies the binaries to `to`, by hard links where that works.
pub fn copy_binaries(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o755))?;
    for name in binary_names() {
        let (source, target) = (from.join(name), to.join(name));
        // A running binary cannot be written, but its name can be given to a new file.
        let _ = fs::remove_file(&target);
        let linked = fs::hard_link(&source, &target);
        linked
            .or_else(|_| fs::copy(&source, &target).map(drop))
            .with_context(|| format!("cannot copy {} to {}", source.display(), target.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_files_name_the_folders_and_extra_fields_win() {
        let scratch = crate::Scratch::new().unwrap();
        let dir = scratch.path();
        let mut spec = AgentSpec::below(dir, "/bin".into(), "n1", "unix:///x".into());
        spec.kubelet.insert("maxPods".into(), 7.into());
        spec.uid_base = Some(90_000);
        spec.write().unwrap();
        let read = |path: PathBuf| -> Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
        let kubelet = read(spec.kubelet_file());
        assert_eq!(kubelet["maxPods"], 7);
        assert_eq!(kubelet["staticPodPath"], json!(dir.join("manifests")));
        let keelson = read(spec.keelson_file());
        assert_eq!(keelson["uidBase"], 90_000);
        assert_eq!(keelson["runDir"], json!(dir.join("run")));
        assert!(keelson.get("tracing").is_none());
    }

    #[test]
    fn binaries_behind_a_closed_folder_are_copied() {
        let scratch = crate::Scratch::new().unwrap();
        let closed = scratch.path().join("closed");
        fs::create_dir(&closed).unwrap();
        for name in binary_names() {
            fs::write(closed.join(name), "").unwrap();
        }
        let copies = scratch.path().join("copies");
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(reachable_binaries(&closed, &copies).unwrap(), closed);
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(reachable_binaries(&closed, &copies).unwrap(), copies);
        assert!(copies.join("keelson-init").is_file());
    }
}
