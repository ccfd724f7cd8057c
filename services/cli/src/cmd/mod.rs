//! One module per command.

pub(crate) mod apply;
pub(crate) mod completion;
pub(crate) mod config;
pub(crate) mod delete;
mod describe_node;
mod describe_pod;
pub(crate) mod exec;
mod explain;
pub(crate) mod get_events;
mod get_images;
pub(crate) mod get_node;
mod get_pods;
pub(crate) mod get_services;
pub(crate) mod get_sources;
mod get_volumes;
mod grpc;
pub(crate) mod logs;
mod man;
pub(crate) mod manifests;
mod retry;
mod run_once;
mod services;
mod top;
mod trace;
mod up;
mod version;

use crate::agent::Agent;
use crate::args::{Cli, Command, DescribeWhat, Format, GetWhat, Global, GrpcWhat, PodNames, ServicesWhat};
use crate::error::CliError;
use crate::output::Colour;
use crate::pods::Scope;

/// The context of a command: the agent and the global flags.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) agent: Agent,
    pub(crate) global: Global,
    /// Colours for standard output.
    pub(crate) colour: Colour,
    /// Nanoseconds since the epoch when the command began.
    pub(crate) now: i64,
}

impl Session {
    /// The namespace that the flags select.
    pub(crate) fn scope(&self) -> Scope {
        let namespace = (!self.global.all_namespaces).then(|| self.global.namespace.clone());
        Scope { namespace }
    }

    /// The output format.
    pub(crate) fn format(&self) -> Option<Format> {
        self.global.output
    }

    pub(crate) fn is_wide(&self) -> bool {
        self.global.output == Some(Format::Wide)
    }

    /// Refuses `--output` for a command without formats; `instead` is the hint.
    pub(crate) fn without_format(&self, command: &str, instead: &str) -> Result<(), CliError> {
        if self.global.output.is_none() {
            return Ok(());
        }
        Err(CliError::Usage {
            message: format!("`keelson {command}` has no --output"),
            hint: instead.to_owned(),
        })
    }
}

/// Runs the command.
pub(crate) async fn dispatch(mut cli: Cli) -> Result<(), CliError> {
    cli.global.etcd = cli.global.etcd.complete(|name| std::env::var_os(name))?;
    let session = Session {
        agent: Agent::new(cli.global.run_dir.clone(), cli.global.request_timeout),
        colour: Colour::for_stdout(cli.global.no_color),
        now: keelson_service_kit::now_unix_nanos(),
        global: cli.global,
    };
    if !session.global.etcd.etcd.is_empty() {
        return crate::fleet::dispatch(&session, &cli.command).await;
    }
    let plain = "leave -o out";
    match cli.command {
        Command::Up(args) => {
            session.without_format("up", plain)?;
            up::run(&session, &args).await
        }
        Command::Get(args) => get(&session, args.what).await,
        Command::Logs(args) => {
            session.without_format("logs", plain)?;
            logs::run(&session, &args).await
        }
        Command::Describe(args) => {
            session.without_format("describe", "`keelson get … -o json` gives the object")?;
            match args.what {
                DescribeWhat::Pod { names } => describe_pod::run(&session, &names).await,
                DescribeWhat::Node { name } => describe_node::run(&session, name.as_deref()).await,
            }
        }
        Command::Explain(args) => {
            let PodNames::Pod { names } = args.what;
            explain::run(&session, &names).await
        }
        Command::Apply(args) => apply::run(&session, &args.files).await,
        Command::Delete(args) => {
            session.without_format("delete", plain)?;
            delete::run(&session, &args).await
        }
        Command::Exec(args) => {
            session.without_format("exec", plain)?;
            exec::run(&session, &args).await
        }
        Command::Retry(args) => {
            session.without_format("retry", plain)?;
            let PodNames::Pod { names } = args.what;
            retry::run(&session, &names).await
        }
        Command::Top(args) => top::run(&session, &args).await,
        Command::Trace(args) => {
            let PodNames::Pod { names } = args.what;
            trace::run(&session, &names).await
        }
        Command::Run(args) => run_once::run(&session, &args).await,
        Command::Services(args) => {
            session.without_format("services restart", "`keelson get services -o json` gives the state")?;
            let ServicesWhat::Restart { names, all, timeout } = args.what;
            services::restart(&session, &names, all, timeout).await
        }
        Command::Grpc(args) => match args.what {
            GrpcWhat::List(args) => {
                session.without_format("grpc list", plain)?;
                grpc::list(&args)
            }
            GrpcWhat::Call(args) => {
                session.without_format("grpc call", "its answers are JSON")?;
                grpc::call(&session, &args).await
            }
        },
        Command::Config(args) => {
            let config::ConfigWhat::Show { resolved } = args.what;
            config::show(&session, resolved)
        }
        Command::Version(args) => version::run(&session, args.client).await,
        Command::Completion(args) => {
            session.without_format("completion", plain)?;
            completion::run(args.shell)
        }
        Command::Man(args) => {
            session.without_format("man", plain)?;
            man::run(&args.dir)
        }
    }
}

/// The error of a command about keys of etcd without `--etcd`.
fn only_with_etcd(command: &str) -> CliError {
    CliError::Usage {
        message: format!("`keelson {command}` is about a key of etcd"),
        hint: "--etcd names the members, as `etcd.endpoints` of the KeelsonConfiguration does".into(),
    }
}

/// The error of `get secrets` or `get configmaps` without `--etcd`.
fn objects_only_with_etcd(what: &str) -> CliError {
    CliError::Usage {
        message: format!("`keelson get {what}` is about keys of etcd"),
        hint: "add --etcd ENDPOINTS; without a fleet, those of a node are in the files beside its manifests"
            .into(),
    }
}

async fn get(session: &Session, what: GetWhat) -> Result<(), CliError> {
    match what {
        GetWhat::Pods { names, watch } => get_pods::run(session, &names, watch).await,
        GetWhat::Services { names, watch } => get_services::run(session, &names, watch).await,
        GetWhat::Node { name, watch } => get_node::run(session, name.as_deref(), watch).await,
        GetWhat::Events { about, watch } => get_events::run(session, about.as_deref(), watch).await,
        GetWhat::Volumes { pods, watch } => get_volumes::run(session, &pods, watch).await,
        GetWhat::Images { names } => get_images::run(session, &names).await,
        GetWhat::Sources => get_sources::run(session).await,
        GetWhat::Secrets { .. } => Err(objects_only_with_etcd("secrets")),
        GetWhat::ConfigMaps { .. } => Err(objects_only_with_etcd("configmaps")),
        GetWhat::Config => Err(only_with_etcd("get config")),
    }
}
