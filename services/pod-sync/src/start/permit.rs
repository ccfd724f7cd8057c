//! The permits of starts: so many pods at a time have the runtime make something.

use std::future::Future;
use std::time::Duration;

use tokio::sync::SemaphorePermit;
use tracing::Instrument as _;

use super::{Start, Unfinished};
use crate::worker::Trouble;

/// So long a start keeps its permit while the runtime is at one container or sandbox.
const KEPT: Duration = Duration::from_secs(10);

/// Awaits `work` and gives the permit back before it has ended when it takes long: other pods do not wait for a network plugin, a disk
/// or a device that hangs for this one.
pub(super) async fn keep_for_a_while<P, T>(permit: &mut Option<P>, work: impl Future<Output = T>) -> T {
    tokio::pin!(work);
    // Cancel-safe: `work` is pinned outside and goes on below.
    tokio::select! {
        done = &mut work => return done,
        () = tokio::time::sleep(KEPT) => {}
    }
    permit.take();
    work.await
}

/// A permit to start something, of which there are `startParallelism`.
pub(super) async fn gate<'a>(start: &'a Start<'_>) -> Result<SemaphorePermit<'a>, Unfinished> {
    if let Ok(permit) = start.agent.gate.try_acquire() {
        return Ok(permit);
    }
    let span = tracing::info_span!(target: keelson_telemetry::TRACE_TARGET, "wait for other starts");
    // Cancel-safe: a permit that was not taken is not held.
    tokio::select! {
        () = start.job.cancel.cancelled() => Err(Unfinished::Superseded),
        permit = start.agent.gate.acquire().instrument(span) => {
            permit.map_err(|_| Trouble::fault("the service is ending").into())
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::{Semaphore, oneshot};
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_start_that_takes_long_gives_its_permit_to_other_pods_and_goes_on() {
        let gate = Semaphore::new(1);
        let mut permit = Some(gate.acquire().await.unwrap());
        assert_eq!(keep_for_a_while(&mut permit, async { 1 }).await, 1);
        assert!(permit.is_some(), "a quick one keeps it for what comes next");
        let (end, ended) = oneshot::channel::<u8>();
        let begun = Instant::now();
        let other = async {
            let permit = gate.acquire().await.unwrap();
            assert_eq!(begun.elapsed(), KEPT);
            end.send(2).unwrap();
            drop(permit);
        };
        let (done, ()) = tokio::join!(keep_for_a_while(&mut permit, ended), other);
        assert_eq!(done, Ok(2));
        assert!(permit.is_none());
    }
}
