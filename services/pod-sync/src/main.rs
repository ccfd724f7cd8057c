//! The `keelson-pod-sync` binary.

fn main() {}
