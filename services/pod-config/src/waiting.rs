//! File system work that may hang, on a thread that may wait for it.

use std::path::Path;
use std::time::Duration;

use keelson_service_kit::{Context, LoopHandle};

/// After this time a file system counts as hanging.
const PATIENCE: Duration = Duration::from_secs(5);

/// Runs `work` on a thread of its own. While it hangs, the loop shows that it can turn and `condition` names the
/// path. `None` when the service ends meanwhile or the work has panicked.
pub async fn off_thread<T: Send + 'static>(
    ctx: &Context,
    turn: &LoopHandle,
    condition: &str,
    path: &Path,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let mut task = tokio::task::spawn_blocking(work);
    loop {
        // Cancel-safe: the work goes on on its own thread and is polled again.
        tokio::select! {
            done = &mut task => return done.ok(),
            () = ctx.shutdown.cancelled() => return None,
            () = tokio::time::sleep(PATIENCE) => {
                turn.tick();
                let text = format!("{} does not answer; is its file system reachable?", path.display());
                ctx.progress.condition(condition, Err(text));
            }
        }
    }
}
