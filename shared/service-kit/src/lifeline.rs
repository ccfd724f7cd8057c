use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};

use rustix::io::{FdFlags, fcntl_setfd};
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe::Receiver;
use tokio_util::sync::CancellationToken;

/// The environment variable with the number of the lifeline's descriptor.
const VARIABLE: &str = "KEELSON_LIFELINE_FD";

/// Whether init supervises this service and restarts it when it exits.
pub fn is_held() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// Cancels `shutdown` when the other end of the lifeline pipe closes: init has died, and a service must not
/// outlive it. Does nothing without the variable (systemd, compose).
pub(crate) fn watch(shutdown: CancellationToken) {
    let Some(fd) = std::env::var(VARIABLE).ok().and_then(|v| v.parse::<RawFd>().ok()) else { return };
    if fd < 3 {
        return;
    }
    // SAFETY: init passes this descriptor to this service only, and no other code takes it.
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    let Ok(mut receiver) = take_over(owned) else {
        tracing::warn!(fd, "{VARIABLE} names no pipe; this service will not notice the death of init");
        return;
    };
    crate::task::spawn("lifeline", async move {
        let mut byte = [0u8; 1];
        while matches!(receiver.read(&mut byte).await, Ok(n) if n > 0) {}
        tracing::warn!("init has exited; this service exits too");
        shutdown.cancel();
    });
}

/// Takes over the lifeline and sets close-on-exec, so that no program that this service starts inherits it.
fn take_over(owned: OwnedFd) -> io::Result<Receiver> {
    fcntl_setfd(&owned, FdFlags::CLOEXEC)?;
    Receiver::from_owned_fd(owned)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use rustix::io::fcntl_getfd;
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    #[tokio::test]
    async fn lifeline_closes_with_its_writer_and_is_not_inherited() {
        let (read, write) = pipe_with(PipeFlags::empty()).unwrap();
        assert!(!fcntl_getfd(&read).unwrap().contains(FdFlags::CLOEXEC), "as init passes it");
        let mut lifeline = take_over(read).unwrap();
        assert!(fcntl_getfd(lifeline.as_fd()).unwrap().contains(FdFlags::CLOEXEC));
        drop(write);
        assert_eq!(lifeline.read(&mut [0; 1]).await.unwrap(), 0);
    }
}
