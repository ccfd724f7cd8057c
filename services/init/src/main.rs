//! The `keelson-init` binary.

fn main() {}
