//! Which command a command line runs.

use crate::agent::Agent;
use crate::args::{
    Cli, Command, ConfigWhat, DescribeWhat, GetWhat, GrpcWhat, OrphansWhat, PodNames, ServicesWhat,
};
use crate::cmd::{
    apply, attach, completion, config, cp, delete, describe_node, describe_pod, drain, evict, exec, explain,
    get_events, get_images, get_node, get_pods, get_services, get_sources, get_volume_objects, get_volumes,
    grpc, logs, man, orphans, retry, run_once, services, top, trace, up, version,
};
use crate::error::CliError;
use crate::fleet;
use crate::output::Colour;
use crate::session::Session;

/// Runs the command: with `--etcd` that of the fleet, else that of the agent of this machine.
pub(crate) async fn run(mut cli: Cli) -> Result<(), CliError> {
    cli.global.etcd = cli.global.etcd.complete(|name| std::env::var_os(name))?;
    let session = Session {
        agent: Agent::new(cli.global.run_dir.clone(), cli.global.request_timeout),
        colour: Colour::for_stdout(cli.global.no_color),
        now: keelson_service_kit::now_unix_nanos(),
        global: cli.global,
    };
    if session.global.etcd.etcd.is_empty() {
        run_here(&session, cli.command).await
    } else {
        fleet::dispatch(&session, &cli.command).await
    }
}

/// Runs a command of the agent of this machine.
async fn run_here(session: &Session, command: Command) -> Result<(), CliError> {
    check_format(session, &command)?;
    match command {
        Command::Up(args) => up::run(session, &args).await,
        Command::Get(args) => get(session, args.what).await,
        Command::Logs(args) => logs::run(session, &args).await,
        Command::Describe(args) => match args.what {
            DescribeWhat::Pod { names } => describe_pod::run(session, &names).await,
            DescribeWhat::Node { name } => describe_node::run(session, name.as_deref()).await,
        },
        Command::Explain(args) => {
            let PodNames::Pod { names } = args.what;
            explain::run(session, &names).await
        }
        Command::Apply(args) => apply::run(session, &args.files).await,
        Command::Delete(args) => delete::run(session, &args).await,
        Command::Exec(args) => exec::run(session, &args).await,
        Command::Attach(args) => attach::run(session, &args).await,
        Command::Cp(args) => cp::run(session, &args).await,
        Command::Evict(args) => evict::run(session, args).await,
        Command::Retry(args) => {
            let PodNames::Pod { names } = args.what;
            retry::run(session, &names).await
        }
        Command::Drain(args) if args.undo => drain::uncordon(session).await,
        Command::Drain(args) => drain::run(session, &args).await,
        Command::Uncordon => drain::uncordon(session).await,
        Command::Top(args) => top::run(session, &args).await,
        Command::Trace(args) => {
            let PodNames::Pod { names } = args.what;
            trace::run(session, &names).await
        }
        Command::Run(args) => run_once::run(session, &args).await,
        Command::Orphans(args) => match args.what {
            OrphansWhat::List => orphans::list(session).await,
            OrphansWhat::Clean { uids, all, dry_run } => orphans::clean(session, &uids, all, dry_run).await,
        },
        Command::Services(args) => {
            let ServicesWhat::Restart { names, all, timeout } = args.what;
            services::restart(session, &names, all, timeout).await
        }
        Command::Grpc(args) => match args.what {
            GrpcWhat::List(args) => grpc::list(&args),
            GrpcWhat::Call(args) => grpc::call(session, &args).await,
        },
        Command::Config(args) => {
            let ConfigWhat::Show { resolved } = args.what;
            config::show(session, resolved)
        }
        Command::Version(args) => version::run(session, args.client).await,
        Command::Completion(args) => completion::run(args.shell),
        Command::Man(args) => man::run(&args.dir),
    }
}

/// What has the state of a drain in a format.
const DRAIN_HINT: &str = "`keelson get node -o json` gives the state";

/// Refuses `-o` for the commands whose output has no format.
fn check_format(session: &Session, command: &Command) -> Result<(), CliError> {
    let plain = "leave -o out";
    let (name, hint) = match command {
        Command::Up(_) => ("up", plain),
        Command::Logs(_) => ("logs", plain),
        Command::Describe(_) => ("describe", "`keelson get … -o json` gives the object"),
        Command::Delete(_) => ("delete", plain),
        Command::Exec(_) => ("exec", plain),
        Command::Attach(_) => ("attach", plain),
        Command::Cp(_) => ("cp", plain),
        Command::Evict(_) => ("evict", plain),
        Command::Retry(_) => ("retry", plain),
        Command::Drain(_) => ("drain", DRAIN_HINT),
        Command::Uncordon => ("uncordon", DRAIN_HINT),
        Command::Services(_) => ("services restart", "`keelson get services -o json` gives the state"),
        Command::Grpc(args) => match args.what {
            GrpcWhat::List(_) => ("grpc list", plain),
            GrpcWhat::Call(_) => ("grpc call", "its answers are JSON"),
        },
        Command::Completion(_) => ("completion", plain),
        Command::Man(_) => ("man", plain),
        Command::Get(_)
        | Command::Explain(_)
        | Command::Apply(_)
        | Command::Top(_)
        | Command::Trace(_)
        | Command::Run(_)
        | Command::Orphans(_)
        | Command::Config(_)
        | Command::Version(_) => return Ok(()),
    };
    session.without_format(name, hint)
}

async fn get(session: &Session, what: GetWhat) -> Result<(), CliError> {
    match what {
        GetWhat::Pods { names, watch } => get_pods::run(session, &names, watch).await,
        GetWhat::Services { names, watch } => get_services::run(session, &names, watch).await,
        GetWhat::Node { name, watch } => get_node::run(session, name.as_deref(), watch).await,
        GetWhat::Events { about, watch } => get_events::run(session, about.as_deref(), watch).await,
        GetWhat::Volumes { pods, watch } => get_volumes::run(session, &pods, watch).await,
        GetWhat::PersistentVolumes { names, watch } => {
            get_volume_objects::volumes(session, &names, watch).await
        }
        GetWhat::PersistentVolumeClaims { names, watch } => {
            get_volume_objects::claims(session, &names, watch).await
        }
        GetWhat::Images { names } => get_images::run(session, &names).await,
        GetWhat::Sources => get_sources::run(session).await,
        GetWhat::Secrets { .. } => Err(objects_only_with_etcd("secrets")),
        GetWhat::ConfigMaps { .. } => Err(objects_only_with_etcd("configmaps")),
        GetWhat::Config => Err(CliError::only_with_etcd("get config")),
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
