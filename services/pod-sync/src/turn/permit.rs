//! Permits that limit how many pods the runtime works on at the same time.

use std::future::Future;
use std::time::Duration;

use tokio::sync::Semaphore;

/// Awaits `work` once one of the permits is free, first come, first served. Work that takes longer than `hold_limit` counts no more.
pub(super) async fn run_in_turn<T>(
    permits: &Semaphore,
    hold_limit: Duration,
    work: impl Future<Output = T>,
) -> T {
    // The semaphore is never closed; without a permit the work is not limited.
    let mut permit = permits.acquire().await.ok();
    run_with_permit(&mut permit, hold_limit, work).await
}

/// Awaits `work`. If that takes longer than `hold_limit`, it releases the permit meanwhile, so that other pods do not wait for a network
/// plugin, a disk or a device that hangs for this one.
pub(super) async fn run_with_permit<P, T>(
    permit: &mut Option<P>,
    hold_limit: Duration,
    work: impl Future<Output = T>,
) -> T {
    tokio::pin!(work);
    // Cancel-safe: `work` is pinned outside and continues below.
    tokio::select! {
        done = &mut work => return done,
        () = tokio::time::sleep(hold_limit) => {}
    }
    permit.take();
    work.await
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;
    use tokio::time::Instant;

    use super::*;

    const HOLD_LIMIT: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn slow_work_releases_its_permit_and_continues() {
        let gate = Semaphore::new(1);
        let mut permit = Some(gate.acquire().await.unwrap());
        assert_eq!(run_with_permit(&mut permit, HOLD_LIMIT, async { 1 }).await, 1);
        assert!(permit.is_some(), "fast work keeps it");
        let (end, ended) = oneshot::channel::<u8>();
        let begun = Instant::now();
        let other = async {
            let permit = gate.acquire().await.unwrap();
            assert_eq!(begun.elapsed(), HOLD_LIMIT);
            end.send(2).unwrap();
            drop(permit);
        };
        let (done, ()) = tokio::join!(run_with_permit(&mut permit, HOLD_LIMIT, ended), other);
        assert_eq!(done, Ok(2));
        assert!(permit.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn work_runs_in_order_and_hung_work_delays_others_by_the_hold_limit_only() {
        let permits = Semaphore::new(1);
        let begun = Instant::now();
        let slow = |seconds| async move {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            begun.elapsed().as_secs()
        };
        let (first, hung, last) = tokio::join!(
            run_in_turn(&permits, HOLD_LIMIT, slow(3)),
            run_in_turn(&permits, HOLD_LIMIT, slow(60)),
            run_in_turn(&permits, HOLD_LIMIT, slow(3)),
        );
        assert_eq!((first, hung, last), (3, 63, 16));
    }
}
