//! The `keelson-resource-manager` binary.

fn main() {}
