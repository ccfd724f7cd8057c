//! Work that takes long does not make its loop look stuck, as long as each step of it has a limit.

use std::time::Duration;

use keelson_service_kit::LoopHandle;

/// Shows that the loop turns until `work` is done.
pub(crate) async fn ticking<T>(progress: &LoopHandle, work: impl Future<Output = T>) -> T {
    each(|| progress.tick(), LoopHandle::HEARTBEAT, work).await
}

/// Calls `tick` each `period` until `work` is done.
async fn each<T>(tick: impl Fn(), period: Duration, work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    loop {
        // Cancel-safe: `work` goes on where it was.
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
        assert_eq!(each(tick, Duration::from_millis(1), work).await, 3);
    }
}
