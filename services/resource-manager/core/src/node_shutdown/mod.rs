//! Graceful node shutdown (node-and-api.md §11).
//!
//! | module | decides |
//! |---|---|
//! | [`periods`] | which grace period the pods of a priority have, and how long the shutdown is delayed for them |
//! | [`groups`] | in which order pods are ended, with which grace period, and when the next group follows |
//! | [`progress`] | what to do when the shutdown begins, is cancelled, or is found under way at a start |
//! | [`times`] | the state file, in the kubelet's format |

pub mod groups;
pub mod periods;
pub mod progress;
pub mod times;
