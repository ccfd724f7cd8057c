//! The command line.

mod candidates;
mod change;
mod container;
mod drain;
mod etcd;
mod orphans;
mod services;
mod show;
mod start;
mod tool;
mod type_and_name;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

pub(crate) use self::candidates::Candidates;
pub(crate) use self::change::{ApplyArgs, DeleteArgs, DeleteWhat, EvictArgs, RetryArgs};
pub(crate) use self::container::{AttachArgs, ContainerArgs, CpArgs, ExecArgs, LogsArgs};
pub(crate) use self::drain::DrainArgs;
pub(crate) use self::etcd::EtcdArgs;
pub(crate) use self::orphans::{OrphansArgs, OrphansWhat};
pub(crate) use self::services::{
    ConfigArgs, ConfigWhat, GrpcArgs, GrpcCallArgs, GrpcListArgs, GrpcWhat, ServicesArgs, ServicesWhat,
    VersionArgs,
};
pub(crate) use self::show::{
    DescribeArgs, DescribeWhat, ExplainArgs, GetArgs, GetWhat, PodNames, TopArgs, TopWhat, TraceArgs,
    WatchArgs,
};
pub(crate) use self::start::{RunArgs, UpArgs};
pub(crate) use self::tool::{CompletionArgs, ManArgs};
pub(crate) use self::type_and_name::split_type_and_name;
use crate::human::parse_duration;
use crate::output::Format;

/// The default run folder of an agent.
pub(crate) const DEFAULT_RUN_DIR: &str = "/run/keelson";

const EXIT_CODES: &str = "\
Exit codes:
  0   done
  1   what was asked for failed or does not exist
  64  the command line is wrong
  69  the agent, one of its services, the container runtime or etcd is not running or does not answer
  70  an internal error of this command, or an invalid answer
  74  the output cannot be written
  75  not done in time; the operation continues
  77  not permitted: the socket is closed to this user, or the service refuses the call
  `keelson exec` ends with the exit code of the command that it runs; a failure of its own has an error: line.

Names: a pod from a manifest is called <name>-<node>; both the full and the short name are understood.
TYPE/NAME may be written instead of TYPE NAME.";

