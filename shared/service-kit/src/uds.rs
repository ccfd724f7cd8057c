use std::fs;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, lchown};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::Stream;
use tonic::transport::server::Connected;

use crate::whereabouts::{Outside, outside};

/// Why a socket could not be bound.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The folder of the socket is missing or may not be written.
    #[error("cannot bind the socket {}: the folder must exist and be writable by this user (init makes it; keelson-init --prepare-host does so without init)", path.display())]
    Bind {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The socket cannot be moved to its place.
    #[error("cannot move the socket to {}", path.display())]
    Rename {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Binds `path` under a temporary name and renames it into place, so that a caller finds the old socket or the new one, but
/// never no socket; mode 0660. A listener from systemd socket activation is used instead.
pub fn bind(path: &Path) -> Result<UnixListener, BindError> {
    let fail = |source| BindError::Bind { path: path.to_owned(), source };
    if let Some(listener) = listenfd::ListenFd::from_env().take_unix_listener(0).map_err(fail)? {
        listener.set_nonblocking(true).map_err(fail)?;
        return UnixListener::from_std(listener).map_err(fail);
    }
    let temporary = path.with_extension(format!("{}", std::process::id()));
    let _ = fs::remove_file(&temporary);
    let listener = UnixListener::bind(&temporary).map_err(fail)?;
    fs::set_permissions(&temporary, fs::Permissions::from_mode(0o660)).map_err(fail)?;
    give_to_group_of_folder(&temporary).map_err(fail)?;
    fs::rename(&temporary, path).map_err(|source| BindError::Rename { path: path.to_owned(), source })?;
    Ok(listener)
}

/// Sets the socket's group to that of its folder, the operator group: a service that runs as root has another group.
fn give_to_group_of_folder(socket: &Path) -> io::Result<()> {
    let Some(folder) = socket.parent() else { return Ok(()) };
    let group = fs::metadata(folder)?.gid();
    if fs::symlink_metadata(socket)?.gid() == group { Ok(()) } else { lchown(socket, None, Some(group)) }
}

/// The process at the other end of a connection, as the kernel reports it.
#[derive(Debug, Clone, Default)]
pub struct PeerIdentity {
    /// Effective user id when it connected.
    pub uid: u32,
    /// Effective group id when it connected.
    pub gid: u32,
    /// Process id when it connected.
    pub pid: Option<i32>,
    /// Supplementary groups when it connected.
    pub groups: Vec<u32>,
    /// Why the process is not one of the node's own; then it is refused regardless of its user. `None` when it is one.
    pub outside: Option<Outside>,
}

impl PeerIdentity {
    /// Whether the peer is a member of the group.
    pub fn in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    fn of(stream: &UnixStream) -> io::Result<Self> {
        let cred = stream.peer_cred()?;
        let (uid, pid) = (cred.uid(), cred.pid());
        let outside = outside(stream, pid, uid);
        Ok(Self { uid, gid: cred.gid(), pid, groups: peer_groups(stream)?, outside })
    }
}

/// `SO_PEERGROUPS` (socket(7)): the supplementary groups of the peer.
fn peer_groups(stream: &UnixStream) -> io::Result<Vec<u32>> {
    let mut groups = vec![0u32; 64];
    loop {
        let mut length = libc::socklen_t::try_from(groups.len() * size_of::<u32>())
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        // SAFETY: the buffer is `length` bytes long and the kernel writes at most that much.
        let result = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        let count = length as usize / size_of::<u32>();
        if result == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

/// An accepted connection with the identity of its peer.
#[derive(Debug)]
pub(crate) struct PeerStream {
    inner: UnixStream,
    identity: PeerIdentity,
}

impl Connected for PeerStream {
    type ConnectInfo = PeerIdentity;

    fn connect_info(&self) -> PeerIdentity {
        self.identity.clone()
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }
}

/// The stream of accepted connections. A connection whose peer cannot be identified is dropped.
pub(crate) struct Incoming(pub(crate) UnixListener);

impl Stream for Incoming {
    type Item = io::Result<PeerStream>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match self.0.poll_accept(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => return Poll::Ready(Some(Err(error))),
                Poll::Ready(Ok((inner, _))) => match PeerIdentity::of(&inner) {
                    Ok(identity) => return Poll::Ready(Some(Ok(PeerStream { inner, identity }))),
                    Err(error) => tracing::warn!(%error, "dropped a connection without peer identity"),
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_socket_is_0660_and_replaces_a_stale_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let _first = bind(&path).unwrap();
        let _second = bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        UnixStream::connect(&path).await.unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn a_missing_folder_is_named() {
        let error = bind(Path::new("/nonexistent-keelson/a.sock")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent-keelson/a.sock"));
    }
}
