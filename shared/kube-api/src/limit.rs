//! How many calls a service may make (node-and-api.md §5: `kubeAPIQPS`, `kubeAPIBurst`).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// A bucket of calls, which fills with time. Copies share it.
#[derive(Debug, Clone)]
pub struct Limiter {
    per_second: f64,
    burst: f64,
    bucket: Arc<Mutex<Bucket>>,
}

#[derive(Debug)]
struct Bucket {
    /// Below nothing: so many calls wait.
    tokens: f64,
    at: Instant,
    waited: Duration,
}

impl Limiter {
    /// Lets `burst` calls through at once and `per_second` more each second; each is 1 at least.
    pub fn new(per_second: u32, burst: u32) -> Self {
        let (per_second, burst) = (f64::from(per_second.max(1)), f64::from(burst.max(1)));
        let bucket = Bucket { tokens: burst, at: Instant::now(), waited: Duration::ZERO };
        Self { per_second, burst, bucket: Arc::new(Mutex::new(bucket)) }
    }

    /// Takes a place in the row; how long to wait until it is reached.
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

    /// How long calls have waited for their place so far, all of them together.
    pub fn waited(&self) -> Duration {
        self.bucket.lock().unwrap_or_else(PoisonError::into_inner).waited
    }

    /// Waits for a place; how long that took.
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
    async fn a_burst_goes_at_once_and_the_rest_at_the_rate_over_all_copies() {
        let limiter = Limiter::new(50, 100);
        let copy = limiter.clone();
        let waits: Vec<Duration> = (0..75).flat_map(|_| [limiter.take(), copy.take()]).collect();
        assert!(waits[..100].iter().all(Duration::is_zero));
        assert_eq!(waits[149], Duration::from_secs(1));
        // The row has gone, and nothing is saved up beyond the burst.
        tokio::time::sleep(Duration::from_secs(60)).await;
        for _ in 0..100 {
            assert!(limiter.pass().await.is_zero());
        }
        let begun = Instant::now();
        assert_eq!(limiter.pass().await, Duration::from_millis(20));
        assert!(begun.elapsed() >= Duration::from_millis(20));
        // The fifty that were late waited for 20 ms to a second, and the last one for 20 ms.
        assert_eq!(copy.waited().as_millis(), 25_520);
    }
}
