//! Who must go when the machine is short of something (runtime-and-resources.md §12).
//!
//! | module | what it answers |
//! |---|---|
//! | [`signal`] | what is watched, and what is said to be short then |
//! | [`threshold`] | when a signal is met, from the configuration's texts |
//! | [`monitor`] | what is to be acted on now, and which conditions the node has |
//! | [`notice`] | when the kernel is to tell that memory becomes short |
//! | [`usage`] | what a pod takes |
//! | [`rank`] | which pod goes first |
//! | [`local`] | which pod has exceeded a limit of local storage |
//! | [`order`] | what an evicted pod is told to show, and how long orders stand |
//! | [`preempt`] | who makes room for a critical pod |

pub mod local;
pub mod monitor;
pub mod notice;
pub mod order;
pub mod preempt;
pub mod rank;
pub mod signal;
pub mod threshold;
pub mod usage;
