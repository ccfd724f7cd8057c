//! A relay between a runtime and a registry, which can be slow, stall or be cut.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Largest number of bytes that are forwarded at once.
const CHUNK: usize = 64 << 10;

/// How the relay forwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// At full speed.
    Free,
    /// The registry's answers with this number of bytes per second.
    Slow(u64),
    /// Nothing of the registry's answers after this number of bytes, counted from now on.
    StopsAfter(u64),
    /// New connections are refused, and open ones are cut.
    Cut,
}

/// A relay whose address stays the same while registries change.
#[derive(Debug)]
pub struct Link {
    address: SocketAddr,
    state: Arc<State>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct State {
    flow: watch::Sender<Flow>,
    to: watch::Sender<SocketAddr>,
    passed: AtomicU64,
}

impl Link {
    /// A relay at full speed to a registry at `to`.
    ///
    /// # Errors
    /// No port is free.
    pub async fn to(to: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("no port is free")?;
        let address = listener.local_addr()?;
        let (flow, to) = (watch::Sender::new(Flow::Free), watch::Sender::new(to));
        let state = Arc::new(State { flow, to, passed: AtomicU64::new(0) });
        let task = tokio::spawn(accept(listener, Arc::clone(&state)));
        Ok(Self { address, state, task })
    }

    /// The name of an image behind the relay.
    pub fn image(&self, name: &str) -> String {
        format!("{}/{name}", self.address)
    }

    /// Forwards new connections to another registry.
    pub fn set_target(&self, to: SocketAddr) {
        self.state.to.send_replace(to);
    }

    /// Changes the flow, for open connections too.
    pub fn set(&self, flow: Flow) {
        self.state.passed.store(0, Ordering::Relaxed);
        self.state.flow.send_replace(flow);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.state.flow.send_replace(Flow::Cut);
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    while let Ok((client, _)) = listener.accept().await {
        tokio::spawn(forward(client, Arc::clone(&state)));
    }
}

/// Forwards one connection. Every arm is cancel-safe: the whole connection ends with the first that ends.
async fn forward(client: TcpStream, state: Arc<State>) {
    let to = *state.to.borrow();
    if *state.flow.borrow() == Flow::Cut {
        return;
    }
    let Ok(server) = TcpStream::connect(to).await else { return };
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let mut flow = state.flow.subscribe();
    let answers = async {
        let mut chunk = vec![0; CHUNK];
        loop {
            let Ok(count @ 1..) = from_server.read(&mut chunk).await else { return };
            wait_until_allowed(&state, count as u64).await;
            if to_client.write_all(&chunk[..count]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = answers => {}
        _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
        _ = flow.wait_for(|flow| *flow == Flow::Cut) => {}
    }
}

/// Returns when this number of bytes may be forwarded.
async fn wait_until_allowed(state: &State, count: u64) {
    let mut flow = state.flow.subscribe();
    loop {
        let now = *flow.borrow_and_update();
        match now {
            Flow::Free | Flow::Cut => return,
            Flow::Slow(per_second) => {
                return tokio::time::sleep(Duration::from_secs_f64(count as f64 / per_second as f64)).await;
            }
            Flow::StopsAfter(bytes) => {
                if state.passed.fetch_add(count, Ordering::Relaxed) + count <= bytes {
                    return;
                }
                // The sender lives as long as the state.
                let _ = flow.changed().await;
            }
        }
    }
}
