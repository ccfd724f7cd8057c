//! The signals of init. None is lost, even before the listener runs.

use std::io;

use keelson_service_kit::CancellationToken;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that init handles.
const HANDLED: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// Blocks the handled signals until [`Listener::new`]. Otherwise an early signal would end init abruptly, or would be dropped
/// by the kernel if init is process 1.
pub fn block() {
    mask(libc::SIG_BLOCK);
}

/// Unblocks the signals in a process that has nothing to shut down in order.
pub fn unblock() {
    mask(libc::SIG_UNBLOCK);
}

fn mask(how: libc::c_int) {
    // SAFETY: a zeroed set is valid memory for sigemptyset, and all pointers are to this local.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for number in HANDLED {
            libc::sigaddset(&raw mut set, number);
        }
        libc::sigprocmask(how, &raw const set, std::ptr::null_mut());
    }
}

/// Listens for the signals.
#[derive(Debug)]
pub struct Listener {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Listener {
    /// Starts to listen, and unblocks the signals, including pending ones.
    pub fn new() -> io::Result<Self> {
        let listener = Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        };
        mask(libc::SIG_UNBLOCK);
        Ok(listener)
    }

    /// Cancels `shutdown` on the first SIGTERM or SIGINT and `force` on the second.
    pub async fn run(mut self, shutdown: CancellationToken, force: CancellationToken) {
        // Not read from `shutdown`: the server may have received the same signal and cancelled it already.
        let mut terminating = false;
        loop {
            // Cancel-safe: a signal that is not received here stays pending in its stream.
            tokio::select! {
                _ = self.terminate.recv() => {}
                _ = self.interrupt.recv() => {}
                _ = self.hangup.recv() => {
                    tracing::info!("SIGHUP changes nothing; restart init for a new configuration");
                    continue;
                }
            }
            if terminating {
                tracing::warn!("received a second signal to end; killing the remaining services");
                force.cancel();
                return;
            }
            terminating = true;
            shutdown.cancel();
        }
    }
}
