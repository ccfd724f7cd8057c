//! Commands that drain the node.

use std::time::Duration;

use clap::Args;

use crate::human::parse_duration;

#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// End the pods that run, by rising priority, each with its own grace period, and wait until they have ended
    #[arg(long, conflicts_with = "undo")]
    pub(crate) stop_pods: bool,
    /// How long to wait at most for the end of the pods [default: no limit]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, requires = "stop_pods")]
    pub(crate) timeout: Option<Duration>,
    /// Let the node start pods again, as `keelson uncordon` does
    #[arg(long)]
    pub(crate) undo: bool,
}
