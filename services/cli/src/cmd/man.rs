//! `keelson man`.

use std::path::Path;

use clap::CommandFactory as _;

use crate::args::Cli;
use crate::error::Failure;
use crate::output;

/// Writes a page for the command and one for each of its subcommands.
pub(crate) fn run(dir: &Path) -> Result<(), Failure> {
    let fail = |source: std::io::Error| Failure::Answer {
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
