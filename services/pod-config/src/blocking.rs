//! Runs file system calls that may hang on a blocking thread.

use std::path::Path;
use std::time::Duration;

use keelson_service_kit::{Context, LoopHandle};

/// After this time a file system counts as hanging.
const HANG_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs `work` on a blocking thread. While it hangs, the loop still reports progress, and `condition` names the path. `None` if
/// the service shuts down meanwhile or the work panics.
pub async fn run_blocking<T: Send + 'static>(
    ctx: &Context,
    loop_handle: &LoopHandle,
    condition: &str,
    path: &Path,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let mut task = tokio::task::spawn_blocking(work);
    loop {
        // Cancel-safe: the work continues on its thread and is polled again.
        tokio::select! {
            done = &mut task => return done.ok(),
            () = ctx.shutdown.cancelled() => return None,
            () = tokio::time::sleep(HANG_TIMEOUT) => {
                loop_handle.tick();
                let text = format!("{} does not respond; check whether its file system is reachable", path.display());
                ctx.progress.condition(condition, Err(text));
            }
        }
    }
}
