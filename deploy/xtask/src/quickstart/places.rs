//! Where a quickstart is: fixed places, so that `down` finds it without a record, too.

use std::path::{Path, PathBuf};

use keelson_config::Paths;
use keelson_testkit::{AgentSpec, Remains};

/// The folder of everything but sockets: of the logs, too, since another agent on the machine would take those of pods that it
/// does not know for leftovers.
pub const HOME: &str = "/var/lib/keelson-quickstart";

/// The node's name; pods from manifests are called `<name>-<node>`.
pub const NODE_NAME: &str = "quickstart";

/// Names the bridge and the CNI network.
pub const NETWORK_ID: &str = "quickstart";

/// The root of the pods' cgroups.
pub const CGROUP_ROOT: &str = "/keelson-quickstart";

/// Folders that the agent, the runtime or CNI make outside of [`HOME`]; removed if they were not there
/// before and are empty. The deepest first.
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

/// The binaries that run: copies, so that a build does not disturb them and any user can enter.
pub fn bin_dir() -> PathBuf {
    home().join("bin")
}

/// What init and the services log.
pub fn agent_log() -> PathBuf {
    home().join("agent.log")
}

/// What `down` has to know beside the fixed places.
pub fn record_file() -> PathBuf {
    home().join("quickstart.json")
}

/// How the agent is set up. It uses the default run folder, so `keelson` finds it without flags.
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

/// All that a quickstart can leave, whatever has become of it.
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
    fn what_is_removed_is_ours_alone() {
        let remains = remains();
        assert_eq!(remains.dirs, [PathBuf::from("/run/keelson"), home()]);
        assert_eq!(remains.cgroup_roots, [CGROUP_ROOT]);
        assert_eq!(remains.bridges, ["kbquickstart"]);
        assert_eq!(remains.containerd_sockets, [containerd_dir().join("c.sock")]);
    }
}
