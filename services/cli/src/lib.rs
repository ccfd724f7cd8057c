//! The `keelson` command: the tool of the people who operate a node.
//!
//! It keeps no state. Every command makes one or a few gRPC calls on the sockets below the run folder and prints the answers as a
//! table, JSON or YAML. Standard output holds the answer and nothing else; notices and errors go to standard error. An error is
//! one `error:` line, followed by a `try:` line where the command knows a remedy.
//!
//! docs/command.md and `keelson --help` list the exit codes; [`error`] maps each error to one.
//!
//! The layers, from the top: [`dispatch`] selects the command; [`fleet`] has the commands that talk to etcd instead of an agent, for
//! a fleet of nodes; [`cmd`] has one module per command; [`session`] is what every command gets; [`pods`] resolves the names of
//! pods, and [`watch`] follows a service across its restarts; [`agent`] is the only module that calls a service; [`args`] is the
//! command line; [`output`] and [`error`] are at the bottom. [`status`], [`human`], [`suggest`], [`row_tracker`], [`metrics`] and
//! [`waterfall`] do no I/O.

mod agent;
mod args;
mod cmd;
mod describer;
mod dispatch;
mod error;
mod fleet;
mod host;
mod human;
mod metrics;
mod output;
mod pods;
mod row_tracker;
mod sanitize;
mod screen;
mod service_manager;
mod session;
mod sources;
mod status;
mod suggest;
mod table;
mod terminal;
mod watch;
mod waterfall;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser as _;

use crate::args::Cli;
use crate::error::CliError;

/// Exit code of a wrong command line (`EX_USAGE`).
const EX_USAGE: u8 = 64;

/// Runs the command line `args`, the program's name included.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    if let Some(end) = cmd::completion::answer(&args) {
        return end;
    }
    let args = args::split_type_and_name(args);
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Ignore a closed pipe under `--help`.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EX_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let colour = output::Colour::for_stderr(cli.global.no_color);
    match run_to_end(cli) {
        Ok(()) | Err(CliError::BrokenPipe) => ExitCode::SUCCESS,
        Err(error) => {
            output::print_error(&error, colour);
            ExitCode::from(error.exit_code())
        }
    }
}

fn run_to_end(cli: Cli) -> Result<(), CliError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| CliError::AsyncRuntime { source })?
        .block_on(dispatch::run(cli))
}

#[cfg(test)]
mod docs_tests;
