//! etcd as the control plane of a small fleet (architecture §6).
//!
//! [`keys`] says where everything lies. [`Etcd`] is a connection: one member at a time, and the next one when it fails
//! or has no leader. [`Follower`] lists a range and then watches it from the revision of the list, so that nothing is
//! lost between the two; it goes on from where it was after a broken connection, and lists again when etcd has
//! compacted what it missed.
//!
//! Every write names the revision that it replaces: of two writers the second one is told, and nothing is lost.

mod client;
mod connect;
mod error;
mod follow;
pub mod keys;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod secured_tests;

pub use client::{Entry, Etcd, Expect, Listing, Operation, Written};
pub use error::EtcdError;
pub use follow::{Change, Follower, News};
pub use keys::{NodeKeys, Range};
