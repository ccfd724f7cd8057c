//! How much may be on its way (HTTP/2 flow control, RFC 9113 §5.2).
//!
//! Each service has one connection to each other, with everybody's calls on it. What a stream has sent and its receiver has not
//! read yet takes from the window of the stream and from that of the connection. With a connection's window that a few streams
//! fill, one user whose command does not read its input would stop every call between two services. So a stream's window is
//! small, and a connection's is larger than all streams together can fill.

/// Bytes of a stream that wait for their reader.
pub(crate) const STREAM_WINDOW: u32 = 256 << 10;
/// The same of a connection: the most that the protocol has.
pub(crate) const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
