//! What must hold for any bytes that the readers of untrusted text are given: one function per fuzz target, which
//! panics when it does not hold.
//!
//! | target | reads | beyond "does not panic" |
//! |---|---|---|
//! | [`manifest`] | the bytes of a manifest file | what was read is written and read again as the same; errors say where |
//! | [`pod`] | choices, of which it makes a pod | what validation lets through can be asked of a container runtime; a refusal names its field |
//! | [`quantity`] | resource amounts | what is printed reads as the same amount; suffixes, signs and zeros do what they say |
//! | [`cri_log`] | the lines of container logs | no byte is lost, pieces of a long line are one line again, tails agree |
//! | [`mountinfo`] | `/proc/self/mountinfo` | what the kernel would write of a mount is read as that mount |
//!
//! The fuzzer runs them (`cargo xtask fuzz`), and the tests of this crate run them over the corpora that it has left,
//! so that every build on a stable toolchain meets what was ever found.

pub mod cri_log;
pub mod manifest;
pub mod mountinfo;
pub mod pod;
pub mod quantity;

/// What an input has turned out to be, so that a run can tell how often each was met.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Met {
    /// It was read, and everything that must hold of it was looked at.
    Good,
    /// The reader has refused it, with an error that was looked at.
    Refused,
    /// It is nothing that the reader is ever given.
    Foreign,
}

/// A target: its name, which is also that of its corpus, and its check.
pub type Target = (&'static str, fn(&[u8]) -> Met);

/// Every target.
pub const TARGETS: [Target; 5] = [
    ("manifest", manifest::check),
    ("pod", pod::check),
    ("quantity", quantity::check),
    ("cri_log", cri_log::check),
    ("mountinfo", mountinfo::check),
];
