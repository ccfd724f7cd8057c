//! The `keelson-volume-manager` binary.

fn main() {}
