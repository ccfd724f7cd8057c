//! The pure decisions of runtime-shim: no clock, no I/O, no runtime.
//!
//! - [`collection`]: which dead containers and sandboxes to remove.
//! - [`image`]: references, pull policies and pull back-off.
//! - [`log`]: the CRI log line format and what a reader is shown of it.
//! - [`rotation`]: which files of a log to move, compress and remove.
//! - [`unused_images`]: which images to remove.

pub mod collection;
pub mod image;
pub mod log;
pub mod rotation;
pub mod unused_images;
