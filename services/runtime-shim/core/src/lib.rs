//! The pure decisions of runtime-shim: no clock, no I/O, no runtime.
//!
//! - [`cgroup_driver`]: which cgroup driver the runtime names.
//! - [`collection`]: which dead containers and sandboxes to remove.
//! - [`credential_config`]: which credential provider plugins there are.
//! - [`credential_plugin`]: what they are asked and answer, and how long that is kept.
//! - [`exec`]: which container a command is run in.
//! - [`image`]: references, pull policies and pull back-off.
//! - [`keyring`]: docker configurations, and which credentials are for an image.
//! - [`log`]: the lines of container logs and what a reader is shown of them.
//! - [`operation`]: the calls of CRI as metrics name them.
//! - [`pull_progress`]: whether a pull goes on or stands still.
//! - [`pull_rate`]: how many pulls may begin.
//! - [`pull_record`]: who may use an image that is already there.
//! - [`rotation`]: which files of a log to move, compress and remove.
//! - [`size_text`]: numbers of bytes for people.
//! - [`unused_images`]: which images to remove.
//! - [`upgrade`]: the answer with which a connection to the runtime's streaming server changes its protocol.

pub mod cgroup_driver;
pub mod collection;
pub mod credential_config;
pub mod credential_plugin;
pub mod exec;
pub mod image;
pub mod keyring;
pub mod log;
pub mod operation;
pub mod pull_progress;
pub mod pull_rate;
pub mod pull_record;
pub mod rotation;
pub mod size_text;
pub mod unused_images;
pub mod upgrade;
