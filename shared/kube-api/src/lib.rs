//! The Kubernetes API as the control plane of a node (architecture §6; node-and-api.md §5).
//!
//! [`KubeApi`] is a service's client of an API server: HTTP/2, configured by a kubeconfig, and reconnected when that file
//! changes. [`Follower`] lists a resource and then watches it from the version of the list. After a broken connection it
//! resumes from the last version; when the server no longer has that version, it lists again.
//!
//! The kubeconfig is written by init and references no other file. A service has one [`Limiter`] for its connections; the
//! node heartbeat is not rate-limited.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them"))]

mod calls;
mod connect;
mod dialer;
mod error;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod fake;
mod follow;
mod limit;
mod metrics;
mod proxy;
mod ranges;
mod refusal;
mod resource;
mod user_agent;
mod watch_pool;

pub use calls::{CALL_ENDS_WITHIN, Patch};
pub use connect::KubeApi;
pub use error::KubeError;
pub use follow::{Change, Follower, KubeListWatch, KubeWatch, WatchEvent};
pub use limit::Limiter;
pub use metrics::RestMetrics;
pub use resource::{Object, Range, Resource};
pub use user_agent::user_agent;
