use std::time::Duration;

/// Exponential back-off with full jitter between half and the whole of the current delay.
#[derive(Debug, Clone)]
pub struct Backoff {
    initial: Duration,
    max: Duration,
    current: Duration,
}

impl Backoff {
    /// Starts at `initial`, doubles up to `max`.
    pub const fn new(initial: Duration, max: Duration) -> Self {
        Self { initial, max, current: initial }
    }

    /// The back-off for reconnects to another service: 20 ms to 2 s.
    pub const fn reconnect() -> Self {
        Self::new(Duration::from_millis(20), Duration::from_secs(2))
    }

    /// The next delay.
    pub fn next_delay(&mut self) -> Duration {
        let whole = self.current;
        self.current = (whole * 2).min(self.max);
        let half = whole / 2;
        half + half.mul_f64(fastrand::f64())
    }

    /// Returns to the initial delay after a success.
    pub const fn reset(&mut self) {
        self.current = self.initial;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_maximum_and_start_again_after_a_success() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_millis(400));
        for whole in [100u64, 200, 400, 400] {
            let delay = backoff.next_delay();
            assert!(delay >= Duration::from_millis(whole / 2) && delay <= Duration::from_millis(whole));
        }
        backoff.reset();
        assert!(backoff.next_delay() <= Duration::from_millis(100));
    }
}
