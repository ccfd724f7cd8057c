//! The permit of a start.

use std::time::Duration;

use tokio::sync::SemaphorePermit;
use tracing::Instrument as _;

use super::{Start, StartError};
use crate::error::SyncError;

/// How long a start holds its permit while the runtime works on one container or sandbox.
pub(super) const HOLD_LIMIT: Duration = Duration::from_secs(10);

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
