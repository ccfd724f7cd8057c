//! Keeps a loop's heartbeat while it waits for long work. Each step of the work must have its own time limit.

use std::time::Duration;

use keelson_service_kit::LoopHandle;

/// Runs `work` and ticks the loop's heartbeat meanwhile.
pub(crate) async fn with_heartbeat<T>(progress: &LoopHandle, work: impl Future<Output = T>) -> T {
    run_with_ticks(|| progress.tick(), LoopHandle::HEARTBEAT, work).await
}

/// Runs `work` and calls `tick` once each `period` meanwhile.
async fn run_with_ticks<T>(tick: impl Fn(), period: Duration, work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    loop {
        // Cancel-safe: `work` is only borrowed and continues in the next iteration.
        tokio::select! {
            done = &mut work => return done,
            () = tokio::time::sleep(period) => tick(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_loop_ticks_while_its_work_hangs() {
        let (ticks, mut seen) = tokio::sync::watch::channel(0);
        let work = async move { seen.wait_for(|n| *n == 3).await.map(|n| *n).unwrap() };
        let tick = || ticks.send_modify(|n| *n += 1);
        assert_eq!(run_with_ticks(tick, Duration::from_millis(1), work).await, 3);
    }
}
