//! The pure decisions of resource-manager: no clock, no I/O, no runtime.
//!
//! | module | what it answers |
//! |---|---|
//! | [`desire`] | what pod-sync wants of a pod, without wire types |
//! | [`placement`] | whether pods run in their cgroups |
//! | [`plan`] | what to do next for one pod |
//! | [`admit`] | whether a pod fits beside those that are admitted |
//! | [`pressure`] | whether a pod may begin while the node is short of something, and whose turn it is |
//! | [`eviction`] | who must go when the machine is short of something |
//! | [`iptables`] | which chains are kept in iptables, and what is missing of them |
//! | [`kernel`] | which kernel tunables are not as they should be, which processes were killed for memory |
//! | [`enforce`] | what the root of all pods and the reserved cgroups are bound to |
//! | [`driver`] | which cgroup driver is in force |
//! | [`layout`] | how the cgroups of pods are named, for both drivers |
//! | [`hierarchy`] | which cgroup hierarchies a mountinfo text shows |
//! | [`values`] | what a cgroup is bound by, and what is written into which of its files |
//! | [`slices`] | what systemd is told of a slice |
//! | [`machine`] | sizes of the machine and what pods may use of it |
//! | [`topology`] | how its CPUs and its memory lie |
//! | [`detail`] | what a cgroup uses in the kernel's detail |
//! | [`swap`] | whether what pods keep in memory may be written to a disk |
//! | [`system_cgroups`] | which cgroups beside those of pods have statistics of their own |
//! | [`statistics`] | what is used, from the kernel's texts |

pub mod admit;
pub mod desire;
pub mod detail;
pub mod driver;
pub mod enforce;
pub mod eviction;
pub mod hierarchy;
pub mod iptables;
pub mod kernel;
pub mod layout;
pub mod machine;
pub mod placement;
pub mod plan;
pub mod pressure;
pub mod slices;
pub mod statistics;
pub mod swap;
pub mod system_cgroups;
pub mod topology;
pub mod values;
