//! node-api over real sockets on both sides.

mod fake;
mod listening;
mod requests;
