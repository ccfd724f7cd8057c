//! The decisions of runtime-shim as pure functions, without clock, I/O and runtime.
//!
//! - [`cgroup_driver`]: the cgroup driver that the runtime reports.
//! - [`container_gc`]: which dead containers and sandboxes to remove.
//! - [`credential_config`]: the configuration of credential provider plugins.
//! - [`credential_plugin`]: requests to the plugins, their responses, and the cache of responses.
//! - [`etc_hosts`]: the content of a pod's `/etc/hosts`.
//! - [`exec`]: which container a command runs in.
//! - [`file_lock`]: which process has locked a file.
//! - [`image`]: image references, pull policies and pull back-off.
//! - [`image_gc`]: which images to remove.
//! - [`keyring`]: docker configurations, and the credentials that match an image.
//! - [`log`]: the line formats of container logs, and what a reader gets of a line.
//! - [`log_names`]: names of log folders, log files and links to logs.
//! - [`node_log`]: queries of the node's logs, the journal command that answers them, and parts of files.
//! - [`operation`]: the names of CRI calls in metrics.
//! - [`pull_progress`]: whether a pull makes progress or is stalled.
//! - [`pull_rate`]: how many pulls may begin.
//! - [`pull_record`]: which pods may use an image that is present.
//! - [`rotation`]: which files of a log to move, compress and remove.
//! - [`runtime_conditions`]: whether the runtime and its network are ready.
//! - [`size_text`]: byte counts for people.
//! - [`termination_message`]: when a log replaces an empty termination message.
//! - [`upgrade`]: the HTTP response that upgrades a connection to the runtime's streaming server.

pub mod cgroup_driver;
pub mod container_gc;
pub mod credential_config;
pub mod credential_plugin;
pub mod etc_hosts;
pub mod exec;
pub mod file_lock;
pub mod image;
pub mod image_gc;
pub mod keyring;
pub mod log;
pub mod log_names;
pub mod node_log;
pub mod operation;
pub mod pull_progress;
pub mod pull_rate;
pub mod pull_record;
pub mod rotation;
pub mod runtime_conditions;
pub mod size_text;
pub mod termination_message;
pub mod upgrade;
