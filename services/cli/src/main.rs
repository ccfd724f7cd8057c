//! The `keelson` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    keelson_cli::run(std::env::args_os())
}
