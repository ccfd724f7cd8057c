//! Commands about one container.

use std::time::Duration;

use clap::Args;

use super::candidates::Candidates;
use crate::human::parse_duration;

/// A container of a pod.
#[derive(Debug, Clone, Args)]
pub(crate) struct ContainerArgs {
    /// Name of the pod
    #[arg(add = Candidates::Pods)]
    pub(crate) pod: String,
    /// Container [default: the annotated one, else the first]
    #[arg(short, long, value_name = "NAME")]
    pub(crate) container: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    #[command(flatten)]
    pub(crate) target: ContainerArgs,
    /// Keep printing lines as they are written
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// The log of the previous instance of the container
    #[arg(short, long)]
    pub(crate) previous: bool,
    /// Only the last lines
    #[arg(long, value_name = "LINES")]
    pub(crate) tail: Option<u32>,
    /// Only lines newer than this, for example 5m
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub(crate) since: Option<Duration>,
    /// Begin each line with its time
    #[arg(long)]
    pub(crate) timestamps: bool,
    /// At most this many bytes
    #[arg(long, value_name = "BYTES")]
    pub(crate) limit_bytes: Option<u32>,
    /// Escape what would move the cursor or colour the screen; by default the bytes are printed as the container wrote them
    #[arg(long)]
    pub(crate) safe: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    #[command(flatten)]
    pub(crate) target: ContainerArgs,
    /// Pass standard input to the command
    #[arg(short = 'i', long)]
    pub(crate) stdin: bool,
    /// Give the command a terminal; needs --stdin and a terminal here
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// The command and its arguments, after --; no shell interprets them unless the command is one
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct AttachArgs {
    #[command(flatten)]
    pub(crate) target: ContainerArgs,
    /// Pass standard input to the container, which must have `stdin: true`
    #[arg(short = 'i', long)]
    pub(crate) stdin: bool,
    /// Use this terminal as the container's; needs --stdin and a container with `tty: true`
    #[arg(short, long)]
    pub(crate) tty: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CpArgs {
    /// A file or folder: a path of this machine, or POD:PATH
    pub(crate) source: String,
    /// Where it is copied to: a path of this machine, or POD:PATH; into a folder that exists
    pub(crate) target: String,
    /// Container [default: the annotated one, else the first]
    #[arg(short, long, value_name = "NAME")]
    pub(crate) container: Option<String>,
}
