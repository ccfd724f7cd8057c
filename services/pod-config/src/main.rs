//! The `keelson-pod-config` binary.

fn main() {}
