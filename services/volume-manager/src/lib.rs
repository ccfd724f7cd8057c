//! Gives pods their volumes.
//!
//! pod-sync sends the desired state of each pod on a `Sync` stream. This service reconciles the volumes with it, and
//! answers `MountPod` and `UnmountPod` when the volumes are mounted or unmounted. It also serves `PrepareContainer`,
//! but never while volumes are torn down. The source of truth is the disk and mountinfo: volumes found below
//! `<root>/pods` at startup are kept until pod-sync has sent a complete set of pods.
//!
//! | module | does |
//! |---|---|
//! | `server` | the gRPC API; wire types end here and in `wire` |
//! | `manager` | one task that owns the set of desired pods and a slot per pod |
//! | `worker` | one task per pod: plans, carries out, publishes; never runs two operations of a pod at once |
//! | `actions` | carries out the actions of a plan |
//! | `slow_actions` | reports actions that take long |
//! | `view` | the status of a pod's volumes, as a worker publishes it |
//! | `store` | the pod folders and volumes on disk |
//! | `atomic` | replaces all files of a volume at once |
//! | `block` | maps devices for pods: volumes of the mode `Block` |
//! | `mounter` | mounts and foreign filesystems, in processes that may hang |
//! | `fsgroup`, `walks` | changes the ownership of a volume to the pod's fsGroup, and tracks the progress |
//! | `objects` | the cache of ConfigMaps, Secrets and other objects that pods refer to, watched in pod-config |
//! | `claims_in_use` | reports the claims in use to pod-config, which keeps them bound |
//! | `tokens` | service account tokens, renewed before they expire |
//! | `pod_certificates` | certificates of pods: their keys, requests and refreshes |
//! | `prepare` | what one container needs: subPaths, and values of environment files |
//! | `subpath` | subPaths, opened beneath their volume and bind-mounted for a container |
//! | `stats`, `measure` | the usage of volumes, measured in the background |
//! | `driver_stats` | the usage and health of volumes, as CSI drivers measure them |
//! | `metrics`, `totals` | metrics: orphaned pods, durations of operations, numbers of volumes |
//! | `selinux` | SELinux labels of the plugin folders and of volumes |
//! | `listing` | what is in a folder |
//! | `remove` | removal that never crosses a mount and never follows a link |
//! | `mounts` | mount points, tmpfs, huge pages, and the shared root folder |
//!
//! The decisions are in `keelson-volume-manager-core`; the code that all receivers of a `Sync` stream share is in
//! `keelson-pod-reconciler`.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them"))]

mod actions;
mod atomic;
mod block;
mod claims_in_use;
mod csi;
mod driver_stats;
mod fsgroup;
mod legacy;
mod listing;
mod live_objects;
mod manager;
mod measure;
mod metrics;
mod mounter;
mod mounts;
mod node_facts;
mod objects;
mod orphans;
mod plugin_error;
mod plugin_set;
mod plugins;
mod pod_certificates;
mod pod_plugins;
mod prepare;
mod quantities;
mod remove;
mod resolver;
mod selinux;
mod server;
mod shared_volumes;
mod slow_actions;
mod stats;
mod store;
mod subpath;
mod tokens;
mod totals;
mod user_namespaces;
mod view;
mod walks;
mod wire;
mod worker;

pub use mounter::helper::{ARGUMENT as HELPER_ARGUMENT, main as run_helper};
pub use server::{build, build_with_helper};
