//! The pure decisions of resource-manager: no clock, no I/O, no runtime.
//!
//! | module | what it answers |
//! |---|---|
//! | [`desire`] | what pod-sync wants of a pod, without wire types |
//! | [`plan`] | what to do next for one pod |
//! | [`admit`] | whether a pod fits beside those that are admitted |
//! | [`layout`] | how the cgroups of pods are named, for both drivers |
//! | [`hierarchy`] | which cgroup hierarchies a mountinfo text shows |
//! | [`values`] | what is written into which file of a cgroup |
//! | [`machine`] | sizes of the machine, what pods may use of it, pressure |
//! | [`statistics`] | what is used, from the kernel's texts |

pub mod admit;
pub mod desire;
pub mod hierarchy;
pub mod layout;
pub mod machine;
pub mod plan;
pub mod statistics;
pub mod values;
