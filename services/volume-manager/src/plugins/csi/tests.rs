//! The plugin against a driver on a real socket.

mod block;
mod publish;
mod restart;
mod stage;
mod world;
