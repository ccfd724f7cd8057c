//! The streams of one command in a container: SPDY/3.1 with `v4.channel.k8s.io`, the client's side.
//!
//! It has two users: runtime-shim, for the streaming server of the container runtime, and `keelson`, for the kubelet API of a
//! remote node. They open the connection and upgrade it to SPDY; this crate does the rest.
//!
//! - [`frames`]: the frames, without I/O.
//! - [`session`]: a connection on which the streams of a command are open.
//! - [`relay`]: relays between a caller (the messages of `keelson.runtime.v1`) and those streams until the command has ended.
//! - [`end`]: parses the status on the error stream.
//!
//! `docs/adr/0005-exec-speaks-spdy.md` explains why it is SPDY and why the implementation is our own.

pub mod end;
pub mod frames;
pub mod relay;
pub mod session;

/// The protocol in the header `Upgrade`.
pub const PROTOCOL: &str = "SPDY/3.1";
/// Kubernetes' version of the streams of a command; the fourth one has half-close, resize and a JSON status.
pub const STREAMS: &str = "v4.channel.k8s.io";
/// The header with the version of the streams, in the request and in the response.
pub const STREAMS_HEADER: &str = "X-Stream-Protocol-Version";
