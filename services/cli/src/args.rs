//! The command line.

mod candidates;
mod etcd;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, Parser, Subcommand};
use keelson_config::ServiceName;

pub(crate) use self::candidates::Candidates;
pub(crate) use self::etcd::EtcdArgs;
use crate::human::{parse_duration, parse_interval};
use crate::metrics::Sort;
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
    /// Show pods, services, the node, events, volumes, images or sources
    Get(GetArgs),
    /// Print the log of a container
    Logs(LogsArgs),
    /// Run a command in a container
    Exec(ExecArgs),
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
    /// With --etcd they run on a node of the fleet. The output of `keelson get … -o yaml --etcd …` can be edited and
    /// applied: it names the revision that was read as metadata.resourceVersion, and is refused if someone has
    /// changed the object since. The output of `keelson get config --etcd …` names it in the comment
    /// `# resourceVersion: N` at its top. Without a revision the object is replaced.
    Apply(ApplyArgs),
    /// Remove pods that were applied, and wait until they are gone
    Delete(DeleteArgs),
    /// End every back-off of a pod now
    Retry(RetryArgs),
    /// Run pods once with an agent of their own, and report how each of them ended
    ///
    /// Pods that end by themselves run to their end. A pod with a container that is always restarted never ends: it
    /// counts as Running as soon as each of its containers is ready or has succeeded, and as Failed when one of them
    /// fails; it runs until the other pods are done. Then all pods and the agent are stopped and removed.
    ///
    /// The agent runs only the manifests of -f, none that `keelson apply` stored. The command is refused where the
    /// container runtime already runs pods.
    Run(RunArgs),
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

#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Folder or file with pod manifests that the agent watches [default: /etc/keelson/manifests where it exists]
    #[arg(long, value_name = "DIR")]
    pub(crate) manifests: Option<PathBuf>,
    /// Name of the node [default: the host name]
    #[arg(long, value_name = "NAME")]
    pub(crate) node_name: Option<String>,
    /// Socket of the container runtime
    #[arg(long, value_name = "ENDPOINT", default_value = "unix:///run/containerd/containerd.sock")]
    pub(crate) runtime_endpoint: String,
    /// Folder for pods and volumes [default: /var/lib/kubelet]
    #[arg(long, value_name = "DIR")]
    pub(crate) root_dir: Option<PathBuf>,
    /// Folder for the agent's own state [default: /var/lib/keelson]
    #[arg(long, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Run in the background, and return when all services are running
    #[arg(long)]
    pub(crate) detach: bool,
    /// With --detach: where the agent's output goes [default: RUN_DIR/keelson.log]
    #[arg(long, value_name = "FILE", requires = "detach")]
    pub(crate) log_file: Option<PathBuf>,
    /// With --detach: how long to wait until all services are running
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = parse_duration)]
    pub(crate) timeout: Duration,
    /// Further arguments for keelson-init, as the kubelet takes them
    #[arg(last = true, value_name = "INIT_ARGS")]
    pub(crate) extra: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Read the manifests once, run their pods, and end
    #[arg(long, required = true)]
    pub(crate) once: bool,
    /// Manifests: a file, a folder, or - for standard input
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,
    /// Name of the node [default: the host name]
    #[arg(long, value_name = "NAME")]
    pub(crate) node_name: Option<String>,
    /// Socket of the container runtime
    #[arg(long, value_name = "ENDPOINT", default_value = "unix:///run/containerd/containerd.sock")]
    pub(crate) runtime_endpoint: String,
    /// Folder for pods and volumes [default: /var/lib/kubelet]
    #[arg(long, value_name = "DIR")]
    pub(crate) root_dir: Option<PathBuf>,
    /// How long a pod may take to start; a running pod has no limit
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = parse_duration)]
    pub(crate) timeout: Duration,
    /// Further arguments for keelson-init, as the kubelet takes them
    #[arg(last = true, value_name = "INIT_ARGS")]
    pub(crate) extra: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct GetArgs {
    #[command(subcommand)]
    pub(crate) what: GetWhat,
}

