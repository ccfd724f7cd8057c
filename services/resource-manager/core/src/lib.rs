//! The pure decisions of resource-manager: no clock, no I/O, no runtime.
//!
//! | module | decides |
//! |---|---|
//! | [`desire`] | the desired state of a pod, without wire types |
//! | [`placement`] | whether pods run in their cgroups |
//! | [`plan`] | the next action for one pod |
//! | [`admit`] | whether a pod fits next to the admitted pods |
//! | [`pressure`] | whether a pod may start under node pressure, and in which order pods are admitted |
//! | [`eviction`] | which pods are evicted or preempted |
//! | [`node_shutdown`] | in which order pods end before the machine shuts down |
//! | [`drain`] | which pods a drained node starts, and in which order it ends the others |
//! | [`iptables`] | which iptables chains and rules are missing |
//! | [`kernel`] | which kernel tunables must change, which processes the kernel's OOM killer has killed |
//! | [`enforce`] | the limits of the `kubepods` cgroup and of the reserved cgroups |
//! | [`driver`] | which cgroup driver is used |
//! | [`layout`] | how the cgroups of pods are named, for both drivers |
//! | [`hierarchy`] | which cgroup hierarchies are mounted |
//! | [`values`] | the limits of a cgroup, and what is written to which of its files |
//! | [`slices`] | the systemd properties of a slice |
//! | [`machine`] | capacity and allocatable |
//! | [`topology`] | cores, sockets and NUMA nodes |
//! | [`detail`] | the detailed usage of a cgroup, for `/metrics/cadvisor` |
//! | [`swap`] | whether memory-backed volumes may be swapped out to disk |
//! | [`system_cgroups`] | which cgroups other than pods have statistics |
//! | [`statistics`] | the usage of CPU, memory and network, from the kernel's files |

pub mod admit;
pub mod desire;
pub mod detail;
pub mod drain;
pub mod driver;
pub mod enforce;
pub mod eviction;
pub mod hierarchy;
pub mod iptables;
pub mod kernel;
pub mod layout;
pub mod machine;
pub mod node_shutdown;
pub mod placement;
pub mod plan;
pub mod pressure;
pub mod slices;
pub mod statistics;
pub mod swap;
pub mod system_cgroups;
pub mod topology;
pub mod values;
