//! The command line.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Parser;
use keelson_init_core::{Flags, shown_flags};

/// Keeps the services of a Keelson node agent running.
#[derive(Debug, Clone, Parser)]
#[command(name = "keelson-init", version, max_term_width = 100)]
pub struct Cli {
    /// A KubeletConfiguration (kubelet.config.k8s.io/v1beta1), YAML or JSON.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A KeelsonConfiguration (keelson/v1), YAML or JSON.
    #[arg(long, value_name = "FILE")]
    pub keelson_config: Option<PathBuf>,
    /// The folder of pods and volumes [default: /var/lib/kubelet].
    #[arg(long, value_name = "DIR")]
    pub root_dir: Option<String>,
    /// The name of the node [default: the host's name].
    #[arg(long, value_name = "NAME")]
    pub hostname_override: Option<String>,
    /// A folder or file with static pods.
    #[arg(long, value_name = "PATH")]
    pub pod_manifest_path: Option<String>,
    /// The socket of the container runtime [default: unix:///run/containerd/containerd.sock].
    #[arg(long, value_name = "ENDPOINT")]
    pub container_runtime_endpoint: Option<String>,
    /// Labels of the node.
    #[arg(long, value_name = "KEY=VALUE,…")]
    pub node_labels: Vec<String>,
    /// The folder of sockets and the resolved configuration [default: /run/keelson].
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<String>,
    /// The folder of the services' own state [default: /var/lib/keelson].
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<String>,
    /// A level, or a list such as info,keelson_pod_sync=debug [default: info].
    #[arg(long, value_name = "FILTER")]
    pub log_level: Option<String>,
    /// text or json [default: text].
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
    /// How long a container stays after it was made, dead or not [default: 0s].
    #[arg(long, value_name = "DURATION")]
    pub minimum_container_ttl_duration: Option<String>,
    /// Dead containers that are kept of each name in a pod; below 0: all [default: 1].
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub maximum_dead_containers_per_container: Option<i32>,
    /// Dead containers that are kept in all; below 0: any number [default: -1].
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub maximum_dead_containers: Option<i32>,
    /// The cgroup of the container runtime, whose statistics are shown.
    #[arg(long, value_name = "CGROUP")]
    pub runtime_cgroups: Option<String>,
    /// A CredentialProviderConfig (kubelet.config.k8s.io/v1), or a folder with such files.
    #[arg(long, value_name = "PATH")]
    pub image_credential_provider_config: Option<String>,
    /// The folder of the credential provider plugins.
    #[arg(long, value_name = "DIR")]
    pub image_credential_provider_bin_dir: Option<String>,
    /// Write the resolved configuration and exit: for units and containers that run the services themselves.
    #[arg(long)]
    pub resolve_only: bool,
    /// Make the folders with their owners and modes, share the mounts below the root folder, and exit.
    #[arg(long)]
    pub prepare_host: bool,
}

impl Cli {
    /// The values that take part in the resolution.
    pub fn flags(&self) -> Flags {
        Flags {
            root_dir: self.root_dir.clone(),
            hostname_override: self.hostname_override.clone(),
            pod_manifest_path: self.pod_manifest_path.clone(),
            container_runtime_endpoint: self.container_runtime_endpoint.clone(),
            node_labels: self.node_labels.clone(),
            run_dir: self.run_dir.clone(),
            state_dir: self.state_dir.clone(),
            log_level: self.log_level.clone(),
            log_format: self.log_format.clone(),
            minimum_container_ttl: self.minimum_container_ttl_duration.clone(),
            max_dead_per_container: self.maximum_dead_containers_per_container,
            max_dead_containers: self.maximum_dead_containers,
            runtime_cgroups: self.runtime_cgroups.clone(),
        }
    }

    /// Every flag with its value, for `/flagz`.
    pub fn shown(&self) -> BTreeMap<&'static str, String> {
        let path =
            |path: &Option<PathBuf>| path.as_ref().map_or_else(String::new, |p| p.display().to_string());
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let others = [
            ("image-credential-provider-config", text(&self.image_credential_provider_config)),
            ("image-credential-provider-bin-dir", text(&self.image_credential_provider_bin_dir)),
            ("config", path(&self.config)),
            ("keelson-config", path(&self.keelson_config)),
            ("resolve-only", self.resolve_only.to_string()),
            ("prepare-host", self.prepare_host.to_string()),
        ];
        shown_flags(&self.flags(), others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_is_shown() {
        let command = Cli::command();
        let mut flags: Vec<&str> = command.get_arguments().filter_map(clap::Arg::get_long).collect();
        flags.sort_unstable();
        let cli = Cli::try_parse_from(["keelson-init", "--config", "/k.yaml", "--resolve-only"]).unwrap();
        let shown = cli.shown();
        assert_eq!(shown.keys().copied().collect::<Vec<_>>(), flags);
        let of = |name| shown[name].as_str();
        assert_eq!((of("config"), of("keelson-config")), ("/k.yaml", ""));
        assert_eq!((of("resolve-only"), of("prepare-host")), ("true", "false"));
    }

    #[test]
    fn labels_may_be_given_several_times() {
        let cli =
            Cli::try_parse_from(["keelson-init", "--node-labels", "a=1,b=2", "--node-labels=c=3"]).unwrap();
        assert_eq!(cli.flags().node_labels, ["a=1,b=2", "c=3"]);
    }
}