#[derive(Debug, Subcommand)]
pub(crate) enum GetWhat {
    /// Pods with their state
    #[command(visible_aliases = ["pod", "po"])]
    Pods {
        /// Names of pods [default: all of the namespace]
        #[arg(add = Candidates::Pods)]
        names: Vec<String>,
        #[command(flatten)]
        watch: WatchArgs,
    },
    /// The agent's own services
    #[command(visible_aliases = ["service", "svc"])]
    Services {
        /// Names of services [default: all]
        #[arg(add = Candidates::Services)]
        names: Vec<String>,
        #[command(flatten)]
        watch: WatchArgs,
    },
    /// The node
    #[command(visible_aliases = ["nodes", "no"])]
    Node {
        /// Name of the node; there is only this one
        name: Option<String>,
        #[command(flatten)]
        watch: WatchArgs,
    },
    /// Recent events
    #[command(visible_aliases = ["event", "ev"])]
    Events {
        /// Only events about this object, for example pod/web
        #[arg(long = "for", value_name = "TYPE/NAME")]
        about: Option<String>,
        #[command(flatten)]
        watch: WatchArgs,
    },
    /// The volumes of pods: their kind, state, what they wait for, and their path on this machine
    #[command(visible_aliases = ["volume", "vol"])]
    Volumes {
        /// Names of pods [default: all of the namespace]
        #[arg(add = Candidates::Pods)]
        pods: Vec<String>,
        #[command(flatten)]
        watch: WatchArgs,
    },
    /// The images in the container runtime, and the pods that use them
    #[command(visible_aliases = ["image", "img"])]
    Images {
        /// Names, or beginnings of ids [default: all]
        names: Vec<String>,
    },
    /// Where pods come from, and the manifests that are refused
    #[command(visible_aliases = ["source", "src"])]
    Sources,
    /// With --etcd: the Secrets under the keys of the nodes; their values only with -o yaml or -o json
    #[command(visible_aliases = ["secret"])]
    Secrets {
        /// Names of Secrets [default: all of the namespace]
        names: Vec<String>,
    },
    /// With --etcd: the ConfigMaps under the keys of the nodes; their values only with -o yaml or -o json
    #[command(name = "configmaps", visible_aliases = ["configmap", "cm"])]
    ConfigMaps {
        /// Names of ConfigMaps [default: all of the namespace]
        names: Vec<String>,
    },
    /// With --etcd: the configuration under the key of each node, and whether the node uses it
    ///
    /// The comments before the text show whether the node uses it, and its revision: edited and applied, it is
    /// refused if someone has changed it since.
    Config,
}

