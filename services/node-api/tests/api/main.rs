//! node-api over real sockets on both sides.

mod fake;
mod figures;
mod listening;
mod requests;
mod scrapes;
mod secured;
mod zpages;