/// Looks at and operates the Keelson agent of this node.
#[derive(Debug, Parser)]
#[command(name = "keelson", version, after_help = EXIT_CODES, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// Folder with the sockets of the agent
    #[arg(long, global = true, value_name = "DIR", env = "KEELSON_RUN_DIR", default_value = DEFAULT_RUN_DIR)]
    pub(crate) run_dir: PathBuf,
    /// Output format
    #[arg(short, long, global = true, value_name = "FORMAT")]
    pub(crate) output: Option<Format>,
    /// Namespace of pods and events
    #[arg(short, long, global = true, value_name = "NAME", default_value = "default")]
    pub(crate) namespace: String,
    /// All namespaces
    #[arg(short = 'A', long, global = true)]
    pub(crate) all_namespaces: bool,
    /// How long a service may take to answer, for example 500ms, 5s or 1m
    #[arg(long, global = true, value_name = "DURATION", default_value = "10s", value_parser = parse_duration)]
    pub(crate) request_timeout: Duration,
    /// No colours (NO_COLOR does the same)
    #[arg(long, global = true)]
    pub(crate) no_color: bool,
    #[command(flatten)]
    pub(crate) etcd: EtcdArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start the agent on this machine
    Up(UpArgs),
    /// Show pods, services, the node, events, volumes, claims, images or sources
    Get(GetArgs),
    /// Print the log of a container
    Logs(LogsArgs),
    /// Run a command in a container
    Exec(ExecArgs),
    /// Show the output of a container's main process, and pass input to it
    ///
    /// It ends with the process, or with Ctrl-C, which the process does not notice unless -i and -t are set.
    Attach(AttachArgs),
    /// Copy a file or folder from a container or into it
    ///
    /// `keelson cp web:/data/file file` and `keelson cp file web:/data/`. The container's image must have tar. A path in
    /// the container is relative to its working folder. Links and special files are not copied from a container.
    Cp(CpArgs),
    /// Show everything about a pod or the node
    Describe(DescribeArgs),
    /// Show what a pod waits for, step by step
    Explain(ExplainArgs),
    /// Show the CPU and memory of services, pods and the node, refreshed until q or Ctrl-C
    ///
    /// CPU is averaged since the previous refresh. Where standard output is not a terminal, and with --once or -o json,
    /// one measurement over one second is shown.
    Top(TopArgs),
    /// Show the spans of a pod's last start as a waterfall, across all services
    Trace(TraceArgs),
    /// Store manifests, so that their pods run here
    ///
    /// A manifest contains Pods, Secrets, ConfigMaps, PersistentVolumes and PersistentVolumeClaims.
    ///
    /// With --etcd they run on a node of the fleet. The output of `keelson get … -o yaml --etcd …` can be edited and
    /// applied: it names the revision that was read as metadata.resourceVersion, and is refused if someone has
    /// changed the object since. The output of `keelson get config --etcd …` names it in the comment
    /// `# resourceVersion: N` at its top. Without a revision the object is replaced.
    Apply(ApplyArgs),
    /// Remove pods and other objects that were applied, and wait until the pods are gone
    Delete(DeleteArgs),
    /// Evict a pod: it ends with the phase Failed and the reason Evicted, and is not started again
    Evict(EvictArgs),
    /// End every back-off of a pod now
    Retry(RetryArgs),
    /// Let the node start no new pods; with --stop-pods, end those that run
    ///
    /// For a node without an API server; with one, `kubectl drain` does this. The node stays drained over restarts and
    /// reboots, until `keelson uncordon`. New pods wait. Pods that run keep running, also over a reboot; with --stop-pods
    /// they are ended by rising priority, in the order of a graceful shutdown, and start again after `keelson uncordon`.
    Drain(DrainArgs),
    /// Let a drained node start pods again
    Uncordon,
    /// Run pods once with an agent of their own, and report how each of them ended
    ///
    /// Pods that end by themselves run to their end. A pod with a container that is always restarted never ends: it
    /// counts as Running as soon as each of its containers is ready or has succeeded, and as Failed when one of them
    /// fails; it runs until the other pods are done. Then all pods and the agent are stopped and removed.
    ///
    /// The agent runs only the manifests of -f, none that `keelson apply` stored. The command is refused where the
    /// container runtime already runs pods.
    Run(RunArgs),
    /// Show or remove the directories that pods have left on this node
    ///
    /// An orphaned pod has a directory, although no source names it and nothing of it runs. volume-manager removes such
    /// directories by itself, unless something in them is mounted or cannot be removed safely.
    #[command(visible_alias = "orphan")]
    Orphans(OrphansArgs),
    /// Operate the services of the agent
    #[command(visible_alias = "service")]
    Services(ServicesArgs),
    /// Call the gRPC methods of the services
    Grpc(GrpcArgs),
    /// Show the configuration in force and where each value is from
    Config(ConfigArgs),
    /// Show the version of this command and of each service
    Version(VersionArgs),
    /// Print a shell's completion script, which also completes the names of pods and services
    #[command(visible_alias = "completions")]
    Completion(CompletionArgs),
    /// Write the manual pages
    Man(ManArgs),
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn global_flags_are_accepted_before_and_after_the_command() {
        let before = Cli::try_parse_from(["keelson", "-n", "web", "-o", "json", "get", "po"]).unwrap();
        let after = Cli::try_parse_from(["keelson", "get", "po", "-n", "web", "-o", "json"]).unwrap();
        for cli in [before, after] {
            assert_eq!((cli.global.namespace.as_str(), cli.global.output), ("web", Some(Format::Json)));
        }
    }

    #[test]
    fn arguments_after_two_dashes_belong_to_the_executed_command() {
        let line = ["keelson", "exec", "-it", "web", "-c", "app", "-n", "web", "--", "ls", "-n", "--", "a/b"];
        let cli = Cli::try_parse_from(split_type_and_name(line.map(OsString::from).to_vec())).unwrap();
        let Command::Exec(exec) = cli.command else { panic!("{cli:?}") };
        assert_eq!((exec.target.pod.as_str(), exec.target.container.as_deref()), ("web", Some("app")));
        assert_eq!(exec.command, ["ls", "-n", "--", "a/b"]);
        assert!(exec.stdin && exec.tty);
        assert_eq!(cli.global.namespace, "web");
        assert!(Cli::try_parse_from(["keelson", "exec", "web", "ls"]).is_err());
        assert!(Cli::try_parse_from(["keelson", "exec", "web"]).is_err());
    }

    #[test]
    fn drain_takes_a_timeout_only_where_it_waits() {
        let parse = |args: &[&str]| Cli::try_parse_from([&["keelson", "drain"], args].concat());
        let Command::Drain(args) = parse(&["--stop-pods", "--timeout", "90s"]).unwrap().command else {
            panic!()
        };
        assert!(args.stop_pods && !args.undo);
        assert_eq!(args.timeout, Some(Duration::from_secs(90)));
        assert!(parse(&[]).is_ok() && parse(&["--undo"]).is_ok());
        for refused in
            [&["--timeout", "90s"][..], &["--undo", "--stop-pods"], &["--stop-pods", "--timeout", "x"]]
        {
            assert!(parse(refused).is_err(), "{refused:?}");
        }
        assert!(Cli::try_parse_from(["keelson", "uncordon", "node"]).is_err());
    }

    #[test]
    fn wait_is_a_switch_with_an_optional_value() {
        let wait = |args: &[&str]| match Cli::try_parse_from(args).unwrap().command {
            Command::Delete(delete) => delete.wait,
            other => panic!("{other:?}"),
        };
        assert!(wait(&["keelson", "delete", "pod", "web"]));
        assert!(wait(&["keelson", "delete", "pod", "web", "--wait"]));
        assert!(!wait(&["keelson", "delete", "pod", "web", "--wait=false"]));
        assert!(!wait(&["keelson", "delete", "-f", "x.yaml", "--wait=false"]));
    }
}
