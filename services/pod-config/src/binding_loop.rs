//! The loop that stores the bindings of claims, and lets others see them after that.

use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_service_kit::{Context, LoopHandle};
use tokio::time::Instant;

use crate::binding_store::{message, open, write};
use crate::blocking::run_blocking;
use crate::checkpoint_database::BINDINGS_FILE;
use crate::desired_state::DesiredState;
use crate::volume_objects::Unstored;

/// Delay before a failed read or write is retried.
const RETRY: Duration = Duration::from_secs(30);
const CONDITION: &str = "bindings";

/// Stores each new decision and then lets others see it, until the service shuts down. Retries after errors.
pub async fn run(ctx: Context, folder: PathBuf, desired: DesiredState) {
    let loop_handle = ctx.progress.register("bindings");
    let volumes = desired.volume_objects();
    let mut retry_at: Option<Instant> = None;
    loop {
        loop_handle.tick();
        if retry_at.is_none_or(|at| at <= Instant::now()) {
            let done = step(&ctx, &loop_handle, &folder, &desired).await;
            retry_at = done.err().map(|()| Instant::now() + RETRY);
        }
        // Cancel-safe: a change that was not taken is noticed the next time.
        tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            // Also while an error waits for its retry: a person who has corrected something may have changed a manifest.
            () = volumes.decided() => retry_at = None,
            () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
        }
    }
}

async fn step(
    ctx: &Context,
    loop_handle: &LoopHandle,
    folder: &Path,
    desired: &DesiredState,
) -> Result<(), ()> {
    let path = folder.join(BINDINGS_FILE);
    let own_folder = folder.to_owned();
    let done = match desired.volume_objects().unstored() {
        Unstored::Nothing => return Ok(()),
        Unstored::Unknown => {
            let opened = run_blocking(ctx, loop_handle, CONDITION, &path, move || open(&own_folder)).await;
            let opened = opened.ok_or(())?;
            opened.map(|opened| desired.bindings_read(opened))
        }
        Unstored::Records(records) => {
            let written = run_blocking(ctx, loop_handle, CONDITION, &path, move || {
                write(&own_folder, &records).map(|()| records)
            });
            written.await.ok_or(())?.map(|records| {
                tracing::debug!(
                    event = "bindings_written",
                    bindings = records.bindings.len(),
                    "bindings written"
                );
                desired.bindings_stored(records);
            })
        }
    };
    let done = done.map_err(|error| message(&error));
    ctx.progress.condition(CONDITION, done.clone());
    done.map_err(|error| desired.bindings_failed(&error))
}
