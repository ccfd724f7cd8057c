//! Commands that change pods.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, Subcommand};

use super::candidates::Candidates;
use super::show::PodNames;
use crate::human::parse_duration;

#[derive(Debug, Args)]
pub(crate) struct ApplyArgs {
    /// Manifests: a file, a folder, or - for standard input
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct DeleteArgs {
    #[command(subcommand)]
    pub(crate) what: Option<DeleteWhat>,
    /// The objects of these manifests, pods first: a file, a folder, or - for standard input
    #[arg(short, long = "filename", value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// Return only when the pods are gone
    #[arg(long, global = true, value_name = "BOOL", default_value_t = true, action = ArgAction::Set,
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) wait: bool,
    /// How long to wait at most [default: no limit]
    #[arg(long, global = true, value_name = "DURATION", value_parser = parse_duration)]
    pub(crate) timeout: Option<Duration>,
}

/// What `keelson delete` takes by name.
#[derive(Debug, Subcommand)]
pub(crate) enum DeleteWhat {
    /// Pods by name
    #[command(visible_aliases = ["pods", "po"])]
    Pod {
        /// Names of pods
        #[arg(required = true, add = Candidates::Pods)]
        names: Vec<String>,
    },
    /// Claims by name; refused while a pod uses them
    #[command(name = "persistentvolumeclaim", visible_aliases = ["persistentvolumeclaims", "pvc"])]
    PersistentVolumeClaim {
        /// Names of claims
        #[arg(required = true, add = Candidates::PersistentVolumeClaims)]
        names: Vec<String>,
    },
    /// PersistentVolumes by name; refused while a claim has them. Their data stay
    #[command(name = "persistentvolume", visible_aliases = ["persistentvolumes", "pv"])]
    PersistentVolume {
        /// Names of PersistentVolumes
        #[arg(required = true, add = Candidates::PersistentVolumes)]
        names: Vec<String>,
    },
    /// With --etcd: the configuration under the node's key, so that only its files are in effect
    Config,
}

#[derive(Debug, Args)]
pub(crate) struct EvictArgs {
    #[command(subcommand)]
    pub(crate) what: PodNames,
    /// Seconds that the pod has to end, if its own grace period is longer
    #[arg(long, global = true, value_name = "SECONDS")]
    pub(crate) grace_period: Option<u32>,
    /// Why, for the status of the pod and its event
    #[arg(long, global = true, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(crate) message: String,
}

#[derive(Debug, Args)]
pub(crate) struct RetryArgs {
    #[command(subcommand)]
    pub(crate) what: PodNames,
}