/// Whether to keep showing changes.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct WatchArgs {
    /// Keep running and show each change, also across restarts of the service that reports it
    #[arg(short, long)]
    pub(crate) watch: bool,
    /// With --watch: show of each change whether the object was ADDED, MODIFIED or DELETED
    #[arg(long, requires = "watch")]
    pub(crate) output_watch_events: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// Name of the pod
    #[arg(add = Candidates::Pods)]
    pub(crate) pod: String,
    /// Container [default: the annotated one, else the first]
    #[arg(short, long, value_name = "NAME")]
    pub(crate) container: Option<String>,
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
pub(crate) struct LogsArgs {
    /// Name of the pod
    #[arg(add = Candidates::Pods)]
    pub(crate) pod: String,
    /// Container [default: the annotated one, else the first]
    #[arg(short, long, value_name = "NAME")]
    pub(crate) container: Option<String>,
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
pub(crate) struct DescribeArgs {
    #[command(subcommand)]
    pub(crate) what: DescribeWhat,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DescribeWhat {
    /// A pod: containers, conditions, volumes, events, and what it waits for
    #[command(visible_aliases = ["pods", "po"])]
    Pod {
        /// Names of pods [default: all of the namespace]
        #[arg(add = Candidates::Pods)]
        names: Vec<String>,
    },
    /// The node: conditions, sizes, pods
    #[command(visible_aliases = ["nodes", "no"])]
    Node {
        /// Name of the node; there is only this one
        name: Option<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    #[command(subcommand)]
    pub(crate) what: PodNames,
}

#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    #[command(subcommand)]
    pub(crate) what: PodNames,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    #[command(subcommand)]
    pub(crate) what: Option<TopWhat>,
    /// Time between two refreshes
    #[arg(long, global = true, value_name = "DURATION", default_value = "2s", value_parser = parse_interval)]
    pub(crate) interval: Duration,
    /// Show one measurement and exit
    #[arg(long, global = true)]
    pub(crate) once: bool,
    /// The column to sort by
    #[arg(long, global = true, value_enum, value_name = "COLUMN", default_value = "cpu")]
    pub(crate) sort: Sort,
    /// Leave out the header line
    #[arg(long, global = true)]
    pub(crate) no_headers: bool,
}

/// What `keelson top` shows; without it, all three.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Subcommand)]
pub(crate) enum TopWhat {
    /// Pods: CPU, working set, restarts
    #[command(visible_aliases = ["pod", "po"])]
    Pods,
    /// The agent's own services: health, CPU, memory, restarts
    #[command(visible_aliases = ["service", "svc"])]
    Services,
    /// The node: CPU and memory, also in percent of what pods may use
    #[command(visible_aliases = ["nodes", "no"])]
    Node,
}

/// The argument of commands that take only pods.
#[derive(Debug, Subcommand)]
pub(crate) enum PodNames {
    /// Pods by name
    #[command(visible_aliases = ["pods", "po"])]
    Pod {
        /// Names of pods
        #[arg(required = true, add = Candidates::Pods)]
        names: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ApplyArgs {
    /// Manifests: a file, a folder, or - for standard input
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,
}

/// What `keelson delete` takes by name.
#[derive(Debug, Subcommand)]
pub(crate) enum DeleteWhat {
    /// Pods by name
    #[command(visible_aliases = ["pods", "po"])]
    Pod {
        /// Names of pods
        #[arg(required = true, add = Candidates::Pods)]
        names: Vec<String>,
    },
    /// With --etcd: the configuration under the node's key, so that only its files are in effect
    Config,
}

#[derive(Debug, Args)]
pub(crate) struct DeleteArgs {
    #[command(subcommand)]
    pub(crate) what: Option<DeleteWhat>,
    /// The pods of these manifests: a file, a folder, or - for standard input
    #[arg(short, long = "filename", value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// Return only when the pods are gone
    #[arg(long, global = true, value_name = "BOOL", default_value_t = true, action = ArgAction::Set,
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) wait: bool,
    /// How long to wait at most [default: no limit]
    #[arg(long, global = true, value_name = "DURATION", value_parser = parse_duration)]
    pub(crate) timeout: Option<Duration>,
}

#[derive(Debug, Args)]
pub(crate) struct RetryArgs {
    #[command(subcommand)]
    pub(crate) what: PodNames,
}

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

#[derive(Debug, Args)]
pub(crate) struct CompletionArgs {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Folder to write into; created if missing
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub(crate) dir: PathBuf,
}

/// Turns `get pod/web` into `get pod web`, for every command that takes a type and names.
pub(crate) fn split_type_and_name(args: Vec<OsString>) -> Vec<OsString> {
    const VERBS: [&str; 6] = ["get", "describe", "explain", "delete", "retry", "trace"];
    let mut split = Vec::with_capacity(args.len() + 1);
    let mut after_verb = false;
    let mut escaped = false;
    for arg in args {
        escaped |= arg == "--";
        if escaped {
            split.push(arg);
            continue;
        }
        match arg.to_str().and_then(|text| text.split_once('/')) {
            Some((kind, name)) if after_verb && !kind.is_empty() && !kind.starts_with('-') => {
                split.extend([kind.into(), name.into()]);
            }
            _ => split.push(arg.clone()),
        }
        after_verb = arg.to_str().is_some_and(|text| VERBS.contains(&text));
    }
    split
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn split(args: &[&str]) -> Vec<String> {
        split_type_and_name(args.iter().map(OsString::from).collect())
            .into_iter()
            .map(|a| a.into_string().unwrap())
            .collect()
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn type_slash_name_is_split_after_a_verb() {
        assert_eq!(
            split(&["keelson", "get", "pod/web", "-o", "json"]),
            ["keelson", "get", "pod", "web", "-o", "json"]
        );
        assert_eq!(split(&["keelson", "delete", "-f", "a/b.yaml"]), ["keelson", "delete", "-f", "a/b.yaml"]);
        assert_eq!(split(&["keelson", "get", "--run-dir=/x/y"]), ["keelson", "get", "--run-dir=/x/y"]);
        let exec = ["keelson", "exec", "web", "--", "git", "get", "a/b"];
        assert_eq!(split(&exec), exec);
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
        let line = split(&line);
        let cli = Cli::try_parse_from(line).unwrap();
        let Command::Exec(exec) = cli.command else { panic!("{cli:?}") };
        assert_eq!((exec.pod.as_str(), exec.container.as_deref()), ("web", Some("app")));
        assert_eq!(exec.command, ["ls", "-n", "--", "a/b"]);
        assert!(exec.stdin && exec.tty);
        assert_eq!(cli.global.namespace, "web");
        assert!(Cli::try_parse_from(["keelson", "exec", "web", "ls"]).is_err());
        assert!(Cli::try_parse_from(["keelson", "exec", "web"]).is_err());
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
