//! The properties that parsers of untrusted text must have for any input. Each fuzz target has a function that checks an input
//! and panics if a property is violated.
//!
//! | target | input | properties, in addition to "does not panic" |
//! |---|---|---|
//! | [`manifest`] | the bytes of a manifest file | documents survive writing and parsing again; errors have a line |
//! | [`pod`] | choices from which a pod is built | container runtime requests for a valid pod are well formed; errors name the field |
//! | [`quantity`] | resource quantities | a printed quantity parses as the same amount; suffixes, signs and zeros have their meaning |
//! | [`cri_log`] | lines of container logs | no byte is lost, the pieces of a long line form one line, all ways to find a tail agree |
//! | [`mountinfo`] | `/proc/self/mountinfo` | the line that the kernel writes for a mount parses as that mount |
//!
//! The fuzzer runs these functions (`cargo xtask fuzz`). The tests of this crate run them over the corpora in the repository, so
//! every build on a stable toolchain checks all inputs that were ever found.

pub mod cri_log;
pub mod manifest;
pub mod mountinfo;
pub mod pod;
pub mod quantity;

/// The outcome of a check, so that tests can verify that a corpus has inputs of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// The parser accepted the input, and all properties hold.
    Accepted,
    /// The parser rejected the input, and the properties of its error hold.
    Rejected,
    /// The parser was not called, because it never gets such an input.
    Skipped,
}

/// A target: its name, which its corpus has, too, and its check.
pub type Target = (&'static str, fn(&[u8]) -> Outcome);

/// All targets.
pub const TARGETS: [Target; 5] = [
    ("manifest", manifest::check),
    ("pod", pod::check),
    ("quantity", quantity::check),
    ("cri_log", cri_log::check),
    ("mountinfo", mountinfo::check),
];
