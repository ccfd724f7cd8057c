//! The kubelet's flags without a field in the KubeletConfiguration (node-and-api.md §1.4), and the agent's own.

use super::{Effect, FlagSpec, Kind};

const fn other(name: &'static str, kind: Kind, default: &'static str, help: &'static str) -> FlagSpec {
    FlagSpec { name, kind, default, effect: Effect::Other, help }
}

const fn dead_containers(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    help: &'static str,
) -> FlagSpec {
    let why = "dead containers are collected under disk pressure";
    FlagSpec { name, kind, default, effect: Effect::OtherDeprecated(why), help }
}

/// A flag of cAdvisor that the kubelet still accepts.
const fn cadvisor(name: &'static str, kind: Kind, default: &'static str) -> FlagSpec {
    FlagSpec {
        name,
        kind,
        default,
        effect: Effect::Unused("statistics do not come from cAdvisor"),
        help: "Without effect.",
    }
}

pub(super) const OTHER_FLAGS: &[FlagSpec] = &[
    other("config", Kind::Path, "", "A KubeletConfiguration (kubelet.config.k8s.io/v1beta1), YAML or JSON."),
    other(
        "config-dir",
        Kind::Path,
        "",
        "A folder whose *.conf files are merged over --config, in the order of their paths.",
    ),
    other(
        "kubeconfig",
        Kind::Path,
        "",
        "The kubeconfig for the API server; without it the agent runs standalone.",
    ),
    other(
        "bootstrap-kubeconfig",
        Kind::Path,
        "",
        "The kubeconfig to request a client certificate with while --kubeconfig has no valid one.",
    ),
    other("hostname-override", Kind::Text, "", "The name of the node, instead of the host name."),
    other("node-ip", Kind::Text, "", "The address of the node, or one per IP family."),
    other("cert-dir", Kind::Path, "/var/lib/kubelet/pki", "The folder of the node's certificates."),
    other("cloud-provider", Kind::Text, "", "external if a cloud controller manages the node; else empty."),
    other("root-dir", Kind::Path, "/var/lib/kubelet", "The folder of pods and volumes."),
    other(
        "seccomp-default",
        Kind::Bool,
        "false",
        "Use the seccomp profile RuntimeDefault for containers without one.",
    ),
    other("node-labels", Kind::Labels, "", "Labels that the node registers with."),
    other("runtime-cgroups", Kind::Text, "", "The cgroup of the container runtime, for its statistics."),
    other(
        "image-credential-provider-config",
        Kind::Path,
        "",
        "A CredentialProviderConfig (kubelet.config.k8s.io/v1), or a folder with such files.",
    ),
    other(
        "image-credential-provider-bin-dir",
        Kind::Path,
        "",
        "The folder of the credential provider plugins.",
    ),
    other("lock-file", Kind::Path, "", "A file that is locked while the agent runs."),
    other(
        "exit-on-lock-contention",
        Kind::Bool,
        "false",
        "Exit when another process opens the file of --lock-file.",
    ),
    dead_containers(
        "minimum-container-ttl-duration",
        Kind::Duration,
        "0s",
        "The minimum age of a dead container before it is collected.",
    ),
    dead_containers(
        "maximum-dead-containers-per-container",
        Kind::Int,
        "1",
        "The number of dead containers to keep per container of a pod; negative: all.",
    ),
    dead_containers(
        "maximum-dead-containers",
        Kind::Int,
        "-1",
        "The number of dead containers to keep on the node; negative: no limit.",
    ),
    FlagSpec {
        name: "experimental-mounter-path",
        kind: Kind::Path,
        default: "",
        effect: Effect::Unused("mounts need no helper"),
        help: "Without effect.",
    },
    FlagSpec {
        name: "experimental-allocatable-ignore-eviction",
        kind: Kind::Bool,
        default: "false",
        effect: Effect::OtherDeprecated("eviction thresholds always count as reserved"),
        help: "Do not subtract the thresholds of --eviction-hard from node allocatable.",
    },
    other("housekeeping-interval", Kind::Duration, "10s", "How often statistics are collected."),
    other("max-housekeeping-interval", Kind::Duration, "15s", "The maximum age of statistics."),
    cadvisor("application-metrics-count-limit", Kind::Int, "100"),
    FlagSpec {
        name: "boot-id-file",
        kind: Kind::Text,
        default: "/proc/sys/kernel/random/boot_id",
        effect: Effect::OtherDeprecated("the kernel has a fixed path for it"),
        help: "Files with the boot ID; the first that has one is used.",
    },
    cadvisor("container-hints", Kind::Text, "/etc/cadvisor/container_hints.json"),
    cadvisor("containerd", Kind::Text, "/run/containerd/containerd.sock"),
    cadvisor("containerd-namespace", Kind::Text, "k8s.io"),
    cadvisor("enable-load-reader", Kind::Bool, "false"),
    cadvisor("event-storage-age-limit", Kind::Text, "default=0"),
    cadvisor("event-storage-event-limit", Kind::Text, "default=0"),
    cadvisor("global-housekeeping-interval", Kind::Duration, "1m0s"),
    cadvisor("log-cadvisor-usage", Kind::Bool, "false"),
    FlagSpec {
        name: "machine-id-file",
        kind: Kind::Text,
        default: "/etc/machine-id,/var/lib/dbus/machine-id",
        effect: Effect::OtherDeprecated("systemd has a fixed path for it"),
        help: "Files with the machine ID; the first that has one is used.",
    },
    cadvisor("storage-driver-buffer-duration", Kind::Duration, "1m0s"),
    cadvisor("storage-driver-db", Kind::Text, "cadvisor"),
    cadvisor("storage-driver-host", Kind::Text, "localhost:8086"),
    cadvisor("storage-driver-password", Kind::Text, "root"),
    cadvisor("storage-driver-secure", Kind::Bool, "false"),
    cadvisor("storage-driver-table", Kind::Text, "stats"),
    cadvisor("storage-driver-user", Kind::Text, "root"),
    FlagSpec {
        name: "pod-infra-container-image",
        kind: Kind::Text,
        default: "",
        effect: Effect::Unused(
            "the sandbox image is set in the runtime's configuration, or by sandboxImage in --keelson-config",
        ),
        help: "Without effect; accepted since kubeadm 1.34 writes it.",
    },
    other(
        "version",
        Kind::Version,
        "false",
        "Print the version and exit; raw: with all details; vX.Y.Z-suffix: report this version instead.",
    ),
    other("help", Kind::Bool, "false", "Print this help and exit."),
    other(
        "keelson-config",
        Kind::Path,
        "",
        "A KeelsonConfiguration (keelson/v1), YAML or JSON: settings that a kubelet does not have.",
    ),
    other("run-dir", Kind::Path, "/run/keelson", "The folder of sockets and the resolved configuration."),
    other("state-dir", Kind::Path, "/var/lib/keelson", "The folder of the services' state."),
    other(
        "log-level",
        Kind::Text,
        "info",
        "A level, or a list such as info,keelson_pod_sync=debug; overrides --v.",
    ),
    other("log-format", Kind::Text, "text", "text or json; overrides --logging-format."),
    other(
        "resolve-only",
        Kind::Bool,
        "false",
        "Write the resolved configuration and exit, for systemd units and containers that run the services without init.",
    ),
    other(
        "prepare-host",
        Kind::Bool,
        "false",
        "Create the folders with their owners and modes, share the mounts below the root folder, and exit.",
    ),
];
