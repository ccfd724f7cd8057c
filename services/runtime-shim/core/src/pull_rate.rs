//! How many pulls may begin (`registryPullQPS`, `registryBurst`; runtime-and-resources.md §6.2).

const NANOS: i64 = 1_000_000_000;

/// A token bucket with one token for each pull. Times are nanoseconds of one clock of the caller's that never steps back.
#[derive(Debug, Clone)]
pub struct PullRate {
    /// Nanoseconds until a token is added; 0: no limit.
    interval: i64,
    /// Nanoseconds to fill the bucket, without its last token.
    slack: i64,
    /// When the bucket will be full again.
    full_at: i64,
}

impl PullRate {
    /// `per_second` 0: no limit. A burst of 0 counts as 1.
    pub fn new(per_second: u32, burst: u32) -> Self {
        let interval = if per_second == 0 { 0 } else { NANOS / i64::from(per_second) };
        Self { interval, slack: interval * i64::from(burst.max(1) - 1), full_at: i64::MIN }
    }

    /// Takes a token and returns how many nanoseconds the pull has to wait for it. Tokens are given in the order of calls.
    ///
    /// Parity: the kubelet fails a pull without a token at once, so that a node that starts with many pods backs them all
    /// off; here the pull waits.
    pub fn take(&mut self, now: i64) -> i64 {
        let full_at = self.full_at.max(now);
        self.full_at = full_at.saturating_add(self.interval);
        (full_at - self.slack - now).max(0)
    }

    /// Returns a token: its pull was cancelled before it began.
    pub const fn give_back(&mut self) {
        self.full_at = self.full_at.saturating_sub(self.interval);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: i64 = 1_000_000_000;

    #[test]
    fn pull_burst_starts_at_once_and_later_pulls_wait() {
        let mut rate = PullRate::new(5, 10);
        let waits: Vec<i64> = (0..13).map(|_| rate.take(7 * S)).collect();
        assert_eq!(waits[..10], [0; 10]);
        assert_eq!(waits[10..], [S / 5, 2 * S / 5, 3 * S / 5]);
    }

    #[test]
    fn pull_tokens_refill_up_to_the_burst() {
        let mut rate = PullRate::new(2, 2);
        for _ in 0..2 {
            assert_eq!(rate.take(S), 0);
        }
        assert_eq!(rate.take(S + S / 2), 0);
        assert_eq!(rate.take(S + S / 2), S / 2);
        let later = 1_000 * S;
        assert_eq!([rate.take(later), rate.take(later), rate.take(later)], [0, 0, S / 2]);
    }

    #[test]
    fn pull_rate_zero_is_unlimited_and_burst_zero_is_one() {
        let mut free = PullRate::new(0, 0);
        assert!((0..100).all(|_| free.take(0) == 0));
        let mut rate = PullRate::new(1, 0);
        assert_eq!([rate.take(S), rate.take(S)], [0, S]);
    }

    #[test]
    fn cancelled_pull_returns_its_token() {
        let mut rate = PullRate::new(1, 1);
        assert_eq!([rate.take(S), rate.take(S)], [0, S]);
        rate.give_back();
        assert_eq!(rate.take(S), S);
    }
}
