//! Limits how many pods the runtime starts at the same time.

use std::future::Future;
use std::time::Duration;

use tokio::sync::SemaphorePermit;
use tracing::Instrument as _;

use super::{Start, StartError};
use crate::error::SyncError;

/// How long a start holds its permit while the runtime works on one container or sandbox.
const HOLD_LIMIT: Duration = Duration::from_secs(10);

/// Awaits `work`. If that takes long, it releases the permit meanwhile, so that other pods do not wait for a network plugin, a disk or a
/// device that hangs for this one.
pub(super) async fn run_with_permit<P, T>(permit: &mut Option<P>, work: impl Future<Output = T>) -> T {
    tokio::pin!(work);
    // Cancel-safe: `work` is pinned outside and continues below.
    tokio::select! {
        done = &mut work => return done,
        () = tokio::time::sleep(HOLD_LIMIT) => {}
    }
    permit.take();
    work.await
}

/// Waits for one of the `startParallelism` permits.
pub(super) async fn start_permit<'a>(start: &'a Start<'_>) -> Result<SemaphorePermit<'a>, StartError> {
    if let Ok(permit) = start.effects.start_permits.try_acquire() {
        return Ok(permit);
    }
    let span = tracing::info_span!(target: keelson_telemetry::TRACE_TARGET, "wait for other starts");
    // Cancel-safe: a permit that was not taken is not held.
    tokio::select! {
        () = start.job.cancel.cancelled() => Err(StartError::Superseded),
        permit = start.effects.start_permits.acquire().instrument(span) => {
            permit.map_err(|_| SyncError::new("the service is ending").into())
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::{Semaphore, oneshot};
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_slow_start_releases_its_permit_and_continues() {
        let gate = Semaphore::new(1);
        let mut permit = Some(gate.acquire().await.unwrap());
        assert_eq!(run_with_permit(&mut permit, async { 1 }).await, 1);
        assert!(permit.is_some(), "a fast start keeps it for the next container");
        let (end, ended) = oneshot::channel::<u8>();
        let begun = Instant::now();
        let other = async {
            let permit = gate.acquire().await.unwrap();
            assert_eq!(begun.elapsed(), HOLD_LIMIT);
            end.send(2).unwrap();
            drop(permit);
        };
        let (done, ()) = tokio::join!(run_with_permit(&mut permit, ended), other);
        assert_eq!(done, Ok(2));
        assert!(permit.is_none());
    }
}
