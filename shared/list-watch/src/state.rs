//! The state machine of a follower: no clock, no randomness, no I/O.

use std::time::Duration;

/// The bounds of the back-off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DelayBounds {
    /// After the first error; doubled with each further one.
    pub first: Duration,
    /// The longest.
    pub longest: Duration,
}

/// When to retry after an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryDelay {
    /// After the back-off, or after `at_least` if the server asks for a longer delay. At most four times the longest back-off.
    BackOff {
        /// Zero: the server asks for none.
        at_least: Duration,
    },
    /// After exactly this time, and the back-off does not grow: nothing was sent, so a longer one would spare no server.
    Fixed(Duration),
}

impl RetryDelay {
    /// The back-off alone.
    pub const BACK_OFF: Self = Self::BackOff { at_least: Duration::ZERO };
}

/// The next call of a follower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// List the range.
    List,
    /// Open a watch from the last version.
    Open,
    /// Read the open watch.
    Read,
}

/// Decides what a follower does next, from the results of its calls.
///
/// `jitter` is a random number from 0 up to, but not including, 1.
#[derive(Debug, Clone, PartialEq)]
pub struct FollowState {
    bounds: DelayBounds,
    /// The back-off after the next error, before jitter.
    delay: Duration,
    next: Next,
}

impl FollowState {
    /// The state before the first list.
    pub fn new(bounds: DelayBounds) -> Self {
        Self { bounds, delay: bounds.first, next: Next::List }
    }

    /// The next call.
    pub fn next(&self) -> Next {
        self.next
    }

    /// The range was listed. The back-off stays as it is until the watch makes progress.
    pub fn listed(&mut self) {
        self.next = Next::Open;
    }

    /// A watch was opened. A server may end each watch at once, so the back-off stays as it is here, too.
    pub fn opened(&mut self) {
        self.next = Next::Read;
    }

    /// The watch has delivered changes, or has confirmed that there are none: the back-off starts again.
    pub fn progressed(&mut self) {
        self.delay = self.bounds.first;
    }

    /// The watch was replaced on purpose: it is opened again at once, from the last version.
    pub fn replaced(&mut self) {
        self.next = Next::Open;
    }

    /// The server has ended the watch as announced. Returns when to open it again: a server that ends each watch at once must
    /// not be called in a busy loop.
    pub fn ended(&mut self, jitter: f64) -> Duration {
        self.next = Next::Open;
        self.bounds.first.mul_f64(jitter)
    }

    /// The server no longer has the changes since the last version: the range is listed again, at once.
    pub fn expired(&mut self) {
        self.next = Next::List;
    }

    /// The connection of the watch broke, and another server may have it. Returns whether to open it again at once without a
    /// report, which is so for the first error since the last progress.
    pub fn interrupted(&mut self) -> bool {
        self.close_watch();
        let is_first = self.delay <= self.bounds.first;
        if is_first {
            self.delay *= 2;
        }
        is_first
    }

    /// A call has failed, and that is reported. Returns when to retry it. An open watch is closed.
    pub fn failed(&mut self, delay: RetryDelay, jitter: f64) -> Duration {
        self.close_watch();
        match delay {
            RetryDelay::Fixed(delay) => delay,
            RetryDelay::BackOff { at_least } => {
                let jittered = self.delay.mul_f64(0.5 + jitter / 2.0);
                self.delay = (self.delay * 2).min(self.bounds.longest);
                jittered.max(at_least.min(self.bounds.longest * 4))
            }
        }
    }

    fn close_watch(&mut self) {
        if self.next == Next::Read {
            self.next = Next::Open;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: DelayBounds =
        DelayBounds { first: Duration::from_millis(100), longest: Duration::from_millis(400) };

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_range_is_listed_then_opened_then_read() {
        let mut state = FollowState::new(BOUNDS);
        assert_eq!(state.next(), Next::List);
        state.listed();
        assert_eq!(state.next(), Next::Open);
        state.opened();
        assert_eq!(state.next(), Next::Read);
        state.progressed();
        assert_eq!(state.next(), Next::Read);
    }

    #[test]
    fn a_broken_watch_is_resumed_and_an_expired_version_is_listed_again() {
        let reading = || {
            let mut state = FollowState::new(BOUNDS);
            state.listed();
            state.opened();
            state
        };
        let after = |act: fn(&mut FollowState)| {
            let mut state = reading();
            act(&mut state);
            state.next()
        };
        assert_eq!(after(FollowState::replaced), Next::Open);
        assert_eq!(
            after(|state| {
                state.ended(0.5);
            }),
            Next::Open
        );
        assert_eq!(
            after(|state| {
                state.failed(RetryDelay::BACK_OFF, 0.5);
            }),
            Next::Open
        );
        assert_eq!(after(|state| assert!(state.interrupted())), Next::Open);
        assert_eq!(after(FollowState::expired), Next::List);
        // A list that fails is a list the next time, too.
        let mut state = FollowState::new(BOUNDS);
        state.failed(RetryDelay::BACK_OFF, 0.5);
        assert_eq!(state.next(), Next::List);
    }

    #[test]
    fn the_back_off_doubles_up_to_its_bound_and_starts_again_with_progress() {
        let mut state = FollowState::new(BOUNDS);
        for whole in [100, 200, 400, 400] {
            let (mut low, mut high) = (state.clone(), state.clone());
            assert_eq!(low.failed(RetryDelay::BACK_OFF, 0.0), millis(whole / 2));
            assert_eq!(high.failed(RetryDelay::BACK_OFF, 1.0), millis(whole));
            state = low;
        }
        state.listed();
        state.opened();
        assert_eq!(state.clone().failed(RetryDelay::BACK_OFF, 1.0), millis(400), "no progress yet");
        state.progressed();
        assert_eq!(state.failed(RetryDelay::BACK_OFF, 1.0), millis(100));
    }

    #[test]
    fn the_delay_that_a_server_asks_for_is_kept_within_bounds() {
        let asked = |at_least| FollowState::new(BOUNDS).failed(RetryDelay::BackOff { at_least }, 1.0);
        assert_eq!(asked(millis(50)), millis(100));
        assert_eq!(asked(millis(700)), millis(700));
        assert_eq!(asked(millis(9_000)), millis(1_600));
    }

    #[test]
    fn a_fixed_delay_does_not_grow_the_back_off() {
        let mut state = FollowState::new(BOUNDS);
        for _ in 0..3 {
            assert_eq!(state.failed(RetryDelay::Fixed(millis(1_000)), 0.0), millis(1_000));
        }
        assert_eq!(state.failed(RetryDelay::BACK_OFF, 1.0), millis(100));
    }

    #[test]
    fn only_the_first_interruption_since_the_last_progress_is_not_reported() {
        let mut state = FollowState::new(BOUNDS);
        state.listed();
        state.opened();
        assert!(state.interrupted());
        state.opened();
        assert!(!state.interrupted());
        assert_eq!(state.failed(RetryDelay::BACK_OFF, 1.0), millis(200));
        state.opened();
        state.progressed();
        assert!(state.interrupted());
    }
}
