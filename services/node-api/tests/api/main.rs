//! node-api over real sockets on both sides.

mod command;
mod fake;
mod figures;
mod handshakes;
mod listening;
mod requests;
mod reviewed;
mod scrapes;
mod secured;
mod websockets;
mod zpages;
