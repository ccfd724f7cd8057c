//! Node-pressure eviction and preemption (runtime-and-resources.md §12).
//!
//! | module | decides |
//! |---|---|
//! | [`signal`] | the eviction signals, and the resource and condition of each |
//! | [`threshold`] | when a threshold is met, from the configuration |
//! | [`monitor`] | which threshold to act on now, and which pressure conditions the node has |
//! | [`notification`] | at which memory usage the kernel notifies |
//! | [`usage`] | the resource usage of a pod |
//! | [`rank`] | in which order pods are evicted |
//! | [`local`] | which pod has exceeded a local storage limit |
//! | [`order`] | the status of an evicted pod, and how long its eviction order is in effect |
//! | [`preempt`] | which pods are preempted for a critical pod |

pub mod local;
pub mod monitor;
pub mod notification;
pub mod order;
pub mod preempt;
pub mod rank;
pub mod signal;
pub mod threshold;
pub mod usage;
