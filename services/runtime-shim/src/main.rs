//! The `keelson-runtime-shim` binary.

fn main() {}
