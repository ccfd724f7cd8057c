//! Commands about the services of the agent.

use std::time::Duration;

use clap::{Args, Subcommand};
use keelson_config::ServiceName;

use super::candidates::Candidates;
use crate::human::parse_duration;

#[derive(Debug, Args)]
pub(crate) struct ServicesArgs {
    #[command(subcommand)]
    pub(crate) what: ServicesWhat,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ServicesWhat {
    /// Restart services and wait until they serve again; containers keep running
    Restart {
        /// Names of services
        #[arg(required_unless_present = "all", add = Candidates::SupervisedServices)]
        names: Vec<String>,
        /// All services but init, one after the other
        #[arg(long, conflicts_with = "names")]
        all: bool,
        /// How long to wait for each of them
        #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = parse_duration)]
        timeout: Duration,
    },
}

#[derive(Debug, Args)]
pub(crate) struct GrpcArgs {
    #[command(subcommand)]
    pub(crate) what: GrpcWhat,
}

#[derive(Debug, Subcommand)]
pub(crate) enum GrpcWhat {
    /// Show the methods of all services or of one, and their permitted callers
    List(GrpcListArgs),
    /// Call a method; each answer is a line of JSON
    Call(GrpcCallArgs),
}

#[derive(Debug, Args)]
pub(crate) struct GrpcListArgs {
    /// Name of a service
    #[arg(add = Candidates::Services)]
    pub(crate) service: Option<ServiceName>,
}

#[derive(Debug, Args)]
pub(crate) struct GrpcCallArgs {
    /// Name of the service
    #[arg(add = Candidates::Services)]
    pub(crate) service: ServiceName,
    /// Name of the method, prefixed with its API where two APIs have one of that name
    pub(crate) method: String,
    /// The request as JSON, or - for standard input; for a stream, several one after another
    #[arg(default_value = "{}", value_name = "JSON")]
    pub(crate) message: String,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) what: ConfigWhat,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigWhat {
    /// Show each value of the KubeletConfiguration in force, and the default, file, drop-in or flag that sets it
    Show {
        /// Show what the services read instead, resolved from flags, files and the machine
        #[arg(long)]
        resolved: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct VersionArgs {
    /// Only the version of this command; calls no service
    #[arg(long)]
    pub(crate) client: bool,
}
