//! HTTP/2 flow control windows (RFC 9113 §5.2).
//!
//! Each service has one connection to each other service, shared by all calls. Data that a stream has sent and the receiver
//! has not read yet counts against the stream's window and the connection's. If a few streams could fill the connection's
//! window, one user whose command does not read its input would block every call between two services. So a stream's window
//! is small, and a connection's is larger than all streams together can fill.

/// Window of a stream in bytes.
pub(crate) const STREAM_WINDOW: u32 = 256 << 10;
/// Window of a connection in bytes: the maximum of the protocol.
pub(crate) const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
