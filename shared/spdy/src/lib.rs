//! The streams of one command in a container: SPDY/3.1 with `v4.channel.k8s.io`, the client's side.
//!
//! Two speak it: runtime-shim to the streaming server of the container runtime, and `keelson` to the kubelet API of a node
//! that is another machine. How a connection comes about and changes to SPDY is theirs; from there on it is the same.
//!
//! - [`frames`]: the frames, without I/O.
//! - [`session`]: a connection on which the streams of a command are open.
//! - [`relay`]: between a caller, who speaks as `keelson.runtime.v1` has it, and those streams, until the command has ended.
//! - [`end`]: what the status on the error stream says of the end.
//!
//! `docs/adr/0005-exec-speaks-spdy.md` says why it is SPDY and why it is ours.

pub mod end;
pub mod frames;
pub mod relay;
pub mod session;

/// What a connection changes to, in the header `Upgrade`.
pub const PROTOCOL: &str = "SPDY/3.1";
/// The streams of a command as numbered by Kubernetes; the fourth version has half-close, resize and a status as JSON.
pub const STREAMS: &str = "v4.channel.k8s.io";
/// The header that names the version of the streams, in the request and in the answer.
pub const STREAMS_HEADER: &str = "X-Stream-Protocol-Version";
