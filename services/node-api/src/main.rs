//! The `keelson-node-api` binary.

fn main() {}
