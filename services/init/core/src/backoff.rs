//! When a process that ended is restarted.

use std::time::Duration;

/// The uptime after which the back-off is reset.
const STABLE_AFTER: Duration = Duration::from_secs(30);
/// The longest wait before the first restart.
const MAX_FIRST_DELAY: Duration = Duration::from_millis(50);
/// The wait before the second restart, doubled for each one after it.
const INITIAL_DELAY: Duration = Duration::from_millis(100);
/// The longest wait.
const MAX_DELAY: Duration = Duration::from_secs(10);

/// The restarts of one service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RestartBackoff {
    /// Ends in a row, each after less than [`STABLE_AFTER`] of uptime.
    consecutive_ends: u32,
}

impl RestartBackoff {
    /// The delay before a process is restarted that ran for `uptime`.
    ///
    /// `random` is in `[0, 1)`; the jitter keeps services that ended together from starting together.
    /// The first wait is at most 50 ms; then it doubles from 100 ms to 10 s, each time between half and the
    /// whole of the step.
    pub fn next_delay(&mut self, uptime: Duration, random: f64) -> Duration {
        if uptime >= STABLE_AFTER {
            self.consecutive_ends = 0;
        }
        let random = random.clamp(0.0, 1.0);
        let step = self.consecutive_ends;
        self.consecutive_ends = self.consecutive_ends.saturating_add(1);
        let Some(doublings) = step.checked_sub(1) else {
            return MAX_FIRST_DELAY.mul_f64(random);
        };
        let full = INITIAL_DELAY.saturating_mul(1 << doublings.min(16)).min(MAX_DELAY);
        full / 2 + (full / 2).mul_f64(random)
    }

    /// Resets the back-off, since an operator requested a start.
    pub fn reset(&mut self) {
        self.consecutive_ends = 0;
    }
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    const SHORT_UPTIME: Duration = Duration::from_secs(1);

    #[test]
    fn restart_backoff_starts_at_once_and_doubles_from_100_ms_to_10_s() {
        let mut restarts = RestartBackoff::default();
        let waits: Vec<u128> = (0..10).map(|_| restarts.next_delay(SHORT_UPTIME, 1.0).as_millis()).collect();
        assert_eq!(waits, [50, 100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
    }

    #[test]
    fn restart_backoff_jitter_is_at_most_half_of_each_step() {
        let mut restarts = RestartBackoff::default();
        let waits: Vec<u128> = (0..4).map(|_| restarts.next_delay(SHORT_UPTIME, 0.0).as_millis()).collect();
        assert_eq!(waits, [0, 50, 100, 200]);
    }

    #[test]
    fn thirty_seconds_of_uptime_reset_the_restart_backoff() {
        let mut restarts = RestartBackoff::default();
        for _ in 0..5 {
            restarts.next_delay(SHORT_UPTIME, 1.0);
        }
        assert_eq!(restarts.clone().next_delay(Duration::from_secs(29), 1.0).as_millis(), 1600);
        assert_eq!(restarts.next_delay(Duration::from_secs(30), 1.0).as_millis(), 50);
    }

    #[test]
    fn a_requested_restart_resets_the_backoff() {
        let mut restarts = RestartBackoff::default();
        restarts.next_delay(SHORT_UPTIME, 1.0);
        restarts.reset();
        assert_eq!(restarts.next_delay(SHORT_UPTIME, 1.0).as_millis(), 50);
    }

    #[test]
    fn restart_backoff_never_exceeds_ten_seconds() {
        let reached = &Reached::default();
        let (uptimes, random) = (proptest::collection::vec(0u64..36, 0..80), 0.0f64..1.0);
        proptest!(ProptestConfig::with_cases(512), |(uptimes in uptimes, random in random)| {
            let mut restarts = RestartBackoff::default();
            let mut consecutive_ends = Vec::new();
            for uptime in uptimes {
                prop_assert!(restarts.next_delay(Duration::from_secs(uptime), random) <= MAX_DELAY);
                consecutive_ends.push(restarts.consecutive_ends);
            }
            reached.case([
                ("a step of ten seconds", consecutive_ends.iter().any(|ends| *ends > 8)),
                ("more ends than the wait is doubled for", consecutive_ends.iter().any(|ends| *ends > 18)),
                ("a reset of the back-off", consecutive_ends.windows(2).any(|ends| ends[1] <= ends[0])),
            ]);
        });
        // The rarest: "more ends than the wait is doubled for", in one case of 6.
        reached.assert_each();
    }
}
