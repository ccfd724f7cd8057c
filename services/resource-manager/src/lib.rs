//! Gives pods their share of the machine.
//!
//! pod-sync says what it wants of each pod on a `Sync` stream. A pod that fits is admitted and gets a cgroup at
//! once, `PreparePod` only asks whether it is there. Truth is the cgroup tree: the pods that are found in it at the
//! start are held until a complete set of pods says otherwise, and count as admitted when they are named.
//!
//! | module | does |
//! |---|---|
//! | `server` | the gRPC API; wire types end here and in `wire` |
//! | `manager` | one task that owns the set of wanted pods, a slot per pod, and who is admitted |
//! | `worker` | one task per pod: plan, carry out, publish; never two operations at once for a pod |
//! | `cgroup` | the cgroup tree behind a port: v1 and v2, made, scanned and removed, by hand or by systemd |
//! | `tree_loop` | sets the tree up at the start and binds it, then keeps the weight of the burstable class |
//! | `driver` | which cgroup driver the container runtime names, kept for the next start |
//! | `statistics`, `storage` | what pods and the node use, read when somebody asks |
//! | `details` | the same in the kernel's detail, for `/metrics/cadvisor` |
//! | `machine_loop`, `host` | what the machine has and what pods may use of it |
//! | `eviction` | what the machine is short of, and which pods are to end for it |
//! | `placement` | looks now and then whether pods run in their cgroups |
//! | `iptables` | chains that others find the machine's iptables by, and the one that guards its loopback |
//! | `swap` | says at the start when volumes in memory may reach the disk |
//! | `tunables`, `oom` | kernel tunables, set at the start; processes that the kernel kills for want of memory |
//!
//! The decisions are in `keelson-resource-manager-core`; what every receiver of a `Sync` stream does is in
//! `keelson-sync-callee`.

mod cgroup;
mod cgroup_version;
mod details;
mod driver;
mod eviction;
mod host;
mod iptables;
mod machine_loop;
mod manager;
mod metrics;
mod oom;
mod placement;
mod server;
mod statistics;
mod storage;
mod swap;
mod tree_loop;
mod tunables;
mod view;
mod wire;
mod wire_stats;
mod worker;

pub use server::build;
