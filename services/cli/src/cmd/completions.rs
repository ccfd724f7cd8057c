//! `keelson completions`.

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::args::Cli;
use crate::error::Failure;
use crate::output;

/// Prints the completion script of a shell.
pub(crate) fn run(shell: Shell) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "keelson", &mut script);
    output::print_bytes(&script)
}
