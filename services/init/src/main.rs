//! The `keelson-init` binary; `kubelet` is a link to it.

use std::process::ExitCode;

fn main() -> ExitCode {
    keelson_init::main()
}
