//! A fleet over etcd: commands with `--etcd`, which need no agent.
//!
//! `keelson apply`, `get` and `delete` read and write the keys of the nodes (architecture §6), so they work also for a node that
//! is down; it reads the keys when it is back. `logs` and `exec` call the node's own API.

mod apply;
mod configuration;
mod delete;
mod delete_check;
mod etcd_error;
mod events;
mod get;
mod get_objects;
mod node_api;
mod nodes;
mod objects;
mod pods;
mod volume_objects;
mod watch;

use self::nodes::Fleet;
use crate::args::{Command, DeleteWhat, GetWhat, WatchArgs};
use crate::cmd::get_volume_objects::without_namespace;
use crate::cmd::manifests::ObjectKind;
use crate::error::CliError;
use crate::session::Session;

/// Runs a command with `--etcd`.
pub(crate) async fn dispatch(session: &Session, command: &Command) -> Result<(), CliError> {
    let fleet = Fleet::new(&session.global.etcd)?;
    match command {
        Command::Apply(args) => apply::run(session, &fleet, &args.files).await,
        Command::Delete(args) => {
            session.without_format("delete", "leave -o out")?;
            match args.what {
                Some(DeleteWhat::Config) => configuration::delete(&fleet).await,
                _ => delete::run(session, &fleet, args).await,
            }
        }
        Command::Get(args) => get_what(session, &fleet, &args.what).await,
        Command::Up(_) => unsupported("up"),
        Command::Logs(args) => {
            session.without_format("logs", "leave -o out")?;
            pods::logs(session, &fleet, args).await
        }
        Command::Exec(args) => {
            session.without_format("exec", "leave -o out")?;
            pods::exec(session, &fleet, args).await
        }
        Command::Describe(_) => unsupported("describe"),
        Command::Explain(_) => unsupported("explain"),
        Command::Top(_) => unsupported("top"),
        Command::Trace(_) => unsupported("trace"),
        Command::Attach(_) => unsupported("attach"),
        Command::Cp(_) => unsupported("cp"),
        Command::Evict(_) => unsupported("evict"),
        Command::Retry(_) => unsupported("retry"),
        Command::Drain(_) => unsupported("drain"),
        Command::Uncordon => unsupported("uncordon"),
        Command::Run(_) => unsupported("run"),
        Command::Orphans(_) => unsupported("orphans"),
        Command::Services(_) => unsupported("services"),
        Command::Grpc(_) => unsupported("grpc"),
        Command::Config(_) => unsupported("config"),
        Command::Version(_) => unsupported("version"),
        Command::Completion(_) => unsupported("completion"),
        Command::Man(_) => unsupported("man"),
    }
}

async fn get_what(session: &Session, fleet: &Fleet, what: &GetWhat) -> Result<(), CliError> {
    match what {
        GetWhat::Pods { names, watch } => get::pods(session, fleet, names, *watch).await,
        GetWhat::Node { name, watch } => get::nodes(session, fleet, name.as_deref(), *watch).await,
        GetWhat::Events { about, watch } => events::run(session, fleet, about.as_deref(), *watch).await,
        GetWhat::Secrets { names } => {
            get_objects::run(session, fleet, ObjectKind::Secret, names, WatchArgs::default()).await
        }
        GetWhat::ConfigMaps { names } => {
            get_objects::run(session, fleet, ObjectKind::ConfigMap, names, WatchArgs::default()).await
        }
        GetWhat::PersistentVolumes { names, watch } => {
            without_namespace(session, "get persistentvolumes")?;
            get_objects::run(session, fleet, ObjectKind::PersistentVolume, names, *watch).await
        }
        GetWhat::PersistentVolumeClaims { names, watch } => {
            get_objects::run(session, fleet, ObjectKind::PersistentVolumeClaim, names, *watch).await
        }
        GetWhat::Services { .. } => unsupported("get services"),
        GetWhat::Volumes { .. } => unsupported("get volumes"),
        GetWhat::Images { .. } => unsupported("get images"),
        GetWhat::Sources => unsupported("get sources"),
        GetWhat::Config => configuration::get(session, fleet).await,
    }
}

/// The error of a command that needs the agent.
fn unsupported(name: &str) -> Result<(), CliError> {
    Err(CliError::Usage {
        message: format!("`keelson {name}` calls the agent of this machine and takes no --etcd"),
        hint: "run it on the node itself; apply, delete, logs, exec and get of pods, node, events, secrets, configmaps, pv, pvc and config take --etcd"
            .into(),
    })
}
