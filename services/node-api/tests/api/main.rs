//! Tests of node-api over real sockets, with fakes of the other services.

#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

mod checkpoint;
mod command;
mod debug_flags;
mod fake;
mod handshakes;
mod listening;
mod node_logs;
mod requests;
mod reviewed;
mod scrapes;
mod secured;
mod secured_node;
mod statistics;
mod websockets;
mod zpages;
