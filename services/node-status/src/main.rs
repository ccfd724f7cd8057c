//! The `keelson-node-status` binary.

fn main() {}
