//! Commands about what pods have left on the node.

use clap::{Args, Subcommand};

use super::candidates::Candidates;

#[derive(Debug, Args)]
pub(crate) struct OrphansArgs {
    #[command(subcommand)]
    pub(crate) what: OrphansWhat,
}

#[derive(Debug, Subcommand)]
pub(crate) enum OrphansWhat {
    /// Show the directories that pods have left, and why they are not removed
    List,
    /// Remove what is left of pods, but nothing that is in use and nothing across a mount of another owner
    Clean {
        /// UIDs of pods, as `keelson orphans list` shows them
        #[arg(required_unless_present = "all", value_name = "UID", add = Candidates::Orphans)]
        uids: Vec<String>,
        /// All that `keelson orphans list` shows, one after the other
        #[arg(long, conflicts_with = "uids")]
        all: bool,
        /// Show what would be removed, and remove nothing
        #[arg(long)]
        dry_run: bool,
    },
}
