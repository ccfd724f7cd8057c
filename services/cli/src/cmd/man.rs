//! `keelson man`.

use std::path::Path;

use clap::CommandFactory as _;

use crate::args::Cli;
use crate::error::CliError;
use crate::output;

/// Writes the manual pages of the command and of each subcommand.
pub(crate) fn run(dir: &Path) -> Result<(), CliError> {
    let fail = |source: std::io::Error| CliError::Failed {
        message: format!("cannot write manual pages to {}: {source}", dir.display()),
        hint: Some("name a folder that you may write to with --dir".into()),
    };
    std::fs::create_dir_all(dir).map_err(fail)?;
    clap_mangen::generate_to(Cli::command(), dir).map_err(fail)?;
    output::notice(&format!(
        "The manual pages are in {0}; `man {0}/keelson.1` shows the first.",
        dir.display()
    ));
    Ok(())
}
