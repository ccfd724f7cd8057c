//! flexVolume drivers (volumes.md §10.8): where they are, how they are called, and what they answer.
//!
//! | module | answers |
//! |---|---|
//! | [`driver`] | which folders are drivers, what a change of the plugin folder means, where volumes are mounted |
//! | [`options`] | which options a driver gets |
//! | [`call`] | the arguments of each command |
//! | [`answer`] | what a driver's output means, and what replaces a command that it does not support |

pub mod answer;
pub mod call;
pub mod driver;
pub mod options;
