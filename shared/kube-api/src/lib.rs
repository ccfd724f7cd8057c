//! The Kubernetes API as the control plane of a node (architecture §6; node-and-api.md §5).
//!
//! [`KubeApi`] is how a service speaks to an API server: HTTP/2, with what its kubeconfig says, and anew when that file has
//! changed. [`Follower`] lists a resource and then watches it from the version of the list; it goes on from where it was after
//! a broken connection, and lists again when the server has forgotten what was missed.
//!
//! The kubeconfig is one that init has made: it names no other file. A service has one [`Limiter`] for its connections; what says
//! that the node lives goes without.

mod connect;
mod counted;
mod dialer;
mod error;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod fake;
mod follow;
mod limit;
mod lines;
mod proxy;
mod refusal;
mod resource;
mod user_agent;

pub use connect::{CALL_ENDS_WITHIN, KubeApi, Patch};
pub use counted::RestMetrics;
pub use error::KubeError;
pub use follow::{Change, Follower, News};
pub use limit::Limiter;
pub use resource::{Object, Range, Resource};
pub use user_agent::user_agent;
