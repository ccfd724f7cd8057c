//! The `keelson` command.

fn main() {}
