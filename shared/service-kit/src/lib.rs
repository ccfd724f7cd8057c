//! The common base of all Keelson services: start, serve, call, watch, health and metrics.
//!
//! - [`run`] is the whole of a service's `main`: telemetry, configuration, build, bind, `READY=1`, serve,
//!   drain. Exit codes: 0 ok, 64 usage, 78 configuration, 70 internal.
//! - [`Context`] is what a service is built from: configuration, peers, events, progress, metrics.
//! - [`server`] is the one tower stack below every server, [`Peer`] the one above every client.
//! - [`WatchHub`] is the server side of a `Watch…` RPC: replay, `synced`, changes, one slot per key and
//!   subscriber. [`follow`] is the reading side: it reconnects with jitter until the shutdown.
//! - [`status`] builds gRPC errors with an `ErrorInfo`.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them"))]

mod address;
mod admin;
mod backoff;
mod bootstrap;
mod config_file;
mod context;
mod deadline;
mod events;
pub mod exit_reason;
mod flow;
mod follow;
mod health;
mod heartbeat;
mod lifeline;
mod live;
mod memory;
mod metrics;
mod peer;
mod placement;
pub mod plugin;
mod process_metrics;
mod program;
mod progress;
mod selinux;
pub mod server;
mod shares;
mod spans;
mod state_file;
pub mod status;
mod task;
mod turns;
mod uds;
mod usage;
mod watch;
mod whereabouts;
mod writers;

pub use address::{default_route_address, is_local_address, preferred_route_address};
pub use backoff::Backoff;
pub use bootstrap::{Built, ServiceSpec, run, run_with_config};
pub use config_file::store_config;
pub use context::{Context, ServiceArgs};
pub use deadline::answer_by;
pub use events::{EventRing, NewEvent, ObjectRef};
pub use follow::{Signal, follow};
pub use keelson_telemetry::UNSTRUCTURED_TARGET;
pub use lifeline::is_held as is_kept_by_init;
pub use live::Live;
pub use metrics::Metrics;
pub use peer::{NoConnection, Peer, PeerChannel, connect_foreign, connect_tcp, connect_unix};
pub use placement::{is_spread, spread_below};
pub use process_metrics::open_files_limit;
pub use program::program;
pub use progress::{LoopHandle, Progress};
pub use selinux::selinux_is_enabled;
pub use shares::{Holder, HolderKind, NoPlace, SharedPlace, Shares};
pub use state_file::{StateFile, StateFileError, StoredState};
pub use task::{panic_message, spawn};
pub use tokio_util::sync::CancellationToken;
pub use turns::{Fairness, Look as TurnsLook, Turn, Turns};
pub use uds::{BindError, PeerIdentity, bind};
pub use watch::{Subscription, WatchHub, WatchItem};
pub use whereabouts::{Outside, pod_cgroup};
pub use writers::writable_by_others;

/// Now, as nanoseconds since 1970-01-01 UTC.
pub fn now_unix_nanos() -> i64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX))
}
