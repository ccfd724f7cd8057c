//! The signals of init: none is lost, from the first instruction on.

use std::io;

use keelson_service_kit::CancellationToken;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that init handles.
const HANDLED: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// Holds the handled signals back until [`Listener::new`]. Without this, one that comes early ends init
/// without order, and is dropped by the kernel where init is process 1.
pub fn hold_back() {
    mask(libc::SIG_BLOCK);
}

/// Lets them through to a process that has nothing to end in order.
pub fn let_through() {
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

/// Hears the signals.
#[derive(Debug)]
pub struct Listener {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Listener {
    /// Begins to listen and lets through what came before.
    pub fn new() -> io::Result<Self> {
        let listener = Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        };
        mask(libc::SIG_UNBLOCK);
        Ok(listener)
    }

    /// Cancels `shutdown` on the first SIGTERM or SIGINT and `hurry` on the second.
    pub async fn run(mut self, shutdown: CancellationToken, hurry: CancellationToken) {
        // Counted here: the server may have heard the same signal and cancelled `shutdown` already.
        let mut told = false;
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
            if told {
                tracing::warn!("told to end a second time, killing what is left");
                hurry.cancel();
                return;
            }
            told = true;
            shutdown.cancel();
        }
    }
}
