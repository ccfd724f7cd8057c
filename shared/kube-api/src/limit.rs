//! How many calls a service may make (node-and-api.md §5: `kubeAPIQPS`, `kubeAPIBurst`).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// A token bucket for calls. Clones share it.
#[derive(Debug, Clone)]
pub struct Limiter {
    per_second: f64,
    burst: f64,
    bucket: Arc<Mutex<Bucket>>,
}

#[derive(Debug)]
struct Bucket {
    /// Negative: the number of waiting calls.
    tokens: f64,
    at: Instant,
    waited: Duration,
}

impl Limiter {
    /// Allows a burst of `burst` calls and then `per_second` calls per second; each is at least 1.
    pub fn new(per_second: u32, burst: u32) -> Self {
        let (per_second, burst) = (f64::from(per_second.max(1)), f64::from(burst.max(1)));
        let bucket = Bucket { tokens: burst, at: Instant::now(), waited: Duration::ZERO };
        Self { per_second, burst, bucket: Arc::new(Mutex::new(bucket)) }
    }

    /// Takes a token. Returns how long to wait for it.
    pub fn take(&self) -> Duration {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let since = now.saturating_duration_since(bucket.at).as_secs_f64();
        bucket.tokens = (bucket.tokens + since * self.per_second).min(self.burst) - 1.0;
        bucket.at = now;
        let wait = Duration::from_secs_f64((-bucket.tokens).max(0.0) / self.per_second);
        bucket.waited += wait;
        wait
    }

    /// The total time that calls have waited so far.
    pub fn waited(&self) -> Duration {
        self.bucket.lock().unwrap_or_else(PoisonError::into_inner).waited
    }

    /// Waits for a token. Returns how long that took.
    pub(crate) async fn pass(&self) -> Duration {
        let wait = self.take();
        tokio::time::sleep(wait).await;
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn rate_limiter_passes_a_burst_and_then_the_rate_over_all_copies() {
        let limiter = Limiter::new(50, 100);
        let copy = limiter.clone();
        let waits: Vec<Duration> = (0..75).flat_map(|_| [limiter.take(), copy.take()]).collect();
        assert!(waits[..100].iter().all(Duration::is_zero));
        assert_eq!(waits[149], Duration::from_secs(1));
        // The queue is empty, and no more tokens than the burst are saved.
        tokio::time::sleep(Duration::from_secs(60)).await;
        for _ in 0..100 {
            assert!(limiter.pass().await.is_zero());
        }
        let begun = Instant::now();
        assert_eq!(limiter.pass().await, Duration::from_millis(20));
        assert!(begun.elapsed() >= Duration::from_millis(20));
        // The fifty late calls waited from 20 ms to a second, and the last one 20 ms.
        assert_eq!(copy.waited().as_millis(), 25_520);
    }
}
