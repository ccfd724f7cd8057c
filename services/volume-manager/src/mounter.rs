//! Work on mounts and foreign filesystems, done in processes that can be abandoned: a server that does not answer holds up
//! nothing but its own volume (volumes.md §7).
//!
//! | module | does |
//! |---|---|
//! | `state` | the [`Mounter`], and the commands that it runs |
//! | `mount` | mounts and bind mounts |
//! | `unmount` | unmounts, forced if need be |
//! | `device` | formats, checks and grows the filesystems of devices |
//! | `files` | work on the files of a volume, in the helper process |
//! | `client`, `helper` | the two sides of the helper process |
//! | `runner`, `gates` | processes with a deadline, and how many of them may hang |
//! | `captured` | what a program writes, up to a limit |
//! | `output` | what the output of a command means |
//! | `mount_table` | what mountinfo says |
//! | `threads` | work on files of the node that blocks, on a limited number of threads |

mod captured;
mod client;
mod device;
mod files;
mod gates;
pub(crate) mod helper;
mod mount;
mod mount_table;
mod output;
mod runner;
mod state;
mod threads;
mod unmount;

#[cfg(test)]
mod killed_tests;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

pub(crate) use captured::is_truncated;
pub(crate) use helper::FileFacts;
pub(crate) use mount::MountRequest;
pub(crate) use output::CommandOutput;
pub(crate) use state::{DEADLINE, Mounter};
pub(crate) use threads::{ThreadError, blocking, blocking_for};
pub(crate) use unmount::after_failure;
