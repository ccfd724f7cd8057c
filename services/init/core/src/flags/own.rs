//! The flags that no field of the KubeletConfiguration has (node-and-api.md §1.4), and ours.

use super::{FlagSpec, Kind, Meaning};

const fn own(name: &'static str, kind: Kind, default: &'static str, help: &'static str) -> FlagSpec {
    FlagSpec { name, kind, default, meaning: Meaning::Own, help }
}

const fn old(name: &'static str, kind: Kind, default: &'static str, help: &'static str) -> FlagSpec {
    let why = "collection of dead containers is decided by pressure on the node";
    FlagSpec { name, kind, default, meaning: Meaning::OwnDeprecated(why), help }
}

/// What is left of the statistics that a kubelet once had from elsewhere.
const fn leftover(name: &'static str, kind: Kind, default: &'static str) -> FlagSpec {
    FlagSpec {
        name,
        kind,
        default,
        meaning: Meaning::Unused("statistics are read without it"),
        help: "Without effect.",
    }
}

pub(super) const OWN: &[FlagSpec] = &[
    own("config", Kind::Path, "", "A KubeletConfiguration (kubelet.config.k8s.io/v1beta1), YAML or JSON."),
    own(
        "config-dir",
        Kind::Path,
        "",
        "A folder whose files that end in .conf are laid over --config, in the order of their paths.",
    ),
    own("kubeconfig", Kind::Path, "", "How to reach the API server; without it the agent runs alone."),
    own(
        "bootstrap-kubeconfig",
        Kind::Path,
        "",
        "How to ask the API server for a client certificate while --kubeconfig has none that holds.",
    ),
    own("hostname-override", Kind::Text, "", "The name of the node, instead of the host's."),
    own("node-ip", Kind::Text, "", "The address of the node, or one of each family."),
    own(
        "cert-dir",
        Kind::Path,
        "/var/lib/kubelet/pki",
        "The folder of certificates that are asked for or made.",
    ),
    own(
        "cloud-provider",
        Kind::Text,
        "",
        "external, where a controller of a cloud sees to the node; else empty.",
    ),
    own("root-dir", Kind::Path, "/var/lib/kubelet", "The folder of pods and volumes."),
    own(
        "seccomp-default",
        Kind::Bool,
        "false",
        "Run containers that name no profile of seccomp with the runtime's own.",
    ),
    own("node-labels", Kind::Labels, "", "Labels that the node registers with."),
    own(
        "runtime-cgroups",
        Kind::Text,
        "",
        "The cgroup of the container runtime, whose statistics are shown.",
    ),
    own(
        "image-credential-provider-config",
        Kind::Path,
        "",
        "A CredentialProviderConfig (kubelet.config.k8s.io/v1), or a folder with such files.",
    ),
    own(
        "image-credential-provider-bin-dir",
        Kind::Path,
        "",
        "The folder of the credential provider plugins.",
    ),
    own("lock-file", Kind::Path, "", "A file that is locked while the agent runs."),
    own(
        "exit-on-lock-contention",
        Kind::Bool,
        "false",
        "End when another process opens the file of --lock-file.",
    ),
    old(
        "minimum-container-ttl-duration",
        Kind::Duration,
        "0s",
        "How long a container stays after it was made, dead or not.",
    ),
    old(
        "maximum-dead-containers-per-container",
        Kind::Int,
        "1",
        "Dead containers that are kept of each name in a pod; below 0: all.",
    ),
    old(
        "maximum-dead-containers",
        Kind::Int,
        "-1",
        "Dead containers that are kept in all; below 0: any number.",
    ),
    FlagSpec {
        name: "experimental-mounter-path",
        kind: Kind::Path,
        default: "",
        meaning: Meaning::Unused("mounts are made without a helper"),
        help: "Without effect.",
    },
    FlagSpec {
        name: "experimental-allocatable-ignore-eviction",
        kind: Kind::Bool,
        default: "false",
        meaning: Meaning::OwnDeprecated("thresholds of eviction are part of what pods cannot have"),
        help: "Do not take thresholds of --eviction-hard from what pods can have.",
    },
    own("housekeeping-interval", Kind::Duration, "10s", "How often statistics are read."),
    own("max-housekeeping-interval", Kind::Duration, "15s", "How old statistics may be."),
    leftover("application-metrics-count-limit", Kind::Int, "100"),
    FlagSpec {
        name: "boot-id-file",
        kind: Kind::Text,
        default: "/proc/sys/kernel/random/boot_id",
        meaning: Meaning::OwnDeprecated("the kernel has it at its own place"),
        help: "Files with the id of this boot; the first that has one counts.",
    },
    leftover("container-hints", Kind::Text, "/etc/cadvisor/container_hints.json"),
    leftover("containerd", Kind::Text, "/run/containerd/containerd.sock"),
    leftover("containerd-namespace", Kind::Text, "k8s.io"),
    leftover("enable-load-reader", Kind::Bool, "false"),
    leftover("event-storage-age-limit", Kind::Text, "default=0"),
    leftover("event-storage-event-limit", Kind::Text, "default=0"),
    leftover("global-housekeeping-interval", Kind::Duration, "1m0s"),
    leftover("log-cadvisor-usage", Kind::Bool, "false"),
    FlagSpec {
        name: "machine-id-file",
        kind: Kind::Text,
        default: "/etc/machine-id,/var/lib/dbus/machine-id",
        meaning: Meaning::OwnDeprecated("systemd has it at its own place"),
        help: "Files with the id of the machine; the first that has one counts.",
    },
    leftover("storage-driver-buffer-duration", Kind::Duration, "1m0s"),
    leftover("storage-driver-db", Kind::Text, "cadvisor"),
    leftover("storage-driver-host", Kind::Text, "localhost:8086"),
    leftover("storage-driver-password", Kind::Text, "root"),
    leftover("storage-driver-secure", Kind::Bool, "false"),
    leftover("storage-driver-table", Kind::Text, "stats"),
    leftover("storage-driver-user", Kind::Text, "root"),
    FlagSpec {
        name: "pod-infra-container-image",
        kind: Kind::Text,
        default: "",
        meaning: Meaning::Unused(
            "the runtime's configuration names the image of sandboxes, and so does sandboxImage of ours",
        ),
        help: "Without effect; read because files that kubeadm wrote for 1.34 have it.",
    },
    own(
        "version",
        Kind::Version,
        "false",
        "Print the version and exit; raw: all that is known of it; vX.Y.Z-more: the version to show instead of this one.",
    ),
    own("help", Kind::Bool, "false", "Print this and exit."),
    own(
        "keelson-config",
        Kind::Path,
        "",
        "A KeelsonConfiguration (keelson/v1), YAML or JSON: what no kubelet has.",
    ),
    own("run-dir", Kind::Path, "/run/keelson", "The folder of sockets and the resolved configuration."),
    own("state-dir", Kind::Path, "/var/lib/keelson", "The folder of the services' own state."),
    own(
        "log-level",
        Kind::Text,
        "info",
        "A level, or a list such as info,keelson_pod_sync=debug; goes before --v.",
    ),
    own("log-format", Kind::Text, "text", "text or json; goes before --logging-format."),
    own(
        "resolve-only",
        Kind::Bool,
        "false",
        "Write the resolved configuration and exit: for units and containers that run the services themselves.",
    ),
    own(
        "prepare-host",
        Kind::Bool,
        "false",
        "Make the folders with their owners and modes, share the mounts below the root folder, and exit.",
    ),
];
