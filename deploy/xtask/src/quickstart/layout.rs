//! The fixed paths and names of the quickstart, by which `down` finds everything even without a record.

use std::path::{Path, PathBuf};

use keelson_config::Paths;
use keelson_testkit::{AgentSpec, Remains};

/// The folder of everything except sockets. It also has the pods' logs: in the default folder, another agent on this host would
/// remove the logs of pods that it does not know.
pub const HOME: &str = "/var/lib/keelson-quickstart";

/// The node's name. A pod from a manifest is called `<name>-<node>`.
pub const NODE_NAME: &str = "quickstart";

/// The id that the names of the bridge and the CNI network contain.
pub const NETWORK_ID: &str = "quickstart";

/// The root cgroup of the pods.
pub const CGROUP_ROOT: &str = "/keelson-quickstart";

/// Folders that the agent, the runtime and CNI create outside [`HOME`], the deepest first. `down` removes those that did not
/// exist before and are empty.
pub const SHARED_FOLDERS: [&str; 4] =
    ["/var/lib/cni/results", "/var/lib/cni", "/run/containerd/s", "/run/containerd"];

/// [`HOME`] as a path.
pub fn home() -> PathBuf {
    PathBuf::from(HOME)
}

/// The folder of the private containerd.
pub fn containerd_dir() -> PathBuf {
    home().join("containerd")
}

/// The folder of the binaries that run: copies, which later builds do not change and every user can execute.
pub fn bin_dir() -> PathBuf {
    home().join("bin")
}

/// The log file of init and all services.
pub fn agent_log() -> PathBuf {
    home().join("agent.log")
}

/// The file of the [`Record`](super::record::Record).
pub fn record_file() -> PathBuf {
    home().join("quickstart.json")
}

/// The agent's settings. It uses the default run folder, so that `keelson` finds it without flags.
pub fn agent_spec(runtime_endpoint: String, port: u16, healthz_port: u16) -> AgentSpec {
    let defaults = Paths::default();
    let below = AgentSpec::below(Path::new(HOME), bin_dir(), NODE_NAME, runtime_endpoint);
    AgentSpec {
        config_dir: home().join("config"),
        run_dir: defaults.run_dir,
        cgroup_root: CGROUP_ROOT.to_owned(),
        port,
        healthz_port,
        max_pods: 110,
        ..below
    }
}

/// Everything that a quickstart may leave behind, in any state.
pub fn remains() -> Remains {
    let mut remains = agent_spec(String::new(), 0, 0).remains();
    remains.merge(&keelson_testkit::containerd_remains(&containerd_dir(), NETWORK_ID));
    remains.dirs = vec![remains.run_dirs[0].clone(), home()];
    remains
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remains_are_limited_to_the_quickstarts_own_folders_and_names() {
        let remains = remains();
        assert_eq!(remains.dirs, [PathBuf::from("/run/keelson"), home()]);
        assert_eq!(remains.cgroup_roots, [CGROUP_ROOT]);
        assert_eq!(remains.bridges, ["kbquickstart"]);
        assert_eq!(remains.containerd_sockets, [containerd_dir().join("c.sock")]);
    }
}
