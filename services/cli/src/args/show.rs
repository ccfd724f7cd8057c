//! Commands that show something.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::candidates::Candidates;
use crate::human::parse_interval;
use crate::metrics::Sort;

#[derive(Debug, Args)]
pub(crate) struct GetArgs {
    #[command(subcommand)]
    pub(crate) what: GetWhat,
}

#[derive(Debug, Subcommand)]
pub(crate) enum GetWhat {
    /// Pods with their state
    #[command(visible_aliases = ["pod", "po"])]
    Pods {
        /// Names of pods [default: all of the namespace]
        #[arg(add = Candidates::Pods)]
        names: Vec<String>,
        #[command(flatten)]
        watch: WatchArgs,
    },
    /// The agent's own services
    #[command(visible_aliases = ["service", "svc"])]
    Services {
        /// Names of services [default: all]
        #[arg(add = Candidates::Services)]
        names: Vec<String>,
        #[command(flatten)]
        watch: WatchArgs,
    },
    /// The node
    #[command(visible_aliases = ["nodes", "no"])]
    Node {
        /// Name of the node; there is only this one
        name: Option<String>,
        #[command(flatten)]
        watch: WatchArgs,
    },
    /// Recent events
    #[command(visible_aliases = ["event", "ev"])]
    Events {
        /// Only events about this object, for example pod/web
        #[arg(long = "for", value_name = "TYPE/NAME")]
        about: Option<String>,
        #[command(flatten)]
        watch: WatchArgs,
    },
    /// The volumes of pods: their kind, state, what they wait for, and their path on this machine
    #[command(visible_aliases = ["volume", "vol"])]
    Volumes {
        /// Names of pods [default: all of the namespace]
        #[arg(add = Candidates::Pods)]
        pods: Vec<String>,
        #[command(flatten)]
        watch: WatchArgs,
    },
    /// PersistentVolumes from manifests: their status, size, and the claim that has them; with --etcd, as they are stored
    ///
    /// AGE counts from the moment at which the agent first saw the manifest. With --etcd there is no status: each node binds its own
    /// claims and PersistentVolumes, and does not report to etcd what is bound to what. The command shows that on the node itself.
    #[command(name = "persistentvolumes", visible_aliases = ["persistentvolume", "pv"])]
    PersistentVolumes {
        /// Names of PersistentVolumes [default: all]
        #[arg(add = Candidates::PersistentVolumes)]
        names: Vec<String>,
        #[command(flatten)]
        watch: WatchArgs,
    },
    /// Claims from manifests: their status, PersistentVolume, and why they are not bound; with --etcd, as they are stored
    ///
    /// AGE counts from the moment at which the agent first saw the manifest. With --etcd there is no status: each node binds its own
    /// claims and PersistentVolumes, and does not report to etcd what is bound to what. The command shows that on the node itself.
    #[command(name = "persistentvolumeclaims", visible_aliases = ["persistentvolumeclaim", "pvc"])]
    PersistentVolumeClaims {
        /// Names of claims [default: all of the namespace]
        #[arg(add = Candidates::PersistentVolumeClaims)]
        names: Vec<String>,
        #[command(flatten)]
        watch: WatchArgs,
    },
    /// The images in the container runtime, and the pods that use them
    #[command(visible_aliases = ["image", "img"])]
    Images {
        /// Names, or beginnings of ids [default: all]
        names: Vec<String>,
    },
    /// Where pods come from, and the manifests that are refused
    #[command(visible_aliases = ["source", "src"])]
    Sources,
    /// With --etcd: the Secrets under the keys of the nodes; their values only with -o yaml or -o json
    #[command(visible_aliases = ["secret"])]
    Secrets {
        /// Names of Secrets [default: all of the namespace]
        names: Vec<String>,
    },
    /// With --etcd: the ConfigMaps under the keys of the nodes; their values only with -o yaml or -o json
    #[command(name = "configmaps", visible_aliases = ["configmap", "cm"])]
    ConfigMaps {
        /// Names of ConfigMaps [default: all of the namespace]
        names: Vec<String>,
    },
    /// With --etcd: the configuration under the key of each node, and whether the node uses it
    ///
    /// The comments before the text show whether the node uses it, and its revision: edited and applied, it is
    /// refused if someone has changed it since.
    Config,
}

/// Whether to keep showing changes.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct WatchArgs {
    /// Keep running and show each change, also across restarts of the service that reports it
    #[arg(short, long)]
    pub(crate) watch: bool,
    /// With --watch: show of each change whether the object was ADDED, MODIFIED or DELETED
    #[arg(long, requires = "watch")]
    pub(crate) output_watch_events: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DescribeArgs {
    #[command(subcommand)]
    pub(crate) what: DescribeWhat,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DescribeWhat {
    /// A pod: containers, conditions, volumes, events, and what it waits for
    #[command(visible_aliases = ["pods", "po"])]
    Pod {
        /// Names of pods [default: all of the namespace]
        #[arg(add = Candidates::Pods)]
        names: Vec<String>,
    },
    /// The node: conditions, sizes, pods
    #[command(visible_aliases = ["nodes", "no"])]
    Node {
        /// Name of the node; there is only this one
        name: Option<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    #[command(subcommand)]
    pub(crate) what: PodNames,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    #[command(subcommand)]
    pub(crate) what: Option<TopWhat>,
    /// Time between two refreshes
    #[arg(long, global = true, value_name = "DURATION", default_value = "2s", value_parser = parse_interval)]
    pub(crate) interval: Duration,
    /// Show one measurement and exit
    #[arg(long, global = true)]
    pub(crate) once: bool,
    /// The column to sort by
    #[arg(long, global = true, value_enum, value_name = "COLUMN", default_value = "cpu")]
    pub(crate) sort: Sort,
    /// Leave out the header line
    #[arg(long, global = true)]
    pub(crate) no_headers: bool,
}

/// What `keelson top` shows; without it, all three.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Subcommand)]
pub(crate) enum TopWhat {
    /// Pods: CPU, working set, restarts
    #[command(visible_aliases = ["pod", "po"])]
    Pods,
    /// The agent's own services: health, CPU, memory, restarts
    #[command(visible_aliases = ["service", "svc"])]
    Services,
    /// The node: CPU and memory, also in percent of what pods may use
    #[command(visible_aliases = ["nodes", "no"])]
    Node,
}

#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    #[command(subcommand)]
    pub(crate) what: PodNames,
}

/// The argument of commands that take only pods.
#[derive(Debug, Subcommand)]
pub(crate) enum PodNames {
    /// Pods by name
    #[command(visible_aliases = ["pods", "po"])]
    Pod {
        /// Names of pods
        #[arg(required = true, add = Candidates::Pods)]
        names: Vec<String>,
    },
}
