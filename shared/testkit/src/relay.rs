//! A network between a client and a server that can be cut.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use rustix::net::sockopt::set_socket_linger;

/// How often an idle side checks whether its connection is still wanted.
const GLANCE: Duration = Duration::from_millis(20);

/// Forwards connections on a port of its own to one address. Dropping it ends all connections.
#[derive(Debug)]
pub struct Relay {
    address: SocketAddr,
    shared: Arc<Shared>,
    taker: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default, Clone, Copy)]
struct State {
    /// Nothing passes, in either direction.
    cut: bool,
    /// Connections of an earlier number are reset.
    generation: u64,
    ended: bool,
}

impl Relay {
    /// A relay on loopback to `target`.
    pub fn to(target: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).context("no free port on loopback")?;
        let address = listener.local_addr().context("a listener has an address")?;
        let shared = Arc::new(Shared::default());
        let taker = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || take(&listener, target, &shared)
        });
        Ok(Self { address, shared, taker: Some(taker) })
    }

    /// The address for clients.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Nothing passes any more: connections stay and are silent, new ones too. What is sent meanwhile arrives after
    /// [`Relay::heal`], as with packets that are sent again.
    pub fn cut(&self) {
        self.shared.change(|state| state.cut = true);
    }

    /// Everything passes again.
    pub fn heal(&self) {
        self.shared.change(|state| state.cut = false);
    }

    /// Ends all connections at once, with a reset on both sides. New ones are taken.
    pub fn reset(&self) {
        self.shared.change(|state| state.generation += 1);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.change(|state| state.ended = true);
        // Wakes the one that waits for a connection.
        let _ = TcpStream::connect(self.address);
        if let Some(taker) = self.taker.take() {
            let _ = taker.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits while nothing passes. False when connections of `generation` are no longer wanted.
    fn passes(&self, generation: u64) -> bool {
        let stays = |state: &State| !state.ended && state.generation == generation;
        let waits = |state: &mut State| state.cut && stays(state);
        let state = self.changed.wait_while(self.lock(), waits).unwrap_or_else(PoisonError::into_inner);
        stays(&state)
    }
}

fn take(listener: &TcpListener, target: SocketAddr, shared: &Arc<Shared>) {
    for client in listener.incoming() {
        let state = *shared.lock();
        if state.ended {
            return;
        }
        let Ok(client) = client else { continue };
        let shared = Arc::clone(shared);
        std::thread::spawn(move || {
            if !shared.passes(state.generation) {
                return abort(&client);
            }
            match TcpStream::connect(target) {
                Ok(server) => join(&client, &server, &shared, state.generation),
                Err(_) => abort(&client),
            }
        });
    }
}

/// Carries both directions until one side or the test ends the connection.
fn join(client: &TcpStream, server: &TcpStream, shared: &Shared, generation: u64) {
    std::thread::scope(|scope| {
        scope.spawn(|| carry(client, server, shared, generation));
        carry(server, client, shared, generation);
    });
}

fn carry(mut from: &TcpStream, mut to: &TcpStream, shared: &Shared, generation: u64) {
    let _ = from.set_read_timeout(Some(GLANCE));
    let _ = to.set_nodelay(true);
    let mut bytes = vec![0; 64 * 1024];
    loop {
        let read = from.read(&mut bytes);
        if !shared.passes(generation) {
            abort(from);
            return abort(to);
        }
        match read {
            Ok(0) => break,
            Ok(count) if to.write_all(&bytes[..count]).is_ok() => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Ok(_) | Err(_) => {
                let _ = from.shutdown(Shutdown::Both);
                break;
            }
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// When it is closed, the other side gets a reset.
fn abort(stream: &TcpStream) {
    // It fails only on a connection that has ended.
    let _ = set_socket_linger(stream, Some(Duration::ZERO));
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod tests {
    use super::*;

    /// A client's and a server's end of one connection through the relay.
    fn connected(relay: &Relay, server: &TcpListener) -> (TcpStream, TcpStream) {
        let client = TcpStream::connect(relay.address()).unwrap();
        let (server, _) = server.accept().unwrap();
        (client, server)
    }

    fn said(stream: &mut TcpStream, limit: Duration) -> std::io::Result<u8> {
        let mut byte = [0];
        stream.set_read_timeout(Some(limit)).unwrap();
        stream.read_exact(&mut byte).map(|()| byte[0])
    }

    #[test]
    fn data_sent_during_a_network_cut_arrives_after_it_heals() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = Relay::to(server.local_addr().unwrap()).unwrap();
        let (mut client, mut there) = connected(&relay, &server);
        let long = Duration::from_secs(20);
        client.write_all(b"a").unwrap();
        assert_eq!(said(&mut there, long).unwrap(), b'a');
        there.write_all(b"b").unwrap();
        assert_eq!(said(&mut client, long).unwrap(), b'b');

        relay.cut();
        client.write_all(b"c").unwrap();
        let error = said(&mut there, Duration::from_millis(200)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock, "the connection stays, and nothing comes");
        relay.heal();
        assert_eq!(said(&mut there, long).unwrap(), b'c');
    }

    #[test]
    fn a_reset_ends_open_connections_but_not_later_ones() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = Relay::to(server.local_addr().unwrap()).unwrap();
        let (mut client, mut there) = connected(&relay, &server);
        relay.reset();
        let long = Duration::from_secs(20);
        for end in [&mut client, &mut there] {
            assert_eq!(said(end, long).unwrap_err().kind(), ErrorKind::ConnectionReset);
        }
        let (mut client, mut there) = connected(&relay, &server);
        client.write_all(b"a").unwrap();
        assert_eq!(said(&mut there, long).unwrap(), b'a');
    }
}
