//! Admits pods, manages their cgroups and evicts pods under node pressure.
//!
//! pod-sync sends the desired state of each pod on a `Sync` stream. A pod that fits is admitted and gets its cgroup at once;
//! `PreparePod` only waits for it. The cgroup tree is the source of truth: pods found in it at startup are kept until a
//! complete set of pods says otherwise, and count as admitted when the set names them.
//!
//! | module | task |
//! |---|---|
//! | `startup` | builds the service and starts its loops |
//! | `server` | the gRPC API; wire types end here and in `wire` |
//! | `manager` | one task that owns the set of desired pods, a slot per pod, and admission |
//! | `commands` | the commands to the manager |
//! | `admission` | the admission state of a pod, and the decision on it |
//! | `worker` | one task per pod: plan, carry out, publish; never two operations at once for a pod |
//! | `cgroup` | the cgroup tree behind a port: v1 and v2, created, scanned and removed, directly or by systemd |
//! | `tree_loop` | sets the tree up, enforces node allocatable, and updates the weight of the burstable class |
//! | `driver` | follows the cgroup driver that the container runtime reports, and checkpoints it |
//! | `statistics`, `storage` | the usage of pods and of the node, read on request |
//! | `procfs`, `runtime_pods` | what statistics read from `/proc` and from runtime-shim |
//! | `details` | the detailed usage of cgroups, for `/metrics/cadvisor` |
//! | `machine_loop`, `host` | capacity, allocatable and identity of the machine |
//! | `eviction` | node-pressure eviction and local storage limits |
//! | `placement` | checks periodically that pods run in their cgroups |
//! | `iptables` | maintains the kubelet's iptables chains |
//! | `swap` | warns at startup when memory-backed volumes may be swapped out |
//! | `node_shutdown` | ends pods before the machine shuts down |
//! | `drain` | drains the node when an operator asks for it |
//! | `logind` | delays a shutdown of the machine, and reports that one is prepared |
//! | `tunables`, `oom` | sets kernel tunables at startup; reports victims of the system OOM killer |
//!
//! The decisions are in `keelson-resource-manager-core`; what all receivers of a `Sync` stream share is in
//! `keelson-pod-reconciler`.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them"))]

mod admission;
mod cgroup;
mod cgroup_version;
mod commands;
mod details;
mod drain;
mod driver;
mod eviction;
mod host;
mod iptables;
mod logind;
mod machine_loop;
mod manager;
mod metrics;
mod node_shutdown;
mod oom;
mod placement;
mod procfs;
mod runtime_pods;
mod server;
mod startup;
mod statistics;
mod storage;
mod swap;
mod tree_loop;
mod tunables;
mod view;
mod wire;
mod wire_stats;
mod worker;

pub use startup::build;
