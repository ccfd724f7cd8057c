//! Waits for a condition by polling, with a timeout.

use std::fmt::Display;
use std::time::{Duration, Instant};

use anyhow::bail;

/// Polls `condition` until it holds; after `limit` fails with an error that names `what`.
pub async fn eventually(
    limit: Duration,
    what: impl Display,
    mut condition: impl AsyncFnMut() -> bool,
) -> anyhow::Result<()> {
    let start = Instant::now();
    let mut pause = Duration::from_millis(2);
    loop {
        // A condition that hangs must not outlive the limit.
        let left = limit.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
        if tokio::time::timeout(left, condition()).await.unwrap_or(false) {
            return Ok(());
        }
        if start.elapsed() >= limit {
            bail!("waited {:.1} s in vain until {what}", limit.as_secs_f64());
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn ends_as_soon_as_the_condition_holds() {
        let mut calls = 0;
        let condition = || {
            calls += 1;
            std::future::ready(calls == 3)
        };
        eventually(Duration::from_secs(10), "it was asked three times", condition).await.unwrap();
        assert_eq!(calls, 3);
    }

    #[tokio::test]
    async fn names_what_was_awaited() {
        let never = || std::future::ready(false);
        let error = eventually(Duration::from_millis(5), "hell freezes", never).await.unwrap_err();
        assert!(error.to_string().ends_with("until hell freezes"), "{error}");
    }

    #[tokio::test]
    async fn a_hanging_condition_ends_at_the_timeout() {
        let hang = std::future::pending::<bool>;
        assert!(eventually(Duration::from_millis(5), "never", hang).await.is_err());
    }
}
