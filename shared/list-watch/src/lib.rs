//! List and watch, the same for every control plane (architecture §6).
//!
//! A [`Follower`] lists a range of objects and then watches it from the version of the list, so that no change is lost between
//! the two. After a broken watch it resumes from the last version; when the server no longer has that version, it lists again.
//! Errors are reported, and retried with a back-off.
//!
//! | module | content |
//! |---|---|
//! | [`state`] | what comes next, list, open or read, and when: a pure state machine |
//! | [`source`] | [`ListWatch`], what a client of a control plane implements |
//! | [`follower`] | [`Follower`], which makes the calls that the state machine asks for |
//!
//! A client keeps its own position in the range: a resource version, or a revision with the keys of it that were reported.

pub mod follower;
pub mod source;
pub mod state;

pub use follower::{Change, Follower, WatchEvent};
pub use source::{ListWatch, OpenError, Read};
pub use state::{DelayBounds, FollowState, Next, RetryDelay};
