//! The groups of settings, by the words that an operator would look for. Each reads its own fields, checks its own rules, and
//! resolves its own part of the configuration; none knows another. [`crate::resolve()`] lists them in order.

pub(crate) mod api;
pub(crate) mod certificates;
pub(crate) mod cgroups;
pub(crate) mod container_logs;
pub(crate) mod control_plane;
pub(crate) mod dns;
pub(crate) mod eviction;
pub(crate) mod host;
pub(crate) mod images;
pub(crate) mod managers;
pub(crate) mod node_status;
pub(crate) mod other_flags;
pub(crate) mod paths;
pub(crate) mod pods;
pub(crate) mod processes;
pub(crate) mod reserved;
pub(crate) mod runtime;
pub(crate) mod shutdown;
pub(crate) mod sources;
pub(crate) mod system_bus;
pub(crate) mod telemetry;
pub(crate) mod users;
pub(crate) mod volumes;
