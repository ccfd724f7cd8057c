//! etcd as the control plane of a small fleet (architecture §6).
//!
//! [`keys`] says where everything lies. [`Etcd`] is a connection: one member at a time, and the next one when it fails
//! or has no leader. [`Follower`] lists a range and then watches it from the revision of the list, so that nothing is
//! lost between the two; it goes on from where it was after a broken connection, and lists again when etcd has
//! compacted what it missed.
//!
//! Every write names the revision that it replaces: of two writers the second one is told, and nothing is lost.
//!
//! A member has 3 s for a call, and a call ends within [`CALL_ENDS_WITHIN`], whatever the network does. A watch whose
//! connection falls silent is noticed after 15 s at the latest and goes on elsewhere; [`RESUMES_WITHIN`] after the fault it
//! tells what is new again, if there is a member then that answers and has a leader.

mod client;
mod connect;
mod error;
mod follow;
pub mod keys;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod secured_tests;

pub use client::{CALL_ENDS_WITHIN, Entry, Etcd, Expect, Listing, Operation, Written};
pub use error::EtcdError;
pub use follow::{Change, Follower, News, RESUMES_WITHIN};
pub use keys::{NodeKeys, Range};
