//! The container runtime's objects in Keelson's types.
//!
//! This is the only place that translates what the runtime reports about sandboxes, containers and images, and that
//! knows the labels and annotations which tie them to pods. [`crate::cri`] calls it, so that the other modules get
//! checked objects: responses without mandatory fields are errors (`response_checks`).

mod core_types;
mod image;
pub mod labels;
mod list;
mod response_checks;
mod runtime;
mod status;
mod usage;

pub(crate) use core_types::{gc_pod, listed_image};
pub use image::Image;
pub use list::{ContainerEntry, Listing, PodLabels, SandboxEntry};
pub(crate) use runtime::sandbox_image;
pub use runtime::{RuntimeStatus, RuntimeVersion};
pub(crate) use status::parse_sandbox;
pub use status::{ContainerStatus, TerminationMessageSource};
pub use usage::FilesystemUse;
