//! etcd as the control plane of a small fleet (architecture §6).
//!
//! [`keys`] defines the key layout. [`Etcd`] is a connection to one member at a time; it fails over to the next member when
//! one fails or has no leader. [`Follower`] lists a range and then watches it from the revision of the list, so that no
//! change is lost between the two. After a broken connection it resumes from the last revision; when etcd has compacted
//! that revision, it lists again.
//!
//! Every write names the revision that it replaces: the second of two writers gets a conflict, and no update is lost.
//!
//! A member has 3 s to answer a call, and a call ends within [`CALL_ENDS_WITHIN`] even if the network fails. A silent watch
//! connection is detected within 15 s, and the watch resumes on another member. It reports changes again at most
//! [`RESUMES_WITHIN`] after the fault, if a member with a leader answers by then.

mod client;
mod connect;
mod error;
mod follow;
pub mod keys;
mod operations;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod secured_tests;

pub use client::{CALL_ENDS_WITHIN, Etcd};
pub use error::EtcdError;
pub use follow::{Change, EtcdListWatch, EtcdWatch, Follower, RESUMES_WITHIN, WatchEvent};
pub use keys::{NodeKeys, Range};
pub use operations::{Entry, Expect, Listing, Operation, Written};
