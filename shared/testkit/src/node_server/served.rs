//! An HTTP server in a thread of its own, so that it answers while a test waits for a command.

use std::net::{Ipv4Addr, SocketAddr};
use std::thread::JoinHandle;

use anyhow::Context as _;
use axum::Router;
use tokio::sync::oneshot;

/// On a free port of loopback; ended when dropped, with all of its connections.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) address: SocketAddr,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    pub(super) fn start(router: Router) -> anyhow::Result<Self> {
        let listener =
            std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free port on loopback")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (end, ended) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).expect("a listener of our own");
                // Cancel-safe: whichever ends first ends the server.
                tokio::select! {
                    served = axum::serve(listener, router) => drop(served),
                    _ = ended => {}
                }
            });
            // What is under way ends with the runtime.
        });
        Ok(Self { address, end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
