//! The `keelson` command: what the people who operate a node use.
//!
//! It owns nothing. Every command is one or a few gRPC calls on the sockets below the run folder, and a table,
//! JSON or YAML made of the answers. Standard output carries the answer alone; notices and errors go to
//! standard error, an error as one `error:` line with a `try:` line where there is a way out.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | what was asked for failed or does not exist |
//! | 64 | the command line is wrong |
//! | 69 | the agent, or for `up` the container runtime, cannot be reached |
//!
//! [`status`] and [`human`] hold what is decided about text and are pure; [`agent`] is the only module that
//! calls a service; [`cmd`] has one module per command.

mod agent;
mod args;
mod cmd;
mod describer;
mod error;
mod human;
mod output;
mod pods;
mod status;
mod table;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser as _;

use crate::args::Cli;
use crate::error::Failure;

/// Exit code of a wrong command line (`EX_USAGE`).
const EX_USAGE: u8 = 64;

/// Runs the command line `args`, the program's name included.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args = args::split_type_and_name(args.into_iter().collect());
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // A closed pipe under `--help` is nobody's problem.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EX_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let colour = output::Colour::for_stderr(cli.global.no_color);
    match run_to_end(cli) {
        Ok(()) | Err(Failure::BrokenPipe) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.print(colour);
            ExitCode::from(failure.exit_code())
        }
    }
}

fn run_to_end(cli: Cli) -> Result<(), Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| Failure::Runtime { source })?
        .block_on(cmd::dispatch(cli))
}
