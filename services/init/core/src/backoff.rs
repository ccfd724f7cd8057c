//! When a process that has ended is started again.

use std::time::Duration;

/// A process that lived this long has proved itself: its next end starts from the beginning.
const PROVED: Duration = Duration::from_secs(30);
/// The longest wait before the first restart.
const FIRST: Duration = Duration::from_millis(50);
/// The wait before the second restart, doubled for each one after it.
const INITIAL: Duration = Duration::from_millis(100);
/// The longest wait.
const MAX: Duration = Duration::from_secs(10);

/// The restarts of one service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Restarts {
    /// Ends in a row without a life of [`PROVED`] between them.
    in_a_row: u32,
}

impl Restarts {
    /// How long to wait after the end of a process that had lived for `lived`.
    ///
    /// `random` is in `[0, 1)`; the jitter keeps services that ended together from starting together.
    /// The first wait is at most 50 ms; then it doubles from 100 ms to 10 s, each time between half and the
    /// whole of the step.
    pub fn next_delay(&mut self, lived: Duration, random: f64) -> Duration {
        if lived >= PROVED {
            self.in_a_row = 0;
        }
        let random = random.clamp(0.0, 1.0);
        let step = self.in_a_row;
        self.in_a_row = self.in_a_row.saturating_add(1);
        let Some(doublings) = step.checked_sub(1) else {
            return FIRST.mul_f64(random);
        };
        let whole = INITIAL.saturating_mul(1 << doublings.min(16)).min(MAX);
        whole / 2 + (whole / 2).mul_f64(random)
    }

    /// Forgets the ends so far: a person has asked for a start.
    pub fn reset(&mut self) {
        self.in_a_row = 0;
    }
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    const BRIEF: Duration = Duration::from_secs(1);

    #[test]
    fn the_first_restart_is_immediate_and_the_others_double_from_100_ms_to_10_s() {
        let mut restarts = Restarts::default();
        let waits: Vec<u128> = (0..10).map(|_| restarts.next_delay(BRIEF, 1.0).as_millis()).collect();
        assert_eq!(waits, [50, 100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
    }

    #[test]
    fn the_smallest_wait_is_half_of_each_step() {
        let mut restarts = Restarts::default();
        let waits: Vec<u128> = (0..4).map(|_| restarts.next_delay(BRIEF, 0.0).as_millis()).collect();
        assert_eq!(waits, [0, 50, 100, 200]);
    }

    #[test]
    fn thirty_seconds_of_life_start_it_from_the_beginning() {
        let mut restarts = Restarts::default();
        for _ in 0..5 {
            restarts.next_delay(BRIEF, 1.0);
        }
        assert_eq!(restarts.clone().next_delay(Duration::from_secs(29), 1.0).as_millis(), 1600);
        assert_eq!(restarts.next_delay(Duration::from_secs(30), 1.0).as_millis(), 50);
    }

    #[test]
    fn a_person_who_asks_for_a_start_resets_the_waits() {
        let mut restarts = Restarts::default();
        restarts.next_delay(BRIEF, 1.0);
        restarts.reset();
        assert_eq!(restarts.next_delay(BRIEF, 1.0).as_millis(), 50);
    }

    #[test]
    fn no_wait_is_ever_longer_than_ten_seconds() {
        let reached = &Reached::default();
        let (lives, random) = (proptest::collection::vec(0u64..36, 0..80), 0.0f64..1.0);
        proptest!(ProptestConfig::with_cases(512), |(lives in lives, random in random)| {
            let mut restarts = Restarts::default();
            let mut in_a_row = Vec::new();
            for lived in lives {
                prop_assert!(restarts.next_delay(Duration::from_secs(lived), random) <= MAX);
                in_a_row.push(restarts.in_a_row);
            }
            reached.case([
                ("a step of ten seconds", in_a_row.iter().any(|ends| *ends > 8)),
                ("more ends than the wait is doubled for", in_a_row.iter().any(|ends| *ends > 18)),
                ("from the beginning", in_a_row.windows(2).any(|ends| ends[1] <= ends[0])),
            ]);
        });
        // The rarest: "more ends than the wait is doubled for", in one case of 6.
        reached.assert_each();
    }
}
