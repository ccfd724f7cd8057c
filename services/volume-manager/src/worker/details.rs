//! The parts of a published status besides the phase.

use std::time::Duration;

/// The parts of a published status besides the phase.
#[derive(Default)]
pub(super) struct StatusDetails {
    pub(super) message: String,
    pub(super) permanent: bool,
    pub(super) user_can_fix: bool,
    /// Who has to act, if it is neither this service nor the user.
    pub(super) owner: String,
    pub(super) next_try: Option<Duration>,
    /// The same, in unix nanoseconds; 0: none.
    pub(super) next_try_unix_nanos: i64,
    /// Nothing of the pod is left, so it is not listed any more.
    pub(super) gone: bool,
}
