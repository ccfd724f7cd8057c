use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};

use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe::Receiver;
use tokio_util::sync::CancellationToken;

/// The environment variable with the number of the lifeline's descriptor.
const VARIABLE: &str = "KEELSON_LIFELINE_FD";

/// Cancels `shutdown` when the other end of the lifeline pipe closes: init has died, and a service must not
/// outlive it. Without the variable (systemd, compose) there is no lifeline.
pub(crate) fn watch(shutdown: CancellationToken) {
    let Some(fd) = std::env::var(VARIABLE).ok().and_then(|v| v.parse::<RawFd>().ok()) else { return };
    if fd < 3 {
        return;
    }
    // SAFETY: init passes this descriptor for the service alone, and nothing else here takes it.
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    let Ok(mut receiver) = Receiver::from_owned_fd(owned) else {
        tracing::warn!(fd, "{VARIABLE} names no pipe; this service will not notice the death of init");
        return;
    };
    tokio::spawn(async move {
        let mut byte = [0u8; 1];
        while matches!(receiver.read(&mut byte).await, Ok(n) if n > 0) {}
        tracing::warn!("init is gone, ending with it");
        shutdown.cancel();
    });
}
